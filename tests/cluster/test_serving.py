"""`trtspec deploy slurm`: the scripts of a job that serves over several nodes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from conftest import Cluster

from trtspec.cli.deploy_slurm import slurm
from trtspec.cluster import serving
from trtspec.cluster.slurm import Options
from trtspec.errors import EXIT_OK, TrtspecError
from trtspec.spec.load import load_spec

SPEC: dict[str, Any] = {
    "version": 1,
    "name": "big",
    "target": {"model": "./target", "dtype": "bfloat16", "tensor_parallel": 4},
    "speculation": {"method": "none"},
    "hardware": {"gpu": "H100-SXM", "num_gpus": 2, "num_nodes": 2},
    "engine": {"runtime": "tensorrt_llm"},
    "serving": {"host": "0.0.0.0"},
    "output": {"engines": "engines", "model_repo": "repo"},
}


@pytest.fixture
def written(tmp_path: Path, scripted_repository: Callable[[Path], Path]) -> Callable[..., Path]:
    """Write the spec, with sections changed, and a repository for it."""

    def write(**sections: Any) -> Path:
        if not (tmp_path / "repo").exists():
            scripted_repository(tmp_path / "repo")
        for model in ("tensorrt_llm", "tensorrt_llm_draft"):
            (tmp_path / "repo" / model).mkdir(exist_ok=True)
            (tmp_path / "repo" / model / "config.pbtxt").write_text(f'name: "{model}"\n')
        config = tmp_path / "big.yaml"
        config.write_text(yaml.safe_dump({**SPEC, **sections}))
        return config

    return write


@pytest.fixture(autouse=True)
def no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository of these tests is no whole one."""
    monkeypatch.setattr("trtspec.triton.container.check_repository", lambda path: None)


def deploy(config: Path, *options: str) -> Result:
    return CliRunner().invoke(slurm, [str(config), *options])


def ranks(script: str) -> list[list[str]]:
    return [shlex.split(text) for text in re.findall(r"^\d+\) exec (.*) ;;$", script, re.MULTILINE)]


def test_leader_and_workers(written: Callable[..., Path]) -> None:
    files = serving.serving_files(load_spec(written()), Options(partition="gpus"), "gpu:h100:2")
    script = files["serve.sbatch"]
    lines = script.splitlines()
    for line in ("--nodes=2", "--ntasks-per-node=2", "--gres=gpu:h100:2", "--partition=gpus"):
        assert f"#SBATCH {line}" in lines
    assert "for node in 0 0 1 1; do" in script and "--mpi=pmix --ntasks=4" in script
    leader, *workers = ranks(files["rank.sh"])
    assert leader[:2] == ["python3", "launch.py"] and "--http-address=0.0.0.0" in leader and "--ranks" not in leader
    assert len(workers) == 3
    for number, worker in enumerate(workers, 1):
        assert worker[0] == "tritonserver" and "--load-model=tensorrt_llm" in worker and "--allow-http=false" in worker
        assert worker[-1].endswith(f"=rank{number}_") and "mpirun" not in worker


def test_ranks_beside_an_orchestrator(written: Callable[..., Path]) -> None:
    config = written(
        target={"model": "./target", "tensor_parallel": 3},
        speculation={"method": "draft_target", "draft": {"model": "./draft"}, "num_draft_tokens": 4},
        serving={"orchestrator": True, "spawn_processes": False},
    )
    files = serving.serving_files(load_spec(config), Options(), "gpu:2")
    assert "for node in 0 0 0 0 1; do" in files["serve.sbatch"]  # leader; draft on GPU 0; target on GPUs 0 to 2
    assert "TRTLLM_ORCHESTRATOR=1 TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=0" in files["rank.sh"]
    assert len(ranks(files["rank.sh"])) == 5


def test_the_llm_api_starts_its_own_workers(written: Callable[..., Path]) -> None:
    config = written(
        engine={"runtime": "tensorrt_llm", "track": "llmapi", "version": "1.3.0"},
        hardware={"gpu": "H200"},
        serving={"image": "triton:1.3", "host": "0.0.0.0"},
    )
    spec = load_spec(config, ("target.tensor_parallel=1",))
    files = serving.serving_files(spec, Options(), "gpu:1")
    assert ranks(files["rank.sh"])[0][:4] == ["trtllm-llmapi-launch", "python3", "launch.py", "--llmapi"]


def test_files_are_written_and_the_same_each_time(
    written: Callable[..., Path], cluster: Cluster, tmp_path: Path
) -> None:
    config, out = written(), tmp_path / "a place"
    result = deploy(config, "--out", str(out), "--time", "1-0", "--slurm-option", "exclusive")
    assert result.exit_code == EXIT_OK, result.output
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(before) == {"serve.sbatch", "rank.sh", "launch.py"}
    assert b"--gres=gpu:h100:2" in before["serve.sbatch"] and b"#SBATCH --exclusive\n" in before["serve.sbatch"]
    deploy(config, "--out", str(out), "--time", "1-0", "--slurm-option", "exclusive")
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    for name in ("serve.sbatch", "rank.sh"):
        subprocess.run(["bash", "-n", str(out / name)], check=True)
    assert "#SBATCH" in deploy(config, "--dry-run").output


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"serving": {"host": "10.0.0.1"}}, "the leader's node is not known before the job runs"),
        ({"output": {"engines": "engines", "model_repo": "nowhere"}}, "there is no built model repository here"),
        ({"output": {"engines": "a:b", "model_repo": "repo"}}, "a colon or comma in a path that is mounted"),
    ],
)
def test_what_cannot_be_served(written: Callable[..., Path], sections: dict[str, Any], said: str) -> None:
    with pytest.raises(TrtspecError, match=said):
        serving.serving_files(load_spec(written(**sections)), Options(), "gpu:2")


def test_no_line_can_be_slipped_in(written: Callable[..., Path]) -> None:
    with pytest.raises(TrtspecError, match="control characters"):
        serving.serving_files(load_spec(written()), Options(account="a\nb"), "gpu:2")


def test_the_real_slurm_starts_every_rank_where_it_belongs(
    written: Callable[..., Path], real_slurm: dict[str, str], tmp_path: Path
) -> None:
    config = written(hardware={"gpu": "H100-SXM", "num_gpus": 4})
    spec = load_spec(config)
    files = serving.serving_files(spec, Options(), "gpu:h100:2", mpi="none", container=False)
    out = tmp_path / "a place"
    out.mkdir()
    for name, text in files.items():
        (out / name).write_text(text)
    (out / "rank.sh").write_text('echo "rank $SLURM_PROCID of $SLURM_NTASKS on $(hostname)"\n')
    done = subprocess.run(
        ["sbatch", "--wait", "serve.sbatch"],
        cwd=out,
        env={**os.environ, **real_slurm},
        capture_output=True,
        text=True,
        timeout=60,
    )
    log = next(out.glob("*.log")).read_text()
    assert done.returncode == 0, done.stderr + log
    assert {f"rank {rank} of 4" for rank in range(4)} == {
        line.rpartition(" on ")[0] for line in log.splitlines() if line.startswith("rank")
    }, log
    assert not list(out.glob("hosts.*"))
