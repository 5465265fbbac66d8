"""What a plan is made from, found and checked: the GPU, step times, a trace, usual lengths.

Knows where measurements are kept and which of them belong to a spec. Does not know what is planned with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trtspec.errors import TrtspecError
from trtspec.plan.acceptance import temperatures
from trtspec.plan.curves import Curves, shipped
from trtspec.plan.planner import CHAINS, AssumedRate, Sizes, Traced
from trtspec.plan.roofline import Roofline
from trtspec.plan.step_times import StepTimes
from trtspec.plan.trace import Trace, read_trace
from trtspec.spec.gpus import GPUS, Gpu, find_gpu
from trtspec.spec.schema import Spec

FOLDER = Path(".cache/plan")


def trace_path(spec: Spec) -> Path:
    """Where `trtspec bench acceptance` leaves the trace of a spec; relative to the working directory."""
    return FOLDER / f"{spec.name}.trace.jsonl"


def calibration_path(spec: Spec) -> Path:
    """Where `trtspec plan calibrate` leaves the step times of a spec; relative to the working directory."""
    return FOLDER / f"{spec.name}.calibration.json"


def on_gpu(spec: Spec, name: str | None, gpus: Mapping[str, Gpu] = GPUS) -> tuple[Spec, Gpu]:
    """The spec on a GPU, and its row.

    A GPU that specs cannot name, of a file of one's own, is judged like the catalogue's newest that is no newer.

    Args:
        spec: any.
        name: a row of `gpus`; None: hardware.gpu.
        gpus: the catalogue, perhaps with further rows.

    Raises:
        TrtspecError: there is no such row, or the GPU is older than all of the catalogue.
    """
    gpu = find_gpu(name or spec.hardware.gpu, gpus)
    alike = max((row for row in GPUS.values() if 0 < row.sm <= gpu.sm), key=lambda row: row.sm, default=None)
    if gpu.name in GPUS:
        alike = GPUS[gpu.name]
    if alike is None:
        raise TrtspecError(f"sm_{gpu.sm} of {gpu.name} is older than every GPU that trtspec knows", where="--gpu-file")
    return spec.model_copy(update={"hardware": spec.hardware.model_copy(update={"gpu": alike.name})}), gpu


def find_curves(spec: Spec, sizes: Sizes, path: Path | None) -> tuple[Curves | None, str | None]:
    """Measured step times of a spec's models on its device, and why those that lie there are not taken.

    Args:
        spec: any.
        sizes: of its models.
        path: of a file that has to fit; None: the usual place and what ships with trtspec, if they fit.

    Raises:
        TrtspecError: the file at `path` is missing, damaged, or of other models or another device.
    """
    if path is not None:
        curves = Curves.read(path)
        curves.check(spec, sizes)
        return curves, None
    usual, problem = calibration_path(spec), None
    if usual.is_file():
        try:
            return find_curves(spec, sizes, usual)
        except TrtspecError as error:
            problem = f"{usual} is not used: {error}"
    return shipped(spec, sizes), problem


def step_times(
    curves: Curves | None, gpu: Gpu, network_gbps: float | None = None
) -> Callable[[Spec, Sizes], StepTimes]:
    """Step times of any spec with these models: from curves that have them, or all from the data sheet of a GPU.

    Args:
        curves: measured; None: there are none.
        gpu: a row of the catalogue.
        network_gbps: what joins hosts, see `Roofline`.
    """

    def times(spec: Spec, sizes: Sizes) -> StepTimes:
        if curves is None:
            return Roofline.of(spec, sizes, gpu, network_gbps=network_gbps)
        curves.check(spec, sizes)
        return curves

    return times


def find_trace(
    spec: Spec, path: Path | None, temperature: float | None = None, shapes: Mapping[str, str] | None = None
) -> tuple[Traced | None, list[str]]:
    """Recorded acceptance of a spec's models, and what to know of it.

    Args:
        spec: any.
        path: of a trace that has to fit; None: the usual place, if there is one that fits.
        temperature: of the answers that count; None: the lowest.
        shapes: role -> named shape; such models are not here, so that the trace is not compared with them.

    Raises:
        TrtspecError: the trace at `path` is missing, damaged, of other models, or has no answers of this temperature.
    """
    if path is None:
        usual = trace_path(spec)
        if not usual.is_file():
            return None, []
        try:
            return find_trace(spec, usual, temperature, shapes)
        except TrtspecError as error:
            return None, [f"{usual} is not used: {error}"]
    trace = read_trace(path)
    check = _trusted(spec) if shapes else _compared(trace)
    check(spec)
    there = temperatures(trace)
    if temperature is not None and temperature not in there:
        raise TrtspecError(
            f"the trace has no answers of temperature {temperature:g}",
            where=str(path),
            expected=f"one of {', '.join(f'{each:g}' for each in there)}",
            fix=f"record them: trtspec bench acceptance --temperature {temperature:g}",
        )
    notes = list(trace.warnings)
    if shapes:
        notes.append(f"{path} is not compared with the models, of which only the shapes are given")
    return Traced(trace, path.name, there[0] if temperature is None else temperature, check), notes


def _compared(trace: Trace) -> Callable[[Spec], None]:
    """`Trace.check`, once for the same models, which it has to open."""
    same: set[str] = set()

    def check(spec: Spec) -> None:
        models = repr(spec.models)
        if models not in same:
            trace.check(spec)
            same.add(models)

    return check


def _trusted(spec: Spec) -> Callable[[Spec], None]:
    """Takes a trace to be of the models that `spec` names, and of no others."""

    def check(other: Spec) -> None:
        if changed := [role for role, ref in other.models.items() if spec.models.get(role, ref) != ref]:
            raise TrtspecError(f"not measured: the trace is of another {changed[0]}")

    return check


def passes_not_shared(spec: Spec, batches: Sequence[int]) -> list[str]:
    """A warning where a batch of the plan need not come about: whose requests draft and verify out of step.

    The LLM API drafts and verifies all requests in one loop.
    """
    if max(batches) == 1 or len(spec.models) == 1 or spec.alternates_phases or spec.engine.track == "llmapi":
        return []
    return [
        "batches of 2 and more are of requests in step; those that draft while others verify share fewer passes: "
        "serving.alternate_phases: true puts them in step"
    ]


def assumed_rate(spec: Spec, rate: float) -> AssumedRate:
    """One acceptance rate for the method of a spec.

    Raises:
        TrtspecError: the method drafts something that one rate does not describe.
    """
    method = spec.speculation.method
    if method not in CHAINS:
        raise TrtspecError(
            f"one acceptance rate does not describe method {method}",
            where="--acceptance",
            expected=f"method {', '.join(CHAINS)}",
            fix="record a trace: trtspec bench acceptance",
        )
    return AssumedRate(rate, method)


def usual_lengths(
    spec: Spec, traced: Traced | None, prompt_tokens: int | None = None, answer_tokens: int | None = None
) -> tuple[int, int, int | None]:
    """Tokens of a prompt, of a cache in the midst of an answer, and of an answer.

    Args:
        spec: says how long they may be.
        traced: says how long they are; None: a prompt is as long as may be, and a cache between that and the longest.
        prompt_tokens: mean of the prompts, if it is known otherwise.
        answer_tokens: mean of the answers; where neither it nor a trace says so, their length is None.

    Raises:
        TrtspecError: prompt and answer together are longer than the engine takes.
    """
    prompt, between, answer = _lengths(spec, traced)
    longest = spec.max_seq_len("target")
    if prompt_tokens is not None or answer_tokens is not None:
        prompt, answer = prompt_tokens or prompt, answer_tokens or answer
        if prompt + (answer or 1) > longest:
            raise TrtspecError(
                f"a prompt of {prompt} tokens and an answer of {answer or 1} are more than the target's engine takes",
                where="--prompt-tokens, --answer-tokens",
                expected=f"at most {longest} together",
                fix="give the mean of your prompts, or raise engine.max_seq_len: --set engine.max_seq_len=...",
            )
        between = (prompt + longest) // 2 if answer is None else prompt + answer // 2
    return prompt, between, answer


def _lengths(spec: Spec, traced: Traced | None) -> tuple[int, int, int | None]:
    if traced is None:
        longest = spec.max_seq_len("target")
        prompt = min(spec.engine.max_input_len, longest)
        return prompt, (prompt + longest) // 2, None
    answers = [answer for answer in traced.trace.answers if answer.temperature == traced.temperature]
    tokens = sum(len(answer.tokens) for answer in answers)
    cached = sum(len(answer.tokens) * (len(answer.prompt_ids) + len(answer.tokens) / 2) for answer in answers)
    prompts = sum(len(answer.prompt_ids) for answer in answers)
    return max(1, round(prompts / len(answers))), max(1, round(cached / tokens)), max(1, round(tokens / len(answers)))
