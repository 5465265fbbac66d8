"""What is accepted, from recorded answers alone: for every method and draft length, exactly, with intervals.

Rejection sampling emits tokens distributed as the target's, so one can turn the draw around: given that token x was
emitted, it came from an accepted draft token with probability `min(p(x), q(x)) / p(x) = min(1, q(x) / p(x))`, and
independently at every position. A text sampled from the target and the draft's q along it therefore give the expected
number of target passes for any draft length without running the loop. Greedy is the case of probabilities 0 and 1.
A token tree is the same with, at each place, the chance that one of the children there is the emitted token.

So each method is no more than a table: S[i, d], the chance that a cycle that begins at token i has its first d + 1
drafts accepted. The cycles of a text follow from it. Knows numbers and traces; no models, no times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from trtspec.decoding.detokenize import shared_length
from trtspec.decoding.ngram import NgramDrafter
from trtspec.decoding.token_tree import ROOT, TokenTree
from trtspec.errors import TrtspecError
from trtspec.plan.drafting import Drafting
from trtspec.plan.trace import HEADS, MODULES, Answer, Proposer, Trace

Floats = NDArray[np.float64]
Statistic = Literal["length", "rate"]

RESAMPLES = 2000
_SEED = 20240229  # of the bootstrap: the same trace gives the same interval


@dataclass(frozen=True)
class Expected:
    """Expected totals over texts with one drafting.

    Attributes:
        emitted: tokens, bonus tokens and corrections included.
        passes: target passes.
        drafted: draft tokens proposed.
        accepted: accepted draft tokens by their place in the draft, first to last.
        reached: how often every place was judged, that is all places before it were accepted.
        proposer_passes: by role, forward passes of it for one target pass.
    """

    emitted: float
    passes: float
    drafted: float
    accepted: tuple[float, ...]
    reached: tuple[float, ...]
    proposer_passes: Mapping[str, float] = field(default_factory=dict)

    @property
    def length(self) -> float:
        """Emitted tokens a target pass."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def rate(self) -> float:
        """Accepted over drafted."""
        return sum(self.accepted) / self.drafted if self.drafted else 0.0

    @property
    def by_position(self) -> tuple[float, ...]:
        """P(accepted | all before it accepted), by place in the draft."""
        return tuple(a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True))

    @property
    def survival(self) -> tuple[float, ...]:
        """P(the first 1, 2, ... draft tokens are accepted)."""
        return tuple(np.cumprod(self.by_position).tolist())


def expected(trace: Trace, drafting: Drafting, temperature: float, category: str | None = None) -> Expected:
    """What a drafting would have done along the recorded answers, in expectation.

    Args:
        trace: the answers.
        drafting: a method and its size; any that the trace has the proposers for.
        temperature: of the answers to look at; 0 is greedy.
        category: those of one category; None for all.

    Raises:
        TrtspecError: no such answers, or a proposer that was not recorded.
    """
    return _expected(_by_prompt(trace, drafting, temperature, category).sum(axis=0), drafting)


def interval(
    trace: Trace,
    drafting: Drafting,
    temperature: float,
    category: str | None = None,
    level: float = 0.95,
    statistic: Statistic = "length",
) -> tuple[float, float]:
    """Confidence interval of `expected(...).length` or `.rate`: percentiles of a bootstrap over prompts.

    Whole prompts are drawn, since the tokens of one hang together. With few of them the usual percentiles lie too near
    to each other; they are moved out as far as Student's t is wider than the normal law (the expanded percentile
    interval of Hesterberg 2015). One prompt says nothing of others: then it is the whole range that there is.

    Raises:
        TrtspecError: as `expected`.
    """
    totals = _by_prompt(trace, drafting, temperature, category)
    if len(totals) == 1 and drafting.num_draft_tokens:
        return (1.0, drafting.depth + 1.0) if statistic == "length" else (0.0, 1.0)
    from scipy import stats

    n = len(totals)
    tail = stats.norm.cdf(-np.sqrt(n / (n - 1)) * stats.t.ppf((1 + level) / 2, n - 1)) if n > 1 else 0.0
    low, high = np.quantile(_resampled(totals, drafting, statistic), [tail, 1 - tail])
    return float(low), float(high)


