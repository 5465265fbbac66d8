"""Does memory grow? That of the server and of every model's process, without files and shared memory, and the shared.

The load is steady and mixed, some clients leave. What grows in the beginning is left out as warm-up; the rest is cut
into pieces, and a line is drawn through their means. The error of its slope comes from how these scatter: samples that
follow each other closely are too alike to tell.

A leak under steady load is as steep at the end as in the beginning; arenas and caches fill up. So growth is excused,
as settling, only where the second half is surely less than half as steep as the first. Neither can be told from a
leak that is much smaller than what settles: allow more warm-up.

Triton 2.51 keeps some 6 KiB of every stream whose call is cancelled after the last response, before the call's status
has come; of streams that are read to their end, or cancelled before their last response, it keeps nothing.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from load import ERROR, HUNG, Ask, Crowd, mixed, tally
from serving import Watched, free_ports, watched
from tiny import tiny_server

from trtspec.errors import TrtspecError

SHARED = "shared memory"
PIECES = 10
_LEAVE_SHARE = 0.1
_SEED = 12
_SURE = 3.0  # standard errors
_NEGLIGIBLE = 0.01  # of the mean, an hour
_MIB = 1 << 20


@dataclass(frozen=True)
class Trend:
    """A line through what one process took after the warm-up.

    Attributes:
        mib: mean.
        slope, error: MiB an hour, and the standard error of that.
        settling: it surely grows less than half as fast in the second half as in the first.
    """

    mib: float
    slope: float
    error: float
    settling: bool = False

    @property
    def steady(self) -> bool:
        """It does not grow, as far as can be told, or by less than matters."""
        return self.slope <= max(_SURE * self.error, _NEGLIGIBLE * self.mib)


def trend(seconds: Sequence[float], sizes: Sequence[float], pieces: int = PIECES) -> Trend:
    """The line through the means of so many pieces.

    Args:
        seconds: when the samples were taken, rising.
        sizes: bytes.

    Raises:
        ValueError: fewer samples than pieces, or fewer than three pieces.
    """
    if not 3 <= pieces <= len(seconds):
        raise ValueError(f"{len(seconds)} samples in {pieces} pieces; expected 3 pieces or more, none empty")
    hours = np.array([piece.mean() for piece in np.array_split(np.asarray(seconds, dtype=float), pieces)]) / 3600
    mib = np.array([piece.mean() for piece in np.array_split(np.asarray(sizes, dtype=float), pieces)]) / _MIB
    slope, error = _line(hours, mib)
    return Trend(float(mib.mean()), slope, error, _settling(hours, mib))


def _line(hours: np.ndarray, mib: np.ndarray) -> tuple[float, float]:
    """The slope and its standard error."""
    apart = hours - hours.mean()
    slope = float(apart @ mib / (apart @ apart))
    residuals = mib - mib.mean() - slope * apart
    error = math.sqrt(float(residuals @ residuals) / (len(mib) - 2) / float(apart @ apart))
    return slope, error


def _settling(hours: np.ndarray, mib: np.ndarray) -> bool:
    half = len(mib) // 2
    if half < 3:
        return False
    (early, early_error), (late, late_error) = _line(hours[:half], mib[:half]), _line(hours[-half:], mib[-half:])
    return early - 2 * late > _SURE * math.hypot(early_error, 2 * late_error)


@dataclass(frozen=True)
class Soaked:
    """What came of it: lines by process and for the shared memory, and requests by how they ended."""

    trends: Mapping[str, Trend]
    requests: Mapping[str, int]

    @property
    def steady(self) -> bool:
        """Nothing grew but what settles, and every request was answered."""
        failed = self.requests.get(HUNG, 0) + self.requests.get(ERROR, 0)
        return not failed and all(line.steady or line.settling for line in self.trends.values())


def run(root: Path, *, seconds: float, warmup_s: float, period_s: float, clients: int) -> Soaked:
    """Load the server for so long, and look every `period_s`.

    Raises:
        TrtspecError: too short for a line, or a process died.
    """
    if (seconds - warmup_s) / period_s < PIECES + 1:
        raise TrtspecError(
            f"{seconds:g} s with {warmup_s:g} s of warm-up leave too few samples for a line",
            expected=f"more than {PIECES} of them, one every {period_s:g} s",
            fix="allow more --soak-seconds",
        )
    random = Random(_SEED)
    asks = itertools.cycle([mixed(random, _LEAVE_SHARE) for _ in range(997)])
    samples: dict[str, list[float]] = defaultdict(list)
    times: list[float] = []
    with watched(tiny_server(root, free_ports())) as found:
        instances, begin = found.processes(), time.monotonic()

        def next_ask() -> Ask | None:
            return next(asks) if time.monotonic() - begin < seconds else None

        crowd = Crowd(found.url, clients, next_ask)
        with crowd:
            while (passed := time.monotonic() - begin) < seconds:
                if passed >= warmup_s:
                    times.append(passed)
                    for name, size in _sizes(found, instances).items():
                        samples[name].append(size)
                time.sleep(period_s)
    requests = tally(crowd.outcomes)
    requests[HUNG] += crowd.stuck
    return Soaked({name: trend(times, sizes) for name, sizes in samples.items()}, dict(requests))


def _sizes(found: Watched, pids: Mapping[str, int]) -> dict[str, float]:
    """Bytes that each takes now."""
    return {name: _private(pid, name, found) for name, pid in pids.items()} | {SHARED: found.shared_memory()}


def _private(pid: int, name: str, found: Watched) -> float:
    """Bytes in memory that are neither of a file nor shared."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        raise TrtspecError(f"the process of {name} died", where=found.server.log_source) from None
