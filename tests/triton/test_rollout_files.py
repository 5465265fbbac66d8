"""What a change of versions does to files, cut off anywhere; what is refused before anything is done; and when an old
process counts as having answered."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from trtspec.cli import main
from trtspec.cli.rollback import rollback
from trtspec.cli.rollout import rollout
from trtspec.errors import TrtspecError
from trtspec.rollout import candidate, live, move, roll
from trtspec.rollout.live import LiveServer, NotDrained
from trtspec.rollout.move import Mover, Watch
from trtspec.rollout.stage import PIPELINES, ServedRepository, read_config
from trtspec.rollout.store import Move, Store, Version, identity, remove
from trtspec.triton.check import check_repository
from trtspec.triton.client import server_error
from trtspec.triton.server_state import ServerState, build_stamp

NO_WATCH = Watch((), 0, 1.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, save_model: Callable[..., Path]) -> Path:
    """A built spec with a draft, and version 2 of it, which has none and another target, kept beside it."""
    root = tmp_path_factory.mktemp("versions")
    for name, seed in (("target", 0), ("other", 5), ("draft", 2)):
        save_model(root / name, seed=seed)
    content = {
        "version": 1,
        "target": {"model": "./target", "dtype": "float32"},
        "speculation": {"method": "draft_target", "draft": {"model": "./draft", "dtype": "float32"}},
        "engine": {"max_batch_size": 2, "max_input_len": 128, "max_seq_len": 256},
        "output": {"engines": "engines", "model_repo": "repo"},
    }
    path = root / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    assert CliRunner().invoke(main, ["build", str(path)]).exit_code == 0
    store = Store(root / "engines", root / "repo")
    store.keep_served()
    number = store.candidate()
    to = {"output.engines": store.engines_of(number), "output.model_repo": store.repository_of(number)}
    to |= {"target.model": "./other", "speculation": "{method: ngram}"}
    words = [word for key, value in to.items() for word in ("--set", f"{key}={value}")]
    built = CliRunner().invoke(main, ["build", str(path), *words])
    assert built.exit_code == 0, built.output
    store.add(store.version_of(number))
    return path


@pytest.fixture
def store(config: Path) -> Store:
    """With version 1 in service."""
    made = Store(config.parent / "engines", config.parent / "repo")
    if made.record.move or made.record.served != (1,):
        mover(made).move(1, (1,))
    return made


def mover(store: Store) -> Mover:
    return Mover(store, ServedRepository(store.repository, "/engines"), None, NO_WATCH, lambda line: None)


def contents(store: Store) -> dict[str, bytes]:
    """Files that a server and the next build read."""
    files = [*store.repository.rglob("*"), *store.engines.glob("[!.]*/**/*")]
    return {str(path): path.read_bytes() for path in files if path.is_file()}


def below(root: Path) -> dict[Path, bytes]:
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_change_that_is_cut_off_anywhere_is_gone_on_with(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    mover(store).move(2, (1, 2))
    wanted = contents(store)
    assert identity(store.engines) == identity(store.engines_of(2)) and store.record.served == (1, 2)
    assert str(store.engines_of(2)) not in (store.engines / "manifest.json").read_text()
    assert not (store.repository / "tensorrt_llm_draft").exists(), "a model that version 2 does not have"
    mover(store).move(1, (1,))
    assert contents(store) != wanted and identity(store.engines) == identity(store.engines_of(1))

    real = os.rename
    for cut in count():
        steps = iter(range(cut))

        def rename(source: Path, place: Path, steps: Iterator[int] = steps) -> None:
            if next(steps, None) is None:
                raise KeyboardInterrupt
            real(source, place)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            try:
                mover(store).move(2, (1, 2))
                break
            except KeyboardInterrupt:
                pass
        again = Store(store.engines, store.repository)
        assert again.record.move == Move(1, 2, replacing=True) and again.record.served == (1,)
        mover(again).move(2, (1, 2))
        assert contents(store) == wanted and again.record.move is None
        mover(again).move(1, (1,))
        store.record = again.record
    assert cut > 10


def test_a_staged_version_has_names_of_its_own(store: Store) -> None:
    """Pipelines of version 1 from where it is staged: all that they call has its names, and its engines."""
    repository, kept = ServedRepository(store.repository, "/engines"), store.repository_of(1)
    names = repository.stage(kept, 1, ".versions/1/engines")
    parts = {"tensorrt_llm_v1", "tensorrt_llm_draft_v1", "preprocessing_v1", "postprocessing_v1"}
    assert set(names) == set(repository.staged()) == parts
    config = read_config(store.repository / "tensorrt_llm_draft_v1")
    assert config.name == "tensorrt_llm_draft_v1"
    assert config.parameters["gpt_model_path"].string_value == "/engines/.versions/1/engines/draft"
    for pipeline in PIPELINES:
        repository.point_to_stage(pipeline, kept, 1)
        config = read_config(store.repository / pipeline)
        called = {step.model_name for step in config.ensemble_scheduling.step}
        called |= {value.string_value for key, value in config.parameters.items() if key.endswith("_model_name")}
        assert called and called <= parts
        assert list(config.version_policy.specific.versions) == [2]
        assert (store.repository / pipeline / "2").is_dir()
    check_repository(store.repository)  # a server can be started on it
    repository.tidy(kept)
    assert below(store.repository) == below(kept)


def test_no_load_takes_a_version_directory_that_its_config_does_not_mean(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off between directory and config, whoever loads the pipeline gets the version that served."""
    repository = ServedRepository(store.repository, "/engines")
    pipeline = PIPELINES[0]
    real = os.replace

    def cut_off(source: Path, place: Path) -> None:
        if (store.repository / pipeline / "3").exists():
            raise KeyboardInterrupt
        real(source, place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", cut_off)
        with pytest.raises(KeyboardInterrupt):
            repository.point_to_stage(pipeline, store.repository_of(2), 2)
    config = read_config(store.repository / pipeline)
    assert list(config.version_policy.specific.versions) == [1]
    assert config.parameters["method"].string_value == "draft_target"
    repository.tidy(store.repository_of(1))


class ServerDouble:
    """Loads and unloads all that it is asked, and answers once its queue has room.

    Args:
        refusals: requests that find the queue full.
    """

    def __init__(self, refusals: int = 0) -> None:
        self.loaded: list[list[str]] = []
        self.unloaded: list[list[str]] = []
        self._full = iter(range(refusals))

    def load(self, models: Sequence[str]) -> None:
        self.loaded.append(list(models))

    def unload(self, models: Sequence[str]) -> None:
        self.unloaded.append(list(models))

    def wait_gone(self, models: Sequence[str]) -> None:
        assert list(models) == self.unloaded[-1]

    def wait_answered(self, pipelines: Sequence[str], engines: Sequence[str]) -> bool:
        return True

    def complete(self, prompt: str, **settings: object) -> SimpleNamespace:
        if next(self._full, None) is not None:
            raise server_error("too many requests: 8 texts are waiting; expected fewer than 8", "here")
        return SimpleNamespace(stats=SimpleNamespace(tokens=4, target_passes=2))


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move, "time", SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: 0.0))


