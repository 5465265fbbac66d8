"""Whether a draft fits a target: the verdict before anything heavy, with its reasons.

Knows vocabularies, special ids and context lengths of two opened models. Reads no weights; knows neither how the pair
is built nor how it is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trtspec.models.config import ModelConfig
from trtspec.models.source import ModelSource

Verdict = Literal["accept", "accept_with_note", "refuse"]
_SEVERITY: tuple[Verdict, ...] = ("accept", "accept_with_note", "refuse")


@dataclass(frozen=True)
class PairVerdict:
    """The outcome and everything that led to it, most severe first, one sentence each."""

    verdict: Verdict
    reasons: list[str]


@dataclass(frozen=True)
class _Finding:
    severity: Verdict
    text: str


@dataclass(frozen=True)
class _Side:
    """One model of the pair: its config, the token of each id (added ones too), the ids of added tokens."""

    role: str
    name: str
    config: ModelConfig
    tokens: dict[int, str]
    added: frozenset[int]

    @classmethod
    def of(cls, role: str, model: ModelSource) -> _Side:
        tokenizer = model.tokenizer()
        tokens = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
        return cls(role, model.name, model.config, tokens, frozenset(tokenizer.get_added_tokens_decoder()))

    @property
    def num_ids(self) -> int:
        return max(self.tokens, default=-1) + 1

    def token(self, i: int) -> str:
        return repr(self.tokens[i]) if i in self.tokens else "nothing"


def check_pair(target: ModelSource, draft: ModelSource, *, verifier: str = "target") -> PairVerdict:
    """Compare tokenizers id by id, vocabulary sizes, special ids, context lengths and families.

    Args:
        target: verifies.
        draft: proposes.
        verifier: what a refusal calls the first of them: target, or middle.

    Raises:
        TrtspecError: a model's tokenizer cannot be read.
    """
    sides = _Side.of(verifier, target), _Side.of("draft", draft)
    checks = (_tokenizers, _vocabularies, _special_ids, _contexts, _families)
    findings = sorted((f for check in checks for f in check(*sides)), key=lambda f: -_SEVERITY.index(f.severity))
    return PairVerdict(findings[0].severity, [finding.text for finding in findings])


def _tokenizers(target: _Side, draft: _Side) -> Iterator[_Finding]:
    """Each id must mean the same token to both; only the larger vocabulary may go on after the end of the smaller."""
    for side in (target, draft):
        if not side.tokens:
            yield _Finding("refuse", f"the tokenizer of the {side.role} {side.name} is empty")
            return
    shared = min(target.num_ids, draft.num_ids)
    different = [i for i in range(shared) if target.tokens.get(i) != draft.tokens.get(i)]
    tail = sorted(target.tokens.keys() ^ draft.tokens.keys())
    if different:
        i = different[0]
        yield _Finding(
            "refuse",
            f"the tokenizers differ in {len(different)} of {shared} ids, first in id {i}: {target.token(i)} in the "
            f"{target.role}, {draft.token(i)} in the draft; use a draft with the {target.role}'s tokenizer",
        )
    elif tail:
        larger = target if tail[0] in target.tokens else draft
        added = larger.added.issuperset(tail)
        yield _Finding(
            "accept" if added else "accept_with_note",
            f"the tokenizers agree in all {shared} shared ids; only the {larger.role} goes on, with "
            f"{'added' if added else 'ordinary'} tokens from id {tail[0]}: {larger.token(tail[0])}",
        )
    else:
        yield _Finding("accept", f"the tokenizers agree in all {len(target.tokens)} ids")


def _vocabularies(target: _Side, draft: _Side) -> Iterator[_Finding]:
    """Sizes of the models' output layers, which are often padded beyond the tokenizer."""
    theirs, ours = target.config.vocab_size, draft.config.vocab_size
    for side in (target, draft):
        if side.num_ids > side.config.vocab_size:
            yield _Finding(
                "accept_with_note",
                f"the {side.role}'s tokenizer has {side.num_ids} ids, its model only {side.config.vocab_size}: "
                "a text with one of the others cannot be processed",
            )
    if theirs == ours:
        yield _Finding("accept", f"both vocabularies have {theirs} entries")
        return
    # A difference that is exactly the extra tokens is no padding, and needs no attention.
    explained = (theirs, ours) == (target.num_ids, draft.num_ids)
    rest = "padded with -inf" if ours < theirs else "cut"
    yield _Finding(
        "accept" if explained else "accept_with_note",
        f"the vocabularies have {theirs} (target) and {ours} (draft) entries; draft logits are {rest} to {theirs}",
    )


def _special_ids(target: _Side, draft: _Side) -> Iterator[_Finding]:
    theirs, ours = set(target.config.eos_token_ids), set(draft.config.eos_token_ids)
    if not theirs:
        yield _Finding("accept_with_note", "the target names no EOS id: only max_tokens and stop words end a text")
    elif theirs == ours:
        yield _Finding("accept", f"both end at EOS ids {_listed(theirs)}")
    else:
        yield _Finding(
            "accept_with_note",
            f"EOS ids are {_listed(theirs)} (target) and {_listed(ours)} (draft); the target's count for both",
        )
    if target.config.bos_token_id != draft.config.bos_token_id:
        yield _Finding(
            "accept_with_note",
            f"BOS ids are {target.config.bos_token_id} (target) and {draft.config.bos_token_id} (draft); "
            "both get the target's",
        )


def _contexts(target: _Side, draft: _Side) -> Iterator[_Finding]:
    theirs, ours = target.config.max_position_embeddings, draft.config.max_position_embeddings
    if ours >= theirs:
        yield _Finding("accept", f"the draft's context of {ours} tokens covers the target's {theirs}")
    else:
        yield _Finding(
            "accept_with_note",
            f"the draft's context of {ours} tokens is shorter than the target's {theirs}: longer texts get no drafts",
        )


def _families(target: _Side, draft: _Side) -> Iterator[_Finding]:
    theirs, ours = target.config.model_type, draft.config.model_type
    if theirs == ours:
        yield _Finding("accept", f"both are of the family {theirs}")
    else:
        yield _Finding("accept_with_note", f"the families differ: {theirs} (target) and {ours} (draft)")


def _listed(ids: set[int]) -> str:
    return ", ".join(map(str, sorted(ids))) or "none"
