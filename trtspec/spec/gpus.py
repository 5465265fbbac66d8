"""The GPUs that a spec may name: compute capability, memory and speeds, as data sheets give them (`gpus.yaml`).

Does not know prices, and not how much of a data sheet's speed a kernel reaches; that belongs to the cost model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtspec.errors import TrtspecError
from trtspec.spec.marks import Marks
from trtspec.spec.yaml_file import YamlProblem, parse

Arithmetic = Literal["float32", "float16", "bfloat16", "fp8", "int8"]
_Speed = Annotated[float, Field(gt=0)]
_FILE = Path(__file__).with_name("gpus.yaml")


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Link(_Row):
    """What joins the GPUs of a host; `gb_per_s` is 10^9 bytes a second, both directions together."""

    kind: Literal["NVLink", "PCIe"]
    gb_per_s: _Speed


class Gpu(_Row):
    """One catalogue row; its fields are explained at the top of `gpus.yaml`."""

    name: str
    sm: Annotated[int, Field(ge=0)]
    memory_gb: Annotated[int, Field(ge=0)]
    bandwidth_gb_per_s: _Speed | None = None
    dense_tflops: dict[Arithmetic, _Speed] = {}
    link: Link | None = None
    sources: list[str]


def load_gpus(path: Path) -> dict[str, Gpu]:
    """The catalogue, and the rows of a file of one's own, which come first where both have a name.

    Args:
        path: YAML, as `gpus.yaml` beside this module.

    Raises:
        TrtspecError: the file cannot be read, or a row is malformed; with file, line and key.
    """
    return {**GPUS, **_read(path)}


def find_gpu(name: str, gpus: Mapping[str, Gpu] | None = None) -> Gpu:
    """A row by its name.

    Args:
        name: as in the catalogue.
        gpus: what `load_gpus` read; None: the catalogue.

    Raises:
        TrtspecError: there is no such row; lists those there are and says how to add one.
    """
    known = GPUS if gpus is None else gpus
    if name not in known:
        raise TrtspecError(
            f"no figures of a GPU {name!r}",
            expected=f"one of {', '.join(known)}",
            fix="add a row with its data sheet's figures to a file like trtspec/spec/gpus.yaml, and pass --gpu-file",
        )
    return known[name]


def _read(path: Path) -> dict[str, Gpu]:
    try:
        document = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrtspecError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError:
        raise TrtspecError("is not UTF-8 text", where=str(path)) from None
    except YamlProblem as problem:
        raise TrtspecError(str(problem), where=f"{path}:{problem.line}") from None
    if not isinstance(document.value, dict) or not document.value:
        raise TrtspecError("holds no GPUs", where=str(path), expected="rows such as H200: {sm: 90, memory_gb: 141}")
    marks = Marks(path, document.lines)
    return {name: _row(name, value, marks) for name, value in document.value.items()}


def _row(name: str, value: Any, marks: Marks) -> Gpu:
    if not isinstance(value, dict):
        raise TrtspecError(f"{value!r} is no row", where=marks.where((name,)), expected="keys such as sm, memory_gb")
    try:
        return Gpu.model_validate({"name": name, **value})
    except ValidationError as error:
        first = error.errors()[0]
        key = tuple(part for part in first["loc"] if part != "[key]")
        raise TrtspecError(first["msg"], where=marks.where((name, *key))) from None


class _Catalogue(Mapping[str, Gpu]):
    """The rows of `gpus.yaml`, read when the first of them is asked for."""

    @cached_property
    def _rows(self) -> dict[str, Gpu]:
        return _read(_FILE)

    def __getitem__(self, name: str) -> Gpu:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


GPUS: Mapping[str, Gpu] = _Catalogue()
