"""`trtspec build --executor slurm` against Slurm's double."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import Cluster, Project

from trtspec.build.state import BuildState, StepRecord
from trtspec.cli import main
from trtspec.cluster import build, job, jobs, slurm
from trtspec.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, TrtspecError

STEPS = ["resolve", "pair", "plan", "engine:target", "engine:draft", "engines", "repository", "manifest"]
Play = Callable[..., None]


def without_times(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says besides when and how fast."""
    times = {"seconds", "finished_at"}
    steps = {name: {k: v for k, v in step.items() if k not in times} for name, step in manifest["steps"].items()}
    return manifest | {"steps": steps}


def test_a_build_by_jobs_is_that_of_a_local_build(cluster: Cluster, project: Project) -> None:
    result = project.on_slurm("--time", "30", "--slurm-option", "mem=4G", "--json")
    assert result.exit_code == EXIT_OK, result.output + str(list(project.engines.rglob("log")))
    summary = json.loads(result.output.splitlines()[-1])
    assert [(step["name"], step["status"]) for step in summary["steps"]] == [(name, "ok") for name in STEPS]
    target, draft, finish = cluster.calls("sbatch")
    assert "--dependency=afterok:1:2" in finish
    assert not any(word.startswith("--dependency") for word in (*target, *draft))
    assert all({"--time=30", "--mem=4G", "--no-requeue"} <= set(words) for words in (target, draft, finish))
    assert not (project.root / "here").exists() and not Path("here").exists()
    by_jobs = project.manifest()
    assert sorted(path.name for path in project.engines.iterdir()) == [".build", "draft", "manifest.json", "target"]

    again = project.build()  # what the jobs made is the local build's own
    assert "nothing to do" in again.output, again.output
    shutil.rmtree(project.engines)
    shutil.rmtree(project.model_repo)
    assert project.build().exit_code == EXIT_OK
    assert without_times(by_jobs) == without_times(project.manifest())


def test_specs_that_look_alike_are_arrays(cluster: Cluster, project: Project, play: Play) -> None:
    play()
    more = [Project(project.root, *models_of(project), name=name) for name in ("two", "three")]
    more[1].content["speculation"] = {"method": "none"}
    more[1].write()
    configs = [str(each.config) for each in (project, *more)]
    result = CliRunner().invoke(main, ["build", *configs, "--executor", "slurm", "--json"])
    assert result.exit_code == EXIT_OK, result.output
    submitted = cluster.calls("sbatch")
    assert ["--array=0-1" in words for words in submitted] == [True, True, True, False, False]
    assert "--dependency=aftercorr:1:2" in submitted[2] and "--dependency=afterok:4" in submitted[4]
    assert "two/engine:draft: ok in 1.0 s" in result.output
    builds = json.loads(result.output.splitlines()[-1])["builds"]
    assert [each["ok"] for each in builds] == [True] * 3
    assert "engine:draft" not in [step["name"] for step in builds[2]["steps"]]


def models_of(project: Project) -> tuple[Path, Path]:
    return Path(project.content["target"]["model"]), Path(project.content["speculation"]["draft"]["model"])


def test_two_specs_with_one_output_are_refused(cluster: Cluster, project: Project) -> None:
    result = CliRunner().invoke(main, ["build", *[str(project.config)] * 2, "--executor", "slurm"])
    assert result.exit_code == EXIT_ERROR and "write to the same directory" in result.stderr
    assert not cluster.calls("sbatch")


