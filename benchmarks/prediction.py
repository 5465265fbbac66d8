"""What a plan promises beside what is then measured, for every method that runs on this machine.

    python benchmarks/prediction.py              # within this process
    python benchmarks/prediction.py --served     # through the served pipeline, by the commands that a team uses

For each config (those of `benchmarks/methods.py` by default): measures step times, records a trace of some prompts, and
plans batch 1 at the spec's own draft length. Then plain decoding and all methods answer the same prompts greedily, one
after the other, each time in another order and for some rounds, so that whatever else the machine does hits all alike.
Step times are measured before that; where the machine is not the same all along, run it again while it is quiet.

A speed-up is E times a plain pass over a cycle, with E the tokens of a target pass. The table has all three beside each
other, planned and measured, so that one sees which of them is off. Measured intervals are bootstrapped over rounds and
prompts; planned ones over prompts alone, see `trtspec.plan.acceptance`. A prompt's own pass is not timed.

With --served every server is started, loaded by one client with speculation and without in turn, and stopped. A method
whose drafts a request cannot switch off, such as Medusa, is left out there.

Prints the table, then one JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch
from contenders import Ours, Timed
from methods import (
    CONFIGS,
    PROMPTS,
    ROOT,
    built,
    check_same_target,
    chosen_prompts,
    measured,
    overrides_of,
    wanted_configs,
)

from trtspec.bench.record import record
from trtspec.bench.serve import OFF, ON
from trtspec.bench.serve_figures import ratio_of
from trtspec.build.machine import hardware, memory_bytes
from trtspec.build.sources import Sources
from trtspec.decoding.methods import METHODS
from trtspec.errors import TrtspecError
from trtspec.plan import inputs
from trtspec.plan.calibrate import calibrate, grid
from trtspec.plan.pairs import pair_of_spec
from trtspec.plan.planner import Question, make_plan
from trtspec.plan.sizes import ModelSizes
from trtspec.prompts import Prompt, read_prompts
from trtspec.spec.gpus import find_gpu
from trtspec.spec.load import load_spec
from trtspec.spec.schema import Spec

WITHIN = 0.1  # how far a plan may be off
_CONTEXT, _PROMPT = 512, 32  # most that is measured: answers here are short, and prefills are not compared


@dataclass(frozen=True)
class Side:
    """One side of the comparison.

    Attributes:
        speed_up: over plain decoding, with its interval at 95 %.
        tokens_per_pass: E.
        cycle_ms, plain_ms: a cycle, and a plain pass of the target.
    """

    speed_up: float
    low: float
    high: float
    tokens_per_pass: float
    cycle_ms: float
    plain_ms: float


@dataclass(frozen=True)
class Row:
    """One method."""

    method: str
    num_draft_tokens: int
    planned: Side
    measured: Side

    @property
    def deviation(self) -> float:
        """planned / measured - 1: above 0, the plan promised too much."""
        return self.planned.speed_up / self.measured.speed_up - 1


@dataclass(frozen=True)
class Measurements:
    """Where the step times and the trace of a spec are kept."""

    calibration: Path
    trace: Path

    @classmethod
    def of(cls, spec: Spec, prompts: Sequence[Prompt], max_tokens: int, seconds: float, folder: Path) -> Measurements:
        """Those of batch 1 and of these prompts, made now."""
        made = cls(folder / f"{spec.name}.calibration.json", folder / f"{spec.name}.trace.jsonl")
        pair = pair_of_spec(spec, Sources(spec), "cpu")
        context, prompt = min(_CONTEXT, spec.engine.max_seq_len), min(_PROMPT, spec.engine.max_input_len)
        calibrate(pair, grid(1, spec.max_draft_len + 1, context, prompt, "cpu"), seconds).write(made.calibration)
        record(spec, prompts, made.trace, max_tokens=max_tokens)
        return made


def planned(spec: Spec, kept: Measurements) -> Side:
    """What the plan of a spec says of its own draft length at batch 1, within one process."""
    sizes, gpu = ModelSizes(), find_gpu("cpu")
    curves, _ = inputs.find_curves(spec, sizes(spec), kept.calibration)
    traced, _ = inputs.find_trace(spec, kept.trace)
    prompt, context, _ = inputs.usual_lengths(spec, traced)
    question = Question(
        gpu=gpu,
        device_gb=memory_bytes() / 1e9,
        batches=(1,),
        context=context,
        prompt=prompt,
        memory_batch=1,
        max_draft_tokens=max(spec.default_num_draft_tokens, 1),
        in_process=True,
    )
    assert traced is not None  # a path was given
    plan = make_plan(spec, sizes, inputs.step_times(curves, gpu), traced, question)
    own = plan.methods[0]
    for point in own.points:
        if point.num_draft_tokens == spec.default_num_draft_tokens:
            return Side(point.speed_up, *point.speed_up_interval, point.tokens_per_pass, point.cycle_ms, point.plain_ms)
    raise TrtspecError(f"nothing is planned for {own.method}: {'; '.join(own.notes)}", where=str(spec.source))


def compared(
    method: str, length: int, plan: Side, answers: Sequence[Timed], plain: Sequence[Timed], rounds: int
) -> Row:
    """The plan of a method beside its answers.

    Args:
        answers, plain: to the same prompts in the same order, round by round.
    """
    ratio = ratio_of(*(_sums(side, rounds) for side in (answers, plain)))
    if ratio is None:
        raise TrtspecError("answers of one block have no decoding to time", where="--max-tokens", fix="raise it")
    tokens, seconds = _totals(answers)
    plain_tokens, plain_seconds = _totals(plain)
    passes = sum(len(answer.passes) for answer in answers)
    times = (1e3 * seconds / passes, 1e3 * plain_seconds / plain_tokens)
    return Row(method, length, plan, Side(ratio.value, ratio.low, ratio.high, tokens / passes, *times))


def _totals(answers: Sequence[Timed]) -> tuple[float, float]:
    return sum(answer.num_tokens for answer in answers), sum(answer.seconds for answer in answers)


def _sums(answers: Sequence[Timed], rounds: int) -> np.ndarray:
    """Tokens and seconds `[rounds, prompts, 2]`."""
    flat = np.array([(answer.num_tokens, answer.seconds) for answer in answers], dtype=float)
    return flat.reshape(rounds, -1, 2)


def in_process(
    specs: Sequence[Spec], prompts: Sequence[Prompt], max_tokens: int, rounds: int, seconds: float, folder: Path
) -> list[Row]:
    """All specs, planned and then measured together in one process."""
    kept = {}
    for spec in specs:
        click.echo(f"{spec.name}: step times and acceptance", err=True)
        kept[spec.name] = Measurements.of(spec, prompts, max_tokens, seconds, folder)
    plans = [planned(spec, kept[spec.name]) for spec in specs]
    plain, ours = Ours(specs[0], plain=True), [Ours(spec) for spec in specs]
    check_same_target(ours)
    traced, _ = inputs.find_trace(specs[0], kept[specs[0].name].trace)
    assert traced is not None
    ids = {answer.number: answer.prompt_ids for answer in traced.trace.answers}
    cases = [(prompt, ids[prompt.number]) for prompt in prompts]
    answers = measured([plain, *ours], cases * rounds, max_tokens)
    return [
        compared(each.name, spec.default_num_draft_tokens, plan, answers[each.name], answers[plain.name], rounds)
        for spec, each, plan in zip(specs, ours, plans, strict=True)
    ]


def served(
    config: Path,
    overrides: Sequence[str],
    spec: Spec,
    prompt_file: Path,
    max_tokens: int,
    rounds: int,
    seconds: float,
    folder: Path,
) -> Row:
    """One spec, planned and measured through its served pipeline by the commands that a team uses."""
    click.echo(f"{spec.name}: step times and acceptance", err=True)
    prompts = read_prompts(prompt_file, chats=True)
    kept = Measurements.of(spec, prompts, max_tokens, seconds, folder)
    given: list[object] = [config, *(word for override in overrides for word in ("--set", override))]
    plan, result = folder / f"{spec.name}.plan.json", folder / f"{spec.name}.serve.json"
    traced: list[object] = ["--trace", kept.trace, "--calibration", kept.calibration]
    command("plan", *given, *traced, "--batch", 1, "--json", plan)
    with _server(given):
        load: list[object] = ["--concurrency", 1, "--arms", f"{ON},{OFF}", "--rounds", rounds, "-n", max_tokens]
        command("bench", "serve", *given, "--prompts", prompt_file, *load, "--plan", plan, "--json", result)
    points = json.loads(result.read_text(encoding="utf-8"))["against_plan"]["points"]
    if not points or points[0]["factors"] is None:  # answers of one block, or none at all
        raise TrtspecError("no decoding was timed with drafts and without", where=str(result), fix="see its notes")
    (beside,) = points
    plan_of, ratio = beside["planned"], beside["measured"]
    return Row(
        spec.speculation.method,
        plan_of["num_draft_tokens"],
        Side(plan_of["speed_up"], plan_of["low"], plan_of["high"], **plan_of["factors"]),
        Side(ratio["value"], ratio["low"], ratio["high"], **beside["factors"]),
    )


@contextmanager
def _server(given: Sequence[object]) -> Iterator[None]:
    """A server of a config, for the length of a `with` block."""
    command("serve", *given, "--detach")
    try:
        yield
    finally:
        command("stop", *given)


def command(*words: object) -> None:
    """Run trtspec; what it prints goes to stderr.

    Raises:
        TrtspecError: it failed.
    """
    line = [str(word) for word in words]
    done = subprocess.run([sys.executable, "-m", "trtspec", *line], stdout=sys.stderr, check=False)
    if done.returncode:
        raise TrtspecError(f"trtspec {' '.join(line[:2])} failed with code {done.returncode}", where=line[-1])


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title="planned / measured", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("method", no_wrap=True)
    for name in ("drafts", "speed-up", "off by", "tokens a pass", "cycle, ms", "plain pass, ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        plan, found = row.planned, row.measured
        table.add_row(
            row.method,
            str(row.num_draft_tokens),
            f"{_interval(plan)} / {_interval(found)}",
            f"{row.deviation:+.1%}",
            f"{plan.tokens_per_pass:.2f} / {found.tokens_per_pass:.2f}",
            f"{plan.cycle_ms:.1f} / {found.cycle_ms:.1f}",
            f"{plan.plain_ms:.1f} / {found.plain_ms:.1f}",
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)
    near = sum(abs(row.deviation) <= WITHIN for row in rows)
    click.echo(f"plans within {WITHIN:.0%} of what was measured: {near} of {len(rows)}")


def _interval(side: Side) -> str:
    return f"{side.speed_up:.2f} ({side.low:.2f} to {side.high:.2f})"


@click.command()
@click.argument("configs", type=click.Path(path_type=Path), nargs=-1)
@click.option("--methods", help="Only these, with commas.")
@click.option("--prompts", type=click.IntRange(min=1), default=1, show_default=True, help="Prompts of each category.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Longest answer.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True, help="How often all answer all.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=20.0,
    show_default=True,
    help="Of measuring step times, a method.",
)
@click.option("--served", "through_server", is_flag=True, help="Measure the served pipeline.")
@click.option("--set", "settings", multiple=True, help="Override of all configs, as for trtspec (repeatable).")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of all models, instead of the configs'.")
@click.option("--prompt-file", "files", type=click.Path(path_type=Path), multiple=True, help="Instead of the shipped.")
@click.option("--work-dir", type=click.Path(path_type=Path), default=ROOT / ".cache/benchmarks", help="For all files.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the JSON line to this file, too.")
def main(
    configs: tuple[Path, ...],
    methods: str | None,
    prompts: int,
    max_tokens: int,
    rounds: int,
    seconds: float,
    through_server: bool,
    settings: tuple[str, ...],
    dtype: str | None,
    files: tuple[Path, ...],
    work_dir: Path,
    json_file: Path | None,
) -> None:
    """Put the plans of CONFIGS, those of the quickstart by default, beside what is measured."""
    folder = work_dir.resolve() / "prediction"
    folder.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    try:
        wanted = wanted_configs(configs or CONFIGS, methods)
        if through_server:
            wanted = [config for config in wanted if _switchable(config)]
        specs = [built(config, settings, dtype, work_dir.resolve()) for config in wanted]
        if not specs:
            raise TrtspecError("nothing is left to measure", where="--methods")
        torch.set_num_threads(specs[0].serving.num_threads or hardware()["cores"])
        prompt_file = folder / "prompts.jsonl"
        chosen = _written(chosen_prompts(files or PROMPTS, prompts), prompt_file)
        if through_server:
            overrides = [overrides_of(config, settings, dtype, work_dir.resolve()) for config in wanted]
            rows = [
                served(config, each, spec, prompt_file, max_tokens, rounds, seconds, folder)
                for config, each, spec in zip(wanted, overrides, specs, strict=True)
            ]
        else:
            rows = in_process(specs, chosen, max_tokens, rounds, seconds, folder)
    except TrtspecError as error:
        raise click.ClickException(str(error)) from error
    show(rows)
    line = json.dumps(
        {
            "served": through_server,
            "dtype": specs[0].target.dtype,
            "threads": torch.get_num_threads(),
            "load": [load, os.getloadavg()[0]],
            "prompts": len(chosen),
            "max_tokens": max_tokens,
            "rounds": rounds,
            "rows": [asdict(row) | {"deviation": row.deviation} for row in rows],
        }
    )
    click.echo(line)
    if json_file:
        json_file.write_text(line + "\n", encoding="utf-8")


def _switchable(config: Path) -> bool:
    """Whether a request to its server can switch drafts off; said where it cannot."""
    if (method := load_spec(config).speculation.method) in METHODS:
        return True
    click.echo(f"{method} is left out: a request cannot switch its drafts off", err=True)
    return False


def _written(prompts: Sequence[Prompt], path: Path) -> list[Prompt]:
    """The prompts as a file of their own has them."""
    lines = [{"prompt": prompt.text, "category": prompt.category or ""} for prompt in prompts]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return read_prompts(path)


if __name__ == "__main__":
    main()
