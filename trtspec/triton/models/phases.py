"""Draft and verify in turns: all requests draft together, then all verify together.

For a draft and a target that share a GPU and would slow each other down, each running small batches beside the other's.
Knows threads only.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

DRAFT, VERIFY = "draft", "verify"
_OTHER = {DRAFT: VERIFY, VERIFY: DRAFT}


class Phases:
    """Lets calls of one phase run at a time.

    A phase goes on until its calls are done; while somebody waits for the other one, nobody joins it. So both have
    their turn, and those that waited meanwhile begin together.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._phase: str | None = None
        self._inside: set[Hashable] = set()
        self._waiting: dict[str, set[Hashable]] = {DRAFT: set(), VERIFY: set()}

    def enter(self, phase: str, call: Hashable) -> None:
        """Wait for the phase, and be part of it until `leave(call)`."""
        with self._changed:
            if self._phase is None or (self._phase == phase and not self._waiting[_OTHER[phase]]):
                self._phase = phase
                self._inside.add(call)
                return
            self._waiting[phase].add(call)
            self._changed.wait_for(lambda: call in self._inside)

    def leave(self, call: Hashable) -> None:
        """The call is done, or left behind; a second time means nothing."""
        with self._changed:
            self._inside.discard(call)
            if self._inside or self._phase is None:
                return
            self._phase = _OTHER[self._phase]
            if not self._waiting[self._phase]:  # then nobody waits: one waits for its own phase behind the other's only
                self._phase = None
                return
            self._inside, self._waiting[self._phase] = self._waiting[self._phase], set()
            self._changed.notify_all()
