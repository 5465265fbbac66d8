"""A whole run: from a spec to its report.

Knows which subjects and checks there are, what they share, and in which order they run. Knows neither how a check works
nor how a report looks.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from trtspec.build.fingerprint import digest
from trtspec.build.sources import Sources
from trtspec.errors import TrtspecError
from trtspec.parity import power, sampled, shards
from trtspec.parity.checkpoint import CHECKPOINT_CHECKS, CheckpointChecks, CheckpointTrial
from trtspec.parity.checks import CHECKS
from trtspec.parity.draws import DRAWS
from trtspec.parity.result import Check, Report, Verdict
from trtspec.parity.sampled import SAMPLED
from trtspec.parity.served import described
from trtspec.parity.trace import Recorder, Remembering
from trtspec.parity.trial import Trial
from trtspec.parity.workbench import (
    ENGINES,
    REMOTE,
    RUNNER,
    SERVER,
    TRACE,
    Circumstances,
    Workbench,
    case_of,
    engine_configs,
    samplings,
    tokenization_of,
)
from trtspec.parity.yardstick import Yardstick
from trtspec.prompts import Prompt, read_prompts, spread
from trtspec.runtime.engine import EngineConfig
from trtspec.shard import Shard
from trtspec.spec.schema import Spec
from trtspec.triton.server import state_dir_of
from trtspec.triton.server_state import connect_host, running
from trtspec.trtllm.checkpoint import Checkpoint

CHECKPOINT = "checkpoint"


class Observer(Protocol):
    """Is told how a run goes on."""

    def started(self, check: str, subject: str) -> None:
        """A check, or another piece of work, begins."""

    def advance(self, fraction: float) -> None:
        """How much of it is done."""

    def finished(self, check: Check) -> None:
        """What came out."""


@dataclass(frozen=True)
class Selection:
    """What is run.

    Attributes:
        subjects: names of `workbench.SUBJECTS`, and `checkpoint`.
        if_running: checks the server, too, if one of this spec is running, and says so if not.
        url: `host:port` of the server's gRPC, where it is not the spec's own.
        target: the model that the spec was made around (`served.spec_of_model`), of whose target there is no engine.
        checks: names of checks, or `check:part`; those of checkpoints (`CHECKPOINT_CHECKS`) among them.
        prompt: line number of the only prompt; None takes `parity.num_prompts` of the file.
        budget: what the sampled check may cost, as text that `power.Budget` reads; None: what the spec says.
        trace: file that the subject `trace` answers from.
        traces: folder that the traces of this run go to; None: they are not kept.
        shards: folder of what shards have recorded, or record; None: everything is asked here.
    """

    subjects: tuple[str, ...]
    if_running: bool = False
    url: str | None = None
    target: str | None = None
    checks: tuple[str, ...] = (*CHECKS, *CHECKPOINT_CHECKS)
    prompt: int | None = None
    budget: str | None = None
    trace: Path | None = None
    traces: Path | None = None
    shards: Path | None = None

    def names(self, known: Iterable[str]) -> list[str]:
        """Those of the known checks that are run, in their own order."""
        asked = {check.partition(":")[0] for check in self.checks}
        return [name for name in known if name in asked]

    def wanted(self, check: str, part: str) -> bool:
        """Whether a part of a check is run: named itself, or the check as a whole."""
        return check in self.checks or f"{check}:{part}" in self.checks


def command(
    config: str | None, selection: Selection, overrides: Sequence[str]
) -> Callable[[str, str, int | None], str]:
    """What writes the command that runs one check of one subject again, on one prompt (a line number) or all.

    Args:
        config: the spec file, where one was given.
        selection: what was run.
        overrides: values of `--set`.
    """

    def reproduce(check: str, subject: str, number: int | None) -> str:
        words = ["trtspec", "parity", *([config] if config else []), "--subject", subject.split()[0], "--check", check]
        words += [] if number is None else ["--prompt", str(number)]
        words += ["--url", selection.url] if selection.url and subject in REMOTE else []
        words += ["--target", selection.target] if selection.target else []
        words += ["--trace", str(selection.trace)] if selection.trace and subject == TRACE else []
        words += ["--budget", selection.budget] if selection.budget and check == SAMPLED else []
        return shlex.join([*words, *(word for override in overrides for word in ("--set", override))])

    return reproduce


def run(
    spec: Spec,
    selection: Selection,
    reproduce: Callable[[str, str, int | None], str],
    observer: Observer,
) -> Report:
    """Check what was built from a spec against the reference sampler.

    Args:
        spec: the spec.
        selection: what of it.
        reproduce: the command that runs one check of one subject again, on one prompt or all.
        observer: is told how it goes on.

    Raises:
        TrtspecError: prompts, models, engines or server are missing or do not belong together.
    """
    if selection.shards:
        _check_budget(selection)
    prompts = prompts_of(spec, selection)
    subjects = subjects_of(spec, selection)
    checks: list[Check] = []
    settings: dict[str, Any] = {
        "spec": "" if selection.target else str(spec.source),
        "target": spec.target.model,
        "method": spec.speculation.method,
        "prompts": str(spec.prompts_path),
        "prompt_numbers": [prompt.number for prompt in prompts],
        "max_tokens": spec.parity.max_tokens,
    }
    if CHECKPOINT in selection.subjects:
        sources = Sources(spec)
        for role in spec.models:
            names = selection.names(CHECKPOINT_CHECKS)
            checks += checkpoint_checks(spec, role, sources, prompts, names, reproduce, observer)
    if subjects:
        session = Session(spec, selection, prompts, reproduce, observer)
        settings |= session.settings
        for subject_name in subjects:
            with session.opened(subject_name) as (trial, subject):
                checks += [session.check(name, trial, subject) for name in session.names]
            if session.left_out:
                checks.append(_left_out(SAMPLED, subject_name, session.left_out))
                observer.finished(checks[-1])
    if selection.if_running and SERVER not in subjects:
        checks.append(_not_running(spec))
        observer.finished(checks[-1])
    return Report(name=spec.name, checks=tuple(checks), settings=settings)


def answer_shard(spec: Spec, selection: Selection, shard: Shard, observer: Observer) -> list[str]:
    """Have the subjects answer one shard's part of what `run` asks beforehand, for a `run` with the same `shards`.

    Returns:
        What was recorded, a line a subject.

    Raises:
        TrtspecError: as `run`; no check asks anything beforehand; or a subject that is not this process's own.
    """
    check_dealt_out(spec, selection)
    session = Session(spec, selection, prompts_of(spec, selection), lambda *_: "", observer)
    names = [name for name in session.names if CHECKS[name].share]
    if not names:
        raise TrtspecError(
            f"nothing of {', '.join(session.names) or 'these checks'} is known beforehand",
            where="--shard",
            expected=f"one of {', '.join(name for name, kind in CHECKS.items() if kind.share)} among the checks",
        )
    return [session.answer_shard(subject, names, shard) for subject in session.subjects]


def check_dealt_out(spec: Spec, selection: Selection) -> None:
    """Raise TrtspecError for what cannot be dealt out over processes, and where prompts or engines are missing."""
    if wrong := next((name for name in selection.subjects if name not in (ENGINES, RUNNER)), None):
        raise TrtspecError(
            f"--subject {wrong} is not dealt out: each process takes engines of its own",
            expected=f"--subject {ENGINES} or --subject {RUNNER}",
        )
    _check_budget(selection)
    prompts_of(spec, selection)
    engine_configs(spec)


def _check_budget(selection: Selection) -> None:
    if selection.budget and power.Budget.parse(selection.budget).tokens is None:
        raise TrtspecError(
            f"a budget in time is not dealt out: {selection.budget}", where="--budget", expected="tokens, such as 2000"
        )


class Session:
    """What the checks of everything that generates share, loaded once.

    Args:
        spec: the spec.
        selection: what of it is run.
        reproduce, observer: see `run`.
        prompts: lines of the prompt file.

    Attributes:
        subjects, names: of the subjects, and of the checks that are run on each.
        left_out: why statistical checks are left out, those of `asked` that are not in `names`; empty where none is.
        settings: what the checks are run with, for reports.
    """

    def __init__(
        self,
        spec: Spec,
        selection: Selection,
        prompts: Sequence[Prompt],
        reproduce: Callable[[str, str, int | None], str],
        observer: Observer,
    ) -> None:
        self._url = server_url(spec, selection)
        configs = {"target": described(spec, self._url or "")} if selection.target else engine_configs(spec)
        observer.started("reference", "loading the models")
        self.subjects = subjects_of(spec, selection)
        self._selection, self._prompts, self._observer = selection, prompts, observer
        self._workbench = Workbench(spec, configs)
        wished, why = asked(spec, selection), _why_no_statistics(configs["target"], self._workbench.yardstick)
        self.names = [name for name in wished if not (why and CHECKS[name].statistical)]
        self.left_out = why if len(self.names) < len(wished) else ""
        self._given = _circumstances(spec, selection, len(self.subjects), self.names, reproduce, observer)
        self._models = {role: config.stamp.get("source_fingerprint") for role, config in configs.items()}
        engines = {role: [config.pretrained, config.build, config.stamp] for role, config in configs.items()}
        self._made_of = digest([spec.hash(), engines, [[prompt.number, prompt.text] for prompt in prompts]])
        self.settings: dict[str, Any] = {
            "num_draft_tokens": self._workbench.num_draft_tokens,
            "tolerance": self._workbench.yardstick.tolerance,
            "reference_dtype": self._workbench.reference_dtype,
            "false_alarm_rate": spec.parity.false_alarm_rate,
            "seed": spec.parity.seed,
        }

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[Trial, Remembering]]:
        """One subject and its trial, for the length of a `with` block; its answers go to a trace, if those are kept."""
        folder, directory = self._selection.traces, self._selection.shards
        given = shards.Given()
        if directory:
            given = shards.given(directory, name, self._made_of)
            self._observer.started("shards", f"{len(given.answers)} answers of {name} in {directory}")
        with (
            Recorder(folder and folder / f"trace-{name}.jsonl", self._header(name)) as recorder,
            self._opened(name, recorder, given) as opened,
        ):
            yield opened

    @contextmanager
    def _opened(self, name: str, recorder: Recorder, given: shards.Given) -> Iterator[tuple[Trial, Remembering]]:
        with self._workbench.subject(name, self._url, self._selection.trace) as subject:
            recorded = getattr(subject, "recorded_from", name)  # a trace is asked what its subject was asked
            circumstances = replace(self._given, note=recorder.note, noted=given.noted)
            trial = self._workbench.trial(self._prompts, recorded, circumstances)
            yield trial, Remembering(subject, recorder, given.answers)

    def _header(self, name: str) -> dict[str, Any]:
        return {**self.settings, "subject": name, "models": self._models, shards.MADE_OF: self._made_of}

    def answer_shard(self, name: str, checks: Sequence[str], shard: Shard) -> str:
        """See the function of this name; of one subject."""
        assert self._selection.shards is not None
        with shards.recording(self._selection.shards, name, shard, self._header(name)) as begun:
            if begun is None:
                return f"{name}, shard {shard}: recorded before"
            with self._opened(name, *begun) as (trial, subject):
                for check in checks:
                    share = CHECKS[check].share
                    assert share is not None
                    self._observer.started(check, name)
                    share(trial, subject, shard)
                return f"{name}, shard {shard}: {subject.tokens} tokens recorded"

    def check(self, name: str, trial: Trial, subject: Remembering) -> Check:
        """Run one check; one that is left out is not applicable."""
        if self.left_out and name not in self.names:
            return _left_out(name, subject.name, self.left_out)
        self._observer.started(name, subject.name)
        begin, before = time.monotonic(), subject.tokens
        result = CHECKS[name].run(trial, subject)
        result = replace(result, seconds=time.monotonic() - begin, tokens=subject.tokens - before)
        self._observer.finished(result)
        return result


def asked(spec: Spec, selection: Selection) -> list[str]:
    """Checks of what generates that are asked for; without draws, that check is left out."""
    return [name for name in selection.names(CHECKS) if name != DRAWS or spec.parity.num_draws]


def _circumstances(
    spec: Spec,
    selection: Selection,
    num_subjects: int,
    names: Sequence[str],
    reproduce: Callable[[str, str, int | None], str],
    observer: Observer,
) -> Circumstances:
    num_statistical = num_subjects * sum(CHECKS[name].statistical for name in names)
    alpha = spec.parity.false_alarm_rate / max(1, num_statistical)
    budget = power.Budget.parse(selection.budget) if selection.budget else power.Budget(tokens=num_samples(spec, alpha))
    return Circumstances(
        reproduce=reproduce,
        advance=observer.advance,
        wanted=selection.wanted,
        note=lambda check, record: None,
        noted=lambda check, query: None,
        alpha=alpha,
        num_samples=budget.tokens or spec.parity.num_samples,
        seconds=budget.seconds,
    )


def num_samples(spec: Spec, alpha: float) -> int:
    """Tokens that the sampled check draws: as many as see `parity.detect`, or `parity.num_samples`."""
    if spec.parity.detect is None:
        return spec.parity.num_samples
    tests = sampled.num_tests(len(samplings(spec)))
    return power.tokens_needed(spec.parity.detect, power.level(alpha, tests))


def plan(spec: Spec, selection: Selection) -> list[str]:
    """What a run would generate and see, in lines; nothing is loaded.

    Raises:
        TrtspecError: no such budget.
    """
    subjects = subjects_of(spec, selection)
    names = asked(spec, selection)
    num_statistical = len(subjects) * sum(CHECKS[name].statistical for name in names)
    lines = []
    if SAMPLED in names and subjects:
        alpha = spec.parity.false_alarm_rate / num_statistical
        budget = power.Budget.parse(selection.budget) if selection.budget else power.Budget(num_samples(spec, alpha))
        given = spec.parity.num_draft_tokens
        length = spec.default_num_draft_tokens if given is None else given
        tests = sampled.num_tests(len(samplings(spec)))
        lengths = (length, 1) if length > 1 else (length,)
        if budget.tokens:
            lines += str(power.plan(budget.tokens, alpha, tests, lengths)).split("; ")
        else:
            lines.append(f"sampled: as many tokens as {selection.budget} allow; the speed is measured first")
        for variation in (0.05, 0.1, 0.2, 0.4):
            tokens = power.tokens_needed(variation, power.level(alpha, tests))
            lines.append(
                f"a total variation of {variation:.2f} needs {tokens} tokens (--set parity.detect={variation})"
            )
    rate = spec.parity.false_alarm_rate
    lines.append(f"false-alarm rate of the whole run {rate:g}: {num_statistical} statistical checks share it")
    return lines


def checkpoint_checks(
    spec: Spec,
    role: str,
    sources: Sources,
    prompts: Sequence[Prompt],
    names: Sequence[str],
    reproduce: Callable[[str, str, int | None], str],
    observer: Observer,
) -> Iterator[Check]:
    """The named checks of the checkpoint of one model; needs neither engines nor a server.

    Raises:
        TrtspecError: there is no checkpoint, or it was made from another model.
    """
    if spec.engine.runtime != "tensorrt_llm" or spec.engine.track != "engine":
        raise TrtspecError(
            f"runtime {spec.engine.runtime} on track {spec.engine.track} is built without checkpoints",
            where=spec.where(("engine", "runtime")),
            expected="engine.runtime: tensorrt_llm and engine.track: engine",
            fix="use --subject engines or --subject server",
        )
    directory = spec.checkpoints_dir / role
    checkpoint, source = Checkpoint.load(directory), sources.open(role)
    if checkpoint.record.get("source_fingerprint") not in (None, source.fingerprint()):
        raise TrtspecError(
            f"the checkpoint was made from another state of the model {source.name}",
            where=str(directory),
            fix=f"build it again: trtspec build {spec.source}",
        )
    tokenized = sources.open("target")
    tokenization = tokenization_of(tokenized)
    trial = CheckpointTrial(
        role=role,
        checkpoint=checkpoint,
        source=source,
        cases=tuple(case_of(tokenized, tokenization, prompt) for prompt in prompts),
        max_tokens=spec.parity.checkpoint.max_tokens,
        answer_tokens=spec.parity.max_tokens,
        given=spec.parity.checkpoint,
        reproduce=reproduce,
        advance=observer.advance,
    )
    observer.started("reference", f"loading the model of {trial.subject}")
    checks = CheckpointChecks(trial)
    for name in (name for name in CHECKPOINT_CHECKS if name in names):
        observer.started(name, trial.subject)
        begin = time.monotonic()
        result = replace(checks.run(name), seconds=time.monotonic() - begin)
        observer.finished(result)
        yield result


def prompts_of(spec: Spec, selection: Selection) -> list[Prompt]:
    """The prompts of a run.

    Raises:
        TrtspecError: there is no such file, or no such line in it.
    """
    prompts = read_prompts(spec.prompts_path)
    if selection.prompt is None:
        return spread(prompts, spec.parity.num_prompts)
    if chosen := [prompt for prompt in prompts if prompt.number == selection.prompt]:
        return chosen
    raise TrtspecError(f"no prompt on line {selection.prompt}", where=str(spec.prompts_path))


def subjects_of(spec: Spec, selection: Selection) -> list[str]:
    """Names of the subjects that generate; the server's among them if it is asked for, or running."""
    names = [name for name in selection.subjects if name != CHECKPOINT]
    if selection.if_running and SERVER not in names and server_url(spec, selection) is not None:
        names.append(SERVER)
    return names


