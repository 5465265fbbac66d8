"""How often the sampled checks raise false alarms, and how often they find each broken sampler of the zoo.

    python tests/parity/calibrate.py --runs 1000

A small world: 16 ids, four prompts, three settings (`parity_doubles`, `parity_zoo`). One run is both sampled checks of
the right sampler with a seed of its own. Runs can be divided among several commands by `--seed`: run k of seed s is run
0 of seed s + k. `calibration.md` beside this file is what it printed.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from parity_doubles import CUT, DRAFT, FULL, TARGET, trial
from parity_zoo import HARD, ZOO, Mixture, Sampler

from trtspec.parity import power
from trtspec.parity.draws import check_draws
from trtspec.parity.result import Verdict
from trtspec.parity.sampled import PENALISED, check_sampled, collect, judge, num_tests
from trtspec.parity.statistics import Evidence
from trtspec.parity.subjects import END
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


def found(runs: int, seed: int, only: str, budgets: Sequence[int]) -> Iterator[str]:
    """Lines of the table of the zoo: of the members that have `only` in their names, at their own or other budgets."""
    yield "| broken sampler | budget (tokens) | found | of | tokens until then (median) |"
    yield "|---|---|---|---|---|"
    for name, exhibit in (ZOO | HARD).items():
        for budget in (budgets or [exhibit.budget]) if only in name else ():
            needed = list(_needed(exhibit.make(), [exhibit.trial(seed + number, budget) for number in range(runs)]))
            yield f"| {name} | {budget} | {len(needed)} | {runs} | {_median(needed)} |"


def promised(runs: int, seed: int, shares: Sequence[float]) -> Iterator[str]:
    """Lines of the table of mixtures: how often the plan's number of tokens finds what it was planned for."""
    yield "| share of the draft | total variation, mean | tokens planned | found | of | tokens until then (median) |"
    yield "|---|---|---|---|---|---|"
    overlap = [np.minimum(p, q).sum() for p, q in zip(np.exp(TARGET.rows), np.exp(DRAFT.rows), strict=True)]
    for share in shares:
        sampler = Mixture()
        sampler.share = share
        made = trial(samplings=(FULL,), num_samples=2000, seed=seed)
        before = [token.token for token in collect(made, sampler)[0] if token.token != END]
        variation = share * float(1.0 - np.array(overlap)[before].mean())
        tokens = power.tokens_needed(variation, power.level(made.alpha, num_tests(1)))
        trials = [replace(made, num_samples=tokens, seed=seed + number) for number in range(runs)]
        needed = list(_needed(sampler, trials))
        yield f"| {share} | {variation:.4f} | {tokens} | {len(needed)} | {runs} | {_median(needed)} |"


def _needed(sampler: Sampler, trials: Iterable[Trial]) -> Iterator[int]:
    """Tokens of each run that found the sampler broken."""
    for made in trials:
        check = check_sampled(made, sampler)
        if check.verdict == Verdict.FAULT:
            yield int(check.evidence.split()[0])


def _median(numbers: Sequence[int]) -> str:
    return f"{np.median(numbers):.0f}" if numbers else "-"


@click.command()
@click.option("--runs", default=1000, show_default=True, help="Runs of the right sampler.")
@click.option("--zoo-runs", default=10, show_default=True, help="Runs of each broken sampler.")
@click.option("--only", default="", help="Of the zoo, those with this in their names.")
@click.option("--budget", "budgets", type=int, multiple=True, help="Tokens for the zoo, in place of each one's own.")
@click.option("--plan-runs", default=0, show_default=True, help="Runs of each mixture of target and draft.")
@click.option("--share", "shares", type=float, multiple=True, default=(0.02, 0.1, 0.2), show_default=True)
@click.option("--tokens", default=300, show_default=True, help="New tokens of the check of transforms in each run.")
@click.option("--draws", default=80, show_default=True, help="Answers of the check of draws in each run.")
@click.option("--seed", default=0, show_default=True, help="Of the first run; each next has the next.")
def main(
    runs: int,
    zoo_runs: int,
    only: str,
    budgets: tuple[int, ...],
    plan_runs: int,
    shares: tuple[float, ...],
    tokens: int,
    draws: int,
    seed: int,
) -> None:
    """Print the tables as Markdown, those with 0 runs left out."""
    click.echo("# Calibration of the sampled checks\n")
    click.echo(f"`python tests/parity/calibrate.py {shlex.join(sys.argv[1:])}`")
    tables = {
        f"The right sampler: {tokens} tokens, {draws} draws": (runs, calibrated(runs, tokens, draws, seed)),
        "The zoo, at a false-alarm rate of 0.001 for the check": (zoo_runs, found(zoo_runs, seed, only, budgets)),
        "The plan: a total variation of X needs N tokens": (plan_runs, promised(plan_runs, seed, shares)),
    }
    for title, (number, lines) in tables.items():
        if number:
            click.echo(f"\n## {title}\n")
            for line in lines:
                click.echo(line)


if __name__ == "__main__":
    main()
