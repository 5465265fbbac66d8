"""Recording a trace: the target answers each prompt once, then every proposer of the spec reads along, one pass each.

Why reading along is exact: `plan.acceptance`. Each answer is written as soon as it is there, beside the trace, so that
an interrupted recording goes on where it ended. A recording may be dealt out over processes: each does whole groups of
prompts, so that what is answered side by side is what one process answers side by side. Knows models, prompts and the
spec; no figures, no clocks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from trtspec.build.sources import Sources
from trtspec.errors import TrtspecError
from trtspec.models.pair import check_pair
from trtspec.models.source import ModelSource
from trtspec.parity.workbench import tokenization_of
from trtspec.plan.drafting import Drafting
from trtspec.plan.trace import (
    HEADS,
    MODULES,
    Answer,
    Model,
    Proposer,
    Trace,
    heads_identity,
    identity,
    line,
    parsed,
    read_trace,
)
from trtspec.prompts import Prompt
from trtspec.runtime.llama import Llama, check_family, load_weights
from trtspec.shard import WHOLE, Shard, keep_for_this_process
from trtspec.train import generate
from trtspec.train.answers import load_target
from trtspec.train.heads import text_ranks

if TYPE_CHECKING:
    from trtspec.runtime.medusa import MedusaHeads
    from trtspec.spec.schema import Spec

SHOWN_DRAFT_TOKENS = 8  # the longest draft that reports show, unless the spec has a longer one
_SIBLINGS = 4  # children a node that a trace can tell of, unless the spec's tree has more
_GROUP = 4  # prompts that are answered side by side, with all their temperatures
_PIECE = 64  # tokens whose distributions are in memory at a time
_TELLING = (8, 256)  # tokens of a prompt that say whether it makes sense: fewer do not, and so many are enough

Report = Callable[[int, int, str], None]
"""Called with the answers that are done, how many there will be, and a note."""


def record(
    spec: Spec,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    temperatures: Sequence[float] = (0.0,),
    max_tokens: int = 128,
    raw: bool = False,
    seed: int = 0,
    report: Report = lambda done, total, note: None,
    shard: Shard | None = None,
    shards: Path | None = None,
) -> Trace:
    """The trace in `path`, of these prompts: recorded, gone on with, or read where it is there already.

    With `shards` it takes the answers that shards have recorded, and records those that are missing. On machines of one
    kind the trace is, to the byte, that of one process.

    Args:
        spec: the models, and how it drafts.
        prompts: what to answer; a text becomes a user's message where the target has a chat template.
        path: of the trace; it appears when it is complete. `PATH.partial` holds what is done until then.
        temperatures: 0 is greedy; an answer is recorded for each.
        max_tokens: longest answer.
        raw: leave the chat template out.
        seed: of the sampling.
        report: see `Report`.
        shard: records its part alone, into `shards`, and gives that out; `path` is not touched.
        shards: directory of what shards record.

    Raises:
        TrtspecError: models that do not fit each other or cannot be followed, prompts that are too long, another
            process that records the same trace, or shards of something else.
    """
    recorder = Recorder(spec, raw=raw)
    asked = [recorder.encoded(prompt, max_tokens) for prompt in prompts]
    temperatures = sorted(set(temperatures))
    types = [ref.dtype for ref in spec.models.values()]
    settings = [prompts_key(prompts), temperatures, raw, types, spec.speculation.model_dump(mode="json")]
    trace = Trace(
        spec=spec.name,
        method=spec.speculation.method,
        models=recorder.models,
        max_draft_tokens=max(SHOWN_DRAFT_TOKENS, recorder.drafting.depth),
        max_tokens=max_tokens,
        seed=seed,
        notes=tuple(recorder.notes(prompts)),
        made_of=hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
    )
    header = line(trace.header()).encode()
    if shard is not None:
        assert shards is not None
        path = shards / shard.file_name
    if path.is_file() and _header_of(path) == header:
        report(0, 0, f"{path} holds these answers already")
        return read_trace(path)
    given = _given(shards, header, report) if shards is not None and shard is None else {}
    wanted = [(at, temperature) for at in range(len(prompts)) for temperature in temperatures]
    size = _GROUP * len(temperatures)
    begins = list((shard or WHOLE).mine(range(0, len(wanted), size)))
    if not begins:  # there are more shards than groups
        return trace
    total = sum(len(wanted[begin : begin + size]) for begin in begins)
    with _partial(path, header, report) as (file, done):
        count = len(done)
        for begin in begins:
            group = wanted[begin : begin + size]
            keys = [(prompts[at].number, temperature) for at, temperature in group]
            texts: list[list[int]] = [[] for _ in group]
            if not all(key in done or key in given for key in keys):
                report(count, total, "the target answers")
                # A group that was interrupted is drawn again as a whole: then its answers are those of an unbroken run.
                plans = [(asked[at], temperature, max_tokens) for at, temperature in group]
                texts = recorder.answers(plans, seed=seed * 1_000_003 + begin)
            for (at, temperature), key, tokens in zip(group, keys, texts, strict=True):
                if key in done:
                    continue
                if key not in given:
                    report(count, total, "the proposers read along")
                    answer = recorder.followed(prompts[at], asked[at], tokens, temperature, seed)
                file.write(given[key] if key in given else line(answer.to_json()).encode())
                file.flush()
                count += 1
        report(count, total, "done")
    os.replace(_beside(path), path)
    return read_trace(path)


class Recorder:
    """The models of a spec, and what is recorded with them.

    Args:
        spec: the models, and how it drafts.
        raw: leave the chat template out.

    Attributes:
        drafting: how the spec drafts.
        sources: the models, by role.
        models: what a trace says of them.
        target: loaded.

    Raises:
        TrtspecError: models that are damaged, do not fit each other, or that torch does not run.
    """

    def __init__(self, spec: Spec, *, raw: bool = False) -> None:
        self.drafting = Drafting.of(spec)
        self._spec, self._raw = spec, raw
        speculation = spec.speculation
        if speculation.method == "medusa" and speculation.medusa and speculation.medusa.acceptance != "lossless":
            raise TrtspecError(
                "what typical acceptance takes changes the text, so no recorded one tells of it",
                where=spec.where(("speculation", "medusa", "acceptance")),
                fix="use lossless, or measure on the server: trtspec bench serve",
            )
        opened = Sources(spec)
        self.sources = {role: opened.open(role) for role in spec.models}
        for source in self.sources.values():
            check_family(source.config)
            source.check()
        for verifier, role in spec.pairs:
            verdict = check_pair(self.sources[verifier], self.sources[role], verifier=verifier)
            if verdict.verdict == "refuse":
                where = spec.where(("speculation", "draft"))
                raise TrtspecError(verdict.reasons[0], where=where, fix="see `trtspec check`")
        self.models = {}
        for role, source in self.sources.items():
            name = spec.models[role].gguf_file or spec.models[role].model
            self.models[role] = Model(name, source.config.vocab_size, identity(source))
        self._directory = opened.heads()
        if self._directory is not None:
            vocab_size = self.sources["target"].config.vocab_size
            self.models[HEADS] = Model(self._directory.name, vocab_size, heads_identity(self._directory))
        self._tokenization = tokenization_of(self.sources["target"])
        added = self.sources["target"].tokenizer().get_added_tokens_decoder().values()
        self._special = [token.content for token in added if token.special]
        self._surprises: dict[int, tuple[float, float] | None] = {}
        self._loaded = False

    # ---- prompts

    def encoded(self, prompt: Prompt, max_tokens: int) -> list[int]:
        """Ids of a prompt as a server puts them to the target.

        Raises:
            TrtspecError: a conversation that the template refuses, or no room for an answer.
        """
        source = self.sources["target"]
        try:
            text = self._text(prompt, source)
        except TrtspecError as error:
            raise TrtspecError(error.problem, where=f"prompt in line {prompt.number}", fix=error.fix) from error
        ids = self._tokenization.encode(text)
        limit = min(self._spec.max_seq_len("target"), source.config.max_position_embeddings)
        if not ids or len(ids) + max_tokens > limit:
            raise TrtspecError(
                f"{len(ids)} tokens and an answer of {max_tokens} do not fit into {limit}" if ids else "no tokens",
                where=f"prompt in line {prompt.number}",
                fix="shorten the prompt, or lower --max-tokens",
            )
        return ids

    def _text(self, prompt: Prompt, source: ModelSource) -> str:
        if prompt.messages:
            return source.chat(prompt.messages)
        if self._raw or source.chat_template is None or self._is_rendered(prompt.text):
            return prompt.text
        return source.chat([{"role": "user", "content": prompt.text}])

    def _is_rendered(self, text: str) -> bool:
        """Whether a text brings its template along: it has special tokens in it."""
        return any(token in text for token in self._special)

    def notes(self, prompts: Sequence[Prompt]) -> Iterator[str]:
        """What to know of templates before believing the figures."""
        target, *others = self.sources.items()
        template = target[1].chat_template
        bare = sum(not each.messages and not self._is_rendered(each.text) for each in prompts) if self._raw else 0
        if template is not None and bare:
            yield (
                f"{bare} of {len(prompts)} prompts come without the chat template that {target[1].name} was tuned "
                "with: acceptance in conversations will be another"
            )
        if template is None:
            yield f"{target[1].name} has no chat template: prompts are put to it as they are"
        for role, source in others:
            if source.chat_template == template:
                continue
            has = "has no chat template" if source.chat_template is None else "has another chat template"
            yield (
                f"the {role} {source.name} {has}, and the target's is used for both: "
                "it may never have seen texts of this form, and accept less than it could"
            )

    # ---- models

    def _load(self) -> None:
        """Load all models, when first needed."""
        if self._loaded:
            return
        device = "cuda" if self._spec.hardware.gpu != "cpu" and torch.cuda.is_available() else "cpu"

        def load(role: str) -> Llama:
            return load_target(self.sources[role], getattr(torch, self._spec.models[role].dtype), device)

        self.target = load("target")
        self._proposers = {role: load(role) for role in self.drafting.roles}
        self._heads = self._loaded_heads() if self.drafting.method == "medusa" else None
        self._modules = self._target_with_modules(device) if self.drafting.method == "mtp" else None
        self._loaded = True

    def _loaded_heads(self) -> MedusaHeads:
        from trtspec.train.medusa import load_heads

        assert self._directory is not None
        heads = load_heads(self._directory, self.sources["target"])
        vocab_size = self.sources["target"].config.vocab_size
        heads.output = self.target.weights["lm_head.weight"][:vocab_size].float().cpu()
        return heads

    def _target_with_modules(self, device: str) -> Llama:
        from trtspec.runtime.mtp import module_weights

        source, dtype = self.sources["target"], getattr(torch, self._spec.target.dtype)
        modules = {name: read() for name, read in module_weights(source, self._num_modules).items()}
        weights = {name: tensor.to(dtype) for name, tensor in (load_weights(source) | modules).items()}
        return Llama(source.config, weights, device)

    @property
    def _num_modules(self) -> int:
        mtp = self._spec.speculation.mtp
        return min(mtp.num_modules if mtp else 1, max(1, self.drafting.num_draft_tokens))

    # ---- answers

    def answers(self, plans: Sequence[tuple[Sequence[int], float, int]], seed: int) -> list[list[int]]:
        """The target's answers to (ids, temperature, longest answer), side by side; an end id is the last token."""
        self._load()
        capacity = max(len(ids) + budget for ids, _, budget in plans)
        ends = self.sources["target"].config.eos_token_ids
        generator = generate.Generator(self.target, ends, rows=len(plans), capacity=capacity, top_k=None, seed=seed)
        rows = (generate.Answer(i, list(ids), t, budget) for i, (ids, t, budget) in enumerate(plans))
        return [each.tokens for each in sorted(generator.answers(rows), key=lambda each: each.index)]

    @torch.inference_mode()
    def followed(
        self, prompt: Prompt, ids: Sequence[int], tokens: Sequence[int], temperature: float, seed: int = 0
    ) -> Answer:
        """What is recorded of one answer.

        Args:
            prompt: the prompt.
            ids: its tokens.
            tokens: the answer.
            temperature: that it was drawn at; 0 is greedy.
            seed: of the draws for token trees.
        """
        self._load()
        text = torch.tensor([*ids, *tokens])
        states = self.target.hidden(text[None, :-1].to(self.target.device), None, 0)[0, len(ids) - 1 :]  # [A, hidden]
        readers = {role: Reader.of(model, text, len(ids)) for role, model in self._proposers.items()}
        random = torch.Generator(device=self.target.device).manual_seed(seed * 1_000_003 + prompt.number)
        pieces = []
        for begin in range(0, len(tokens), _PIECE):
            emitted = text[len(ids) + begin : len(ids) + begin + _PIECE].to(self.target.device)
            logits = self.target.head(states[begin : begin + _PIECE])[:, : self.target.config.vocab_size]
            pieces.append(self._piece(logits, emitted, begin, readers, temperature, random))
        columns = {
            role: {name: np.concatenate([piece[role][name] for piece in pieces]) for name in pieces[0][role]}
            for role in pieces[0]
        }
        proposers = {role: Proposer(**columns[role]) for role in readers}
        if self._heads is not None:
            ranks = text_ranks(self._heads, states.float().cpu(), text[len(ids) :])
            proposers[HEADS] = Proposer(ranks=ranks.numpy().astype(np.int64))
        if self._modules is not None:
            proposers[MODULES] = Proposer(drafts=self._drafts_of_modules(text.numpy(), len(ids)))
        return Answer(
            number=prompt.number,
            category=prompt.category,
            temperature=temperature,
            prompt_ids=tuple(ids),
            tokens=tuple(tokens),
            p=columns[""]["p"],
            proposers=proposers,
            surprise=self._surprise(prompt),
            agreement=None if prompt.reference is None or temperature else self._agreement(prompt.reference, tokens),
        )

    def _piece(
        self,
        logits: torch.Tensor,
        emitted: torch.Tensor,
        begin: int,
        readers: Mapping[str, Reader],
        temperature: float,
        random: torch.Generator,
    ) -> dict[str, dict[str, NDArray[np.generic]]]:
        """Columns of some tokens by role, and under "" the target's.

        Args:
            logits: `[n, vocab]`, the target's.
            emitted: int64 `[n]`, what was chosen from them.
            begin: place of the first of them in the answer.
        """
        p = _softmax(logits, temperature or 1.0)
        result: dict[str, dict[str, NDArray[np.generic]]] = {"": {"p": _of(p, emitted).cpu().numpy()}}
        ends = list(self.sources["target"].config.eos_token_ids)
        above = p
        for place, (role, reader) in enumerate(readers.items()):
            own, known = reader.logits(begin, len(emitted))  # [n, own vocab], bool [n]
            shared = own[:, : p.shape[1]]
            columns = {
                "rank": torch.where(known, _ranks(shared, emitted), -1),
                "top": torch.where(known, own.argmax(dim=-1), -1),
            }
            if temperature:
                never = [end for end in ends if end < own.shape[1]]
                drawn = own.clone()
                drawn[:, never] = -torch.inf  # end ids are banned where tokens are drawn to be judged
                q = _fitted(_softmax(drawn, temperature), p.shape[1]) * known[:, None]
                columns["q"] = _of(q, emitted)
                of_trees = _fitted(_softmax(shared, temperature), p.shape[1]) * known[:, None]
                columns["siblings"] = siblings(p, of_trees, emitted, self._num_siblings, random)
                if place and self.drafting.method == "cascade":
                    shares = torch.minimum(above, q)
                    columns["overlap"] = shares.sum(dim=-1)
                    rejected = (above - p).clamp_min(0.0) if place == 1 else torch.zeros_like(p)
                    taken = rejected * (q / above.clamp_min(1e-30)).clamp_max(1.0)
                    columns["diverged"] = taken.sum(dim=-1) / rejected.sum(dim=-1).clamp_min(1e-30)
                above = q
            result[role] = {name: column.cpu().numpy() for name, column in columns.items()}
        return result

    @property
    def _num_siblings(self) -> int:
        return max(_SIBLINGS, *self.drafting.branching, 0)

    def _drafts_of_modules(self, text: NDArray[np.int64], begin: int) -> NDArray[np.int64]:
        """int `[A, k]`, see `Proposer.drafts`; none for the first token, which the prompt's own pass gives."""
        from trtspec.runtime.mtp import Modules

        model, k = self._modules, self.drafting.num_draft_tokens
        assert model is not None
        modules = Modules(model, self._num_modules, k)
        cache = model.new_cache(1, len(text) + k, extra_layers=self._num_modules)
        states = model.hidden(torch.from_numpy(text[None, :-1]).to(model.device), cache, 0)[0]
        drafts = np.full((len(text) - begin, k), -1, dtype=np.int64)
        settled = 0
        for end in range(begin + 1, len(text)):
            known = text[settled + 1 : end].astype(np.int32)
            drafts[end - begin] = modules.propose(cache, settled, states[settled : end - 1], known, k)
            settled = max(0, end - self._num_modules)
        return drafts

    # ---- prompts and references, judged

    def _surprise(self, prompt: Prompt) -> tuple[float, float] | None:
        """Nats a token that the target finds in the words of a prompt, and in the same tokens in random order."""
        if prompt.number not in self._surprises:
            words = prompt.text or "\n".join(message["content"] for message in prompt.messages)
            fewest, most = _TELLING
            own = torch.tensor(self.sources["target"].encode(words)[:most])
            order = torch.randperm(len(own), generator=torch.Generator().manual_seed(0))
            self._surprises[prompt.number] = None
            if len(own) >= fewest:
                rows = torch.stack([own, own[order]]).to(self.target.device)  # [2, n]
                logprobs = self.target.head(self.target.hidden(rows[:, :-1], None, 0)).log_softmax(dim=-1)
                mean = -logprobs.gather(2, rows[:, 1:, None]).mean(dim=(1, 2))
                self._surprises[prompt.number] = float(mean[0]), float(mean[1])
        return self._surprises[prompt.number]

    def _agreement(self, reference: str, tokens: Sequence[int]) -> float:
        source = self.sources["target"]
        return overlap([each for each in tokens if each not in source.config.eos_token_ids], source.encode(reference))