def prompts_needed(
    trace: Trace,
    drafting: Drafting,
    temperature: float,
    category: str | None = None,
    half_width: float = 0.05,
    level: float = 0.95,
) -> int | None:
    """How many more prompts like these would narrow the interval of the length to +- `half_width` of it.

    The width goes with one over the root of their number. None with fewer than two prompts, which tell no width.
    """
    totals = _by_prompt(trace, drafting, temperature, category)
    if len(totals) < 2:
        return None
    low, high = interval(trace, drafting, temperature, category, level)
    wanted = half_width * _expected(totals.sum(axis=0), drafting).length
    return max(0, int(np.ceil(len(totals) * ((high - low) / 2 / wanted) ** 2)) - len(totals))


def temperatures(trace: Trace) -> list[float]:
    """Those of the answers, rising."""
    return sorted({answer.temperature for answer in trace.answers})


def categories(trace: Trace) -> list[str]:
    """Those of the prompts, in the order of the alphabet; none where no prompt has one."""
    return sorted({answer.category for answer in trace.answers if answer.category is not None})


def expected_acceptance(texts: Sequence[Sequence[float]], num_draft_tokens: int) -> Expected:
    """Run the cycle over every text in expectation.

    Args:
        texts: for every text, the probability at each token that the draft's proposal there is accepted.
        num_draft_tokens: proposals a cycle; the last cycle of a text proposes on, but what lies beyond the text's
            end counts as neither emitted nor accepted.
    """
    drafting = Drafting("draft_target", num_draft_tokens, roles=())
    totals = [_cycles(_chain(np.asarray(text, dtype=float), num_draft_tokens), drafting) for text in texts]
    return _expected(np.zeros(3 + 2 * num_draft_tokens) + sum(totals), drafting)


# ---- totals: emitted, passes, drafted, accepted [depth], reached [depth], passes of each role


def _expected(totals: Floats, drafting: Drafting) -> Expected:
    emitted, passes, drafted, *rest = totals.tolist()
    depth = drafting.depth
    by_role = {
        role: count / passes if passes else 0.0 for role, count in zip(drafting.roles, rest[2 * depth :], strict=True)
    }
    return Expected(emitted, passes, drafted, tuple(rest[:depth]), tuple(rest[depth : 2 * depth]), by_role)


def _by_prompt(trace: Trace, drafting: Drafting, temperature: float, category: str | None) -> Floats:
    """Totals [prompts, n]."""
    key = drafting, temperature, category
    if key not in trace._made:
        trace._made[key] = _counted(trace, drafting, temperature, category)
    found: Floats = trace._made[key]
    return found


def _counted(trace: Trace, drafting: Drafting, temperature: float, category: str | None) -> Floats:
    answers = [
        answer for answer in trace.answers if answer.temperature == temperature and category in (None, answer.category)
    ]
    if not answers:
        there = ", ".join(f"{each:g}" for each in temperatures(trace))
        raise TrtspecError(
            f"the trace has no answers of temperature {temperature:g}" + (f" in {category}" if category else ""),
            expected=f"temperature {there}" + (f" and category {', '.join(categories(trace))}" if category else ""),
            fix=f"record them: trtspec bench acceptance --temperature {temperature:g}",
        )
    prompts: dict[int, Floats] = {}
    for answer in answers:
        totals = _totals(answer, drafting)
        prompts[answer.number] = prompts[answer.number] + totals if answer.number in prompts else totals
    return np.array(list(prompts.values()))


def _resampled(totals: Floats, drafting: Drafting, statistic: Statistic) -> Floats:
    """The statistic of each bootstrap sample, [RESAMPLES]."""
    rng = np.random.default_rng(_SEED)
    counts = rng.multinomial(len(totals), np.full(len(totals), 1 / len(totals)), size=RESAMPLES)
    sums = counts @ totals
    if statistic == "length":
        above, below = sums[:, 0], sums[:, 1]
    else:
        above, below = sums[:, 3 : 3 + drafting.depth].sum(axis=1), sums[:, 2]
    return np.divide(above, below, out=np.zeros(RESAMPLES), where=below > 0)


