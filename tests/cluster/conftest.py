"""A cluster: Slurm's double at the front of PATH, or a real Slurm of one node where it is installed; small specs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from trtspec.cli import main

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


class Cluster:
    """Slurm's double: what it was asked, and how it is made to misbehave."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def knobs(self, **knobs: Any) -> None:
        (self.home / "knobs.json").write_text(json.dumps(knobs))

    def calls(self, program: str) -> list[list[str]]:
        path = self.home / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [words[1:] for words in map(json.loads, lines) if words[0] == program]

    def states(self) -> dict[str, str]:
        return {name: job["state"] for name, job in json.loads((self.home / "jobs.json").read_text()).items()}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A machine on which Slurm's programs are the double, and answers are asked for often."""
    programs, home = tmp_path / "bin", tmp_path / "slurm"
    programs.mkdir()
    home.mkdir()
    double = shlex.join([sys.executable, "-S", "-E", str(HERE / "slurm_double.py")])
    for name in ("sbatch", "squeue", "sacct", "scancel", "sinfo"):
        (programs / name).write_text(f'#!/bin/sh\nexec {double} "$0" "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_DOUBLE", str(home))
    monkeypatch.setattr("trtspec.cluster.build._ASK_S", 0.1)
    monkeypatch.setattr("trtspec.cluster.build._LISTEN_S", 0.05)
    monkeypatch.setattr("trtspec.cluster.spread._ASK_S", 0.1)
    monkeypatch.setattr("trtspec.cluster.slurm._LOOK_S", 0.05)
    return Cluster(home)


class Project:
    """A spec of small models, and `trtspec build` of it."""

    def __init__(self, root: Path, target: Path, draft: Path, name: str = "tiny") -> None:
        self.root, self.name = root, name
        self.config = root / f"{name}.yaml"
        self.engines, self.model_repo = root / "engines" / name, root / "model_repo" / name
        self.content: dict[str, Any] = {
            "version": 1,
            "name": name,
            "target": {"model": str(target), "dtype": "float32"},
            "speculation": {
                "method": "draft_target",
                "num_draft_tokens": 3,
                "draft": {"model": str(draft), "dtype": "float32"},
            },
            "engine": {"max_batch_size": 4, "max_input_len": 128, "max_seq_len": 256},
        }
        self.write()

    def write(self) -> None:
        self.config.write_text(yaml.safe_dump(self.content))

    def build(self, *options: str) -> Result:
        return CliRunner().invoke(main, ["build", str(self.config), *options])

    def on_slurm(self, *options: str) -> Result:
        return self.build("--executor", "slurm", *options)

    def manifest(self) -> dict[str, Any]:
        return json.loads((self.engines / "manifest.json").read_text())


@pytest.fixture
def project(tmp_path: Path, tiny_model_dir: Path, tiny_draft_dir: Path) -> Project:
    """A spec with a draft; in a directory whose name a shell would take apart."""
    root = tmp_path / "it's $(touch here) a%a dir"
    root.mkdir()
    return Project(root, tiny_model_dir, tiny_draft_dir)


_PLAY = """
tell() { printf '%s\\n' "$1" >>"$events"; }
ok() {
    tell '{"event": "started", "step": "'"$1"'", "reason": "not built yet"}'
    outcome='"status": "'"${2:-ok}"'", "reason": "'"${3:-}"'", "seconds": 1.0, "input_hash": null, "output": null'
    tell '{"event": "finished", "step": "'"$1"'", "outcome": {"name": "'"$1"'", '"$outcome"', "actions": []}}'
}
ended() { tell '{"event": "ended", "error": '"${1:-null}"'}'; }
name=$(printf %s "$3" | tr : -)
events="$1/.build/slurm/$name/events.jsonl"
case "$name" in
CASES
finish) ok engines; ok repository; ok manifest; ended ;;
*) ok "$3"; ended ;;
esac
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have jobs play a part, given as shell by the job's name, instead of building: `$1` is the events' file.

    `ok` is a shell function that tells of a step that has ended, and `ended` of the job's end.
    """

    def choose(**parts: str) -> None:
        script = tmp_path / "play.sh"
        cases = "".join(f"{name.replace('_', '-')}) {part} ;;\n" for name, part in parts.items())
        script.write_text(_PLAY.replace("CASES", cases))
        monkeypatch.setattr("trtspec.cluster.sbatch.python", lambda module, *words: ["bash", str(script), *words])

    return choose


@pytest.fixture(scope="session")
def real_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a real Slurm of one node, started for the tests and stopped after them."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if missing := [name for name in ("sbatch", "munged", "slurmctld", "slurmd") if not shutil.which(name, path=path)]:
        pytest.skip(f"{', '.join(missing)} not installed: Debian's slurm-wlm and munge")
    home = tmp_path_factory.mktemp("real_slurm")
    script = HERE / "one_node_slurm.sh"
    started = subprocess.run([script, "start", home], capture_output=True, text=True, timeout=60)
    assert started.returncode == 0, started.stderr
    yield {"SLURM_CONF": str(home / "slurm.conf")}
    subprocess.run([script, "stop", home], check=True, timeout=60)
