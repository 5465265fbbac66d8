"""`trtspec parity --subject server` on a real server whose BLS model is broken on purpose (see broken_bls.py)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.errors import EXIT_OK, EXIT_PARITY_FAILED
from trtspec.triton.server import LocalServer

BROKEN = Path(__file__).with_name("broken_bls.py")
PROMPTS = ("the target verifies", "one token after the other", "what the draft")
INSTALL = """
from pathlib import Path as _Path
from . import broken_bls
broken_bls.install(globals(), _Path({switch!r}))
"""


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
    save_model: Callable[..., Path],
    free_ports: Callable[[], dict[str, int]],
) -> Iterator[SimpleNamespace]:
    """A built spec, the `url` of a server of its repository, and the `switch` that breaks it."""
    root = tmp_path_factory.mktemp("broken")
    save_model(root / "target")
    save_model(root / "draft", blend=(1, 0.05))
    (root / "prompts.jsonl").write_text("".join(f"{json.dumps({'prompt': prompt})}\n" for prompt in PROMPTS))
    content = {
        "version": 1,
        "target": {"model": "./target", "dtype": "float32"},
        "speculation": {
            "method": "draft_target",
            "num_draft_tokens": 3,
            "draft": {"model": "./draft", "dtype": "float32"},
        },
        "engine": {"max_batch_size": 8, "max_input_len": 128, "max_seq_len": 256},
        "serving": {"num_threads": 1},
        "parity": {"prompts": "prompts.jsonl", "num_prompts": 3, "max_tokens": 24},
        "output": {"engines": "engines", "model_repo": "built"},
    }
    config = root / "tiny.yaml"
    config.write_text(yaml.safe_dump(content))
    built = invoke("build", str(config))
    assert built.exit_code == EXIT_OK, built.output

    switch = root / "switch"
    switch.write_text("")
    repository = Path(shutil.copytree(root / "built", root / "repository"))
    for model in ("tensorrt_llm_bls", "tensorrt_llm_bls_unary"):
        version = repository / model / "1"
        shutil.copy(BROKEN, version)
        with (version / "model.py").open("a") as file:
            file.write(INSTALL.format(switch=str(switch)))
    ports = free_ports()
    with LocalServer(
        repository,
        engines_root=root / "engines",
        num_threads=1,
        startup_timeout_s=280.0,
        state_dir=root / "state",
        **ports,
    ):
        yield SimpleNamespace(config=config, url=f"127.0.0.1:{ports['grpc_port']}", switch=switch)


def parity(served: SimpleNamespace, *checks: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of the checks of the server."""
    words = [word for check in checks for word in ("--check", check)]
    result = invoke("parity", str(served.config), "--subject", "server", "--url", served.url, "--json", *words)
    assert result.exit_code in (EXIT_OK, EXIT_PARITY_FAILED), result.output
    return result.exit_code, json.loads(result.stdout.splitlines()[-1])


def test_the_right_server_passes(served: SimpleNamespace) -> None:
    code, report = parity(served, "invariances", "rules")
    assert code == EXIT_OK, report
    assert {part["verdict"] for check in report["checks"] for part in check["parts"]} == {"pass"}, report["checks"]


@pytest.mark.parametrize(
    ("breakage", "part", "words"),
    [
        ("deaf to ends inside a block", "rules:end-ids", "is part of the output"),
        ("leaks the stop word", "rules:stop-words", "is part of the text"),
        ("one token too many", "rules:max-tokens", "tokens where max_tokens is"),
        ("forgets min_tokens", "rules:min-tokens", "min_tokens is"),
        ("bans the first token of a bad word", "rules:bad-words", "another token"),
        ("forgets the frequency penalty", "rules:penalties", "regret"),
        ("splits characters", "rules:utf-8", "text differs from its token ids"),
        ("counts the prompt as output", "rules:token-counts", "tokens of output"),
        ("counts rejected drafts as accepted", "rules:acceptance", "passes"),
        ("one seed for all", "invariances:other-seed", "the seed is ignored"),
        ("cache off by one", "invariances:speculation", "with drafts"),
    ],
)
def test_a_broken_server_is_found_by_name(served: SimpleNamespace, breakage: str, part: str, words: str) -> None:
    served.switch.write_text(breakage)
    try:
        code, report = parity(served, part)
    finally:
        served.switch.write_text("")
    assert code == EXIT_PARITY_FAILED, report
    (check,) = report["checks"]
    assert [(f"{check['name']}:{it['name']}", it["verdict"]) for it in check["parts"]] == [(part, "fault")]
    assert any(words in finding["problem"] for finding in check["findings"]), check["findings"]
    assert f"--check {part}" in check["findings"][0]["reproduce"]
