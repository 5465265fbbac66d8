"""What a job tells those who follow its build: JSON Lines that are appended to, over a file system that may lag.

A line is `{"event": NAME, "step": STEP, ...}` for each method of `build.graph.Observer`, and at the end
`{"event": "ended", "error": TEXT or null}`. Knows steps' names and outcomes, and nothing of Slurm.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trtspec.build.graph import Observer, Outcome

ENDED = "ended"
_ADVANCE_S = 0.5  # at most one fraction a step in so many seconds


def outcome_fields(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON can hold it."""
    return asdict(outcome) | {"output": outcome.output and str(outcome.output), "actions": list(outcome.actions)}


def outcome_of(content: Mapping[str, Any]) -> Outcome:
    """The outcome with these fields."""
    output = content["output"]
    return Outcome(**{**content, "output": output and Path(output), "actions": tuple(content["actions"])})


class Teller:
    """Observer that writes to the file what becomes of some steps; the file is replaced.

    Args:
        path: the file.
        steps: names of the steps that are told of.
    """

    def __init__(self, path: Path, steps: Collection[str]) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._steps = steps
        self._last: dict[str, float] = {}
        self._done: set[str] = set()

    def started(self, name: str, reason: str) -> None:
        self._tell("started", name, reason=reason)

    def advance(self, name: str, fraction: float) -> None:
        now = time.monotonic()
        if now - self._last.get(name, 0.0) >= _ADVANCE_S:
            self._last[name] = now
            self._tell("advance", name, fraction=fraction)

    def note(self, name: str, text: str) -> None:
        self._tell("note", name, text=text)

    def finished(self, outcome: Outcome) -> None:
        if outcome.name in self._done:  # and looked at again, because a later step needs it
            return
        self._done.add(outcome.name)
        self._tell("finished", outcome.name, outcome=outcome_fields(outcome))

    def ended(self, error: str | None) -> None:
        """Nothing comes after this."""
        self._write({"event": ENDED, "error": error})
        self._file.close()

    def _tell(self, event: str, step: str, **more: Any) -> None:
        if step in self._steps:
            self._write({"event": event, "step": step, **more})

    def _write(self, content: dict[str, Any]) -> None:
        self._file.write(json.dumps(content) + "\n")
        self._file.flush()


class Listener:
    """Reads the file of one job as it grows, and passes on what is new.

    Args:
        path: the file, which need not be there yet.

    Attributes:
        outcomes: of the steps that have ended, by name.
        running: names of the steps that have begun and not ended.
        has_ended: whether the job has said so.
        error: what it said then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.outcomes: dict[str, Outcome] = {}
        self.running: list[str] = []
        self.has_ended = False
        self.error: str | None = None

    def listen(self, observer: Observer) -> None:
        """Pass whole lines that are new to the observer."""
        try:
            with self._path.open("rb") as file:  # opened anew each time: then a network file system looks again
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._pass_on(json.loads(line), observer)

    def _pass_on(self, content: Mapping[str, Any], observer: Observer) -> None:
        event, step = content["event"], content.get("step", "")
        if event == ENDED:
            self.has_ended, self.error = True, content["error"]
        elif event == "finished":
            outcome = outcome_of(content["outcome"])
            self.outcomes[step] = outcome
            if step in self.running:
                self.running.remove(step)
            observer.finished(outcome)
        elif event == "started":
            self.running.append(step)
            observer.started(step, content["reason"])
        elif event == "advance":
            observer.advance(step, content["fraction"])
        else:
            observer.note(step, content["text"])
