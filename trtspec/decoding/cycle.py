"""The decoding cycle: propose, verify, learn, commit.

`generate` is the one loop that every method and every runtime goes through. It knows a drafter by two methods
and a verifier by one; not models, engines or servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from .engine_call import Cancelled
from .generation import Block, FinishReason, Generation
from .request import Request
from .verify import NO_PROPOSAL, Proposal, Verification

__all__ = [
    "Block",
    "Drafter",
    "FinishReason",
    "Generation",
    "NoDrafter",
    "Pace",
    "Proposal",
    "Request",
    "Verification",
    "Verifier",
    "generate",
    "propose",
    "run",
]


def generate(
    request: Request,
    drafter: Drafter | None,
    verifier: Verifier,
    *,
    decode: Callable[[list[int]], str] | None = None,
    continuation_ids: Sequence[int] = (),
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Block]:
    """Continue a prompt, block by block; the last block, and only it, has a finish reason.

    Args:
        request: the prompt and how to continue it.
        drafter: proposes tokens; None for plain decoding. Whatever it proposes or raises, the text keeps the target's
            distribution.
        verifier: the target. What it raises ends the generation, except `Cancelled`.
        decode: token ids to text; without it blocks carry ids only.
        continuation_ids: see `detokenize.continuation_ids`.
        cancelled: asked before every engine call; once it says yes there is no further call.
    """
    generation = Generation(request, decode, continuation_ids, cancelled, may_draft=drafter is not None)
    return run(generation, drafter or NoDrafter(), verifier)


def run(generation: Generation, drafter: Drafter, verifier: Verifier, pace: Pace | None = None) -> Iterator[Block]:
    """The cycles that a generation still needs to its end, block by block, as `generate` does from its beginning.

    Args:
        generation: where to go on.
        drafter: one that knows nothing yet of this generation.
        verifier: the target.
        pace: limits what is drafted in each cycle; None: as much as there is room for.
    """
    pace = pace or Pace()
    try:
        while generation.finish_reason is None:
            generation.draft_limit = pace.begin(generation)
            proposal = propose(generation, drafter)  # as many draft tokens as there is room for, perhaps none
            pace.proposed(generation, proposal)
            verification = verifier.verify(generation, proposal)  # accepted drafts, then the target's own token
            pace.verified(generation, proposal, verification)
            drafter.learn(verification)
            yield generation.commit(proposal, verification)  # end ids, stop strings, lengths, text, counters
    except Cancelled:
        yield generation.cancel()


class Pace:
    """How much is drafted in a cycle; told how the cycle goes on. This one sets no limit.

    A limit may depend on load, on clocks, and on everything that was committed before, but not on the draft tokens of
    its own cycle: then the output keeps the target's distribution, whatever the limits are.
    """

    def begin(self, generation: Generation) -> int | None:
        """Most draft tokens of the cycle that begins now; None: no limit but the request's."""
        return None

    def proposed(self, generation: Generation, proposal: Proposal) -> None:
        """The drafter is done."""

    def verified(self, generation: Generation, proposal: Proposal, verification: Verification) -> None:
        """The target is done; nothing is committed yet."""


class Drafter(Protocol):
    """Whatever proposes: a draft model, heads, an early exit, an n-gram table, a cascade."""

    def propose(self, generation: Generation, num_draft_tokens: int) -> Proposal:
        """At most `num_draft_tokens` tokens to follow `generation.context`, one after another; none is allowed.

        A token tree may have more nodes than that, up to `generation.node_room`.
        """

    def learn(self, verification: Verification) -> None:
        """What became of the last proposal; also called after a cycle without one."""


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def propose(self, generation: Generation, num_draft_tokens: int) -> Proposal:
        """Nothing."""
        return NO_PROPOSAL

    def learn(self, verification: Verification) -> None:
        """Nothing to learn."""


class Verifier(Protocol):
    """The target."""

    def verify(self, generation: Generation, proposal: Proposal) -> Verification:
        """The accepted drafts and one own token; `generation.num_new_tokens(0)` own tokens when nothing is proposed.

        Calls `generation.raise_if_cancelled()` before it starts anything expensive.
        """


def propose(generation: Generation, drafter: Drafter) -> Proposal:
    """Ask the drafter for as many tokens as there is room for; whatever goes wrong there, the target goes on alone."""
    generation.raise_if_cancelled()
    room = generation.draft_room
    if room == 0:
        return NO_PROPOSAL
    try:
        proposal = drafter.propose(generation, room)
        if proposal.depth > room:
            raise ValueError(f"the drafter proposed {proposal.depth} tokens where {room} were asked for")
    except Cancelled:
        raise
    except Exception as error:
        generation.draft_failed(error)
        return NO_PROPOSAL
    generation.draft_succeeded(len(proposal.tokens))
    return proposal
