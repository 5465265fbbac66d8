"""What a speculative cycle takes, method by method, from the times of forward passes.

Knows who runs when. Does not know where the times come from, or how much is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from trtspec.errors import TrtspecError
from trtspec.plan.drafting import Drafting
from trtspec.plan.step_times import HEADS, StepTimes


@dataclass(frozen=True)
class CycleCost:
    """Seconds of one cycle: drafting, verification, and what lies between the models."""

    draft_s: float
    verify_s: float
    overhead_s: float

    @property
    def total(self) -> float:
        """Seconds of the whole cycle."""
        return self.draft_s + self.verify_s + self.overhead_s


def cycle_seconds(
    times: StepTimes,
    drafting: Drafting,
    batch: int,
    context: int,
    proposer_passes: Mapping[str, float] | None = None,
    engine_track: bool = False,
    drafted: float | None = None,
    shared: bool = False,
) -> CycleCost:
    """One cycle of `batch` sequences, each of which drafts `drafting.num_draft_tokens`.

    Plain decoding, method none or no draft tokens, is a pass of the target without overhead: a call to an engine makes
    many tokens, a cycle one call.

    Args:
        times: of the models, by role.
        drafting: who drafts, and how.
        batch: sequences in flight.
        context: tokens in each one's KV cache.
        proposer_passes: role -> forward passes of it for one of the target, as acceptance has them. A chain needs as
            many as it has draft tokens, if nothing is given; of a cascade they cannot be known without acceptance.
        engine_track: whether trees are verified path by path and grown call by call, as engines that take chains only
            have it, and not each level and the whole tree in one pass.
        drafted: draft tokens a cycle where they are fewer than the most, as with ngram, which often finds nothing, and
            with trees of heads that are cut. So many cycles draft all, and the others are plain, that this is their
            mean.
        shared: whether the draft of an early exit is the target's own first layers in one engine, as the torch runtime
            has it. They have run over the text's last token and all draft tokens but the last, so that the verification
            runs them over one token. What they save is taken to be what more tokens cost the draft; times in which its
            head runs over all of them overstate it by that.

    Raises:
        TrtspecError: a method whose cost is not modelled, or a cascade without `proposer_passes`.
    """
    plain = CycleCost(0.0, times.seconds("target", batch, 1, context), 0.0)
    most = drafting.num_draft_tokens
    if drafting.method == "none" or most == 0:
        return plain
    overhead = times.overhead(batch)
    verify = times.seconds("target", batch, most + 1, context)
    if drafting.method == "early_exit" and shared:
        verify += times.seconds("draft", batch, 1, context) - times.seconds("draft", batch, most + 1, context)
    if drafting.method in ("draft_target", "early_exit"):
        passes = (proposer_passes or {}).get("draft", most)
        return CycleCost(passes * times.seconds("draft", batch, 1, context), verify, overhead)
    share = 1.0 if drafted is None else drafted / most
    if drafting.method == "ngram":
        return CycleCost(0.0, share * verify + (1.0 - share) * plain.verify_s, share * overhead)
    if drafting.method == "cascade":
        return CycleCost(_cascade(times, drafting, batch, context, proposer_passes), verify, overhead)
    if drafting.method == "medusa":
        verify = share * verify + (1.0 - share) * plain.verify_s
        return CycleCost(share * times.seconds(HEADS, batch, 1, context), verify, share * overhead)
    if drafting.method == "mtp":
        return CycleCost(most * times.seconds(HEADS, batch, 1, context), verify, overhead)
    if drafting.method == "tree":
        return _tree(times, drafting, batch, context, engine_track)
    raise TrtspecError(f"the cost of method {drafting.method} is not modelled", fix="measure it: trtspec bench serve")


def _cascade(
    times: StepTimes, drafting: Drafting, batch: int, context: int, proposer_passes: Mapping[str, float] | None
) -> float:
    """Seconds that all proposers take: those in between verify up to `inner` tokens a pass, the last one drafts singly.

    As many passes of the last model in between as its drafts need are over all `inner` of them, and the others over
    none, which is right where a pass takes so much longer for each token more. Further up it is not known how many
    drafts were left to make, and all passes are over `inner`.
    """
    if missing := [role for role in drafting.roles if role not in (proposer_passes or {})]:
        raise TrtspecError(
            f"how often the {missing[0]} of a cascade runs depends on what is accepted, which is not measured",
            fix="record a trace: trtspec bench acceptance",
        )
    *upper, last, draft = drafting.roles
    passes = proposer_passes or {}

    def seconds(role: str, tokens: int) -> float:
        return times.seconds(role, batch, tokens, context)

    full = min(passes[draft] / drafting.inner, passes[last])
    verified = full * seconds(last, drafting.inner + 1) + (passes[last] - full) * seconds(last, 1)
    verified += sum(passes[role] * seconds(role, drafting.inner + 1) for role in upper)
    return verified + passes[draft] * seconds(draft, 1)


def _tree(times: StepTimes, drafting: Drafting, batch: int, context: int, engine_track: bool) -> CycleCost:
    """A tree of each draft, one draft after the other, then one verification of all.

    In one pass a level: the draft runs once for every level, over the text's last token and the nodes so far; the
    target once, over all nodes. Call by call: the calls of a level run side by side, each on to the last level with the
    likeliest tokens, so that a first child needs no call of its own; and the target gets every path for itself. What
    two drafts have in common is counted twice.
    """
    share, rest = divmod(drafting.num_draft_tokens, len(drafting.roles))
    draft_s, num_paths = 0.0, 0
    for place, role in enumerate(drafting.roles):
        tree = replace(drafting, num_draft_tokens=share + (place < rest)).tree
        depths = tree.depths()
        levels = int(depths.max(initial=-1)) + 1
        has_children = np.isin(np.arange(len(tree)), tree.parents)
        num_paths += len(tree.paths())
        for level in range(levels):
            if not engine_track:
                draft_s += times.seconds(role, batch, 1 + int((depths < level).sum()), context)
                continue
            calls = 1 if level == 0 else int(((depths == level - 1) & has_children & (tree.tokens > 0)).sum())
            if calls:
                draft_s += (levels - level) * times.seconds(role, batch * calls, 1, context)
    if engine_track:
        verify = times.seconds("target", batch * num_paths, drafting.depth + 1, context)
    else:
        verify = times.seconds("target", batch, drafting.num_draft_tokens + 1, context)
    return CycleCost(draft_s, verify, times.overhead(batch))
