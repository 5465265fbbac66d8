"""At which rank a draft model has the target's own tokens. Knows two models' tokens; does not know trees or specs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from trtspec.runtime.llama import Llama
from trtspec.train.heads import ranks_in

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@torch.inference_mode()
def draft_ranks(
    draft: Llama, prompt: Sequence[int], answer: Sequence[int], depth: int, num_ids: int
) -> NDArray[np.int16]:
    """Where the tokens of a greedy answer rank in what a tree of the draft proposes, level by level.

    A node can only be accepted where all above it were, and then what the draft continued is the answer itself. So one
    pass of the draft over the answer gives the ranks of every level at every place, exactly: that of a token is the
    same on whichever level it comes. How often a level is right still depends on the level, since the places that are
    reached differ; `accuracies_of` counts each level by itself.

    Args:
        draft: the draft model.
        prompt: ids of the prompt.
        answer: the target's.
        depth: levels of the tree.
        num_ids: ids that the target knows; others are not proposed.

    Returns:
        int16 `[A + 1, depth]`: at `[i, d]` the rank of answer token i + d, from i tokens of the answer on; -1 where it
        is not among the first `trtspec.train.heads.NUM_RANKS`, the text ends before, or the draft does not know an id
        of the text.
    """
    ids = torch.tensor([*prompt, *answer], device=draft.device)
    unknown = (ids >= draft.config.vocab_size).nonzero()
    seen = int(unknown[0]) if len(unknown) else len(ids) - 1  # what the draft can continue
    ranks = torch.full((len(answer) + depth,), -1, dtype=torch.int16)
    if (count := seen - len(prompt) + 1) > 0:
        logits = draft.head(draft.hidden(ids[None, :seen], None, 0)[0, len(prompt) - 1 :])
        ranks[:count] = ranks_in(logits[:, :num_ids], ids[len(prompt) : len(prompt) + count]).cpu()
    return ranks.unfold(0, depth, 1).numpy()
