"""The prefix cache by itself, with tensors whose content says which prefix they stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trtspec.decoding.engine_call import EngineRequest
from trtspec.errors import TrtspecError
from trtspec.runtime.kv_cache import BLOCK, PrefixCache, Sequence
from trtspec.runtime.llama import KVCache
from trtspec.runtime.torch_runtime import TorchRuntime

BYTES = 2 * 8  # of one position in `new_cache`: float64 keys and values of one layer, one head, one dimension


def new_cache(positions: int) -> KVCache:
    return KVCache(*(torch.zeros(1, 1, 1, positions, 1, dtype=torch.float64) for _ in range(2)))


def marks(ids: np.ndarray) -> torch.Tensor:
    """[L] float64: a number for each position that depends on every id up to there, as keys and values do."""
    value, result = 7.0, []
    for token in ids.tolist():
        value = (value * 31.0 + token + 1.0) % 1_000_003.0
        result.append(value)
    return torch.tensor(result, dtype=torch.float64)


def fill(sequence: Sequence, ids: np.ndarray) -> None:
    """What a forward pass over the rest of `ids` does."""
    begin = sequence.length
    sequence.cache.k[0, 0, 0, begin : len(ids), 0] = marks(ids)[begin:]
    sequence.cache.v[0, 0, 0, begin : len(ids), 0] = -marks(ids)[begin:]
    sequence.append(ids[begin:])


def run(cache: PrefixCache, ids: np.ndarray, positions: int) -> int:
    """One request: acquire, fill, release; the number of reused tokens."""
    sequence = cache.acquire(ids, positions)
    assert sequence is not None
    reused = sequence.length
    fill(sequence, ids)
    cache.release(sequence)
    return reused


def row(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def test_a_conversation_is_continued_in_place() -> None:
    cache = PrefixCache(new_cache, 100 * BLOCK * BYTES, BLOCK)
    assert run(cache, row(5, 6, 7), 20) == 0
    assert run(cache, row(5, 6, 7, 8), 20) == 3
    assert run(cache, row(5, 6, 7, 8), 20) == 3  # the last token is computed again, for its logits
    assert cache.statistics.copies == 0
    assert cache.nbytes == BLOCK * BYTES


def test_a_shared_beginning_is_copied_and_the_other_conversation_kept() -> None:
    cache = PrefixCache(new_cache, 100 * BLOCK * BYTES, BLOCK)
    run(cache, row(1, 2, 3, 4, 5), 20)
    assert run(cache, row(1, 2, 3, 9), 20) == 3
    assert cache.statistics.copies == 1
    assert run(cache, row(1, 2, 3, 4, 5, 6), 20) == 5
    assert run(cache, row(1, 2, 3, 9, 9), 20) == 4


def test_a_conversation_that_repeats_an_older_one_is_copied_once() -> None:
    """The older one holds more of every input, but only by the last token, which is computed again anyway."""
    cache = PrefixCache(new_cache, 100 * BLOCK * BYTES, BLOCK)
    run(cache, row(1, 2, 3, 4, 5, 6), 20)
    for length in (3, 4, 5, 6):
        assert run(cache, row(1, 2, 3, 4, 5, 6)[:length], 20) == length - 1
    assert cache.statistics.copies == 1


def test_what_is_generated_beyond_the_common_part_is_forgotten() -> None:
    """A draft's sequence holds its own proposal; the next request goes on after what the target accepted of it."""
    cache = PrefixCache(new_cache, 100 * BLOCK * BYTES, BLOCK)
    sequence = cache.acquire(row(1, 2, 3), 20)
    assert sequence is not None
    fill(sequence, row(1, 2, 3, 40, 41, 42))  # three drafts behind the input
    cache.release(sequence)
    again = cache.acquire(row(1, 2, 3, 40, 50), 20)
    assert again is sequence
    assert again.length == 4


def test_a_longer_conversation_moves_to_a_longer_cache() -> None:
    cache = PrefixCache(new_cache, 3 * BLOCK * BYTES, 2 * BLOCK)
    run(cache, row(1, 2, 3), BLOCK)
    assert run(cache, row(1, 2, 3, 4), BLOCK + 1) == 3
    assert cache.nbytes == 2 * BLOCK * BYTES


def test_the_least_recently_used_is_evicted() -> None:
    cache = PrefixCache(new_cache, 2 * BLOCK * BYTES, BLOCK)
    run(cache, row(1, 1, 1), 20)
    run(cache, row(2, 2, 2), 20)
    run(cache, row(1, 1, 1), 20)
    run(cache, row(3, 3, 3), 20)  # 2 goes
    assert cache.statistics.evictions == 1
    assert run(cache, row(1, 1, 1, 1), 20) == 3
    assert run(cache, row(2, 2, 2, 2), 20) == 0


