"""A plan written into its spec file: draft length, schedule and cache fractions, and not a byte besides.

The file is edited where the values stand, so that comments, order, quotes and flow style stay. Knows YAML and the keys
that a plan decides; does not know how it decides.
"""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trtspec.errors import TrtspecError
from trtspec.plan.result import Plan
from trtspec.plan.schedule import with_schedule
from trtspec.spec.load import load_spec
from trtspec.spec.marks import dotted
from trtspec.spec.schema import Spec, serving_key
from trtspec.spec.yaml_file import YamlProblem, parse

Value = int | float | str | dict[str, Any]
Key = tuple[str, ...]
_INDENT = 2
_BOM = "\ufeff"


@dataclass(frozen=True)
class Change:
    """One key that gets another value; `old` is None where the file does not have it."""

    key: Key
    old: Any
    new: Value

    def __str__(self) -> str:
        old = "not set" if self.old is None else _flow(self.old)
        return f"{dotted(self.key)}: {old} -> {_flow(self.new)}"


@dataclass(frozen=True)
class Edit:
    """What a plan changes in a spec file; the result has been loaded.

    Attributes:
        path: the file.
        changes: in the order of the sections; empty where the file says it all already.
        before, after: its text.
    """

    path: Path
    changes: tuple[Change, ...]
    before: str
    after: str

    @property
    def diff(self) -> str:
        """The changes as a unified diff; empty where there are none."""
        before, after = self.before.splitlines(), self.after.splitlines()
        name = str(self.path)
        return "".join(f"{line}\n" for line in difflib.unified_diff(before, after, name, name, lineterm=""))

    def write(self) -> None:
        """Write the file whole or not at all; nothing without changes. Its mode stays, and so does a link to it.

        Raises:
            TrtspecError: it cannot be written.
        """
        if self.changes:
            staged = _stage(self.path, self.after)
            try:
                os.replace(staged, self.path.resolve())
            except OSError as error:
                staged.unlink(missing_ok=True)
                raise _unwritable(self.path, error) from None


def apply(plan: Plan, path: Path) -> list[Change]:
    """Write what `plan` advises into the spec file it was made from.

    Returns:
        What was changed; nothing when it is there already.

    Raises:
        TrtspecError: as `edited`, or the file cannot be written. It is then as it was.
    """
    edit = edited(plan, path)
    edit.write()
    return list(edit.changes)


def edited(plan: Plan, path: Path) -> Edit:
    """What `apply` would write.

    Raises:
        TrtspecError: the plan does not fit or drafts nothing, is for another method than the file's, the file has the
            keys in an anchor that others use, or the result would be no valid spec.
    """
    spec = load_spec(path)
    wanted = _wanted(plan, spec)
    raw = path.read_bytes().decode("utf-8")
    mark, text = (_BOM, raw[1:]) if raw.startswith(_BOM) else ("", raw)
    content = parse(text).value
    changes = tuple(
        Change(key, _at(content, key), value) for key, value in wanted.items() if _at(content, key) != value
    )
    after = text
    try:
        for change in changes:
            after = _set(after, change.key, change.new)
            _put(content, change.key, change.new)
        same = parse(after).value == content
    except (YamlProblem, yaml.YAMLError):
        same = False
    if not same:
        raise TrtspecError(
            "anchors or merged keys hold what the plan changes, and other keys use them",
            where=str(path),
            fix=f"write by hand: {'; '.join(f'{dotted(change.key)}: {_flow(change.new)}' for change in changes)}",
        )
    edit = Edit(path, changes, raw, mark + after)
    _check(edit)
    return edit


def _wanted(plan: Plan, spec: Spec) -> dict[Key, Value]:
    """Key -> value of everything that the plan decides."""
    where, method = str(spec.source), spec.speculation.method
    if plan.own.method != method:
        raise TrtspecError(
            f"the plan is for method {plan.own.method}, and the file says {method}",
            where=spec.where(("speculation", "method")),
            fix="write the method into the file, and plan again",
        )
    if not plan.fits:
        raise TrtspecError(f"the plan does not fit: {plan.memory.problem}", where=where, fix=plan.nearest)
    wanted: dict[Key, Value] = {}
    if plan.schedule:
        planned = with_schedule(spec, plan.own, plan.schedule)
        if planned is None:
            raise TrtspecError(
                "speculation does not pay at the smallest load, so that there is no draft length to write",
                where=spec.where(("speculation", "method")),
                fix="set speculation.method: none, or plan another method",
            )
        most = planned.speculation.num_draft_tokens
        if most != spec.speculation.num_draft_tokens:
            wanted["speculation", "num_draft_tokens"] = most
        if spec.serving.default_num_draft_tokens not in (None, most):
            wanted["serving", "default_num_draft_tokens"] = most
        if planned.serving.draft_length is not None and planned.serving.draft_length.policy == "schedule":
            wanted["serving", "draft_length", "policy"] = "schedule"
            wanted["serving", "draft_length", "schedule"] = {
                str(load): length for load, length in planned.serving.draft_length.schedule.items()
            }
    fractions: dict[str, float] = {}
    for role, fraction in plan.fractions.items():
        if spec.engine.track == "engine" or role == "target":  # the LLM API has one cache for all
            # Several drafts share one key; the smallest fraction leaves room for all of them.
            fractions[serving_key(role)] = min(fraction, fractions.get(serving_key(role), 1.0))
    for name, fraction in fractions.items():
        wanted["serving", "kv_cache_free_gpu_mem_fraction", name] = float(f"{fraction:.6g}")
    return wanted


