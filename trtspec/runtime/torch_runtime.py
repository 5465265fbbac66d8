"""Runs an engine with PyTorch: answers engine calls from its weights and a prefix cache.

Of an engine for TensorRT-LLM, compiled or only prepared, it executes the checkpoint, rounding what the engine rounds.
Heads inside such an engine (Medusa, EAGLE, ReDrafter) and lookahead are not run: it decodes plainly, which gives the
same greedy output. An engine of its own drafts with the heads or modules that are in it.

Knows requests, sequences and the forward pass; what becomes of a row of logits is the decoding core's matter. Does not
know YAML, tokenizers or Triton.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from trtspec.decoding.engine_call import EngineRequest, EngineResult
from trtspec.decoding.sampler import TokenSampler
from trtspec.decoding.token_tree import TokenTree, verify_tree
from trtspec.decoding.verify import verify
from trtspec.errors import TrtspecError
from trtspec.runtime.batching import Batcher
from trtspec.runtime.cuda_graphs import GraphedLlama
from trtspec.runtime.early_exit import begin
from trtspec.runtime.engine import EngineConfig, map_weights
from trtspec.runtime.kv_cache import CacheStatistics, PrefixCache, Sequence
from trtspec.runtime.llama import Llama
from trtspec.runtime.medusa import Medusa
from trtspec.runtime.mtp import Modules
from trtspec.runtime.passes import Calls, Step, logits, most_likely, run_pass

_MAX_PASS = 512  # tokens in one forward pass; bounds its memory, and how long other requests wait for it
_WAIT_S = 30.0  # how long a request waits for those in flight to leave it room in the KV cache

T = TypeVar("T")


class TorchRuntime:
    """One engine, to be called from any number of threads.

    On a CPU, requests that wait for a forward pass at the same time share one, with attention over what is each one's
    own. What drafts inside the engine takes turns with them, and so do all passes on a GPU.

    Args:
        engine_dir: an engine directory.
        device: `cpu`, `cuda` or `cuda:N`.
        kv_cache_bytes: what all KV caches together may take.
        num_threads: CPU threads of a forward pass, set for the whole process; None leaves PyTorch's setting.
        here: calls what computes, in whatever thread that is to happen.

    Raises:
        TrtspecError: not an engine, broken files, a checkpoint with faults, a KV cache that does not hold one sequence
            of max_seq_len, or no such device.
    """

    def __init__(
        self,
        engine_dir: Path,
        *,
        device: str = "cpu",
        kv_cache_bytes: int,
        num_threads: int | None = None,
        here: Calls = lambda work: work(),
    ) -> None:
        self.config = EngineConfig.load(Path(engine_dir))
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        _check_device(device)
        loaded = map_weights(self.config)
        # The rope table need not be longer than the engine's sequences.
        model = replace(self.config.model, max_position_embeddings=self.config.max_seq_len)
        if torch.device(device).type == "cuda":
            # Two: a draft model whose tokens were all accepted has not seen the last of them.
            widest = max(2, self.config.max_draft_len + 1)
            self._model: Llama = GraphedLlama(model, loaded.weights, device, loaded.activations, widest=widest)
        else:
            self._model = Llama(model, loaded.weights, device, loaded.activations)
        self._here = here
        self._begin(kv_cache_bytes, lambda model, steps: here(lambda: run_pass(model, steps)))

    @classmethod
    def of_model(
        cls, config: EngineConfig, model: Llama, *, kv_cache_bytes: int, run: Callable[..., list[Any]] = run_pass
    ) -> TorchRuntime:
        """An engine without files, of a model that is in memory.

        Args:
            config: what the files would say.
            model: with the heads or modules that drafts are made with, where `config` says that there are some.
            kv_cache_bytes: as of an engine with files.
            run: makes the passes: `run_pass`, or something around it that watches.
        """
        runtime = cls.__new__(cls)
        runtime.config, runtime._model = config, model
        runtime._here = lambda work: work()
        runtime._begin(kv_cache_bytes, run)
        return runtime

    def _begin(self, kv_cache_bytes: int, run: Callable[..., list[Any]]) -> None:
        model = self._model
        self._modules = Modules.of_engine(self.config, model)
        self._medusa = Medusa.of_engine(self.config, model)
        extra_layers = self._modules.num_modules if self._modules else 0
        self._cache = PrefixCache(
            lambda positions: model.new_cache(1, positions, extra_layers), kv_cache_bytes, self.config.max_seq_len
        )
        self._room = threading.Condition()  # guards the cache; notified when a sequence is released
        self._to_logits, self._to_id = partial(logits, model), partial(most_likely, model)  # heads of passes
        most = _MAX_PASS if model.device.type == "cpu" else 1  # a graph is of one sequence, so passes are not shared
        self._passes: Batcher[Step, Any] = Batcher(partial(run, model), most)

    @property
    def statistics(self) -> CacheStatistics:
        """Counters of the prefix cache."""
        return self._cache.statistics

    def announce(self) -> None:
        """Have forward passes wait a moment for a call of `execute` that a thread will make at once, as `announced`."""
        self._passes.announce()

    def execute(
        self, request: EngineRequest, *, cancelled: Callable[[], bool] = lambda: False, announced: bool = False
    ) -> EngineResult:
        """Answer one engine call: generation, or the verification of `draft_tokens` in one forward pass.

        Args:
            request: the call.
            announced: whether `announce` was called for it.
            cancelled: asked before each forward pass, and from time to time while waiting for one.

        Raises:
            TrtspecError: the request does not fit this engine (`where` names the field), has no possible token, or
                found no room in the KV cache in time.
            Cancelled: `cancelled` said so.
        """
        with self._passes.member(announced), self._lent(request) as sequence:
            if request.draft_tokens is None:
                forward = partial(self._forward, sequence, cancelled=cancelled)
                if self._medusa is not None:
                    states = partial(forward, scored=False)
                    return self._medusa.generate(request, sequence, states, partial(self._alone, cancelled=cancelled))
                if self._modules is not None:
                    states = partial(forward, scored=False)
                    return self._modules.generate(request, sequence, states, partial(self._alone, cancelled=cancelled))
                return self._generate(request, sequence.length, forward)
            if request.draft_parents is not None:
                tree = TokenTree(request.draft_tokens, request.draft_parents, request.draft_logits)
                return self._verify_tree(request, tree, sequence, cancelled)
            return self._verify(request, request.draft_tokens, sequence, cancelled)

    def draft(
        self, request: EngineRequest, num_layers: int, *, cancelled: Callable[[], bool] = lambda: False
    ) -> EngineResult:
        """Generate with the first `num_layers` layers, the norm and the head.

        A verification of what was generated, if it comes next, runs only the layers that are left; see `early_exit`.
        The arguments and errors are otherwise those of `execute`.
        """
        with self._passes.member(), self._lent(request) as sequence:
            # All layers have to see the input; its last token waits for the verification.
            if len(unseen := request.input_ids[sequence.length : -1]):
                self._forward(sequence, unseen, 1, _nothing, cancelled, scored=False)
            sequence.begun = None

            def forward(ids: NDArray[np.int32], num_rows: int, head: Callable[[torch.Tensor], T]) -> T:
                def computed() -> T:
                    states = self._model.norm(begin(self._model, sequence, ids, num_layers)[-num_rows:])
                    return head(self._model.scores(states))

                return self._alone(computed, cancelled=cancelled)

            return self._generate(request, sequence.length, forward)

    @contextmanager
    def _lent(self, request: EngineRequest) -> Iterator[Sequence]:
        """The request's sequence, for the length of a `with` block; a request that does not fit is refused."""
        _check_request(request, self.config)
        sequence = self._acquire(request)
        try:
            yield sequence
        except ValueError as error:
            raise TrtspecError(str(error), where=str(self.config.path.parent)) from error
        finally:
            with self._room:
                self._cache.release(sequence)
                self._room.notify_all()

    def _alone(self, work: Callable[[], T], *, cancelled: Callable[[], bool]) -> T:
        """What `work` computes while no forward pass runs."""
        with self._passes.alone(cancelled):
            return self._here(torch.inference_mode()(work))

    def _generate(self, request: EngineRequest, reused: int, forward: Callable[..., Any]) -> EngineResult:
        """Token by token, after `reused` tokens of the input; `forward` is `_forward` behind its sequence."""
        sampler = TokenSampler(request)
        only_ids = _needs_only_argmax(request)
        logits: list[NDArray[np.float32]] = []
        log_probs: list[float] = []
        fresh = request.input_ids[reused:]
        while not sampler.finished:
            if only_ids:
                token = forward(fresh, 1, self._to_id)
                if token is None:
                    raise ValueError("logits: NaN or infinite")
            else:
                row = forward(fresh, 1, self._to_logits)[0]
                token = sampler.next(row)
                if request.return_generation_logits:
                    logits.append(row.copy())  # alone: those of the other requests of the pass may go
                if request.return_log_probs:
                    log_probs.append(sampler.log_probability(row, token))
            sampler.append(token)
            fresh = np.array([token], dtype=np.int32)
        return EngineResult(
            output_ids=np.array(sampler.tokens, dtype=np.int32),
            generation_logits=np.stack(logits) if logits else None,
            log_probs=np.array(log_probs, dtype=np.float32) if log_probs else None,
            reused_tokens=reused,
        )

    def _verify(
        self, request: EngineRequest, drafts: NDArray[np.int32], sequence: Sequence, cancelled: Callable[[], bool]
    ) -> EngineResult:
        """One pass over what is not cached of the input and the drafts, then the rule of the decoding core."""
        reused = sequence.length
        # Ids beyond the vocabulary come from a draft with a longer one. They are never accepted; any id will do here.
        fed = np.minimum(drafts, self.config.vocab_size - 1)
        fresh = np.concatenate([request.input_ids[reused:], fed]).astype(np.int32)
        rows = self._forward(sequence, fresh, len(drafts) + 1, self._to_logits, cancelled)  # [k + 1, V]
        outcome = verify(rows, request)
        sequence.length = len(request.input_ids) + outcome.num_accepted  # forget the rejected drafts
        num_tokens = len(outcome.tokens)
        return EngineResult(
            output_ids=np.array(outcome.tokens, dtype=np.int32),
            generation_logits=rows[:num_tokens] if request.return_generation_logits else None,
            log_probs=None if outcome.log_probs is None else np.array(outcome.log_probs, dtype=np.float32),
            num_draft_tokens=len(drafts),
            num_accepted=outcome.num_accepted,
            reused_tokens=reused,
        )

    def _verify_tree(
        self, request: EngineRequest, tree: TokenTree, sequence: Sequence, cancelled: Callable[[], bool]
    ) -> EngineResult:
        """One pass in which every node sees the context and its ancestors; of the nodes, the accepted path stays."""
        reused = sequence.length
        rows = self._forward(sequence, request.input_ids[reused:], len(tree) + 1, self._to_logits, cancelled, tree)
        outcome = verify_tree(rows, request, tree)
        nodes = list(outcome.nodes)
        sequence.keep(nodes, tree.tokens[nodes])
        return EngineResult(
            output_ids=np.array(outcome.tokens, dtype=np.int32),
            generation_logits=rows if request.return_generation_logits else None,
            log_probs=None if outcome.log_probs is None else np.array(outcome.log_probs, dtype=np.float32),
            num_draft_tokens=len(tree),
            num_accepted=len(nodes),
            reused_tokens=reused,
        )

    def _forward(
        self,
        sequence: Sequence,
        ids: NDArray[np.int32],
        num_rows: int,
        head: Callable[[torch.Tensor], T],
        cancelled: Callable[[], bool],
        tree: TokenTree | None = None,
        scored: bool = True,
    ) -> T:
        """Append `ids` [n] to the sequence; `head` of the last `num_rows` scores [num_rows, rows of the head].

        Where they are not `scored`, it is that of the hidden states [num_rows, hidden].

        The nodes of a `tree` come after the ids. Their keys and values then stand behind the end of the sequence, which
        does not count them: `Sequence.keep` takes in what was accepted.
        """
        num_nodes = 0 if tree is None else len(tree)
        if tree is not None:
            # Ids beyond the vocabulary come from a draft with a longer one and are never accepted; any id will do here.
            ids = np.concatenate([ids, np.minimum(tree.tokens, self.config.vocab_size - 1)])
        # A long input goes in pieces, the odd one first, so that the last one holds all rows.
        cuts = [*range(len(ids) % _MAX_PASS or _MAX_PASS, len(ids), _MAX_PASS), len(ids)]
        first = 0
        for end in cuts[:-1]:
            self._take(Step(sequence, ids[first:end], 1, _nothing, scored=False), cancelled)
            sequence.append(ids[first:end])
            first = end
        places = {} if tree is None else _places(tree, len(ids) - first, self._model.device)
        result: T = self._take(Step(sequence, ids[first:], num_rows, head, scored, places), cancelled)
        sequence.append(ids[first : len(ids) - num_nodes])
        return result

    def _take(self, step: Step, cancelled: Callable[[], bool]) -> Any:
        """A step's result, of a pass that it may share. A sequence that has begun with a draft needs one of its own."""
        return self._passes(step, _MAX_PASS if step.sequence.begun else len(step.ids), cancelled)

    def _acquire(self, request: EngineRequest) -> Sequence:
        """The request's sequence; waits while those in flight leave no room for it."""
        positions = len(request.input_ids) + request.max_new_tokens
        if self._medusa is not None:  # a tree that does not fit is cut
            positions = min(positions + self._medusa.room, self.config.max_seq_len)
        with self._room:
            sequence = self._cache.acquire(request.input_ids, positions)
            if sequence is None:
                with self._passes.absent():
                    sequence = self._room.wait_for(
                        lambda: self._cache.acquire(request.input_ids, positions), timeout=_WAIT_S
                    )
        if sequence is None:
            raise TrtspecError(
                f"no room for {positions} tokens in {_WAIT_S:g} s, other requests fill the KV cache",
                where="kv_cache_bytes",
                fix="raise it or send fewer requests at a time",
            )
        return sequence


