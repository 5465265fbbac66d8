"""Makes the test doubles of this folder importable, and the reference's distribution of a table row quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from trtspec.decoding.sampling import SamplingParams
from trtspec.parity import yardstick

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def remembered_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table has few rows, and without penalties a distribution depends on its row alone: compute each one once."""
    real = yardstick.distribution
    known: dict[tuple[bytes, float, int, float], np.ndarray] = {}

    def distribution(row: np.ndarray, context: Sequence[int], sampling: SamplingParams) -> np.ndarray:
        key = (row.tobytes(), sampling.temperature, sampling.top_k, sampling.top_p)
        if key not in known:
            known[key] = real(row, context, sampling)
        return known[key].copy()

    monkeypatch.setattr(yardstick, "distribution", distribution)
