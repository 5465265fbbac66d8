"""`--executor slurm` of what is dealt out, against Slurm's double."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conftest import Cluster, Project

from trtspec.cli import main
from trtspec.cluster import slurm, spread
from trtspec.cluster.slurm import Options
from trtspec.cluster.spread import Spread
from trtspec.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, TrtspecError


class Shown:
    """An observer that keeps what it is told as lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def started(self, name: str, reason: str) -> None:
        self.lines.append(f"{name}: {reason}")

    def advance(self, name: str, fraction: float) -> None:
        self.lines.append(f"{name}: {fraction:.0%}")

    def note(self, name: str, text: str) -> None:
        self.lines.append(f"{name}: note: {text}")

    def finished(self, outcome: Any) -> None:
        self.lines.append(f"{outcome.name}: {outcome.status}")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """One whose name a shell would take apart."""
    return tmp_path / "it's $(touch here) a%a dir"


def shell(directory: Path, *shards: str, merge: str = "cat *.done") -> Spread:
    """Commands of bash, run in the directory."""
    begin = f"cd {shlex.quote(str(directory))}; "
    tasks = [["bash", "-c", begin + text] for text in shards]
    return Spread(shards=tasks, merge=["bash", "-c", begin + merge], directory=directory, name="tiny-parity")


def run(given: Spread, options: Options | None = None) -> tuple[tuple[int, str], list[str]]:
    shown = Shown()
    return spread.run(given, options or Options(), shown, shown.lines.append), shown.lines


def test_an_array_and_a_merge_behind_it(cluster: Cluster, directory: Path) -> None:
    given = shell(directory, "sleep 0.3; echo 1 >1.done", "echo 2 >2.done", merge="cat *.done; echo read >&2; exit 3")
    (code, out), lines = run(given, Options(partition="main", time="30"))
    assert (code, out) == (3, "1\n2\n"), "the exit code of a parity run that found a fault, and its output alone"
    array, merge = cluster.calls("sbatch")
    assert {"--array=0-1", "--time=30", "--partition=main", "--no-requeue"} <= set(array)
    assert "--dependency=afterany:1" in merge and "--time=30" in merge
    assert lines[0] == "submitted job 1, an array of 2, then job 2, which puts the shards together"
    assert {"shard 1/2: job 1_0", "shard 1/2: ok", "shard 2/2: ok", "merge: ok"} >= set(lines[1:]) - {
        "shard 2/2: job 1_1",
        "merge: job 2",
    }
    assert (directory / "merge.log").read_text() == "read\n"
    assert not Path("here").exists() and not (directory / "jobs.json").exists()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("TIMEOUT", "was ended by its time limit of 30; the merge does what is missing; give it more with --time"),
        ("NODE_FAIL", "the node of job 1_1 failed; the merge does what is missing"),
        ("FAILED", "without a result: no such engine"),
    ],
)
def test_a_task_that_ends_badly_is_told_and_the_merge_goes_on(
    cluster: Cluster, directory: Path, state: str, said: str
) -> None:
    given = shell(directory, "echo 1 >1.done", "echo no such engine >&2; exit 1", merge="ls *.done")
    cluster.knobs(ends_as={"trtspec-tiny-parity": state})
    (code, out), lines = run(given, Options(time="30"))
    assert (code, out) == (EXIT_OK, "1.done\n")
    (note,) = [line for line in lines if line.startswith("shard 2/2: note")]
    assert said in note
    assert "merge: ok" in lines


def test_a_merge_that_fails_says_why(cluster: Cluster, directory: Path) -> None:
    with pytest.raises(TrtspecError, match=r"^x.yaml: no such spec; the whole log is .*merge.log; what is finished"):
        run(shell(directory, "true", merge="echo working >&2; echo 'error: x.yaml: no such spec' >&2; exit 1"))
    cluster.knobs(ends_as={"trtspec-tiny-parity-merge": "TIMEOUT"})
    with pytest.raises(TrtspecError, match=r"job 4 \(merge\) was ended by its time limit of 5; run this again"):
        run(shell(directory, "true", merge="kill -9 $PPID"), Options(time="5"))
    cluster.knobs()
    assert run(shell(directory, "true", merge="echo well"))[0] == (EXIT_OK, "well\n")


