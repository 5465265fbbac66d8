"""The methods whose drafts are made outside the target's engine: what each is called, needs and is made by.

A new method is a module that proposes and learns, and a row in `METHODS`. Knows drafters and engine calls; not where
engines are or who wrote the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from math import prod

from .cascade import Cascade
from .cycle import Drafter
from .draft_target import AcceptanceMode, DraftModel, Target
from .engine_call import EngineCall, EngineCalls, one_by_one
from .ngram import NgramDrafter
from .tree import BRANCHING, MergedTrees, PathsTarget, TreeDrafter, in_one_pass, side_by_side

MIDDLES = ("middle", "middle_2", "middle_3")  # roles of the models between target and draft, from the target down
DRAFTS = ("draft", "draft_2", "draft_3", "draft_4")  # roles of draft models that propose side by side
IN_ENGINE = ("medusa", "mtp", "eagle", "lookahead", "redrafter")  # drafted in the engine: decoded plainly out here


@dataclass(frozen=True)
class DraftEngine:
    """An engine that drafts are made with."""

    call: EngineCall
    context: int | None = None  # tokens that it can hold; None: no limit
    returns_logits: bool = True
    calls: EngineCalls | None = None  # several calls at a time; None: one after the other
    max_draft_len: int = 0  # nodes of a token tree that one call takes; 0: chains only
    num_ids: int | None = None  # ids that the target knows; None: as many as this one


Setting = int | tuple[int, ...]
Engines = Mapping[str, DraftEngine]  # by role: those of MIDDLES and DRAFTS


@dataclass(frozen=True)
class Method:
    """One row: how to draft."""

    make: Callable[..., Drafter]  # of engines, acceptance and the settings by name
    engines: tuple[str, ...] = ()  # roles that it needs beside the target; the first proposes to the target
    further: tuple[str, ...] = ()  # roles that it may use too, next to the first
    settings: tuple[str, ...] = ()  # names of its settings, numbers from 1 on, as in its section of a spec
    lists: tuple[str, ...] = ()  # which of them are several such numbers
    trees: bool = False  # proposes token trees: all roles to the target; else each role proposes to the one before it

    def chosen(self, section: object) -> dict[str, Setting]:
        """The settings that `section` has as attributes; without those that are None."""
        values = {name: getattr(section, name, None) for name in self.settings}
        return {name: value for name, value in values.items() if value is not None}

    def read(self, texts: Mapping[str, str]) -> dict[str, Setting]:
        """Settings from text, by name: `3`, and lists as `2,2,1`; one that is missing is left to the drafter.

        Raises:
            ValueError: one that is no number from 1 on; the message names it.
        """
        settings: dict[str, Setting] = {}
        for name in self.settings:
            if name not in texts:
                continue
            parts = texts[name].split(",") if name in self.lists else [texts[name]]
            if not all(part.strip().isdecimal() and int(part) for part in parts):
                expected = "whole numbers of at least 1 with commas" if name in self.lists else "1 or more"
                raise ValueError(f"{name} is {texts[name]}; expected {expected}")
            numbers = tuple(int(part) for part in parts)
            settings[name] = numbers if name in self.lists else numbers[0]
        return settings

    def roles(self, present: Container[str]) -> tuple[str, ...]:
        """Roles that it uses beside the target, from it down: those that it needs, and further ones of `present`."""
        return (*self.engines[:1], *(role for role in self.further if role in present), *self.engines[1:])

    def pairs(self, present: Container[str]) -> tuple[tuple[str, str], ...]:
        """Of each of `roles` the one that verifies what it proposes, and itself."""
        roles = self.roles(present)
        return tuple(zip(("target",) * len(roles) if self.trees else ("target", *roles), roles, strict=False))

    def proposers(self, present: Container[str]) -> tuple[str, ...]:
        """Which of `roles` propose to the target."""
        return tuple(role for verifier, role in self.pairs(present) if verifier == "target")

    def draft_context(self, engines: Engines) -> int | None:
        """Tokens that all that propose to the target can hold: `Request.draft_context`."""
        contexts = [engines[role].context for role in self.proposers(engines)]
        return min((context for context in contexts if context is not None), default=None)


def written(setting: Setting) -> str:
    """A setting as text, for `Method.read`."""
    return ",".join(str(number) for number in (setting if isinstance(setting, tuple) else (setting,)))


def make_drafter(method: str, engines: Engines, acceptance: AcceptanceMode = "auto", **settings: Setting) -> Drafter:
    """The drafter of one generation.

    Args:
        method: a key of `METHODS`.
        engines: of the roles that the method uses; others are left alone.
        acceptance: how the target accepts, see `DraftModel`; `auto` is `tokens` for engines without logits.
        settings: see `Method.settings`.
    """
    return METHODS[method].make(engines, acceptance, **settings)


def make_chain_verifier(method: str, call: EngineCall, calls: EngineCalls) -> Target:
    """The verifier over a target engine that takes chains only; `calls` is `call` for several requests."""
    return PathsTarget(call, calls) if method in METHODS and METHODS[method].trees else Target(call)


def calls_at_a_time(method: str, settings: Mapping[str, Setting], num_drafts: int = 1) -> int:
    """Calls to one engine that one generation has under way together, where engines take chains only.

    Args:
        method: the method.
        settings: its settings.
        num_drafts: models that propose to the target.
    """
    if method not in METHODS or not METHODS[method].trees:
        return 1
    branching = settings.get("branching", BRANCHING)
    return num_drafts * (prod(branching) if isinstance(branching, tuple) else branching)  # one for each leaf


def _draft_model(engines: Engines, acceptance: AcceptanceMode) -> Drafter:
    return DraftModel(engines["draft"].call, _possible(engines["draft"], acceptance))


def _ngram(engines: Engines, acceptance: AcceptanceMode, **settings: int) -> Drafter:
    return NgramDrafter(**settings)


def _cascade(engines: Engines, acceptance: AcceptanceMode, **settings: int) -> Drafter:
    *middles, lowest = METHODS["cascade"].roles(engines)
    below = engines[lowest]
    drafter: Drafter = DraftModel(below.call, _judged_in_between(below, acceptance))
    for role in reversed(middles):
        middle, to_target = engines[role], role == middles[0]
        drafter = Cascade(
            drafter,
            middle.call,
            acceptance=_possible(middle, acceptance) if to_target else _judged_in_between(middle, acceptance),
            draft_context=below.context,
            role=role,
            **settings,
        )
        below = middle
    return drafter


def _tree(engines: Engines, acceptance: AcceptanceMode, branching: tuple[int, ...] = BRANCHING) -> Drafter:
    num_parents = sum(prod(branching[:level]) for level in range(1, len(branching)))  # nodes that have children
    drafters = []
    for role in METHODS["tree"].roles(engines):
        draft = engines[role]
        if draft.max_draft_len >= num_parents > 0:
            node_logits = in_one_pass(draft.call)
        else:
            node_logits = side_by_side(draft.calls or one_by_one(draft.call))
        drafters.append(TreeDrafter(node_logits, branching, acceptance, num_ids=draft.num_ids, role=role))
    return MergedTrees(drafters) if len(drafters) > 1 else drafters[0]


def _possible(engine: DraftEngine, acceptance: AcceptanceMode) -> AcceptanceMode:
    return "tokens" if acceptance == "auto" and not engine.returns_logits else acceptance


def _judged_in_between(engine: DraftEngine, acceptance: AcceptanceMode) -> AcceptanceMode:
    """How a middle model accepts: what the caller wants of the target is no reason to fail there."""
    return acceptance if engine.returns_logits else "tokens"


METHODS = {
    "draft_target": Method(_draft_model, engines=("draft",)),
    "early_exit": Method(_draft_model, engines=("draft",)),
    "ngram": Method(_ngram, settings=("max_ngram", "window")),
    "tree": Method(
        _tree, engines=DRAFTS[:1], further=DRAFTS[1:], settings=("branching",), lists=("branching",), trees=True
    ),
    "cascade": Method(_cascade, engines=(MIDDLES[0], "draft"), further=MIDDLES[1:], settings=("num_draft_tokens",)),
}
