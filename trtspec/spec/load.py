"""Read a spec file, apply overrides, and say everything that is wrong with it: one line each, with file, line and key.

Knows files and messages. The shape comes from `schema`, the constraints between keys from `rules`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trtspec.errors import EXIT_USAGE, TrtspecError
from trtspec.spec.marks import Key, Marks, dotted
from trtspec.spec.rules import broken_rules
from trtspec.spec.schema import PATTERNS, SPEC_VERSION, Spec
from trtspec.spec.yaml_file import YamlProblem, parse

MAX_FILE_BYTES = 128 * 1024


class SpecError(TrtspecError):
    """Everything that is wrong with one spec, one line for each problem."""

    def __init__(self, problems: Sequence[TrtspecError]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(dict.fromkeys(str(problem) for problem in problems)))


class OverrideError(TrtspecError):
    """A `--set` that is no KEY=VALUE."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True)
class Override:
    """One `--set section.key=value`, its value already parsed."""

    key: tuple[str, ...]
    value: Any
    text: str

    @classmethod
    def parse(cls, text: str) -> Override:
        """Split `section.key=value` and parse the value as YAML.

        Raises:
            OverrideError: no `=`, an empty or malformed key, or a value that is no YAML.
        """
        key, equals, value = text.partition("=")
        parts = tuple(key.strip().split("."))
        if not equals or not all(parts):
            raise OverrideError("malformed override", where=f"--set {text}", expected="section.key=value")
        try:
            return cls(parts, parse(value).value, value)
        except YamlProblem as problem:
            raise OverrideError(str(problem), where=f"--set {'.'.join(parts)}") from None

    def apply(self, content: dict[str, Any]) -> None:
        """Write the value into `content`, making sections on the way. What looks like a number stays text where text
        is meant: quotes do not survive the shell.

        Raises:
            TrtspecError: the key goes through something that is no section.
        """
        section = content
        for depth, part in enumerate(self.key[:-1], start=1):
            inner = section.setdefault(part, {})
            if inner is None:
                inner = section[part] = {}
            if not isinstance(inner, dict):
                raise TrtspecError(
                    f"{'.'.join(self.key[:depth])} is a value, not a section", where=f"--set {'.'.join(self.key)}"
                )
            section = inner
        section[self.key[-1]] = self.text if _is_text(self.key) and isinstance(self.value, (int, float)) else self.value


def load_spec(path: Path | str, overrides: Sequence[str] = ()) -> Spec:
    """The validated spec in `path`, with `overrides` (`section.key=value`, later ones win) written over it.

    Raises:
        SpecError: whatever is wrong with the content, all of it.
        TrtspecError: the file cannot be read or is no YAML; an override is malformed.
    """
    path = Path(path)
    parsed = [Override.parse(text) for text in overrides]
    content, lines = _read(path)
    for override in parsed:
        override.apply(content)
    marks = Marks(path, lines, [override.key for override in parsed])
    # A section whose keys are all commented out is an empty section.
    content = {key: {} if value is None and _is_section((key,)) else value for key, value in content.items()}
    content.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-.") or "spec")
    _check_version(content, marks)
    try:
        spec = Spec.model_validate(content)
    except ValidationError as error:
        # A default that could not be derived is only the echo of another error.
        details = [d for d in error.errors(include_url=False) if d["type"] != "default_factory_not_called"]
        places = [tuple(d["loc"]) for d in details]
        details = [d for d in details if not (d["type"] == "too_short" and _holds_one(tuple(d["loc"]), places))]
        details.sort(key=lambda d: marks.line(tuple(d["loc"])))
        raise SpecError([_explain(d, marks) for d in details]) from None
    spec._source = Path(os.path.abspath(path))
    spec._marks = marks
    if broken := broken_rules(spec):
        raise SpecError([TrtspecError(rule.problem, where=spec.where(rule.key), fix=rule.fix) for rule in broken])
    return spec


def _holds_one(key: Key, places: list[Key]) -> bool:
    """Whether one of `places` is inside the list at `key`; wrong items do not count, so that it seems too short too."""
    return any(len(place) > len(key) and place[: len(key)] == key for place in places)


