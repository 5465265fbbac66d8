"""Thousands of distinct prompts for distillation: families of requests, times topics, drawn by a seeded generator.

A draft learns the wording that the target answers with, so breadth counts more than truth: every family is phrased
in several ways, and passages are put together from parts or taken from the docstrings and functions of Python's
standard library. Three in five prompts give no more than first words, and the target thinks of the rest: it was tuned
on conversations, and writes a user's turn as well as its own. The words are in prompts.yaml. Does not know models,
tokenizers or the prompts that a draft is measured on.
"""

from __future__ import annotations

import importlib
import inspect
import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One request: a conversation for the chat template, or plain text to continue (`messages` empty).

    Of an unfinished one the last message is only begun: the model that is to answer it writes the rest as well.
    """

    family: str
    messages: tuple[Message, ...]
    text: str = ""
    unfinished: bool = False


def training_prompt(index: int, seed: int = 0) -> Prompt:
    """The prompt number `index`; the same for the same seed and the same version of Python."""
    draw = _Draw(random.Random(f"{seed}:{index}"))
    family = draw.rng.choices(list(_FAMILIES), weights=[weight for weight, _ in _FAMILIES.values()])[0]
    request = _FAMILIES[family][1](draw)
    if family == "continuation":
        return Prompt(family, (), request)
    if family == "own":
        return Prompt(family, ({"role": "user", "content": request},), unfinished=True)
    return Prompt(family, tuple(_conversation(draw, request)))


def _conversation(draw: _Draw, request: str) -> list[Message]:
    """The request, sometimes after a system prompt or an earlier exchange, and in several manners."""
    messages = []
    if draw.rng.random() < 0.15:
        messages.append({"role": "system", "content": draw("system_prompts")})
    if draw.rng.random() < 0.12:
        question, answer = draw("earlier_turns")
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    manner = draw.rng.random()
    if manner < 0.08:
        request = request[0].lower() + request[1:].rstrip(".")
    elif manner < 0.16:
        request = f"{draw('openers')} {request[0].lower() + request[1:]}"
    elif manner < 0.26:
        request = f"{request} {draw('closers')}"
    return [*messages, {"role": "user", "content": request}]


@cache
def _words() -> dict[str, list[Any]]:
    import yaml

    text = Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8")
    words: dict[str, list[Any]] = yaml.safe_load(text)
    return words


@dataclass(frozen=True)
class _Draw:
    """Draws an entry of prompts.yaml by its key."""

    rng: random.Random

    def __call__(self, key: str) -> Any:
        return self.rng.choice(_words()[key])

    def one_of(self, *choices: str) -> str:
        return self.rng.choice(choices)


@cache
def standard_library() -> tuple[list[str], list[str]]:
    """Short functions, and docstrings of a paragraph, of Python's standard library."""
    sources, docs = set(), set()
    for name in _words()["modules"]:
        module = importlib.import_module(name)
        members = [value for value in vars(module).values() if getattr(value, "__module__", None) == name]
        members += [f for c in members if inspect.isclass(c) for f in vars(c).values() if inspect.isfunction(f)]
        for member in filter(lambda m: inspect.isfunction(m) or inspect.isclass(m), members):
            doc = inspect.getdoc(member) or ""
            if 200 <= len(doc) <= 800:
                docs.add(doc)
            if inspect.isfunction(member) and member.__code__.co_filename == module.__file__:
                source = textwrap.dedent(inspect.getsource(member)).strip()
                if 80 <= len(source) <= 700:
                    sources.add(source)
    return sorted(sources), sorted(docs)


def _passage(draw: _Draw) -> str:
    if draw.rng.random() < 0.3:
        return draw.rng.choice(standard_library()[1])
    keys = {"n": "names", "m": "names", "p": "places", "x": "buildings", "t": "topics", "d": "days"}
    slots = {slot: draw(key) for slot, key in keys.items()}
    slots |= {"y": draw.rng.randint(1890, 2024), "k": draw.rng.randint(3, 900), "j": draw.rng.randint(2, 12)}
    return " ".join(draw.rng.choice(part).format(**slots) for part in _words()["passage_parts"])


def _question(draw: _Draw) -> str:
    if draw.rng.random() < 0.2:
        return str(draw("questions"))
    return str(draw("question_forms").format(draw("topics"), draw("topics")))


def _list(draw: _Draw) -> str:
    number = draw.rng.choice([3, 3, 4, 5, 5, 5, 6, 7, 8, 10])
    return str(draw("list_forms").format(n=number, t=draw("topics")))