def test_a_merge_whose_result_comes_late_or_never(
    cluster: Cluster, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(given: Spread) -> Any:
        script = directory / "merge.sh"
        submit = slurm.submit

        def submitted(path: Path, words: Any) -> int:
            if path == script:
                script.write_text("(sleep 0.6\n" + script.read_text() + ") >/dev/null 2>&1 & exit 0\n")
            return submit(path, words)

        monkeypatch.setattr(slurm, "submit", submitted)
        return run(given)[0]

    assert late(shell(directory, "true", merge="echo well")) == (EXIT_OK, "well\n")
    monkeypatch.setattr(spread, "_LAG_S", 0.1)
    with pytest.raises(TrtspecError, match=r"job 4 \(merge\) ended \(COMPLETED\) without a result: its log is empty"):
        late(shell(directory, "true", merge="echo other"))


def test_a_closed_terminal_and_other_commands(
    cluster: Cluster, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, said = shell(directory, "true", merge="echo well"), list[str]()
    cluster.knobs(hold="Resources")

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(spread, "_follow", leave)
        spread.run(given, Options(), Shown(), said.append)
    assert said[-1] == "jobs 1 and 2 go on; the same command follows them again, and with --cancel ends them"
    with pytest.raises(TrtspecError, match=r"jobs 1_0, 2 of another command work here; .* --cancel"):
        run(shell(directory, "true", "true", merge="echo well"))
    cluster.knobs()
    (code, out), lines = run(given)
    assert (code, out) == (EXIT_OK, "well\n") and lines[0] == "following jobs 1 and 2"
    assert len(cluster.calls("sbatch")) == 2


def test_the_reason_for_waiting_is_shown(cluster: Cluster, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Freeing(Shown):
        def note(self, name: str, text: str) -> None:
            super().note(name, text)
            cluster.knobs()

    cluster.knobs(hold="ReqNodeNotAvail", drained="disk is broken")
    shown = Freeing()
    spread.run(shell(directory, "touch 1.done"), Options(), shown, shown.lines.append)
    waits = [line for line in shown.lines if "waits" in line]
    assert waits == ["shard 1/1: note: job 1_0 waits: ReqNodeNotAvail (node7: disk is broken)"]


def test_shards_of_something_else_go(cluster: Cluster, directory: Path) -> None:
    """In a directory of trtspec's own; what a user names is left as it is."""
    given = shell(directory, "touch 1-of-1.jsonl 2-of-2.jsonl.partial", merge="ls *.jsonl*")
    assert run(replace(given, made_of="this"))[0][1].split() == ["1-of-1.jsonl", "2-of-2.jsonl.partial"]
    other = shell(directory, "true", merge="ls | grep -c jsonl || true")
    assert run(replace(other, made_of="this"))[0][1] == "2\n"
    assert run(other)[0][1] == "2\n"
    (_, out), lines = run(replace(other, made_of="that"))
    assert out == "0\n"
    assert f"removed 2 shards of other prompts or another spec from {directory}" in lines


def test_cancelled(cluster: Cluster, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(found: Any, *_: object) -> None:
        slurm.states(list(found.names))  # the double starts jobs when it is asked
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(spread, "_follow", leave)
        run(shell(directory, "exec sleep 60"))
    said: list[str] = []
    spread.cancel(directory, said.append)
    spread.cancel(directory, said.append)
    assert said == ["cancelled jobs 1_0, 2; what is recorded is kept", "no jobs to cancel"]
    assert set(cluster.states().values()) == {"CANCELLED"}


def test_what_slurm_refuses_halfway_is_cancelled(cluster: Cluster, directory: Path) -> None:
    cluster.knobs(refuse=[2, "Batch job submission failed: Job violates accounting/QOS policy"])
    with pytest.raises(TrtspecError, match="Job violates accounting/QOS policy"):
        run(shell(directory, "true"))
    assert cluster.calls("scancel") == [["1"]] and not (directory / "jobs.json").exists()


def test_a_damaged_list_of_jobs(cluster: Cluster, directory: Path) -> None:
    directory.mkdir()
    (directory / "jobs.json").write_text('{"array": 3}')
    with pytest.raises(TrtspecError, match=r"jobs.json: not the list of jobs that is kept here; cancel the jobs"):
        run(shell(directory, "true"))


# ---- by the command


@pytest.fixture
def acceptance(project: Project, tmp_path: Path) -> Callable[..., Result]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"river {number}"}) + "\n" for number in range(6)))

    def call(*options: str) -> Result:
        words = ["bench", "acceptance", str(project.config), "--prompts", str(prompts), "--max-tokens", "4"]
        return CliRunner().invoke(main, [*words, "--trace", str(tmp_path / "trace.jsonl"), *options])

    return call


