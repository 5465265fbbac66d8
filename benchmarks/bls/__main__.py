"""The pipeline under a real Triton server on this machine: `python benchmarks/bls`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click
from cycle import measure

ROOT = Path(__file__).parents[2]


@click.command(help=__doc__)
@click.option("--cycles", default=60, show_default=True, help="Cycles of one request.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--repository", type=click.Path(path_type=Path), default=ROOT / "model_repo" / "quickstart")
def main(cycles: int, rounds: int, repository: Path) -> None:
    """Run the benchmark."""
    if not repository.is_dir():
        sys.exit("error: the quickstart is not built; run: trtspec build configs/quickstart.yaml")
    with tempfile.TemporaryDirectory(prefix="trtspec-bls-") as root:
        for row in measure(repository, Path(root), (18500, 18501, 18502), cycles, rounds):
            sent = "logits" if row.with_logits else "ids only"
            answered = "streaming" if row.streaming else "one answer"
            print(
                f"vocabulary {row.vocab_size}, {sent}, {row.num_clients} clients, {answered}: bare hops {row.bare:.2f}"
                f" ms, pipeline {row.pipeline:.2f} ms a cycle, {row.ratio:.2f} times",
                flush=True,
            )


if __name__ == "__main__":
    main()
