"""A run that is dealt out: shards answer, one process judges, and the report is that of a run in one process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from parity_doubles import TARGET, broken_verifier, engine, subject, trial

from trtspec.cli import main
from trtspec.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE, TrtspecError
from trtspec.parity import shards
from trtspec.parity.checks import CHECKS
from trtspec.parity.result import Check
from trtspec.parity.subjects import Answer, Query
from trtspec.parity.subjects.in_process import InProcess
from trtspec.parity.trace import Remembering
from trtspec.shard import Shard

SPREAD = ("greedy", "sampled", "draws")


class Counted:
    """A subject that counts what it is asked."""

    name = "engines"

    def __init__(self, asked: InProcess) -> None:
        self.num_asked = 0
        self._asked = asked

    def generate(self, query: Query) -> Answer:
        self.num_asked += 1
        return self._asked.generate(query)


def record(directory: Path, shard: Shard, asked: Any = None, made_of: str = "this") -> None:
    with shards.recording(directory, "engines", shard, {shards.MADE_OF: made_of}) as begun:
        assert begun is not None
        recorder, given = begun
        remembering = Remembering(asked or subject(), recorder, given.answers)
        for name in SPREAD:
            share = CHECKS[name].share
            assert share is not None
            share(trial(note=recorder.note, noted=given.noted), remembering, shard)


def checked(asked: Counted, given: shards.Given) -> tuple[list[dict[str, Any]], int]:
    """Everything the checks say but for times, and the tokens that they count."""
    remembering = Remembering(asked, given=given.answers)
    found = [CHECKS[name].run(trial(noted=given.noted), remembering) for name in SPREAD]
    return [without_times(check) for check in found], remembering.tokens


def without_times(check: Check) -> dict[str, Any]:
    return {**vars(check), "evidence": re.sub(r"\d+ tokens/s", "", check.evidence)}


# ---- against tables


@pytest.mark.parametrize("target", [None, engine(TARGET, broken_verifier(accept=lambda p, q: 1.0))])
def test_the_verdicts_are_those_of_one_process(tmp_path: Path, target: Any) -> None:
    """Of a right engine, and of a broken one that one process leaves at the first look that finds the fault."""
    for number in (1, 2, 3):
        record(tmp_path, Shard(number, 3), subject(target))
    one, merged = Counted(subject(target)), Counted(subject(target))
    assert checked(merged, shards.given(tmp_path, "engines", "this")) == checked(one, shards.Given())
    assert merged.num_asked < one.num_asked / 10


def test_what_a_shard_has_not_recorded_is_asked(tmp_path: Path) -> None:
    """The second of three was killed in the middle of a line, the third never ran."""
    record(tmp_path, Shard(1, 3))
    record(tmp_path, Shard(2, 3))
    path = tmp_path / "engines-2-of-3.jsonl"
    text = path.read_bytes()
    path.rename(partial := path.with_name(path.name + ".partial"))
    partial.write_bytes(text[: len(text) // 2])
    one, merged = Counted(subject()), Counted(subject())
    assert checked(merged, shards.given(tmp_path, "engines", "this")) == checked(one, shards.Given())
    assert 0 < merged.num_asked < one.num_asked

    asked = Counted(subject())
    record(tmp_path, Shard(2, 3), asked)
    whole = len([line for line in text.splitlines() if b'"kind": "answer"' in line])
    assert 0 < asked.num_asked < whole, "what was there is not asked again"
    assert len([line for line in path.read_bytes().splitlines() if b'"kind": "answer"' in line]) == whole
    assert sorted(each.name for each in tmp_path.iterdir() if each.name[0] != ".") == [
        "engines-1-of-3.jsonl",
        "engines-2-of-3.jsonl",
    ]


def test_a_shard_that_is_interrupted_twice_loses_nothing(tmp_path: Path) -> None:
    class Leaving(Counted):
        def generate(self, query: Query) -> Answer:
            if self.num_asked == 40:
                raise KeyboardInterrupt
            return super().generate(query)

    with pytest.raises(KeyboardInterrupt):
        record(tmp_path, Shard(1, 2), Leaving(subject()))
    for _ in range(2):  # before an answer is written again
        with (
            pytest.raises(KeyboardInterrupt),
            shards.recording(tmp_path, "engines", Shard(1, 2), {shards.MADE_OF: "this"}),
        ):
            raise KeyboardInterrupt
        assert len(shards.given(tmp_path, "engines", "this").answers) == 40


def test_one_process_a_shard(tmp_path: Path) -> None:
    with (
        shards.recording(tmp_path, "engines", Shard(1, 2), {shards.MADE_OF: "this"}),
        pytest.raises(TrtspecError, match="another process records this shard"),
    ):
        record(tmp_path, Shard(1, 2))


def test_shards_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(TrtspecError, match="no shards here; record them with --shard 1/N"):
        shards.given(tmp_path / "none", "engines", "this")
    (tmp_path / "engines-2-of-2.jsonl.partial").write_text("")  # ended before its first line
    record(tmp_path, Shard(1, 2))
    with pytest.raises(TrtspecError, match=r"1-of-2\.jsonl: a shard of another spec, other prompts or models"):
        shards.given(tmp_path, "engines", "that")
    path = tmp_path / "engines-1-of-2.jsonl"
    path.write_text(path.read_text().replace('"blocks"', '"block"', 1))
    with pytest.raises(TrtspecError, match=r"1-of-2\.jsonl:2: not a line of a trace"):
        shards.given(tmp_path, "engines", "this")


# ---- by the command


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, save_model: Callable[..., Path]) -> Path:
    """A spec of small random models, built."""
    root = tmp_path_factory.mktemp("shards")
    save_model(root / "target")
    save_model(root / "draft", blend=(1, 0.15))
    lines = [{"prompt": f"the target verifies {i}, the target verifies {i}"} for i in range(3)]
    (root / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    content = {
        "version": 1,
        "target": {"model": "./target", "dtype": "float32"},
        "speculation": {
            "method": "draft_target",
            "num_draft_tokens": 3,
            "draft": {"model": "./draft", "dtype": "float32"},
        },
        "engine": {"max_batch_size": 2, "max_input_len": 128, "max_seq_len": 256},
        "parity": {"prompts": "prompts.jsonl", "max_tokens": 12, "num_samples": 100, "num_draws": 30},
    }
    path = root / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    assert CliRunner().invoke(main, ["build", str(path)]).exit_code == EXIT_OK
    return path


def parity(config: Path, *words: str) -> Result:
    checks = () if "--check" in words else (word for name in (*SPREAD, "degenerate") for word in ("--check", name))
    subjects = () if "--subject" in words else ("--subject", "engines")
    return CliRunner().invoke(main, ["parity", str(config), *subjects, *checks, *words])


def report(result: Result) -> dict[str, Any]:
    assert result.exit_code == EXIT_OK, result.output
    content: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    for check in content["checks"]:
        del check["seconds"]
        check["evidence"] = re.sub(r"\d+ tokens/s", "", check["evidence"])
    return content


def test_the_report_is_that_of_one_process(config: Path, tmp_path: Path) -> None:
    for shard in ("1/2", "2/2"):
        result = parity(config, "--shards", str(tmp_path), "--shard", shard)
        assert result.exit_code == EXIT_OK and f"engines, shard {shard}: " in result.stdout, result.output
    merged = parity(config, "--shards", str(tmp_path), "--json")
    assert report(merged) == report(parity(config, "--json"))
    taken = re.search(r"shards: (\d+) answers of engines", merged.stdout)
    assert taken is not None and int(taken[1]) > 40
    again = parity(config, "--shards", str(tmp_path), "--shard", "1/2")
    assert "engines, shard 1/2: recorded before" in again.stdout
    other = parity(config, "--shards", str(tmp_path), "--set", "parity.seed=7")
    assert other.exit_code == EXIT_ERROR and "a shard of another spec, other prompts or models" in other.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--shard", "5/4"], EXIT_ERROR, "--shard 5/4: no such shard; expected I/N with I from 1 to N"),
        (["--shard", "1/4", "--subject", "server"], EXIT_ERROR, "--subject server is not dealt out"),
        (["--shard", "1/4", "--budget", "90s"], EXIT_ERROR, "a budget in time is not dealt out: 90s"),
        (["--shard", "1/4", "--check", "rules"], EXIT_ERROR, "nothing of rules is known beforehand"),
        (["--budget", "90s"], EXIT_ERROR, "a budget in time is not dealt out: 90s"),
        (["--subject", "server"], EXIT_USAGE, "--shards has answers of --subject engines or runner"),
        (["--shard", "1/4", "--json"], EXIT_USAGE, "a shard has no report"),
        (["--shard", "1/4", "--plan"], EXIT_USAGE, "goes with neither --plan nor --if-changed"),
        (["--executor", "slurm", "--subject", "server", "--num-shards", "2"], EXIT_ERROR, "is not dealt out"),
    ],
)
def test_what_cannot_be_dealt_out(config: Path, tmp_path: Path, words: list[str], code: int, message: str) -> None:
    subjects = () if "--subject" in words else ("--subject", "engines")
    command = ["parity", str(config), *subjects, "--shards", str(tmp_path), *words]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == code and message in result.stderr, result.output
    assert not list(tmp_path.iterdir())
