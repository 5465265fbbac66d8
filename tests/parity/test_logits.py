"""The check of returned logits and log-probabilities: right ones pass, and each trap is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import parity_doubles as doubles
import pytest
from parity_doubles import TARGET, VOCAB, trial

from trtspec.decoding.sampling import SamplingParams
from trtspec.parity.generation_logits import PARTS, check_logits, cost
from trtspec.parity.result import Check, Part, Verdict
from trtspec.parity.subjects import Answer, Query, Unsupported
from trtspec.runtime.reference import distribution

Break = Callable[[np.ndarray, Query], np.ndarray]
WARM = SamplingParams(temperature=0.5, top_k=8, top_p=0.9)


class Speaking:
    """A sampler of the table that returns what it saw.

    Args:
        rows: breaks the logits on their way out.
        log_probs: breaks the log-probabilities.
        processed: the log-probabilities are those after temperature, top-k and top-p.
        refuses: queries that it does not support.
    """

    name = "speaking"

    def __init__(
        self,
        rows: Break = lambda rows, query: rows,
        log_probs: Break = lambda values, query: values,
        processed: bool = False,
        refuses: Callable[[Query], bool] = lambda query: False,
    ) -> None:
        self._break_rows, self._break_log_probs = rows, log_probs
        self._processed, self._refuses = processed, refuses

    def generate(self, query: Query) -> Answer:
        if self._refuses(query):
            raise Unsupported("it returns none")
        rng = np.random.default_rng(query.sampling.seed)
        tokens: list[int] = []
        rows, log_probs = [], []
        while len(tokens) < query.max_tokens:
            row = TARGET.rows[[*query.ids, *tokens][-1]]
            p = distribution(row, [*query.ids, *tokens], query.sampling)
            token = int(rng.choice(VOCAB, p=p))
            raw = distribution(row, [], SamplingParams(temperature=1.0))
            if token == doubles.END:
                break
            tokens.append(token)
            rows.append(row)
            log_probs.append(np.log(p[token] if self._processed else raw[token]))
        return Answer(
            blocks=tuple((token,) for token in tokens),
            text=doubles.decode(tokens),
            finish_reason="length" if len(tokens) == query.max_tokens else "stop",
            logits=self._break_rows(np.array(rows), query) if query.logits else None,
            log_probs=tuple(self._break_log_probs(np.array(log_probs), query)) if query.log_probs else None,
        )


def check(subject: Speaking, **changes: object) -> Check:
    return check_logits(trial(samplings=(WARM,), **changes), subject)


def parts(found: Check) -> tuple[Part, Part]:
    logits, log_probs = found.parts
    return logits, log_probs


def test_what_is_right_passes() -> None:
    found = check(Speaking())
    assert found.verdict == Verdict.PASS, found
    logits, log_probs = parts(found)
    assert "top-1 100.0%" in logits.evidence
    assert log_probs.evidence.startswith("before temperature")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (lambda rows, query: rows + np.arange(len(rows), dtype=np.float32)[:, None], "KL"),
        (lambda rows, query: rows - np.logaddexp.reduce(rows, axis=1, keepdims=True), "KL"),
        (lambda rows, query: np.pad(rows, ((0, 0), (0, 3)), constant_values=-1e9), "padded behind the vocabulary"),
    ],
    ids=["a constant a row", "log-softmax", "padding"],
)
def test_what_changes_no_distribution_passes(rows: Break, words: str) -> None:
    logits, _ = parts(check(Speaking(rows)))
    assert logits.verdict == Verdict.PASS, logits
    assert words in logits.evidence


def half_precision(rows: np.ndarray, query: Query) -> np.ndarray:
    """float16 numbers read as float32, and what is missing at the end taken from the beginning."""
    return np.resize(rows.astype(np.float16).reshape(-1).view(np.float32), rows.shape)


def double_precision(rows: np.ndarray, query: Query) -> np.ndarray:
    """The first half of float32 numbers read as float16."""
    return np.resize(rows.reshape(-1).view(np.float16).astype(np.float32), rows.shape)


def bfloat16_bits(rows: np.ndarray) -> np.ndarray:
    return (rows.view(np.uint32) >> 16).astype(np.uint16)


def processed(rows: np.ndarray, query: Query) -> np.ndarray:
    if query.sampling.greedy:
        return rows
    with np.errstate(divide="ignore"):
        return np.log([distribution(row, [], query.sampling) for row in rows]).astype(np.float32)


TRAPS: dict[str, tuple[Break, str]] = {
    "one row late": (lambda rows, query: np.roll(rows, 1, 0), "the token 1 before its own"),
    "one row early": (lambda rows, query: np.roll(rows, -1, 0), "the token 1 after its own"),
    "prompt included": (
        lambda rows, query: np.concatenate([TARGET.rows[list(query.ids)], rows]),
        "rows of the prompt's 4 tokens are included",
    ),
    "half the rows": (lambda rows, query: rows[: len(rows) // 2], "half as long"),
    "half the columns": (lambda rows, query: rows[:, : VOCAB // 2], "half as long"),
    "twice the columns": (lambda rows, query: np.concatenate([rows, rows], 1), "twice as long"),
    "a row missing": (lambda rows, query: rows[:-1], "-1 rows"),
    "ids missing": (lambda rows, query: rows[:, :-1], "1 ids are missing"),
    "padding that wins": (lambda rows, query: np.pad(rows, ((0, 0), (0, 1)), constant_values=9), "a column behind"),
    "float16 as float32": (half_precision, "another type than they were written in"),
    "float32 as float16": (double_precision, "every second one"),
    "not a number": (lambda rows, query: rows * np.nan, "100 % of the values are absurd"),
    "one infinity": (lambda rows, query: np.where(rows == rows[3].max(), np.inf, rows), "of the values are absurd"),
    "all rows equal": (lambda rows, query: np.repeat(rows[:1], len(rows), 0), "rows are equal"),
    "temperature applied": (
        lambda rows, query: rows / np.float32(query.sampling.temperature or 1.0),
        "a temperature of 0.5, that of the query",
    ),
    "another temperature": (lambda rows, query: rows * np.float32(1.25), "a temperature of 0.8, nobody asked for"),
    "processed": (processed, "processed: scaled by 2, as by a temperature of 0.5, that of the query"),
    "probabilities": (
        lambda rows, query: np.exp(rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)),
        "probabilities instead of logits",
    ),
    "bfloat16 as float16": (
        lambda rows, query: bfloat16_bits(rows).view(np.float16).astype(np.float32),
        "bfloat16 read as float16",
    ),
    "columns exchanged": (lambda rows, query: rows[:, ::-1].copy(), "not the first choice of its own row"),
    "one id wrong": (lambda rows, query: rows - 4 * (np.arange(VOCAB) == 5).astype(np.float32), "KL"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_each_trap_is_found_and_named(name: str) -> None:
    rows, words = TRAPS[name]
    made = trial(samplings=(WARM,))
    if name == "prompt included":  # the row of a prompt of one token is the first of the answer
        made = replace(made, cases=tuple(replace(case, ids=(7, 8, 9, *case.ids)) for case in made.cases))
    found = check_logits(made, Speaking(rows))
    logits, log_probs = parts(found)
    assert logits.verdict == Verdict.FAULT
    assert log_probs.verdict == Verdict.PASS
    assert any(words in finding.problem for finding in found.findings), found.findings
    assert all(finding.reproduce.startswith("logits:generation-logits speaking") for finding in found.findings)


@pytest.mark.parametrize(
    ("break_", "words"),
    [
        (lambda values, query: values / np.log(2), "logarithms to base 2"),
        (lambda values, query: values / np.log(10), "logarithms to base 10"),
        (lambda values, query: -values, "with the wrong sign"),
        (lambda values, query: np.exp(values), "probabilities instead of their logarithms"),
        (lambda values, query: np.cumsum(values), "sums over all tokens so far"),
        (lambda values, query: np.roll(values, 1), "each is that of the token before its own"),
        (lambda values, query: np.roll(values, -1), "each is that of the token after its own"),
        (lambda values, query: values[1:], "log-probabilities for"),
        (lambda values, query: values * np.nan, "not finite"),
        (lambda values, query: values - 0.3 * (np.arange(len(values)) == 5), "off by 0.3: no known trap"),
    ],
)
def test_wrong_log_probabilities(break_: Break, words: str) -> None:
    logits, log_probs = parts(found := check(Speaking(log_probs=break_)))
    assert logits.verdict == Verdict.PASS
    assert log_probs.verdict == Verdict.FAULT
    assert any(words in finding.problem for finding in found.findings), found.findings


def test_processed_log_probabilities_are_named() -> None:
    _, log_probs = parts(check(Speaking(processed=True)))
    assert log_probs.verdict == Verdict.PASS
    assert log_probs.evidence.startswith("after temperature, top-k and top-p")


def test_what_a_subject_does_not_return_is_not_applicable() -> None:
    found = check(Speaking(refuses=lambda query: True))
    assert found.verdict == Verdict.NOT_APPLICABLE
    assert "it returns none" in found.evidence


def test_a_subject_that_returns_them_without_drafts_only_is_checked_there() -> None:
    found = check(Speaking(refuses=lambda query: query.num_draft_tokens > 0))
    assert found.verdict == Verdict.PASS
    assert all("not with drafts: it returns none" in part.evidence for part in found.parts)


def test_logits_that_were_asked_for_and_do_not_come() -> None:
    class Silent(Speaking):
        def generate(self, query: Query) -> Answer:
            return super().generate(replace(query, logits=False, log_probs=False))

    found = check(Silent())
    assert found.verdict == Verdict.FAULT
    assert {finding.problem.split(",")[0] for finding in found.findings} == {
        "no logits came",
        "no log-probabilities came",
    }


def test_the_cost_is_what_is_asked() -> None:
    asked: list[Query] = []

    class Counting(Speaking):
        def generate(self, query: Query) -> Answer:
            asked.append(query)
            return super().generate(query)

    check(Counting())
    assert cost(trial(samplings=(WARM,))) == sum(query.max_tokens for query in asked)
    assert {part.name for part in check(Speaking()).parts} == set(PARTS)
