"""Who decodes in `benchmarks/methods.py`: the methods of the torch runtime, and transformers' `generate`.

Each answers one prompt greedily and says how long decoding took. The clock starts with the first tokens, so that the
prompt's own pass is nobody's burden. Knows engines and models; not prompts' categories, and no figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol
from unittest.mock import patch

import torch

from trtspec.build.sources import Sources
from trtspec.decoding.cycle import Drafter, Generation, Proposal, Request, Verification, generate
from trtspec.decoding.draft_target import Target
from trtspec.decoding.engine_call import EngineCall, EngineRequest, EngineResult
from trtspec.decoding.methods import METHODS, make_drafter
from trtspec.decoding.token_tree import TokenTree
from trtspec.decoding.tree import BRANCHING
from trtspec.errors import TrtspecError
from trtspec.models.source import ModelSource, SharedDraft
from trtspec.parity.workbench import engine_configs
from trtspec.runtime.local import draft_engines
from trtspec.runtime.medusa import MedusaDrafter, TreeWalk
from trtspec.runtime.torch_runtime import TorchRuntime
from trtspec.spec.schema import Spec

_KV_CACHE_BYTES = 2**28  # where the spec leaves it open


@dataclass(frozen=True)
class Pass:
    """One pass of the target.

    Attributes:
        drafted: draft tokens that it verified, of a tree the levels.
        accepted: how many of them were kept.
        draft_s, target_s: seconds for proposing and for the pass.
    """

    drafted: int
    accepted: int
    draft_s: float
    target_s: float


@dataclass(frozen=True)
class Timed:
    """One answer.

    Attributes:
        ids: its tokens, without the end id.
        num_tokens: tokens that the clock covers, the end id counts.
        seconds: from the first tokens to the end.
        passes: those that the clock covers; empty for foreign decoders.
    """

    ids: tuple[int, ...]
    num_tokens: int
    seconds: float
    passes: tuple[Pass, ...] = ()


class Contender(Protocol):
    """Whoever decodes."""

    name: str

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Timed:
        """The greedy answer."""
        ...


@dataclass
class Meter:
    """Notes passes as they happen: what the target's calls took, and what was spent on drafts before them."""

    passes: list[Pass] = field(default_factory=list)
    num_tokens: int = 0
    _drafted: int = 0
    _draft_s: float = 0.0
    _inside: list[tuple[int, int, float]] = field(default_factory=list)  # of a call that drafts by itself

    def clear(self) -> None:
        """Forget the passes so far."""
        self.passes, self.num_tokens = [], 0

    def drafting(self, drafted: int, seconds: float) -> None:
        """So many tokens in a row were proposed for the next pass."""
        self._drafted, self._draft_s = drafted, seconds

    def walked(self, accepted: int) -> None:
        """A pass inside a call kept so many."""
        self._inside.append((self._drafted, accepted, self._draft_s))
        self.drafting(0, 0.0)

    def target(self, execute: EngineCall) -> EngineCall:
        """`execute`, metered."""

        def call(request: EngineRequest) -> EngineResult:
            begin = time.perf_counter()
            result = execute(request)
            seconds = time.perf_counter() - begin
            if request.draft_tokens is not None:
                passes = [(self._drafted, result.num_accepted, self._draft_s)]
            elif self._inside:
                passes = list(self._inside)
                seconds -= sum(draft_s for _, _, draft_s in passes)
            else:  # token by token; what an empty proposal took is the first one's
                passes = [(0, 0, self._draft_s), *[(0, 0, 0.0)] * (len(result.output_ids) - 1)]
            self.passes += [Pass(*what, target_s=seconds / len(passes)) for what in passes]
            self.num_tokens += len(result.output_ids)
            self._inside.clear()
            self.drafting(0, 0.0)
            return result

        return call


@dataclass(frozen=True)
class MeteredDrafter:
    """A drafter whose proposals are timed."""

    drafter: Drafter
    meter: Meter

    def propose(self, generation: Generation, num_draft_tokens: int) -> Proposal:
        """See `Drafter.propose`."""
        begin = time.perf_counter()
        proposal = self.drafter.propose(generation, num_draft_tokens)
        self.meter.drafting(proposal.depth, time.perf_counter() - begin)
        return proposal

    def learn(self, verification: Verification) -> None:
        """See `Drafter.learn`."""
        self.drafter.learn(verification)


