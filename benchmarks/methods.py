"""Every way of drafting against plain decoding, in one run: what it accepts, what it costs and what is left of it.

    python benchmarks/methods.py --dtype bfloat16 --transformers

Builds the engines of the configs (quickstart's by default) under .cache/benchmarks where they are not up to date, and
has every method answer every prompt greedily in this process, one after the other and each time in another order, so
that whatever else the machine does hits all alike. A prompt's own pass is not timed, for anyone.

A cycle is one pass of the target with what was drafted for it, passes without drafts among them. With

    E      tokens a pass: 1 + the sum over places of how often a draft is accepted up to there (survival)
    gamma  draft tokens a pass, of a tree its levels
    c      time of a draft step in plain target steps: all that goes into proposing, of a cascade all lower models
    v      time of the target's pass in plain target steps

the speed-up over plain decoding is E / (gamma c + v): theorem 3.8 of Leviathan et al. 2023 (arXiv 2211.17192) with the
measured E in place of the one for independent acceptance, and v for its 1. All four come from this run: the times are
those of proposals and of calls of the target's engine. How much of it the measured speed-up reaches says what the
cycle around them takes.

Prints the ceilings first, then the figures, then one JSON line. Texts are compared with those of plain decoding; where
one is different, the first different tokens are a tie if their logits are as close as rounding explains. An answer that
goes another way is another text to accept drafts on, so mind the list of ties beside the figures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import click
import torch
from contenders import Contender, Ours, Pass, Timed, transformers_contenders

from trtspec.build.progress import Lines
from trtspec.build.steps import build_graph
from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.parity.workbench import EngineLogits, Workbench
from trtspec.parity.yardstick import TOLERANCES
from trtspec.plan.exit import speed_up
from trtspec.plan.experts import weights_read
from trtspec.prompts import Prompt, read_prompts, spread
from trtspec.spec.load import load_spec
from trtspec.spec.schema import Spec

ROOT = Path(__file__).parents[1]
METHODS = ("draft_target", "early_exit", "ngram", "cascade", "tree", "medusa")
CONFIGS = [
    ROOT / "configs" / f"quickstart{'' if method == 'draft_target' else '-' + method.replace('_', '-')}.yaml"
    for method in METHODS
]
PROMPTS = (ROOT / "configs/prompts/quickstart.jsonl", Path(__file__).with_name("repetitive.jsonl"))
ALL = "all"
COUNTERPARTS = {
    "transformers plain": "none",
    "transformers assisted": "draft_target",
    "transformers early exit": "early_exit",
    "transformers prompt lookup": "ngram",
}


@dataclass(frozen=True)
class Figures:
    """One contender on the prompts of one category; rates are decoding only.

    Attributes:
        tokens_per_s: tokens a second.
        speed_up: over plain decoding in the same run.
        acceptance_length: E, from the survival; None, as what follows, where nothing is drafted, or for foreign
            decoders.
        accepted: passes by the number of drafts that they kept, from 0 on.
        num_draft_tokens: gamma.
        draft_cost, verify_cost: c and v; c is 0 where nothing was drafted.
        by_position: how often a draft is accepted where all before it were, over passes that had one there.
        predicted: E / (gamma c + v).
        reached: measured over predicted.
    """

    num_prompts: int
    tokens: int
    seconds: float
    tokens_per_s: float
    speed_up: float
    acceptance_length: float | None = None
    accepted: list[int] | None = None
    num_draft_tokens: float | None = None
    draft_cost: float | None = None
    verify_cost: float | None = None
    by_position: list[float] | None = None
    predicted: float | None = None
    reached: float | None = None


def figures(answers: Sequence[Timed], plain: Sequence[Timed]) -> Figures:
    """What `answers` are worth beside the plain ones to the same prompts."""
    tokens, seconds = _totals(answers)
    rate, ratio = tokens / seconds, tokens / seconds / _rate(plain)
    passes = [one for answer in answers for one in answer.passes]
    if not any(one.drafted for one in passes):
        return Figures(len(answers), tokens, seconds, rate, ratio)
    step = _mean(one.target_s for answer in plain for one in answer.passes)
    longest = max(one.drafted for one in passes)
    survival = [_mean(one.accepted >= place for one in passes) for place in range(1, longest + 1)]
    gamma, length = _mean(one.drafted for one in passes), 1.0 + sum(survival)
    draft_cost = _mean(one.draft_s for one in passes) / step / gamma
    verify_cost = _mean(one.target_s for one in passes) / step
    predicted = speed_up(length, gamma, draft_cost, verify_cost)  # type: ignore[arg-type]  # gamma is a mean here
    return Figures(
        num_prompts=len(answers),
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=rate,
        speed_up=ratio,
        acceptance_length=length,
        accepted=[sum(one.accepted == count for one in passes) for count in range(longest + 1)],
        num_draft_tokens=gamma,
        draft_cost=draft_cost,
        verify_cost=verify_cost,
        by_position=[_acceptance(passes, place) for place in range(1, longest + 1)],
        predicted=predicted,
        reached=ratio / predicted,
    )


def _acceptance(passes: Iterable[Pass], place: int) -> float:
    """P(the draft at `place`, from 1 on, is accepted | those before it were)."""
    judged = [one.accepted >= place for one in passes if one.drafted >= place and one.accepted >= place - 1]
    return _mean(judged) if judged else 0.0


def _totals(answers: Sequence[Timed]) -> tuple[int, float]:
    return sum(answer.num_tokens for answer in answers), sum(answer.seconds for answer in answers) or float("inf")


def _rate(answers: Sequence[Timed]) -> float:
    tokens, seconds = _totals(answers)
    return tokens / seconds


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


@dataclass(frozen=True)
class Difference:
    """Where a text leaves that of plain decoding: position in the answer, and by how many logits plain's is ahead."""

    contender: str
    prompt: int
    category: str
    position: int
    gap: float
    tie: bool


