"""Where each key of a spec came from, for messages. Knows paths, lines and override keys; not what keys mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Key = tuple[str | int, ...]


@dataclass(frozen=True)
class Marks:
    """`file` as the user typed it, the line (from 1) of each key in it, and the keys that `--set` wrote."""

    file: Path
    lines: Mapping[Key, int]
    overrides: Sequence[Key] = ()

    def where(self, key: Key) -> str:
        """`file:line: dotted.key`, or `--set dotted.key` for what an override wrote."""
        if any(key[: len(override)] == override for override in self.overrides):
            return f"--set {dotted(key)}"
        if key not in self.lines:
            # A section that is there only because an override wrote below it.
            made = next((override for override in self.overrides if override[: len(key)] == key != ()), None)
            if made:
                return f"--set {dotted(made)}"
        place = f"{self.file}:{self.line(key)}"
        return f"{place}: {dotted(key)}" if key else place

    def line(self, key: Key) -> int:
        """The line of `key`, or of the nearest section around it."""
        return next((self.lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.lines), 1)


def dotted(key: Key) -> str:
    """`('speculation', 'medusa', 'choices', 0)` as `speculation.medusa.choices[0]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).lstrip(".")
