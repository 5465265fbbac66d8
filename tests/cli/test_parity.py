"""`trtspec parity` through the front door, on small random models."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.cli.parity import CHECKS
from trtspec.errors import EXIT_ERROR, EXIT_OK, EXIT_PARITY_FAILED, EXIT_USAGE

PROMPTS = [{"prompt": f"the target verifies {i}", "category": "chat"} for i in range(6)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, save_model: Callable[..., Path]) -> Path:
    """A spec whose engines are built; the draft is as far from the target as real drafts are."""
    root = tmp_path_factory.mktemp("parity")
    save_model(root / "target")
    save_model(root / "draft", blend=(1, 0.15))
    (root / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS))
    content = {
        "version": 1,
        "target": {"model": "./target", "dtype": "float32"},
        "speculation": {
            "method": "draft_target",
            "num_draft_tokens": 3,
            "draft": {"model": "./draft", "dtype": "float32"},
        },
        "engine": {"max_batch_size": 2, "max_input_len": 128, "max_seq_len": 256},
        "parity": {"prompts": "prompts.jsonl", "num_prompts": 3, "max_tokens": 16, "num_samples": 160, "num_draws": 0},
    }
    config = root / "tiny.yaml"
    config.write_text(yaml.safe_dump(content))
    result = invoke("build", str(config))
    assert result.exit_code == EXIT_OK, result.output
    return config


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def refuse(*words: str, code: int = EXIT_ERROR) -> str:
    """The one line of a run that cannot be made."""
    result = invoke("parity", *words)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    line = result.stderr.splitlines()[-1]
    assert line.lower().startswith("error: ")
    return line


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
def test_what_was_built_passes(built: Path, tmp_path: Path) -> None:
    """Every check runs; the report's folder has all forms, a trace, and no script, as nothing is wrong."""
    target = tmp_path / "report"
    result = invoke("parity", str(built), "--json", "--report", str(target), "--set", "parity.num_draws=40")
    assert result.exit_code == EXIT_OK, result.output
    lines = result.stdout.splitlines()
    verdicts = dict(line.split(" in ")[0].split(": ") for line in lines if line.startswith("engines, "))
    assert list(verdicts) == [f"engines, {name}" for name in CHECKS]
    # 40 draws are too few to see anything, and say so.
    assert set(verdicts.values()) <= {"pass", "tie", "inconclusive"}
    assert [name for name, verdict in verdicts.items() if verdict == "inconclusive"] == ["engines, draws"]
    assert any(line.startswith("server, all: not applicable") for line in lines)
    assert lines[-2].startswith("parity of tiny: inconclusive")
    content = json.loads(lines[-1])
    assert content == json.loads((target / "report.json").read_text())
    assert content["settings"]["prompt_numbers"] == [1, 3, 5]
    assert {path.name for path in target.iterdir()} == {
        "report.json", "report.xml", "report.html", "reproduce", "trace-engines.jsonl"
    }  # fmt: skip
    assert not list((target / "reproduce").iterdir())
    assert "160 tokens" in content["checks"][1]["evidence"]

    again = invoke("parity", "replay", str(target / "trace-engines.jsonl"))
    assert again.exit_code == EXIT_OK, again.output
    assert "engines, greedy: " in again.stdout and "engines, sampled: pass" in again.stdout
    trace = str(target / "trace-engines.jsonl")
    assert invoke("parity", "diff", trace, trace).exit_code == EXIT_OK


def test_a_part_of_a_check_is_run_alone(built: Path) -> None:
    words = ("--subject", "engines", "--check", "rules:max-tokens", "--check", "invariances:same-seed", "--json")
    result = invoke("parity", str(built), *words)
    assert result.exit_code == EXIT_OK, result.output
    checks = json.loads(result.stdout.splitlines()[-1])["checks"]
    assert [(check["name"], [part["name"] for part in check["parts"]]) for check in checks] == [
        ("invariances", ["same-seed"]),
        ("rules", ["max-tokens"]),
    ]


