"""Mixed requests, and what became of them: plain and speculative, greedy and drawn, streamed and whole, of several
lengths and stop words, some by clients that leave before the end.

Knows what a client sees; not how the server is started, and no figures.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from random import Random

from tiny import MAX_DRAFT_LEN, NUM_DRAFT_TOKENS

from trtspec.errors import TrtspecError
from trtspec.triton.client import Client, ServerError, ServerGone

DEADLINE_S = 60.0  # whoever waits longer counts as hung
LEFT, REFUSED, HUNG, ERROR, LOST = "left", "refused", "hung", "error", "lost"  # lost with the server
ANSWERED = ("stop", "length")
PROMPTS = ("Once upon a time", "def main():", "1 2 3 4 5", "Dear Sir or Madam,", "To be or not", "x" * 90)
_LENGTHS = (1, 9, 30, 80)
_STOP_WORDS: tuple[tuple[str, ...], ...] = ((), ("e",), ("Zq", "a"))
_SEEDS = range(4)
_DRAWN, _STREAMED = 0.3, 0.6  # shares of the requests
_PIECE_S = 0.03  # a client that gets no stream leaves after so long for each piece that another would wait for
_PAUSE_S = 0.2  # of a client that was refused, or has lost the server


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        num_draft_tokens: None leaves it to the server.
        seed: None decodes greedily.
        leave_after: pieces after which the client goes away; None: it stays.
    """

    prompt: str
    max_tokens: int
    stop: tuple[str, ...] = ()
    num_draft_tokens: int | None = 0
    seed: int | None = None
    stream: bool = False
    leave_after: int | None = None

    @property
    def alone(self) -> Ask | None:
        """The plainest request with the same text; None where drafts may change which tokens are drawn."""
        if self.seed is not None and self.num_draft_tokens != 0:
            return None
        return replace(self, num_draft_tokens=0, stream=False, leave_after=None)


@dataclass(frozen=True)
class Outcome:
    """What became of a request: how it ended, the text that came, tokens drafted, and what an error said."""

    ask: Ask
    kind: str
    text: str = ""
    drafted: int = 0
    error: str = ""


def mixed(random: Random, leave_share: float) -> Ask:
    """A request by chance."""
    return Ask(
        prompt=random.choice(PROMPTS),
        max_tokens=random.choice(_LENGTHS),
        stop=random.choice(_STOP_WORDS),
        num_draft_tokens=random.choice((0, None, NUM_DRAFT_TOKENS, MAX_DRAFT_LEN)),
        seed=random.choice(_SEEDS) if random.random() < _DRAWN else None,
        stream=random.random() < _STREAMED,
        leave_after=random.randint(1, 6) if random.random() < leave_share else None,
    )


def attempt(client: Client, ask: Ask) -> Outcome:
    """Send a request once, and wait for its end."""
    text, pieces = "", 0
    leaves_by_deadline = ask.leave_after is not None and not ask.stream
    drawing = {} if ask.seed is None else {"temperature": 0.8, "seed": ask.seed}
    answer = client.generate(
        ask.prompt,
        max_tokens=ask.max_tokens,
        stop=ask.stop,
        num_draft_tokens=ask.num_draft_tokens,
        stream=ask.stream,
        timeout_s=_PIECE_S * (ask.leave_after or 0) if leaves_by_deadline else DEADLINE_S,
        **drawing,
    )
    try:
        with closing(answer) as chunks:  # type: ignore[type-var]
            for chunk in chunks:
                text, pieces = text + chunk.text, pieces + 1
                if chunk.stats is not None:
                    return Outcome(ask, str(chunk.stats.finish_reason), text, chunk.stats.drafted)
                if pieces == ask.leave_after:
                    return Outcome(ask, LEFT, text)
    except ServerError as error:
        if error.status == "DEADLINE_EXCEEDED":
            return Outcome(ask, LEFT if leaves_by_deadline else HUNG, text)
        return Outcome(ask, REFUSED if "too many requests" in error.message else ERROR, text, error=error.message)
    except ServerGone as error:
        return Outcome(ask, LOST, text, error=str(error))
    except TrtspecError as error:
        return Outcome(ask, ERROR, text, error=str(error))
    raise AssertionError("an answer ends with its figures or an error")


@dataclass
class Crowd:
    """Clients at the same time, each with one request after the other; who is refused, or has lost the server,
    comes again after a pause.

    Attributes:
        outcomes: of all requests, the refused and the lost ones too.
        stuck: clients that did not come back although every call has a deadline.
    """

    url: str
    num_clients: int
    next_ask: Callable[[], Ask | None]  # None: it is over
    outcomes: list[Outcome] = field(default_factory=list)
    stuck: int = 0

    def __enter__(self) -> Crowd:
        self._given_up = False
        self._threads = [threading.Thread(target=self._client, daemon=True) for _ in range(self.num_clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._given_up = kind is not None
        deadline = time.monotonic() + 2 * DEADLINE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.stuck = sum(thread.is_alive() for thread in self._threads)

    def _client(self) -> None:
        with Client(self.url) as client:
            while not self._given_up and (ask := self.next_ask()) is not None:
                self.outcomes.append(outcome := attempt(client, ask))
                while outcome.kind in (REFUSED, LOST) and not self._given_up:
                    time.sleep(_PAUSE_S)
                    self.outcomes.append(outcome := attempt(client, ask))


def texts_alone(client: Client, asks: Sequence[Ask]) -> dict[Ask, str]:
    """The texts of the requests that have one right answer, each asked while nothing else is.

    Raises:
        TrtspecError: one is not answered.
    """
    texts = {}
    for ask in dict.fromkeys(alone for ask in asks if (alone := ask.alone)):
        outcome = attempt(client, ask)
        if outcome.kind not in ANSWERED:
            raise TrtspecError(f"a request that is alone ended with {outcome.kind} {outcome.error}", where=client.url)
        texts[ask] = outcome.text
    return texts


def is_right(outcome: Outcome, alone: Mapping[Ask, str]) -> bool:
    """Whether the text is that of the request alone, of a client that left its beginning; True where none is known."""
    if outcome.ask.alone is None or outcome.kind not in (*ANSWERED, LEFT):
        return True
    expected = alone[outcome.ask.alone]
    return expected.startswith(outcome.text) if outcome.kind == LEFT else outcome.text == expected


def tally(outcomes: Sequence[Outcome]) -> Counter[str]:
    """How many requests ended in which way."""
    return Counter(outcome.kind for outcome in outcomes)
