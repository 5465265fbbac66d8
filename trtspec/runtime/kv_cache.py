"""The sequences whose keys and values a runtime keeps, found again by their longest common prefix.

Knows token ids, KV tensors and a byte budget. Does not know weights, sampling or requests, and is not thread-safe:
the runtime calls it under its own lock. Forward passes may write to sequences in use meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from trtspec.errors import TrtspecError
from trtspec.runtime.llama import KVCache

BLOCK = 256  # a sequence's capacity is a multiple of so many positions, so that a conversation grows rarely


@dataclass(frozen=True)
class Begun:
    """Tokens whose keys and values of the first layers alone are in a cache, behind a sequence.

    Attributes:
        tokens: int32 [n].
        states: [n, hidden], what came out of those layers.
        num_layers: how many layers.
    """

    tokens: np.ndarray
    states: torch.Tensor
    num_layers: int


class Sequence:
    """Token ids 0..length-1 and their keys and values. Rolling back is a smaller `length`, nothing else.

    Attributes:
        tokens: int32 [capacity], valid up to `length`.
        length: positions whose keys and values are in `cache`.
        input_length: length of the input of the last request; what stands behind it was generated.
        drafter_length: tokens that a drafter with layers of its own behind the model's has seen.
        begun: tokens behind `length` that only the first layers have seen.
        last_state: a length, and the hidden state [hidden] of the last of so many tokens; what heads draft from.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.tokens = np.empty(cache.capacity, dtype=np.int32)
        self.length = 0
        self.input_length = 0
        self.drafter_length = 0
        self.begun: Begun | None = None
        self.last_state: tuple[int, torch.Tensor] | None = None
        self.in_use = False

    def append(self, ids: np.ndarray) -> None:
        """Note that the keys and values of `ids` int32 [n] now follow."""
        self.tokens[self.length : self.length + len(ids)] = ids
        self.length += len(ids)
        self.begun = self.last_state = None

    def keep(self, places: list[int], ids: np.ndarray) -> None:
        """Append `ids` int32 [n], whose keys and values stand `places` [n] (rising) positions behind `length`."""
        end = self.length + len(ids)
        for store in (self.cache.k, self.cache.v):
            store[:, :, :, self.length : end] = store[:, :, :, [self.length + place for place in places]]
        self.append(ids)

    def common_prefix(self, ids: np.ndarray, more_than: int = 0) -> int:
        """How many leading tokens of `ids` int32 [L] this sequence holds; 0 when not more than `more_than`.

        While it is in use only its input counts: a pass may write over what stands behind, over a rejected draft.
        """
        length = min(self.length, self.input_length) if self.in_use else self.length
        shorter = min(length, len(ids))
        if shorter <= more_than or self.tokens[more_than] != ids[more_than]:  # the cheap test, before the whole one
            return 0
        differs = self.tokens[:shorter] != ids[:shorter]
        first = int(differs.argmax())
        shared = first if differs[first] else shorter
        return shared if shared > more_than else 0

    def copy_prefix(self, source: Sequence, length: int) -> None:
        """Become the first `length` positions of `source`."""
        for ours, theirs in ((self.cache.k, source.cache.k), (self.cache.v, source.cache.v)):
            ours[:, :, :, :length] = theirs[:, :, :, :length]
        self.tokens[:length] = source.tokens[:length]
        self.length = length
        self.drafter_length = min(length, source.drafter_length)


@dataclass
class CacheStatistics:
    """Counters since the start: input tokens found in the cache and computed, prefixes copied, sequences evicted."""

    reused_tokens: int = 0
    computed_tokens: int = 0
    copies: int = 0
    evictions: int = 0


