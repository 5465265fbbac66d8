"""Does the pipeline keep its promises while its draft dies, clients leave and its queue is full?

Many clients send mixed requests to a server with tiny engines and a short queue. Meanwhile the process of the draft is
killed again and again, and the supervisor loads it again. In the end nothing may be wrong, hung, leaked or uncounted.
Triton itself may abort when one of its processes is killed; then the supervisor starts it again, requests under way are
lost, as their clients are told, and its counts begin anew.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from load import (
    ANSWERED,
    ERROR,
    HUNG,
    LEFT,
    LOST,
    PROMPTS,
    REFUSED,
    Ask,
    Crowd,
    Outcome,
    attempt,
    is_right,
    mixed,
    tally,
    texts_alone,
)
from serving import Series, Watched, by_label, free_ports, watched
from tiny import NUM_DRAFT_TOKENS, tiny_server

from trtspec.errors import TrtspecError
from trtspec.triton.client import Client

SERVING = {"max_concurrency": 4, "max_queued": 6, "call_timeout_s": 20, "draft_timeout_s": 4}
LEAVE_SHARE = 0.15
_DRAFT = "tensorrt_llm_draft_0_0"
_SETTLE_S = 30.0  # for metrics to be written, threads to end and a draft to be trusted again
_REVIVED_S = 60.0
_LONGEST_S = 300.0
_SEED = 11
_AFTERWARDS = Ask(PROMPTS[0], 30, num_draft_tokens=NUM_DRAFT_TOKENS, stream=True)


@dataclass(frozen=True)
class Finding:
    """One promise: what was found, and whether that keeps it."""

    promise: str
    found: str
    kept: bool


@dataclass(frozen=True)
class Aftermath:
    """What was seen when all was over.

    Attributes:
        wanted: requests that were to be answered.
        outcomes: of all requests.
        wrong: those with another text than alone.
        stuck: clients that never came back.
        counted: requests by finish reason, as the pipeline's metrics count them.
        in_flight: requests under way, as these say.
        pending: requests that wait in Triton, by model.
        drafted: draft tokens of a request afterwards; None: it was not answered as it should be.
        kills, revivals: of the draft.
        restarts: of the server, which brings the draft back as well.
        supervisor: why it gave up; empty if it did not.
    """

    wanted: int
    outcomes: Sequence[Outcome]
    wrong: Sequence[Outcome]
    stuck: int
    counted: Mapping[str, int]
    in_flight: float
    pending: Mapping[str, float]
    drafted: int | None
    kills: int
    revivals: int
    restarts: int = 0
    supervisor: str = ""


def run(root: Path, *, requests: int, kills: int, kill_period_s: float, clients: int) -> Aftermath:
    """Let it happen: goes on until so many requests were answered and the draft was killed so many times."""
    server = tiny_server(root, free_ports(), **SERVING)
    random = Random(_SEED)
    asks = [mixed(random, LEAVE_SHARE) for _ in range(requests)]
    with watched(server, revivals_a_minute=kills) as found, Client(found.url) as client:
        alone = texts_alone(client, [*asks, _AFTERWARDS])
        before = _settled(found, 0)
        endless, killed, deadline = itertools.cycle(asks), 0, time.monotonic() + _LONGEST_S

        def next_ask() -> Ask | None:
            enough = killed >= kills and _num_answered(crowd.outcomes) >= requests
            return None if enough or found.failure or time.monotonic() > deadline else next(endless)

        crowd = Crowd(found.url, clients, next_ask)
        with crowd:
            while killed < kills and not found.failure:
                time.sleep(random.uniform(0.5, 1.5) * kill_period_s)
                _kill(found, killed)
                killed += 1
        surely = sum(outcome.kind != LEFT for outcome in crowd.outcomes)
        after = _settled(found, 0 if found.restarts else sum(before.values()) + surely)
        return Aftermath(
            wanted=requests,
            outcomes=crowd.outcomes,
            wrong=[outcome for outcome in crowd.outcomes if not is_right(outcome, alone)],
            stuck=crowd.stuck,
            counted={kind: after[kind] - (0 if found.restarts else before[kind]) for kind in after},
            in_flight=sum(by_label(found.metrics(), "trtspec_requests_in_flight", "model").values()),
            pending=_pending(found.metrics()),
            drafted=_drafts_again(client, alone),
            kills=killed,
            revivals=len(found.said) - found.restarts,
            restarts=found.restarts,
            supervisor=str(found.failure or ""),
        )


def judge(after: Aftermath) -> list[Finding]:
    """The promises, one by one."""
    clients = tally(after.outcomes)
    hung = clients[HUNG] + after.stuck
    errors = [outcome.error for outcome in after.outcomes if outcome.kind == ERROR]
    known = (*ANSWERED, LEFT, REFUSED, HUNG, ERROR, *((LOST,) if after.restarts else ()))
    strange = {kind: n for kind, n in clients.items() if kind not in known}
    checked = sum(outcome.ask.alone is not None and outcome.kind in ANSWERED for outcome in after.outcomes)
    waiting = {model: count for model, count in after.pending.items() if count}
    miscounted = [] if after.restarts else miscounts(clients, after.counted)
    anew = f"since the last restart: {_shown(after.counted)}; not comparable" if after.restarts else ""
    # A restart brings the draft back too, before or after its own revival.
    brought_back = after.kills - after.restarts <= after.revivals <= after.kills
    example = f", such as {after.wrong[0].ask}: {after.wrong[0].text!r}" if after.wrong else ""
    answered = _num_answered(after.outcomes)
    return [
        Finding("enough answered", f"{answered} of {after.wanted}", answered >= after.wanted),
        Finding("no wrong text", f"{len(after.wrong)} wrong, {checked} compared{example}", not after.wrong),
        Finding("no hang", f"{hung} hung", not hung),
        Finding(
            "no error", f"{len(errors)} errors {errors[:1] or ''} {strange or ''}".rstrip(), not [*errors, *strange]
        ),
        Finding("no leak", f"{after.in_flight:g} in flight, {waiting or 0} pending", not (after.in_flight or waiting)),
        Finding("all counted", "; ".join(miscounted) or anew or _shown(after.counted), not miscounted),
        Finding(
            "server comes back",
            f"{after.restarts} restarts, {clients[LOST]} requests lost or not taken meanwhile",
            bool(after.restarts) or not clients[LOST],
        ),
        Finding("queue limit felt", f"{clients[REFUSED]} refused", clients[REFUSED] > 0),
        Finding("clients left", f"{clients[LEFT]} left", clients[LEFT] > 0),
        Finding(
            "draft comes back",
            f"{after.kills} kills, {after.revivals} revivals, {after.drafted} tokens drafted afterwards"
            + (f"; the supervisor gave up: {after.supervisor}" if after.supervisor else ""),
            bool(after.drafted) and brought_back and not after.supervisor,
        ),
    ]


def miscounts(clients: Mapping[str, int], counted: Mapping[str, int]) -> list[str]:
    """What the metrics say that cannot be, given what clients saw.

    A client that left does not know how its request ended; the pipeline may not even have seen it.
    """
    left, faults = clients.get(LEFT, 0), []
    for kind in (*ANSWERED, REFUSED, ERROR):
        seen, count = clients.get(kind, 0), counted.get(kind, 0)
        if not seen <= count <= seen + left:
            faults.append(f"{kind}: {count} counted, {seen} seen, {left} left")
    if counted.get("cancelled", 0) > left:
        faults.append(f"cancelled: {counted['cancelled']} counted, {left} left")
    sent, total = sum(clients.values()), sum(counted.values())
    if not sent - left <= total <= sent:
        faults.append(f"{total} counted, {sent} sent, {left} left")
    return faults


def _kill(found: Watched, earlier: int) -> None:
    """Kill the draft's process, once it has been loaded again after so many earlier kills."""
    deadline = time.monotonic() + _REVIVED_S
    while len(found.said) < earlier or (pid := found.processes().get(_DRAFT)) is None:
        if found.failure:
            return
        if time.monotonic() > deadline:
            raise TrtspecError("the draft was not loaded again", where=found.server.log_source)
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)


