"""How often the sampled checks raise false alarms, and how often they find each broken sampler of the zoo.

    python tests/parity/calibrate.py --runs 1000

A small world: 16 ids, four prompts, three settings (`parity_doubles`, `parity_zoo`). One run is both sampled checks of
the right sampler with a seed of its own; `calibration.md` beside this file is what it printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from parity_doubles import CUT, FULL, trial
from parity_zoo import ZOO, Sampler

from trtspec.parity import power
from trtspec.parity.draws import check_draws
from trtspec.parity.result import Verdict
from trtspec.parity.sampled import PENALISED, check_sampled, collect, judge
from trtspec.parity.statistics import Evidence
from trtspec.parity.trial import Trial

LEVELS = (0.001, 0.01, 0.05)
_NUM_CHECKS = 2  # sampled and draws share the rate


def one_run(made: Trial) -> tuple[float, tuple[Evidence, ...]]:
    """The smallest rate of false alarms at which a run on the right sampler raises one, and its tests.

    Holm rejects something at a rate alpha exactly if the smallest of m p-values is alpha / m at most; a look has its
    share of the rate, a check half of it.
    """
    stream, findings = collect(made, Sampler())
    assert not findings, findings
    rates, before = [], 0.0
    for fraction in power.LOOKS:
        tests = judge(stream[: max(1, int(len(stream) * fraction))], len(made.samplings))
        rates.append(len(tests) * min(test.p_value for test in tests) / (fraction - before))
        before = fraction
    draws = check_draws(made, Sampler()).statistics
    rates.append(len(draws) * min(test.p_value for test in draws))
    return _NUM_CHECKS * min(rates), (*tests, *draws)


def calibrated(runs: int, tokens: int, draws: int, seed: int) -> Iterator[str]:
    """Lines of the table of false alarms."""
    made = trial(num_samples=tokens, num_draws=draws, samplings=(FULL, CUT, PENALISED))
    rates, p_values = [], {}
    for number in range(runs):
        rate, tests = one_run(replace(made, seed=seed + number))
        rates.append(rate)
        for test in tests:
            p_values.setdefault(test.name, []).append(test.p_value)
        if sys.stderr.isatty():
            click.echo(f"\r{number + 1}/{runs}", nl=False, err=True)
    yield "| false-alarm rate asked for | runs with a false alarm | of |"
    yield "|---|---|---|"
    for level in LEVELS:
        yield f"| {level} | {sum(rate <= level for rate in rates)} | {runs} |"
    yield ""
    yield "| test (complete sample) | p <= 0.001 | p <= 0.01 | p <= 0.05 | said nothing (p = 1) |"
    yield "|---|---|---|---|---|"
    for name, values in p_values.items():
        counts = " | ".join(str(sum(value <= level for value in values)) for level in LEVELS)
        yield f"| {name} | {counts} | {sum(value == 1.0 for value in values)} |"
    expected = " | ".join(f"{runs * level:g}" for level in LEVELS)
    yield f"| expected of an exact test | {expected} | |"


def found(runs: int, seed: int) -> Iterator[str]:
    """Lines of the table of the zoo."""
    yield "| broken sampler | budget (tokens) | found | of | tokens until then (median) |"
    yield "|---|---|---|---|---|"
    for name, exhibit in ZOO.items():
        needed = []
        for number in range(runs):
            check = check_sampled(exhibit.trial(seed + number), exhibit.make())
            if check.verdict == Verdict.FAULT:
                needed.append(int(check.evidence.split()[0]))
        median = f"{np.median(needed):.0f}" if needed else "-"
        yield f"| {name} | {exhibit.budget} | {len(needed)} | {runs} | {median} |"


@click.command()
@click.option("--runs", default=1000, show_default=True, help="Runs of the right sampler.")
@click.option("--zoo-runs", default=10, show_default=True, help="Runs of each broken sampler.")
@click.option("--tokens", default=300, show_default=True, help="New tokens of the check of transforms in each run.")
@click.option("--draws", default=80, show_default=True, help="Answers of the check of draws in each run.")
@click.option("--seed", default=0, show_default=True, help="Of the first run; each next has the next.")
def main(runs: int, zoo_runs: int, tokens: int, draws: int, seed: int) -> None:
    """Print both tables as Markdown."""
    click.echo("# Calibration of the sampled checks\n")
    click.echo(
        f"`python tests/parity/calibrate.py --runs {runs} --zoo-runs {zoo_runs} --tokens {tokens} --draws {draws} "
        f"--seed {seed}`\n"
    )
    click.echo(f"## The right sampler: {tokens} tokens, {draws} draws\n")
    for line in calibrated(runs, tokens, draws, seed):
        click.echo(line)
    if zoo_runs:
        click.echo("\n## The zoo, at a false-alarm rate of 0.001 for the check\n")
        for line in found(zoo_runs, seed):
            click.echo(line)


if __name__ == "__main__":
    main()