@contextmanager
def heads_metered(meter: Meter) -> Iterator[None]:
    """Within the `with` block, Medusa's trees and walks are noted."""
    grow, through = MedusaDrafter.tree, TreeWalk.through

    def tree(self: MedusaDrafter, state: torch.Tensor, size: int) -> TokenTree:
        begin = time.perf_counter()
        grown = grow(self, state, size)
        meter.drafting(int(grown.depths().max()) + 1, time.perf_counter() - begin)
        return grown

    def walk(self: TreeWalk, *args: Any) -> list[int]:
        nodes = through(self, *args)
        meter.walked(len(nodes))
        return nodes

    with patch.object(MedusaDrafter, "tree", tree), patch.object(TreeWalk, "through", walk):
        yield


class Ours:
    """One method of the torch runtime, with the engines of a spec.

    Args:
        spec: the spec; its engines are built.
        plain: leave its drafter out.
    """

    def __init__(self, spec: Spec, *, plain: bool = False) -> None:
        self.name: str = "none" if plain else spec.speculation.method
        self.spec, self.configs = spec, engine_configs(spec)
        if self.name not in ("none", "medusa", *METHODS):
            raise TrtspecError(
                f"method {self.name} cannot be measured here",
                where=spec.where(("speculation", "method")),
                expected=", ".join((*METHODS, "medusa")),
            )
        self._runtimes = {role: self._open(role) for role in self.configs if not plain or role == "target"}
        self._end_ids = tuple(self.configs["target"].eos_token_ids)
        row = METHODS.get(self.name)
        self._settings = row.chosen(getattr(spec.speculation, self.name, None)) if row else {}

    def _open(self, role: str) -> TorchRuntime:
        serving = self.spec.serving
        return TorchRuntime(
            self.configs[role].path.parent,
            kv_cache_bytes=serving.kv_cache_bytes.of(role) or _KV_CACHE_BYTES,
            num_threads=serving.num_threads,
        )

    @property
    def target(self) -> tuple[str, str]:
        """What tells its target from others: fingerprint and dtype."""
        return str(self.configs["target"].stamp.get("source_fingerprint")), self.spec.target.dtype

    @property
    def most_drafts(self) -> int:
        """Most tokens in a row that a pass verifies."""
        if self.name == "tree":
            branching = self._settings.get("branching", BRANCHING)
            return len(branching) if isinstance(branching, tuple) else 1
        if self.name == "medusa":
            return max(map(len, self.configs["target"].stamp["speculation"]["choices"]))
        return self.spec.default_num_draft_tokens if self.name in METHODS else 0

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Timed:
        """See `Contender.answer`."""
        meter = Meter()
        target, watched = self._runtimes["target"], nullcontext() if self.name != "medusa" else heads_metered(meter)
        request, drafter = self._request(prompt, max_tokens), self._drafter(meter)
        with watched:
            blocks = generate(request, drafter, Target(meter.target(target.execute)))
            generation = next(blocks).generation
            meter.clear()
            begin = time.perf_counter()
            list(blocks)
            seconds = time.perf_counter() - begin
        if generation.draft_error:
            raise TrtspecError(
                f"the drafter of method {self.name} failed: {generation.draft_error}", where=str(self.spec.source)
            )
        return Timed(tuple(generation.token_ids.tolist()), meter.num_tokens, seconds, tuple(meter.passes))

    def _request(self, prompt: Sequence[int], max_tokens: int) -> Request:
        row = METHODS.get(self.name)
        return Request(
            prompt_ids=list(prompt),
            max_tokens=max_tokens,
            end_ids=self._end_ids,
            num_draft_tokens=self.spec.default_num_draft_tokens if row else 0,
            # of a short answer too, something must stand behind the first block
            plain_chunk_tokens=min(self.spec.serving.plain_chunk_tokens, max(max_tokens // 4, 1)),
            target_context=self.configs["target"].max_seq_len,
            draft_context=row.draft_context(draft_engines(self._runtimes)) if row else None,
        )

    def _drafter(self, meter: Meter) -> MeteredDrafter | None:
        if self.name not in METHODS:
            return None
        engines, acceptance = draft_engines(self._runtimes), self.spec.speculation.acceptance
        return MeteredDrafter(make_drafter(self.name, engines, acceptance, **self._settings), meter)


class Transformers:
    """`generate` of transformers.

    Args:
        name: what it is called.
        model: of the target.
        end_ids: ids that end an answer.
        options: further keywords of `generate`.
    """

    def __init__(self, name: str, model: Any, end_ids: Sequence[int], **options: Any) -> None:
        self.name = f"transformers {name}"
        self._model, self._end_ids, self._options = model, tuple(end_ids), options

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Timed:
        """See `Contender.answer`."""
        stamps: list[tuple[float, int]] = []

        def stamp(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            stamps.append((time.perf_counter(), input_ids.shape[1]))
            return torch.zeros(len(input_ids), dtype=torch.bool)

        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=list(self._end_ids),
                pad_token_id=self._end_ids[0],
                stopping_criteria=[stamp],
                **self._options,
            )[0]
        seconds = time.perf_counter() - stamps[0][0]
        new = output[len(prompt) :].tolist()
        kept = new[:-1] if new and new[-1] in self._end_ids else new
        return Timed(tuple(kept), len(output) - stamps[0][1], seconds)


def transformers_contenders(specs: Sequence[Spec], end_ids: Sequence[int]) -> list[Transformers]:
    """Plain `generate`, and its counterparts of draft_target, early_exit and ngram where a spec has the method."""
    dtype = getattr(torch, specs[0].target.dtype)
    target = hugging_face(Sources(specs[0]).open("target"), dtype)
    found = [Transformers("plain", target, end_ids)]
    for spec in specs:
        speculation, k = spec.speculation, spec.default_num_draft_tokens
        if speculation.method == "ngram":
            lookup = {"max_matching_ngram_size": speculation.ngram.max_ngram} if speculation.ngram else {}
            found.append(Transformers("prompt lookup", target, end_ids, prompt_lookup_num_tokens=k, **lookup))
        if speculation.method == "draft_target":
            draft = _always_drafting(hugging_face(Sources(spec).open("draft"), dtype), k)
            found.append(Transformers("assisted", target, end_ids, assistant_model=draft))
        if speculation.method == "early_exit" and speculation.early_exit:
            # The draft is the target itself, so its number of drafts is read from the target's configuration.
            _always_drafting(target, k)
            exit_after = {"assistant_early_exit": speculation.early_exit.layer}
            found.append(Transformers("early exit", target, end_ids, **exit_after))
    return found


def hugging_face(source: ModelSource, dtype: torch.dtype) -> Any:
    """transformers' model with the weights of `source`."""
    import transformers

    kind = getattr(transformers, source.config.architecture)
    tensors = {name: source.tensor(name).to(dtype) for name in source.tensor_names() if name != "d2t"}
    reduced = isinstance(source, SharedDraft) and len(tensors["lm_head.weight"]) < source.config.vocab_size
    rows = tensors.pop("lm_head.weight") if reduced else None
    config = kind.config_class(**source.config.to_hf())
    config.tie_word_embeddings |= reduced  # a head until its own is in place
    model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, attn_implementation="sdpa")
    if rows is not None:
        model.lm_head = ReducedHead(rows, source.head_ids(), source.config.vocab_size)  # type: ignore[attr-defined]
    return model.eval()


class ReducedHead(torch.nn.Module):
    """A head over some ids of the vocabulary; the others are impossible.

    Args:
        rows: `[n, hidden]`.
        ids: int64 `[n]`, the id of each row.
        vocab_size: ids in all.
    """

    def __init__(self, rows: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> None:
        super().__init__()
        self.rows, self.ids, self.vocab_size = rows, ids, vocab_size

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits `[.., vocab_size]`."""
        logits = states.new_full((*states.shape[:-1], self.vocab_size), torch.finfo(states.dtype).min)
        logits[..., self.ids] = torch.nn.functional.linear(states, self.rows)
        return logits


def _always_drafting(model: Any, num_draft_tokens: int) -> Any:
    """The model with a fixed number of drafts, as ours has it, whatever its confidence."""
    settings = model.generation_config
    settings.num_assistant_tokens = num_draft_tokens
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    return model
