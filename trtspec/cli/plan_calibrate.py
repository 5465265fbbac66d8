"""`trtspec plan calibrate`: what passes of these models take on this machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtspec.cli.common import load, set_option
from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.plan.curves import Curves
    from trtspec.plan.pairs import Pair
    from trtspec.spec.schema import Spec

_LONGEST_DRAFT = 8  # measured even where the engine is built for less: the plan looks for the best length


@click.command("plan calibrate")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@set_option
@click.option("--shape", metavar="NAME", help="Random weights of a named shape as target; instead of CONFIG.")
@click.option("--draft-shape", metavar="NAME", help="Named shape of the draft.")
@click.option(
    "--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="bfloat16", show_default=True,
    help="Type of random weights.",
)  # fmt: skip
@click.option("--layers", type=click.IntRange(min=2), help="Make so many layers of each shape, and scale the times.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: as hardware.gpu; with --shape, a GPU.]")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads [default: serving.num_threads, or all cores].")
@click.option("--max-batch-size", type=click.IntRange(min=1), help="[default: engine.max_batch_size; of shapes, 32.]")
@click.option(
    "--max-draft-len", type=click.IntRange(0, 511),
    help=f"Most draft tokens verified [default: those of the spec, {_LONGEST_DRAFT} at least].",
)  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Longest time.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False),
    help="File to write [default: where `trtspec plan` looks for it: .cache/plan/NAME.calibration.json].",
)  # fmt: skip
def calibrate(
    config: Path | None,
    overrides: tuple[str, ...],
    shape: str | None,
    draft_shape: str | None,
    dtype: str,
    layers: int | None,
    device: str | None,
    threads: int | None,
    max_batch_size: int | None,
    max_draft_len: int | None,
    seconds: float,
    out: Path | None,
) -> None:
    """Measure step times of the models of CONFIG, or of named shapes, over batch, tokens verified and context.

    `trtspec plan` then takes them instead of the roofline. Nothing needs to be built.
    """
    import time

    if (config is None) == (shape is None):
        raise click.UsageError("give CONFIG or --shape, one of them")
    if config and (draft_shape or layers):
        raise click.UsageError("--draft-shape and --layers go with --shape")
    if math.isnan(seconds):  # which is in every range
        raise click.UsageError("--seconds: nan is no time")
    begun = time.perf_counter()
    spec = load(config, overrides) if config else None
    device = device or _device(spec)
    _check(spec, device)

    import torch

    from trtspec.build.machine import hardware
    from trtspec.plan import calibrate as measuring
    from trtspec.plan.inputs import FOLDER, calibration_path
    from trtspec.plan.pairs import pair_of_shapes, pair_of_spec

    torch.set_num_threads(threads or (spec.serving.num_threads if spec else None) or hardware()["cores"])
    if spec is None:
        assert shape is not None
        pair = pair_of_shapes(shape, draft_shape, dtype, device, layers)
        usual = FOLDER / f"{'-'.join(filter(None, (device, shape, draft_shape)))}.calibration.json"
        max_context, max_prompt = 4096, 2048
    else:
        from trtspec.build.sources import Sources

        pair = pair_of_spec(spec, Sources(spec), device)
        usual, max_context, max_prompt = calibration_path(spec), spec.engine.max_seq_len, spec.engine.max_input_len
    most = max(spec.max_draft_len if spec else 0, _LONGEST_DRAFT) if max_draft_len is None else max_draft_len
    batch = max_batch_size or (spec.engine.max_batch_size if spec else 32)
    context = min(max_context, *(each.config.max_position_embeddings for each in pair.models.values()))
    grid = measuring.grid(batch, most + 1, context, min(max_prompt, context), device)
    left = max(seconds - (time.perf_counter() - begun), 0.0)
    click.echo(f"measuring {', '.join(pair.models)} for {left:.0f} s at most", err=True)
    curves = measuring.calibrate(pair, grid, left)
    out = out or usual
    curves.write(out)
    for line in _lines(pair, curves):
        click.echo(line)
    click.echo(f"written to {out}")


def _device(spec: Spec | None) -> str:
    if spec is not None:
        return "cpu" if spec.hardware.gpu == "cpu" else "cuda"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _check(spec: Spec | None, device: str) -> None:
    """Refuse a device that is not there, or not the spec's, before models are loaded.

    Raises:
        TrtspecError: saying which.
    """
    import torch

    from trtspec.plan.curves import catalogue_name

    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise TrtspecError(
            "PyTorch finds no GPU on this machine",
            where=spec.where(("hardware", "gpu")) if spec else "--device cuda",
            fix="run it on the GPU host, or measure the CPU with --set hardware.gpu=cpu or --device cpu",
        )
    name = torch.cuda.get_device_name()
    if spec is not None and spec.hardware.gpu != "cpu" and catalogue_name(name) != spec.hardware.gpu:
        raise TrtspecError(
            f"this machine has {name}", where=spec.where(("hardware", "gpu")), expected=spec.hardware.gpu
        )


def _lines(pair: Pair, curves: Curves) -> list[str]:
    """The times, and how far off the roofline was."""
    lines = [f"step times {curves.source}, {curves.how}"]
    for role, curve in curves.models.items():
        slices: dict[tuple[int, int], list[str]] = {}
        for point in curve.points:
            time = f"{point.tokens:>4}: {1000 * point.seconds:.4g} ms"
            slices.setdefault((point.batch, point.context), []).append(time)
        for (batch, context), times in slices.items():
            what = f"tokens after {context}" if context else "prefill, tokens"
            lines.append(f"{role:<8} batch {batch:<3} {what:<18}{'  '.join(times)}")
    for each in curves.overheads:
        lines.append(
            f"a cycle of {pair.method}, batch {each.batch}, outside of its passes: {1000 * each.seconds:.2f} ms"
        )
    if curves.roofline:
        ratios = ", ".join(f"{role} {ratio:.2f}" for role, ratio in curves.roofline.items())
        lines.append(f"measured over the roofline's times (median of all points): {ratios}")
    elif curves.device == "cpu":
        lines.append("a CPU has no roofline to compare with")
    else:
        lines.append(f"the catalogue of GPUs has no row for {curves.name}, so no roofline to compare with")
    return [*lines, *(f"note: {note}" for note in curves.notes)]
