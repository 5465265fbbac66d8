"""Requests to a running server at the same time: clients that wait for their answers (closed loop), or arrivals that
wait for nobody (open loop), and the times of one streamed answer.

All times of an answer count from when it was planned. In an open loop that is its arrival, whether or not a thread was
free to send it: a slow server cannot hide by slowing down those who ask. Knows tensors of the pipeline and clocks; no
arms, rounds or figures.
"""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import count
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    import numpy as np

    from trtspec.triton.client import Client, ModelInfo

REFUSED, TIMED_OUT, GONE, ERROR = "refused", "timed out", "server gone", "error"
_OUTPUTS = (  # a server makes only what is asked for: every tensor costs it time in every response
    "text_output",
    "output_ids",
    "num_input_tokens",
    "num_output_tokens",
    "total_draft_tokens",
    "total_accepted_draft_tokens",
    "total_target_passes",
    "finish_reason",
)
_TEXTS = ("text_output", "output_ids", "finish_reason")
_REUSED, _BLOCKS = "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"
_LEAVE_S = 5.0  # given to requests under way when a load is stopped


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        prompt: plain text, any chat template already applied.
        num_draft_tokens: None leaves it to the server.
        temperature: 0 is greedy.
        seed: of a sampled answer.
    """

    prompt: str
    max_tokens: int
    num_draft_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """What became of a request. Seconds count from when it was planned.

    Attributes:
        sent_s: until it was sent.
        end_s: until its end, or its error.
        blocks: (seconds, tokens) of each piece that brought tokens. Where the server sends no ids, the tokens of the
            answer are spread evenly over its pieces of text.
        input_tokens: of the prompt; None if the server does not say.
        drafted, accepted: draft tokens proposed and accepted.
        passes: of the target.
        reused_blocks: KV-cache blocks that an earlier request had filled; None if the server does not say.
        finish: stop, length or cancelled; None if the server does not say.
        digest: of the text, to tell answers apart.
        error: kind of the error: one of `REFUSED`, `TIMED_OUT`, `GONE`, `ERROR`; None: it was answered.
        message: the error's words.
    """

    sent_s: float
    end_s: float
    blocks: tuple[tuple[float, float], ...] = ()
    input_tokens: int | None = None
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    reused_blocks: int | None = None
    finish: str | None = None
    digest: str = ""
    error: str | None = None
    message: str = ""

    @property
    def tokens(self) -> float:
        """Of the answer."""
        return sum(tokens for _, tokens in self.blocks)

    @property
    def first_s(self) -> float | None:
        """Until the first token; None: none came."""
        return self.blocks[0][0] if self.blocks else None

    @property
    def later(self) -> tuple[float, float]:
        """Tokens after the first block, and seconds from the first block to the last."""
        if not self.blocks:
            return 0.0, 0.0
        return self.tokens - self.blocks[0][1], self.blocks[-1][0] - self.blocks[0][0]


class Sender:
    """Sends requests to one model of a server. Safe to use from several threads at once.

    Args:
        client: connected.
        model: with the tensors of the pipeline; it streams if it is decoupled.
        cache: ask how many blocks of the KV cache were reused, where the model can say so.
        timeout_s: longest time for one answer, in seconds.

    Raises:
        TrtspecError: no server, or it has no such model.
    """

    def __init__(self, client: Client, model: str, *, cache: bool, timeout_s: float) -> None:
        self._client, self._model, self._timeout_s = client, model, timeout_s
        self.info: ModelInfo = client.info(model)
        self._asks_reuse = (
            cache and "return_perf_metrics" in self.info.inputs and {_REUSED, _BLOCKS} <= self.info.outputs
        )
        wanted = (*_OUTPUTS, _REUSED, _BLOCKS) if self._asks_reuse else _OUTPUTS
        self._outputs = [name for name in wanted if name in self.info.outputs]

    def send(self, ask: Ask, planned: float, stop: threading.Event) -> Answer:
        """One request, to its end.

        Args:
            planned: when it was to be sent, on the clock of `time.monotonic`.
            stop: once it is set, the request is cancelled and what has come so far is returned.
        """
        sent_s = time.monotonic() - planned
        pieces: list[tuple[float, str, int | None]] = []  # seconds, text, number of ids
        last: dict[str, Any] = {}
        error = message = None
        responses = self._client.infer(self._model, self._inputs(ask), self._outputs, self._timeout_s)
        try:
            with closing(responses):  # type: ignore[type-var]
                for response in responses:
                    now = time.monotonic() - planned
                    ids = response.get("output_ids")
                    pieces.append((now, _text(response.get("text_output")), None if ids is None else ids.size))
                    last |= response
                    if stop.is_set():
                        break
        except TrtspecError as problem:
            error, message = _kind(problem), getattr(problem, "message", str(problem))
        end_s = time.monotonic() - planned
        number = {name: int(last[name].flat[0]) for name in self._outputs if name in last and name not in _TEXTS}
        blocks = _blocks(pieces, number.get("num_output_tokens"))
        tokens, accepted = round(sum(n for _, n in blocks)), number.get("total_accepted_draft_tokens", 0)
        return Answer(
            sent_s=sent_s,
            end_s=end_s,
            blocks=blocks,
            input_tokens=number.get("num_input_tokens"),
            drafted=number.get("total_draft_tokens", 0),
            accepted=accepted,
            # Every pass adds a token of the target's own, so a server that does not count its passes still tells them.
            passes=number.get("total_target_passes", max(tokens - accepted, 0)),
            reused_blocks=number.get(_REUSED)
            if number.get(_BLOCKS)
            else None,  # no blocks at all: they are not counted
            finish=_text(last.get("finish_reason")) or None,
            digest=sha256("".join(text for _, text, _ in pieces).encode()).hexdigest()[:16],
            error=error,
            message=message or "",
        )

    def _inputs(self, ask: Ask) -> Mapping[str, np.ndarray]:
        """Tensors of a request, those that the model has."""
        import numpy as np

        sampled = ask.temperature > 0
        values = {
            "text_input": _bytes(ask.prompt),
            "max_tokens": np.int32(ask.max_tokens),
            "stream": np.bool_(True),
            "exclude_input_in_output": np.bool_(True),
            "num_draft_tokens": None if ask.num_draft_tokens is None else np.int32(ask.num_draft_tokens),
            "temperature": np.float32(ask.temperature) if sampled else None,
            "top_p": np.float32(1.0) if sampled else None,  # a temperature alone may mean greedy to a server
            "seed": np.uint64(ask.seed) if sampled else None,
            "return_perf_metrics": np.bool_(True) if self._asks_reuse else None,
        }
        shape = (1, 1) if self.info.batched else (1,)
        return {
            name: np.asarray(value).reshape(shape)
            for name, value in values.items()
            if value is not None and name in self.info.inputs
        }


def closed_loop(
    num_clients: int,
    work: Callable[[int, float], None],
    stop: threading.Event,
    *,
    requests: int | None = None,
    seconds: float | None = None,
) -> float:
    """Clients that each take the next number as soon as they are done.

    Args:
        work: does one request; given its number, from 0, and when it was taken (`time.monotonic`).
        stop: set when a request raises; may be set from outside. Nothing new is begun then.
        requests: how many; or
        seconds: until when new ones are begun.

    Returns:
        Seconds until the first client found nothing left to do: until then all were busy.

    Raises:
        Exception: the first one that `work` raised.
    """
    numbers, lock = count(), threading.Lock()
    begin = time.monotonic()
    idle: list[float] = []

    def client() -> None:
        while not stop.is_set():
            with lock:
                number, now = next(numbers), time.monotonic()
                if (requests is not None and number >= requests) or (seconds is not None and now - begin >= seconds):
                    idle.append(now - begin)
                    return
            work(number, now)

    _side_by_side([client] * num_clients, stop)
    return min(idle, default=time.monotonic() - begin)


def open_loop(arrivals: Sequence[float], work: Callable[[int, float], None], stop: threading.Event) -> float:
    """Requests that are sent when they arrive, however many are under way.

    Args:
        arrivals: seconds from now, rising.
        work: as in `closed_loop`; its time is that of the arrival.
        stop: as in `closed_loop`.

    Returns:
        Seconds until the last request had ended.

    Raises:
        Exception: the first one that `work` raised.
    """
    begin = time.monotonic()

    def jobs() -> Iterator[Callable[[], None]]:
        for number, arrival in enumerate(arrivals):
            if stop.wait(begin + arrival - time.monotonic()):
                return
            yield partial(work, number, begin + arrival)

    _side_by_side(jobs(), stop)
    return time.monotonic() - begin


def poisson(rate: float, seed: int | str, *, requests: int | None = None, seconds: float | None = None) -> list[float]:
    """Arrival times in seconds, rising: independent exponential pauses of 1/`rate` on average.

    Args:
        rate: requests per second.
        seed: the same one gives the same times.
        requests: how many; or
        seconds: until when.
    """
    draws = random.Random(seed)
    times: list[float] = []
    now = draws.expovariate(rate)
    while len(times) < requests if requests is not None else now < (seconds or 0.0):
        times.append(now)
        now += draws.expovariate(rate)
    return times


def in_turn(arms: Sequence[str], number: int) -> list[str]:
    """The arms, each first in its turn."""
    shift = number % len(arms)
    return [*arms[shift:], *arms[:shift]]


def _side_by_side(jobs: Iterable[Callable[[], None]], stop: threading.Event) -> None:
    """Run each in a thread as it comes, and wait for all; the first exception ends the others and is raised."""
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads: list[threading.Thread] = []
    try:
        for job in jobs:
            threads.append(threading.Thread(target=run, args=(job,), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
    except BaseException:
        stop.set()
        deadline = time.monotonic() + _LEAVE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        raise
    if errors:
        raise errors[0]


def _blocks(pieces: Sequence[tuple[float, str, int | None]], tokens: int | None) -> tuple[tuple[float, float], ...]:
    """Seconds and tokens of the pieces that brought any."""
    if any(ids is not None for _, _, ids in pieces):
        return tuple((seconds, float(ids)) for seconds, _, ids in pieces if ids)
    times = [seconds for seconds, text, _ in pieces if text]
    return tuple((seconds, (tokens or len(times)) / len(times)) for seconds in times)


def _kind(problem: TrtspecError) -> str:
    from trtspec.triton.client import ServerError, ServerGone

    if isinstance(problem, ServerGone):
        return GONE
    if isinstance(problem, ServerError) and problem.status == "DEADLINE_EXCEEDED":
        return TIMED_OUT
    return REFUSED if "too many requests" in str(problem) else ERROR


def _bytes(text: str) -> np.ndarray:
    """A text as Triton has it on the wire, its length in front."""
    import numpy as np

    data = text.encode()
    data = struct.pack("<I", len(data)) + data
    return np.array(data, dtype=f"S{len(data)}")  # `tobytes` keeps zeros at the end, which items of such arrays lose


def _text(array: np.ndarray | None) -> str:
    return "" if array is None else b"".join(array.ravel().tolist()).decode("utf-8", errors="replace")