def test_a_failed_job_ends_what_needs_it_and_nothing_else(cluster: Cluster, project: Project, play: Play) -> None:
    play(engine_target="ok engine:target failed 'no such GPU'; ended '\"no such GPU\"'; exit 1")
    result = project.on_slurm("--json")
    assert result.exit_code == EXIT_ERROR
    assert result.stderr.splitlines() == ["error: no such GPU"]
    summary = json.loads(result.output.splitlines()[-2 if result.stderr else -1])
    status = {step["name"]: step["status"] for step in summary["steps"]}
    assert status["engine:draft"] == "ok" and status["engine:target"] == "failed"
    assert status["engines"] == status["manifest"] == "skipped"
    assert not (jobs.place(project.engines) / "submission.json").exists()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("TIMEOUT", "was ended by its time limit of 30; run this again, what is finished is kept; give it more with"),
        ("CANCELLED", "job 1 (engine:target) was cancelled; run this again"),
        ("OUT_OF_MEMORY", "ran out of memory; run this again, what is finished is kept; give it more with"),
        ("NODE_FAIL", "the node of job 1 (engine:target) failed"),
        ("PREEMPTED", "was ended by Slurm (PREEMPTED)"),
    ],
)
def test_jobs_that_slurm_ends(cluster: Cluster, project: Project, play: Play, state: str, said: str) -> None:
    play(engine_target='tell \'{"event": "started", "step": "engine:target", "reason": ""}\'; exit 1')
    cluster.knobs(ends_as={"trtspec-tiny-engine:target": state})
    result = project.on_slurm("--time", "30")
    assert result.exit_code == EXIT_ERROR
    assert said in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_job_that_was_interrupted_is_explained_by_slurm(cluster: Cluster, project: Project, play: Play) -> None:
    play(engine_target="ended '\"interrupted\"'; exit 130")
    cluster.knobs(ends_as={"trtspec-tiny-engine:target": "TIMEOUT"})
    assert "time limit of 30" in project.on_slurm("--time", "30").stderr


