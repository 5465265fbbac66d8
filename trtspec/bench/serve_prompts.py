"""Prompts as a load test sends them: the chat template applied, and a place where a mark makes their beginning differ.

Knows prompt files and templates; no server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from trtspec.errors import TrtspecError
from trtspec.prompts import Prompt

Chat = Callable[[Sequence[Mapping[str, str]]], str]
_MARK = "\ufdd0"  # no text has it: Unicode keeps it free for uses like this one


@dataclass(frozen=True)
class SentPrompt:
    """One prompt.

    Attributes:
        number: its line in the file.
        category: its label, or None.
        head, text: what is sent: the template's words before the first message, and everything after them.
    """

    number: int
    category: str | None
    head: str
    text: str

    def marked(self, mark: str = "") -> str:
        """The whole prompt, the mark before the first words that are its own."""
        return f"{self.head}{mark}{self.text}"


def sent_prompts(prompts: Sequence[Prompt], chat: Chat | None, where: str) -> list[SentPrompt]:
    """The prompts with the chat template applied; a text counts as what the user says.

    Args:
        prompts: of the file.
        chat: applies the template to messages; None: there is none, and texts are sent as they are.
        where: the file.

    Raises:
        TrtspecError: messages without a template, or the template refuses them.
    """
    return [_sent(prompt, chat, f"{where}:{prompt.number}") for prompt in prompts]


def digest(prompts: Sequence[SentPrompt]) -> str:
    """Changes when what is sent changes."""
    return sha256("\0".join(prompt.marked() for prompt in prompts).encode()).hexdigest()[:16]


def _sent(prompt: Prompt, chat: Chat | None, where: str) -> SentPrompt:
    if chat is None:
        if prompt.messages:
            raise TrtspecError(
                "`messages` need a chat template, and the server publishes none",
                where=where,
                fix="give CONFIG, whose target may have one, or write `prompt` texts",
            )
        return SentPrompt(prompt.number, prompt.category, "", prompt.text)
    messages = list(prompt.messages or ({"role": "user", "content": prompt.text},))
    try:
        whole = chat(messages)
        head, mark, text = chat([{**messages[0], "content": _MARK + messages[0]["content"]}, *messages[1:]]).partition(
            _MARK
        )
    except TrtspecError as error:
        raise TrtspecError(error.problem, where=where, expected=error.expected, fix=error.fix) from error
    apart = bool(mark) and head + text == whole
    return SentPrompt(prompt.number, prompt.category, *((head, text) if apart else ("", whole)))