def _settled(found: Watched, at_least: int) -> Counter[str]:
    """Requests by finish reason, once nothing is under way and they do not change any more.

    Returns what there is after some time, if that is less than `at_least`: clients that left may never have been seen.
    """
    deadline, last = time.monotonic() + _SETTLE_S, Counter[str]()
    while True:
        time.sleep(1.5)  # metrics are written twice a second
        try:
            series = found.metrics()
        except TrtspecError:
            if found.failure or time.monotonic() > deadline:
                raise
            continue
        counts = Counter({k: int(v) for k, v in by_label(series, "trtspec_requests_total", "finish_reason").items()})
        idle = not sum(by_label(series, "trtspec_requests_in_flight", "model").values())
        if (idle and counts == last and sum(counts.values()) >= at_least) or time.monotonic() > deadline:
            return counts
        last = counts


def _pending(series: Series) -> dict[str, float]:
    return by_label(series, "nv_inference_pending_request_count", "model")


def _drafts_again(client: Client, alone: Mapping[Ask, str]) -> int | None:
    """Draft tokens of a good request, once the draft is trusted again; None if the request is not answered well."""
    deadline, drafted = time.monotonic() + _SETTLE_S, 0
    while not drafted and time.monotonic() < deadline:
        outcome = attempt(client, _AFTERWARDS)
        if outcome.kind not in ANSWERED or not is_right(outcome, alone):
            return None
        drafted = outcome.drafted
        time.sleep(0.5)
    return drafted


def _num_answered(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.kind in ANSWERED for outcome in outcomes)


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
