"""The checks of whatever generates, by name, in the order they run.

A new check is one file and one row here. Knows what each costs and claims; not how a run is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trtspec.errors import TrtspecError
from trtspec.parity import degenerate, draws, generation_logits, greedy, invariances, rules, sampled
from trtspec.parity.degenerate import DEGENERATE, check_degenerate
from trtspec.parity.draws import DRAWS, check_draws
from trtspec.parity.generation_logits import LOGITS, check_logits
from trtspec.parity.greedy import GREEDY, check_greedy
from trtspec.parity.invariances import INVARIANCES, check_invariances
from trtspec.parity.result import Check
from trtspec.parity.rules import RULES, check_rules
from trtspec.parity.sampled import SAMPLED, check_sampled
from trtspec.parity.subjects import Lost, Query, Subject
from trtspec.parity.trial import Trial
from trtspec.shard import Shard


@dataclass(frozen=True)
class CheckKind:
    """One kind of check.

    Attributes:
        run: checks a subject.
        cost: new tokens that the subject will generate, about.
        statistical: it can raise a false alarm, and shares the run's false-alarm rate.
        words: what it looks for, for people who choose.
        parts: names of the claims it is made of; empty where it is one.
        share: has a subject answer one shard's part of what the check asks whatever the answers are; None: it asks too
            little, or what depends on them.
    """

    run: Callable[[Trial, Subject], Check]
    cost: Callable[[Trial], int]
    statistical: bool
    words: str
    parts: tuple[str, ...] = ()
    share: Callable[[Trial, Subject, Shard], None] | None = None


def _answered(queries: Callable[[Trial], Iterable[Query]]) -> Callable[[Trial, Subject, Shard], None]:
    """A `CheckKind.share` of these queries. What is refused is left to the check."""

    def share(trial: Trial, subject: Subject, shard: Shard) -> None:
        mine = list(shard.mine(queries(trial)))
        for done, query in enumerate(mine, 1):
            try:
                subject.generate(query)
            except Lost:
                raise
            except TrtspecError:
                return
            trial.advance(done / len(mine))

    return share


CHECKS: dict[str, CheckKind] = {
    GREEDY: CheckKind(
        check_greedy,
        cost=lambda trial: len(trial.cases) * trial.max_tokens,
        statistical=False,
        words="each greedy token is the one that the reference puts first",
        share=_answered(greedy.queries),
    ),
    SAMPLED: CheckKind(
        check_sampled,
        cost=lambda trial: trial.num_samples,
        statistical=True,
        words="sampled tokens follow the reference's distribution, by transforms",
        share=sampled.share,
    ),
    DRAWS: CheckKind(
        check_draws,
        cost=lambda trial: 2 * trial.num_draws,
        statistical=True,
        words="first tokens follow the reference's distribution, by counts",
        share=_answered(draws.queries),
    ),
    LOGITS: CheckKind(
        check_logits,
        cost=generation_logits.cost,
        statistical=False,
        words="generation logits and log-probabilities are the reference's, one row a token",
        parts=generation_logits.PARTS,
    ),
    INVARIANCES: CheckKind(
        check_invariances,
        cost=invariances.cost,
        statistical=False,
        words="company, order, drafts and repetition change no answer; the seed does",
        parts=invariances.PARTS,
    ),
    RULES: CheckKind(
        check_rules,
        cost=rules.cost,
        statistical=False,
        words="ends, stop and bad words, lengths, penalties, counts and streamed text are as asked",
        parts=rules.PARTS,
    ),
    DEGENERATE: CheckKind(
        check_degenerate,
        cost=degenerate.cost,
        statistical=False,
        words="no loops, foreign ids, empty or equal answers, or an acceptance of 0 or 1, that the reference excludes",
        parts=degenerate.PARTS,
    ),
}
