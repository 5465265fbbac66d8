"""Commands spread over an array of jobs, against Slurm's double."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Cluster

from trtspec.cluster import spread
from trtspec.cluster.slurm import Options
from trtspec.errors import TrtspecError


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "_ASK_S", 0.1)


def touch(place: Path, number: int) -> list[str]:
    return ["touch", str(place / f"it's {number}")]


def test_parts_run_before_the_last_command_whose_code_is_returned(cluster: Cluster, tmp_path: Path) -> None:
    said: list[str] = []
    last = ["bash", "-c", f"ls '{tmp_path}' | grep -c \"it's\"; exit 3"]
    parts = [touch(tmp_path, number) for number in range(3)]
    assert spread.spread(parts, last, tmp_path / "a 100% place", "parity", Options(time="5"), said.append) == 3
    assert said[0] == "job 1, an array of 3; then job 2, which puts the parts together"
    assert said[-1] == "3"
    first, second = cluster.calls("sbatch")
    assert "--array=0-2" in first and "--dependency=afterany:1" in second and "--time=5" in second


def test_a_part_that_fails_does_not_stop_the_rest(cluster: Cluster, tmp_path: Path) -> None:
    said: list[str] = []
    assert (
        spread.spread([["false"], ["true"]], ["echo", "merged"], tmp_path / "x", "parity", Options(), said.append) == 0
    )
    assert said[-1] == "merged"


def test_a_time_limit_is_named(cluster: Cluster, tmp_path: Path) -> None:
    cluster.knobs(ends_as={"parity": "TIMEOUT"})
    with pytest.raises(TrtspecError, match=r"jobs 1_0, 1_1 were ended by their time limit of 5; run this again with"):
        spread.spread([["false"]] * 2, ["false"], tmp_path / "x", "parity", Options(time="5"), lambda line: None)


def test_a_last_job_without_a_result(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "_LAG_S", 0.2)
    killed = ["bash", "-c", "kill -9 $PPID"]
    with pytest.raises(TrtspecError, match=r"job 2 ended \(FAILED\) without a result"):
        spread.spread([["true"]], killed, tmp_path / "x", "parity", Options(), lambda line: None)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "-1/2", "1/0", "1/9999999"])
def test_no_parts(text: str) -> None:
    with pytest.raises(TrtspecError, match="no part"):
        spread.Part.parse(text)


def test_parts_are_everything_once() -> None:
    parts = [spread.Part.parse(f"{number}/3").mine(range(8)) for number in (1, 2, 3)]
    assert parts == [[0, 3, 6], [1, 4, 7], [2, 5]]