def _totals(answer: Answer, drafting: Drafting) -> Floats:
    """Totals of one text [n]."""
    k, length = drafting.num_draft_tokens, len(answer.tokens)
    each = np.full((length, len(drafting.roles)), float(drafting.depth))  # passes: one a level
    if k == 0:
        return _cycles(np.empty((length, 0)), drafting)
    if drafting.method == "ngram":
        survival, found = _ngram(answer, drafting)
        return _cycles(survival, drafting, np.where(found, k, 0))
    if drafting.method == "medusa":
        survival, proposed = _within_calls(_heads(answer, drafting), drafting)
        return _cycles(survival, drafting, proposed)
    if drafting.method == "mtp":
        return _cycles(_modules(answer, drafting), drafting)
    if drafting.method == "tree":
        return _cycles(_tree(answer, drafting), drafting, passes=each)
    accepts = _accepts(_proposer(answer, drafting.roles[0]), answer, drafting)
    passes = _cascade_passes(answer, accepts, drafting) if drafting.method == "cascade" else each
    return _cycles(_chain(accepts, k), drafting, passes=passes)


def _cycles(
    survival: Floats, drafting: Drafting, proposed: NDArray[np.int64] | None = None, passes: Floats | None = None
) -> Floats:
    """Totals of the cycles of one text of n tokens.

    Args:
        survival: `[n, depth]`, see the module; beyond the text's end it counts for nothing.
        drafting: how much is proposed.
        proposed: `[n]`, tokens that a cycle from there proposes; None: all that the drafting has.
        passes: `[n, roles]`, passes of each proposer in such a cycle.
    """
    n, depth = survival.shape
    if proposed is None:
        proposed = np.full(n, drafting.num_draft_tokens)
    if passes is None:
        passes = np.zeros((n, len(drafting.roles)))
    inside = np.arange(n)[:, None] + np.arange(depth) < n  # [n, depth]: the token exists
    survival = np.where(inside, survival, 0.0)
    kept = np.hstack([np.ones((n, 1)), survival, np.zeros((n, 1))])
    emits = kept[:, :-1] - kept[:, 1:]  # [n, depth + 1]: P(the cycle emits 1, 2, ... tokens)
    begins = np.zeros(n + depth + 1)  # begins[i]: P(a cycle begins at token i)
    begins[0] = 1.0
    for at in range(n):
        begins[at + 1 : at + depth + 2] += begins[at] * emits[at]
    begins = begins[:n]
    reached = begins @ np.where(inside & (proposed > 0)[:, None], kept[:, :depth], 0.0)
    return np.concatenate([[n, begins.sum(), begins @ proposed], begins @ survival, reached, begins @ passes])


# ---- S of each method


def _windows(values: Floats, width: int, beyond: float = 0.0) -> Floats:
    """`[A, width]`: at `[i, d]` the value at i + d, and behind the end `beyond`."""
    padded = np.concatenate([values, np.full((width, *values.shape[1:]), beyond)])
    return np.moveaxis(sliding_window_view(padded, width, axis=0), -1, 1)[: len(values)]


def _chain(accepts: Floats, num_draft_tokens: int) -> Floats:
    return np.cumprod(_windows(accepts, num_draft_tokens), axis=1)


def _along(tree: TokenTree, children: Floats) -> Floats:
    """S of a tree of ranks.

    Args:
        tree: its tokens are ranks.
        children: `[n, depth, ranks]`, P(the token at this place is the child of that rank | its parent was accepted).
    """
    depths = tree.depths()
    arrive = np.empty((len(children), len(tree)))  # P(the node is accepted)
    for node, (rank, parent, depth) in enumerate(zip(tree.tokens, tree.parents, depths, strict=True)):
        above = 1.0 if parent == ROOT else arrive[:, parent]
        arrive[:, node] = above * children[:, depth, rank]
    return np.stack([arrive[:, depths == depth].sum(axis=1) for depth in range(int(depths.max()) + 1)], axis=1)


def _is_rank(ranks: NDArray[np.int64], width: int) -> Floats:
    """One-hot `[.., width]` of ranks."""
    return (ranks[..., None] == np.arange(width)).astype(float)


def _proposer(answer: Answer, role: str) -> Proposer:
    if role not in answer.proposers:
        there = ", ".join(answer.proposers) or "none"
        raise TrtspecError(
            f"the trace has no proposer {role!r}", expected=f"one of those recorded: {there}",
            fix="record one with a spec of this method: trtspec bench acceptance",
        )  # fmt: skip
    return answer.proposers[role]


def _drawn(answer: Answer, drafting: Drafting) -> bool:
    return answer.temperature > 0 and drafting.acceptance == "logits"


