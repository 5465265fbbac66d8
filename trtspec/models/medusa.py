"""Medusa heads as they are published: which file, which names, how many heads and layers, whose output matrix.

A head is, for the last hidden state x, `x + silu(linear(x))` in each of its layers, then a matrix over the vocabulary.
Knows the formats; does not know what runs the heads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError
from trtspec.models.pickled import load_pickled
from trtspec.models.source import safetensors_header

if TYPE_CHECKING:
    import torch

    from trtspec.models.config import ModelConfig
    from trtspec.spec.schema import Medusa

# `0.0.linear.weight` and `0.1.weight`, with the prefixes that trainers put in front, or TensorRT-LLM's own names.
_PREFIX = r"(?:medusa_heads?\.|heads\.)?(?P<head>\d+)\."
_LINEAR = re.compile(_PREFIX + r"(?:medusa_layers\.)?(?P<layer>\d+)\.linear\.(?P<kind>weight|bias)")
_OUTPUT = re.compile(_PREFIX + r"(?:lm_head|(?P<layer>\d+))\.weight")
_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_EXPECTED = "medusa_lm_head.safetensors, medusa_lm_head.pt, or safetensors files with tensors named medusa_heads.*"


@dataclass(frozen=True)
class MedusaHeads:
    """Heads on disk.

    Attributes:
        path: the directory.
        num_heads, num_layers: how many there are, by the tensors.
        shapes: shape of each tensor, under its own name.
        names: own name of each tensor: `(head, layer, "weight" | "bias")`, and `(head, num_layers, "weight")` for the
            output matrices; without these, all heads use the target's.
        read: reads a tensor by its own name.
        made_for: `hidden_size` and `vocab_size` of the target that they were trained on, as far as config.json says.
    """

    path: Path
    num_heads: int
    num_layers: int
    shapes: dict[str, tuple[int, ...]]
    names: dict[tuple[int, int, str], str]
    read: Callable[[str], torch.Tensor]
    made_for: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_own_output(self) -> bool:
        """Whether each head has an output matrix; otherwise they share the target's head."""
        return (0, self.num_layers, "weight") in self.names

    def linear(self, head: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight `[hidden, hidden]` and bias `[hidden]` of one layer."""
        return self.read(self.names[head, layer, "weight"]), self.read(self.names[head, layer, "bias"])

    def output(self, head: int) -> torch.Tensor | None:
        """`[vocab, hidden]`; None: the target's own head."""
        return self.read(self.names[head, self.num_layers, "weight"]) if self.has_own_output else None

    def tensors(self, num_heads: int) -> dict[str, Callable[[], torch.Tensor]]:
        """The first heads under TensorRT-LLM's names, each tensor with what reads it."""
        result: dict[str, Callable[[], torch.Tensor]] = {}
        for (head, layer, kind), name in sorted(self.names.items()):
            inner = "lm_head" if layer == self.num_layers else f"medusa_layers.{layer}.linear"
            if head < num_heads:
                result[f"medusa_heads.{head}.{inner}.{kind}"] = partial(self.read, name)
        return result

    def remarks(self, num_heads: int) -> list[str]:
        """What the files decide when the first heads are used: whether others are left, and whose output matrix."""
        used = (
            [f"the first {num_heads} of {self.num_heads} Medusa heads are used"] if num_heads < self.num_heads else []
        )
        if self.has_own_output:
            return [*used, f"each Medusa head has its own output matrix, from {self.path}"]
        return [*used, "the Medusa heads share the target's output matrix"]

    def num_weights(self, num_heads: int) -> int:
        """How many numbers the first heads hold."""
        return sum(math.prod(self.shapes[name]) for (head, _, _), name in self.names.items() if head < num_heads)

    def check(self, target: ModelConfig, settings: Medusa) -> None:
        """Refuse heads of another target, or other ones than the spec says.

        Raises:
            TrtspecError: what does not fit.
        """
        if settings.num_heads > self.num_heads:
            raise TrtspecError(
                f"{settings.num_heads} Medusa heads are asked for, and there are {self.num_heads}",
                where=str(self.path),
                fix=f"set speculation.medusa.num_heads: {self.num_heads}",
            )
        if settings.num_layers != self.num_layers:
            raise TrtspecError(
                f"each Medusa head has {self.num_layers} layers, the spec says {settings.num_layers}",
                where=str(self.path),
                fix=f"set speculation.medusa.num_layers: {self.num_layers}",
            )
        hidden, vocab = target.hidden_size, target.vocab_size
        for key, size in (("hidden_size", hidden), ("vocab_size", vocab)):
            if self.made_for.get(key, size) != size:
                raise TrtspecError(
                    f"made for a target of {key} {self.made_for[key]}",
                    where=str(self.path / "config.json"),
                    expected=f"{size}",
                    fix="use the heads that were trained for this target",
                )
        for (_, layer, kind), name in sorted(self.names.items()):
            right = (hidden,) if kind == "bias" else (vocab if layer == self.num_layers else hidden, hidden)
            if self.shapes[name] != right:
                raise TrtspecError(
                    f"{name} has shape {list(self.shapes[name])}",
                    where=str(self.path),
                    expected=f"{list(right)}, for a target of hidden size {hidden} and {vocab} ids",
                    fix="use the heads that were trained for this target",
                )


def open_medusa(directory: Path) -> MedusaHeads:
    """Look at the heads in a directory; of safetensors files the header only.

    Raises:
        TrtspecError: no heads there, heads that are not whole, or a config.json that contradicts them.
    """
    shapes, read = _tensors(directory)
    names: dict[tuple[int, int, str], str] = {}
    outputs: dict[int, str] = {}
    behind: dict[int, int] = {}  # head -> layers in front of its output matrix, where its name says how many
    for name in shapes:
        if match := _LINEAR.fullmatch(name):
            names[int(match["head"]), int(match["layer"]), match["kind"]] = name
        elif match := _OUTPUT.fullmatch(name):
            outputs[int(match["head"])] = name
            if match["layer"]:
                behind[int(match["head"])] = int(match["layer"])
    num_heads = 1 + max((head for head, _, _ in names), default=-1)
    num_layers = 1 + max((layer for _, layer, _ in names), default=-1)
    if not names:
        raise TrtspecError(
            "no Medusa heads: no tensor is named like 0.0.linear.weight", where=str(directory), expected=_EXPECTED
        )
    for head in range(num_heads):
        for layer in range(num_layers):
            for kind in ("weight", "bias"):
                if (head, layer, kind) not in names:
                    raise TrtspecError(
                        f"Medusa head {head} has no tensor {head}.{layer}.linear.{kind}",
                        where=str(directory),
                        expected=f"{num_layers} layers with weight and bias in each of {num_heads} heads",
                    )
    if outputs and set(outputs) != set(range(num_heads)):
        lacking = sorted(set(range(num_heads)) ^ set(outputs))
        raise TrtspecError(
            f"Medusa heads {lacking} have layers or an output matrix, not both",
            where=str(directory),
            expected="an output matrix in every head, or in none (they share the target's)",
        )
    for head, layers in sorted(behind.items()):
        if layers != num_layers:
            raise TrtspecError(
                f"Medusa head {head} has its output matrix in {outputs[head]}, behind {num_layers} layers",
                where=str(directory),
                expected=f"{head}.{num_layers}.weight",
            )
    names |= {(head, num_layers, "weight"): name for head, name in outputs.items()}
    made_for = _check_config(directory, num_heads, num_layers)
    return MedusaHeads(directory, num_heads, num_layers, shapes, names, read, made_for)


def _tensors(directory: Path) -> tuple[dict[str, tuple[int, ...]], Callable[[str], torch.Tensor]]:
    """Shape of each tensor, and a reader, of the first format that is there."""
    files = [directory / name for name in _FILES if (directory / name).is_file()][:1]
    if files and files[0].suffix == ".pt":
        state = load_pickled(files[0])
        return {name: tuple(tensor.shape) for name, tensor in state.items()}, state.__getitem__
    files = files or sorted(directory.glob("*.safetensors"))
    if not files:
        raise TrtspecError("no Medusa heads", where=str(directory), expected=_EXPECTED)
    headers = {file: safetensors_header(file) for file in files}
    places = {name: file for file, header in headers.items() for name in header if name != "__metadata__"}

    def read(name: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(places[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    return {name: tuple(headers[file][name]["shape"]) for name, file in places.items()}, read


def _check_config(directory: Path, num_heads: int, num_layers: int) -> dict[str, int]:
    """The heads' own config.json says as many heads and layers, where it says anything; returns the target's sizes."""
    path = directory / "config.json"
    if not path.is_file():
        return {}
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrtspecError(f"not valid JSON ({error})", where=str(path)) from error
    config = config if isinstance(config, dict) else {}
    inner = config.get("medusa") if isinstance(config.get("medusa"), dict) else {}
    for what, found, ours, modelopts in (
        ("heads", num_heads, "medusa_num_heads", "num_medusa_heads"),
        ("layers", num_layers, "medusa_num_layers", "num_medusa_layers"),
    ):
        says = config.get(ours, inner.get(modelopts, found))
        if says != found:
            raise TrtspecError(
                f"config.json says {says} Medusa {what}, the tensors are those of {found}",
                where=str(directory),
                fix="download the heads again",
            )
    return {key: config[key] for key in ("hidden_size", "vocab_size") if isinstance(config.get(key), int)}


# Children of each node of the tree that runtimes use where no other is given (mc_sim_7b_63 of the Medusa authors); they
# have the ranks 0, 1, 2, ...
_DEFAULT_CHILDREN: dict[tuple[int, ...], int] = {
    **{(): 10, (0,): 10, (1,): 7, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1, (8,): 1, (9,): 1},
    **{(0, 0): 10, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1, (1, 0): 2, (2, 0): 1},
    (0, 0, 0): 2,
}
DEFAULT_CHOICES = tuple((*node, rank) for node, children in _DEFAULT_CHILDREN.items() for rank in range(children))
"""The default tree: 63 nodes, four levels."""
