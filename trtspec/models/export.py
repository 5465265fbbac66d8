"""Writing a model as a Hugging Face directory that stands by itself, for programs that take nothing else.

One that is such a directory already is linked file by file, without a second copy of the weights. Does not know who
reads it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.models.source import HFSource, ModelSource

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 4 << 30


def export(
    source: ModelSource, destination: Path, dtype: str | None = None, advance: Callable[[float], None] = lambda _: None
) -> None:
    """Make `destination`, with config.json, tokenizer.json, the chat template and the weights as safetensors.

    Args:
        source: any model.
        destination: does not exist yet.
        dtype: float32, float16 or bfloat16 for floating-point weights; None keeps the stored type.
        advance: called with the fraction that is done.

    Raises:
        OSError: it cannot be written.
        TrtspecError: a weight cannot be read.
    """
    if isinstance(source, HFSource) and dtype in (None, source.config.dtype):
        link(source.path, destination, advance)
    else:
        _write(source, destination, dtype, advance)


def link(directory: Path, destination: Path, advance: Callable[[float], None] = lambda _: None) -> None:
    """The files of a directory of weights in `destination`, which does not exist yet: hard links where the file system
    allows them, so that the result does not depend on the original's place.

    Raises:
        OSError: it cannot be written.
    """
    destination.mkdir(parents=True)
    files = [
        path for path in sorted(directory.iterdir()) if path.is_file() and path.suffix not in (".pt", ".bin", ".gguf")
    ]
    for number, path in enumerate(files, start=1):
        real = path.resolve()  # a downloaded model is a directory of symbolic links
        try:
            os.link(real, destination / path.name)
        except OSError:
            shutil.copyfile(real, destination / path.name)
        advance(number / len(files))


def _write(source: ModelSource, destination: Path, dtype: str | None, advance: Callable[[float], None]) -> None:
    from safetensors.torch import save_file

    destination.mkdir(parents=True)
    config = source.config.to_hf() | ({"torch_dtype": dtype} if dtype else {})
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (destination / "tokenizer.json").write_text(source.tokenizer_json(), encoding="utf-8")
    (destination / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": source.chat_template}, indent=2)
        + "\n",
        encoding="utf-8",
    )
    names = [
        name for name in source.tensor_names() if not (source.config.tie_word_embeddings and name == "lm_head.weight")
    ]
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(names, source, dtype), start=1):
        file = destination / f"model-{number:05d}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        file.chmod(0o644)  # save_file keeps its files to the owner
        weight_map |= dict.fromkeys(shard, file.name)
        total += sum(tensor.nbytes for tensor in shard.values())
        advance(len(weight_map) / len(names))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (destination / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(names: list[str], source: ModelSource, dtype: str | None) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in groups of about `SHARD_BYTES`, so that a model larger than the memory can be written."""
    import torch

    shard: dict[str, torch.Tensor] = {}
    for name in names:
        tensor = source.tensor(name)
        if dtype and tensor.is_floating_point():
            tensor = tensor.to(getattr(torch, dtype))
        shard[name] = tensor.contiguous()
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard
