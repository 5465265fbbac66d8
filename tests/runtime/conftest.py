"""Engines of the small models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtspec.models.source import open_model
from trtspec.runtime.engine import write_torch_engine
from trtspec.runtime.torch_runtime import TorchRuntime


@pytest.fixture(scope="session")
def build_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build a torch engine of a model directory; keywords are those of its build_config."""

    def build(model: Path, *, role: str = "target", dtype: str = "float32", **build_config: Any) -> Path:
        out = tmp_path_factory.mktemp("engines") / role
        write_torch_engine(
            open_model(str(model)), out, dtype=dtype, role=role, build_config=build_config, stamp={"version": "1.2.1"}
        )
        return out

    return build


@pytest.fixture(scope="session")
def target_engine(build_engine: Callable[..., Path], tiny_model_dir: Path) -> Path:
    """The tiny target, for up to 8 draft tokens."""
    return build_engine(tiny_model_dir, max_draft_len=8)


@pytest.fixture(scope="session")
def draft_engine(build_engine: Callable[..., Path], tiny_draft_dir: Path) -> Path:
    """The tiny draft."""
    return build_engine(tiny_draft_dir, role="draft")


@pytest.fixture
def target(target_engine: Path) -> TorchRuntime:
    """A fresh runtime of the target."""
    return TorchRuntime(target_engine, kv_cache_bytes=1 << 22)


@pytest.fixture
def draft(draft_engine: Path) -> TorchRuntime:
    """A fresh runtime of the draft."""
    return TorchRuntime(draft_engine, kv_cache_bytes=1 << 22)
