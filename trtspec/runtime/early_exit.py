"""Self-speculation within one engine: the first layers, the norm and the head propose, the other layers verify.

What the first layers make of a draft token, its keys and values among it, is what a verification needs of them, so that
a verification runs only the layers that are left. Weights and KV cache are those of the target. Knows layers and
sequences; not requests, nor how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from trtspec.models.surgery import truncated_fingerprint
from trtspec.runtime.engine import EngineConfig
from trtspec.runtime.kv_cache import Begun, Sequence
from trtspec.runtime.llama import Llama


def shared_layers(target: EngineConfig, draft: EngineConfig) -> int | None:
    """How many of the target's first layers the draft consists of; None: it is another model, or of another type."""
    whole, num_layers = target.stamp.get("source_fingerprint"), draft.model.num_hidden_layers
    same_weights = whole and draft.stamp.get("source_fingerprint") == truncated_fingerprint(str(whole), num_layers)
    same_type = target.pretrained.get("dtype") == draft.pretrained.get("dtype")
    return num_layers if target.runtime == draft.runtime == "torch" and same_weights and same_type else None


def begin(model: Llama, sequence: Sequence, ids: NDArray[np.int32], num_layers: int) -> torch.Tensor:
    """Run the first layers over `ids` [n], which follow the sequence and what has begun behind it.

    Returns:
        [n, hidden], after layer `num_layers`.
    """
    before = sequence.begun
    start = sequence.length + (len(before.tokens) if before else 0)
    states = model.run(range(num_layers), model.embed(_tensor(model, ids)), sequence.cache, start)[0]
    sequence.begun = Begun(
        tokens=np.concatenate([before.tokens, ids]) if before else ids,
        states=torch.cat([before.states, states]) if before else states,
        num_layers=num_layers,
    )
    return states


def finish(
    model: Llama, sequence: Sequence, ids: NDArray[np.int32], places: Mapping[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """Run all layers over `ids` [n], which follow the sequence, without those that some of them have been through.

    Args:
        places: `mask` and `positions` of `Llama.hidden`, where the ids are no chain; then all is computed.

    Returns:
        [n, hidden], after the last norm.
    """
    begun, start = sequence.begun, sequence.length
    if begun is None or begun.tokens[0] != ids[0] or places:
        return model.hidden(_tensor(model, ids), sequence.cache, start, **(places or {}))[0]
    both = min(len(begun.tokens), len(ids))
    shared = int(np.cumprod(begun.tokens[:both] == ids[:both]).sum())
    states = begun.states[:shared]
    if shared < len(ids):
        rest = model.embed(_tensor(model, ids[shared:]))
        states = torch.cat([states, model.run(range(begun.num_layers), rest, sequence.cache, start + shared)[0]])
    left = range(begun.num_layers, model.config.num_hidden_layers)
    return model.norm(model.run(left, states[None], sequence.cache, start)[0])


def _tensor(model: Llama, ids: NDArray[np.int32]) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(model.device)[None]
