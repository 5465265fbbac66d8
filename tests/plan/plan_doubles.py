"""Plans as a planner would make them, from a few lines of arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trtspec.plan.result import Assumed, Memory, MemoryRow, MethodPlan, Plan, Point

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (1, 2, 3, 4, 5, 6)


def point(batch: int, length: int, rate: float = 0.75, **changes: Any) -> Point:
    """A draft token costs 5 % of a pass, and verification grows with batch and length."""

    def tokens(accepted: float) -> float:
        return sum(accepted**place for place in range(length + 1))

    plain = 20.0 + 0.05 * batch
    cycle = plain * (1 + 0.05 * length + 0.004 * batch * length)
    emitted, low, high = tokens(rate), tokens(rate - 0.04), tokens(rate + 0.04)
    made = Point(
        batch=batch,
        num_draft_tokens=length,
        tokens_per_pass=emitted,
        interval=(low, high),
        cycle_ms=cycle,
        plain_ms=plain,
        speed_up=emitted * plain / cycle,
        speed_up_interval=(low * plain / cycle, high * plain / cycle),
        tokens_per_second=1000 * batch * emitted / cycle,
        tpot_ms=cycle / emitted,
        ttft_ms=180.0 + cycle,
        fits=batch <= 32,
    )
    return replace(made, **changes)


def points(rate: float = 0.75, lengths: Sequence[int] = LENGTHS, batches: Sequence[int] = BATCHES) -> tuple[Point, ...]:
    return tuple(point(batch, length, rate) for batch in batches for length in lengths)


def row(gpu: int, role: str, weights: float, cache: float, left: float, **changes: Any) -> MemoryRow:
    made = MemoryRow(
        gpu=gpu,
        role=role,
        weights_gb=weights,
        kv_cache_gb=cache,
        kv_needed_gb=0.8 * cache,
        activations_gb=1.5,
        logits_gb=0.4,
        context_gb=0.6,
        left_gb=left,
        fraction=0.5,
    )
    return replace(made, **changes)


def plan(method: str = "draft_target", **changes: Any) -> Plan:
    """Two GPUs, four methods in all states, batches 1 to 64."""
    own = MethodPlan(method, f"{method}, 1B proposes", points=points(), crossover=64, notes=("measured on 40 prompts",))
    none = MethodPlan("none", "plain decoding", points=points(0.0, (0,)))
    ngram = MethodPlan("ngram", "prompt lookup", points=points(0.4), crossover=32)
    tree = MethodPlan("tree", "token tree", notes=("not measured",))
    medusa = MethodPlan("medusa", "Medusa heads", lossless=False, refused="it needs heads; train some")
    rows = [
        row(gpu, *rest)
        for gpu in (0, 1)
        for rest in (("draft", 2.5, 6.0, 69.0), ("target", 35.0, 24.0, 7.5))  # as sharded over both
    ]
    made = Plan(
        name="llama-70b",
        gpu="H100-SXM",
        times_source="roofline of H100-SXM at 69 % of its bandwidth",
        acceptance_source="trace of 40 prompts",
        temperature=0.0,
        context=2048,
        prompt=512,
        batches=BATCHES,
        max_batch=256,
        methods=(own, none, ngram, tree, medusa),
        memory=Memory(
            device_gb=80.0, batch=32, context=4096, rows=tuple(rows), notes=("the draft loads first",), max_batch=40
        ),
        acceptance_rate=0.75,
        assumed=tuple(
            Assumed(rate, batch, best.num_draft_tokens, best.speed_up)
            for batch in BATCHES
            for rate in (0.5, 0.6, 0.7, 0.8, 0.9)
            for best in [max((point(batch, length, rate) for length in LENGTHS), key=lambda each: each.speed_up)]
        ),
        break_even=dict(zip(BATCHES, (0.06, 0.08, 0.1, 0.15, 0.25, 0.4, None), strict=True)),
        schedule={1: 5, 2: 5, 4: 5, 8: 4, 16: 3, 32: 1, 64: 0},
        fractions={"draft": 0.085, "target": 0.9},
        num_gpus=2,
        warnings=("prompts look alike",),
    )
    return replace(made, **changes)
