"""The page spec.md, made from the JSON Schema of the spec while the handbook is built, so that it is never out of date.

Knows the schema and Markdown; nothing of what keys mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trtspec.spec.schema import Spec

PAGES = ("spec.md",)
_INTRODUCTION = """# The spec, key by key

One YAML file says what to build, for which GPU, how to serve it and how to check it. `trtspec config init` writes one
to start from, `trtspec config validate my.yaml` says what is wrong with it, `trtspec config show my.yaml` prints it
with every default, `trtspec config schema` prints the schema that this page is made of. Every value can be overridden
on the command line: `--set section.key=value`.
"""


def reference(schema: Mapping[str, Any] | None = None) -> str:
    """The page as Markdown.

    Args:
        schema: a JSON Schema with `$defs`; that of the spec by default.
    """
    schema = Spec.model_json_schema() if schema is None else schema
    sections = {"Spec": schema, **_in_order(schema)}
    return "\n".join([_INTRODUCTION, *(_section(name, section, schema["$defs"]) for name, section in sections.items())])


def on_files(files: Any, config: Any) -> Any:
    """Hook of mkdocs: add the page to the files of the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGES[0], content=reference()))
    return files


def _in_order(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Sections by name, each where the reader first meets it."""
    found: dict[str, Mapping[str, Any]] = {}

    def meet(section: Mapping[str, Any]) -> None:
        named = [name for key in section["properties"].values() for name in _named(key) if name not in found]
        for name in named:
            found.setdefault(name, schema["$defs"][name])
        for name in named:
            meet(schema["$defs"][name])

    meet(schema)
    return found


def _named(value: Any) -> Iterator[str]:
    """Sections that a key's schema refers to."""
    if isinstance(value, Mapping):
        if "$ref" in value:
            yield value["$ref"].rpartition("/")[2]
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _named(part)


def _section(name: str, section: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    required = section.get("required", ())
    rows = [
        f"| `{key}` | {_type(value)} | {_default(value, key in required)} | {_meaning(value, defs)} |"
        for key, value in section["properties"].items()
    ]
    head = [f"## {name}", "", section["description"], "", "| key | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _default(value: Mapping[str, Any], required: bool) -> str:
    if required:
        return "required"
    default = value.get("default")
    if default is None or isinstance(default, dict):
        return ""
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _type(value: Mapping[str, Any]) -> str:
    """A type in words; references are links to their section on the page."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_type(part) for part in value["anyOf"] if part.get("type") != "null"))
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "array":
        return f"list of {_type(value['items'])}"
    if value.get("type") == "object":
        return f"table of {_type(value['additionalProperties'])}"
    return _WORDS.get(value.get("type", ""), "any") + _range(value)


_WORDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}


def _range(value: Mapping[str, Any]) -> str:
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    words = [f"{sign} {value[bound]:g}" for bound, sign in bounds.items() if bound in value]
    return f" ({', '.join(words)})" if words else ""


def _meaning(value: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    """The description inside a table's cell; where key and section have the same words, the schema has them once."""
    description = value.get("description") or next((defs[name]["description"] for name in _named(value)), "")
    return " ".join(description.split()).replace("|", "\\|")
