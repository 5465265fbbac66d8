"""The check of the logits and log-probabilities that a subject returns for its own tokens.

Row i has to be what the reference says about token i, given the prompt and the tokens before it. What is wrong is
named where a known trap explains it: each of `TRAPS` undoes one, and the one after which the rows agree is the cause.
Knows budgets for a precision (`trtspec.parity.checkpoint.BUDGETS`); not how a subject came by its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trtspec.decoding.sampling import SamplingParams
from trtspec.parity.checkpoint import BUDGETS, divergence
from trtspec.parity.claims import Claim, Examination, Undecided, check_claims
from trtspec.parity.result import Check, Verdict
from trtspec.parity.subjects import Answer, Query, Subject, Unsupported
from trtspec.parity.trial import Case, Trial

LOGITS = "logits"
_MAX_TOKENS = 20  # of an answer
_ABSURD = 100.0  # times as large as the reference's largest logit
_WRONG_ROW = 100.0  # times the budget of the mean divergence: a single row beyond is no rounding
_COMPUTED = 4.0
"""By what a checkpoint's budget of divergence grows where all is rounded that is computed, not the weights alone.

Measured on 740 tokens of SmolLM2-135M-Instruct: 1.3e-3 nats in bfloat16 and 2.4e-5 in float16, at most 0.019 and 5.6e-4
on one token; the largest difference of a logit was 0.81 and 0.17.
"""
_EPSILON = 1e-30

Rows = NDArray[np.float32]


@dataclass(frozen=True)
class Compared:
    """One answer with what it came with.

    Attributes:
        case, query, answer: what was asked, and answered.
        right: logits float32 `[n, vocab]` of the reference for the tokens of the answer.
    """

    case: Case
    query: Query
    answer: Answer
    right: Rows

    @property
    def found(self) -> Rows:
        """Logits `[n, vocab]` of the subject, without the padding of its vocabulary."""
        assert self.answer.logits is not None
        return np.asarray(self.answer.logits, dtype=np.float32)[:, : self.right.shape[1]]


def check_logits(trial: Trial, subject: Subject) -> Check:
    """Both `CLAIMS`, on a few greedy and sampled answers, with drafts and without."""
    check = check_claims(trial, subject, LOGITS, "what comes with the tokens is the reference's", CLAIMS)
    evidence = "; ".join(f"{part.name}: {part.evidence}" for part in check.parts)
    return replace(check, evidence=evidence)


def cost(trial: Trial) -> int:
    """New tokens that the subject generates, about."""
    return len(PARTS) * len(_kinds(trial)) * min(_MAX_TOKENS, trial.max_tokens)


def _kinds(trial: Trial) -> list[tuple[SamplingParams, int]]:
    """Sampling and draft tokens of the queries."""
    drawn = replace(trial.samplings[-1], seed=trial.request_seed(3))
    return [(sampling, n) for n in dict.fromkeys((trial.num_draft_tokens, 0)) for sampling in (SamplingParams(), drawn)]


def _ask(
    examination: Examination, misshapen: Callable[[Compared], str | None], **wish: bool
) -> tuple[list[Compared], str]:
    """Answers that came with what was wished for, and which were not given; notes what is `misshapen`."""
    trial = examination.trial
    compared: list[Compared] = []
    refusals: list[str] = []
    for turn, (sampling, num_draft_tokens) in enumerate(_kinds(trial)):
        case = trial.cases[turn % len(trial.cases)]
        max_tokens = min(_MAX_TOKENS, trial.max_tokens)
        try:
            answer = examination.ask(case, sampling, num_draft_tokens, max_tokens, **wish)
        except Unsupported as error:
            refusals.append(f"; not {'with' if num_draft_tokens else 'without'} drafts: {error.problem}")
            continue
        right = trial.yardstick.along(case.ids, answer.tokens)[: len(answer.tokens)]
        each = Compared(case, trial.query(case, sampling, num_draft_tokens, max_tokens, **wish), answer, right)
        if problem := misshapen(each):
            examination.fault(case, 0, problem)
        elif answer.ids:
            compared.append(each)
    words = "".join(dict.fromkeys(refusals))
    if not compared and not examination.faulty:
        raise Undecided(words.removeprefix("; ")) if words else Undecided("no tokens", Verdict.INCONCLUSIVE)
    return compared, words


def _misshapen(each: Compared) -> str | None:
    """What is wrong with the shape of the logits, in one clause."""
    n, vocab = len(each.answer.ids), each.right.shape[1]
    if each.answer.logits is None:
        return "no logits came, though they were asked for"
    shape = each.answer.logits.shape
    if len(shape) != 2:
        return f"logits of shape {list(shape)}, expected [{n}, {vocab}]"
    num_rows, num_columns = shape
    of = f"logits of shape [{num_rows}, {num_columns}] for {n} tokens of {vocab} ids"
    if num_rows in (n // 2, (n + 1) // 2) != n or num_columns * 2 == vocab:
        return f"{of}: half as long, as 16-bit numbers read as float32 are"
    if num_rows == 2 * n or num_columns == 2 * vocab:
        return f"{of}: twice as long, as float32 read as 16-bit numbers is"
    if 0 <= num_rows - n - len(each.case.ids) + 1 <= 2 and len(each.case.ids) > 2:
        return f"{of}: the rows of the prompt's {len(each.case.ids)} tokens are included"
    if num_rows not in (n, len(each.answer.tokens)):
        return f"{of}: {num_rows - n:+d} rows"
    if num_columns < vocab:
        return f"{of}: {vocab - num_columns} ids are missing"
    padding = each.answer.logits[:, vocab:]
    if padding.size and (padding.max(1) >= each.found.max(1)).any():
        return f"{of}: a column behind the vocabulary has the largest logit"
    return None


def _miscounted(each: Compared) -> str | None:
    """What is wrong with the number and range of the log-probabilities, in one clause."""
    log_probs = each.answer.log_probs
    if log_probs is None:
        return "no log-probabilities came, though they were asked for"
    if len(log_probs) not in (len(each.answer.ids), len(each.answer.tokens)):
        return f"{len(log_probs)} log-probabilities for {len(each.answer.ids)} tokens"
    if not np.isfinite(log_probs).all():
        return "log-probabilities that are not finite"
    return None


@np.errstate(all="ignore")  # what is judged may be anything
def _rows(examination: Examination) -> str:
    """Divergence, agreement and largest difference of all rows together, and what is wrong with single answers."""
    trial, (compared, words) = examination.trial, _ask(examination, _misshapen, logits=True)
    if not compared:
        return f"no logits could be compared{words}"
    for each in compared:
        if problem := _absurd(each):
            examination.fault(each.case, *problem)
    if examination.faulty:
        return f"{len(compared)} answers with logits{words}"
    for each in compared:
        if problem := _untrue(trial, each):
            examination.fault(each.case, *problem)
    budget = BUDGETS[trial.yardstick.precision]
    max_kl = _COMPUTED * budget.max_kl
    n = [min(len(each.right), len(each.found)) for each in compared]
    right = np.concatenate([each.right[:num] for each, num in zip(compared, n, strict=True)])
    found = np.concatenate([each.found[:num] for each, num in zip(compared, n, strict=True)])
    kl, differences = divergence(right, found), _differences(right, found)
    mean, largest = float(kl.mean()), float(differences.max())
    top1, strict = (_agreement(right, found, tie) for tie in (budget.tie, 0.0))
    evidence = (
        f"KL {mean:.2g} (budget {max_kl:g}), largest {kl.max():.2g}; top-1 {top1:.1%} (budget "
        f"{budget.min_top1:.1%}), {strict:.1%} without ties; largest difference {largest:.2g}; {len(kl)} rows"
    )
    limit = 4 * trial.yardstick.tolerance
    off = mean > max_kl or top1 < budget.min_top1 or kl.max() > _WRONG_ROW * max_kl
    if off or largest > limit:
        cause = _cause(compared, max_kl) if off else f"largest difference {largest:.2g}, limit {limit:.2g}"
        worst_row = int(kl.argmax()) if off else int(differences.argmax())
        which = next(i for i in range(len(n)) if worst_row < sum(n[: i + 1]))
        place, case = worst_row - sum(n[:which]), compared[which].case
        examination.fault(case, place, f"{evidence}: {cause}")
    elif _is_normalised(found) and not _is_normalised(right):
        evidence += "; they are log-probabilities, which differ from logits by a constant"
    if any(each.answer.logits is not None and each.answer.logits.shape[1] > each.right.shape[1] for each in compared):
        evidence += "; padded behind the vocabulary"
    return evidence + words


def _absurd(each: Compared) -> tuple[int, str] | None:
    """Position and description of values that no model gives."""
    found, largest = each.found, _ABSURD * float(np.abs(each.right).max())
    masked = np.isneginf(found) & ~np.isneginf(found).all(1, keepdims=True)  # by top-k, say
    wild = ~masked & ~(np.abs(found) <= largest)
    if wild.any():
        row = int(wild.any(1).argmax())
        share, even, odd = wild.mean(), wild[:, ::2].mean(), wild[:, 1::2].mean()
        what = f"{100 * share:.3g} % of the values are absurd (not a number, or beyond {largest:.0f})"
        if max(even, odd) > 0.02 and min(even, odd) < 0.2 * max(even, odd):
            what += ", every second one: float32 read as float16"
        elif share > 0.02:
            what += ": another type than they were written in, such as float16 read as float32"
        return row, what
    if len(found) > 2 and (found == found[0]).all() and len(set(each.answer.tokens)) > 1:
        return 1, f"all {len(found)} rows are equal"
    return None


def _untrue(trial: Trial, each: Compared) -> tuple[int, str] | None:
    """Position and description of a greedy token that is not the first choice of the row that came with it."""
    if not each.query.sampling.greedy:
        return None
    for position, (row, token) in enumerate(zip(each.found, each.answer.ids, strict=False)):
        if 0 <= token < len(row) and not row.max() - row[token] <= trial.yardstick.rounding:
            return position, f"token {token} is not the first choice of its own row, which is {int(row.argmax())}"
    return None


def _differences(right: Rows, found: Rows) -> NDArray[np.float64]:
    """Largest difference in each row, apart from a constant that all logits of a row share; of what is not cut."""
    difference = np.where(np.isfinite(found), found.astype(np.float64) - right, np.nan)
    return np.nanmax(np.abs(difference - np.nanmedian(difference, axis=1, keepdims=True)), axis=1)


def _agreement(right: Rows, found: Rows, tie: float) -> float:
    """Part of the rows whose first choice the reference puts first, or behind it by no more than `tie`."""
    chosen = np.take_along_axis(right, np.nan_to_num(found, nan=-np.inf).argmax(1)[:, None], axis=1)[:, 0]
    return float((right.max(1) - chosen <= tie).mean())


def _is_normalised(rows: Rows) -> bool:
    return bool((np.abs(np.logaddexp.reduce(rows.astype(np.float64), axis=1)) < 0.01).all())


def _cause(compared: Sequence[Compared], max_kl: float) -> str:
    """The trap after whose undoing the rows agree best, if they agree then."""
    best, words = np.inf, "no known trap explains it"
    before = _mean_divergence([(each.right, each.found) for each in compared])
    for words_of, undo in TRAPS:
        undone = [undo(each.right, each.found) for each in compared]
        pairs = [pair for pair in undone if pair is not None and len(pair[0])]
        after = _mean_divergence(pairs) if pairs else np.inf
        if after < best and after < max(3 * max_kl, before / 20):
            best, words = after, words_of(compared)
    return words


def _mean_divergence(pairs: Sequence[tuple[Rows, Rows]]) -> float:
    return float(np.nan_to_num(np.concatenate([divergence(*pair) for pair in pairs]), nan=np.inf).mean())


@np.errstate(all="ignore")
def _log_probs(examination: Examination) -> str:
    """Which distribution the log-probabilities are of, all answers together; a fault if it is none."""
    trial, (compared, words) = examination.trial, _ask(examination, _miscounted, log_probs=True)
    if not compared:
        return f"no log-probabilities could be compared{words}"
    expected = {meaning: [_expected(trial, each, meaning) for each in compared] for meaning in MEANINGS}
    given = [np.array(each.answer.log_probs[: len(each.answer.ids)]) for each in compared]  # type: ignore[index]

    def off(meaning: str, undo: LogUndo) -> float:
        pairs = [undo(*pair) for pair in zip(expected[meaning], given, strict=True)]
        return max((float(np.nan_to_num(np.abs(a - b), nan=np.inf).max()) for a, b in pairs if len(a)), default=0.0)

    meaning = min(MEANINGS, key=lambda meaning: off(meaning, lambda right, found: (right, found)))
    difference, num = off(meaning, lambda right, found: (right, found)), sum(map(len, given))
    evidence = f"{meaning}; largest difference {difference:.2g}, tolerance {trial.yardstick.tolerance:g}; {num} tokens"
    if difference <= trial.yardstick.tolerance:
        return evidence + words
    causes = [words for words, undo in FORMS if min(off(m, undo) for m in MEANINGS) <= trial.yardstick.tolerance]
    worst_of = [np.abs(a - b) for a, b in zip(expected[meaning], given, strict=True)]
    which = max(range(len(compared)), key=lambda i: float(worst_of[i].max(initial=0.0)))
    problem = f"log-probabilities off by {difference:.2g}: {causes[0] if causes else 'no known trap explains it'}"
    place = int(worst_of[which].argmax()) if len(worst_of[which]) else 0
    examination.fault(compared[which].case, place, problem)
    return evidence + words


RAW, TEMPERED, FINAL = "before temperature", "after temperature", "after temperature, top-k and top-p"
MEANINGS = (RAW, TEMPERED, FINAL)


def _expected(trial: Trial, each: Compared, meaning: str) -> NDArray[np.float64]:
    """Log-probabilities of the ids of an answer under the reference; -inf where they are impossible."""
    sampling = each.query.sampling
    if meaning == RAW or (meaning == TEMPERED and sampling.greedy):
        sampling = SamplingParams(temperature=1.0)
    elif meaning == TEMPERED:
        sampling = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
    p = [
        trial.yardstick.distribution(row, (*each.query.ids, *each.answer.ids[:position]), sampling)[token]
        for position, (row, token) in enumerate(zip(each.right, each.answer.ids, strict=False))
    ]
    return np.log(np.array(p))


LogUndo = Callable[[NDArray[np.float64], NDArray[np.float64]], tuple[NDArray[np.float64], NDArray[np.float64]]]
FORMS: tuple[tuple[str, LogUndo], ...] = (
    ("logarithms to base 2", lambda right, found: (right, found * np.log(2))),
    ("logarithms to base 10", lambda right, found: (right, found * np.log(10))),
    ("with the wrong sign", lambda right, found: (right, -found)),
    ("probabilities instead of their logarithms", lambda right, found: (right, np.log(found))),
    ("sums over all tokens so far", lambda right, found: (right, np.diff(found, prepend=0.0))),
    ("each is that of the token after its own", lambda right, found: (right[1:], found[:-1])),
    ("each is that of the token before its own", lambda right, found: (right[:-1], found[1:])),
)
"""What log-probabilities are mistaken for, in words, and what undoes it."""


Undo = Callable[[Rows, Rows], "tuple[Rows, Rows] | None"]  # reference and subject, `[n, vocab]`; None: does not apply


def _shifted(by: int) -> Undo:
    def undo(right: Rows, found: Rows) -> tuple[Rows, Rows] | None:
        n = min(len(right), len(found)) - abs(by)
        if n < 3:
            return None
        return (right[by : by + n], found[:n]) if by > 0 else (right[:n], found[-by : n - by])

    return undo


def _slope(right: Rows, found: Rows) -> float:
    """By what the logits are multiplied, by least squares; constants of the rows and what is cut left out."""
    n = min(len(right), len(found))
    seen = np.isfinite(found[:n])
    count = seen.sum(1, keepdims=True)
    x, y = (np.where(seen, rows[:n], 0.0).astype(np.float64) for rows in (right, found))
    x, y = (np.where(seen, rows - rows.sum(1, keepdims=True) / np.maximum(1, count), 0.0) for rows in (x, y))
    return float((x * y).sum() / max(_EPSILON, (x * x).sum()))


def _scaled(right: Rows, found: Rows) -> tuple[Rows, Rows] | None:
    slope = _slope(right, found)
    return (right, found / np.float32(slope)) if slope > 0.05 else None


def _cut(right: Rows, found: Rows) -> tuple[Rows, Rows] | None:
    n = min(len(right), len(found))
    kept = np.where(np.isneginf(found[:n]), -np.inf, right[:n]).astype(np.float32)
    return _scaled(kept, found[:n]) if np.isneginf(found).any() else _scaled(right, found)


def _probabilities(right: Rows, found: Rows) -> tuple[Rows, Rows] | None:
    return (right, np.log(found + np.float32(_EPSILON))) if found.min() >= 0 and found.max() <= 1 else None


def _bfloat16_read_as_float16(right: Rows, found: Rows) -> tuple[Rows, Rows] | None:
    bits = found.astype(np.float16).view(np.uint16).astype(np.uint32) << 16
    return right, bits.view(np.float32)


def _float16_read_as_bfloat16(right: Rows, found: Rows) -> tuple[Rows, Rows] | None:
    bits = (np.ascontiguousarray(found).view(np.uint32) >> 16).astype(np.uint16)
    return right, bits.view(np.float16).astype(np.float32)


def _words_of_scale(compared: Sequence[Compared]) -> str:
    slopes = [(_slope(*pair), each) for each in compared if (pair := _masked(each)) is not None]
    slope, each = max(slopes, key=lambda item: abs(item[0] - 1))
    asked = "that of the query" if abs(1 / slope - each.query.sampling.temperature) < 0.02 else "nobody asked for"
    return f"scaled by {slope:.3g}, as by a temperature of {1 / slope:.3g}, {asked}"


def _masked(each: Compared) -> tuple[Rows, Rows]:
    n = min(len(each.right), len(each.found))
    return np.where(np.isneginf(each.found[:n]), -np.inf, each.right[:n]).astype(np.float32), each.found[:n]


def _said(words: str) -> Callable[[Sequence[Compared]], str]:
    return lambda compared: words


TRAPS: tuple[tuple[Callable[[Sequence[Compared]], str], Undo], ...] = (
    *(
        (_said(f"each row is that of the token {abs(by)} {'after' if by > 0 else 'before'} its own"), _shifted(by))
        for by in (-1, 1, -2, 2, -3, 3)
    ),
    (_words_of_scale, _scaled),
    (lambda compared: f"processed: {_words_of_scale(compared)}, and what top-k or top-p excludes is -inf", _cut),
    (_said("probabilities instead of logits"), _probabilities),
    (_said("bfloat16 read as float16"), _bfloat16_read_as_float16),
    (_said("float16 read as bfloat16"), _float16_read_as_bfloat16),
)
"""What goes wrong with logits on their way, in words, and what undoes it."""

CLAIMS = (
    Claim("generation-logits", "the generation logits are the reference's, one row a token", _rows),
    Claim("log-probs", "the log-probabilities are the reference's, one a token", _log_probs),
)
PARTS = tuple(claim.name for claim in CLAIMS)
