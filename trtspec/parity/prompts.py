"""The prompt file of a parity run: JSON Lines with `prompt` and an optional `category`.

Knows nothing of tokenizers or models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import TrtspecError

_EXAMPLE = 'a JSON object such as {"prompt": "Hello", "category": "chat"} on every line'


@dataclass(frozen=True)
class Prompt:
    """One line of the file.

    Attributes:
        number: line number in the file, from 1; names the prompt in every report.
        text: what the model is given.
        category: free label, or None.
    """

    number: int
    text: str
    category: str | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file; empty lines are skipped.

    Raises:
        TrtspecError: no such file, not UTF-8, no prompt, or a line that is not as described; its number is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise TrtspecError("no such prompt file", where=str(path), fix="set parity.prompts or --prompts") from error
    except UnicodeDecodeError as error:
        raise TrtspecError("the prompt file is not UTF-8", where=str(path), fix="convert it to UTF-8") from error
    except OSError as error:
        raise TrtspecError(f"cannot read the prompt file: {error.strerror}", where=str(path)) from error
    prompts = [_parse(line, f"{path}:{n}", n) for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise TrtspecError("the prompt file holds no prompt", where=str(path), expected=_EXAMPLE)
    return prompts


def spread(prompts: list[Prompt], num: int) -> list[Prompt]:
    """`num` prompts evenly over the file, so that a file sorted by category is seen whole; all if it has fewer."""
    num = min(num, len(prompts))
    return [prompts[i * len(prompts) // num] for i in range(num)]


def _parse(line: str, where: str, number: int) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise TrtspecError(f"not JSON: {error.msg}", where=where, expected=_EXAMPLE) from error
    if not isinstance(entry, dict):
        raise TrtspecError("not a JSON object", where=where, expected=_EXAMPLE)
    text, category = entry.get("prompt"), entry.get("category")
    if not isinstance(text, str) or not text:
        problem = "`prompt` is missing" if text is None else "`prompt` is not a text, or is empty"
        raise TrtspecError(problem, where=where, expected=_EXAMPLE)
    if category is not None and not isinstance(category, str):
        raise TrtspecError("`category` is not a text", where=where, expected=_EXAMPLE)
    return Prompt(number, text, category)