def _read(path: Path) -> tuple[dict[str, Any], dict[Key, int]]:
    where = str(path)
    try:
        if path.is_dir():
            raise TrtspecError("is a directory", where=where, expected="a YAML file")
        if not path.exists():
            fix = f"write a starter file with: trtspec config init {path}"
            raise TrtspecError("no such file", where=where, fix=fix)
        if not path.is_file():
            raise TrtspecError("is not a regular file", where=where, expected="a YAML file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TrtspecError("is larger than 128 KiB", where=where, expected="a YAML spec")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise TrtspecError("is not UTF-8 text", where=f"{where}:{line}", fix="save the file as UTF-8") from None
    except OSError as error:
        raise TrtspecError(f"cannot be read ({error.strerror})", where=where) from None
    try:
        document = parse(text)
    except YamlProblem as problem:
        raise TrtspecError(str(problem), where=f"{where}:{problem.line}") from None
    if document.value is None:
        raise TrtspecError("is empty", where=where, fix="see: trtspec config init")
    if not isinstance(document.value, dict):
        raise TrtspecError(
            "holds no sections", where=f"{where}:1", expected="keys such as version, target, speculation"
        )
    return document.value, document.lines


def _check_version(content: dict[str, Any], marks: Marks) -> None:
    """Before everything else: the messages for another version's keys would be misleading."""
    version = content.get("version")
    supported = f"version: {SPEC_VERSION}"
    if "version" not in content:
        raise TrtspecError("version is missing", where=marks.where(()), fix=f"add the line {supported}")
    if version != SPEC_VERSION or isinstance(version, (bool, float)):
        raise TrtspecError(f"version {version!r} is not supported", where=marks.where(("version",)), expected=supported)


def _explain(details: ErrorDetails, marks: Marks) -> TrtspecError:
    """One pydantic error in the words of the spec."""
    key: Key = tuple(details["loc"])
    kind, given, context = details["type"], details["input"], details.get("ctx", {})
    where = marks.where(key)
    if kind == "extra_forbidden":
        return TrtspecError("unknown key", where=where, fix=_suggest_key(key))
    if kind == "missing":
        parent = marks.where(key[:-1])
        return TrtspecError(f"{key[-1]} is missing", where=parent, fix=f"add {dotted(key)}")
    if kind == "literal_error":
        choices = [str(choice) for choice in get_args(_annotation(key)) or ()] or [str(context["expected"])]
        close = get_close_matches(str(given), choices, n=1)
        return TrtspecError(
            f"{given!r} is not allowed",
            where=where,
            expected="one of " + ", ".join(choices),
            fix=f"did you mean {close[0]}?" if close else None,
        )
    if kind == "value_error":
        return TrtspecError(str(context["error"]), where=where)
    return TrtspecError(f"{_shown(given)} is not allowed", where=where, expected=_expectation(details))


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "a section" if isinstance(value, dict) else "a list"
    return "an empty value" if value is None else repr(value)


# What pydantic's error types ask for, in words; {} are the values it reports.
_EXPECTED = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
    "string_too_short": "some text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "model_type": "a section with keys",
    "tuple_type": "a list",
}


def _expectation(details: ErrorDetails) -> str:
    kind, given, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "string_pattern_mismatch":
        return PATTERNS[context["pattern"]]
    if kind == "string_type":
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        return f'text; put it in quotes: "{given}"' if is_number else "text"
    return _EXPECTED[kind].format(**context) if kind in _EXPECTED else details["msg"]


def _model_at(key: Key) -> type[BaseModel] | None:
    """The section class that `key` leads to, None when it leads to a value or nowhere."""
    model: type[BaseModel] | None = Spec
    for part in key:
        info = model.model_fields.get(str(part)) if model else None
        if info is None:
            return None
        candidates = (info.annotation, *get_args(info.annotation))
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return model


def _is_section(key: Key) -> bool:
    return _model_at(key) is not None


def _is_text(key: Key) -> bool:
    return _annotation(key) is str


def _annotation(key: Key) -> Any:
    model = _model_at(key[:-1])
    info = model.model_fields.get(str(key[-1])) if model else None
    return info.annotation if info else None


def _suggest_key(key: Key) -> str:
    """A near spelling among the neighbours, else the section where the key belongs, else all the keys there are."""
    model = _model_at(key[:-1])
    fields = list(model.model_fields) if model else []
    if close := get_close_matches(str(key[-1]), fields, n=1):
        return f"did you mean {dotted((*key[:-1], close[0]))}?"
    for section in Spec.model_fields:
        inner = _model_at((section,))
        if inner and str(key[-1]) in inner.model_fields:
            return f"did you mean {section}.{key[-1]}?"
    return "known keys are " + ", ".join(fields)