def test_jobs_run_the_command_as_it_was_given(
    cluster: Cluster, acceptance: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Spread] = []

    def stopped(given: Spread, *_: object) -> tuple[int, str]:
        seen.append(given)
        return EXIT_OK, "the table\n"

    monkeypatch.setattr(spread, "run", stopped)
    jobs = ("--executor", "slurm", "--num-shards", "2", "--time", "5")
    result = acceptance("--set", "speculation.num_draft_tokens=2", "--temperature", "0", "--temperature", "1", *jobs)
    assert result.exit_code == EXIT_OK and result.stdout == "the table\n", result.output
    (given,) = seen
    words = given.merge[3:]
    assert words[:2] == ["bench", "acceptance"] and words[-2:] == ["--shards", str(tmp_path / "trace.jsonl.shards")]
    assert {"--set=speculation.num_draft_tokens=2", "--temperature=0.0", "--temperature=1.0"} <= set(words)
    assert not [word for word in words if word.startswith(("--executor", "--num-shards", "--time"))]
    assert [shard[3:] for shard in given.shards] == [[*words, "--shard", "1/2"], [*words, "--shard", "2/2"]]


def test_only_the_last_job_of_a_parity_run_writes_the_report(
    cluster: Cluster, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "river"}\n')
    words = ["parity", str(project.config), "--subject", "engines", "--prompts", str(prompts)]
    early = CliRunner().invoke(main, [*words, "--executor", "slurm", "--num-shards", "3"])
    assert early.exit_code == EXIT_ERROR and "no such engine" in early.stderr and not cluster.calls("sbatch")
    project.build()
    seen: list[Spread] = []
    monkeypatch.setattr(spread, "run", lambda given, *_: (seen.append(given), (3, "fault\n"))[1])
    words += ["--json", "--report", str(tmp_path / "r.json")]
    result = CliRunner().invoke(main, [*words, "--executor", "slurm", "--num-shards", "3"])
    assert (result.exit_code, result.stdout) == (3, "fault\n")
    (given,) = seen
    assert {"--json", f"--report={tmp_path / 'r.json'}", "--subject=engines"} <= set(given.merge)
    assert not [word for shard in given.shards for word in shard if word.startswith(("--json", "--report"))]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--partition", "nix"], "--partition: Slurm has no partition 'nix'; expected one of main, old, plain"),
        (["--time", "soon"], "--time soon: no time limit; expected minutes, HH:MM:SS or D-HH:MM:SS"),
        (["--slurm-option", "array=1"], "--slurm-option array=1: trtspec sets this option itself"),
    ],
)
def test_bad_options_are_one_line(
    cluster: Cluster, acceptance: Callable[..., Result], options: list[str], said: str
) -> None:
    result = acceptance("--executor", "slurm", "--num-shards", "2", *options)
    assert result.exit_code == EXIT_ERROR
    assert said in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr
    assert not cluster.calls("sbatch")


def test_ctrl_c_and_cancel(
    cluster: Cluster, acceptance: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    cluster.knobs(hold="Resources")
    monkeypatch.setattr(spread, "_follow", leave)
    left = acceptance("--executor", "slurm", "--num-shards", "2")
    assert left.exit_code == EXIT_INTERRUPTED and "jobs 1 and 2 go on" in left.stderr, left.output
    assert "cancelled jobs 1_0, 1_1, 2; " in acceptance("--executor", "slurm", "--cancel").stdout


def test_without_slurm(acceptance: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = acceptance("--executor", "slurm", "--num-shards", "2")
    assert result.exit_code == EXIT_ERROR
    assert "Slurm's sbatch is not on the PATH; run this on a login node of the cluster" in result.stderr
