"""The pipeline under a real Triton server on this machine.

    python benchmarks/bls [cycle] [throughput] [faults] [soak]

\b
cycle       what a cycle costs with engines that cost nothing, beside two bare hops
throughput  the quickstart's tokens a second: beside the engines in process, and with 1 to 16 clients, drafting, not
            drafting and with the adaptive draft length
faults      mixed requests while the draft is killed, clients leave and the queue is full (about two minutes)
soak        memory under steady load (ten minutes)

Without a name all but soak run. Prints the ceilings and the figures as they come, then one JSON line. The exit code is
1 if faults or soak found something wrong; speed is never a fault.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from serving import free_ports

from trtspec.errors import TrtspecError

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
_FEW = click.IntRange(min=1)


@click.command(help=__doc__)
@click.argument("parts", nargs=-1, type=click.Choice(["cycle", "throughput", "faults", "soak"]))
@click.option("--rounds", type=_FEW, default=5, show_default=True, help="Rounds of cycle and throughput.")
@click.option("--cycles", type=_FEW, default=60, show_default=True, help="cycle: cycles of one request.")
@click.option("--config", type=click.Path(path_type=Path), default=QUICKSTART, help="throughput: the spec.")
@click.option("--set", "settings", multiple=True, help="throughput: override of the spec (repeatable).")
@click.option("--prompts", type=_FEW, default=6, show_default=True, help="throughput: prompts of the spec's file.")
@click.option("--max-tokens", type=_FEW, default=48, show_default=True, help="throughput: tokens of every answer.")
@click.option(
    "--clients",
    callback=lambda context, option, text: _counts(text),
    default="1,2,4,8,16",
    show_default=True,
    help="throughput: clients at the same time.",
)
@click.option("--warmups", type=_FEW, default=2, show_default=True, help="throughput: rounds before those that count.")
@click.option("--requests", type=_FEW, default=200, show_default=True, help="faults: requests to be answered.")
@click.option("--kills", type=_FEW, default=8, show_default=True, help="faults: how often the draft is killed.")
@click.option("--kill-period", default=9.0, show_default=True, help="faults: seconds between two of them, about.")
@click.option("--faults-clients", type=_FEW, default=16, show_default=True, help="faults: clients at the same time.")
@click.option("--soak-seconds", default=600.0, show_default=True, help="soak: how long.")
@click.option("--soak-warmup", default=150.0, show_default=True, help="soak: seconds that do not count.")
@click.option("--soak-period", default=2.0, show_default=True, help="soak: seconds between two samples.")
@click.option("--soak-clients", type=_FEW, default=4, show_default=True, help="soak: clients at the same time.")
@click.option("--work-dir", type=click.Path(path_type=Path), default=ROOT / ".cache/benchmarks", help="For engines.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the JSON line to this file, too.")
def main(parts: tuple[str, ...], json_file: Path | None, **options: Any) -> None:
    """Run the parts."""
    runs: dict[str, Callable[..., tuple[Any, bool]]] = {
        "cycle": cycle,
        "throughput": throughput,
        "faults": faults,
        "soak": soak,
    }
    load = os.getloadavg()[0]
    result: dict[str, Any] = {}
    failed = []
    try:
        with tempfile.TemporaryDirectory(prefix="trtspec-bls-") as root:
            for part in dict.fromkeys(parts or ("cycle", "throughput", "faults")):
                click.echo(f"-- {part}")
                (directory := Path(root, part)).mkdir()
                result[part], good = runs[part](directory, **options)
                failed += [] if good else [part]
    except TrtspecError as error:
        raise click.ClickException(str(error)) from error
    line = json.dumps({"load": [load, os.getloadavg()[0]], **result})
    click.echo(line)
    if json_file:
        json_file.write_text(line + "\n", encoding="utf-8")
    if failed:
        raise click.ClickException(f"not as it should be: {', '.join(failed)}")


def cycle(
    root: Path, *, config: Path, settings: tuple[str, ...], work_dir: Path, cycles: int, rounds: int, **_: Any
) -> tuple[Any, bool]:
    """Part 1."""
    from cycle import measure
    from throughput import built

    rows = []
    spec = built(config, settings, work_dir)
    click.echo("ceiling: a pipeline that costs nothing itself takes as long as the bare hops, 1.00 times")
    for row in measure(spec.model_repo_dir, root, tuple(free_ports().values()), cycles, rounds):  # type: ignore[arg-type]
        sent = "logits" if row.with_logits else "ids only"
        answered = "streaming" if row.streaming else "one answer"
        answering = f", {row.bare_streaming:.2f} ms with a response each" if row.bare_streaming else ""
        click.echo(
            f"vocabulary {row.vocab_size}, {sent}, {row.num_clients} clients, {answered}: bare hops {row.bare:.2f} ms"
            f"{answering}; pipeline {row.pipeline:.2f} ms a cycle, {row.ratio:.2f} times"
        )
        rows.append(asdict(row) | {"ratio": row.ratio})
    return rows, True


def throughput(
    root: Path,
    *,
    config: Path,
    settings: tuple[str, ...],
    work_dir: Path,
    prompts: int,
    max_tokens: int,
    clients: list[int],
    rounds: int,
    warmups: int,
    **_: Any,
) -> tuple[Any, bool]:
    """Part 2."""
    from throughput import FIXED, GOAL_ADAPTIVE, GOAL_IN_PROCESS, IN_PROCESS, Bench, built

    spec = built(config, settings, work_dir)
    click.echo("ceiling: nothing through Triton is faster than in process, 1.00 times")
    click.echo(f"ceiling: drafting gives at most {spec.default_num_draft_tokens + 1} times the tokens of not drafting")
    click.echo(
        "ceiling: adaptive is at best the better of the two at each number of clients, 1.00 times or little more"
    )
    click.echo(f"medians (least to most) of {rounds} rounds; {warmups} rounds before them, in which adaptive learns")
    result: dict[str, Any] = {"threads": spec.serving.num_threads, "max_tokens": max_tokens, "clients": []}
    with Bench(spec, root / "state", prompts, max_tokens) as bench:
        beside = bench.beside_in_process(rounds)
        click.echo(f"1 client, {IN_PROCESS}: {beside.rates[IN_PROCESS]} tokens/s")
        for name, ratio in beside.ratios.items():
            verdict = _verdict(ratio.median, GOAL_IN_PROCESS)
            click.echo(f"1 client, {name}: {beside.rates[name]} tokens/s, {ratio} times in process, {verdict}")
        click.echo(f"answers with other tokens than in process: {beside.other_answers}")
        result["in_process"] = asdict(beside) | {"ratios": {name: r.median for name, r in beside.ratios.items()}}
        for row in bench.crowded(clients, rounds, warmups):
            figures = ", ".join(f"{arm} {rates}" for arm, rates in row.rates.items())
            verdict = _verdict(row.ratio.median, GOAL_ADAPTIVE)
            click.echo(f"{row.clients} clients, tokens/s: {figures}; {row.ratio} times {row.better}, {verdict}")
            pays = row.better == FIXED
            result["clients"].append(asdict(row) | {"drafting_pays": pays, "adaptive_ratio": row.ratio.median})
    return result, True


def faults(
    root: Path, *, requests: int, kills: int, kill_period: float, faults_clients: int, **_: Any
) -> tuple[Any, bool]:
    """Part 3."""
    from faults import judge, run

    after = run(root, requests=requests, kills=kills, kill_period_s=kill_period, clients=faults_clients)
    findings = judge(after)
    for finding in findings:
        click.echo(f"{finding.promise}: {'yes' if finding.kept else 'NO'} ({finding.found})")
    return [asdict(finding) for finding in findings], all(finding.kept for finding in findings)


def soak(
    root: Path, *, soak_seconds: float, soak_warmup: float, soak_period: float, soak_clients: int, **_: Any
) -> tuple[Any, bool]:
    """Part 4."""
    from soak import run

    soaked = run(root, seconds=soak_seconds, warmup_s=soak_warmup, period_s=soak_period, clients=soak_clients)
    for name, line in soaked.trends.items():
        verdict = "steady" if line.steady else "settling" if line.settling else "GROWS"
        click.echo(f"{name}: {line.mib:.1f} MiB, {line.slope:+.2f} ± {line.error:.2f} MiB an hour, {verdict}")
    click.echo(f"requests: {', '.join(f'{count} {kind}' for kind, count in soaked.requests.items() if count)}")
    click.echo("verdict: " + ("steady" if soaked.steady else "NOT steady"))
    return asdict(soaked) | {"steady": soaked.steady}, soaked.steady


def _counts(text: str) -> list[int]:
    """Numbers of clients, with commas between them."""
    try:
        counts = [int(number) for number in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise click.BadParameter(f"{text!r}; expected numbers from 1 on, such as 1,4,16")
    return counts


def _verdict(ratio: float, goal: float) -> str:
    return f"goal {goal:g} {'met' if ratio >= goal else 'MISSED'}"


if __name__ == "__main__":
    main()
