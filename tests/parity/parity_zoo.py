"""The zoo: speculative sampling over the tables of `parity_doubles`, written out rule by rule, and ways to break it.

Each broken sampler changes one rule. It shares no code with the decoding cycle, and a token takes it some microseconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from parity_doubles import CUT, DRAFT, END, FULL, TARGET, VOCAB, decode, trial

from trtspec.decoding.sampling import SamplingParams, probabilities, processed_logits
from trtspec.parity.sampled import PENALISED
from trtspec.parity.subjects import Answer, Query
from trtspec.parity.trial import Trial

Row = np.ndarray  # [VOCAB]
NUCLEUS = SamplingParams(temperature=1.0, top_p=0.6)


class Sampler:
    """The right one, as a subject."""

    name = "sampler"

    def generate(self, query: Query) -> Answer:
        """Cycle after cycle until an end id or `max_tokens`."""
        self.query, self.rng = query, random.Random(query.sampling.seed)
        self.seen = list(query.ids)  # what penalties count
        output: list[int] = []
        blocks: list[tuple[int, ...]] = []
        finish = "length"
        while len(output) < query.max_tokens and finish == "length":
            block = self.cycle([*query.ids, *output])[: query.max_tokens - len(output)]
            if (end := self.end(block)) is not None:
                block, finish = block[:end], "stop"
            output += block
            blocks.append(tuple(block))
            self.seen = self.remembered([*query.ids, *output])
        return Answer(tuple(blocks), decode(output), finish)

    def cycle(self, text: list[int]) -> list[int]:
        """The tokens of one pass of the target."""
        drafts: list[int] = []
        declared: list[Row] = []
        self.starts(text)
        for place in range(self.query.num_draft_tokens):
            q = self.q([*text, *drafts], place)
            drafts.append(self.propose(q))
            declared.append(self.declares(q, [*text, *drafts[:-1]]))
        for place, (draft, q) in enumerate(zip(drafts, declared, strict=True)):
            p = self.p([*text, *drafts[:place]], place)
            self.u = self.uniform(place)
            if self.u >= self.acceptance(p, q, draft):
                self.rejects(text, drafts, place)
                return [*drafts[:place], self.replaces(p, q)]
            if draft == END:
                return drafts[: place + 1]
        last = self.bonus([*text, *drafts], declared[-1] if declared else None)
        return [*drafts, self.draw(last)]

    # The rules, one a method.

    def end(self, block: Sequence[int]) -> int | None:
        return block.index(END) if END in block else None

    def p(self, text: Sequence[int], place: int) -> Row:
        return law(TARGET.rows[text[-1]], self.query.sampling, self.counted(text))

    def q(self, text: Sequence[int], place: int) -> Row:
        return law(DRAFT.rows[text[-1]], self.query.sampling, self.counted(text))

    def counted(self, text: Sequence[int]) -> tuple[int, ...]:
        """What penalties count at this place: what was seen before the cycle, and this cycle's tokens."""
        before = len(self.query.ids) + self.num_output
        return (*self.seen, *text[before:]) if self.query.sampling.penalised else ()

    def propose(self, q: Row) -> int:
        return self.draw(q)

    def declares(self, q: Row, text: Sequence[int]) -> Row:
        return q

    def uniform(self, place: int) -> float:
        return self.rng.random()

    def acceptance(self, p: Row, q: Row, draft: int) -> float:
        return min(1.0, float(p[draft] / q[draft]))

    def residual(self, p: Row, q: Row) -> Row:
        return np.maximum(p - q, 0.0)

    def replaces(self, p: Row, q: Row) -> int:
        rest = self.residual(p, q)
        return self.draw(rest if rest.sum() > 0 else p)

    def bonus(self, text: Sequence[int], last_q: Row | None) -> Row:
        return self.p(text, self.query.num_draft_tokens)

    def draw(self, weights: Row) -> int:
        return pick(weights, self.rng.random())

    def starts(self, text: Sequence[int]) -> None:
        self.num_output = len(text) - len(self.query.ids)

    def rejects(self, text: Sequence[int], drafts: Sequence[int], place: int) -> None:
        pass

    def remembered(self, text: list[int]) -> list[int]:
        return text


def pick(weights: Row, u: float) -> int:
    """The id at quantile u of weights that need not sum to 1."""
    cumulative = weights.cumsum()
    return min(int(cumulative.searchsorted(u * cumulative[-1], side="right")), int(weights.nonzero()[0][-1]))


def law(row: Row, sampling: SamplingParams, counted: tuple[int, ...]) -> Row:
    """The distribution of a row of logits."""
    plain = replace(sampling, seed=0) if sampling.seed else sampling
    if counted:
        return probabilities(processed_logits(row, np.array(counted), 0, plain), plain)
    return _law(row.tobytes(), plain)


@cache
def _law(row: bytes, sampling: SamplingParams) -> Row:
    return probabilities(processed_logits(np.frombuffer(row, dtype=np.float32), np.empty(0), 0, sampling), sampling)


class AcceptsAlways(Sampler):
    def acceptance(self, p: Row, q: Row, draft: int) -> float:
        return 1.0


class AcceptsWithQ(Sampler):
    def acceptance(self, p: Row, q: Row, draft: int) -> float:
        return float(q[draft])