def test_sequences_in_use_are_neither_taken_nor_evicted() -> None:
    cache = PrefixCache(new_cache, 2 * BLOCK * BYTES, BLOCK)
    first = cache.acquire(row(1, 2, 3), 20)
    assert first is not None
    fill(first, row(1, 2, 3))
    second = cache.acquire(row(1, 2, 3), 20)
    assert second is not None
    assert second is not first
    assert second.length == 2
    assert cache.acquire(row(1, 2, 3), 20) is None
    cache.release(first)
    assert cache.acquire(row(1, 2, 3), 20) is first


def test_where_there_is_room_for_one_the_other_conversation_gives_way() -> None:
    cache = PrefixCache(new_cache, BLOCK * BYTES, BLOCK)
    run(cache, row(1, 2, 3, 4), 20)
    assert run(cache, row(1, 2, 9), 20) == 2
    assert run(cache, row(1, 2, 3, 4), 20) == 2


def test_a_budget_for_less_than_one_sequence_is_refused() -> None:
    with pytest.raises(
        TrtspecError, match=rf"kv_cache_bytes: .* one sequence of 512 tokens; expected at least {512 * BYTES}"
    ):
        PrefixCache(new_cache, 512 * BYTES - 1, 512)


def test_budget_and_content_hold_in_any_order_of_requests(rng: np.random.Generator) -> None:
    """Random conversations over a few ids, several in flight: the reused positions always stand for the input."""
    budget = 5 * BLOCK * BYTES
    cache = PrefixCache(new_cache, budget, 2 * BLOCK)
    in_flight: list[Sequence] = []
    refused = reused = 0
    texts = [rng.integers(0, 2, size=3).astype(np.int32)]
    for _ in range(600):
        if in_flight and rng.random() < 0.4:
            cache.release(in_flight.pop(int(rng.integers(len(in_flight)))))
            continue
        text = texts[int(rng.integers(len(texts)))]
        text = text[: int(rng.integers(1, len(text) + 1))]
        text = np.concatenate([text, rng.integers(0, 2, size=int(rng.integers(0, 40))).astype(np.int32)])[: 2 * BLOCK]
        texts = [*texts[-8:], text]
        sequence = cache.acquire(text, int(rng.integers(len(text), 2 * BLOCK + 1)))
        assert cache.nbytes <= budget
        if sequence is None:
            assert in_flight
            refused += 1
            continue
        assert sequence.length < len(text)
        assert np.array_equal(sequence.tokens[: sequence.length], text[: sequence.length])
        assert torch.equal(sequence.cache.k[0, 0, 0, : sequence.length, 0], marks(text)[: sequence.length])
        assert torch.equal(sequence.cache.v[0, 0, 0, : sequence.length, 0], -marks(text)[: sequence.length])
        reused += sequence.length
        fill(sequence, text)
        in_flight.append(sequence)
    assert refused > 10
    assert reused > 1000
    assert cache.statistics.copies > 10
    assert cache.statistics.evictions > 10


@pytest.mark.parametrize("num_drafts", [1, 4, 8])
def test_rollback_leaves_the_cache_of_a_fresh_prefill(
    target_engine: Path, target: TorchRuntime, rng: np.random.Generator, num_drafts: int
) -> None:
    """After any number of accepted drafts, keys, values and logits are those of a runtime that never saw a draft."""
    ids = rng.integers(3, 280, size=9).astype(np.int32)
    for num_right in [*range(num_drafts + 1), *range(num_drafts + 1)]:
        right = target.execute(EngineRequest(ids, num_drafts + 1)).output_ids
        drafts = right[:num_drafts].copy()
        if num_right < num_drafts:
            drafts[num_right] = (drafts[num_right] + 1) % 280
        result = target.execute(EngineRequest(ids, num_drafts + 1, draft_tokens=drafts))
        assert result.num_accepted == num_right
        assert result.output_ids.tolist() == right[: num_right + 1].tolist()

        ids = np.concatenate([ids, result.output_ids])
        fresh = TorchRuntime(target_engine, kv_cache_bytes=1 << 22)
        expected = fresh.execute(EngineRequest(ids, 1, return_generation_logits=True))
        length = len(ids) - 1  # the own token was never fed
        kept = max(target._cache._sequences, key=lambda sequence: sequence.common_prefix(ids))
        assert kept.common_prefix(ids) >= length
        (prefilled,) = fresh._cache._sequences
        for name in ("k", "v"):
            ours, theirs = (getattr(s.cache, name)[:, :, :, :length] for s in (kept, prefilled))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        actual = target.execute(EngineRequest(ids, 1, return_generation_logits=True))
        assert actual.reused_tokens == length
        assert expected.generation_logits is not None
        np.testing.assert_allclose(actual.generation_logits, expected.generation_logits, rtol=0, atol=1e-4)
