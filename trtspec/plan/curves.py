"""Step times that were measured on one machine, and what lies between the measured points.

Between them times are linear in the tokens of a sequence, in the batch (so in batch x tokens) and in the context.
Outside of them the nearest slope goes on, and `notes` says so. Curves belong to the models, types and the device they
were measured with: `check` refuses them for others. Does not know how to measure; see `calibrate`.

Curves of a GPU that ship with trtspec lie in the directory `curves` beside this module. None is shipped yet, so that a
GPU without a calibration of its own is planned with the roofline.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError
from trtspec.plan.step_times import HEADS

if TYPE_CHECKING:
    from trtspec.models.config import ModelConfig
    from trtspec.spec.schema import Spec

VERSION = 1
SHIPPED = Path(__file__).with_name("curves")
_AGAIN = "measure again with `trtspec plan calibrate`"
# What of a model decides how long a pass takes.
_SHAPE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_size",
    "intermediate_size", "attn_bias", "mlp_bias", "qk_layernorm", "num_experts", "num_experts_per_token",
    "moe_intermediate_size", "shared_expert_intermediate_size", "num_dense_mlp_layers",
)  # fmt: skip
# What a GPU calls itself, and its row in the catalogue.
_NAMES = (
    (r"\bH200\b", "H200"),
    (r"\bH100 NVL\b", "H100-NVL"),
    (r"\bH100 PCIe\b", "H100-PCIe"),
    (r"\bH100\b.*\bHBM3\b", "H100-SXM"),
    (r"\bA100-SXM4-80GB\b", "A100-80GB"),
    (r"\bA100 80GB PCIe\b", "A100-80GB-PCIe"),
    (r"\bA100-(SXM4|PCIE)-40GB\b", "A100-40GB"),
)


def catalogue_name(device_name: str) -> str | None:
    """The catalogue's name of a GPU that calls itself so, such as `NVIDIA H100 80GB HBM3`; None: not in it."""
    return next((gpu for pattern, gpu in _NAMES if re.search(pattern, device_name)), None)


def sizes_of(config: ModelConfig) -> dict[str, int]:
    """What of a model decides how long a pass takes; switches are 0 or 1."""
    return {name: int(getattr(config, name)) for name in _SHAPE}


@dataclass(frozen=True)
class Measured:
    """A pass over `tokens` new tokens of each of `batch` sequences, behind `context` others; 0 of them is a prefill.

    Attributes:
        seconds: median.
        spread: seconds between the quartiles.
        repeats: how many were measured.
    """

    batch: int
    tokens: int
    context: int
    seconds: float
    spread: float
    repeats: int


@dataclass(frozen=True)
class Overhead:
    """What a cycle of `batch` sequences takes outside of all passes; the other attributes are those of `Measured`."""

    batch: int
    seconds: float
    spread: float
    repeats: int


@dataclass(frozen=True)
class ModelCurve:
    """The points of one model.

    Attributes:
        name: for people.
        shape: see `sizes_of`.
        dtype: of weights and KV cache.
        layers_measured: where fewer than the model has, the times were scaled from so many.
        points: in any order.
    """

    name: str
    shape: Mapping[str, int]
    dtype: str
    layers_measured: int
    points: tuple[Measured, ...]