class PrefixCache:
    """Sequences of past requests within a byte budget, the least recently used evicted first.

    Args:
        new_cache: makes an empty KV cache of so many positions.
        budget_bytes: never exceeded, also not while a sequence moves to a longer cache.
        max_positions: longest sequence that will be asked for.

    Raises:
        TrtspecError: the budget does not hold one sequence of `max_positions`.
    """

    def __init__(self, new_cache: Callable[[int], KVCache], budget_bytes: int, max_positions: int) -> None:
        self._new_cache = new_cache
        self._bytes_per_position = new_cache(1).nbytes
        self.budget_bytes = budget_bytes
        self.max_positions = max_positions
        self.nbytes = 0  # of all sequences, in use or not
        self.statistics = CacheStatistics()
        self._sequences: list[Sequence] = []  # least recently used first
        needed = max_positions * self._bytes_per_position
        if needed > budget_bytes:
            raise TrtspecError(
                f"a KV cache of {budget_bytes} bytes does not hold one sequence of {max_positions} tokens",
                where="kv_cache_bytes",
                expected=f"at least {needed}",
                fix="raise kv_cache_bytes or build the engine with a smaller max_seq_len",
            )

    def acquire(self, ids: np.ndarray, positions: int) -> Sequence | None:
        """A sequence for input `ids` int32 [L] with room for `positions`, holding as much of the input as is known.

        At most L-1 tokens are reused: the last one is computed again, for its logits. The sequence of the same
        conversation (its last input is a prefix of this one) is taken over, without what was generated beyond the
        common part; of another one that shares a prefix, the prefix is copied.

        Returns:
            The sequence, marked as in use until `release`; None when those in use leave no room for it.
        """
        # Without the last one: of two sequences that hold the rest, the later one goes on, and nothing is copied.
        source, shared = self._longest_prefix(ids[:-1])
        goes_on = source is not None and shared >= source.input_length - 1
        capacity = min(-(-positions // BLOCK) * BLOCK, self.max_positions)
        in_place = source is not None and not source.in_use and source.cache.capacity >= positions
        if source is not None and in_place and goes_on:
            sequence = source
        elif self._make_room(capacity, keep=source):
            sequence = self._add(capacity)
            if source is not None:
                sequence.copy_prefix(source, shared)
                self.statistics.copies += 1
                if goes_on and not source.in_use:
                    self._remove(source)
        elif source is not None and in_place:  # no room beside it: that conversation gives way
            sequence = source
        elif self._make_room(capacity, keep=None):
            sequence, shared = self._add(capacity), 0
        else:
            return None
        if shared < sequence.length:
            sequence.length, sequence.begun = shared, None
        sequence.drafter_length = min(sequence.drafter_length, shared)
        sequence.input_length, sequence.in_use = len(ids), True
        self._sequences.remove(sequence)
        self._sequences.append(sequence)
        self.statistics.reused_tokens += shared
        self.statistics.computed_tokens += len(ids) - shared
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Keep the sequence for later requests."""
        sequence.in_use = False

    def _longest_prefix(self, ids: np.ndarray) -> tuple[Sequence | None, int]:
        """The sequence that shares the most leading tokens with `ids`, of several the latest idle one; and how many."""
        found, shared = None, 0
        for sequence in sorted(reversed(self._sequences), key=lambda each: each.in_use):
            if length := sequence.common_prefix(ids, more_than=shared):
                found, shared = sequence, length
        return found, shared

    def _make_room(self, capacity: int, keep: Sequence | None) -> bool:
        """Evict idle sequences, but not `keep`, until one of `capacity` positions fits; whether it does."""
        limit = self.budget_bytes - capacity * self._bytes_per_position
        for sequence in list(self._sequences):
            if self.nbytes <= limit:
                break
            if not sequence.in_use and sequence is not keep:
                self._remove(sequence)
                self.statistics.evictions += 1
        return self.nbytes <= limit

    def _add(self, capacity: int) -> Sequence:
        sequence = Sequence(self._new_cache(capacity))
        self._sequences.append(sequence)
        self.nbytes += sequence.cache.nbytes
        return sequence

    def _remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self.nbytes -= sequence.cache.nbytes
