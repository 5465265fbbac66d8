"""A trace: the target's answers to a team's prompts, and what every proposer would have said along them.

One file, JSON Lines: a header, then a line an answer, in the order in which they were recorded. All figures of
`plan.acceptance` come from it alone. Knows the format and which models a trace belongs to; not how it is recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.models.source import ModelSource
    from trtspec.spec.schema import Spec

VERSION = 1
HEADS, MODULES = "heads", "modules"  # proposers inside the target's pass: Medusa heads, multi-token prediction
SENSELESS = (
    0.75  # of the surprise at the same tokens in random order; real text has about half, shuffled text nine tenths
)
_DIGITS = 7


@dataclass(frozen=True)
class Proposer:
    """What one proposer says along an answer of A tokens, given the text before each; None: not of this kind.

    Attributes:
        q: `[A]`, the probability with which it drafts the emitted token: end ids, which are never drafted in a draw,
            have none. Of sampled answers only.
        rank: int `[A]`, at which place it has the emitted token, from 0; -1 behind the places that are told apart.
        top: int `[A]`, its likeliest token.
        siblings: `[A, n]`, P(the emitted token is one of 1..n drawn children), see `siblings` in `bench.record`. Of
            sampled answers only.
        overlap: `[A]`, P(its draft is accepted by the model between it and the target). Of cascades only.
        diverged: `[A]`, the same given that what that model says is then rejected by the target; 0 where it never is.
        ranks: int `[A, heads]`, at `[i, h]` the place that head h, from the state that token i was chosen from, gives
            token i + 1 + h.
        drafts: int `[A, k]`, the tokens drafted to follow the first i of the answer; -1 where there are none.
    """

    q: NDArray[np.float64] | None = None
    rank: NDArray[np.int64] | None = None
    top: NDArray[np.int64] | None = None
    siblings: NDArray[np.float64] | None = None
    overlap: NDArray[np.float64] | None = None
    diverged: NDArray[np.float64] | None = None
    ranks: NDArray[np.int64] | None = None
    drafts: NDArray[np.int64] | None = None

    def to_json(self) -> dict[str, Any]:
        """Lists of what is there."""
        there = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: _rounded(value) for name, value in there.items() if value is not None}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Proposer:
        """The proposer that `to_json` wrote; ValueError or TypeError for anything else."""
        return cls(**{name: np.asarray(value, dtype=_TYPES[name]) for name, value in content.items()})


_TYPES: dict[str, type] = dict.fromkeys(("q", "siblings", "overlap", "diverged"), float) | dict.fromkeys(
    ("rank", "top", "ranks", "drafts"), int
)


@dataclass(frozen=True)
class Answer:
    """One recorded answer.

    Attributes:
        number: of its prompt, the line in the prompt file.
        category: of its prompt, or None.
        temperature: 0 is greedy.
        prompt_ids: the prompt as the models saw it.
        tokens: the answer, an end id included.
        p: `[A]`, the target's probability of each token at this temperature; of greedy answers at temperature 1.
        proposers: by role of the spec's models, `HEADS` or `MODULES`.
        surprise: nats a token that the target finds in the prompt's words, and in the same tokens in random order;
            None for prompts too short to tell.
        agreement: share of tokens that greedy answer and reference have in common (F1), where there is a reference.
    """

    number: int
    category: str | None
    temperature: float
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    p: NDArray[np.float64]
    proposers: Mapping[str, Proposer]
    surprise: tuple[float, float] | None = None
    agreement: float | None = None

    def to_json(self) -> dict[str, Any]:
        """One line of the file."""
        there = {each.name: getattr(self, each.name) for each in fields(self)}
        there |= {"p": _rounded(self.p), "proposers": {name: each.to_json() for name, each in self.proposers.items()}}
        return {name: value for name, value in there.items() if value is not None}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Answer:
        """The answer that `to_json` wrote; KeyError, ValueError, TypeError or AttributeError for anything else."""
        proposers = {name: Proposer.from_json(each) for name, each in content["proposers"].items()}
        surprise = content.get("surprise")
        answer = cls(
            number=int(content["number"]),
            category=content.get("category"),
            temperature=float(content["temperature"]),
            prompt_ids=tuple(map(int, content["prompt_ids"])),
            tokens=tuple(map(int, content["tokens"])),
            p=np.asarray(content["p"], dtype=float),
            proposers=proposers,
            surprise=None if surprise is None else (float(surprise[0]), float(surprise[1])),
            agreement=content.get("agreement"),
        )
        columns = [getattr(each, name.name) for each in proposers.values() for name in fields(each)]
        if {len(answer.tokens)} != {len(answer.p), *(len(column) for column in columns if column is not None)}:
            raise ValueError("columns of different length")
        return answer


@dataclass(frozen=True)
class Model:
    """A model that took part: what the spec calls it, and an `identity` of what it is."""

    model: str
    vocab_size: int
    identity: str


@dataclass(frozen=True, eq=False)
class Trace:
    """What was recorded.

    Attributes:
        spec: name of the spec.
        method: of the spec.
        models: by role, the target among them; heads count as one.
        max_draft_tokens: most tokens that drafts were recorded for, where that is a limit (`MODULES`), and the longest
            that reports show.
        max_tokens: longest answer.
        seed: of the sampling.
        answers: in the order of recording.
        notes: what to know before believing the figures.
        made_of: digest of prompts, temperatures and all settings of the spec that matter.
    """

    spec: str
    method: str
    models: Mapping[str, Model]
    max_draft_tokens: int
    max_tokens: int
    seed: int
    answers: tuple[Answer, ...] = ()
    notes: tuple[str, ...] = ()
    made_of: str = ""
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)  # figures by what was asked for

    @property
    def warnings(self) -> tuple[str, ...]:
        """The notes, and what the prompts themselves give reason for."""
        told = {answer.number: answer.surprise for answer in self.answers if answer.surprise is not None}
        random = [number for number, (own, shuffled) in told.items() if own > SENSELESS * shuffled]
        if not random:
            return self.notes
        lines = ", ".join(map(str, sorted(random)[:5])) + (", ..." if len(random) > 5 else "")
        text = (
            f"{len(random)} of {len(told)} prompts look like random tokens (lines {lines}): the target finds hardly "
            "more sense in them than in the same tokens shuffled, and acceptance on such prompts says nothing"
        )
        return (*self.notes, text)

    def check(self, spec: Spec) -> None:
        """Raise TrtspecError unless every model that both the trace and the spec have is the same, target included."""
        from trtspec.build.sources import Sources

        sources = Sources(spec)
        heads = sources.heads()
        if heads is not None and HEADS in self.models and heads_identity(heads) != self.models[HEADS].identity:
            raise _of_another("heads", self.models[HEADS], spec, ("speculation", spec.speculation.method))
        for role in ("target", *(role for role in spec.models if role in self.models and role != "target")):
            if identity(sources.open(role)) != self.models[role].identity:
                key = ("target",) if role == "target" else ("speculation", "draft")
                raise _of_another(role, self.models[role], spec, key)

    def header(self) -> dict[str, Any]:
        """The first line of the file."""
        return {
            "trace": VERSION,
            **{each.name: getattr(self, each.name) for each in fields(self)[:-1] if each.name not in ("answers",)},
            "models": {role: asdict(model) for role, model in self.models.items()},
        }


def identity(source: ModelSource) -> str:
    """Hash of what a model is: config, vocabulary and some of its weights; the same wherever its files lie."""
    import torch

    from trtspec.models.source import expected_tensors, tokenizer_sha256

    digest = hashlib.sha256(json.dumps(asdict(source.config), sort_keys=True, default=str).encode())
    digest.update(tokenizer_sha256(source).encode())
    for name in ("model.norm.weight", expected_tensors(source.config)[-1]):
        digest.update(source.tensor(name).contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def heads_identity(directory: Path) -> str:
    """The same for a directory of heads: hash of all its weights."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in (".safetensors", ".pt", ".bin"):
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def _of_another(role: str, model: Model, spec: Spec, key: tuple[str, ...]) -> TrtspecError:
    return TrtspecError(
        f"the trace was recorded with another {role}, {model.model}",
        where=spec.where(key),
        fix="record one of these models: trtspec bench acceptance",
    )