@dataclass(frozen=True)
class Curves:
    """Measured `StepTimes` of the models of one spec, by role.

    Attributes:
        device: cpu or cuda.
        name: of the CPU or GPU, as it calls itself.
        gpu: its row in the catalogue; None: a CPU, or a GPU that is not in it.
        threads: CPU threads; None on a GPU.
        versions: of the software.
        date: ISO 8601, UTC.
        how: what was measured, for people.
        models: by role.
        overheads: rising batches; empty: not measured.
        roofline: role -> median of measured time over the roofline's; empty on a CPU, which has none.
        remarks: what to know of the measurement.
    """

    device: str
    name: str
    gpu: str | None
    threads: int | None
    versions: Mapping[str, str | None]
    date: str
    how: str
    models: Mapping[str, ModelCurve]
    overheads: tuple[Overhead, ...] = ()
    roofline: Mapping[str, float] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    _beyond: dict[tuple[str, str], tuple[float, float, float]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def source(self) -> str:
        """Where the times come from, in one line."""
        threads = "" if self.threads is None else f", {self.threads} thread{'s' * (self.threads != 1)}"
        return f"measured on {self.name}{threads}, {self.date[:10]}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What was asked for outside of the measured range so far, and the remarks of the measurement."""
        beyond = (
            f"{role}: {axis} {asked:g} is outside of what was measured ({low:g} to {high:g}); the nearest slope goes on"
            for (role, axis), (asked, low, high) in self._beyond.items()
        )
        return (*self.remarks, *beyond)

    def seconds(self, role: str, batch: int, tokens: int, context: int) -> float:
        """One forward pass, see `StepTimes`.

        A prefill of several sequences takes as long as one after the other, or as one of all their tokens if that is
        shorter.

        Raises:
            TrtspecError: nothing is measured for the role.
        """
        points = self._points(role)
        if context == 0:
            prefill = sorted((point.tokens, point.seconds) for point in points if point.context == 0)
            if not prefill:
                raise self._other(f"have no prefill of the {role}", "with one")
            in_turn = batch * self._along(role, "prompt", prefill, tokens)
            together = batch * tokens
            return min(in_turn, _line(prefill, together)) if together <= prefill[-1][0] else in_turn
        behind = [point for point in points if point.context]
        by_batch = []
        for rows in sorted({point.batch for point in behind}):
            by_context = []
            for length in sorted({point.context for point in behind if point.batch == rows}):
                here = [point for point in behind if (point.batch, point.context) == (rows, length)]
                by_tokens = sorted((point.tokens, point.seconds) for point in here)
                by_context.append((length, self._along(role, "tokens", by_tokens, tokens)))
            by_batch.append((rows, self._along(role, "context", by_context, context)))
        return self._along(role, "batch", by_batch, batch)

    def overhead(self, batch: int) -> float:
        """Seconds of a cycle outside of all models; 0 where it was not measured."""
        points = [(each.batch, each.seconds) for each in self.overheads]
        return self._along("overhead", "batch", points, batch) if points else 0.0

    def check(self, spec: Spec, models: Mapping[str, ModelConfig]) -> None:
        """Refuse curves that say nothing of a spec.

        Args:
            spec: what is planned.
            models: its models by role, as `spec.models`.

        Raises:
            TrtspecError: measured on another device, with other threads, or of other models or types.
        """
        gpu = spec.hardware.gpu
        if gpu == "cpu":
            self._check_cpu(spec)
        elif self.gpu != gpu:
            raise self._other(f"were measured on {self.gpu or self.name}", f"on hardware.gpu {gpu}")
        if spec.speculation.method in ("medusa", "mtp") and HEADS not in self.models:
            raise self._other(f"have nothing that drafts in the target, as method {spec.speculation.method}", "with it")
        for role, config in models.items():
            ref, curve = spec.models[role], self.models.get(role)
            if curve is None:
                raise self._other(f"have no {role}", f"of {', '.join(models)}")
            differing = [name for name, size in sizes_of(config).items() if curve.shape.get(name) != size]
            if differing:
                had, has = curve.shape.get(differing[0]), sizes_of(config)[differing[0]]
                raise self._other(f"are of another {role}, {curve.name} ({differing[0]} {had})", f"of one with {has}")
            for what, measured, wanted in (
                ("dtype", curve.dtype, ref.dtype),
                ("quantization", "none", ref.quantization),
            ):
                if measured != wanted:
                    raise self._other(f"are of a {role} with {what} {measured}", f"with {wanted}")
            if ref.world_size > 1:
                raise self._other(f"are of a {role} on one GPU", f"on {ref.world_size}")

    def _check_cpu(self, spec: Spec) -> None:
        machine = _machine()
        if self.device != "cpu":
            raise self._other(f"were measured on {self.name}", "on the CPU, hardware.gpu cpu")
        if self.name != machine["cpu"]:
            raise self._other(f"were measured on {self.name}", f"on this machine's {machine['cpu']}")
        threads = spec.serving.num_threads or machine["cores"]
        if self.threads != threads:
            raise self._other(
                f"were measured with {self.threads} CPU threads",
                f"with {threads} (serving.num_threads, unset is all cores)",
            )

    def _other(self, problem: str, expected: str) -> TrtspecError:
        return TrtspecError(f"the measured step times {problem}", expected=f"some {expected}", fix=_AGAIN)

    def _points(self, role: str) -> tuple[Measured, ...]:
        if role not in self.models:
            raise self._other(f"have no {role}", f"of {', '.join(self.models)} and it")
        return self.models[role].points

    def _along(self, role: str, axis: str, points: Sequence[tuple[float, float]], at: float) -> float:
        """`_line`, which notes that it leaves the measured range."""
        low, high = points[0][0], points[-1][0]
        if not low <= at <= high:
            asked, *_ = self._beyond.get((role, axis), (at,))
            farther = max(asked, at) if at > high else min(asked, at)
            self._beyond[role, axis] = (farther, low, high)
        return _line(points, at)

    def written(self) -> str:
        """The JSON text that `read` reads."""
        content = asdict(self)
        del content["_beyond"]
        return json.dumps({"version": VERSION, **content}, indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Write the file whole or not at all; its directory is made.

        Raises:
            TrtspecError: it cannot be written.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(self.written(), encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            raise TrtspecError(f"cannot be written ({error.strerror})", where=str(path)) from error
        finally:
            with suppress(OSError):
                temporary.unlink()

    @classmethod
    def read(cls, path: Path) -> Curves:
        """The curves in a file.

        Raises:
            TrtspecError: missing, of another version, or not what `write` writes.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content.pop("version")
            if version != VERSION:
                raise TrtspecError(
                    f"version {version!r} of the format", where=str(path), expected=f"{VERSION}", fix=_AGAIN
                )
            content["models"] = {role: _curve(model) for role, model in content["models"].items()}
            content["overheads"] = tuple(Overhead(**_sound(each)) for each in content["overheads"])
            content["remarks"] = tuple(map(str, content["remarks"]))
            return cls(**content)
        except OSError as error:
            raise TrtspecError(f"cannot be read ({error.strerror})", where=str(path), fix=_AGAIN) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise TrtspecError(f"holds no step times ({reason})", where=str(path), fix=_AGAIN) from error


def shipped(spec: Spec, models: Mapping[str, ModelConfig], directory: Path = SHIPPED) -> Curves | None:
    """The curves among those that ship with trtspec that `check` accepts; None: none, which today is always so."""
    for path in sorted(directory.glob("*.json")):
        curves = Curves.read(path)
        try:
            curves.check(spec, models)
        except TrtspecError:
            continue
        return curves
    return None


@lru_cache(maxsize=1)
def _machine() -> dict[str, Any]:
    from trtspec.build.machine import hardware

    return hardware()


def _curve(content: Mapping[str, Any]) -> ModelCurve:
    points = tuple(Measured(**_sound(point)) for point in content["points"])
    if not any(point.context for point in points):
        raise ValueError("a model without a step")
    # A prefill is found by its length alone.
    places = Counter((point.batch if point.context else 1, point.tokens, point.context) for point in points)
    (place, times), *_ = places.most_common(1)
    if times > 1:
        raise ValueError("batch {}, {} tokens, context {} is measured twice".format(*place))
    shape = {str(name): int(size) for name, size in content["shape"].items()}
    return ModelCurve(**{**content, "shape": shape, "points": points})


def _sound(point: Mapping[str, Any]) -> dict[str, Any]:
    """The point, if it can be one."""
    if not all(isinstance(value, int | float) and math.isfinite(value) and value >= 0 for value in point.values()):
        raise ValueError(f"no point: {dict(point)}")
    if not (point["seconds"] > 0 or "tokens" not in point):
        raise ValueError("a pass of 0 seconds")
    return dict(point)


def _line(points: Iterable[tuple[float, float]], at: float) -> float:
    """The piecewise linear curve through `points` [n >= 1], rising in x. Outside, the nearest slope goes on, but a time
    never falls with more work, nor faster with less than in proportion to it."""
    points = list(points)
    (x0, y0), (x1, y1) = points[0], points[-1]
    for (left, low), (right, high) in pairwise(points):
        if left <= at <= right:
            return low + (high - low) * (at - left) / (right - left)
    if len(points) == 1:
        return y0
    if at < x0:
        (_, _), (right, high) = points[:2]
        return max(y0 - max((high - y0) / (right - x0), 0.0) * (x0 - at), y0 * at / x0)
    left, low = points[-2]
    return y1 + max((y1 - low) / (x1 - left), 0.0) * (at - x1)
