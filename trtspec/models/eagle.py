"""EAGLE heads as they are published: what must be in their files before anything is made of them.

Knows the fusion layer `fc`, its bias, and the reduced vocabulary of EAGLE-3. Reads headers, and of tensors the two
small ones that map ids. Does not know what runs the heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError
from trtspec.models.pickled import load_pickled
from trtspec.models.source import safetensors_header

if TYPE_CHECKING:
    import torch

    from trtspec.models.config import ModelConfig

_PICKLED = "pytorch_model.bin"


@dataclass(frozen=True)
class EagleHeads:
    """Heads on disk.

    Attributes:
        path: the directory.
        config: its config.json.
        shapes: shape of each tensor.
        read: reads a tensor by its name.
    """

    path: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], torch.Tensor]

    @property
    def draft_vocab_size(self) -> int | None:
        """Rows of a reduced output matrix (EAGLE-3); None where config.json names none."""
        size = self.config.get("draft_vocab_size")
        return None if size is None else int(size)


def open_eagle(directory: Path) -> EagleHeads:
    """Look at the heads in a directory: the headers of safetensors files, or pytorch_model.bin.

    Raises:
        TrtspecError: no heads there.
    """
    path = directory / "config.json"
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrtspecError("no EAGLE heads: config.json is missing", where=str(directory)) from None
    except ValueError as error:
        raise TrtspecError(f"not valid JSON ({error})", where=str(path)) from error
    config = config if isinstance(config, dict) else {}
    files = sorted(directory.glob("*.safetensors"))
    if not files and (directory / _PICKLED).is_file():
        state = load_pickled(directory / _PICKLED)
        return EagleHeads(
            directory, config, {name: tuple(tensor.shape) for name, tensor in state.items()}, state.__getitem__
        )
    if not files:
        raise TrtspecError("no EAGLE heads: no weights", where=str(directory), expected=f"*.safetensors, or {_PICKLED}")
    headers = {file: safetensors_header(file) for file in files}
    places = {name: file for file, header in headers.items() for name in header if name != "__metadata__"}

    def read(name: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(places[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    return EagleHeads(
        directory, config, {name: tuple(headers[file][name]["shape"]) for name, file in places.items()}, read
    )


def check_eagle(directory: Path, target: ModelConfig, version: int) -> EagleHeads:
    """Refuse heads that are not whole, of another version or of another target.

    Args:
        directory: config.json and weights.
        target: the model that the heads are to draft for.
        version: 1, or 3.

    Raises:
        TrtspecError: what is wrong.
    """
    heads = open_eagle(directory)
    where = str(directory)
    if "fc.weight" not in heads.shapes:
        raise TrtspecError("no EAGLE heads: tensor fc.weight is missing", where=where)
    has_bias = "fc.bias" in heads.shapes
    says_bias = bool(heads.config.get("bias", has_bias))
    if says_bias != has_bias:
        raise TrtspecError(
            f"config.json says bias: {str(says_bias).lower()}, but tensor fc.bias is "
            f"{'there' if has_bias else 'missing'}",
            where=where,
            expected="config.json and weights of the same heads",
            fix=f"set bias: {str(has_bias).lower()} in config.json if the weights are right, or download them again",
        )
    output, fused = heads.shapes["fc.weight"]
    hidden = int(heads.config.get("hidden_size", target.hidden_size))
    # EAGLE-1 joins the token's embedding with one hidden state, EAGLE-3 the hidden states of three layers.
    joined = 2 * hidden if version == 1 else 3 * target.hidden_size
    if (output, fused) != (hidden, joined) or (version == 1 and hidden != target.hidden_size):
        right = [target.hidden_size, 2 * target.hidden_size] if version == 1 else [hidden, joined]
        raise TrtspecError(
            f"fc.weight has shape {[output, fused]}",
            where=where,
            expected=f"{right} for EAGLE-{version} heads on a target of hidden size {target.hidden_size}",
            fix="use heads trained for this target, and the speculation.eagle.version that they are of",
        )
    vocab = int(heads.config.get("vocab_size", target.vocab_size))
    if vocab != target.vocab_size:
        raise TrtspecError(
            f"the heads are for a vocabulary of {vocab} ids, the target has {target.vocab_size}",
            where=where,
            fix="use the heads that were trained for this target",
        )
    if version == 3:
        _check_reduced_vocabulary(heads, vocab)
    return heads


def _check_reduced_vocabulary(heads: EagleHeads, vocab_size: int) -> None:
    draft_vocab_size = heads.draft_vocab_size or vocab_size
    if "d2t" not in heads.shapes:
        if draft_vocab_size < vocab_size:
            raise TrtspecError(
                f"tensor d2t is missing: nothing says which of the {vocab_size} ids the {draft_vocab_size} ids of the "
                "draft are",
                where=str(heads.path),
                expected=f"d2t [{draft_vocab_size}]",
                fix="download the heads again, or export them with d2t",
            )
        return
    if heads.shapes["d2t"] != (draft_vocab_size,):
        raise TrtspecError(
            f"d2t has shape {list(heads.shapes['d2t'])}",
            where=str(heads.path),
            expected=f"[{draft_vocab_size}], draft_vocab_size in config.json",
        )
    t2d = heads.read("t2d") if "t2d" in heads.shapes else None
    draft_ids(heads.read("d2t"), vocab_size, t2d, where=str(heads.path))


def draft_ids(
    d2t: torch.Tensor, vocab_size: int, t2d: torch.Tensor | None = None, *, where: str | None = None
) -> torch.Tensor:
    """The target's id of each id of a reduced draft vocabulary: `i + d2t[i]`.

    Args:
        d2t: `[draft_vocab]` offsets.
        vocab_size: of the target.
        t2d: bool `[vocab]`, the target ids that the draft has; decides whether d2t holds offsets at all.
        where: file or directory for messages.

    Returns:
        int64 `[draft_vocab]`, rising.

    Raises:
        TrtspecError: d2t holds ids instead of offsets, leaves the vocabulary, or contradicts t2d.
    """
    import torch

    ids = d2t.long() + torch.arange(len(d2t))
    marked = None if t2d is None else t2d.bool().nonzero().flatten()
    if (
        marked is not None
        and len(marked) == len(d2t)
        and torch.equal(d2t.long(), marked)
        and not torch.equal(ids, marked)
    ):
        raise TrtspecError(
            "d2t holds absolute ids, as t2d shows",
            where=where,
            expected="offsets: the target's id of draft id i is i + d2t[i]",
            fix="subtract torch.arange(len(d2t)) from d2t",
        )
    if marked is not None and not torch.equal(ids, marked):
        raise TrtspecError(
            f"d2t and t2d disagree: d2t maps to {_some(ids)}, t2d marks {_some(marked)}",
            where=where,
            expected="d2t and t2d of the same heads",
        )
    rising = bool((ids[1:] > ids[:-1]).all())
    if not rising or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise TrtspecError(
            f"d2t maps to {_some(ids)}, which are no different ids below {vocab_size} in rising order",
            where=where,
            expected="offsets: the target's id of draft id i is i + d2t[i]",
        )
    return ids


def _some(ids: torch.Tensor) -> str:
    shown = ", ".join(str(int(i)) for i in ids[:6])
    return f"[{shown}{', ...' if len(ids) > 6 else ''}]"