def _nothing(states: torch.Tensor) -> None:
    """The head of a pass that only fills the cache."""


def _places(tree: TokenTree, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What the tokens of a pass of `length` see and where they stand, the last ones being the nodes of `tree`."""
    first = length - len(tree)
    mask, positions = np.tri(length, dtype=np.bool_), np.arange(length)
    mask[first:, first:] = tree.mask()
    positions[first:] = first + tree.depths()
    return {"mask": torch.from_numpy(mask).to(device), "positions": torch.from_numpy(positions).to(device)}


def _needs_only_argmax(request: EngineRequest) -> bool:
    """Whether the largest raw logit is all that the request asks for."""
    return (
        request.sampling.greedy
        and not request.sampling.penalised
        and request.embedding_bias is None
        and not request.bad_words
        and not request.min_new_tokens
        and not request.return_generation_logits
        and not request.return_log_probs
    )


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise TrtspecError(f"cannot be used: {reason}", where=f"device {device!r}", expected="cpu or cuda") from error


def _check_request(request: EngineRequest, config: EngineConfig) -> None:
    """Refuse a request that this engine cannot run.

    Raises:
        TrtspecError: with the field as `where`.
    """
    vocab_size, limit = config.vocab_size, config.max_seq_len
    _check_ids("input_ids", request.input_ids, vocab_size)
    length = len(request.input_ids)
    if length >= limit:
        raise TrtspecError(f"{length} tokens", where="input_ids", expected=f"fewer than max_seq_len {limit}")
    if not 1 <= request.max_new_tokens <= limit - length:
        raise TrtspecError(
            f"{request.max_new_tokens} new tokens after {length}",
            where="max_new_tokens",
            expected=f"1 to {limit - length} (max_seq_len {limit})",
        )
    if request.embedding_bias is not None and request.embedding_bias.ndim != 1:
        raise TrtspecError(
            f"shape {list(request.embedding_bias.shape)}", where="embedding_bias", expected=f"[{vocab_size}]"
        )
    if not all(request.bad_words):
        raise TrtspecError("an empty sequence of ids", where="bad_words")
    if request.return_generation_logits and not config.returns_generation_logits:
        raise TrtspecError(
            f"the engine {config.path.parent} was built without generation logits",
            where="return_generation_logits",
            fix="build it with engine.gather_generation_logits: true",
        )
    drafts, logits = request.draft_tokens, request.draft_logits
    if drafts is None:
        for name, given in (("draft_logits", logits), ("draft_parents", request.draft_parents)):
            if given is not None:
                raise TrtspecError("given without draft_tokens", where=name)
        return
    if logits is not None and (logits.ndim != 2 or len(logits) != len(drafts)):
        raise TrtspecError(
            f"shape {list(logits.shape)}", where="draft_logits", expected=f"[{len(drafts)}, {vocab_size}]"
        )
    _check_ids("draft_tokens", drafts, vocab_size if logits is None else max(vocab_size, logits.shape[1]))
    if len(drafts) > config.max_draft_len:
        raise TrtspecError(
            f"{len(drafts)} tokens",
            where="draft_tokens",
            expected=f"at most {config.max_draft_len}, the max_draft_len of the engine {config.path.parent}",
        )
    if request.draft_parents is not None and len(drafts) >= _MAX_PASS:
        raise TrtspecError(
            f"a tree of {len(drafts)} nodes", where="draft_parents", expected=f"fewer than {_MAX_PASS}, for one pass"
        )
    if request.max_new_tokens != len(drafts) + 1:
        raise TrtspecError(
            f"{request.max_new_tokens} in the verification of {len(drafts)} draft tokens",
            where="max_new_tokens",
            expected=f"{len(drafts) + 1}",
        )


def _check_ids(field: str, ids: NDArray[np.int32], vocab_size: int) -> None:
    if ids.ndim != 1 or len(ids) == 0 or ids.dtype.kind not in "iu":
        raise TrtspecError(f"{ids.dtype} of shape {list(ids.shape)}", where=field, expected="a row of token ids")
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise TrtspecError(f"id {wrong} is not in the vocabulary", where=field, expected=f"0 to {vocab_size - 1}")