def _accepts(proposer: Proposer, answer: Answer, drafting: Drafting) -> Floats:
    """`[A]`, P(the draft's proposal for each token is accepted)."""
    if not _drawn(answer, drafting):
        return _hits(proposer, answer)
    assert proposer.q is not None
    return np.minimum(1.0, proposer.q / np.maximum(answer.p, 1e-30))


def _hits(proposer: Proposer, answer: Answer) -> Floats:
    """`[A]`, 1 where its likeliest token is the answer's."""
    assert proposer.top is not None
    return (proposer.top == np.array(answer.tokens)).astype(float)


def _tree(answer: Answer, drafting: Drafting) -> Floats:
    proposers = [_proposer(answer, role) for role in drafting.roles]
    drawn = _drawn(answer, drafting)
    if drawn and len(proposers) > 1:
        raise TrtspecError(
            "drawn trees of several draft models cannot be told from a trace",
            expected="acceptance: tokens, as a server has it, or one draft",
        )
    each, rest = divmod(drafting.num_draft_tokens, len(proposers))
    found = []
    for index, proposer in enumerate(proposers):
        tree = Drafting("tree", each + (index < rest), branching=drafting.branching).tree
        width = int(tree.tokens.max()) + 1
        if drawn:
            assert proposer.siblings is not None
            if proposer.siblings.shape[1] < width:
                raise TrtspecError(
                    f"the trace knows {proposer.siblings.shape[1]} children a node, the tree has {width}",
                    fix="record one with a spec of this tree: trtspec bench acceptance",
                )
            children = np.diff(proposer.siblings[:, :width], axis=1, prepend=0.0)
        else:
            assert proposer.rank is not None
            children = _is_rank(proposer.rank, width)
        found.append(_along(tree, _windows(children, drafting.depth)))
    # A path is in the merged tree where one of the trees has it.
    survival = np.zeros((len(answer.tokens), drafting.depth))
    for each_survival in found:
        levels = each_survival.shape[1]
        survival[:, :levels] = np.maximum(survival[:, :levels], each_survival)
    return survival


def _heads(answer: Answer, drafting: Drafting) -> Floats:
    """S from the second token on: the prompt's own pass gives the first, and counts as neither token nor pass."""
    ranks = _proposer(answer, HEADS).ranks
    assert ranks is not None
    if ranks.shape[1] < drafting.depth:
        raise TrtspecError(f"the trace knows {ranks.shape[1]} heads, the tree has {drafting.depth} levels")
    children = _is_rank(ranks[:-1, : drafting.depth], int(drafting.tree.tokens.max()) + 1)
    return _along(drafting.tree, children)


def _within_calls(survival: Floats, drafting: Drafting) -> tuple[Floats, NDArray[np.int64]]:
    """S from the second token on where trees are cut at the end of each call, and `[n]` the nodes that are left."""
    depths, n = drafting.tree.depths(), len(survival)
    if not drafting.chunk:
        return survival, np.full(n, len(depths))
    left = drafting.chunk - (1 + np.arange(n)) % drafting.chunk  # tokens of the call that are still to come
    levels = left - 1  # the last of them is the target's own
    kept = np.where(np.arange(survival.shape[1]) < levels[:, None], survival, 0.0)
    return kept, (depths < levels[:, None]).sum(axis=1)


def _modules(answer: Answer, drafting: Drafting) -> Floats:
    """S from the second token on, as in `_heads`."""
    drafts = _proposer(answer, MODULES).drafts
    assert drafts is not None
    k = drafting.num_draft_tokens
    if drafts.shape[1] < k:
        raise TrtspecError(f"the trace knows {drafts.shape[1]} drafts of the modules, not {k}")
    right = drafts[:, :k] == _windows(np.array(answer.tokens, dtype=float), k, beyond=-2.0)
    return np.cumprod(right[1:], axis=1).astype(float)


def _ngram(answer: Answer, drafting: Drafting) -> tuple[Floats, NDArray[np.bool_]]:
    """S, and `[A]` whether there is a proposal at all."""
    drafter, k = NgramDrafter(drafting.max_ngram, drafting.window), drafting.num_draft_tokens
    text, begin = np.array([*answer.prompt_ids, *answer.tokens], dtype=np.int32), len(answer.prompt_ids)
    matched, found = [], []
    for at in range(begin, len(text)):
        context: object = SimpleNamespace(context=text[:at])  # all that a look-up asks of a generation
        drafts = drafter.propose(context, k).tokens.tolist()  # type: ignore[arg-type]
        matched.append(shared_length(text[at : at + k].tolist(), drafts))
        found.append(bool(drafts))
    return (np.arange(k) < np.array(matched)[:, None]).astype(float), np.array(found)


