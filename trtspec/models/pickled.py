"""State dictionaries that PyTorch pickled, read without running anything that is in them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    import torch


def load_pickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .pt or .bin file, by name.

    Raises:
        TrtspecError: not such a file, or one that would run code when opened.
    """
    import pickle

    import torch

    try:
        with warnings.catch_warnings():  # of old pickle protocols
            warnings.simplefilter("ignore")
            state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise TrtspecError(
            "not a file of tensors, or one that would run code when opened",
            where=str(path),
            fix="save the weights as safetensors",
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise TrtspecError("not a state dictionary", where=str(path), expected="tensors by name")
    return state
