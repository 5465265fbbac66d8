"""Draft and verify in turns: all requests draft together, then all verify together.

For a draft and a target that share a processor. Left to themselves, requests are out of step: the target verifies one
while another drafts, each pass serves one, and the two engines slow each other down. Knows threads and a clock only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable

DRAFT, VERIFY = "draft", "verify"
_OTHER = {DRAFT: VERIFY, VERIFY: DRAFT}
# Who comes back from a call is waited for this share of the time that the phase took: the pipeline's own work between
# two calls. Without, the first one back would begin alone, and the others together behind it.
_WINDOW = 0.1
_LONGEST_WINDOW_S = 0.01


class Phases:
    """Lets calls of one phase run at a time.

    A phase goes on until its calls are done; while somebody waits for the other one, nobody joins it. Then those who
    took part are waited for, a moment at most, and all who want the other phase begin together; if nobody does, all who
    want the same one again. So both have their turn.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._phase = VERIFY  # under way or, with nobody inside, the last one
        self._inside: dict[Hashable, Hashable] = {}  # call -> whose it is
        self._waiting: dict[str, dict[Hashable, Hashable]] = {DRAFT: {}, VERIFY: {}}
        self._expected: set[Hashable] = set()  # whose calls were in the phase that is over, and who may come back
        self._began_s = self._begin_by_s = 0.0

    def enter(self, phase: str, call: Hashable, request: Hashable) -> None:
        """Wait for the phase, and be part of it until `leave(call)`.

        Args:
            phase: `DRAFT` or `VERIFY`.
            call: tells this call from all others.
            request: whose call it is.
        """
        with self._changed:
            self._expected.discard(request)
            if self._inside and self._phase == phase and not self._waiting[_OTHER[phase]]:
                self._inside[call] = request
                return
            self._waiting[phase][call] = request
            while True:
                self._begin_if_due()
                if call in self._inside:
                    return
                self._changed.wait(None if self._inside else self._begin_by_s - time.monotonic())

    def leave(self, call: Hashable) -> None:
        """The call is done, or left behind; a second time means nothing."""
        with self._changed:
            if call not in self._inside:
                return
            self._expected.add(self._inside.pop(call))
            if self._inside:
                return
            now = time.monotonic()
            self._begin_by_s = now + min(_WINDOW * (now - self._began_s), _LONGEST_WINDOW_S)
            self._changed.notify_all()

    def _begin_if_due(self) -> None:
        """Begin a phase, if none is under way and nobody has to be waited for. At least one call is waiting."""
        now = time.monotonic()
        if self._inside or (self._expected and now < self._begin_by_s):
            return
        if self._waiting[_OTHER[self._phase]]:
            self._phase = _OTHER[self._phase]
        self._inside, self._waiting[self._phase] = self._waiting[self._phase], {}
        self._expected.clear()
        self._began_s = now
        self._changed.notify_all()