class Comparison:
    """Tells ties from faults; loads the target only when there is a difference.

    Args:
        plain: whose texts are right.
    """

    def __init__(self, plain: Ours) -> None:
        self._plain, self._logits = plain, None
        self._tolerance = TOLERANCES[plain.spec.target.dtype]

    def difference(
        self, name: str, prompt: Prompt, ids: Sequence[int], expected: Timed, answer: Timed
    ) -> Difference | None:
        """The first different token; None if there is none."""
        if answer.ids == expected.ids:
            return None
        end = self._plain.configs["target"].eos_token_ids[0]
        pairs = zip((*expected.ids, end), (*answer.ids, end), strict=False)
        position, (right, wrong) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
        self._logits = self._logits or EngineLogits(self._plain.configs["target"])  # type: ignore[assignment]
        assert self._logits is not None
        row = self._logits.logits([*ids, *expected.ids[:position]])[-1]
        gap = float(row[right] - row[wrong])
        return Difference(name, prompt.number, prompt.category or "", position, gap, abs(gap) <= self._tolerance)


def memory_rate(dtype: torch.dtype) -> float:
    """Bytes a second that matrix-vector products read here, best of some; 128 MiB, more than caches hold."""
    matrix = torch.ones(2**27 // dtype.itemsize // 4096, 4096, dtype=dtype)
    vector, best = torch.ones(4096, dtype=dtype), float("inf")
    for _ in range(8):
        begin = time.perf_counter()
        torch.mv(matrix, vector)
        best = min(best, time.perf_counter() - begin)
    return matrix.nbytes / best


def ceilings(plain: Ours, contenders: Sequence[Ours], model: ModelConfig) -> dict[str, Any]:
    """What no run can beat: plain decoding that only reads its weights, and drafts that are free and always right."""
    dtype = getattr(torch, plain.spec.target.dtype)
    rate = memory_rate(dtype)
    return {
        "memory_gb_per_s": rate / 1e9,
        "plain_tokens_per_s": rate / (weights_read(model, model.num_hidden_layers, 1) * dtype.itemsize),
        "speed_up": {ours.name: ours.most_drafts + 1 for ours in contenders},
    }


def overrides_of(config: Path, settings: Sequence[str], dtype: str | None, directory: Path) -> list[str]:
    """What turns a config into what is measured: `settings`, another dtype if one is named, and its place."""
    spec = load_spec(config, settings)
    overrides = [*settings]
    overrides += [f"output.{what}={directory / what / spec.name}" for what in ("engines", "model_repo")]
    if dtype:
        own = {"draft": "speculation.draft", "middle": "speculation.cascade.middle"}
        shared = spec.speculation.method == "early_exit"  # its draft is the target's
        roles = [role for role in spec.models if role in own and not shared]
        overrides += [f"{section}.dtype={dtype}" for section in ("target", *(own[role] for role in roles))]
        if spec.speculation.method == "tree" and spec.speculation.tree:
            further = [draft.model_dump(mode="json") | {"dtype": dtype} for draft in spec.speculation.tree.drafts]
            overrides.append(f"speculation.tree.drafts={json.dumps(further)}")
        if spec.speculation.method == "cascade" and spec.speculation.cascade:
            further = [middle.model_dump(mode="json") | {"dtype": dtype} for middle in spec.speculation.cascade.middles]
            overrides.append(f"speculation.cascade.middles={json.dumps(further)}")
    return overrides


def built(config: Path, settings: Sequence[str], dtype: str | None, directory: Path) -> Spec:
    """The spec of a config, in another dtype if one is named, with its engines up to date under `directory`."""
    spec = load_spec(config, overrides_of(config, settings, dtype, directory))
    report = build_graph(spec).run(Lines(lambda line: click.echo(f"  {line}", err=True)))
    if report.error:
        raise report.error
    return spec


def chosen_prompts(paths: Sequence[Path], per_category: int) -> list[Prompt]:
    """So many prompts of each category, spread over the files."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for path in paths:
        for prompt in read_prompts(path):
            groups[prompt.category or ""].append(prompt)
    return list(chain.from_iterable(spread(group, per_category) for group in groups.values()))


@click.command()
@click.argument("configs", type=click.Path(path_type=Path), nargs=-1)
@click.option("--prompts", type=click.IntRange(min=1), default=2, show_default=True, help="Prompts of each category.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=96, show_default=True, help="Longest answer.")
@click.option("--methods", help="Only these, with commas; plain decoding always.")
@click.option("--set", "settings", multiple=True, help="Override of all configs, as for trtspec (repeatable).")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of all models, instead of the configs'.")
@click.option("--transformers", is_flag=True, help="Time transformers' generate beside them.")
@click.option("--prompt-file", "files", type=click.Path(path_type=Path), multiple=True, help="Instead of the shipped.")
@click.option("--work-dir", type=click.Path(path_type=Path), default=ROOT / ".cache/benchmarks", help="For engines.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the JSON line to this file, too.")
def main(
    configs: tuple[Path, ...],
    prompts: int,
    max_tokens: int,
    methods: str | None,
    settings: tuple[str, ...],
    dtype: str | None,
    transformers: bool,
    files: tuple[Path, ...],
    work_dir: Path,
    json_file: Path | None,
) -> None:
    """Measure the methods of CONFIGS, those of the quickstart by default."""
    try:
        wanted = wanted_configs(configs or CONFIGS, methods)
        specs = [built(config, settings, dtype, work_dir.resolve()) for config in wanted]
        result = run(specs, chosen_prompts(files or PROMPTS, prompts), max_tokens, transformers)
    except TrtspecError as error:
        raise click.ClickException(str(error)) from error
    line = json.dumps(result)
    click.echo(line)
    if json_file:
        json_file.write_text(line + "\n", encoding="utf-8")
    if any(not difference["tie"] for difference in result["differences"]):
        raise click.ClickException("a text differs from that of plain decoding by more than a tie")


def wanted_configs(configs: Sequence[Path], methods: str | None) -> list[Path]:
    """The configs whose method is among `methods`."""
    by_method: dict[str, Path] = {}
    for config in configs:
        other = by_method.setdefault(load_spec(config).speculation.method, config)
        if other is not config:
            raise TrtspecError(f"the same method as {other}", where=str(config), expected="one config a method")
    names = methods.split(",") if methods else list(by_method)
    if unknown := sorted(set(names) - {"none", *by_method}):
        raise TrtspecError(f"no config for method {unknown[0]}", where="--methods", expected=", ".join(by_method))
    if not (wanted := [by_method[name] for name in names if name != "none"]):
        raise TrtspecError("nothing to compare plain decoding with", where="--methods", expected=", ".join(by_method))
    return wanted


def check_same_target(contenders: Sequence[Ours]) -> None:
    """Only texts of one model can be compared."""
    for ours in contenders:
        if ours.target != contenders[0].target:
            raise TrtspecError(
                f"another target, or in another dtype, than in {contenders[0].spec.source}", where=str(ours.spec.source)
            )


def run(specs: Sequence[Spec], prompts: Sequence[Prompt], max_tokens: int, transformers: bool) -> dict[str, Any]:
    """Measure and print; returns what the JSON line says."""
    plain = Ours(specs[0], plain=True)
    ours = [Ours(spec) for spec in specs]
    check_same_target(ours)
    limits = ceilings(plain, ours, plain.configs["target"].model)
    show_ceilings(limits)
    end_ids = plain.configs["target"].eos_token_ids
    workbench, load = Workbench(specs[0], plain.configs), os.getloadavg()[0]
    cases = [(prompt, workbench.case(prompt).ids) for prompt in prompts]
    foreign = working(transformers_contenders(specs, end_ids), cases[0][1]) if transformers else ()
    contenders: list[Contender] = [plain, *ours, *foreign]
    answers = measured(contenders, cases, max_tokens)
    comparison, differences = Comparison(plain), []
    for contender in contenders[1:]:
        for (prompt, ids), expected, answer in zip(cases, answers["none"], answers[contender.name], strict=True):
            found = comparison.difference(contender.name, prompt, ids, expected, answer)
            differences += [found] if found else []
    categories = [prompt.category or "" for prompt in prompts]
    rows = {name: by_category(given, answers["none"], categories) for name, given in answers.items()}
    show_rows(rows)
    counterparts = {
        f"{own} / {other}": rows[own][ALL].tokens_per_s / rows[other][ALL].tokens_per_s
        for other, own in COUNTERPARTS.items()
        if other in rows
    }
    for pair, ratio in counterparts.items():
        click.echo(f"tokens/s, {pair}: {ratio:.2f}")
    show_differences(differences)
    return {
        "dtype": specs[0].target.dtype,
        "threads": torch.get_num_threads(),
        "load": [load, os.getloadavg()[0]],
        "max_tokens": max_tokens,
        "ceilings": limits,
        "methods": {name: {key: asdict(row) for key, row in group.items()} for name, group in rows.items()},
        "counterparts": counterparts,
        "differences": [asdict(difference) for difference in differences],
    }


def working(contenders: Iterable[Contender], prompt: Sequence[int]) -> Iterator[Contender]:
    """Those of another project that can answer; why one cannot is printed."""
    for contender in contenders:
        try:
            contender.answer(prompt, 16)
        except Exception as error:
            click.echo(f"{contender.name} is left out, it failed: {type(error).__name__}: {error}")
        else:
            yield contender


def measured(
    contenders: Sequence[Contender], cases: Sequence[tuple[Prompt, Sequence[int]]], max_tokens: int
) -> dict[str, list[Timed]]:
    """Every contender's answers to all cases, in order; each has answered a short one before."""
    answers: dict[str, list[Timed]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        contender.answer(cases[0][1], min(max_tokens, 16))
    for number, (prompt, ids) in enumerate(cases):
        click.echo(f"prompt {number + 1} of {len(cases)} ({prompt.category or 'no category'})", err=True)
        shift = number % len(contenders)
        for contender in (*contenders[shift:], *contenders[:shift]):
            answers[contender.name].append(contender.answer(ids, max_tokens))
    return answers


def by_category(answers: Sequence[Timed], plain: Sequence[Timed], categories: Sequence[str]) -> dict[str, Figures]:
    """The figures over all prompts, then of each category."""
    groups = {ALL: list(range(len(answers)))}
    for number, category in enumerate(categories):
        groups.setdefault(category, []).append(number)
    return {
        name: figures([answers[number] for number in group], [plain[number] for number in group])
        for name, group in groups.items()
    }


COLUMNS: dict[str, Callable[[Figures], float | None]] = {
    "tokens/s": lambda row: row.tokens_per_s,
    "speed-up": lambda row: row.speed_up,
    "E": lambda row: row.acceptance_length,
    "gamma": lambda row: row.num_draft_tokens,
    "c": lambda row: row.draft_cost,
    "v": lambda row: row.verify_cost,
    "E/(gamma c+v)": lambda row: row.predicted,
    "reached": lambda row: row.reached,
}


def show_ceilings(limits: dict[str, Any]) -> None:
    """Print them."""
    click.echo(
        f"ceiling: reading the weights at {limits['memory_gb_per_s']:.1f} GB/s allows "
        f"{limits['plain_tokens_per_s']:.1f} tokens/s plain"
    )
    most = ", ".join(f"{name} {number}" for name, number in limits["speed_up"].items())
    click.echo(f"ceiling: times plain, if every draft were free and accepted: {most}")


def show_rows(rows: dict[str, dict[str, Figures]]) -> None:
    """Print the figures: a table on a terminal, plain lines elsewhere."""
    lines = [
        (name, category, *(_shown(column(row)) for column in COLUMNS.values()), _shown_all(row.by_position))
        for name, group in rows.items()
        for category, row in group.items()
    ]
    heads = ("method", "prompts", *COLUMNS, "accepted by position")
    if not sys.stdout.isatty():
        for line in lines:
            click.echo("  ".join(f"{head} {cell}" for head, cell in zip(heads, line, strict=True) if cell != "-"))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*heads)
    for line in lines:
        table.add_row(*line, style="bold" if line[1] == ALL else None)
    Console().print(table)


def show_differences(differences: Sequence[Difference]) -> None:
    """Print every text that is not plain's."""
    ties = sum(difference.tie for difference in differences)
    click.echo(f"texts that differ from plain decoding: {len(differences)}, of them ties: {ties}")
    for one in differences:
        kind = "tie" if one.tie else "NOT A TIE"
        where = f"{one.contender}, {one.category} prompt of line {one.prompt}, token {one.position}"
        click.echo(f"  {where}: {kind}, plain's is ahead by {one.gap:.4f}")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _shown_all(values: Sequence[float] | None) -> str:
    return "-" if values is None else " ".join(f"{value:.2f}" for value in values)


if __name__ == "__main__":
    main()
