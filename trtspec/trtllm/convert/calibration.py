"""What quantisation is calibrated with: prompts from a file, as batches of token ids.

Knows the prompt file, chat templates and how prompts are laid out in a batch. Does not know quantisers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import TrtspecError
from trtspec.models.source import ModelSource
from trtspec.spec.schema import Calibration

DEFAULT_PROMPTS = Path(__file__).with_name("calibration.jsonl")
_EXAMPLE = '{"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]} on every line'

Message = dict[str, str]


@dataclass(frozen=True)
class CalibrationSet:
    """Token ids to run the model on.

    Attributes:
        path: the file they come from.
        sha256: hex digest of that file.
        num_prompts: prompts read; those that give no token are not.
        batches: prompts of about the same length, cut to the shortest of their batch; `[batch][prompt][token]`.
    """

    path: Path
    sha256: str
    num_prompts: int
    batches: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads."""
        return sum(len(row) for batch in self.batches for row in batch)


def calibration_set(source: ModelSource, settings: Calibration, path: Path | None) -> CalibrationSet:
    """The first `settings.num_prompts` prompts as the model would get them: in its chat template if it has one.

    No padding: what a model computes for padding would count as observed. Prompts are sorted by length instead, and
    each batch is cut to its shortest.

    Raises:
        TrtspecError: no such file, a line that is no prompt, or one that the chat template refuses.
    """
    path = path or DEFAULT_PROMPTS
    content, prompts = _read(path)
    prompts = prompts[: settings.num_prompts]
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        try:
            encoded.append(_encode(source, prompt)[: settings.max_tokens])
        except TrtspecError as error:  # a conversation that the template refuses
            raise TrtspecError(error.problem, where=f"{path}: prompt {number}", fix=error.fix) from error
    rows = sorted((row for row in encoded if row), key=len)
    batches = []
    for start in range(0, len(rows), settings.batch_size):
        batch = rows[start : start + settings.batch_size]
        batches.append(tuple(tuple(row[: len(batch[0])]) for row in batch))
    return CalibrationSet(path, hashlib.sha256(content).hexdigest(), len(rows), tuple(batches))


def check_prompts(path: Path | None) -> None:
    """Read the file, for its faults.

    Raises:
        TrtspecError: no such file, or a line that is no prompt.
    """
    _read(path or DEFAULT_PROMPTS)


def _encode(source: ModelSource, prompt: str | Sequence[Message]) -> list[int]:
    """Ids of one prompt; a model without a chat template gets the texts of a conversation one after the other."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if source.chat_template is not None:
        return source.encode(source.chat(messages))
    bos = source.config.bos_token_id if source.add_bos else None
    text = "\n\n".join(message["content"] for message in messages)
    return [*([] if bos is None else [bos]), *source.encode(text)]


def _read(path: Path) -> tuple[bytes, list[str | list[Message]]]:
    """The file as it is, and its prompts: texts, or lists of messages."""
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8").split("\n")
    except FileNotFoundError:
        raise TrtspecError(
            "no such file of calibration prompts",
            where=str(path),
            fix="set calibration.prompts to a JSON Lines file, or leave it out for the prompts that come with trtspec",
        ) from None
    except OSError as error:
        raise TrtspecError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise TrtspecError("the calibration prompts are not UTF-8", where=str(path), fix="save as UTF-8") from error
    prompts = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise TrtspecError("the file holds no calibration prompt", where=str(path), expected=_EXAMPLE)
    return content, prompts


def _parse(line: str, where: str) -> str | list[Message]:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise TrtspecError(f"not JSON ({error})", where=where, expected=_EXAMPLE) from error
    entry = entry if isinstance(entry, dict) else {}
    prompt, messages = entry.get("prompt"), entry.get("messages")
    if isinstance(prompt, str) and prompt and messages is None:
        return prompt
    if prompt is None and isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
        return messages
    raise TrtspecError("no calibration prompt", where=where, expected=_EXAMPLE)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
