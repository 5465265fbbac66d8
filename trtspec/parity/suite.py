"""A whole run: from a spec to its report.

Knows where the reference, the engines and the server of a spec come from, which checks there are, and what they share.
Knows neither how a check works nor how a report looks.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from trtspec.build.sources import Sources
from trtspec.decoding.detokenize import continuation_ids
from trtspec.decoding.methods import METHODS, make_drafter
from trtspec.decoding.sampling import SamplingParams
from trtspec.errors import TrtspecError
from trtspec.models.source import ModelSource
from trtspec.parity.checkpoint import CHECKPOINT_CHECKS, CheckpointChecks, CheckpointTrial
from trtspec.parity.draws import DRAWS, check_draws
from trtspec.parity.greedy import GREEDY, SPECULATION, check_greedy, check_speculation, greedy_answers
from trtspec.parity.prompts import Prompt, read_prompts, spread
from trtspec.parity.result import Check, Report, Verdict
from trtspec.parity.sampled import SAMPLED, check_sampled
from trtspec.parity.subjects import Answer, InProcess, Server, Subject
from trtspec.parity.trial import Case, Trial
from trtspec.parity.yardstick import TOLERANCES, Logits, Yardstick
from trtspec.runtime.engine import EngineConfig, map_weights
from trtspec.runtime.llama import Llama
from trtspec.runtime.local import draft_engines
from trtspec.runtime.reference import ReferenceSampler
from trtspec.runtime.torch_runtime import TorchRuntime
from trtspec.spec.schema import Spec
from trtspec.triton.client import Client
from trtspec.triton.models.tokenization import Tokenization
from trtspec.triton.server import state_dir_of
from trtspec.triton.server_state import connect_host, running
from trtspec.trtllm.checkpoint import Checkpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHECKS = (GREEDY, SPECULATION, SAMPLED, DRAWS)
ENGINES, SERVER, CHECKPOINT = "engines", "server", "checkpoint"
_STATISTICAL = (SAMPLED, DRAWS)
_EVERY = 4  # one prompt of so many is decoded again without drafts


class Observer(Protocol):
    """Is told how a run goes on."""

    def started(self, check: str, subject: str) -> None:
        """A check, or another piece of work, begins."""

    def advance(self, fraction: float) -> None:
        """How much of it is done."""

    def finished(self, check: Check) -> None:
        """What came out."""


@dataclass(frozen=True)
class Selection:
    """What of a spec's parity section is run.

    Attributes:
        engines, server, checkpoint: the subjects; `server` None runs the server's checks if a server of this spec is
            running.
        url: `host:port` of the server's gRPC, where it is not the spec's own.
        checks: names of checks, those of checkpoints (`CHECKPOINT_CHECKS`) among them.
        prompt: line number of the only prompt; None takes `parity.num_prompts` of the file.
    """

    engines: bool = True
    server: bool | None = None
    checkpoint: bool = False
    url: str | None = None
    checks: tuple[str, ...] = CHECKS + CHECKPOINT_CHECKS
    prompt: int | None = None


def run(
    spec: Spec,
    selection: Selection,
    reproduce: Callable[[str, str, int | None], str],
    observer: Observer,
) -> Report:
    """Check what was built from a spec against the reference sampler.

    Args:
        spec: the spec.
        selection: what of it.
        reproduce: the command that runs one check of one subject again, on one prompt or all.
        observer: is told how it goes on.

    Raises:
        TrtspecError: prompts, models, engines or server are missing or do not belong together.
    """
    prompts = read_prompts(spec.prompts_path)
    if selection.prompt is None:
        prompts = spread(prompts, spec.parity.num_prompts)
    elif not (prompts := [prompt for prompt in prompts if prompt.number == selection.prompt]):
        raise TrtspecError(f"no prompt on line {selection.prompt}", where=str(spec.prompts_path))
    url = server_url(spec, selection)
    subjects = [name for name, asked in ((ENGINES, selection.engines), (SERVER, url is not None)) if asked]
    checks: list[Check] = []
    settings: dict[str, Any] = {
        "spec": str(spec.source),
        "prompts": str(spec.prompts_path),
        "prompt_numbers": [prompt.number for prompt in prompts],
        "max_tokens": spec.parity.max_tokens,
    }
    if selection.checkpoint:
        sources = Sources(spec)
        for role in spec.models:
            checks += checkpoint_checks(spec, role, sources, prompts, selection.checks, reproduce, observer)
    if subjects:
        configs = engine_configs(spec)
        observer.started("reference", "loading the models")
        workbench = Workbench(spec, configs)
        lossy = is_lossy(configs["target"])
        names = [check for check in selection.checks if not (lossy and check in _STATISTICAL)]
        num_statistical = len(subjects) * sum(check in _STATISTICAL for check in names)
        alpha = spec.parity.false_alarm_rate / max(1, num_statistical)
        trial = workbench.trial(prompts, alpha, reproduce, observer.advance)
        for name in subjects:
            with workbench.subject(name, url) as subject:
                checks += run_checks(trial, subject, names, observer)
            if lossy and len(names) < len(selection.checks):
                checks.append(_lossy(name))
                observer.finished(checks[-1])
        settings |= {
            "num_draft_tokens": trial.num_draft_tokens,
            "tolerance": trial.yardstick.tolerance,
            "false_alarm_rate": spec.parity.false_alarm_rate,
            "seed": trial.seed,
        }
    if selection.server is None and url is None:
        checks.append(_not_running(spec))
        observer.finished(checks[-1])
    return Report(name=spec.name, checks=tuple(checks), settings=settings)


def checkpoint_checks(
    spec: Spec,
    role: str,
    sources: Sources,
    prompts: Sequence[Prompt],
    names: Sequence[str],
    reproduce: Callable[[str, str, int | None], str],
    observer: Observer,
) -> Iterator[Check]:
    """The named checks of the checkpoint of one model; needs neither engines nor a server.

    Raises:
        TrtspecError: there is no checkpoint, or it was made from another model.
    """
    if spec.engine.runtime != "tensorrt_llm" or spec.engine.track != "engine":
        raise TrtspecError(
            f"runtime {spec.engine.runtime} on track {spec.engine.track} is built without checkpoints",
            where=spec.where(("engine", "runtime")),
            expected="engine.runtime: tensorrt_llm and engine.track: engine",
            fix="use --subject engines or --subject server",
        )
    directory = spec.checkpoints_dir / role
    checkpoint, source = Checkpoint.load(directory), sources.open(role)
    if checkpoint.record.get("source_fingerprint") not in (None, source.fingerprint()):
        raise TrtspecError(
            f"the checkpoint was made from another state of the model {source.name}",
            where=str(directory),
            fix=f"build it again: trtspec build {spec.source}",
        )
    tokenized = sources.open("target")
    tokenization = _tokenization(tokenized)
    trial = CheckpointTrial(
        role=role,
        checkpoint=checkpoint,
        source=source,
        cases=tuple(_case(tokenized, tokenization, prompt) for prompt in prompts),
        max_tokens=spec.parity.checkpoint.max_tokens,
        answer_tokens=spec.parity.max_tokens,
        given=spec.parity.checkpoint,
        reproduce=reproduce,
        advance=observer.advance,
    )
    observer.started("reference", f"loading the model of {trial.subject}")
    checks = CheckpointChecks(trial)
    for name in (name for name in CHECKPOINT_CHECKS if name in names):
        observer.started(name, trial.subject)
        begin = time.monotonic()
        result = replace(checks.run(name), seconds=time.monotonic() - begin)
        observer.finished(result)
        yield result


def run_checks(trial: Trial, subject: Subject, names: Sequence[str], observer: Observer) -> Iterator[Check]:
    """The named checks of one subject, one after the other."""

    drafted: dict[Case, Answer] = {}

    def greedy() -> Check:
        drafted.update(greedy_answers(trial, subject, trial.cases, trial.num_draft_tokens))
        return check_greedy(trial, subject.name, drafted)

    def speculation() -> Check:
        few = trial.cases[::_EVERY]
        if not drafted:
            drafted.update(greedy_answers(trial, subject, few, trial.num_draft_tokens))
        return check_speculation(trial, subject.name, drafted, greedy_answers(trial, subject, few, 0))

    checks = {
        GREEDY: greedy,
        SPECULATION: speculation if trial.num_draft_tokens else None,
        SAMPLED: lambda: check_sampled(trial, subject),
        DRAWS: (lambda: check_draws(trial, subject)) if trial.num_draws else None,
    }
    for name, check in checks.items():
        if name in names and check is not None:
            observer.started(name, subject.name)
            begin = time.monotonic()
            result = replace(check(), seconds=time.monotonic() - begin)
            observer.finished(result)
            yield result


class Workbench:
    """Models and tokenizer of one spec, loaded once.

    Args:
        spec: the spec.
        configs: of its engines, by role.

    Raises:
        TrtspecError: a model is missing, or an engine was built from another one.
    """

    def __init__(self, spec: Spec, configs: dict[str, EngineConfig]) -> None:
        self._spec, self._configs = spec, configs
        self._source = Sources(spec).open("target")
        built_from = configs["target"].stamp.get("source_fingerprint")
        if built_from not in (None, self._source.fingerprint()):
            raise TrtspecError(
                f"the engine was built from another state of the model {self._source.name}",
                where=str(configs["target"].path),
                fix=f"build it again: trtspec build {spec.source}",
            )
        self._tokenization = _tokenization(self._source)
        self._method = METHODS.get(spec.speculation.method)

    def trial(
        self,
        prompts: Sequence[Prompt],
        alpha: float,
        reproduce: Callable[[str, str, int | None], str],
        advance: Callable[[float], None],
    ) -> Trial:
        """What the checks share; loads the reference."""
        parity, target, method = self._spec.parity, self._configs["target"], self._method
        given = parity.num_draft_tokens
        num_draft_tokens = self._spec.default_num_draft_tokens if given is None else given
        yardstick = Yardstick(
            target=self._reference(),
            draft=EngineLogits(self._configs[method.engines[0]]) if method and method.engines else None,
            vocab_size=target.vocab_size,
            end_ids=target.eos_token_ids,
            decode=self._tokenization.decode,
            piece=partial(_piece, self._source.tokenizer()),
            tolerance=TOLERANCES[self._spec.target.dtype] if parity.tolerance is None else parity.tolerance,
        )
        return Trial(
            yardstick=yardstick,
            cases=tuple(self.case(prompt) for prompt in prompts),
            max_tokens=parity.max_tokens,
            num_draft_tokens=num_draft_tokens if method else 0,  # an engine that drafts by itself is not told how much
            samplings=(
                SamplingParams(temperature=1.0),
                SamplingParams(temperature=parity.temperature, top_k=parity.top_k, top_p=parity.top_p),
            ),
            num_samples=parity.num_samples,
            num_draws=parity.num_draws,
            seed=parity.seed,
            alpha=alpha,
            context=target.max_seq_len,
            reproduce=reproduce,
            advance=advance,
        )

    def _reference(self) -> Logits:
        """What the target has to answer: as its model does, or, where that is quantised, as its checkpoint does.

        How far the checkpoint is from the model is the matter of its own checks.
        """
        target = self._configs["target"]
        quantization = target.pretrained.get("quantization", {})
        if target.runtime != "torch" and any(quantization.get(key) for key in ("quant_algo", "kv_cache_quant_algo")):
            return EngineLogits(target)
        return ReferenceSampler(self._source)

    def case(self, prompt: Prompt) -> Case:
        """A prompt with the chat template applied, as text and as ids."""
        case = _case(self._source, self._tokenization, prompt)
        longest = int(self._configs["target"].build["max_input_len"])
        if len(case.ids) > longest:
            raise TrtspecError(
                f"the prompt has {len(case.ids)} tokens",
                where=f"{self._spec.prompts_path}:{prompt.number}",
                expected=f"at most {longest}, engine.max_input_len",
            )
        return case

    @contextmanager
    def subject(self, name: str, url: str | None) -> Iterator[Subject]:
        """One subject, ready to generate, for the length of a `with` block."""
        if name == SERVER:
            with Client(url or "") as client:
                yield Server(client, self._spec.serving.call_timeout_s * 10)
            return
        runtimes = {role: self._runtime(role) for role in self._configs}
        speculation, engines, method = self._spec.speculation, draft_engines(runtimes), self._method
        drafter = None if method is None else partial(
            make_drafter,
            speculation.method,
            engines,
            speculation.acceptance,
            **method.chosen(getattr(speculation, speculation.method, None)),
        )  # fmt: skip
        yield InProcess(
            runtimes["target"].execute,
            drafter,
            end_ids=self._configs["target"].eos_token_ids,
            decode=self._tokenization.decode,
            continuation_ids=continuation_ids(self._tokenization.token_to_id),
            contexts=(self._configs["target"].max_seq_len, method.draft_context(engines) if method else None),
        )

    def _runtime(self, role: str) -> TorchRuntime:
        config = self._configs[role]
        given = getattr(self._spec.serving.kv_cache_bytes, role)
        return TorchRuntime(
            config.path.parent,
            kv_cache_bytes=given or 2 * _sequence_bytes(config),
            num_threads=self._spec.serving.num_threads,
        )


class EngineLogits:
    """All logits of a text from a torch engine, in one forward pass without a cache.

    Args:
        config: of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        loaded = map_weights(config)
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


