"""What a run is made of: models and tokenizer of one spec loaded once, the reference, and each kind of subject.

Knows where these come from; no check, and no report.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trtspec.build.sources import Sources
from trtspec.decoding.detokenize import continuation_ids
from trtspec.decoding.methods import IN_ENGINE, METHODS, make_drafter
from trtspec.decoding.sampling import SamplingParams, Uniforms
from trtspec.errors import TrtspecError
from trtspec.models.source import ModelSource
from trtspec.parity.sampled import PENALISED
from trtspec.parity.served import UNKNOWN
from trtspec.parity.subjects import Query, Subject
from trtspec.parity.subjects.engine_model import EngineModel
from trtspec.parity.subjects.in_process import InProcess
from trtspec.parity.subjects.runner import Runner, runner_subject
from trtspec.parity.subjects.server import Server
from trtspec.parity.subjects.trace import Recorded
from trtspec.parity.trace import read
from trtspec.parity.trial import Case, Trial
from trtspec.parity.yardstick import Logits, Yardstick, tolerance_of
from trtspec.prompts import Prompt
from trtspec.runtime.engine import EngineConfig, map_weights
from trtspec.runtime.llama import Llama
from trtspec.runtime.local import draft_engines
from trtspec.runtime.reference import ReferenceSampler
from trtspec.runtime.torch_runtime import TorchRuntime
from trtspec.spec.schema import Spec
from trtspec.triton.client import Client
from trtspec.triton.models.tokenization import Tokenization
from trtspec.trtllm.checkpoint import FP8, INT8_SQ

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ENGINES, SERVER, ENGINE_MODEL, RUNNER, TRACE = "engines", "server", "engine-model", "runner", "trace"
SUBJECTS = (ENGINES, SERVER, ENGINE_MODEL, RUNNER, TRACE)
REMOTE = (SERVER, ENGINE_MODEL)  # behind a server
BY_ACTIVATION = {"fp8": FP8, "int8": INT8_SQ}  # type of activations -> whose budget holds for what they are rounded to


@dataclass(frozen=True)
class Circumstances:
    """How a run was called.

    Attributes:
        reproduce: the command that runs one check (or `check:part`) of one subject again, on one prompt or all.
        advance: told the fraction done within a check.
        wanted: whether a part of a check is to run.
        note, noted: see `Trial`.
        alpha: probability that one statistical check raises a false alarm.
        num_samples, seconds: what the sampled check may draw, or how long it may take.
    """

    reproduce: Callable[[str, str, int | None], str]
    advance: Callable[[float], None]
    wanted: Callable[[str, str], bool]
    note: Callable[[str, dict[str, Any]], None]
    noted: Callable[[str, Query], dict[str, Any] | None]
    alpha: float
    num_samples: int
    seconds: float | None = None


class Workbench:
    """Models and tokenizer of one spec, loaded once.

    Args:
        spec: the spec.
        configs: of its engines, by role.

    Raises:
        TrtspecError: a model is missing, or an engine was built from another one.
    """

    def __init__(self, spec: Spec, configs: Mapping[str, EngineConfig]) -> None:
        self._spec, self._configs = spec, configs
        self._source = Sources(spec).open("target")
        built_from = configs["target"].stamp.get("source_fingerprint")
        if built_from not in (None, self._source.fingerprint()):
            raise TrtspecError(
                f"the engine was built from another state of the model {self._source.name}",
                where=str(configs["target"].path),
                fix=f"build it again: trtspec build {spec.source}",
            )
        self._tokenization = tokenization_of(self._source)
        self._method = METHODS.get(spec.speculation.method)

    @cached_property
    def yardstick(self) -> Yardstick:
        """The reference."""
        parity, target, method = self._spec.parity, self._configs["target"], self._method
        proposers = method.proposers(self._configs) if method else ()
        reference, precision, tolerance = self._reference()
        return Yardstick(
            target=reference,
            draft=EngineLogits(self._configs[proposers[0]]) if proposers else None,
            vocab_size=target.vocab_size,
            end_ids=target.eos_token_ids,
            decode=self._tokenization.decode,
            piece=partial(_piece, self._source.tokenizer()),
            tolerance=tolerance if parity.tolerance is None else parity.tolerance,
            precision=precision,
        )

    def trial(self, prompts: Sequence[Prompt], name: str, given: Circumstances) -> Trial:
        """What the checks of one subject share."""
        parity = self._spec.parity
        return Trial(
            yardstick=self.yardstick,
            cases=tuple(self.case(prompt) for prompt in prompts),
            max_tokens=parity.max_tokens,
            num_draft_tokens=self.num_draft_tokens if name != ENGINE_MODEL else 0,
            samplings=samplings(self._spec),
            num_samples=given.num_samples,
            seconds=given.seconds,
            num_draws=parity.num_draws,
            seed=parity.seed,
            alpha=given.alpha,
            context=self._configs["target"].max_seq_len,
            reproduce=given.reproduce,
            advance=given.advance,
            encode=self._tokenization.encode_word,
            wanted=given.wanted,
            note=given.note,
            noted=given.noted,
        )

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens a cycle; 0 where the engine drafts by itself, and is not told how much."""
        asked, target = self._spec.parity.num_draft_tokens, self._configs["target"]
        foreign = target.runtime == UNKNOWN
        usual = target.stamp["num_draft_tokens"] if foreign else self._spec.default_num_draft_tokens
        return (usual if asked is None else asked) if foreign or self._method else 0

    @property
    def reference_dtype(self) -> str:
        """Type in which the reference computes; a quantised checkpoint is executed in float32."""
        own = self._spec.parity.reference_dtype == "subject" and not self._is_quantized
        return self._spec.target.dtype if own else "float32"

    @property
    def _is_quantized(self) -> bool:
        """Whether the engine was made from a quantised checkpoint."""
        target = self._configs["target"]
        quantization = target.pretrained.get("quantization") or {}
        return target.runtime != "torch" and any(quantization.get(key) for key in ("quant_algo", "kv_cache_quant_algo"))

    def _reference(self) -> tuple[Logits, str, float]:
        """What the target has to answer, the precision in which the subject computes it, and the tolerance for that.

        As its model does, or, where that is quantised, as its checkpoint does: how far the checkpoint is from the model
        is the matter of its own checks.
        """
        dtype = self._spec.target.dtype
        if self._is_quantized:
            executed = EngineLogits(self._configs["target"])
            precision = next((BY_ACTIVATION[kind] for kind in sorted(executed.activations)), dtype)
            return executed, precision, tolerance_of(dtype, activations=executed.activations)
        if self._source.is_quantized:
            raise TrtspecError(
                f"the weights of {self._source.name} are published quantised, and the reference does not execute those",
                where=str(self._source.path),
                expected="the model that they were made from, or an engine that trtspec quantised",
            )
        return ReferenceSampler(self._source, self.reference_dtype), dtype, tolerance_of(dtype, self.reference_dtype)

    def case(self, prompt: Prompt) -> Case:
        """A prompt with the chat template applied, as text and as ids."""
        case = case_of(self._source, self._tokenization, prompt)
        longest = int(self._configs["target"].build["max_input_len"])
        if len(case.ids) > longest:
            raise TrtspecError(
                f"the prompt has {len(case.ids)} tokens",
                where=f"{self._spec.prompts_path}:{prompt.number}",
                expected=f"at most {longest}, engine.max_input_len",
            )
        return case

    @contextmanager
    def subject(self, name: str, url: str | None = None, trace: Path | None = None) -> Iterator[Subject]:
        """One subject, ready to generate, for the length of a `with` block.

        Args:
            name: one of `SUBJECTS`.
            url: of the server.
            trace: the trace file.
        """
        text: dict[str, Any] = {
            "end_ids": self._configs["target"].eos_token_ids,
            "decode": self._tokenization.decode,
            "continuation_ids": continuation_ids(self._tokenization.token_to_id),
        }
        if name in REMOTE:
            timeout_s = self._spec.serving.call_timeout_s * 10
            with Client(url or "") as client:
                if name == SERVER:
                    encode, decode = self._tokenization.encode, self._tokenization.decode
                    yield Server(client, timeout_s, encode=encode, decode=decode)
                else:
                    yield EngineModel(client, timeout_s=timeout_s, **text)
        elif name == TRACE:
            if trace is None:
                raise TrtspecError("no trace is given", where="--subject trace", fix="name the file with --trace FILE")
            yield Recorded(read(trace))
        elif name == RUNNER:
            speculation = self._spec.speculation
            runners = {role: Runner(config.path.parent) for role, config in self._configs.items()}
            yield runner_subject(
                runners, speculation.method, acceptance=speculation.acceptance, settings=self._settings(), **text
            )
        else:
            yield self._in_process(text)

    def _in_process(self, text: Mapping[str, Any]) -> InProcess:
        runtimes = {role: self._runtime(role) for role in self._configs}
        speculation, engines, method = self._spec.speculation, draft_engines(runtimes), self._method
        drafter = None
        if method is not None:
            name, acceptance = speculation.method, speculation.acceptance
            drafter = partial(make_drafter, name, engines, acceptance, **self._settings())
        return InProcess(
            runtimes["target"].execute,
            drafter,
            contexts=(self._configs["target"].max_seq_len, method.draft_context(engines) if method else None),
            logits=self._configs["target"].returns_generation_logits,
            uniforms=Uniforms,
            drafts_itself=speculation.method in IN_ENGINE,
            **text,
        )

    def _settings(self) -> dict[str, Any]:
        """The method's own settings in the spec."""
        method, speculation = self._method, self._spec.speculation
        return method.chosen(getattr(speculation, speculation.method, None)) if method else {}

    def _runtime(self, role: str) -> TorchRuntime:
        config = self._configs[role]
        given = self._spec.serving.kv_cache_bytes.of(role)
        return TorchRuntime(
            config.path.parent,
            kv_cache_bytes=given or 2 * _sequence_bytes(config),
            num_threads=self._spec.serving.num_threads,
        )


