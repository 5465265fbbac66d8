"""The training prompts: many, varied, the same every time, and none that a draft is measured on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from trtspec.train.prompts import _FAMILIES, standard_library, training_prompt

MEASURED = Path(__file__).parents[2] / "configs" / "prompts" / "quickstart.jsonl"
SAMPLE = [training_prompt(index) for index in range(1500)]


def test_the_same_number_is_the_same_prompt() -> None:
    assert [training_prompt(index) for index in range(40)] == SAMPLE[:40]
    assert [training_prompt(index, seed=1) for index in range(40)] != SAMPLE[:40]


def test_prompts_are_distinct_and_of_every_family() -> None:
    finished = [prompt for prompt in SAMPLE if not prompt.unfinished]
    assert len({str(prompt.messages) + prompt.text for prompt in finished}) > 0.95 * len(finished)
    assert len(SAMPLE) / 3 < len(finished) < len(SAMPLE) / 2
    families = Counter(prompt.family for prompt in finished)
    assert set(families) == set(_FAMILIES) - {"own"}
    assert max(families.values()) < len(finished) / 4


def test_what_the_target_is_to_finish_begins_in_many_ways() -> None:
    begun = [prompt.messages[-1]["content"] for prompt in SAMPLE if prompt.unfinished]
    assert len(set(begun)) > 80
    assert 0.2 < begun.count("") / len(begun) < 0.4


def test_conversations_end_with_the_user_and_nothing_is_left_unfilled() -> None:
    for prompt in SAMPLE:
        if prompt.family == "continuation":
            assert prompt.text and not prompt.messages
            continue
        roles = [message["role"] for message in prompt.messages]
        assert roles[-1] == "user"
        assert roles[0] in ("system", "user")
        if prompt.family not in ("source", "summary", "rewrite", "structured"):  # those quote code and docstrings
            assert not any("{" in message["content"] for message in prompt.messages)
    assert {len(prompt.messages) for prompt in SAMPLE} >= {1, 2, 3, 4}


def test_measured_prompts_are_not_among_them() -> None:
    measured = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    categories = Counter(entry["category"] for entry in measured)
    assert set(categories) == {"code", "chat", "summarizing", "lists", "structured", "creative"}
    assert len(set(categories.values())) == 1, "categories weigh the same"
    trained = {message["content"].lower().strip(" .?!") for prompt in SAMPLE for message in prompt.messages}
    assert not trained & {entry["prompt"].lower().strip(" .?!") for entry in measured}


def test_the_standard_library_gives_code_and_prose() -> None:
    sources, docs = standard_library()
    assert len(sources) > 800 and len(docs) > 200
    for source in sources[::50]:
        compile(source, "source", "exec")
