"""Runs an engine with PyTorch: answers engine calls from memory-mapped weights and a prefix cache.

Knows requests, sequences and the forward pass; what becomes of a row of logits is the decoding core's matter. Does not
know YAML, tokenizers or Triton.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from trtspec.decoding.engine_call import Cancelled, EngineRequest, EngineResult
from trtspec.decoding.sampler import TokenSampler
from trtspec.decoding.verify import verify
from trtspec.errors import TrtspecError
from trtspec.runtime.engine import EngineConfig, map_weights
from trtspec.runtime.kv_cache import CacheStatistics, PrefixCache, Sequence
from trtspec.runtime.llama import Llama, linear

_MAX_PASS = 512  # tokens in one forward pass; bounds its memory, and how long other requests wait for it
_WAIT_S = 30.0  # how long a request waits for those in flight to leave it room in the KV cache

T = TypeVar("T")


class TorchRuntime:
    """One engine, to be called from any number of threads: forward passes take turns, requests share nothing else.

    Args:
        engine_dir: an engine directory of this runtime.
        device: `cpu`, `cuda` or `cuda:N`.
        kv_cache_bytes: what all KV caches together may take.
        num_threads: CPU threads of a forward pass, set for the whole process; None leaves PyTorch's setting.

    Raises:
        TrtspecError: not an engine of this runtime, broken files, a KV cache that does not hold one sequence of
            max_seq_len, or no such device.
    """

    def __init__(
        self, engine_dir: Path, *, device: str = "cpu", kv_cache_bytes: int, num_threads: int | None = None
    ) -> None:
        self.config = EngineConfig.load(Path(engine_dir))
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        _check_device(device)
        weights = map_weights(self.config)
        # The rope table need not be longer than the engine's sequences.
        model = replace(self.config.model, max_position_embeddings=self.config.max_seq_len)
        self._model = Llama(model, weights, device)
        self._cache = PrefixCache(
            lambda positions: self._model.new_cache(1, positions), kv_cache_bytes, self.config.max_seq_len
        )
        self._turn = threading.Condition()  # guards forward passes and the cache; notified when a sequence is released

    @property
    def statistics(self) -> CacheStatistics:
        """Counters of the prefix cache."""
        return self._cache.statistics

    def execute(self, request: EngineRequest, *, cancelled: Callable[[], bool] = lambda: False) -> EngineResult:
        """Answer one engine call: generation, or the verification of `draft_tokens` in one forward pass.

        Args:
            request: the call.
            cancelled: asked before each forward pass.

        Raises:
            TrtspecError: the request does not fit this engine (`where` names the field), has no possible token, or
                found no room in the KV cache in time.
            Cancelled: `cancelled` said so.
        """
        _check_request(request, self.config)
        sequence = self._acquire(request)
        try:
            if request.draft_tokens is None:
                return self._generate(request, sequence, cancelled)
            return self._verify(request, request.draft_tokens, sequence, cancelled)
        except ValueError as error:
            raise TrtspecError(str(error), where=str(self.config.path.parent)) from error
        finally:
            with self._turn:
                self._cache.release(sequence)
                self._turn.notify_all()

    def _generate(self, request: EngineRequest, sequence: Sequence, cancelled: Callable[[], bool]) -> EngineResult:
        """Token by token."""
        reused = sequence.length
        sampler = TokenSampler(request)
        only_ids = _needs_only_argmax(request)
        logits: list[NDArray[np.float32]] = []
        log_probs: list[float] = []
        fresh = request.input_ids[reused:]
        while not sampler.finished:
            if only_ids:
                token = self._forward(sequence, fresh, 1, self._most_likely, cancelled)
            else:
                row = self._forward(sequence, fresh, 1, self._logits, cancelled)[0]
                token = sampler.next(row)
                if request.return_generation_logits:
                    logits.append(row)
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
        rows = self._forward(sequence, fresh, len(drafts) + 1, self._logits, cancelled)  # [k + 1, V]
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

    def _forward(
        self,
        sequence: Sequence,
        ids: NDArray[np.int32],
        num_rows: int,
        head: Callable[[torch.Tensor], T],
        cancelled: Callable[[], bool],
    ) -> T:
        """Append `ids` [n] to the sequence; `head` of the last `num_rows` hidden states [num_rows, hidden]."""
        # A long input goes in pieces, the odd one first, so that the last one holds all rows.
        cuts = [*range(len(ids) % _MAX_PASS or _MAX_PASS, len(ids), _MAX_PASS), len(ids)]
        begin = 0
        for end in cuts:
            if cancelled():
                raise Cancelled
            with self._turn, torch.inference_mode():
                piece = torch.from_numpy(ids[begin:end].astype(np.int64)).to(self._model.device)
                states = self._model.hidden(piece[None], sequence.cache, sequence.length)[0]
                sequence.append(ids[begin:end])
                begin = end
                if end == len(ids):
                    return head(states[-num_rows:])
        raise AssertionError("the last piece returns")

    def _logits(self, states: torch.Tensor) -> NDArray[np.float32]:
        """float32 [n, V]."""
        return self._model.head(states).cpu().numpy()

    def _most_likely(self, states: torch.Tensor) -> int:
        """The likeliest id after the one state [1, hidden]; a reduced head is not spread over the vocabulary."""
        value, row = linear(states, self._model.weights["lm_head.weight"]).max(dim=-1)
        if not math.isfinite(value.item()):
            raise ValueError("logits: NaN or infinite")
        ids = self._model.head_ids
        return int((row if ids is None else ids[row]).item())

    def _acquire(self, request: EngineRequest) -> Sequence:
        """The request's sequence; waits while those in flight leave no room for it."""
        positions = len(request.input_ids) + request.max_new_tokens
        with self._turn:
            sequence = self._turn.wait_for(lambda: self._cache.acquire(request.input_ids, positions), timeout=_WAIT_S)
        if sequence is None:
            raise TrtspecError(
                f"no room for {positions} tokens in {_WAIT_S:g} s, other requests fill the KV cache",
                where="kv_cache_bytes",
                fix="raise it or send fewer requests at a time",
            )
        return sequence


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
        if logits is not None:
            raise TrtspecError("given without draft_tokens", where="draft_logits")
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
