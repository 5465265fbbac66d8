"""What a served model repository looks like while a version comes into it.

The models that do the work are staged beside those that serve, under names of their own; the pipelines, which clients
ask, get a version directory whose config calls the staged names. At rest a repository is what a build writes. Knows
config.pbtxt and directories; no server.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.rollout.store import remove, replace_tree
from trtspec.triton.launch import models_in_order
from trtspec.triton.pbtxt import to_text
from trtspec.triton.repository import BLS, BLS_UNARY, ENGINE_MODELS

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

PIPELINES = (BLS, BLS_UNARY, "ensemble")
_FIRST = "preprocessing"
HOME = 1  # version directory of a pipeline at rest
_STAGED = re.compile(r"_v\d+$")


def staged_name(model: str, number: int) -> str:
    """Name of a model of version `number` while that is staged."""
    return f"{model}_v{number}"


def parts(repository: Path) -> list[str]:
    """Models that pipelines call."""
    return [name for name in models_in_order(repository) if name not in PIPELINES and not _STAGED.search(name)]


def is_engine(model: str) -> bool:
    """Whether a part, staged or not, is an engine's model."""
    return _STAGED.sub("", model) in ENGINE_MODELS.values()


def in_order_of_requests(models: Sequence[str]) -> list[list[str]]:
    """Parts, staged or not, in the steps in which a request of the ensemble passes them."""
    before = [model for model in models if _STAGED.sub("", model) == _FIRST]
    engines = [model for model in models if is_engine(model)]
    after = [model for model in models if model not in (*before, *engines)]
    return [step for step in (before, engines, after) if step]


class ServedRepository:
    """The repository of a server.

    Args:
        path: its directory.
        mount_point: where its configs say the engines are.
    """

    def __init__(self, path: Path, mount_point: str) -> None:
        self.path = path
        self._mount_point = mount_point.rstrip("/")
        self._incoming = path.with_name(f".{path.name}.incoming")  # not inside: a server would take it for a model

    def stage(self, kept: Path, number: int, engines: str) -> list[str]:
        """Put the parts of a kept version beside those that serve; returns their staged names.

        Args:
            kept: the version's own repository.
            number: of the version.
            engines: where the version's engines are, from the mount point.
        """
        names = parts(kept)
        for name in names:
            place = self.path / staged_name(name, number)
            if place.exists():  # whole, since it came by a rename
                continue
            config = read_config(kept / name)
            config.name = place.name
            if is_engine(name):
                path = config.parameters["gpt_model_path"]
                path.string_value = f"{self._mount_point}/{engines}/{Path(path.string_value).name}"
            self._bring(kept / name, place, config)
        return [staged_name(name, number) for name in names]

    def point_to_stage(self, pipeline: str, kept: Path, number: int) -> None:
        """Let a pipeline serve version `number` from its staged parts, once it is loaded."""
        config = read_config(kept / pipeline)
        called = set(parts(kept))
        for key, value in config.parameters.items():
            if key.endswith("_model_name") and value.string_value in called:
                value.string_value = staged_name(value.string_value, number)
        for step in config.ensemble_scheduling.step:
            step.model_name = staged_name(step.model_name, number)
        directory = _away(number)
        if not (self.path / pipeline / str(directory)).exists():
            now = read_config(self.path / pipeline)
            if not now.HasField("version_policy"):  # without one, whoever loads it would take the new directory
                self._serve(pipeline, now, HOME)
            self._copy(kept / pipeline / str(HOME), self.path / pipeline / str(directory))
        self._serve(pipeline, config, directory)

    def point_home(self, pipeline: str, kept: Path) -> None:
        """Let a pipeline serve what lies at home, once it is loaded; the files there must be those of `kept`."""
        if read_config(self.path / pipeline).HasField("version_policy"):
            self._serve(pipeline, read_config(kept / pipeline), HOME)

    def away(self) -> list[str]:
        """Pipelines that have been pointed to a staged version since the repository was at rest."""
        return [name for name in PIPELINES if _versions(self.path / name) != {HOME}]

    def bring_home(self, kept: Path) -> None:
        """Replace the parts, and the pipelines' version directories at home; configs of pipelines stay as they are."""
        for name in parts(kept):
            self._bring(kept / name, self.path / name, None)
        for name in set(parts(self.path)) - set(parts(kept)):
            remove(self.path / name)
        for name in PIPELINES:
            self._copy(kept / name / str(HOME), self.path / name / str(HOME))

    def tidy(self, kept: Path) -> None:
        """Leave what a build would have written: no staged part, one version directory, the config without a policy."""
        for path in sorted(self.path.iterdir()):
            if path.is_dir() and _STAGED.search(path.name):
                remove(path)
        for name in PIPELINES:
            for number in _versions(self.path / name) - {HOME}:
                remove(self.path / name / str(number))
            self._write(self.path / name, (kept / name / "config.pbtxt").read_text(encoding="utf-8"))
        shutil.rmtree(self._incoming, ignore_errors=True)

    def staged(self) -> list[str]:
        """Names of the staged parts of any version."""
        return sorted(path.parent.name for path in self.path.glob("*/config.pbtxt") if _STAGED.search(path.parent.name))

    def _serve(self, pipeline: str, config: ModelConfig, directory: int) -> None:
        config.version_policy.specific.versions.append(directory)
        self._write(self.path / pipeline, to_text(config))

    def _write(self, model: Path, text: str) -> None:
        """Replace a config whole, and leave an equal one alone: Triton loads again what has a new time."""
        file = model / "config.pbtxt"
        if file.read_text(encoding="utf-8") == text:
            return
        self._incoming.mkdir(exist_ok=True)
        (self._incoming / "config.pbtxt").write_text(text, encoding="utf-8")
        os.replace(self._incoming / "config.pbtxt", file)

    def _bring(self, source: Path, place: Path, config: ModelConfig | None) -> None:
        incoming = self._incoming / place.name
        remove(incoming)
        shutil.copytree(source, incoming)
        if config is not None:
            (incoming / "config.pbtxt").write_text(to_text(config), encoding="utf-8")
        replace_tree(incoming, place)

    def _copy(self, source: Path, place: Path) -> None:
        self._incoming.mkdir(exist_ok=True)
        self._bring(source, place, None)


def read_config(model: Path) -> ModelConfig:
    """The config of a model directory."""
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    return text_format.Parse((model / "config.pbtxt").read_text(encoding="utf-8"), ModelConfig())


def _versions(model: Path) -> set[int]:
    """Numbers of the version directories of a model."""
    return {int(path.name) for path in model.iterdir() if path.name.isdecimal()}


def _away(number: int) -> int:
    """Version directory of a pipeline on its way to version `number`; never `HOME`."""
    return number + 1
