"""Byte sizes as people write them: 268435456, 256MiB, 0.5GB. Knows numbers and units, nothing else."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

_UNITS = {"": 1, "b": 1} | {
    prefix.lower() + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(value: Any) -> Any:
    """Bytes of a size such as `256MiB` (1024-based) or `1GB` (1000-based); other types pass through unchanged.

    Raises:
        ValueError: a string that is no size.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is no size; expected bytes or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    return round(float(match[1]) * _UNITS[match[2].lower()])


Size = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(gt=0),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGTkmgt][Ii]?)?[Bb]?\s*$"},
            ]
        }
    ),
]
