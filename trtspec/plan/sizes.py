"""Sizes of a spec's models, from their configs alone or from named shapes: a plan needs no weights on this disk.

Knows where configs lie. Reads neither weights nor tokenizers, and downloads nothing larger than a config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.models.source import PACKAGE_PREFIX, locate, open_model
from trtspec.plan.shapes import LatentConfig, shape_of
from trtspec.spec.schema import Spec


@dataclass(frozen=True)
class ModelSizes:
    """Called with a spec: role -> what the config of its model says, cut to the layers that the spec keeps.

    Each config is read once; of a hub name that is not here, the config is asked for. Raises TrtspecError for a model
    that is neither here nor on the hub, a damaged config, an unknown shape, or more layers kept than there are.

    Args:
        shapes: role -> named shape (`trtspec.plan.shapes`) to take instead of the model of a spec that has the role.
    """

    shapes: Mapping[str, str] = field(default_factory=dict)
    _configs: dict[tuple[str, str | None, Path], ModelConfig] = field(default_factory=dict, repr=False)

    def __call__(self, spec: Spec) -> dict[str, ModelConfig]:
        shapes = self.shapes
        if spec.speculation.method == "early_exit":  # its draft is made of the target's layers
            shapes = dict.fromkeys(spec.models, shapes["target"]) if "target" in shapes else {}
        return {
            role: _cut(spec, role, shape_of(shapes[role]) if role in shapes else self._config(spec, role))
            for role in spec.models
        }

    def _config(self, spec: Spec, role: str) -> ModelConfig:
        ref = spec.models[role]
        key = ref.model, ref.gguf_file, spec.base_dir
        if key not in self._configs:
            self._configs[key] = _opened(spec, role)
        return self._configs[key]


def _opened(spec: Spec, role: str) -> ModelConfig:
    ref = spec.models[role]
    if ref.gguf_file is not None and (ref.model.startswith(PACKAGE_PREFIX) or spec.path(ref.model).is_dir()):
        return open_model(ref.model, gguf_file=ref.gguf_file, base_dir=spec.base_dir).config
    try:
        folder = locate(ref.model, spec.base_dir, ["config.json"])
    except TrtspecError as error:
        fix = f"name a known shape with --{role}-shape, or give a directory that holds its config.json"
        raise TrtspecError(f"{error.problem}: its sizes are not known", where=error.where, fix=fix) from error
    return _read(folder / "config.json")


def _read(path: Path) -> ModelConfig:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise TrtspecError(problem, where=str(path), expected="the config of a Hugging Face model") from error
    if not isinstance(config, dict):
        raise TrtspecError("not a JSON object", where=str(path), expected="the config of a Hugging Face model")
    try:
        sizes = ModelConfig.from_hf(config)
        return LatentConfig.of(sizes, config) if "kv_lora_rank" in config else sizes
    except TrtspecError as error:
        raise TrtspecError(error.problem, where=str(path), expected=error.expected) from error


def _cut(spec: Spec, role: str, config: ModelConfig) -> ModelConfig:
    kept, there = spec.models[role].num_layers, config.num_hidden_layers
    if kept is None:
        return config
    if kept >= there:
        raise TrtspecError(
            f"the first {kept} of {there} layers are no smaller model",
            where=f"the {role} of {spec.name}",
            expected=f"1 to {there - 1} layers",
        )
    return replace(config, num_hidden_layers=kept, num_nextn_predict_layers=0)
