"""Models cut out of other models: the first layers of a decoder, with its norm and head, as a draft of its own.

Knows layers and names of weights. Does not know what the result is used for.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from trtspec.errors import TrtspecError
from trtspec.models.source import ModelSource

if TYPE_CHECKING:
    import torch

LAYER_PREFIX = "model.layers."


def truncated(source: ModelSource, num_layers: int) -> ModelSource:
    """The first `num_layers` layers of a model, its final norm and its head.

    Raises:
        TrtspecError: `num_layers` is not smaller than the model.
    """
    return _Truncated(source, num_layers)


def truncated_fingerprint(whole: str, num_layers: int) -> str:
    """Fingerprint of the first `num_layers` layers of the model with the fingerprint `whole`."""
    return hashlib.sha256(f"{whole}\nfirst {num_layers} layers".encode()).hexdigest()


class _Truncated(ModelSource):
    def __init__(self, source: ModelSource, num_layers: int) -> None:
        layers = source.config.num_hidden_layers
        if not 1 <= num_layers < layers:
            raise TrtspecError(
                f"the first {num_layers} of {layers} layers are no smaller model",
                where=source.name,
                expected=f"1 to {layers - 1} layers",
                fix=f"set early_exit.layer, or the model's num_layers, to at most {layers - 1}",
            )
        self.whole, self.num_layers = source, num_layers
        self.name, self.path = f"{source.name} (first {num_layers} of {layers} layers)", source.path
        # Modules for multi-token prediction stand after the last layer and go with it.
        self.config = replace(source.config, num_hidden_layers=num_layers, num_nextn_predict_layers=0)
        self.chat_template, self.add_bos = source.chat_template, source.add_bos

    def _keeps(self, name: str) -> bool:
        if not name.startswith(LAYER_PREFIX):
            return True
        return int(name.removeprefix(LAYER_PREFIX).split(".", 1)[0]) < self.num_layers

    def tensor_names(self) -> list[str]:
        return [name for name in self.whole.tensor_names() if self._keeps(name)]

    def tensor(self, name: str) -> torch.Tensor:
        if not self._keeps(name):
            raise TrtspecError(f"no weight {name}", where=self.name, expected=f"layers 0 to {self.num_layers - 1}")
        return self.whole.tensor(name)

    def tokenizer_json(self) -> str:
        return self.whole.tokenizer_json()

    def fingerprint(self) -> str:
        return truncated_fingerprint(self.whole.fingerprint(), self.num_layers)

    def check(self) -> None:
        self.whole.check()