def test_a_result_may_come_late(
    cluster: Cluster, project: Project, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(engine_target="(sleep 1; ok engine:target; ended) & exit 0")
    result = project.on_slurm()
    assert result.exit_code == EXIT_OK, result.output
    assert "engine:target: ok" in result.output


def test_a_result_that_never_comes(
    cluster: Cluster, project: Project, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_LAG_S", 0.3)
    play(engine_target="echo 'no module named trtspec' >&2; exit 1")
    result = project.on_slurm()
    assert "job 1 (engine:target) ended (FAILED) without a result: no module named trtspec" in result.stderr


@pytest.mark.parametrize("accounting", [True, False])
def test_a_job_that_squeue_has_forgotten(
    cluster: Cluster, project: Project, play: Play, accounting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_LAG_S", 0.3)
    cluster.knobs(forgets=True, accounting=accounting, ends_as={"trtspec-tiny-engine:target": "TIMEOUT"})
    play(engine_target="exit 1")
    said = project.on_slurm("--time", "30").stderr
    assert ("time limit of 30" if accounting else "Slurm has forgotten how, without a result: its log is empty") in said


def test_the_reason_for_waiting_is_shown_once(cluster: Cluster, project: Project, play: Play) -> None:
    play()
    cluster.knobs(hold="ReqNodeNotAvail, UnavailableNodes:node7", drained="disk is broken")
    shown: list[str] = []
    steps = Shown(shown)
    spec = loaded(project)

    def freed(line: str) -> None:
        shown.append(line)
        if line.count("waits"):
            cluster.knobs()

    steps.say = freed
    report = build.build([build.Request(spec)], slurm.Options(), steps, freed)
    assert report[0].error is None
    waits = [line for line in shown if "waits" in line]
    assert waits[0] == "engine:target: job 1 waits: ReqNodeNotAvail, UnavailableNodes:node7 (node7: disk is broken)"
    assert len([line for line in waits if line.startswith("engine:target")]) == 1


class Shown:
    """An observer that keeps what it is told as lines."""

    def __init__(self, lines: list[str]) -> None:
        self.say: Callable[[str], None] = lines.append

    def started(self, name: str, reason: str) -> None:
        self.say(f"{name}: {reason}")

    def advance(self, name: str, fraction: float) -> None:
        self.say(f"{name}: {fraction:.0%}")

    def note(self, name: str, text: str) -> None:
        self.say(f"{name}: {text}")

    def finished(self, outcome: Any) -> None:
        self.say(f"{outcome.name}: {outcome.status}")


def loaded(project: Project) -> Any:
    from trtspec.spec.load import load_spec

    return load_spec(project.config)


def interrupted(followed: Any) -> Any:
    raise KeyboardInterrupt
    yield


def test_ctrl_c_leaves_the_jobs_and_the_same_command_follows_them(
    cluster: Cluster, project: Project, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play()
    with monkeypatch.context() as patch:
        patch.setattr(build, "_follow", interrupted)
        left = project.on_slurm()
    assert left.exit_code == EXIT_INTERRUPTED
    assert "jobs 1, 2, 3 go on; the same command follows them again, and with --cancel ends them" in left.output
    local = project.build()
    assert "Slurm jobs 1, 2, 3 are building here" in local.stderr and "--cancel" in local.stderr
    changed = project.on_slurm("--set", "engine.max_batch_size=2")
    assert "jobs 1, 2, 3 build an earlier version of this spec" in changed.stderr
    result = project.on_slurm()
    assert result.exit_code == EXIT_OK, result.output
    assert "following jobs 1, 2, 3" in result.output
    assert "resolve: ok" in result.output and "manifest: ok in 1.0 s" in result.output
    assert len(cluster.calls("sbatch")) == 3


def test_cancelled_jobs_end_and_what_is_finished_stays(
    cluster: Cluster, project: Project, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(engine_target="exec sleep 60")
    with monkeypatch.context() as patch:
        patch.setattr(build, "_follow", interrupted)
        project.on_slurm()
    slurm.states(["1"])  # the double starts jobs when it is asked
    result = project.on_slurm("--cancel")
    assert result.exit_code == EXIT_OK and "cancelled jobs 1, " in result.output, result.output
    assert cluster.states()["1"] == cluster.states()["3"] == "CANCELLED"
    assert "no jobs to cancel" in project.on_slurm("--cancel").output


def test_what_slurm_refuses_halfway_is_cancelled(cluster: Cluster, project: Project, play: Play) -> None:
    play()
    cluster.knobs(refuse=[2, "Batch job submission failed: Job violates accounting/QOS policy"])
    result = project.on_slurm()
    assert result.stderr == "error: sbatch: Batch job submission failed: Job violates accounting/QOS policy\n"
    assert cluster.calls("scancel") == [["1"]]
    assert jobs.read(project.engines) is None


def test_a_submission_whose_author_died_is_begun_anew(
    cluster: Cluster, project: Project, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play()
    monkeypatch.setattr(build, "_SUBMITTING_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(build, "_follow", interrupted)
        project.on_slurm()
    left = jobs.read(project.engines)
    assert left is not None
    left.numbered("finish", "", "").save()
    result = project.on_slurm()
    assert result.exit_code == EXIT_OK, result.output
    assert cluster.calls("scancel") == [["1", "2"]] and len(cluster.calls("sbatch")) == 6
    assert job.main(project.engines, left.token, "finish") == EXIT_ERROR  # the job nobody knew of does nothing


def test_a_job_of_a_spec_that_was_changed_refuses(
    cluster: Cluster, project: Project, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play()
    monkeypatch.setattr(build, "_follow", interrupted)
    project.on_slurm()
    submission = jobs.read(project.engines)
    assert submission is not None
    project.content["speculation"]["num_draft_tokens"] = 2
    project.write()
    assert job.main(project.engines, submission.token, "engine:draft") == EXIT_ERROR
    last = jobs.events_file(project.engines, "engine:draft").read_text().splitlines()[-1]
    assert "the spec was changed after its jobs were submitted" in json.loads(last)["error"]


def test_records_of_jobs_are_collected_once(tmp_path: Path) -> None:
    for name in ("engine:target", "engine:draft"):
        jobs.folder(tmp_path, name).mkdir(parents=True)
        jobs.save_records(tmp_path, name, {name: StepRecord({"x": name}, {})})
    assert set(jobs.records_of(tmp_path)) == {"engine:target", "engine:draft"}
    jobs.collect(tmp_path)
    assert set(BuildState(tmp_path / ".build" / "state.json").records) == {"engine:target", "engine:draft"}
    assert not list(jobs.place(tmp_path).rglob("records.json"))


def test_a_damaged_list_of_jobs(cluster: Cluster, project: Project) -> None:
    jobs.place(project.engines).mkdir(parents=True)
    (jobs.place(project.engines) / "submission.json").write_text('{"version": 1, "jobs": 3}')
    for result in (project.on_slurm(), project.build()):
        assert result.exit_code == EXIT_ERROR
        assert "not the list of jobs that a build on Slurm keeps" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--partition", "nix"], "--partition: Slurm has no partition 'nix'; expected one of main, old, plain"),
        (["--time", "soon"], "--time soon: no time limit; expected minutes, HH:MM:SS or D-HH:MM:SS"),
        (["--slurm-option", "output=x"], "--slurm-option output=x: trtspec sets this option itself"),
        (["--slurm-option", "a b=c"], "--slurm-option a b=c: 'a b' is no option of sbatch"),
        (["--slurm-option", "nosuch=1"], "sbatch: unrecognized option '--nosuch'"),
    ],
)
def test_bad_options_are_one_line(
    cluster: Cluster, project: Project, play: Play, options: list[str], said: str
) -> None:
    play()
    result = project.on_slurm(*options)
    assert result.exit_code == EXIT_ERROR
    assert said in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr


def test_options_that_do_not_go_together(cluster: Cluster, project: Project) -> None:
    assert project.build("--cancel").exit_code == EXIT_USAGE
    assert project.on_slurm("--only", "plan").exit_code == EXIT_USAGE
    result = CliRunner().invoke(main, ["build", str(project.config), str(project.config)])
    assert result.exit_code == EXIT_USAGE and "several CONFIGs need --executor slurm" in result.stderr


def test_without_slurm(project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = project.on_slurm()
    assert result.exit_code == EXIT_ERROR
    assert result.stderr == (
        "error: --executor slurm: Slurm's sbatch is not on the PATH; run this on a login node of the cluster\n"
    )


def test_a_controller_that_does_not_answer(cluster: Cluster, project: Project) -> None:
    cluster.knobs(mute=True)
    result = project.on_slurm()
    assert result.stderr == "error: sinfo: Unable to contact slurm controller (connect failure)\n"


def test_gpus_are_asked_for_by_the_name_that_nodes_have(cluster: Cluster) -> None:
    assert slurm.gpu_request("H100-SXM", 2, None) == "gpu:h100:2"
    assert slurm.gpu_request("H100-SXM", 4, "old") == "gpu:4"  # no type: the build itself looks at the GPU
    with pytest.raises(TrtspecError) as refused:
        slurm.gpu_request("A100-80GB", 1, "main")
    assert str(refused.value).startswith(
        "hardware.gpu: no node of partition main has 1 A100-80GB GPU; expected one of gpu:h100:2; choose another"
    )
    with pytest.raises(TrtspecError, match="has 8 H100-SXM GPUs"):
        slurm.gpu_request("H100-SXM", 8, None)
    with pytest.raises(TrtspecError, match="sinfo shows none"):
        slurm.gpu_request("H100-SXM", 1, "plain")


def test_a_dry_run_shows_the_scripts_and_submits_nothing(cluster: Cluster, project: Project) -> None:
    result = project.on_slurm("--dry-run")
    assert result.exit_code == EXIT_OK, result.output
    assert "exec " in result.output and "trtspec.cluster.job" in result.output
    assert not cluster.calls("sbatch") and not project.engines.exists()
