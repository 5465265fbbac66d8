"""`trtspec train draft` from the front door: a whole run, its files, going on after a kill, and wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.models.source import open_model
from trtspec.train.generate import count_tokens

PROMPTS = [{"category": "code", "prompt": "def f"}, {"category": "chat", "prompt": "hello there"}]


def arguments(model: Path, folder: Path, *extra: str) -> list[str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, PROMPTS)))
    return [
        "train", "draft", "--target", str(model), "--output", str(folder / "draft"), "--work-dir", str(folder / "work"),
        "--prompts", str(prompts), "--tokens", "300", "--steps", "5", "--layers", "1", "--draft-vocab", "64",
        "--workers", "1", *extra,
    ]  # fmt: skip


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


@pytest.fixture(scope="module")
def trained(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generation killed with signal 9 after its first shard, then the same command again."""
    folder = tmp_path_factory.mktemp("train")
    answers = folder / "work" / "answers"
    command = [sys.executable, "-m", "trtspec", *arguments(tiny_model_dir, folder, "--tokens", "30000")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        deadline = time.monotonic() + 120
        while not list(answers.glob("*.safetensors")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    survived = {path: path.read_bytes() for path in answers.glob("*.safetensors")}
    assert not (folder / "draft").exists()
    result = run(*arguments(tiny_model_dir, folder, "--tokens", str(count_tokens(answers) + 1)))
    assert result.exit_code == 0, result.output
    assert all(path.read_bytes() == content for path, content in survived.items())
    assert len(list(answers.glob("*.safetensors"))) > len(survived)
    return folder


def test_the_stages_are_told_and_the_figures_printed(tiny_model_dir: Path, trained: Path) -> None:
    result = run(*arguments(tiny_model_dir, trained, "--tokens", "1", "--json"))
    assert result.exit_code == 0, result.output
    stages = [line.split(":")[0] for line in result.stderr.splitlines()]
    assert list(dict.fromkeys(stages)) == ["generate", "train", "measure"]
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures == json.loads((trained / "draft" / "acceptance.json").read_text())
    assert set(figures["modes"]) == {"greedy", "temperature 1"}
    assert set(figures["modes"]["greedy"]) == {"all", "code", "chat"}
    assert figures["training"]["steps"] == 5
    for figure in figures["modes"]["greedy"].values():
        lengths = list(figure["acceptance_length"].values())
        assert lengths == sorted(lengths) and 1.0 <= lengths[0] <= 2.0


def test_what_is_written_opens_as_a_draft_of_its_target(tiny_model_dir: Path, trained: Path) -> None:
    draft = trained / "draft"
    files = {"config.json", "model.safetensors", "acceptance.json", "README.md"}
    assert {path.name for path in draft.iterdir()} == files
    assert not [path for path in trained.iterdir() if path.name.startswith(".")]
    source = open_model(str(draft), target=open_model(str(tiny_model_dir)))
    source.check()
    assert source.tensor("lm_head.weight").shape == (64, 32)
    card = (draft / "README.md").read_text()
    length = json.loads((draft / "acceptance.json").read_text())["modes"]["greedy"]["all"]["acceptance_length"]["4"]
    assert f"{length:.2f} tokens a target pass" in card
    assert "trtspec train draft --measure-only" in card


def test_measuring_again_gives_the_same_acceptance(tiny_model_dir: Path, trained: Path) -> None:
    before = json.loads((trained / "draft" / "acceptance.json").read_text())
    weights = (trained / "draft" / "model.safetensors").read_bytes()
    result = run(*arguments(tiny_model_dir, trained, "--measure-only"))
    assert result.exit_code == 0, result.output
    after = json.loads((trained / "draft" / "acceptance.json").read_text())
    assert after["modes"] == before["modes"]
    assert after["training"] == before["training"]
    assert (trained / "draft" / "model.safetensors").read_bytes() == weights
    assert "greedy, all:" in result.stdout


def test_a_work_directory_of_another_run(tiny_draft_dir: Path, tiny_model_dir: Path, trained: Path) -> None:
    for args in (arguments(tiny_draft_dir, trained), arguments(tiny_model_dir, trained, "--seed", "1")):
        result = run(*args)
        assert result.exit_code == 1
        assert "holds the answers of another target or seed" in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--prompts", "nowhere.jsonl"], 1, "nowhere.jsonl: no such prompt file"),
        (["--target", "./nowhere"], 1, "no such model directory"),
        (["--layers", "3"], 1, "--layers: 3 layers; expected at most 2"),
        (["--tokens", "0"], 2, "--tokens"),
        (["--measure-only", "--output", "nowhere"], 1, "nowhere"),
    ],
)
def test_wrong_input_is_one_line(
    tiny_model_dir: Path, tmp_path: Path, extra: list[str], code: int, message: str
) -> None:
    result = run(*arguments(tiny_model_dir, tmp_path, *extra))
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "draft").exists()
