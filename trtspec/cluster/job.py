"""What runs inside a job: `python -m trtspec.cluster.job ENGINES_DIR TOKEN NAME`, one job of a submitted build.

Knows the submission and the step graph; nothing of Slurm, which only starts it and sends it SIGTERM.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from trtspec.build.graph import Graph, Step
from trtspec.build.steps import build_graph
from trtspec.cluster import jobs
from trtspec.cluster.events import Teller
from trtspec.cluster.jobs import Job, Submission
from trtspec.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, TrtspecError
from trtspec.spec.load import load_spec

INTERRUPTED = "interrupted"


def main(engines_dir: Path, token: str, name: str) -> int:
    """Run the steps of one job; returns the exit code. What becomes of them is in the job's events."""
    submission = jobs.read(engines_dir)
    job = next((job for job in submission.jobs if job.name == name), None) if submission else None
    if submission is None or submission.token != token or job is None:
        print(f"error: {engines_dir} is not waiting for this job; another build has taken its place", file=sys.stderr)
        return EXIT_ERROR
    teller = Teller(jobs.events_file(engines_dir, name), job.steps)
    try:
        error = run(submission, job, teller)
    except TrtspecError as failure:
        error = failure
    except KeyboardInterrupt:
        teller.ended(INTERRUPTED)
        return EXIT_INTERRUPTED
    except Exception as failure:
        teller.ended(f"internal error: {type(failure).__name__}: {failure}; its log has the traceback")
        raise
    teller.ended(str(error) if error else None)
    if error:
        print(f"error: {error}", file=sys.stderr)
    return EXIT_ERROR if error else EXIT_OK


def run(submission: Submission, job: Job, teller: Teller) -> TrtspecError | None:
    """Run the steps; returns the error of the one that failed.

    Raises:
        TrtspecError: the spec has changed, or an output or an earlier step is not as it must be.
    """
    spec = load_spec(Path(submission.config), submission.overrides)
    if spec.hash() != submission.spec_hash:
        raise TrtspecError(
            "the spec was changed after its jobs were submitted", where=submission.config, fix="run the build again"
        )
    whole = build_graph(spec, compile=submission.compile)
    before = [step.name for step in jobs.split(whole)[0]]
    if job.name == jobs.FINISH:
        jobs.collect(submission.engines_dir)
        ran = [*(content["name"] for content in submission.before if content["status"] == "ok"), *submission.steps]
        graph = Graph([_told(step, ran) for step in whole.steps], whole.root, gpus=whole.gpus)
    else:
        root = jobs.folder(submission.engines_dir, job.name)
        steps = jobs.with_ancestors(whole, job.steps)
        graph = Graph(steps, root, gpus=whole.gpus)
        graph.state.records = jobs.records_of(submission.engines_dir)
        graph.state.path.parent.mkdir(exist_ok=True)
        graph.state.save()
        jobs.touch_locks(submission.engines_dir, steps)
    # This node may differ from the one where the first steps ran, such as in its memory: they look again.
    report = Graph([step for step in graph.steps if step.name in before], graph.root).run(teller)
    for name in () if report.error else job.steps:
        report = graph.run(teller, only=name, force=submission.force)
        if report.error:
            break
    if job.name == jobs.FINISH:
        jobs.remove_locks(submission.engines_dir, graph.steps)
    else:
        made = {name: record for name, record in graph.state.records.items() if name in job.steps}
        jobs.save_records(submission.engines_dir, job.name, made)
    return report.error


def _told(step: Step, ran: list[str]) -> Step:
    """The same step, which is told that these steps ran in this build too."""
    return replace(step, run=lambda task: step.run(replace(task, ran=(*ran, *task.ran))))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
