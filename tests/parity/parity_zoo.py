"""The zoo: speculative sampling over the tables of `parity_doubles`, written out rule by rule, and ways to break it.

Each broken sampler changes one rule. It shares no code with the decoding cycle, and a token takes it some microseconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from parity_doubles import CUT, DRAFT, END, FULL, TARGET, VOCAB, Table, decode, trial

from trtspec.decoding.sampling import SamplingParams, probabilities, processed_logits
from trtspec.parity.sampled import PENALISED
from trtspec.parity.subjects import Answer, Query
from trtspec.parity.trial import Case, Trial

Row = np.ndarray  # [VOCAB]
NUCLEUS = SamplingParams(temperature=1.0, top_p=0.6)


def wide_tables(vocab: int = 512) -> tuple[Table, Table]:
    """Target and draft with as many rare ids as a vocabulary has; about 3 ids in 100 share most of a row."""
    rng = np.random.default_rng(0)
    target = rng.dirichlet(np.full(vocab, 0.05), size=vocab)
    draft = 0.2 * target + 0.8 * rng.dirichlet(np.full(vocab, 0.05), size=vocab)
    target, draft = target + 1e-6, draft + 1e-6
    return Table(target / target.sum(axis=1, keepdims=True)), Table(draft / draft.sum(axis=1, keepdims=True))


WIDE_TARGET, WIDE_DRAFT = wide_tables()


class Sampler:
    """The right one, as a subject."""

    name = "sampler"
    target, draft = TARGET, DRAFT

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
        return law(self.target.rows[text[-1]], self.query.sampling, self.counted(text))

    def q(self, text: Sequence[int], place: int) -> Row:
        return law(self.draft.rows[text[-1]], self.query.sampling, self.counted(text))

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


class OtherSettings(Sampler):
    """The target is sampled with settings of its own."""

    def settings(self, asked: SamplingParams) -> SamplingParams:
        raise NotImplementedError

    def p(self, text: Sequence[int], place: int) -> Row:
        return law(self.target.rows[text[-1]], self.settings(self.query.sampling), self.counted(text))


class TopKOfOneLess(OtherSettings):
    def settings(self, asked: SamplingParams) -> SamplingParams:
        return replace(asked, top_k=max(0, asked.top_k - 1))


class MinPToo(OtherSettings):
    target, draft = WIDE_TARGET, WIDE_DRAFT

    def settings(self, asked: SamplingParams) -> SamplingParams:
        return replace(asked, min_p=0.02)


class PenaltiesTwice(OtherSettings):
    def settings(self, asked: SamplingParams) -> SamplingParams:
        return replace(
            asked,
            repetition_penalty=asked.repetition_penalty**2,
            presence_penalty=2 * asked.presence_penalty,
            frequency_penalty=2 * asked.frequency_penalty,
        )


class FrequencyTwice(OtherSettings):
    def settings(self, asked: SamplingParams) -> SamplingParams:
        return replace(asked, frequency_penalty=2 * asked.frequency_penalty)


class CoarseNumbers(Sampler):
    """Random numbers of 8 bits."""

    target, draft = WIDE_TARGET, WIDE_DRAFT

    def uniform(self, place: int) -> float:
        return self.rng.randrange(256) / 256

    def draw(self, weights: Row) -> int:
        return pick(weights, self.uniform(0))


class OneNumberForAPass(Sampler):
    """The same random number decides on all draft tokens of a pass."""

    def uniform(self, place: int) -> float:
        if place == 0:
            self.number = self.rng.random()
        return self.number


class PenaltiesForgetThePrompt(Sampler):
    def counted(self, text: Sequence[int]) -> tuple[int, ...]:
        return super().counted(text)[len(self.query.ids) :]


class OutputAlone(PenaltiesForgetThePrompt):
    """The presence and frequency penalties count the output alone; the repetition penalty counts the prompt too."""

    def p(self, text: Sequence[int], place: int) -> Row:
        return self.both(self.target, text)

    def q(self, text: Sequence[int], place: int) -> Row:
        return self.both(self.draft, text)

    def both(self, table: Table, text: Sequence[int]) -> Row:
        sampling = self.query.sampling
        if not sampling.penalised:
            return law(table.rows[text[-1]], sampling, ())
        repeated = replace(sampling, presence_penalty=0.0, frequency_penalty=0.0)
        row = processed_logits(table.rows[text[-1]], np.array(Sampler.counted(self, text)), 0, repeated).astype(
            np.float32
        )
        return law(row, replace(sampling, temperature=1.0, repetition_penalty=1.0), self.counted(text))


class TypicalToo(Sampler):
    """A draft token of probability 0.1 is good enough, whatever the draft thinks of it."""

    def acceptance(self, p: Row, q: Row, draft: int) -> float:
        return 1.0 if p[draft] >= 0.1 else super().acceptance(p, q, draft)


class AcceptsTooReadily(Sampler):
    def acceptance(self, p: Row, q: Row, draft: int) -> float:
        return min(1.0, 1.1 * float(p[draft] / q[draft]))


@dataclass(frozen=True)
class Exhibit:
    """A broken sampler, what must find it, and after how many tokens at most.

    Attributes:
        make: the subject.
        finds: a part of the name of a test or of a problem, one of those by which it shows.
        budget: new tokens.
        samplings: settings of the check.
        prompts: their ids.
    """

    make: Callable[[], Sampler]
    finds: str
    budget: int = 1000
    samplings: tuple[SamplingParams, ...] = (FULL, CUT, PENALISED)
    prompts: tuple[tuple[int, ...], ...] = ((1,), (2,), (3,), (4,))

    def trial(self, seed: int = 0, budget: int | None = None) -> Trial:
        """The run that has to find it, or one of another budget."""
        cases = tuple(Case(number, decode([*ids]), ids) for number, ids in enumerate(self.prompts, 1))
        made = trial(num_samples=budget or self.budget, samplings=self.samplings, seed=seed, cases=cases)
        target, draft = self.make().target, self.make().draft
        yardstick = replace(made.yardstick, target=target, draft=draft, vocab_size=len(target.rows))
        return replace(made, yardstick=yardstick)


PROMPTS = ((1, 9, 4), (2, 14, 7), (3, 6, 11), (4, 13, 10))
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
    "top-k one too small, behind top-p": Exhibit(TopKOfOneLess, "a top-k of one id less", 3000, (CUT,)),
    "a min-p of 0.02 that nobody asked for": Exhibit(MinPToo, "a min-p of 0.02", 1000, (FULL,)),
    "random numbers of 8 bits": Exhibit(CoarseNumbers, "random numbers of 8 bits", 1000, (FULL,)),
    "one random number for all draft tokens of a pass": Exhibit(OneNumberForAPass, "one random number", 3000, (FULL,)),
    "penalties that ignore the prompt": Exhibit(
        PenaltiesForgetThePrompt, "penalties that ignore the prompt", 2000, (PENALISED,), PROMPTS
    ),
    "presence and frequency penalties of the output alone": Exhibit(
        OutputAlone, "penalties that ignore the prompt", 3000, (PENALISED,), PROMPTS
    ),
    "penalties applied twice": Exhibit(PenaltiesTwice, "penalties applied twice", 1000, (PENALISED,)),
    "a frequency penalty that counts twice": Exhibit(FrequencyTwice, "counts twice", 3000, (PENALISED,)),
    "typical acceptance of probable draft tokens": Exhibit(TypicalToo, "always accepted", 3000, (CUT,)),
}
"""The broken samplers that the check of sampled tokens must find, by name."""

HARD: dict[str, Exhibit] = {
    "acceptance 1.1 times too probable": Exhibit(AcceptsTooReadily, "1.1 times too readily", 10000, (FULL,)),
}
"""What needs more tokens than a run has: `calibrate.py` measures how often it is found."""
