"""How many tokens a cycle may draft and emit before it runs into a length.

Knows lengths only.
"""

from __future__ import annotations


def emission_limit(num_generated: int, max_tokens: int, context_length: int, target_context: int | None = None) -> int:
    """Tokens that may still be emitted.

    Args:
        num_generated: tokens emitted so far.
        max_tokens: of the request.
        context_length: tokens of prompt and output so far.
        target_context: tokens that the target can hold; None for no limit.
    """
    remaining = max_tokens - num_generated
    if target_context is not None:
        remaining = min(remaining, target_context - context_length)
    return max(0, remaining)


def clamp_num_draft_tokens(
    num_draft_tokens: int, context_length: int, emission_limit: int, draft_context: int | None = None
) -> int:
    """Draft tokens that have room: the target's own token needs a place in the output, the drafts one in the draft.

    Args:
        num_draft_tokens: wanted.
        context_length: tokens of prompt and output so far.
        emission_limit: tokens that this cycle may emit.
        draft_context: tokens that the draft model can hold; None for no limit.
    """
    room = min(num_draft_tokens, emission_limit - 1)
    if draft_context is not None:
        room = min(room, draft_context - context_length)
    return max(0, room)
