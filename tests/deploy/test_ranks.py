"""Starting ranks on other pods: the key, what is run, and what mpirun is told."""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
from multiprocessing import AuthenticationError
from pathlib import Path

import pytest

from trtspec.deploy import ranks

KEY = "a key of this test"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> int:
    """Port of a worker that runs in this process."""
    monkeypatch.setenv(ranks.KEY, KEY)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    threading.Thread(target=ranks.work, args=(port,), daemon=True).start()
    monkeypatch.setattr(ranks, "_RETRY_S", 0.05)
    monkeypatch.setattr(ranks, "ask", functools.partial(ranks.ask, port=port))
    ranks._wait_for("127.0.0.1", ranks.time.monotonic() + 20)
    return port


def test_a_command_runs_there_and_its_code_comes_back(worker: int, tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert ranks.main(["agent", "127.0.0.1", f"echo 'from mpirun' > {made}; exit 3"]) == 3
    assert made.read_text() == "from mpirun\n"


def test_another_key_runs_nothing(
    worker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as context:
        # The worker reads its key once, when it starts.
        context.setenv(ranks.KEY, "another")
        assert ranks.main(["agent", "127.0.0.1", f"touch {tmp_path / 'made'}"]) == 1
        assert "does not answer" in capsys.readouterr().err
        with pytest.raises(AuthenticationError):
            ranks.ask("127.0.0.1", "true")
    assert not (tmp_path / "made").exists()
    assert ranks.ask("127.0.0.1", "true") == 0, "and it goes on listening"


def test_workers_are_named_after_their_leader() -> None:
    group = {"LWS_LEADER_ADDRESS": "llama-1.llama.team", "LWS_GROUP_SIZE": "3"}
    assert ranks.workers(group) == ["llama-1-1.llama.team", "llama-1-2.llama.team"]


def test_the_leader_waits_and_becomes_its_command(worker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: became.append(arguments))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    monkeypatch.setattr(ranks, "HOST_FILE", tmp_path / "hosts")
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "llama-0.llama.team")
    monkeypatch.setenv("LWS_GROUP_SIZE", "2")
    ranks.main(["lead", "--slots", "9,8", "--", "python3", "launch.py", "--ranks", "17"])
    [(program, words, environment)] = became
    assert program == "python3" and words == ["python3", "launch.py", "--ranks", "17"]
    assert (tmp_path / "hosts").read_text() == "127.0.0.1 slots=9\n127.0.0.1 slots=8\n"
    assert environment["OMPI_MCA_orte_default_hostfile"] == str(tmp_path / "hosts")
    assert environment["OMPI_MCA_plm_rsh_agent"].split() == [sys.executable, ranks.__file__, "agent"]


def test_a_worker_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ranks.KEY, KEY)
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "llama-0.invalid")
    monkeypatch.setenv("LWS_GROUP_SIZE", "2")
    monkeypatch.setattr(ranks, "_RETRY_S", 0.01)
    with pytest.raises(SystemExit, match=r"llama-0-1\.invalid does not answer"):
        ranks.main(["lead", "--slots", "1,1", "--timeout", "0.1", "--", "true"])


def test_without_a_key_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ranks.KEY, raising=False)
    with pytest.raises(SystemExit, match="TRTSPEC_RANKS_KEY is not set"):
        ranks.main(["work"])
