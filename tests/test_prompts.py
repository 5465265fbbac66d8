"""The prompt file."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtspec.errors import TrtspecError
from trtspec.prompts import Prompt, read_prompts, spread


def test_reads_prompts_with_their_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b\\n", "category": "code", "more": 1}\n', encoding="utf-8")
    assert read_prompts(path) == [Prompt(1, "a"), Prompt(3, "b\n", "code")]


def test_conversations_and_references_where_they_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "a", "name": "x"}], "reference": "b"}\n{"prompt": "c\u2028d"}\n',
        encoding="utf-8",
    )
    message = {"role": "user", "content": "a"}
    chat, text = read_prompts(path, chats=True)
    assert chat == Prompt(1, "", messages=(message,), reference="b")
    assert text == Prompt(2, "c\u2028d")
    with pytest.raises(TrtspecError, match=":1: `prompt` is missing and `messages` are not taken here"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"messages": []}', "no conversation"),
        ('{"messages": [{"role": "user"}]}', "no conversation"),
        ('{"messages": {"role": "user", "content": "a"}}', "no conversation"),
        ('{"messages": [{"role": "user", "content": "a"}], "prompt": "b"}', "both `prompt` and `messages`"),
        ('{"prompt": "a", "reference": 3}', "`reference` is not a text"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_conversations_are_refused(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(TrtspecError, match=rf"p\.jsonl:1: .*{problem}"):
        read_prompts(path, chats=True)


@pytest.mark.parametrize(
    ("content", "where", "problem"),
    [
        (b'{"prompt": "a"}\n{"prompt": ', ":2", "not JSON"),
        (b'{"prompt": "a"}\n\n["a"]', ":3", "not a JSON object"),
        (b'{"text": "a"}', ":1", "`prompt` is missing"),
        (b'{"prompt": 5}', ":1", "not a text"),
        (b'{"prompt": ""}', ":1", "empty"),
        (b'{"prompt": "a", "category": 1}', ":1", "`category`"),
        (b"\n \n", "", "no prompt"),
        (b"\xff\xfe", "", "not UTF-8"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, content: bytes, where: str, problem: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(TrtspecError) as caught:
        read_prompts(path)
    assert caught.value.where == f"{path}{where}"
    assert problem in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrtspecError, match="no such prompt file"):
        read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize(("num", "numbers"), [(1, [1]), (2, [1, 4]), (3, [1, 3, 5]), (9, None)])
def test_a_part_of_the_file_is_taken_evenly(num: int, numbers: list[int] | None) -> None:
    prompts = [Prompt(number, "x") for number in range(1, 7)]
    assert [prompt.number for prompt in spread(prompts, num)] == (numbers or [1, 2, 3, 4, 5, 6])