class ResidualNotRenormalised(Sampler):
    """A search for u in the cumulative sum of a residual that does not sum to 1 falls off its end."""

    def replaces(self, p: Row, q: Row) -> int:
        return min(int(self.residual(p, q).cumsum().searchsorted(self.rng.random(), side="right")), VOCAB - 1)


class ResidualFromP(Sampler):
    def residual(self, p: Row, q: Row) -> Row:
        return p


class ResidualFromQ(Sampler):
    def residual(self, p: Row, q: Row) -> Row:
        return q


class BonusFromDraft(Sampler):
    def bonus(self, text: Sequence[int], last_q: Row | None) -> Row:
        return self.q(text, self.query.num_draft_tokens)


class DraftTopPIgnored(Sampler):
    """Drafts are drawn with top-p; q is handed over without it."""

    def declares(self, q: Row, text: Sequence[int]) -> Row:
        return law(DRAFT.rows[text[-1]], replace(self.query.sampling, top_p=1.0), self.counted(text))


class ArgmaxDrafts(Sampler):
    def propose(self, q: Row) -> int:
        return int(q.argmax())


class TemperatureTwice(Sampler):
    def p(self, text: Sequence[int], place: int) -> Row:
        sampling = self.query.sampling
        return law(TARGET.rows[text[-1]], replace(sampling, temperature=sampling.temperature**2), self.counted(text))


class PenaltiesKeepRejected(Sampler):
    """Each cycle appends its drafts to what penalties count, and takes back nothing but their number."""

    def rejects(self, text: Sequence[int], drafts: Sequence[int], place: int) -> None:
        self.kept = [*getattr(self, "kept", []), *drafts[place:]]

    def generate(self, query: Query) -> Answer:
        self.kept: list[int] = []
        return super().generate(query)

    def remembered(self, text: list[int]) -> list[int]:
        return [*text, *self.kept]


class EndInsideBlock(Sampler):
    """Looks for the end id in the last token of a block only."""

    def cycle(self, text: list[int]) -> list[int]:
        block = super().cycle(text)
        if block[-1] == END and len(block) > 1:
            block.append(self.draw(self.p([*text, *block], 0)))
        return block

    def end(self, block: Sequence[int]) -> int | None:
        return len(block) - 1 if block[-1] == END else None


class CacheOffByOne(Sampler):
    """After a rejection the cache still holds the rejected draft token in place of the one that was emitted."""

    stale: int | None = None

    def generate(self, query: Query) -> Answer:
        self.stale = None
        return super().generate(query)

    def cycle(self, text: list[int]) -> list[int]:
        stale, self.stale = self.stale, None
        self.fed = [*text[:-1], stale] if stale is not None else text
        return super().cycle(text)

    def rejects(self, text: Sequence[int], drafts: Sequence[int], place: int) -> None:
        self.stale = drafts[place]

    def p(self, text: Sequence[int], place: int) -> Row:
        return super().p([*self.fed, *text[len(self.fed) :]], place)


class SeedEveryCycle(Sampler):
    def starts(self, text: Sequence[int]) -> None:
        super().starts(text)
        self.rng = random.Random(self.query.sampling.seed)


class Mixture(Sampler):
    """One token in 50 is the draft's, whatever the target says."""

    share = 0.02

    def p(self, text: Sequence[int], place: int) -> Row:
        return (1 - self.share) * super().p(text, place) + self.share * self.q(text, place)


@dataclass(frozen=True)
class Exhibit:
    """A broken sampler, what must find it, and after how many tokens at most.

    Attributes:
        make: the subject.
        finds: a part of the name of a test or of a problem, one of those by which it shows.
        budget: new tokens.
        samplings: settings of the check.
    """

    make: Callable[[], Sampler]
    finds: str
    budget: int = 1000
    samplings: tuple[SamplingParams, ...] = (FULL, CUT, PENALISED)

    def trial(self, seed: int = 0) -> Trial:
        """The run that has to find it."""
        return trial(num_samples=self.budget, samplings=self.samplings, seed=seed)


ZOO: dict[str, Exhibit] = {
    "always accept": Exhibit(AcceptsAlways, "leans towards the draft"),
    "accept with q instead of p/q": Exhibit(AcceptsWithQ, "leans away from the draft"),
    "residual not renormalised": Exhibit(ResidualNotRenormalised, "by id", 1000, (FULL,)),
    "residual drawn from p": Exhibit(ResidualFromP, "leans towards the draft"),
    "residual drawn from q": Exhibit(ResidualFromQ, "leans towards the draft"),
    "bonus token from the draft": Exhibit(BonusFromDraft, "bonus tokens"),
    "draft's top-p ignored in q": Exhibit(DraftTopPIgnored, "leans", 2000, (NUCLEUS,)),
    "argmax drafts declared as softmax": Exhibit(ArgmaxDrafts, "leans"),
    "temperature applied twice": Exhibit(TemperatureTwice, "setting 2", 2000),
    "penalty state that keeps rejected tokens": Exhibit(PenaltiesKeepRejected, "seen tokens", 2500, (PENALISED,)),
    "EOS not honoured inside a block": Exhibit(EndInsideBlock, "end id"),
    "KV cache off by one after rejection": Exhibit(CacheOffByOne, "first tokens of a pass"),
    "seed reused every cycle": Exhibit(SeedEveryCycle, "same place, next pass"),
    "a 2 percent mixture of the draft distribution": Exhibit(Mixture, "mixed with the draft", 10000, (FULL,)),
}
"""The broken samplers that the check of sampled tokens must find, by name."""