def _code(draw: _Draw) -> str:
    kind = draw.rng.random()
    if kind < 0.1:
        return f"Write a SQL query that {draw('sql_tasks')}."
    if kind < 0.18:
        return f"How do I {draw('shell_tasks')} on Linux?"
    return str(draw("code_forms").format(l=draw("languages"), t=draw("code_tasks")))


def _source(draw: _Draw) -> str:
    return str(draw("source_forms").format(draw.rng.choice(standard_library()[0])))


def _summary(draw: _Draw) -> str:
    return str(draw("summary_forms").format(_passage(draw)))


def _story(draw: _Draw) -> str:
    a, b = draw.rng.sample(_words()["things"], 2)
    return str(draw("story_forms").format(a=a, b=b, n=draw("names"), p=draw("places")))


def _structured(draw: _Draw) -> str:
    if draw.rng.random() < 0.25:
        return f"Convert this text to {draw('formats')}:\n\n{_passage(draw)}"
    record, style, topic = draw("records"), draw("formats"), draw("topics")
    return draw.one_of(
        f"Write {record} in {style}.",
        f"Give me an example of {record} as {style}.",
        f"Create {style} for {record}.",
        f"Show {record} about {topic} in {style}.",
    )


def _maths(draw: _Draw) -> str:
    a, b, c = draw.rng.randint(2, 99), draw.rng.randint(2, 60), draw.rng.randint(2, 12)
    name, other = draw.rng.sample(_words()["names"], 2)
    return draw.one_of(
        f"What is {a} + {b}?",
        f"What is {a} times {c}?",
        f"Calculate {a * c} divided by {c}.",
        f"What is {a}% of {b * 10}?",
        f"{name} has {a} apples and gives {min(a, c)} to {other}. How many are left?",
        f"Solve for x: {c}x + {b} = {a + b}.",
        f"A train travels {a * 10} km in {c} hours. What is its speed?",
        f"Is {a} a prime number? Explain.",
        f"A shirt costs ${a} and is reduced by {c * 5}%. What is the new price?",
        f"Find the area of a rectangle of {a} by {b}.",
        f"{name} is {c} years older than {other}. Together they are {2 * b + c}. How old are they?",
        f"Convert {a} miles to kilometres.",
        f"What is the next number: {c}, {2 * c}, {4 * c}, {8 * c}?",
        f"Write {a}/{b} as a decimal.",
        f"What is the average of {a}, {b} and {c}?",
        f"Explain how to multiply {a} by {b}.",
    )


def _rewrite(draw: _Draw) -> str:
    text = draw("rough_sentences") if draw.rng.random() < 0.6 else _passage(draw)
    return str(draw("rewrite_forms").format(text))


def _email(draw: _Draw) -> str:
    return f"Write {draw.one_of('an', 'a short', 'a friendly', 'a formal')} e-mail {draw('email_tasks')}."


def _translate(draw: _Draw) -> str:
    sentence, language = draw("sentences"), draw("target_languages")
    return draw.one_of(f"Translate to {language}: {sentence}", f'How do you say "{sentence}" in {language}?')


def _role(draw: _Draw) -> str:
    return str(draw("role_forms").format(r=draw("roles"), t=draw("topics")))


def _continuation(draw: _Draw) -> str:
    topic, place, thing, name = draw("topics"), draw("places"), draw("things"), draw("names")
    return draw.one_of(
        f"{topic[0].upper() + topic[1:]}: an introduction\n\n",
        f"The most important thing about {topic} is",
        _passage(draw) + " ",
        f"# {topic.title()}\n\n## Overview\n",
        f"Question: {draw('questions')}\nAnswer:",
        "import os\n\n\ndef main() -> None:\n    ",
        draw.rng.choice(standard_library()[0])[:200],
        f"Once upon a time in {place} there was a {thing}",
        f"Chapter 1\n\n{name} had never seen a {thing} before.",
    )


def _own(draw: _Draw) -> str:
    """The first words of a request, and often none."""
    return "" if draw.rng.random() < 0.3 else str(draw("beginnings"))


# family -> (weight, maker)
_FAMILIES: dict[str, tuple[float, Callable[[_Draw], str]]] = {
    "own": (160, _own),
    "question": (18, _question),
    "list": (14, _list),
    "code": (17, _code),
    "source": (4, _source),
    "summary": (11, _summary),
    "story": (11, _story),
    "structured": (8, _structured),
    "maths": (5, _maths),
    "rewrite": (4, _rewrite),
    "email": (4, _email),
    "translate": (2, _translate),
    "role": (4, _role),
    "continuation": (4, _continuation),
}
