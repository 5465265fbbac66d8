"""What stands beside what: arms of one load test, two load tests, a plan and what was measured.

Knows results and the JSON that `trtspec plan` writes; no server and no page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trtspec.bench.kept import differences
from trtspec.bench.serve import OFF, ON
from trtspec.bench.serve_figures import DECODING, WHOLE, Ratio, ratio
from trtspec.bench.serve_result import CONCURRENCY, Load, Result, Row
from trtspec.errors import TrtspecError

# Settings that change what is measured, not how precisely. What the server is and drafts may be what is compared.
_MATTERS = ("prompts", "requests", "seconds", "max_tokens", "temperature", "unique")


@dataclass(frozen=True)
class Beside:
    """How many times as fast one side is as the other, at one load.

    Attributes:
        arm, base: the two sides; of two load tests both are the arm.
        whole, decoding: see `serve_figures`; None: one side has nothing to compare.
    """

    load: Load
    arm: str
    base: str
    whole: Ratio | None
    decoding: Ratio | None


@dataclass(frozen=True)
class Factors:
    """What a speed-up is made of: tokens_per_pass x plain_ms / cycle_ms.

    Attributes:
        tokens_per_pass: emitted tokens a pass of the target, for one sequence.
        cycle_ms: from one pass of the target to the next one while drafting.
        plain_ms: the same without drafts, that is for a token.
    """

    tokens_per_pass: float
    cycle_ms: float
    plain_ms: float

    @classmethod
    def measured(cls, rows: Sequence[Row], base: Sequence[Row]) -> Factors | None:
        """Those of requests that draft and of the same ones without; None: no passes are known behind the first one.

        A prompt's own pass brings the first block and counts for nothing, as in the ratio of decoding.
        """
        drafted, plain = ([row.answer for row in side if not row.answer.error] for side in (rows, base))
        tokens, seconds = (sum(answer.later[place] for answer in drafted) for place in (0, 1))
        plain_tokens, plain_s = (sum(answer.later[place] for answer in plain) for place in (0, 1))
        passes = sum(max(answer.passes - 1, 0) for answer in drafted)
        if not (passes and plain_tokens):
            return None
        return cls(tokens / passes, 1e3 * seconds / passes, 1e3 * plain_s / plain_tokens)


@dataclass(frozen=True)
class Planned:
    """A plan's speed-up of the spec's own method over plain decoding, with its interval."""

    batch: int
    num_draft_tokens: int
    speed_up: float
    low: float
    high: float
    factors: Factors


@dataclass(frozen=True)
class Predicted:
    """A plan's speed-up and the measured one, while decoding, with as many clients as its batch has sequences.

    Attributes:
        factors: measured; None: the server does not tell its passes.
    """

    planned: Planned
    measured: Ratio
    factors: Factors | None

    @property
    def deviation(self) -> float:
        """planned / measured - 1: above 0, the plan promised too much."""
        return self.planned.speed_up / self.measured.value - 1


def beside_arms(result: Result) -> list[Beside]:
    """Every arm beside plain decoding, or beside the first arm where plain decoding was not measured."""
    arms = result.arms
    base = OFF if OFF in arms else next(iter(arms), "")
    return [
        Beside(load, arm, base, *(ratio(result.rows_of(load, arm), result.rows_of(load, base), k) for k in _KINDS))
        for load in result.loads
        for arm in arms
        if arm != base
    ]


def beside_old(result: Result, old: Result) -> list[Beside]:
    """Every arm and load that both have, new beside old: above 1, the new one is faster."""
    return [
        Beside(load, arm, arm, *(ratio(result.rows_of(load, arm), old.rows_of(load, arm), kind) for kind in _KINDS))
        for load in result.loads
        for arm in result.arms
        if old.rows_of(load, arm)
    ]


def check_old(settings: Mapping[str, Any], old: Result, where: str) -> None:
    """Refuse a load test that cannot be compared, before anything is measured.

    Args:
        settings: of the new one.
        where: name of the old one.

    Raises:
        TrtspecError: settings differ that matter, each is named; or no arm and load is in both.
    """
    sides = []
    for each in (old.settings, settings):
        side = {name: each.get(name) for name in _MATTERS}
        sides.append(side | {"prompts": {"digest": (each.get("prompts") or {}).get("digest")}})
    if found := differences(*sides):
        raise TrtspecError(
            f"cannot be compared, the settings differ ({'; '.join(found)})",
            where=where,
            fix="run again with the settings of the old one",
        )
    loads = {Load(**load) for load in settings["loads"]}
    if not (loads & set(old.loads) and set(settings["arms"]) & set(old.arms)):
        raise TrtspecError(
            f"has no arm and load in common: {_shown(old.settings)}; this run has {_shown(settings)}",
            where=where,
            fix="run with the same --arms and --concurrency or --rate",
        )


def server_changes(result: Result, old: Result) -> list[str]:
    """What the two servers say differently of themselves, and how much `on` drafts: perhaps what is compared."""
    sides = [
        {**each.server, "num_draft_tokens of on": each.settings.get("num_draft_tokens"), "url": None}
        for each in (old, result)
    ]
    return differences(*sides)


def read_plan(path: Path) -> list[Planned]:
    """The points of the spec's own method in a plan that `trtspec plan --json` wrote.

    Raises:
        TrtspecError: no such file, or no plan.
    """
    try:
        points = json.loads(path.read_text(encoding="utf-8"))["methods"][0]["points"]
        return [_planned_point(point) for point in points]
    except FileNotFoundError as error:
        raise TrtspecError("no such plan", where=str(path), fix="write one with trtspec plan CONFIG --json") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TrtspecError("is no plan", where=str(path), expected="what `trtspec plan --json` writes") from error


def _planned_point(point: Mapping[str, Any]) -> Planned:
    low, high = point["speed_up_interval"]
    return Planned(
        batch=int(point["batch"]),
        num_draft_tokens=int(point["num_draft_tokens"]),
        speed_up=float(point["speed_up"]),
        low=float(low),
        high=float(high),
        factors=Factors(*(float(point[field.name]) for field in fields(Factors))),
    )


def check_plan(settings: Mapping[str, Any], plan: Sequence[Planned], where: str) -> None:
    """Refuse a plan that has nothing of what is to be measured.

    Raises:
        TrtspecError: no batch size and draft length in common, or an arm is missing.
    """
    if not {ON, OFF} <= set(settings["arms"]):
        raise TrtspecError("a plan's speed-up is that of on over off", where=where, fix=f"use --arms {ON},{OFF}")
    if not any(_planned(plan, Load(**load), settings["num_draft_tokens"]) for load in settings["loads"]):
        planned = ", ".join(f"{each.batch} with {each.num_draft_tokens}" for each in plan) or "nothing"
        raise TrtspecError(
            f"plans no batch size that is measured here (it has, with draft tokens: {planned}); this run has "
            f"{_shown(settings)} with {settings['num_draft_tokens']}",
            where=where,
            fix="plan the batch sizes and the draft length that are measured",
        )


def beside_plan(result: Result, plan: Sequence[Planned]) -> list[Predicted]:
    """The plan's speed-up beside the measured one, for each number of clients that the plan has as a batch size."""
    return [
        Predicted(planned, each.decoding, Factors.measured(*(result.rows_of(each.load, arm) for arm in (ON, OFF))))
        for each in beside_arms(result)
        if (each.arm, each.base) == (ON, OFF)
        and (planned := _planned(plan, each.load, result.settings["num_draft_tokens"]))
        and each.decoding
    ]


def _planned(plan: Sequence[Planned], load: Load, num_draft_tokens: int | None) -> Planned | None:
    wanted = (CONCURRENCY, load.value, num_draft_tokens)
    return next((each for each in plan if (load.kind, each.batch, each.num_draft_tokens) == wanted), None)


_KINDS = (WHOLE, DECODING)


def _shown(settings: Mapping[str, Any]) -> str:
    loads = ", ".join(str(Load(**load)) for load in settings["loads"])
    return f"{', '.join(settings['arms'])} at {loads}"