def _tokenization(source: ModelSource) -> Tokenization:
    """The tokenization that the served pipeline uses."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        path.write_text(source.tokenizer_json(), encoding="utf-8")
        return Tokenization(path, bos_token_id=source.config.bos_token_id, add_bos=source.add_bos)


def _case(source: ModelSource, tokenization: Tokenization, prompt: Prompt) -> Case:
    """A prompt with the chat template applied, if there is one."""
    text = prompt.text
    if source.chat_template is not None:
        text = source.chat([{"role": "user", "content": text}])
    return Case(prompt.number, text, tuple(tokenization.encode(text)))


def _piece(tokenizer: Tokenizer, token: int) -> str:
    """One id as text; spelled as in the vocabulary where it is a part of a character."""
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return (tokenizer.id_to_token(token) or "") if "\ufffd" in text else text


def server_url(spec: Spec, selection: Selection) -> str | None:
    """Address (gRPC) of the server that is checked: the one asked for, or the one of this spec if it is running."""
    if selection.url or selection.server is False:
        return selection.url
    state = running(state_dir_of(spec))
    if state is None and selection.server:
        return f"{connect_host(spec.serving.host)}:{spec.serving.grpc_port}"
    return state.grpc_url if state else None


def engine_configs(spec: Spec) -> dict[str, EngineConfig]:
    """Configs of the engines that were built from a spec, by role."""
    return {role: EngineConfig.load(spec.engines_dir / role) for role in spec.models}


def is_lossy(target: EngineConfig) -> bool:
    """Whether the engine's own rule of acceptance gives up the target's distribution for sampled requests."""
    return (target.stamp.get("speculation") or {}).get("lossless") is False


def _lossy(subject: str) -> Check:
    return Check(
        name=SAMPLED,
        subject=subject,
        hypothesis="sampled tokens follow the distribution of the reference",
        verdict=Verdict.NOT_APPLICABLE,
        evidence="lossy: the engine was built with typical acceptance, which favours likely tokens",
    )


def _not_running(spec: Spec) -> Check:
    return Check(
        name="all",
        subject=SERVER,
        hypothesis="the server answers as the reference does",
        verdict=Verdict.NOT_APPLICABLE,
        evidence=f"no server of this spec is running; start one with: trtspec serve {spec.source} --detach",
    )
