"""The models of a build: opened when first needed, and watched by the times of their files when not.

Knows where a spec's models lie. Does not know what is built from them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.spec.schema import Spec

if TYPE_CHECKING:
    from trtspec.models.source import ModelSource

_PACKAGE_PREFIX = "package:"


class Sources:
    """The models of one spec, by role."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._open: dict[str, ModelSource] = {}

    def open(self, role: str) -> ModelSource:
        """The model of `role`, a key of `spec.models`; opened once.

        Raises:
            TrtspecError: it is missing or damaged.
        """
        from trtspec.models.source import open_model

        if role not in self._open:
            ref = self._spec.models[role]
            target = None if role == "target" else self.open("target")
            self._open[role] = open_model(
                ref.model, gguf_file=ref.gguf_file, base_dir=self._spec.base_dir, target=target
            )
        return self._open[role]

    def is_remote(self, role: str) -> bool:
        """Whether opening the model may download it."""
        model = self._spec.models[role].model
        local = model.startswith((_PACKAGE_PREFIX, ".", "/", "~")) or self._spec.path(model).exists()
        return model.count("/") == 1 and not local

    def listing(self, role: str) -> dict[str, Any]:
        """The model's name, and size and time (ns) of every file: changes when the model may have changed.

        A hub name has no files here; it counts as unchanged while the name stays.
        """
        ref = self._spec.models[role]
        directory = self._directory(ref.model)
        files = []
        if directory.is_dir():
            stats = {path.name: path.stat() for path in sorted(directory.iterdir()) if path.is_file()}
            files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()]
        return {"model": ref.model, "gguf_file": ref.gguf_file, "files": files}

    def _directory(self, model: str) -> Path:
        name = model.removeprefix(_PACKAGE_PREFIX)
        if name == model or not name.isidentifier():
            return self._spec.path(model)
        package = importlib.util.find_spec(name)
        return Path(next(iter(package.submodule_search_locations or ()), "")) if package else Path(name)
