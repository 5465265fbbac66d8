"""`trtspec parity --url` and `pytest --trtspec-url` without a spec, on the real server."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.errors import EXIT_ERROR, EXIT_OK, EXIT_PARITY_FAILED, EXIT_USAGE

NARROW = ("--num-prompts", "2", "--max-tokens", "12", "--check", "greedy")


def parity(*words: str) -> Result:
    return CliRunner().invoke(main, ["parity", *words])


def report(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture
def built(pair: SimpleNamespace, tmp_path: Path) -> Iterator[Path]:
    """The record that a build leaves beside the engines of the server, and where its prompts are."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the target {i}"}) + "\n" for i in range(3)))
    spec = {"file": str(pair.root / "tiny.yaml"), "resolved": pair.spec.model_dump(mode="json")}
    record = pair.root / "engines" / "manifest.json"
    record.write_text(json.dumps({"spec": spec}))
    yield prompts
    record.unlink()


def test_a_named_model_is_what_the_server_has_to_answer_like(pair: SimpleNamespace, server: SimpleNamespace) -> None:
    """No engine and no spec is looked at; the server says how much it drafts."""
    target = str(pair.root / "target-model")
    result = parity("--url", server.grpc, "--target", target, *NARROW, "--check", "rules:max-tokens", "--json")
    assert result.exit_code == EXIT_OK, result.output
    found = report(result)
    assert [(check["name"], check["subject"], check["verdict"]) for check in found["checks"]] == [
        ("greedy", "server", "pass"), ("rules", "server", "pass")
    ]  # fmt: skip
    settings = found["settings"]
    assert (settings["num_draft_tokens"], settings["tolerance"], settings["spec"]) == (3, 2e-3, "")

    engine = parity("--url", server.grpc, "--target", target, "--subject", "engine-model", *NARROW, "--json")
    assert engine.exit_code == EXIT_OK, engine.output
    assert [check["subject"] for check in report(engine)["checks"]] == ["engine-model"]


def test_another_model_is_a_fault_that_can_be_reproduced(pair: SimpleNamespace, server: SimpleNamespace) -> None:
    target = str(pair.root / "draft-model")
    words = ("--url", server.grpc, "--target", target, "--set", "target.dtype=float16", *NARROW, "--json")
    result = parity(*words, "--set", "parity.tolerance=0.001")
    assert result.exit_code == EXIT_PARITY_FAILED, result.output
    finding = report(result)["checks"][0]["findings"][0]
    again = shlex.split(finding["reproduce"])
    assert again[:2] == ["trtspec", "parity"]
    assert ["--url", server.grpc, "--target", target] == again[again.index("--url") :][:4]
    repeated = parity(*again[2:], "--json")
    assert repeated.exit_code == EXIT_PARITY_FAILED, repeated.output
    assert finding in report(repeated)["checks"][0]["findings"]


def test_a_server_that_was_started_here_tells_its_spec(server: SimpleNamespace, built: Path) -> None:
    port = server.grpc.rpartition(":")[2]
    result = parity("--url", f"localhost:{port}", "--prompts", str(built), *NARROW, "--json")
    assert result.exit_code == EXIT_OK, result.output
    found = report(result)
    assert (found["name"], found["settings"]["method"]) == ("tiny", "draft_target")
    assert found["settings"]["spec"].endswith("tiny.yaml") and found["checks"][0]["verdict"] == "pass"


def test_without_a_record_of_the_build_one_line_says_what_to_give(server: SimpleNamespace) -> None:
    result = parity("--url", server.grpc)
    assert result.exit_code == EXIT_ERROR
    assert "does not say what was built; give its spec, CONFIG, or its target model, --target MODEL" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_pytest_checks_a_server_by_its_address_alone(
    pair: SimpleNamespace,
    server: SimpleNamespace,
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    def run_pytest(*words: str) -> tuple[int, str]:
        code = pytest.main(["-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-rA", *words])
        return int(code), capsys.readouterr().out

    settings = ("parity.num_prompts=2", "parity.max_tokens=12", f"parity.prompts={built}")
    narrow = ["--trtspec-url", server.grpc, "-k", "greedy", *(f"--trtspec-set={setting}" for setting in settings)]
    code, output = run_pytest(*narrow)
    assert code == 0, output
    assert "server::greedy" in output and "1 passed" in output

    other = str(pair.root / "draft-model")
    code, output = run_pytest(*narrow, "--trtspec-target", other)
    assert code == 1, output
    assert f"--url {server.grpc} --target {other} --set parity.num_prompts=2" in output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), EXIT_USAGE, "give CONFIG, or where a server is: --url HOST:PORT"),
        (("--target", "MODEL"), EXIT_USAGE, "give CONFIG, or where a server is: --url HOST:PORT"),
        (("tiny.yaml", "--target", "MODEL"), EXIT_USAGE, "CONFIG names the target itself"),
        (("--url", "URL", "--subject", "engines"), EXIT_USAGE, "--subject engines needs CONFIG"),
        (("--url", "URL", "--target", "MODEL", "--if-changed"), EXIT_USAGE, "--if-changed"),
        (("--url", "URL"), EXIT_ERROR, "no server that trtspec serve started on this machine"),
        (("--url", "URL", "--target", "MODEL"), EXIT_ERROR, "no server at URL"),
        (("--url", "URL", "--target", "./nowhere"), EXIT_ERROR, "no such model directory"),
        (("--url", "URL", "--target", "MODEL", "--set", "target.quantization=fp8"), EXIT_ERROR, "a quantised target"),
        (("--url", "URL", "--target", "MODEL", "--set", "parity.nonsense=1"), EXIT_ERROR, "--set parity.nonsense"),
        (("--url", "URL", "--target", "MODEL", "--set", "nonsense"), EXIT_USAGE, "malformed override"),
    ],
)
def test_what_cannot_be_checked_is_said_in_one_line(
    pair: SimpleNamespace,
    free_ports: Callable[[], dict[str, int]],
    words: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    url = f"127.0.0.1:{free_ports()['grpc_port']}"
    given = {"URL": url, "MODEL": str(pair.root / "target-model")}
    result = parity(*(given.get(word, word) for word in words))
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert message.replace("at URL", f"at {url}") in result.stderr.splitlines()[-1]