# ---- passes inside a cascade


def _cascade_passes(answer: Answer, accepts: Floats, drafting: Drafting) -> Floats:
    """`[A, roles]`: passes of each model of a cascade in a cycle that begins at each token.

    The first middle model's text is the answer for as long as the target accepts it, and there the trace says how its
    own drafts fare; behind the first rejection nobody has recorded it, and the mean over the answer stands in. So it
    does for the models further down.
    """
    above = _proposer(answer, drafting.roles[0])
    below = _proposer(answer, drafting.roles[1])
    if _drawn(answer, drafting):
        assert above.q is not None and below.q is not None and below.overlap is not None and below.diverged is not None
        along = np.minimum(1.0, below.q / np.maximum(above.q, 1e-30))
        overlaps, diverged = below.overlap, below.diverged
    else:
        along = _hits(below, answer)
        overlaps = diverged = np.asarray(below.top == above.top, dtype=float)
    k = drafting.num_draft_tokens
    rate = float(overlaps.mean())
    steps = (_windows(accepts, k), _windows(along, k), _windows(diverged, k, beyond=rate))
    passes, asked = _inner(k, drafting.inner, *steps, rate)
    columns = [passes]
    for upper, lower in zip(drafting.roles[1:-1], drafting.roles[2:], strict=True):
        rate = _agreement(_proposer(answer, upper), _proposer(answer, lower), _drawn(answer, drafting))
        passes, asked = _further(asked, drafting.inner, rate)
        columns.append(passes)
    columns.append(asked @ np.arange(asked.shape[1]))  # the lowest drafts token by token
    return np.stack(columns, axis=1)


def _agreement(upper: Proposer, lower: Proposer, drawn: bool) -> float:
    if drawn:
        assert lower.overlap is not None
        return float(lower.overlap.mean())
    return float(np.mean(upper.top == lower.top))


def _inner(k: int, inner: int, accepts: Floats, along: Floats, diverged: Floats, rate: float) -> tuple[Floats, Floats]:
    """A middle model that makes k tokens, up to `inner` of them drafted for each of its passes.

    Args:
        accepts: `[n, k]`, P(the target accepts its token | all before).
        along: `[n, k]`, P(it accepts what is drafted for it | its token is the answer's).
        diverged: `[n, k]`, the same where its token is then rejected.
        rate: the same behind a rejection.

    Returns:
        `[n]` its passes, and `[n, inner + 1]` how many of them came with 0, 1, ... drafts.
    """
    n = len(accepts)
    asked = np.zeros((n, inner + 1))
    on, off = np.zeros((k + 1, n)), np.zeros((k + 1, n))  # P(a pass begins at a place; still on the answer, or not)
    on[0] = 1.0
    for begin in range(k):
        room = min(inner, k - begin - 1)
        asked[:, room] += on[begin] + off[begin]
        here, beyond = on[begin], off[begin]  # all drafts so far were accepted
        for place in range(begin, begin + room):
            stays, leaves = here * accepts[:, place], here * (1.0 - accepts[:, place])
            right, wrong = along[:, place], diverged[:, place]
            on[place + 1] += stays * (1.0 - right)
            off[place + 1] += leaves * (1.0 - wrong) + beyond * (1.0 - rate)
            here, beyond = stays * right, leaves * wrong + beyond * rate
        last = begin + room  # the middle model's own token
        on[last + 1] += here * accepts[:, last]
        off[last + 1] += here * (1.0 - accepts[:, last]) + beyond
    return asked.sum(axis=1), asked


def _further(asked: Floats, inner: int, rate: float) -> tuple[Floats, Floats]:
    """The same for a model further down that is asked for 1, 2, ... tokens so often, at one rate everywhere."""
    result = np.zeros((len(asked), inner + 1))
    for k in range(1, asked.shape[1]):
        nowhere = np.zeros((1, k))  # it is never on the answer
        _, each = _inner(k, inner, nowhere, nowhere, np.full((1, k), rate), rate)
        result += asked[:, k : k + 1] * each
    return result.sum(axis=1), result
