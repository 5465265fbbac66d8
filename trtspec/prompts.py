"""Prompt files: JSON Lines with `prompt` (a text) or `messages` (a conversation), and optional labels.

What parity checks, benchmarks and plans are made on. Knows nothing of tokenizers, templates or models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import TrtspecError

_EXAMPLE = 'a JSON object such as {"prompt": "Hello", "category": "chat"} on every line'
_MESSAGES = 'a list such as [{"role": "user", "content": "Hello"}]'

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One line of the file.

    Attributes:
        number: line number in the file, from 1; names the prompt in every report.
        text: what is asked; empty where `messages` say it.
        category: free label, or None.
        messages: a conversation for the model's chat template, instead of a text.
        reference: an answer to compare with, or None.
    """

    number: int
    text: str
    category: str | None = None
    messages: tuple[Message, ...] = ()
    reference: str | None = None


def read_prompts(path: Path, *, chats: bool = False) -> list[Prompt]:
    """All prompts of a file; empty lines are skipped.

    Args:
        path: the file, UTF-8.
        chats: whether a line may have `messages` instead of `prompt`.

    Raises:
        TrtspecError: no such file, not UTF-8, no prompt, or a line that is not as described; its number is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may hold other ends of lines
    except FileNotFoundError as error:
        raise TrtspecError("no such prompt file", where=str(path), fix="set parity.prompts or --prompts") from error
    except UnicodeDecodeError as error:
        raise TrtspecError("the prompt file is not UTF-8", where=str(path), fix="convert it to UTF-8") from error
    except OSError as error:
        raise TrtspecError(f"cannot read the prompt file: {error.strerror}", where=str(path)) from error
    prompts = [_parse(line, f"{path}:{n}", n, chats) for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise TrtspecError("the prompt file holds no prompt", where=str(path), expected=_EXAMPLE)
    return prompts


def spread(prompts: Sequence[Prompt], num: int | None) -> list[Prompt]:
    """`num` prompts evenly over the file, so that a file sorted by category is seen whole; all if it has fewer."""
    num = len(prompts) if num is None else min(num, len(prompts))
    return [prompts[i * len(prompts) // num] for i in range(num)]


def _parse(line: str, where: str, number: int, chats: bool) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise TrtspecError(f"not JSON: {problem}", where=where, expected=_EXAMPLE) from error
    if not isinstance(entry, dict):
        raise TrtspecError("not a JSON object", where=where, expected=_EXAMPLE)
    messages = _messages(entry.get("messages"), where) if chats else ()
    text = entry.get("prompt")
    if text is not None and messages:
        raise TrtspecError("both `prompt` and `messages`", where=where, expected="one of them")
    if not messages and (not isinstance(text, str) or not text):
        problem = "`prompt` is missing" if text is None else "`prompt` is not a text, or is empty"
        if text is None and "messages" in entry:
            problem += " and `messages` are not taken here"
        raise TrtspecError(problem, where=where, expected=_EXAMPLE)
    for name in ("category", "reference"):
        if not isinstance(entry.get(name), str | None):
            raise TrtspecError(f"`{name}` is not a text", where=where, expected=_EXAMPLE)
    return Prompt(number, text or "", entry.get("category"), messages, entry.get("reference"))


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if value is None:
        return ()
    messages = value if isinstance(value, list) else []
    if not messages or not all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    ):
        raise TrtspecError("`messages` is no conversation", where=where, expected=_MESSAGES)
    return tuple({key: message[key] for key in ("role", "content")} for message in messages)
