"""The figures of a trace as one JSON object: every draft length, and what else the trace can tell of, by category.

Knows traces and draftings. Does not know how they are shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from statistics import fmean
from typing import Any

from trtspec.decoding.tree import BRANCHING
from trtspec.plan.acceptance import categories, expected, interval, prompts_needed, temperatures
from trtspec.plan.drafting import Drafting
from trtspec.plan.trace import HEADS, MODULES, Trace

HALF_WIDTH = 0.05  # of the length: what more prompts are counted for
_DIGITS = 4


def figures(trace: Trace, own: Drafting) -> dict[str, Any]:
    """All figures of a trace.

    Args:
        trace: the answers.
        own: how the spec drafts; the figures by category are of this.

    Returns:
        JSON. Under `modes`, by temperature: `lengths` (rows by draft length), `others`, `categories`.
    """
    agreements = [answer.agreement for answer in trace.answers if answer.agreement is not None]
    return {
        "spec": trace.spec,
        "method": trace.method,
        "models": {role: model.model for role, model in trace.models.items()},
        "prompts": len({answer.number for answer in trace.answers}),
        "answer_tokens": sum(len(answer.tokens) for answer in trace.answers),
        "agreement_with_references": round(fmean(agreements), _DIGITS) if agreements else None,
        "warnings": list(trace.warnings),
        "modes": {
            mode_name(temperature): {
                "temperature": temperature,
                "lengths": [_row(trace, name, each, temperature) for name, each in _lengths(trace, own)],
                "others": [_row(trace, name, each, temperature) for name, each in _others(trace, own)],
                "categories": {
                    category: _row(trace, category, own, temperature, category) for category in categories(trace)
                },
                "more_prompts_needed": prompts_needed(trace, own, temperature, half_width=HALF_WIDTH),
            }
            for temperature in temperatures(trace)
        },
    }


def mode_name(temperature: float) -> str:
    """How answers of this temperature are called."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def _lengths(trace: Trace, own: Drafting) -> Iterator[tuple[str, Drafting]]:
    """The spec's method at every length; a tree as it is, beside the chains that the trace knows."""
    if own.method == "none":
        return
    if own.method in ("tree", "medusa"):
        yield f"{own.method} of {own.num_draft_tokens} nodes", own
        heads = trace.answers[0].proposers[HEADS].ranks if own.method == "medusa" else None
        longest = trace.max_draft_tokens if heads is None else heads.shape[1]
    else:
        longest = trace.max_draft_tokens
        if own.method == "mtp":
            drafts = trace.answers[0].proposers[MODULES].drafts
            longest = 0 if drafts is None else drafts.shape[1]
    for length in range(1, longest + 1):
        if own.method == "tree":
            yield f"chain of {length}", Drafting("draft_target", length, roles=own.roles[:1])
        elif own.method == "medusa":
            choices = tuple((0,) * depth for depth in range(1, length + 1))
            yield f"chain of {length}", replace(own, num_draft_tokens=length, choices=choices)
        else:
            yield str(length), replace(own, num_draft_tokens=length)


def _others(trace: Trace, own: Drafting) -> Iterator[tuple[str, Drafting]]:
    """Other methods that the same trace tells of."""
    if "draft" in own.roles and own.method != "tree":
        nodes = sum(prod(BRANCHING[:level]) for level in range(1, len(BRANCHING) + 1))
        name = ",".join(map(str, BRANCHING))
        yield f"tree {name} of the draft", Drafting("tree", nodes, branching=BRANCHING, acceptance="tokens")
    if own.method == "cascade":
        yield "the draft alone, 4", Drafting("draft_target", 4)
    if own.method != "ngram":
        yield "ngram, 4", Drafting("ngram", 4, roles=(), acceptance="tokens")


def _row(
    trace: Trace, name: str, drafting: Drafting, temperature: float, category: str | None = None
) -> dict[str, Any]:
    asked = (trace, drafting, temperature, category)
    found = expected(*asked)
    numbers = {
        answer.number
        for answer in trace.answers
        if answer.temperature == temperature and category in (None, answer.category)
    }
    return {
        "name": name,
        "num_draft_tokens": drafting.num_draft_tokens,
        "prompts": len(numbers),
        "length": round(found.length, _DIGITS),
        "length_interval": [round(end, _DIGITS) for end in interval(*asked)],
        "rate": round(found.rate, _DIGITS),
        "rate_interval": [round(end, _DIGITS) for end in interval(*asked, statistic="rate")],
        "by_position": [round(each, _DIGITS) for each in found.by_position],
        "survival": [round(each, _DIGITS) for each in found.survival],
        "proposer_passes": {role: round(count, _DIGITS) for role, count in found.proposer_passes.items()},
    }