def samplings(spec: Spec) -> tuple[SamplingParams, ...]:
    """Settings of the sampled check: the whole distribution, one that is cut, and one with penalties."""
    parity = spec.parity
    cut = SamplingParams(temperature=parity.temperature, top_k=parity.top_k, top_p=parity.top_p)
    return SamplingParams(temperature=1.0), cut, PENALISED


class EngineLogits:
    """All logits of a text from a torch engine, in one forward pass without a cache.

    Args:
        config: of the engine.

    Attributes:
        activations: types that the engine rounds inputs of layers, keys or values to.
    """

    def __init__(self, config: EngineConfig) -> None:
        loaded = map_weights(config)
        self.activations = {quantizer.kind for quantizer in loaded.activations.values() if quantizer.kind}
        self._model = Llama(config.model, loaded.weights, activations=loaded.activations)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float32 `[len(ids), vocab]`: row i is what follows `ids[: i + 1]`."""
        with torch.inference_mode():
            rows = self._model.forward(torch.tensor([list(ids)]), self._model.new_cache(1, len(ids)), 0)
        return rows[0].numpy()


def _sequence_bytes(config: EngineConfig) -> int:
    """Bytes of the KV cache of one sequence of full length."""
    model = config.model
    # Of a quantised checkpoint of TensorRT-LLM, all is computed in float32.
    item = 2 if config.pretrained["dtype"] != "float32" and config.runtime == "torch" else 4
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_size * item * config.max_seq_len


def tokenization_of(source: ModelSource) -> Tokenization:
    """The tokenization that the served pipeline uses."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        path.write_text(source.tokenizer_json(), encoding="utf-8")
        return Tokenization(path, bos_token_id=source.config.bos_token_id, add_bos=source.add_bos)


def case_of(source: ModelSource, tokenization: Tokenization, prompt: Prompt) -> Case:
    """A prompt with the chat template applied, if there is one."""
    text = prompt.text
    if source.chat_template is not None:
        text = source.chat([{"role": "user", "content": text}])
    return Case(prompt.number, text, tuple(tokenization.encode(text)))


def _piece(tokenizer: Tokenizer, token: int) -> str:
    """One id as text; spelled as in the vocabulary where it is a part of a character."""
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return (tokenizer.id_to_token(token) or "") if "\ufffd" in text else text


def engine_configs(spec: Spec) -> dict[str, EngineConfig]:
    """Configs of the engines that were built from a spec, by role."""
    return {role: EngineConfig.load(spec.engines_dir / role) for role in spec.models}