@dataclass(frozen=True)
class Reader:
    """A proposer that reads along.

    Attributes:
        model: it.
        states: `[n, hidden]`, what it chooses the first n tokens of the answer from; fewer than there are where an id
            of the text is not in its vocabulary.
    """

    model: Llama
    states: torch.Tensor

    @classmethod
    def of(cls, model: Llama, text: torch.Tensor, begin: int) -> Reader:
        """Read a text int64 `[L]` whose answer begins at `begin`."""
        unknown = (text >= model.config.vocab_size).nonzero()
        seen = text[: int(unknown[0]) if len(unknown) else len(text) - 1].to(model.device)
        if len(seen) < begin:
            return cls(model, torch.empty(0, model.config.hidden_size, dtype=model.dtype, device=model.device))
        return cls(model, model.hidden(seen[None], None, 0)[0, begin - 1 :])

    def logits(self, begin: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`[count, vocab]` from the answer's token `begin` on, and bool `[count]` which of them there are."""
        states = self.states[begin : begin + count]
        logits = torch.zeros(count, self.model.config.vocab_size, device=self.model.device)
        logits[: len(states)] = self.model.head(states)[:, : self.model.config.vocab_size]
        return logits, torch.arange(count, device=self.model.device) < len(states)


def overlap(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """F1 of the tokens of two texts, however they are ordered: 1 where they are the same, 0 where they share none."""
    shared, total = (Counter(ours) & Counter(theirs)).total(), len(ours) + len(theirs)
    return 2 * shared / total if total else 1.0


def siblings(
    p: torch.Tensor, q: torch.Tensor, emitted: torch.Tensor, count: int, random: torch.Generator
) -> torch.Tensor:
    """P(an emitted token is one of the first 1, 2, ... children of its place), each unbiased, the first exact.

    Children are drawn one after another from q without those before, and judged as `decoding.token_tree.verify_tree`
    does: child y is taken with min(1, p(y) / q(y)), else p becomes norm(max(0, p - q)). Turned around: with rejected
    children given, the emitted token x is the next child and taken with probability min(p(x), q(x)) of what p and q
    are by then, times the chance that all before were rejected. That chance is a product of sums over the vocabulary;
    which child was rejected is drawn, once, from norm(max(0, q - p)). The sum over the children never exceeds p(x).

    Args:
        p: `[n, vocab]`, the target's distributions.
        q: `[n, vocab]`, the draft's; a row of zeros proposes nothing.
        emitted: int64 `[n]`.
        count: children.
        random: draws the rejected children.

    Returns:
        float64 `[n, count]`, rising in each row.
    """
    chance = torch.ones(len(p), device=p.device, dtype=torch.float64)  # all children before were rejected
    whole = _of(p, emitted).clamp_min(1e-30).double()
    taken = torch.zeros(len(p), count, device=p.device, dtype=torch.float64)
    for child in range(count):
        taken[:, child] = chance * torch.minimum(_of(p, emitted), _of(q, emitted)).double() / whole
        if child + 1 == count:
            break
        surplus, missing = (q - p).clamp_min(0.0), (p - q).clamp_min(0.0)
        left = surplus.sum(dim=-1)
        goes_on = left > 1e-7  # else p is q up to rounding, or there is no child, and this was the last
        chance = chance * torch.where(goes_on, left, 0.0).double()
        rejected = torch.multinomial(torch.where(goes_on[:, None], surplus, 1.0), 1, generator=random)
        p = missing / missing.sum(dim=-1, keepdim=True).clamp_min(1e-30)
        q = q.scatter(1, rejected, 0.0)
        q = q / q.sum(dim=-1, keepdim=True).clamp_min(1e-30)
    return taken.cumsum(dim=1).clamp_max(1.0)


def _softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits / temperature).softmax(dim=-1)


def _of(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`[n]`: of each row of values `[n, vocab]` that of a token."""
    return values.gather(1, tokens[:, None])[:, 0]


def _fitted(values: torch.Tensor, size: int) -> torch.Tensor:
    """Rows `[n, vocab]` cut to `size`, or with zeros up to it."""
    return torch.nn.functional.pad(values[:, :size], (0, max(0, size - values.shape[1])))


def _ranks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """int64 `[n]`: ids that come before each token, of equal logits the lower ones; -1 for an id without a logit."""
    known = tokens < logits.shape[1]
    own = _of(logits, torch.where(known, tokens, 0))[:, None]
    ids = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > own) | ((logits == own) & (ids < tokens[:, None]))
    return torch.where(known, before.sum(dim=-1), -1)


# ---- files


def prompts_key(prompts: Sequence[Prompt]) -> str:
    """Changes when a prompt does."""
    content = [[each.number, each.text, list(each.messages), each.category, each.reference] for each in prompts]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _header_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline()


@contextmanager
def _partial(path: Path, header: bytes, report: Report) -> Iterator[tuple[IO[bytes], set[tuple[int, float]]]]:
    """The file beside a trace, open to go on with, and the prompts and temperatures that it has already.

    Raises:
        TrtspecError: another process has it open.
    """
    beside = _beside(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside.open("a+b") as file:
        keep_for_this_process(file, "records this trace")
        file.seek(0)
        first = file.readline()
        done: set[tuple[int, float]] = set()
        if first == header:
            kept = len(header)
            for key, text in _whole_answers(file, header, str(beside)):
                done.add(key)
                kept += len(text)
            file.truncate(kept)
            if done:
                report(len(done), 0, f"going on after {len(done)} answers in {beside}")
        else:
            if first:
                report(0, 0, f"{beside} is of other models, prompts or settings: begun anew")
            file.truncate(0)
            file.write(header)
            file.flush()
        yield file, done


def _whole_answers(file: IO[bytes], header: bytes, where: str) -> Iterator[tuple[tuple[int, float], bytes]]:
    """Prompt and temperature of each answer behind the header, and its line; up to one that an end cut off."""
    while (text := file.readline()).endswith(b"\n"):
        try:
            answer = parsed([header.decode(), text.decode()], where).answers[0]
        except (TrtspecError, UnicodeDecodeError):
            return
        yield (answer.number, answer.temperature), text


def _given(shards: Path, header: bytes, report: Report) -> dict[tuple[int, float], bytes]:
    """Lines that shards have recorded, whole ones and interrupted ones, by prompt and temperature.

    Raises:
        TrtspecError: no such directory, or shards of something else.
    """
    if not shards.is_dir():
        raise TrtspecError(
            "no shards here", where=str(shards), fix="record them with --shard 1/N, 2/N, ..., and the same --shards"
        )
    given: dict[tuple[int, float], bytes] = {}
    paths = sorted(path for pattern in ("*.jsonl", "*.jsonl.partial") for path in shards.glob(pattern))
    for path in paths:
        with path.open("rb") as file:
            if (first := file.readline()).endswith(b"\n") and first != header:
                raise TrtspecError(
                    "a shard of other models, prompts or settings",
                    where=str(path),
                    fix="say what it was recorded with, or remove it",
                )
            given |= _whole_answers(file, header, str(path))
    report(0, 0, f"shards in {shards}: {len(given)} answers")
    return given
