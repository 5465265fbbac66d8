"""The models of a build: opened when first needed, and watched by the times of their files when not.

Knows where a spec's models lie. Does not know what is built from them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.build.fingerprint import digest
from trtspec.spec.schema import Spec

if TYPE_CHECKING:
    from trtspec.models.source import ModelSource

_PACKAGE_PREFIX = "package:"
_HEAD_FILES = ("*.json", "*.safetensors", "*.pt", "*.bin")


class Sources:
    """The models of one spec, by role, and the heads that go on its target."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._open: dict[str, ModelSource] = {}

    def open(self, role: str) -> ModelSource:
        """The model of `role`, a key of `spec.models`; opened once.

        Raises:
            TrtspecError: it is missing or damaged.
        """
        if role not in self._open:
            self._open[role] = self._opened(role)
        return self._open[role]

    def _opened(self, role: str) -> ModelSource:
        from trtspec.models.source import open_model

        ref = self._spec.models[role]
        if role == "draft" and self._spec.speculation.method == "early_exit":
            source = self.open("target")
        else:
            target = None if role == "target" else self.open("target")
            source = open_model(ref.model, gguf_file=ref.gguf_file, base_dir=self._spec.base_dir, target=target)
        if ref.num_layers is None:
            return source
        from trtspec.models.surgery import truncated

        return truncated(source, ref.num_layers)

    def heads(self) -> Path | None:
        """Directory of the weights that the method adds to the target; None: it adds none.

        Raises:
            TrtspecError: they are missing.
        """
        from trtspec.models.source import locate

        name = self._spec.speculation.heads
        return None if name is None else locate(name, self._spec.base_dir, _HEAD_FILES)

    def heads_fingerprint(self) -> str | None:
        """Changes when the heads may have changed; None where there are none."""
        directory = self.heads()
        return None if directory is None else digest(_files(directory))

    def any_is_remote(self) -> bool:
        """Whether opening the models and heads may download something."""
        names = [ref.model for ref in self._spec.models.values()]
        return any(self._is_remote(name) for name in (*names, self._spec.speculation.heads or "."))

    def listings(self) -> dict[str, Any]:
        """For each role, the model's name, and size and time (ns) of every file: changes when a model may have changed.

        A hub name has no files here; it counts as unchanged while the name stays.
        """
        listings = {
            role: {
                "model": ref.model,
                "gguf_file": ref.gguf_file,
                "num_layers": ref.num_layers,
                "files": _files(self._directory(ref.model)),
            }
            for role, ref in self._spec.models.items()
        }
        heads = self._spec.speculation.heads
        return listings | ({"heads": {"model": heads, "files": _files(self._directory(heads))}} if heads else {})

    def _is_remote(self, model: str) -> bool:
        local = model.startswith((_PACKAGE_PREFIX, ".", "/", "~")) or self._spec.path(model).exists()
        return model.count("/") == 1 and not local

    def _directory(self, model: str) -> Path:
        name = model.removeprefix(_PACKAGE_PREFIX)
        if name == model or not name.isidentifier():
            return self._spec.path(model)
        package = importlib.util.find_spec(name)
        return Path(next(iter(package.submodule_search_locations or ()), "")) if package else Path(name)


def _files(directory: Path) -> list[Any]:
    """Name, size and time (ns) of each file of a directory; nothing where there is none."""
    if not directory.is_dir():
        return []
    stats = {path.name: path.stat() for path in sorted(directory.iterdir()) if path.is_file()}
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()]