def _check(edit: Edit) -> None:
    """Load the new text as a file in the same folder, without touching the file."""
    if not edit.changes:
        return
    staged = _stage(edit.path, edit.after)
    try:
        load_spec(staged)
    except TrtspecError as error:
        problem = str(error).replace(str(staged), str(edit.path))
        raise TrtspecError(f"the file is left as it was, the plan's values do not go with it:\n{problem}") from None
    finally:
        staged.unlink(missing_ok=True)


def _stage(path: Path, text: str) -> Path:
    """The text in a file beside `path`, with its mode."""
    place = path.resolve()
    staged = place.with_name(f".{place.name}.part")
    try:
        staged.write_bytes(text.encode())
        shutil.copymode(place, staged)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise _unwritable(path, error) from None
    return staged


def _unwritable(path: Path, error: OSError) -> TrtspecError:
    return TrtspecError(f"cannot be written ({error.strerror})", where=str(path), fix="the file is as it was")


def _at(content: Any, key: Key) -> Any:
    """The value of a key, None where it is not there."""
    for part in key:
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _put(content: dict[str, Any], key: Key, value: Value) -> None:
    *sections, last = key
    for part in sections:
        if not isinstance(content.get(part), dict):
            content[part] = {}
        content = content[part]
    content[last] = value


# Editing text. Positions are characters from the beginning; nodes know where they begin and end.


def _set(text: str, key: Key, value: Value) -> str:
    """The text with one key set; everything else stays."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for depth, part in enumerate(key):
        assert isinstance(node, yaml.MappingNode)
        found = next((inner for name, inner in node.value if name.value == part), None)
        if found is None or _is_null(found):
            for name in reversed(key[depth + 1 :]):
                value = {name: value}
            return _insert(text, node, part, value) if found is None else _fill(text, node, found, value)
        node = found
    assert node is not None
    return _replace(text, node, value)


def _replace(text: str, node: yaml.Node, value: Value) -> str:
    """Another value in the place of a node, in its style."""
    begin = node.start_mark
    if isinstance(node, yaml.MappingNode) and not node.flow_style and isinstance(value, Mapping):
        written = _block(value, begin.column, _newline(text))[begin.column :]
    else:
        written = _flow(value)
    return text[: begin.index] + written + text[_end(node) :]


def _fill(text: str, parent: yaml.MappingNode, node: yaml.Node, value: Value) -> str:
    """A value where a key has none yet."""
    before, rest, newline = text[: node.start_mark.index].rstrip(" "), text[node.end_mark.index :], _newline(text)
    if parent.flow_style or not isinstance(value, Mapping):
        return f"{before} {_flow(value)}{rest}"
    line_end = rest.find("\n")
    comment, after = (rest, "") if line_end < 0 else (rest[: line_end + 1], rest[line_end + 1 :])
    indent = parent.value[0][0].start_mark.column + _INDENT
    ending = "" if comment.endswith("\n") else newline
    return f"{before}{comment}{ending}{_block(value, indent, newline)}{newline}{after}"


def _insert(text: str, parent: yaml.MappingNode, name: str, value: Value) -> str:
    """A new key at the end of a mapping."""
    if parent.flow_style:
        end = _end(parent.value[-1][1]) if parent.value else parent.start_mark.index + 1
        return f"{text[:end]}{', ' if parent.value else ''}{name}: {_flow(value)}{text[end:]}"
    indent, newline = parent.value[0][0].start_mark.column, _newline(text)
    end = _after_comments(text, _end(parent), indent)
    before, after = text[:end], text[end:]
    if not before.endswith("\n"):
        before += newline
    apart = newline if indent == 0 and isinstance(value, Mapping) else ""  # sections stand apart
    return f"{before}{apart}{_block({name: value}, indent, newline)}{newline}{after}"


def _after_comments(text: str, at: int, indent: int) -> int:
    """Where the line of `at` ends, and the comments below it that are indented as its mapping is."""
    if not text[:at].endswith("\n"):
        at = text.find("\n", at) + 1 or len(text)
    end = at
    for line in text[at:].splitlines(keepends=True):
        bare = line.strip()
        if bare and not (bare.startswith("#") and len(line) - len(line.lstrip()) >= indent):
            break
        at += len(line)
        if bare:
            end = at
    return end


def _end(node: yaml.Node) -> int:
    """Where the text of a node ends; a block's own mark is at the next thing that follows."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(node, yaml.MappingNode) else last)
    return int(node.end_mark.index)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _flow(value: Any) -> str:
    """A value in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(inner)}" for name, inner in value.items()) + "}"
    return str(value)


def _block(value: Mapping[str, Any], indent: int, newline: str) -> str:
    """Lines of a mapping; tables of numbers stay in one line."""
    lines = []
    for name, inner in value.items():
        if isinstance(inner, Mapping) and name != "schedule":
            lines += [" " * indent + f"{name}:", _block(inner, indent + _INDENT, newline)]
        else:
            lines.append(" " * indent + f"{name}: {_flow(inner)}")
    return newline.join(lines)


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"
