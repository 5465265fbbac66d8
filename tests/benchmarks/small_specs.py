"""What the configs of `conftest.py` say: prompts of two categories, and a section `speculation` for every method."""

from __future__ import annotations

from typing import Any

PROMPTS = [
    {"prompt": f"the target verifies {i}, the target verifies {i}", "category": "code" if i % 2 else "chat"}
    for i in range(4)
]
DRAFT = {"draft": {"model": "./draft", "dtype": "float32"}}
SPECULATION: dict[str, dict[str, Any]] = {
    "draft_target": {**DRAFT, "num_draft_tokens": 3},
    "early_exit": {"early_exit": {"layer": 1}, "num_draft_tokens": 3},
    "ngram": {"ngram": {"max_ngram": 2}, "num_draft_tokens": 4},
    "cascade": {
        **DRAFT,
        "num_draft_tokens": 3,
        "cascade": {"num_draft_tokens": 2, "middle": {"model": "./middle", "dtype": "float32"}},
    },
    "tree": {**DRAFT, "tree": {"branching": [2, 1]}},
    "medusa": {"medusa": {"heads": "./heads", "num_heads": 2, "choices": [[0], [1], [0, 0], [0, 1]]}},
}
