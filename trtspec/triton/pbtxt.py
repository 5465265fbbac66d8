"""Model configs: from the rows of the contract to the text of config.pbtxt.

Knows Triton's protobuf messages, and not which models there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from trtspec.triton.contract import LOGITS, Tensor

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig


def model_config(
    name: str,
    inputs: Iterable[Tensor],
    outputs: Iterable[Tensor],
    max_batch_size: int,
    parameters: Mapping[str, str],
    backend: str = "",
    logits_dtype: str = "FP32",
) -> ModelConfig:
    """The config of one model, without instances and batching. `logits_dtype` is what LOGITS stands for in the rows."""
    from tritonclient.grpc import model_config_pb2 as pb

    def data_type(tensor: Tensor) -> str:
        return f"TYPE_{logits_dtype if tensor.dtype == LOGITS else tensor.dtype}"

    config = pb.ModelConfig(name=name, backend=backend, max_batch_size=max_batch_size)
    for tensor in inputs:
        entry = config.input.add(
            name=tensor.name,
            data_type=data_type(tensor),
            dims=tensor.dims,
            optional=tensor.optional,
            allow_ragged_batch=tensor.ragged,
        )
        if tensor.scalar:
            entry.reshape.SetInParent()
    for tensor in outputs:
        config.output.add(name=tensor.name, data_type=data_type(tensor), dims=tensor.dims)
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


def flag(value: bool) -> str:
    """The value of a parameter that is on or off."""
    return "true" if value else "false"


def to_text(config: ModelConfig) -> str:
    """The text of config.pbtxt, the same for the same config."""
    from google.protobuf import text_format

    # map entries are printed in the order of their keys, everything else in the order of its declaration
    return str(text_format.MessageToString(config, as_utf8=True))
