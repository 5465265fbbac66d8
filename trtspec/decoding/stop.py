"""Stop strings, matched on text as it arrives in pieces.

Knows text only; end ids are the cycle's matter.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string, and holds back what may still become one.

    The stop string that is complete first ends the text; of several complete at the same character, the longest. Its
    own characters are not passed on. How the text is cut into pieces does not matter.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.stopped = False
        self._strings = tuple(strings)
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece; returns the text that is certain now."""
        if self.stopped:
            return ""
        self._held += text
        found = [(start + len(stop), start) for stop in self._strings if (start := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)[1]]
        certain = len(self._held) - max((self._overlap(stop) for stop in self._strings), default=0)
        passed, self._held = self._held[:certain], self._held[certain:]
        return passed

    def flush(self) -> str:
        """The text that was held back, at the end of the stream; nothing after a stop string."""
        rest, self._held = "" if self.stopped else self._held, ""
        return rest

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that `stop` begins with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
