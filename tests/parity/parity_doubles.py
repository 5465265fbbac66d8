"""Small worlds for the parity checks: models that are tables, an engine over a table, and ways to break it.

The tables are Markov chains of order 1 over `VOCAB` ids, so a whole run takes milliseconds. The right engine goes
through the decoding core's own cycle, samplers and verification; each broken one changes one thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from trtspec.decoding.draft_target import AcceptanceMode, DraftModel
from trtspec.decoding.engine_call import EngineCall, EngineRequest, EngineResult
from trtspec.decoding.sampler import TokenSampler
from trtspec.decoding.sampling import SamplingParams
from trtspec.decoding.verify import verify
from trtspec.parity.subjects.in_process import InProcess
from trtspec.parity.trial import Case, Trial
from trtspec.parity.yardstick import Yardstick

VOCAB, END = 16, 0
FULL = SamplingParams(temperature=1.0)
CUT = SamplingParams(temperature=0.8, top_k=8, top_p=0.9)


class Table:
    """A model: logits [VOCAB, VOCAB], row i is what follows id i."""

    def __init__(self, probabilities: np.ndarray) -> None:
        self.rows = np.log(probabilities).astype(np.float32)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        return self.rows[np.asarray(ids)]


def tables(seed: int = 0) -> tuple[Table, Table]:
    """Target and draft; the draft is about half right (total variation near 0.4), and ends are rare in both."""
    rng = np.random.default_rng(seed)
    target = rng.dirichlet(np.full(VOCAB, 0.5), size=VOCAB)
    draft = 0.2 * target + 0.8 * rng.dirichlet(np.full(VOCAB, 0.5), size=VOCAB)
    for table in (target, draft):
        table += 1e-4
        table[:, END] = 0.02
        table /= table.sum(axis=1, keepdims=True)
    return Table(target), Table(draft)


TARGET, DRAFT = tables()


def engine(table: Table, verifier: Callable[..., tuple[list[int], int]] | None = None) -> EngineCall:
    """The engine call of a table; `verifier(rows, request)` replaces the decoding core's verification."""

    def call(request: EngineRequest) -> EngineResult:
        if request.draft_tokens is None:
            sampler, rows = TokenSampler(request), []
            while not sampler.finished:
                last = sampler.tokens[-1] if sampler.tokens else request.input_ids[-1]
                rows.append(table.rows[last])
                sampler.append(sampler.next(rows[-1]))
            return EngineResult(np.array(sampler.tokens, dtype=np.int32), generation_logits=np.array(rows))
        rows = table.rows[[request.input_ids[-1], *request.draft_tokens]]
        if verifier is None:
            verification = verify(rows, request)
            tokens, accepted = list(verification.tokens), verification.num_accepted
        else:
            tokens, accepted = verifier(rows, request)
        return EngineResult(np.array(tokens, dtype=np.int32), num_accepted=accepted)

    return call


def subject(
    target: EngineCall | None = None,
    draft: EngineCall | None = None,
    acceptance: AcceptanceMode = "auto",
    **settings: object,
) -> InProcess:
    """Engines over the tables and the product's cycle; each part can be replaced."""
    given = {"end_ids": (END,), "decode": decode, **settings}
    proposing = draft or engine(DRAFT)
    return InProcess(target or engine(TARGET), lambda: DraftModel(proposing, acceptance), **given)  # type: ignore[arg-type]


def decode(ids: list[int]) -> str:
    """Each id is a letter."""
    return "".join(chr(ord("a") + i) for i in ids)


class RememberingYardstick(Yardstick):
    """Without penalties a distribution depends on its row alone, and a table has few rows: computes each one once."""

    def distribution(
        self, row: np.ndarray, context: Sequence[int], sampling: SamplingParams, *, slack: float | None = None
    ) -> np.ndarray:
        if sampling.penalised and len(context):
            return super().distribution(row, context, sampling, slack=slack)
        settings = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        key = (row.tobytes(), settings, slack, self.end_ids)
        if key not in _DISTRIBUTIONS:
            _DISTRIBUTIONS[key] = super().distribution(row, (), sampling, slack=slack)
        return _DISTRIBUTIONS[key]


_DISTRIBUTIONS: dict[tuple[object, ...], np.ndarray] = {}


def trial(**changes: object) -> Trial:
    """A run over four one-token prompts, as the command would set it up."""
    yardstick = RememberingYardstick(
        target=TARGET,
        draft=DRAFT,
        vocab_size=VOCAB,
        end_ids=(END,),
        decode=decode,
        piece=lambda token: decode([token]),
        tolerance=2e-3,
    )
    settings: dict[str, object] = {
        "yardstick": yardstick,
        "cases": tuple(Case(number, decode([number]), (number,)) for number in (1, 2, 3, 4)),
        "max_tokens": 40,
        "num_draft_tokens": 3,
        "samplings": (FULL, CUT),
        "num_samples": 600,
        "num_draws": 200,
        "seed": 0,
        "alpha": 1e-3,
        "context": None,
        "reproduce": lambda check, subject, prompt: f"{check} {subject} {prompt}",
        "advance": lambda fraction: None,
    }
    return Trial(**(settings | changes))  # type: ignore[arg-type]


def broken_verifier(
    *,
    accept: Callable[[float, float], float] = lambda p, q: min(1.0, p / q),
    residual: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda p, q: np.maximum(p - q, 0.0),
    bonus: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda p, last_q: p,
) -> Callable[..., tuple[list[int], int]]:
    """Rejection sampling written out, so that one of its rules can be wrong; with none changed it is right.

    Args:
        accept: probability of accepting, of p and q of the draft token.
        residual: what a rejected token is replaced from (normalised here), of p and q.
        bonus: what the token after full acceptance is drawn from, of p and of the draft's distribution before it.
    """

    def verifier(rows: np.ndarray, request: EngineRequest) -> tuple[list[int], int]:
        if request.sampling.greedy or request.draft_logits is None:
            verification = verify(rows, request)
            return list(verification.tokens), verification.num_accepted
        sampler, rng = TokenSampler(request), np.random.default_rng(request.sampling.seed)
        drafts = [int(token) for token in request.draft_tokens]  # type: ignore[union-attr]
        q = [sampler.probabilities(row) for row in request.draft_logits]
        for position, draft in enumerate(drafts):
            p = sampler.probabilities(rows[position])
            if rng.random() >= accept(p[draft], q[position][draft]):
                rest = residual(p, q[position])
                own = int(rng.choice(len(p), p=rest / rest.sum()))
                return [*drafts[:position], own], position
            if draft == request.end_id:
                return drafts[: position + 1], position + 1
        rest = bonus(sampler.probabilities(rows[len(drafts)]), q[-1])
        return [*drafts, int(rng.choice(len(rest), p=rest / rest.sum()))], len(drafts)

    return verifier


def without_memory_of_rejection(table: Table) -> EngineCall:
    """A target whose KV cache is off by one: after a rejection it still holds the rejected draft token in place of the
    corrected one, so the next pass begins from the wrong token."""
    state: dict[str, int] = {}
    plain = engine(table)

    def call(request: EngineRequest) -> EngineResult:
        if request.draft_tokens is None:
            return plain(request)
        seen = request.input_ids.copy()
        if state.get("length") == len(seen):
            seen[-1] = state["stale"]
        result = plain(replace(request, input_ids=seen))
        drafts = request.draft_tokens
        rejected = result.num_accepted < len(drafts)
        state.clear()
        if rejected:
            state.update(length=len(seen) + len(result.output_ids), stale=int(drafts[result.num_accepted]))
        return result

    return call