def moved_by(store: Store, server: ServerDouble, said: list[str]) -> Mover:
    watch = Watch(("Hello",), 3, 1.0)
    return Mover(store, ServedRepository(store.repository, "/engines"), server, watch, said.append)  # type: ignore[arg-type]


def test_models_are_unloaded_in_the_steps_of_a_request(store: Store, timeless: None) -> None:
    """Whichever step of the ensemble a request has reached, the next one is there. And a full queue is no fault."""
    server, said = ServerDouble(refusals=5), list[str]()
    moved_by(store, server, said).move(2, (1, 2))
    assert server.unloaded == [
        *(["preprocessing"], ["tensorrt_llm_draft", "tensorrt_llm"], ["postprocessing"]),
        *(["preprocessing_v2"], ["tensorrt_llm_v2"], ["postprocessing_v2"]),
    ]
    assert "version 2 has answered 3 requests, 2.00 tokens a target pass" in said
    assert store.record.served == (1, 2) and below(store.repository) == below(store.repository_of(2))


def test_a_queue_that_stays_full_takes_the_version_back(
    store: Store, timeless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = count()
    monkeypatch.setattr(move.time, "monotonic", lambda: next(seconds))
    before = contents(store)
    with pytest.raises(TrtspecError, match="8 texts are waiting"):
        moved_by(store, ServerDouble(refusals=1000), []).move(2, (1, 2))
    assert contents(store) == before and store.record.move is None


def test_a_full_disk_takes_the_version_back(store: Store, timeless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    server, said, before = ServerDouble(), list[str](), contents(store)
    real = shutil.copytree

    def copy(source: Path, place: Path, *settings: Any, **further: Any) -> object:
        if Path(place).name == "postprocessing_v2":  # the engine's model is staged by then
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
        return real(source, place, *settings, **further)

    monkeypatch.setattr(shutil, "copytree", copy)
    with pytest.raises(OSError, match="No space left"):
        moved_by(store, server, said).move(2, (1, 2))
    assert any("version 2 is taken back" in line for line in said)
    assert contents(store) == before and (store.record.served, store.record.move) == ((1,), None)
    assert server.loaded == [] and server.unloaded == [["tensorrt_llm_v2"]], "pipelines have no need to be loaded"


def test_a_build_over_a_change_that_was_cut_off_is_not_taken_for_the_version_before(config: Path, store: Store) -> None:
    wanted = contents(store)
    store.save(replace(store.record, move=Move(1, 2)))
    store.install_engines(2)
    assert contents(store) != wanted
    result = CliRunner().invoke(rollback, [str(config)])
    assert result.exit_code == 0, result.exception
    assert contents(store) == wanted
    record = Store(store.engines, store.repository).record
    assert (record.served, record.move) == ((1,), None)


def test_a_build_in_place_is_not_taken_for_the_candidate_that_did_not_pass(store: Store) -> None:
    """Version 1 is served, a candidate is left over, and then something else is built where version 1 was."""
    record = store.record
    try:
        failed = store.candidate()
        (store.engines_of(failed) / "target" / "config.json").unlink()
        store.install_engines(2)
        kept = store.keep_served()
        assert kept.number == failed and kept.identity == identity(store.engines_of(2))
        assert below(store.engines_of(failed) / "target") == below(store.engines_of(2) / "target")
        assert store.record.served == (1, failed)
    finally:
        remove(store.place(failed))
        store.save(record)
        mover(store).move(1, (1,))


def test_prune_leaves_what_is_served_and_the_one_before(store: Store) -> None:
    record = store.record
    try:
        store.save(replace(record, served=(1, 2)))
        store.add(Version(7, "", ""))
        store.place(7).mkdir()
        candidate = store.candidate()
        assert store.prune() == [7, candidate]
        assert not store.place(7).exists() and not store.place(candidate).exists()
        assert list(store.record.versions) == [1, 2]
    finally:
        store.save(record)


def refusal(command: object, config: Path, *options: str) -> str:
    result = CliRunner().invoke(command, [str(config), *options])  # type: ignore[arg-type]
    assert isinstance(result.exception, TrtspecError), result.output
    return str(result.exception)


def test_nothing_is_done_where_it_would_not_end_well(
    config: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (store.engines / "rollout.json").read_bytes()
    server = ServerState(
        1, "t", "127.0.0.1", 1, 2, 3, str(store.repository), str(store.engines), "an earlier build", ""
    )
    monkeypatch.setattr(roll, "running", lambda state_dir: server)
    assert "serves another build than lies here" in refusal(rollout, config)
    fresh = replace(server, build=build_stamp(store.repository, store.engines))
    monkeypatch.setattr(roll, "running", lambda state_dir: fresh)
    monkeypatch.setattr(candidate, "_free_memory", lambda: 1)
    assert "beside the one that serves, 0.00 are free" in refusal(rollout, config)
    in_container = replace(server, project="trtspec-tiny")
    monkeypatch.setattr(roll, "running", lambda state_dir: in_container)
    for command in (rollout, rollback):
        message = refusal(command, config)
        assert "container on GPUs" in message and "new Deployment" in message
    monkeypatch.setattr(roll, "running", lambda state_dir: None)
    assert "no server of this configuration is running" in refusal(rollout, config)
    assert (store.engines / "rollout.json").read_bytes() == before


def test_a_record_that_is_no_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "rollout.json").write_text("{")
    with pytest.raises(TrtspecError, match=r"rollout\.json: cannot be read as a record of versions"):
        Store(tmp_path, tmp_path / "repo")


@pytest.mark.parametrize(
    ("alive_until", "busy_until", "ended"),
    [(20.0, 1000.0, True), (1000.0, 20.0, False), (1000.0, 1000.0, None)],
    ids=["it ends", "it stays and its engines are idle", "it stays and its engines compute"],
)
def test_when_an_old_process_has_answered(
    monkeypatch: pytest.MonkeyPatch, alive_until: float, busy_until: float, ended: bool | None
) -> None:
    """Process 10 is the old one of the pipeline, 11 the new one, 5 the engine that the old one calls."""
    clock = SimpleNamespace(now=0.0)
    sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)  # noqa: E731
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    monkeypatch.setattr(live, "_start", lambda pid: pid)
    monkeypatch.setattr(live, "cpu_seconds", lambda pid: min(clock.now, busy_until) / 2)

    def processes(token: str) -> dict[int, str]:
        lines = {11: "bls_0_0", 5: "engine_0_0"} | ({10: "bls_0_0"} if clock.now < alive_until else {})
        return {pid: f"stub\0{instance}\0" for pid, instance in lines.items()}

    monkeypatch.setattr(live, "family", processes)
    state = ServerState(1, "t", "127.0.0.1", 1, 2, 3, "", "", "", "")
    with LiveServer(state, load_timeout_s=1.0, drain_timeout_s=100.0) as server:
        assert isinstance(server, LiveServer)
        if ended is None:
            with pytest.raises(NotDrained, match="still running after 100 s"):
                server.wait_answered(["bls"], ["engine"])
            return
        assert server.wait_answered(["bls"], ["engine"]) is ended
    assert 20.0 <= clock.now < 27.0
