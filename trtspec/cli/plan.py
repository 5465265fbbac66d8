"""`trtspec plan`: will speculation pay, how many draft tokens, what fits on the GPU, and where plain decoding wins."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtspec.cli.common import config_argument, load, set_option
from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.plan.capacity import Demand
    from trtspec.plan.result import Plan
    from trtspec.spec.schema import Spec

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_FILE = click.Path(path_type=Path, dir_okay=False)


class _Number(click.ParamType):
    """A finite number in a range, of which `low` itself may not be one; click's own ranges take nan."""

    name = "number"

    def __init__(self, low: float, high: float = math.inf, *, above: bool = False) -> None:
        self._low, self._high, self._above = low, high, above

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (self._low <= number <= self._high and number < math.inf) or (self._above and number == self._low):
            most = f" and at most {self._high:g}" if self._high < math.inf else ""
            self.fail(
                f"{value} is no number {'above' if self._above else 'of at least'} {self._low:g}{most}", param, ctx
            )
        return number


class _Batches(click.ParamType):
    """`1,4,16`."""

    name = "list"

    def convert(
        self, value: str | tuple[int, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        sizes = [int(part) if part.strip().isdecimal() else 0 for part in value.split(",")]
        if not all(1 <= size <= 4096 for size in sizes):
            self.fail(f"{value!r} is no list of numbers from 1 to 4096 such as 1,4,16", param, ctx)
        return tuple(sorted(set(sizes)))


@click.command()
@config_argument
@set_option
@click.option(
    "--trace",
    "trace_path",
    type=_FILE,
    help="Answers recorded by `trtspec bench acceptance` [default: .cache/plan/NAME.trace.jsonl, where there is one].",
)
@click.option("--acceptance", "rate", type=_Number(0, 1), help="Assume this acceptance rate instead of a trace.")
@click.option("--temperature", type=_Number(0), help="Of the trace's answers [default: the lowest that it has].")
@click.option(
    "--calibration",
    type=_FILE,
    help="Times measured by `trtspec plan calibrate` [default: .cache/plan/NAME.calibration.json, where there is one "
    "that fits; else the data sheet of the GPU].",
)
@click.option("--gpu", "gpu_name", metavar="NAME", help="Plan for this GPU instead of hardware.gpu.")
@click.option("--gpu-file", type=_FILE, help="YAML file with further GPUs, as trtspec/spec/gpus.yaml has them.")
@click.option(
    "--target-shape", metavar="NAME", help="Sizes of a well-known model, such as Llama-3.1-70B, for the target."
)
@click.option("--draft-shape", metavar="NAME", help="The same for the draft model.")
@click.option("--middle-shape", metavar="NAME", help="The same for the middle model of a cascade.")
@click.option(
    "--batch",
    "batches",
    type=_Batches(),
    help="Sequences in flight, the largest of which has to fit [default: 1,2,4,8,16,32,64, and engine.max_batch_size "
    "has to fit].",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    help="Tokens of each sequence [default: max_seq_len has to fit; step times are those of the trace's mean, or "
    "halfway from engine.max_input_len to max_seq_len].",
)
@click.option(
    "--max-draft-tokens", type=click.IntRange(1, 64), default=16, show_default=True, help="Longest draft to consider."
)
@click.option("--price", type=_Number(0, above=True), help="US dollars for an hour of a GPU.")
@click.option("--latency-ms", type=_Number(0, above=True), help="Longest time per output token, in milliseconds.")
@click.option(
    "--rate",
    "requests_per_second",
    metavar="REQUESTS",
    type=_Number(0, 1e6, above=True),
    help="Find the number of replicas for so many requests a second, in every layout, with the cost.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    help="Mean tokens of a prompt [default: the trace's mean, or engine.max_input_len].",
)
@click.option(
    "--answer-tokens",
    type=click.IntRange(min=1),
    help="With --rate: mean tokens of an answer [default: the trace's mean].",
)
@click.option(
    "--ttft-ms",
    type=_Number(0, above=True),
    help="With --rate: longest time to the first token for 95 % of the requests, in milliseconds.",
)
@click.option(
    "--utilisation",
    type=_Number(0, 0.99, above=True),
    help="With --rate: part of what a replica can do at most that is planned for [default: 0.7].",
)
@click.option(
    "--host-gpus",
    type=click.IntRange(1, 1024),
    help="With --rate: GPUs of a host [default: 8, or hardware.num_gpus where the spec has several hosts].",
)
@click.option(
    "--network-gbps",
    type=_Number(0, above=True),
    help="What joins hosts: 10^9 bits a second for each GPU, in each direction, such as 400.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Write the plan as JSON; - prints it instead of tables.",
)
@click.option("--html", "html_path", type=_FILE, help="Write the plan as a page with plots.")
@click.option("--apply", "apply_", is_flag=True, help="Write draft length, schedule and cache fractions into CONFIG.")
def plan(
    config: Path,
    overrides: tuple[str, ...],
    trace_path: Path | None,
    rate: float | None,
    temperature: float | None,
    calibration: Path | None,
    gpu_name: str | None,
    gpu_file: Path | None,
    target_shape: str | None,
    draft_shape: str | None,
    middle_shape: str | None,
    batches: tuple[int, ...] | None,
    context: int | None,
    max_draft_tokens: int,
    price: float | None,
    latency_ms: float | None,
    requests_per_second: float | None,
    prompt_tokens: int | None,
    answer_tokens: int | None,
    ttft_ms: float | None,
    utilisation: float | None,
    host_gpus: int | None,
    network_gbps: float | None,
    json_path: Path | None,
    html_path: Path | None,
    apply_: bool,
) -> None:
    """Say whether speculation pays for CONFIG, with how many draft tokens, up to which batch, and whether it fits.

    Compares its method with the others that its models allow. Reads no weights; step times come from a calibration or
    from the GPU's data sheet, acceptance from a trace or an assumed rate. A plan that does not fit is an answer too,
    with the nearest one that does: exit code 0, and `fits` is false in the JSON.

    With --rate it says how many replicas serve so many requests a second, at what cost, with every method and with
    the target split in other ways. --latency-ms and --ttft-ms are kept.
    """
    if trace_path and rate is not None:
        raise click.UsageError("--trace and --acceptance: give one of them.")
    if apply_ and (overrides or gpu_name):
        raise click.UsageError("--apply writes a plan of CONFIG as it is: write --set and --gpu into it first.")
    of_rate = {"answer-tokens": answer_tokens, "ttft-ms": ttft_ms, "utilisation": utilisation, "host-gpus": host_gpus}
    if requests_per_second is None and (alone := [name for name, value in of_rate.items() if value is not None]):
        raise click.UsageError(f"--{alone[0]} belongs to --rate: give the requests a second as well.")
    from trtspec.build.machine import memory_bytes
    from trtspec.plan import inputs
    from trtspec.plan.planner import Question, Unknown, make_plan
    from trtspec.plan.sizes import ModelSizes
    from trtspec.report.plots import require_matplotlib
    from trtspec.spec.gpus import GPUS, load_gpus

    if html_path:
        require_matplotlib("--html")
    gpus = load_gpus(gpu_file) if gpu_file else GPUS
    spec, gpu = inputs.on_gpu(load(config, overrides), gpu_name, gpus)
    given = {"target": target_shape, "draft": draft_shape, "middle": middle_shape}
    shapes = {role: shape for role, shape in given.items() if shape is not None}
    _check(spec, shapes, context)

    sizes = ModelSizes(shapes)
    curves, unused = inputs.find_curves(spec, sizes(spec), calibration)
    traced, remarks = (None, []) if rate is not None else inputs.find_trace(spec, trace_path, temperature, shapes)
    assumed = Unknown() if rate is None else inputs.assumed_rate(spec, rate)
    prompt, between, answer = inputs.usual_lengths(spec, traced, prompt_tokens, answer_tokens)
    demand = None
    if requests_per_second is not None:
        demand = _demand(spec, requests_per_second, answer, ttft_ms, utilisation, host_gpus)
    question = Question(
        gpu=gpu,
        device_gb=gpu.memory_gb if gpu.sm else memory_bytes() / 1e9,
        batches=batches or _BATCHES,
        context=context or between,
        prompt=min(prompt, context or prompt),
        memory_batch=max(batches) if batches else spec.engine.max_batch_size,
        memory_context=context,
        temperature=traced.temperature if traced else temperature or 0.0,
        price=price,
        latency_ms=latency_ms,
        max_draft_tokens=max_draft_tokens,
        gpus=gpus,
        demand=demand,
    )
    found = make_plan(spec, sizes, inputs.step_times(curves, gpu, network_gbps), traced or assumed, question)
    notes = [*([unused] if unused else []), *remarks, *(curves.notes if curves else ())]
    found = replace(found, warnings=(*notes, *inputs.passes_not_shared(spec, question.batches)))
    _show(found, json_path, html_path)
    if apply_:
        _apply(found, config)


def _check(spec: Spec, shapes: Mapping[str, str], context: int | None) -> None:
    """Refuse shapes of models that no method of the spec has, and contexts that its engines do not take."""
    from trtspec.plan.planner import variants

    roles = {role for each in variants(spec) for role in each.models}
    if unused := sorted(shapes.keys() - roles):
        raise TrtspecError(f"the spec has no {unused[0]} model", where=f"--{unused[0]}-shape")
    longest = spec.max_seq_len("target")
    if context is not None and context > longest:
        raise TrtspecError(
            f"{context} tokens are more than the target's engine takes",
            where="--context",
            expected=f"at most {longest}",
            fix="raise engine.max_seq_len: --set engine.max_seq_len=...",
        )


def _demand(
    spec: Spec,
    rate: float,
    answer_tokens: int | None,
    ttft_ms: float | None,
    utilisation: float | None,
    host_gpus: int | None,
) -> Demand:
    """What is to be served; TrtspecError where nobody says how long answers are."""
    from trtspec.plan.capacity import Demand
    from trtspec.plan.layouts import HOST_GPUS

    if answer_tokens is None:
        raise TrtspecError(
            "how many tokens an answer has is not known",
            where="--rate",
            fix="give their mean, such as --answer-tokens 250, or record a trace: trtspec bench acceptance",
        )
    hardware = spec.hardware
    usual = hardware.num_gpus if hardware.num_nodes > 1 else max(HOST_GPUS, hardware.num_gpus)
    given = {} if utilisation is None else {"utilisation": utilisation}
    return Demand(rate, answer_tokens, ttft_ms, host_gpus=host_gpus or usual, **given)


def _show(found: Plan, json_path: Path | None, html_path: Path | None) -> None:
    from rich.console import Console

    from trtspec.plan.text import renderables

    text = json.dumps(found.to_json(), indent=2, allow_nan=False) + "\n"
    if html_path is not None:
        from trtspec.plan.page import to_html

        _write(html_path, to_html(found))
    if json_path == Path("-"):
        click.echo(text, nl=False)
        return
    console = Console(highlight=False)
    for part in renderables(found):
        console.print(part)
    if json_path is not None:
        _write(json_path, text)


def _write(path: Path, text: str) -> None:
    """The whole file or none."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise TrtspecError(f"cannot be written ({error.strerror})", where=str(path)) from error
    finally:
        draft.unlink(missing_ok=True)


def _apply(found: Plan, config: Path) -> None:
    from trtspec.plan.apply import edited

    edit = edited(found, config)
    click.echo(edit.diff or f"{config}: says all of it already", nl=not edit.diff, err=True)
    edit.write()
