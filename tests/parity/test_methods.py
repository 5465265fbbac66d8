"""Every method that drafts outside the target's engine, from a spec to a verdict, on small random models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.errors import EXIT_OK, EXIT_PARITY_FAILED

PROMPTS = [{"prompt": f"the target verifies {i}, the target verifies {i}"} for i in range(4)]
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"ngram": {"max_ngram": 2}},
    "early_exit": {"early_exit": {"layer": 1}},
    "cascade": {
        "draft": {"model": "./draft", "dtype": "float32"},
        "cascade": {"num_draft_tokens": 2, "middle": {"model": "./middle", "dtype": "float32"}},
    },
    "cascade of four": {
        "method": "cascade",
        "draft": {"model": "./draft", "dtype": "float32"},
        "cascade": {
            "num_draft_tokens": 2,
            "middle": {"model": "./middle", "dtype": "float32"},
            "middles": [{"model": "./lower", "dtype": "float32"}],
        },
    },
    "tree": {
        "draft": {"model": "./middle", "dtype": "float32"},
        "tree": {"branching": [1, 1], "drafts": [{"model": "./draft", "dtype": "float32"}]},
        "num_draft_tokens": 4,
    },
}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, save_model: Callable[..., Path]) -> Callable[[str], Path]:
    """Build the engines of a method and return its spec."""
    root = tmp_path_factory.mktemp("methods")
    save_model(root / "target")
    save_model(root / "middle", blend=(1, 0.05))
    save_model(root / "lower", blend=(1, 0.1))
    save_model(root / "draft", blend=(1, 0.15))
    (root / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS))

    def written(method: str) -> Path:
        config = root / f"{method}.yaml"
        if not config.exists():
            content = {
                "version": 1,
                "target": {"model": "./target", "dtype": "float32"},
                "speculation": {"method": method, "num_draft_tokens": 3, **METHODS[method]},
                "engine": {"max_batch_size": 2, "max_input_len": 128, "max_seq_len": 256},
                "parity": {
                    "prompts": "prompts.jsonl",
                    "num_prompts": 2,
                    "max_tokens": 16,
                    "num_samples": 160,
                    "num_draws": 0,
                },
            }
            config.write_text(yaml.safe_dump(content))
            result = invoke("build", str(config))
            assert result.exit_code == EXIT_OK, result.output
        return config

    return written


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


@pytest.mark.parametrize("method", METHODS)
def test_what_was_built_passes(build: Callable[[str], Path], method: str) -> None:
    """All checks but that of draws; hypothesis of the sampled one: every token is a draw from the reference.

    160 tokens, false-alarm rate 1e-3, and the seeds are fixed.
    """
    result = invoke("parity", str(build(method)), "--subject", "engines", "--json")
    assert result.exit_code == EXIT_OK, result.output
    checks = {check["name"]: check["verdict"] for check in json.loads(result.stdout.splitlines()[-1])["checks"]}
    assert checks == dict.fromkeys(("greedy", "sampled", "logits", "invariances", "rules", "degenerate"), "pass")


@pytest.mark.parametrize("cascade", ["cascade", "cascade of four"])
def test_a_cascade_that_accepts_everything_fails(
    build: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, cascade: str
) -> None:
    """All levels keep whatever is proposed, so the output is the draft's; 400 tokens see a total variation of .16."""
    monkeypatch.setattr("trtspec.decoding.verify.accept_or_resample", lambda draft, p, q, position, uniforms: draft)
    words = ("--subject", "engines", "--check", "sampled", "--set", "parity.num_samples=400")
    result = invoke("parity", str(build(cascade)), *words)
    assert result.exit_code == EXIT_PARITY_FAILED, result.output
    assert "engines, sampled: fault:" in result.stdout


def test_a_cascade_whose_draft_fails_is_reported(build: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The text would still be right, and the speed of a cascade without its draft is not what was asked for."""
    from trtspec.decoding.draft_target import DraftModel

    def failing(self: DraftModel, generation: object, num_draft_tokens: int) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(DraftModel, "propose", failing)
    result = invoke("parity", str(build("cascade")), "--subject", "engines", "--check", "greedy")
    assert result.exit_code not in (EXIT_OK, EXIT_PARITY_FAILED)
    assert "the draft engine failed: out of order" in result.stderr
