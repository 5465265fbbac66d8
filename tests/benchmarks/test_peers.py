"""The comparison with other projects, with small stand-ins for them: who fails is left out, and nothing else is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from trtspec.models.source import open_model, tokenizer_sha256

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
END = 2
# Says 5 6 7 .. and the end; {fail} is what it does before it is ready, {answer} before each answer.
STAND_IN = """
import json, sys
{fail}
print(json.dumps({{"ready": True}}), flush=True)
for number, line in enumerate(sys.stdin):
    {answer}
    ids = list(range(5, 4 + json.loads(line)["max_tokens"])) + [2]
    print(json.dumps({{"ids": ids, "num_tokens": len(ids) - 1, "seconds": 0.5}}), flush=True)
"""


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    """The script, imported as if it had been started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import peers

        return peers


@pytest.fixture
def stand_in(peers: ModuleType, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a worker of that name."""
    started = []

    def start(name: str, fail: str = "", answer: str = "pass") -> Any:
        command = [sys.executable, "-c", STAND_IN.format(fail=fail, answer=answer)]
        started.append(peers.Worker(name, command, [END], tmp_path / f"{name}.log", {}))
        return started[-1]

    yield start
    for worker in started:
        worker.__exit__(None, None, None)


def case(peers: ModuleType, number: int) -> tuple[Any, Sequence[int]]:
    return peers.Prompt(number=number, text="", category="chat"), [1, 2, 3]


def test_a_worker_answers(stand_in: Callable[..., Any]) -> None:
    worker = stand_in("a plain")
    worker.wait()
    answer = worker.answer([1], 4)
    assert (answer.ids, answer.num_tokens, answer.seconds) == ((5, 6, 7), 3, 0.5)


def test_who_fails_later_is_left_out(
    peers: ModuleType, stand_in: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    contenders = [
        stand_in("a plain"),
        stand_in("a draft model", answer="if number == 2: raise ValueError('too many')"),
        stand_in("b plain", answer="if number == 1: sys.exit()"),
        stand_in("b draft model"),
    ]
    for worker in contenders:
        worker.wait()
    answers = peers.answered(contenders, [case(peers, 1), case(peers, 2)], 8)
    assert {name: len(given) for name, given in answers.items()} == {"a plain": 2}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert any(line.startswith("a draft model is left out: ValueError: too many (") for line in lines)
    assert any(line.startswith("b plain is left out: no message (") for line in lines)


def test_who_hangs_is_left_out(
    peers: ModuleType, stand_in: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "START_S", 0.2)
    worker = stand_in("a plain", fail="import time; time.sleep(60)")
    with pytest.raises(peers.PeerError, match=r"a plain is left out: nothing came in 0.2 s"):
        worker.wait()


def test_an_environment_is_made_once_for_its_pins(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(peers.venv, "create", lambda directory, with_pip: directory.mkdir())
    monkeypatch.setattr(peers, "ran", lambda name, command, log: commands.append(list(command[1:])))
    for pin in ("a==1", "a==1", "a==2"):
        monkeypatch.setitem(peers.PROJECTS, "a", peers.Project((pin, "b==3"), ("c",)))
        peers.environment("a", tmp_path)
    installed = [command[1:] for command in commands if command[0] == "install"]
    assert installed == [["a==1", "b==3"], ["a==2", "b==3"]]


def test_an_environment_that_failed_is_made_again(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.venv, "create", lambda directory, with_pip: (directory / "bin").mkdir(parents=True))
    (tmp_path / "a/bin").mkdir(parents=True)
    monkeypatch.setitem(peers.PROJECTS, "a", peers.Project(("a==1",), ()))

    def failing(name: str, command: Sequence[str], log: Path) -> None:
        script = "print('ERROR: no matching distribution'); print('notice'); exit(1)"
        ran(name, [sys.executable, "-c", script], log)

    ran = peers.ran
    monkeypatch.setattr(peers, "ran", failing)
    for _ in range(2):
        with pytest.raises(peers.PeerError, match="ERROR: no matching distribution"):
            peers.environment("a", tmp_path)


@pytest.fixture
def invoke(
    peers: ModuleType,
    stand_in: Callable[..., Any],
    save_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Result]:
    """The command on small random models; its peers are stand-ins, one of which cannot be installed."""
    save_model(tmp_path / "target")
    save_model(tmp_path / "draft", blend=(1, 0.15))
    speculation: dict[str, dict[str, Any]] = {
        "draft_target": {"draft": {"model": "./draft", "dtype": "float32"}, "num_draft_tokens": 3},
        "ngram": {"ngram": {"max_ngram": 2}, "num_draft_tokens": 4},
    }
    for method, section in speculation.items():
        content = {
            "version": 1,
            "name": method,
            "target": {"model": "./target", "dtype": "float32"},
            "speculation": {"method": method, **section},
            "engine": {"max_batch_size": 2, "max_input_len": 128, "max_seq_len": 256},
        }
        (tmp_path / f"{method}.yaml").write_text(yaml.safe_dump(content))
    texts = [f"the target verifies {i}, the target verifies {i}" for i in range(4)]
    prompts = [{"prompt": text, "category": "code" if i % 2 else "chat"} for i, text in enumerate(texts)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    monkeypatch.setattr(peers, "CONFIGS", [tmp_path / f"{method}.yaml" for method in speculation])
    monkeypatch.setattr(peers, "PROMPTS", [tmp_path / "prompts.jsonl"])
    monkeypatch.setattr(peers, "told", [], raising=False)

    def workers(name: str, options: Sequence[Any], work_dir: Path) -> Iterator[Any]:
        if name == "openvino":
            raise peers.PeerError(name, "no matching distribution")
        for one in options:
            peers.told.append(one)
            yield stand_in(f"{name} {one.way}", fail="raise OSError('no')" if one.way == "draft model" else "")

    monkeypatch.setattr(peers, "workers", workers)
    words = ("--prompts", "1", "--max-tokens", "12", "--work-dir", str(tmp_path / "work"))
    return lambda *more: CliRunner().invoke(peers.main, [*words, *more])


def test_the_command(peers: ModuleType, invoke: Callable[..., Result], tmp_path: Path) -> None:
    result = invoke("--json", str(tmp_path / "figures.json"))
    assert result.exit_code == 0, result.output
    assert "openvino is left out: no matching distribution" in result.stdout
    assert "vllm draft model is left out: OSError: no (" in result.stdout
    report = json.loads(result.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "figures.json").read_text())
    ways = ("plain", "prompt lookup", "draft model")
    assert list(report["methods"]) == [*(f"trtspec {way}" for way in ways), "vllm plain", "vllm prompt lookup"]
    peer = report["methods"]["vllm prompt lookup"]
    assert list(peer) == ["all", "chat", "code"]
    assert (peer["all"]["tokens"], peer["all"]["tokens_per_s"], peer["all"]["speed_up"]) == (22, 22.0, 1.0)
    assert {name: same for name, same in report["same_texts"].items() if name.startswith("vllm")} == {
        "vllm plain": 2,
        "vllm prompt lookup": 2,
    }
    ours = report["methods"]["trtspec prompt lookup"]["all"]["tokens_per_s"]
    assert report["ratios"]["trtspec prompt lookup / vllm prompt lookup"] == pytest.approx(ours / 22.0)
    assert [one.num_draft_tokens for one in peers.told] == [0, 4, 3]
    config = json.loads((Path(peers.told[0].model) / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"


def test_an_unknown_peer_is_refused(invoke: Callable[..., Result]) -> None:
    outcome = invoke("--only", "vlm")
    assert outcome.exit_code == 1
    assert "there is no peer vlm" in outcome.stderr


def test_a_draft_of_few_tokens_gets_a_full_head(
    peers: ModuleType, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    target = open_model(str(save_model(tmp_path / "target")))
    parts = ("model.layers.0.", "model.norm.")
    kept = {name: target.tensor(name) for name in target.tensor_names() if name.startswith(parts)}
    (tmp_path / "draft").mkdir()
    save_file(kept | {"d2t": torch.tensor([4, 5, 198], dtype=torch.int32)}, tmp_path / "draft/model.safetensors")
    shares = {"shares": ["embedding", "tokenizer"], "tokenizer_sha256": tokenizer_sha256(target), "draft_vocab_size": 3}
    changes = {"num_hidden_layers": 1, "tie_word_embeddings": False, "trtspec": shares}
    config = json.loads((tmp_path / "target/config.json").read_text()) | changes
    (tmp_path / "draft/config.json").write_text(json.dumps(config))
    draft = open_model(str(tmp_path / "draft"), target=target)
    written = open_model(str(peers.exported(draft, tmp_path)))
    written.check()
    head, ids = written.tensor("lm_head.weight"), [4, 6, 200]
    assert len(head) == written.config.vocab_size
    assert head.any(dim=1).nonzero().flatten().tolist() == ids
    assert torch.equal(head[ids], target.tensor("lm_head.weight")[ids].bfloat16())