def line(content: Mapping[str, Any]) -> str:
    """One line of a trace file."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"


def read_trace(path: Path) -> Trace:
    """The trace in a file.

    Raises:
        TrtspecError: no such file, not a trace, of a version that is not known, or a line that is broken.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "not UTF-8"
        raise TrtspecError(
            f"the trace cannot be read: {problem}", where=str(path), fix="record one: trtspec bench acceptance"
        ) from error
    return parsed(lines, str(path))


def parsed(lines: Iterable[str], where: str) -> Trace:
    """The trace of some lines; `where` and a line's number name what is wrong. Raises TrtspecError as `read_trace`."""
    number = 0
    trace: Trace | None = None
    answers: list[Answer] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            content = json.loads(text)
            if trace is None:
                if content.get("trace") != VERSION:
                    raise _unknown(content.get("trace"), f"{where}:{number}")
                models = {role: Model(**model) for role, model in content["models"].items()}
                names = {each.name for each in fields(Trace)[:-1]} - {"models", "answers", "notes"}
                plain = {name: content[name] for name in names}
                trace = Trace(models=models, notes=tuple(content["notes"]), **plain)
            else:
                answers.append(Answer.from_json(content))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TrtspecError(
                "not a line of a trace", where=f"{where}:{number}", expected="a file of `trtspec bench acceptance`"
            ) from error
    if trace is None or not answers:
        raise TrtspecError("the trace holds no answer", where=where, expected="a file of `trtspec bench acceptance`")
    object.__setattr__(trace, "answers", tuple(answers))
    return trace


def _unknown(version: Any, where: str) -> TrtspecError:
    return TrtspecError(
        "not a trace" if version is None else f"a trace of version {version}",
        where=where,
        expected=f"version {VERSION}",
        fix="record it again: trtspec bench acceptance",
    )


def _rounded(values: NDArray[Any]) -> list[Any]:
    """As lists; numbers to so many digits as float32 has."""
    if values.dtype.kind != "f":
        return values.tolist()
    flat = [float(f"{value:.{_DIGITS}g}") for value in values.ravel().tolist()]
    return flat if values.ndim == 1 else [flat[i : i + values.shape[1]] for i in range(0, len(flat), values.shape[1])]
