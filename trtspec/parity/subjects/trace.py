"""A recorded trace as a subject: it answers what was asked when it was recorded, and nothing else."""

from __future__ import annotations

import threading
from collections import defaultdict

from trtspec.errors import TrtspecError
from trtspec.parity.subjects import Answer, Query, Unsupported
from trtspec.parity.trace import Record, Trace


class Recorded:
    """One subject of a trace, in place of itself.

    A query that was recorded several times is answered that often, in the same order.

    Args:
        trace: the trace.
        subject: whose answers; needed where there are those of several.

    Raises:
        TrtspecError: the trace does not have that subject, or several without saying which.

    Attributes:
        recorded_from: the name of that subject.
    """

    name = "trace"

    def __init__(self, trace: Trace, subject: str | None = None) -> None:
        names = trace.subjects
        if (subject is None and len(names) != 1) or (subject is not None and subject not in names):
            wrong = "no answers" if not names else f"answers of {', '.join(names)}"
            raise TrtspecError(
                f"the trace has {wrong}", where=str(trace.path), expected=f"those of {subject or 'one subject'}"
            )
        self.recorded_from = subject or names[0]
        self._path = trace.path
        self._lock = threading.Lock()
        self._records: defaultdict[Query, list[Record]] = defaultdict(list)
        self._num_given: defaultdict[Query, int] = defaultdict(int)
        for record in trace.records:
            if record.subject == self.recorded_from:
                self._records[record.query].append(record)

    def generate(self, query: Query) -> Answer:
        """See `Subject.generate`."""
        with self._lock:
            records, turn = self._records.get(query, []), self._num_given[query]
            self._num_given[query] += 1
        if not records:
            raise Unsupported("the trace does not have this query", where=str(self._path))
        if turn >= len(records):
            raise Unsupported(f"the trace has {len(records)} of the answers to this query", where=str(self._path))
        record = records[turn]
        if record.left_out:
            raise Unsupported(f"the trace does not keep {', '.join(record.left_out)}", where=str(self._path))
        if record.answer is None:
            raise Unsupported(record.error) if record.unsupported else TrtspecError(record.error)
        return record.answer
