"""Builds on a real Slurm of one node, where Debian's slurm-wlm and munge are installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Project
from slurm_double import OPTIONS

from trtspec.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK


class Cluster:
    """The real Slurm, and `trtspec build` on it as a person runs it."""

    def __init__(self, env: dict[str, str], project: Project) -> None:
        self.env, self.project = {**os.environ, **env}, project
        self.log = project.root / "said"

    def ask(self, *command: str) -> str:
        return subprocess.run(command, env=self.env, check=True, capture_output=True, text=True, timeout=60).stdout

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "trtspec", "build", str(self.project.config), "--executor", "slurm", *options]
        with self.log.open("wb") as said:
            return subprocess.Popen(command, env=self.env, stdout=said, stderr=said)

    def build(self, *options: str) -> int:
        return self.start(*options).wait(timeout=120)

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 60
        while text not in self.said:
            assert process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.1)

    def node(self, *settings: str) -> None:
        name = self.ask("sinfo", "--noheader", "--format=%N", "--partition=main").strip()
        self.ask("scontrol", "update", f"nodename={name}", *settings)


@pytest.fixture
def cluster(real_slurm: dict[str, str], project: Project) -> Cluster:
    return Cluster(real_slurm, project)


def test_build_and_nothing_to_do(cluster: Cluster) -> None:
    assert cluster.build("--partition", "main", "--time", "5") == EXIT_OK, cluster.said
    assert "engine:draft: ok" in cluster.said and "manifest: ok" in cluster.said
    steps = cluster.project.manifest()["steps"]
    assert {name: step["status"] for name, step in steps.items()} == dict.fromkeys(steps, "ok")
    assert cluster.build() == EXIT_OK and "nothing to do" in cluster.said


def test_drained_node_closed_terminal_and_a_failing_job(cluster: Cluster) -> None:
    cluster.node("state=drain", "reason=broken disk")
    try:
        process = cluster.start()
        cluster.wait_for("engine:target: note: job", process)
        assert "broken disk" in cluster.said, cluster.said
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == EXIT_INTERRUPTED
        assert "the same command follows them again" in cluster.said
        config = cluster.project.config.read_text()
        process = cluster.start()
        cluster.wait_for("following jobs", process)
        cluster.project.config.write_text(config.replace("num_draft_tokens: 3", "num_draft_tokens: 2"))
    finally:
        cluster.node("state=resume")
    assert process.wait(60) == EXIT_ERROR
    assert "the spec was changed after its jobs were submitted" in cluster.said, cluster.said
    assert "Traceback" not in cluster.said and not cluster.project.model_repo.exists()
    assert cluster.ask("squeue", "--noheader", "--states=pending,running") == ""


def test_cancelled_build(cluster: Cluster) -> None:
    cluster.node("state=drain", "reason=test")
    try:
        process = cluster.start()
        cluster.wait_for("waits", process)
        watched, cluster.log = cluster.log, cluster.project.root / "cancelled"
        assert cluster.build("--cancel") == EXIT_OK
        assert "cancelled jobs" in cluster.said
        assert process.wait(30) == EXIT_ERROR
        assert "was cancelled" in watched.read_text()
    finally:
        cluster.node("state=resume")
    assert cluster.ask("squeue", "--noheader", "--states=pending,running") == ""
    assert cluster.build() == EXIT_OK, cluster.said


def test_a_run_dealt_out_over_an_array(cluster: Cluster, tmp_path: Path) -> None:
    """Two shards and a merge; the trace is, to the byte, that of one process."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"river {number}"}) + "\n" for number in range(6)))
    words = ["bench", "acceptance", str(cluster.project.config), "--prompts", str(prompts), "--max-tokens", "4"]

    def run(name: str, *options: str) -> bytes:
        trace = tmp_path / name
        command = [sys.executable, "-m", "trtspec", *words, "--trace", str(trace), *options]
        done = subprocess.run(command, env=cluster.env, capture_output=True, text=True, timeout=120)
        assert done.returncode == EXIT_OK, done.stdout + done.stderr
        assert f"trace: {trace}" in done.stdout
        if options:
            assert "shard 2/2: ok" in done.stderr and "merge: ok" in done.stderr
        return trace.read_bytes()

    assert run("jobs", "--executor", "slurm", "--num-shards", "2", "--partition", "main") == run("here")
    assert sorted(path.name for path in (tmp_path / "jobs.shards").glob("*.jsonl")) == ["1-of-2.jsonl", "2-of-2.jsonl"]
    assert ": 6 answers" in (tmp_path / "jobs.shards" / "merge.log").read_text()


def test_gpus_are_set_aside_and_what_no_node_has_is_refused(
    real_slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from trtspec.cluster import slurm
    from trtspec.errors import TrtspecError

    monkeypatch.setenv("SLURM_CONF", real_slurm["SLURM_CONF"])
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\nexit 0\n")
    request = slurm.gpu_request("H100-SXM", 2, "main")
    assert request == "gpu:h100:2"
    number = slurm.submit(script, [f"--gres={request}", f"--output={tmp_path}/log"])
    while (state := slurm.states([str(number)])[str(number)]).is_active:
        time.sleep(0.1)
    assert state.state == "COMPLETED"
    with pytest.raises(TrtspecError, match="has 1 H200 GPU; expected one of gpu:h100:2"):
        slurm.gpu_request("H200", 1, None)
    with pytest.raises(slurm.SlurmError, match="Requested node configuration is not available"):
        slurm.submit(script, ["--gres=gpu:h100:9"])


@pytest.mark.parametrize("program", sorted(OPTIONS))
def test_the_double_knows_no_option_that_the_real_program_does_not(program: str, real_slurm: dict[str, str]) -> None:
    def complaint(option: str) -> str:
        command = [program, f"--{option}", "--version"]
        done = subprocess.run(
            command, env={**os.environ, **real_slurm}, stdin=subprocess.DEVNULL, capture_output=True, timeout=30
        )
        return done.stderr.decode()

    assert "unrecognized option" in complaint("nosuch")
    assert not [option for option in sorted(OPTIONS[program]) if "unrecognized option" in complaint(option)]


def test_the_script_refuses_a_directory_in_use(real_slurm: dict[str, str]) -> None:
    home = Path(real_slurm["SLURM_CONF"]).parent
    script = Path(__file__).parent / "one_node_slurm.sh"
    again = subprocess.run([script, "start", home], capture_output=True, text=True, timeout=30)
    assert again.returncode == 1 and "is in use" in again.stderr
