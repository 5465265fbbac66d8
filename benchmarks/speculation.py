"""Speculative against plain decoding with the engines of a spec, side by side in one run.

    python benchmarks/speculation.py configs/quickstart.yaml --num-draft-tokens 2 --num-draft-tokens 4

Every prompt is answered once with each setting, one after the other, greedily, in this process, so that whatever else
the machine does hits all settings alike. The first prompt warms up and is not counted. Prints tokens per target pass,
tokens/s, the ratio to plain decoding, and whether all texts were the same; the last line is JSON.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path

import click

from trtspec.decoding.sampling import GREEDY
from trtspec.parity.prompts import read_prompts, spread
from trtspec.parity.subjects import Answer, Query
from trtspec.parity.suite import ENGINES, Workbench, engine_configs
from trtspec.spec.load import load_spec


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, help="Override of the spec, as for trtspec.")
@click.option(
    "--num-draft-tokens", "settings", type=click.IntRange(min=1), multiple=True, default=(2, 4), show_default=True
)
@click.option(
    "--num-prompts", type=click.IntRange(min=2), default=25, show_default=True, help="The first one warms up."
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=96, show_default=True)
def main(
    config: Path, overrides: tuple[str, ...], settings: tuple[int, ...], num_prompts: int, max_tokens: int
) -> None:
    """Measure what speculation gains with the engines of CONFIG."""
    spec = load_spec(config, overrides)
    prompts = spread(read_prompts(spec.base_dir / str(spec.parity.prompts)), num_prompts)
    workbench = Workbench(spec, engine_configs(spec))
    seconds: dict[int, float] = defaultdict(float)
    tokens: dict[int, int] = defaultdict(int)
    passes: dict[int, int] = defaultdict(int)
    different = 0
    with workbench.subject(ENGINES, None) as subject:
        for number, prompt in enumerate(prompts):
            case = workbench.case(prompt)
            answers: dict[int, Answer] = {}
            for k in (0, *settings):
                begin = time.perf_counter()
                answers[k] = subject.generate(Query(case.text, case.ids, max_tokens, GREEDY, k))
                if number:
                    seconds[k] += time.perf_counter() - begin
                    tokens[k] += len(answers[k].tokens)
                    passes[k] += len(answers[k].tokens) if k == 0 else len(answers[k].blocks)
            different += len({answer.ids for answer in answers.values()}) - 1
    rows = []
    for k in (0, *settings):
        rate = tokens[k] / seconds[k]
        row = {
            "num_draft_tokens": k,
            "tokens_per_target_pass": round(tokens[k] / passes[k], 3),
            "tokens_per_s": round(rate, 2),
            "ratio_to_plain": round(rate * seconds[0] / tokens[0], 3),
        }
        rows.append(row)
        click.echo("  ".join(f"{name} {value}" for name, value in row.items()))
    click.echo(f"texts that differ from plain decoding: {different}")
    click.echo(json.dumps({"config": str(config), "prompts": len(prompts) - 1, "rows": rows, "different": different}))


if __name__ == "__main__":
    main()