def test_a_plan_says_what_would_be_seen_and_runs_nothing(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtspec.parity.suite.run", lambda *given: pytest.fail("it ran"))
    result = invoke("parity", str(built), "--plan", "--budget", "3000")
    assert result.exit_code == EXIT_OK, result.output
    assert "3 000 tokens" in result.stdout
    assert "a total variation of 0.10 needs" in result.stdout

    (wanted,) = [line for line in result.stdout.splitlines() if line.startswith("a total variation of 0.10 needs")]
    tokens = int(wanted.split()[6])
    planned = invoke("parity", str(built), "--plan", "--set", "parity.detect=0.1")
    assert f"{tokens:,} tokens".replace(",", " ") in planned.stdout
    assert "0.10 in all tokens" in planned.stdout


def test_the_checks_are_tests_of_pytest(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-m` and `-k` choose; a fault fails with the finding's own lines; what the subject cannot do is skipped."""
    monkeypatch.chdir(tmp_path)

    def run_pytest(*words: str) -> tuple[int, str]:
        code = pytest.main(["-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-rA", *words])
        return int(code), capsys.readouterr().out

    plugin = ["--trtspec-config", str(built)]
    code, output = run_pytest(*plugin, "-m", "parity_greedy or parity_rules", "-k", "greedy or max-tokens")
    assert code == 0, output
    assert "2 passed" in output and "engines::rules:max-tokens" in output

    accept_always(monkeypatch)
    code, output = run_pytest(*plugin, "-k", "sampled", "--trtspec-set", "parity.num_samples=400")
    assert code == 1, output
    assert "engines, sampled: fault:" in output and "Traceback" not in output

    code, output = run_pytest("--trtspec-url", "127.0.0.1:9")
    assert code == int(pytest.ExitCode.USAGE_ERROR)


def test_options_narrow_the_run(built: Path) -> None:
    words = ("--subject", "engines", "--check", "greedy", "--prompt", "2", "--max-tokens", "5", "--json")
    result = invoke("parity", str(built), *words)
    assert result.exit_code == EXIT_OK, result.output
    content = json.loads(result.stdout.splitlines()[-1])
    assert [(check["name"], check["subject"]) for check in content["checks"]] == [("greedy", "engines")]
    assert content["settings"]["prompt_numbers"] == [2]
    assert content["checks"][0]["evidence"].startswith("5 tokens of 1 prompts")


Patch = Callable[[pytest.MonkeyPatch], None]


def accept_always(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("trtspec.decoding.verify.accept_or_resample", lambda draft, p, q, position, uniforms: draft)


def residual_from_p(patch: pytest.MonkeyPatch) -> None:
    def rule(draft: int, p: np.ndarray, q: np.ndarray, position: int, uniforms: Any) -> int:
        return draft if uniforms.accepts(position, p[draft] / q[draft]) else uniforms.draw(position, p)

    patch.setattr("trtspec.decoding.verify.accept_or_resample", rule)


def q_is_not_what_was_drawn_from(patch: pytest.MonkeyPatch) -> None:
    from trtspec.decoding import draft_target

    class Sharpened(draft_target.DraftModel):
        def __init__(self, call: Any, acceptance: Any) -> None:
            def argmax_with_logits(request: Any) -> Any:
                from dataclasses import replace

                return call(replace(request, sampling=replace(request.sampling, temperature=0.0)))

            super().__init__(argmax_with_logits, acceptance)

    patch.setattr("trtspec.decoding.methods.DraftModel", Sharpened)


@pytest.mark.parametrize("broken", [accept_always, residual_from_p, q_is_not_what_was_drawn_from])
def test_a_broken_verification_rule_fails(built: Path, monkeypatch: pytest.MonkeyPatch, broken: Patch) -> None:
    """Hypothesis: sampled output follows the reference. 400 tokens, false-alarm rate 1e-3.

    Draft and target differ by a total variation near .5, and 400 tokens see .16 with probability 95 %.
    """
    broken(monkeypatch)
    words = ("--subject", "engines", "--check", "sampled", "--set", "parity.num_samples=400")
    result = invoke("parity", str(built), *words)
    assert result.exit_code == EXIT_PARITY_FAILED, result.output
    assert "engines, sampled: fault:" in result.stdout
    assert result.stdout.splitlines()[-1] == "parity of tiny: fault (1 fault)"
    assert "  next: Draft tokens get through too often" in result.stdout


def test_a_wrong_greedy_token_fails_and_can_be_reproduced(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines whose head is off by one: each logit belongs to the id before."""
    from trtspec.runtime.llama import Llama

    scores = Llama.scores
    monkeypatch.setattr(Llama, "scores", lambda self, hidden: scores(self, hidden).roll(1, dims=-1))
    result = invoke("parity", str(built), "--check", "greedy", "--max-tokens", "8", "--json")
    assert result.exit_code == EXIT_PARITY_FAILED, result.output
    findings = json.loads(result.stdout.splitlines()[-1])["checks"][0]["findings"]
    finding = findings[0]
    assert finding["verdict"] == "fault"
    assert finding["chosen"]["id"] == (finding["expected"]["id"] + 1) % 280
    assert finding["expected"]["logit"] - finding["chosen"]["logit"] > 0.002

    words = shlex.split(finding["reproduce"])
    assert words[:2] == ["trtspec", "parity"]
    again = invoke(*words[1:], "--json")
    assert again.exit_code == EXIT_PARITY_FAILED
    (check,) = json.loads(again.stdout.splitlines()[-1])["checks"]
    assert check["findings"] == [each for each in findings if each["prompt"] == finding["prompt"]]


def test_an_end_id_that_the_engines_do_not_honour_fails(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and reference are made to end soon, and the end ids are hidden from the cycle."""
    from trtspec.parity.subjects.in_process import InProcess
    from trtspec.runtime.llama import Llama
    from trtspec.runtime.reference import ReferenceSampler

    init, scores, logits = InProcess.__init__, Llama.scores, ReferenceSampler.logits
    bias = np.zeros(280, dtype=np.float32)
    bias[2] = 100.0
    monkeypatch.setattr(Llama, "scores", lambda self, hidden: scores(self, hidden) + torch.from_numpy(bias))
    monkeypatch.setattr(ReferenceSampler, "logits", lambda self, ids: logits(self, ids) + bias)
    assert invoke("parity", str(built), "--subject", "engines", "--check", "greedy").exit_code == EXIT_OK
    monkeypatch.setattr(
        InProcess, "__init__", lambda self, *engines, **rest: init(self, *engines, **{**rest, "end_ids": ()})
    )
    result = invoke("parity", str(built), "--subject", "engines", "--check", "greedy")
    assert result.exit_code == EXIT_PARITY_FAILED, result.output
    assert "end id 2 is part of the output" in result.stdout


def test_a_bad_prompt_is_named_by_its_line(built: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "bad.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    assert f"{prompts}:2: `prompt` is not a text" in refuse(str(built), "--prompts", str(prompts))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--prompt", "99"), EXIT_ERROR, "no prompt on line 99"),
        (("--prompts", "nowhere.jsonl"), EXIT_ERROR, "no such prompt file"),
        (("--set", "output.engines=elsewhere"), EXIT_ERROR, "no such engine"),
        (("--subject", "server", "--url", "127.0.0.1:9", "--check", "greedy"), EXIT_ERROR, "no server at 127.0.0.1:9"),
        (("--subject", "engines", "--url", "127.0.0.1:9"), EXIT_USAGE, "--url"),
        (("--report", "nowhere/report.json"), EXIT_ERROR, "nowhere is no directory"),
        (("--report", "report.pdf"), EXIT_ERROR, "cannot be written as .pdf"),
        (("--check", "nonsense"), EXIT_USAGE, "'nonsense' is no check"),
        (("--check", "rules:nonsense"), EXIT_USAGE, "rules has no part 'nonsense'"),
        (("--budget", "5 parsecs"), EXIT_ERROR, "no budget"),
        (("--subject", "trace"), EXIT_ERROR, "no trace is given"),
        (("--trace", "t.jsonl"), EXIT_USAGE, "--subject trace"),
        (("--num-prompts", "0"), EXIT_USAGE, "--num-prompts"),
    ],
)
def test_what_cannot_be_checked_is_said_in_one_line(
    built: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    assert message in refuse(str(built), *words, code=code)


def test_engines_of_another_model_are_refused(built: Path) -> None:
    weights = built.parent / "target" / "tokenizer_config.json"
    content = weights.read_text()
    weights.write_text(content + "\n")
    try:
        assert "built from another state of the model" in refuse(str(built))
    finally:
        weights.write_text(content)


def test_an_unchanged_verdict_is_shown_again(built: Path) -> None:
    words = ("parity", str(built), "--subject", "engines", "--check", "greedy", "--prompt", "2", "--if-changed")
    first = invoke(*words)
    assert first.exit_code == EXIT_OK, first.output
    assert "nothing has changed" not in first.output

    again = invoke(*words)
    assert again.exit_code == EXIT_OK, again.output
    lines = again.stdout.splitlines()
    assert lines[:-1] == first.stdout.splitlines()[1:]  # all but the line about loading the models
    assert lines[-1].endswith("nothing has changed since")

    prompts = built.parent / "prompts.jsonl"
    before = prompts.read_text()
    try:
        prompts.write_text(before + json.dumps({"prompt": "one more"}) + "\n")
        assert "nothing has changed" not in invoke(*words).output
    finally:
        prompts.write_text(before)
    assert "nothing has changed" not in invoke(*words[:-1]).output  # without the option it is checked


def test_a_fault_is_not_remembered(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtspec.parity.yardstick import Yardstick

    words = ("parity", str(built), "--subject", "engines", "--check", "greedy", "--prompt", "3", "--if-changed")
    with monkeypatch.context() as patch:
        along = Yardstick.along
        patch.setattr(Yardstick, "along", lambda self, prompt, tokens: -along(self, prompt, tokens))
        assert invoke(*words).exit_code == EXIT_PARITY_FAILED
    assert invoke(*words).exit_code == EXIT_OK
