"""Moving a running server from one version to another: stage, switch, watch, drain, replace, switch home.

    staged    parts of the new version are loaded beside the old ones          (old pipelines answer)
    switched  pipelines are loaded again and call the staged parts             (old pipelines end their requests)
    replaced  nothing uses the old parts: they are unloaded, the new ones take their place and are loaded
    home      pipelines are loaded again and call the parts in their places    (staged parts are unloaded)

A pipeline's process knows the names of the parts that it calls from its start to its end, so no request meets two
versions. Every stage can be done again, so what was cut off is gone on with from the beginning. Knows the repository,
the server and the store; not how a version is built or judged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trtspec.errors import TrtspecError
from trtspec.rollout.live import LiveServer
from trtspec.rollout.stage import PIPELINES, ServedRepository, in_order_of_requests, is_engine, parts
from trtspec.rollout.store import SERVER, VERSIONS, Move, Record, Store, now
from trtspec.triton.client import Completion, ServerError
from trtspec.triton.server_state import build_stamp, running

_WATCH_TOKENS = 16
_FULL = "texts are waiting"  # what a pipeline says when it takes no more
_FULL_PAUSE_S = 0.2
_BETWEEN_STEPS_S = 0.2  # an ensemble's request may be on its way from one model to the next


@dataclass(frozen=True)
class Watch:
    """Requests that are sent to a version after the switch.

    Attributes:
        prompts: plain texts, in turn.
        requests: how many.
        timeout_s: longest wait for one answer, in seconds.
    """

    prompts: Sequence[str]
    requests: int
    timeout_s: float


class Mover:
    """Moves one server, or the files alone where none is running.

    Args:
        store: the versions; locked.
        repository: what is served.
        server: None: none is running.
        watch: after each switch.
        say: is told in one line how it goes on.
    """

    def __init__(
        self,
        store: Store,
        repository: ServedRepository,
        server: LiveServer | None,
        watch: Watch,
        say: Callable[[str], None],
    ) -> None:
        self._store, self._repository, self._server = store, repository, server
        self._watch, self._say = watch, say
        self._said_kept = False

    def move(self, target: int, served: tuple[int, ...]) -> None:
        """Serve version `target`.

        Args:
            target: a kept version.
            served: what the record says of those served, afterwards.

        Raises:
            TrtspecError: it does not load, or does not answer: then the version before goes on serving; or requests of
                that version do not end: then both stay loaded.
        """
        store = self._store
        record = store.record
        if record.move is None or record.move.target != target:
            origin = record.move.origin if record.move else record.served[-1]
            replacing = bool(record.move and record.move.replacing)
            store.save(replace(record, move=Move(origin, target, replacing)))
        if self._server is None:
            self._replace(target)
        else:
            self._through(self._server, target)
        self._end(target, served, now())

    def undo(self) -> None:
        """Let the version that a move began from serve again; its files are in their places and its parts loaded."""
        move = self._store.record.move
        assert move is not None and not move.replacing
        if self._server is not None:
            self._go_home(self._server, move.origin)
        self._end(move.origin, self._store.record.served, self._store.record.versions[move.origin].served_since)

    def _through(self, server: LiveServer, target: int) -> None:
        kept = self._store.repository_of(target)
        engines = f"{VERSIONS}/{target}/engines"
        move = self._store.record.move
        assert move is not None
        try:
            self._say(f"loading version {target} beside version {move.origin}")
            server.load(self._repository.stage(kept, target, engines))
            self._say(f"switching to version {target}")
            for model in PIPELINES:
                self._repository.point_to_stage(model, kept, target)
            server.load(PIPELINES)
            self._try_out(server, target)
        except (TrtspecError, OSError, KeyboardInterrupt) as error:
            if not move.replacing:
                self._say(f"version {target} is taken back: {str(error) or 'interrupted'}")
                self.undo()
            raise
        self._drain(server, parts(self._repository.path))
        self._mark_replacing()
        _unload(server, parts(self._repository.path))
        self._say("the version before has answered its last request and is unloaded")
        self._replace(target)
        try:
            server.load(parts(kept))
        except TrtspecError as error:
            raise TrtspecError(
                f"version {target} serves from where it was staged, and does not load in its place: {error}",
                where=str(self._repository.path),
                fix="run the same command again to go on",
            ) from error
        self._go_home(server, target)

    def _go_home(self, server: LiveServer, number: int) -> None:
        """Pipelines call what lies in its place; staged parts are unloaded once nobody asks them."""
        kept = self._store.repository_of(number)
        if away := self._repository.away():
            for model in away:
                self._repository.point_home(model, kept)
            server.load(away)
            self._drain(server, self._repository.staged())
        _unload(server, self._repository.staged())

    def _drain(self, server: LiveServer, called: Sequence[str]) -> None:
        """Wait until the pipelines that call these parts have answered all their requests."""
        ended = server.wait_answered(PIPELINES, [model for model in called if is_engine(model)])
        if not ended and not self._said_kept:
            self._said_kept = True
            self._say("a process of a pipeline stays, idle, until the server ends: a client left a stream unread")

    def _try_out(self, server: LiveServer, target: int) -> None:
        """Some requests must be answered."""
        tokens = passes = 0
        for number in range(self._watch.requests):
            prompt = self._watch.prompts[number % len(self._watch.prompts)]
            answer = self._ask(server, prompt, stream=number % 2 == 0)
            tokens, passes = tokens + answer.stats.tokens, passes + answer.stats.target_passes
        if self._watch.requests:
            rate = f", {tokens / passes:.2f} tokens a target pass" if passes else ""
            self._say(f"version {target} has answered {self._watch.requests} requests{rate}")

    def _ask(self, server: LiveServer, prompt: str, *, stream: bool) -> Completion:
        """One answer; a queue full of other requests is no fault of the version, so it is waited for a place."""
        deadline = time.monotonic() + self._watch.timeout_s
        while True:
            try:
                return server.complete(prompt, max_tokens=_WATCH_TOKENS, stream=stream, timeout_s=self._watch.timeout_s)
            except ServerError as error:
                if _FULL not in error.message or time.monotonic() > deadline:
                    raise
            time.sleep(_FULL_PAUSE_S)

    def _mark_replacing(self) -> None:
        record = self._store.record
        assert record.move is not None
        self._store.save(replace(record, move=replace(record.move, replacing=True)))

    def _replace(self, target: int) -> None:
        """Put the files of a version in the place of those that nobody uses any more."""
        self._mark_replacing()
        self._store.install_engines(target)
        self._repository.bring_home(self._store.repository_of(target))

    def _end(self, number: int, served: tuple[int, ...], since: str) -> None:
        """Leave the repository as a build writes it, and the record without a move."""
        store = self._store
        self._repository.tidy(store.repository_of(number))
        state_dir = store.engines / SERVER
        # The server's record comes first: cut off between the two, all of this is done again.
        if (state := running(state_dir)) is not None:
            replace(state, build=build_stamp(store.repository, store.engines)).write(state_dir)
        version = replace(store.record.versions[number], served_since=since)
        store.save(Record({**store.record.versions, number: version}, served))


def _unload(server: LiveServer, models: Sequence[str]) -> None:
    """One after the other as an ensemble's request passes them: it goes on to the next model, which must be there."""
    steps = in_order_of_requests(models)
    for step in steps:
        time.sleep(_BETWEEN_STEPS_S)
        server.unload(step)
        if step is not steps[-1]:
            server.wait_gone(step)
