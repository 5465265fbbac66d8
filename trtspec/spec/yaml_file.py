"""YAML text to plain Python values, remembering the line of every key.

Knows YAML and its traps (duplicate keys, merge keys, numbers such as 1e-3, anchors that expand without end). Does not
know what the keys mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from trtspec.spec.marks import Key

MAX_VALUES = 20_000  # far more than any spec; stops anchors that multiply
MAX_DEPTH = 50


class YamlProblem(ValueError):
    """Text that is no acceptable YAML. `line` counts from 1."""

    def __init__(self, problem: str, line: int) -> None:
        super().__init__(problem)
        self.line = line


@dataclass
class Document:
    """A parsed document: `value`, and the line (from 1) of each key by its path."""

    value: Any
    lines: dict[Key, int] = field(default_factory=dict)


class _Loader(yaml.SafeLoader):
    """SafeLoader that also reads 1e-3 as a number, which YAML 1.1 takes for a string, and stops at MAX_DEPTH."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth > MAX_DEPTH:
            raise YamlProblem("values are nested too deeply", self.peek_event().start_mark.line + 1)
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def parse(text: str) -> Document:
    """Parse one YAML document; an empty one has the value None.

    Raises:
        YamlProblem: malformed YAML, a key given twice, several documents, values nested or multiplied without end.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        document = Document(None)
        if node is not None:
            document.value = _Construction(loader, document.lines).value(node, ())
        return document
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlProblem(_sentence(error), mark.line + 1 if mark else 1) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlProblem(f"the character U+{error.character:04X} is not allowed in YAML", line) from None


class _Construction:
    """Turns nodes into values, noting lines on the way. Aliased nodes are built anew at every place."""

    def __init__(self, loader: _Loader, lines: dict[Key, int]) -> None:
        self.loader = loader
        self.lines = lines
        self.count = 0

    def value(self, node: yaml.Node, at: Key) -> Any:
        line = node.start_mark.line + 1
        self.count += 1
        if len(at) > MAX_DEPTH:
            raise YamlProblem("values are nested too deeply", line)
        if self.count > MAX_VALUES:
            raise YamlProblem("anchors expand to too many values", line)
        self.lines.setdefault(at, line)
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self.mapping(node, at)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.value(item, (*at, i)) for i, item in enumerate(node.value)]
        try:
            return self.loader.construct_object(node, deep=True)
        except ValueError as error:  # a date such as 2026-13-45
            raise YamlProblem(f"{error}", line) from None

    def mapping(self, node: yaml.MappingNode, at: Key) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                merged += [(key_node, source) for source in sources]
                continue
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise YamlProblem("a key must be a plain word", line)
            key = str(key_node.value)
            path = (*at, key)
            if key in result:
                raise YamlProblem(f"the key {key} is given twice (first on line {self.lines[path]})", line)
            self.lines[path] = line
            result[key] = self.value(value_node, path)
        for key_node, source in merged:
            if not isinstance(source, yaml.MappingNode):
                raise YamlProblem("<< must name a mapping", key_node.start_mark.line + 1)
            for key, value in self.value(source, at).items():
                result.setdefault(key, value)
        return result


def _sentence(error: yaml.MarkedYAMLError) -> str:
    problem = (error.problem or "malformed YAML").replace("\n", " ")
    if "'\\t'" in problem:
        return "a tab is used for indentation; YAML allows spaces only"
    return f"malformed YAML: {problem}" + (f" ({error.context})" if error.context else "")