def server_url(spec: Spec, selection: Selection) -> str | None:
    """Address (gRPC) of the server that is checked: the one asked for, or the one of this spec if it is running."""
    asked = any(name in REMOTE for name in selection.subjects)
    if selection.url or not (asked or selection.if_running):
        return selection.url
    state = running(state_dir_of(spec))
    if state is None and asked:
        return f"{connect_host(spec.serving.host)}:{spec.serving.grpc_port}"
    return state.grpc_url if state else None


def is_lossy(target: EngineConfig) -> bool:
    """Whether the engine's own rule of acceptance gives up the target's distribution for sampled requests."""
    return (target.stamp.get("speculation") or {}).get("lossless") is False


def _why_no_statistics(target: EngineConfig, yardstick: Yardstick) -> str:
    """Why draws of the target say nothing about how it was drawn; empty where they do."""
    if is_lossy(target):
        return "lossy: the engine was built with typical acceptance, which favours likely tokens"
    if yardstick.rounds_activations:
        return (
            f"the target's activations are rounded ({yardstick.precision}), so that its distribution is known only "
            "within what rounding does; whether drafts are accepted by the rule shows on the same spec with "
            "target.quantization: none and target.kv_cache_dtype: auto"
        )
    return ""


def _left_out(name: str, subject: str, why: str) -> Check:
    return Check(
        name=name,
        subject=subject,
        hypothesis="sampled tokens follow the distribution of the reference",
        verdict=Verdict.NOT_APPLICABLE,
        evidence=why,
    )


def _not_running(spec: Spec) -> Check:
    return Check(
        name="all",
        subject=SERVER,
        hypothesis="the server answers as the reference does",
        verdict=Verdict.NOT_APPLICABLE,
        evidence=f"no server of this spec is running; start one with: trtspec serve {spec.source} --detach",
    )
