"""Rolling a new build into a running server and back, as a user does it, while clients stream.

The two versions have targets of other weights, so that every greedy answer tells which version gave it; a mix of the
two would be an answer of neither.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trtspec.build.graph import Observer
from trtspec.cli import main
from trtspec.cli.rollback import rollback
from trtspec.cli.rollout import rollout
from trtspec.errors import EXIT_PARITY_FAILED, TrtspecError
from trtspec.parity.result import Report
from trtspec.rollout import roll as roll_module
from trtspec.rollout.candidate import GateClosed, build, gate
from trtspec.rollout.live import LiveServer
from trtspec.rollout.stage import PIPELINES
from trtspec.runtime.engine import WEIGHTS
from trtspec.spec.schema import Spec
from trtspec.triton.client import STREAMING_MODEL, UNARY_MODEL, Client
from trtspec.triton.server_state import ServerState, running, stop

PROMPTS = tuple(f"the target verifies {number}" for number in range(4))
MAX_TOKENS = 8
LONG_ANSWER = 600  # tokens: more than a version takes to be unloaded by one that does not wait
_PAUSE_S = 0.4  # of each client: what is to be seen takes the processor too
WATCH = ("--watch", "2")
GATE = ("--check", "greedy", *WATCH)
SPEC = """\
version: 1
target: {{model: ./{target}, dtype: float32}}
speculation: {{method: ngram, num_draft_tokens: 3}}
engine: {{max_batch_size: 4, max_input_len: 128, max_seq_len: 2048}}
serving: {{{ports}, num_threads: 1}}
parity: {{prompts: prompts.jsonl, num_prompts: 2, max_tokens: 8}}
output: {{engines: engines, model_repo: repo}}
"""


@dataclass
class Deployment:
    """A spec and its running server."""

    config: Path
    ports: str
    answers: dict[tuple[str, str], str] = field(default_factory=dict)  # prompt and text -> version

    def write(self, target: str) -> None:
        self.config.write_text(SPEC.format(target=target, ports=self.ports), encoding="utf-8")

    @property
    def root(self) -> Path:
        return self.config.parent

    @property
    def state(self) -> ServerState:
        state = running(self.root / "engines" / ".server")
        assert state is not None
        return state

    @property
    def record(self) -> dict:
        return json.loads((self.root / "engines" / "rollout.json").read_text())

    def know(self, version: str) -> None:
        """What the version that serves answers."""
        with Client(self.state.grpc_url) as client:
            texts = {prompt: client.complete(prompt, max_tokens=MAX_TOKENS, end_id=-1).text for prompt in PROMPTS}
        assert not texts.items() & self.answers.keys(), "versions that answer alike"
        self.answers |= dict.fromkeys(texts.items(), version)

    def serves(self) -> str:
        with Client(self.state.grpc_url) as client:
            text = client.complete(PROMPTS[1], max_tokens=MAX_TOKENS, end_id=-1, stream=False).text
        return self.answers.get((PROMPTS[1], text), text)

    def as_built(self) -> dict[str, bytes]:
        """What a build leaves in the served repository and beside the served engines, manifest apart."""
        files = [*(self.root / "repo").rglob("*"), *(self.root / "engines").glob("[!.]*/**/*")]
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in files if path.is_file()}


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory,
    save_model: Callable[..., Path],
    free_ports: Callable[[], dict[str, int]],
) -> Iterator[Deployment]:
    root = tmp_path_factory.mktemp("rollout")
    for name, seed in (("one", 0), ("two", 5)):
        save_model(root / name, seed=seed, max_position_embeddings=2048)
    (root / "prompts.jsonl").write_text("".join(f"{json.dumps({'prompt': prompt})}\n" for prompt in PROMPTS))
    made = Deployment(root / "tiny.yaml", ", ".join(f"{name}: {port}" for name, port in free_ports().items()))
    made.write("one")
    assert trtspec("build", made.config).exit_code == 0
    serve = [sys.executable, "-m", "trtspec", "serve", str(made.config), "--detach"]
    try:
        subprocess.run(serve, check=True, capture_output=True, timeout=120)
        made.know("one")
        yield made
    finally:
        stop(root / "engines" / ".server")


def trtspec(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def roll(deployment: Deployment, *options: str) -> Result:
    return CliRunner().invoke(rollout, [str(deployment.config), *GATE, *options])


def back(deployment: Deployment) -> Result:
    return CliRunner().invoke(rollback, [str(deployment.config), *WATCH])


def back_killed_at(deployment: Deployment, words: str) -> None:
    """A rollback in a process of its own that is killed when it says something."""
    run = "from trtspec.cli.rollback import rollback; rollback()"
    command = [sys.executable, "-uc", run, str(deployment.config), *WATCH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = next((line for line in process.stdout if words in line), None)
        process.kill()
    assert said, f"it ended before it said {words!r}"


@contextmanager
def crowd(deployment: Deployment, begin: threading.Event | None = None) -> Iterator[Counter[str]]:
    """Clients that ask again and again; counts the answers of each version, and every other outcome as it is.

    They wait for `begin`: what comes before it has the machine for itself.
    """
    outcomes: Counter[str] = Counter()
    ended = threading.Event()
    answers: list[tuple[str, str]] = []

    def client(number: int, model: str) -> None:
        streams = model == STREAMING_MODEL
        if begin:
            begin.wait()
        with Client(deployment.state.grpc_url) as connection:
            for turn in range(number, 1_000_000):
                if ended.wait(_PAUSE_S):
                    return
                prompt = PROMPTS[turn % len(PROMPTS)]
                try:
                    text = connection.complete(
                        prompt, max_tokens=MAX_TOKENS, end_id=-1, stream=streams, model=model
                    ).text
                    answers.append((prompt, text))
                except TrtspecError as error:
                    outcomes[str(error)] += 1

    models = (STREAMING_MODEL, UNARY_MODEL, "ensemble")
    clients = [threading.Thread(target=client, args=each) for each in enumerate(models)]
    for each in clients:
        each.start()
    try:
        yield outcomes
    finally:
        ended.set()
        if begin:
            begin.set()
        for each in clients:
            each.join()
        if "two" not in deployment.answers.values() and deployment.serves() != "one":
            deployment.know("two")
        outcomes.update(deployment.answers.get(answer, answer[1]) for answer in answers)


class StreamOverTheSwitch:
    """A long stream that has begun when the pipelines are first loaded again.

    Attributes:
        text: what has come; an error as it is.
        tokens: of the answer, once it has ended.
    """

    def __init__(self, deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
        self.text, self.tokens = "", 0
        self._url = deployment.state.grpc_url
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read)
        load = LiveServer.load

        def load_meanwhile(server: LiveServer, models: Sequence[str]) -> None:
            if tuple(models) == PIPELINES and not self._begun.is_set():
                self._thread.start()
                assert self._begun.wait(60)
            load(server, models)

        monkeypatch.setattr(LiveServer, "load", load_meanwhile)

    def _read(self) -> None:
        try:
            with Client(self._url) as client:
                for chunk in client.generate(PROMPTS[0], max_tokens=LONG_ANSWER, end_id=-1, num_draft_tokens=1):
                    self.text += chunk.text
                    self._begun.set()
                    self.tokens = chunk.stats.tokens if chunk.stats else 0
        except TrtspecError as error:
            self.text += str(error)

    def join(self) -> None:
        self._thread.join()


def test_a_fault_found_by_parity_switches_nothing(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Path("target", WEIGHTS)

    def build_wrongly(spec: Spec, observer: Observer) -> None:
        build(spec, observer)
        (spec.engines_dir / weights).unlink()  # the engine of version 1 in its place
        shutil.copy(deployment.root / "engines" / weights, spec.engines_dir / weights)

    monkeypatch.setattr(roll_module, "build", build_wrongly)
    before = deployment.as_built()
    deployment.write("two")
    result = roll(deployment)
    assert isinstance(result.exception, GateClosed), result.output
    assert result.exception.exit_code == EXIT_PARITY_FAILED
    assert "is not served: parity of tiny: fault" in str(result.exception)
    assert deployment.serves() == "one" and deployment.as_built() == before
    assert [version["number"] for version in deployment.record["versions"]] == [1]
    assert not running(deployment.root / "engines" / ".versions" / "2" / ".server")


def test_a_version_that_does_not_load_is_taken_back(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(spec: Spec, place: Path, *_: object) -> Report:
        config = place / "repository" / "tensorrt_llm" / "config.pbtxt"
        config.write_text(config.read_text().replace('"tensorrtllm"', '"nobody"'))
        return Report("tiny", (), {})

    monkeypatch.setattr(roll_module, "gate", damage)
    before = deployment.as_built()
    deployment.write("two")
    with crowd(deployment) as outcomes:
        result = roll(deployment)
    assert isinstance(result.exception, TrtspecError), result.output
    assert "'tensorrt_llm_v2'" in str(result.exception) and "version 2 is taken back" in result.output
    assert outcomes.keys() == {"one"}, outcomes
    assert deployment.as_built() == before
    assert (deployment.record["served"], deployment.record["move"]) == ([1], None)


def test_switch_and_way_back_under_load(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that is killed where the old version is gone and the new one not in its place goes on serving."""
    judged = threading.Event()

    def judge(*arguments: Any) -> Report:
        report = gate(*arguments)
        judged.set()
        return report

    monkeypatch.setattr(roll_module, "gate", judge)
    before = deployment.as_built()
    deployment.write("two")
    stream = StreamOverTheSwitch(deployment, monkeypatch)
    with crowd(deployment, begin=judged) as outcomes:
        result = roll(deployment)
    assert result.exit_code == 0, (result.output, result.exception)
    assert outcomes.keys() == {"one", "two"}, outcomes
    stream.join()
    assert stream.tokens == LONG_ANSWER, stream.text[-300:]
    assert any(
        stream.text.startswith(text.rstrip("\ufffd"))
        for (prompt, text), version in deployment.answers.items()
        if prompt == PROMPTS[0] and version == "one"
    )
    assert deployment.serves() == "two" and deployment.record["versions"][-1]["parity"] == "pass"
    kept = deployment.root / "engines" / ".versions" / str(deployment.record["served"][-1])
    served = {name: content for name, content in deployment.as_built().items() if name.startswith("repo/")}
    assert served == {
        f"repo/{path.relative_to(kept / 'repository').as_posix()}": path.read_bytes()
        for path in (kept / "repository").rglob("*")
        if path.is_file()
    }
    built = trtspec("build", deployment.config).output
    assert "engine:target: cached" in built and "repository: cached" in built, built
    assert not deployment.state.outdated

    with crowd(deployment) as outcomes:
        back_killed_at(deployment, "is unloaded")
        status = roll(deployment, "--status").output
        result = back(deployment)
    assert "was cut off" in status and "rollback" in status
    assert result.exit_code == 0, (result.output, result.exception)
    assert outcomes.keys() == {"one", "two"}, outcomes
    assert deployment.serves() == "one" and deployment.as_built() == before
    assert (deployment.record["served"], deployment.record["move"]) == ([1], None)
    assert "no version before" in str(back(deployment).exception)
