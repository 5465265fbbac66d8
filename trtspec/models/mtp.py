"""What a checkpoint says about multi-token prediction: how many modules its config names, and whether they are there.

The modules are stored as decoder layers behind the last one, as DeepSeek-V3 stores them. Reads the config and the names
of the weights only; does not know what runs the modules.
"""

from __future__ import annotations

import math

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.models.source import ModelSource

LAYER = "model.layers.{}."
OWN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")  # of a module, besides a decoder layer
SHARED = ("embed_tokens", "shared_head.head")  # the target's, which some checkpoints store once more


def module_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Where the weights of each module begin: the layers that follow `num_hidden_layers`."""
    first = config.num_hidden_layers
    return tuple(LAYER.format(first + number) for number in range(config.num_nextn_predict_layers))


def num_module_weights(source: ModelSource, num_modules: int) -> int:
    """How many numbers the first modules of a checkpoint hold, by the headers of its files."""
    prefixes = module_prefixes(source.config)[:num_modules]
    shapes = (source.shape(name) for name in source.tensor_names() if name.startswith(prefixes))
    return sum(math.prod(shape) for shape in shapes)


def check_mtp(source: ModelSource, num_modules: int) -> None:
    """Refuse a checkpoint without the `num_modules` multi-token prediction modules that method mtp is to use.

    Raises:
        TrtspecError: its config names none or fewer, or weights of one are not in the files, or another model's.
    """
    prefixes = module_prefixes(source.config)
    if not prefixes:
        raise TrtspecError(
            "method mtp, but num_nextn_predict_layers is 0: this model has no multi-token prediction module",
            where=str(source.path),
            fix="use a checkpoint with one, or set speculation.method: draft_target or ngram",
        )
    if num_modules > len(prefixes):
        raise TrtspecError(
            f"{num_modules} multi-token prediction modules are asked for, but num_nextn_predict_layers is "
            f"{len(prefixes)}",
            where=str(source.path),
            fix=f"set speculation.mtp.num_modules to at most {len(prefixes)}",
        )
    names = set(source.tensor_names())
    for number, prefix in enumerate(prefixes[:num_modules], start=1):
        if not any(name.startswith(prefix) for name in names):
            raise TrtspecError(
                f"no weight under {prefix}, where multi-token prediction module {number} of {len(prefixes)} should be",
                where=str(source.path),
                expected="a checkpoint that was saved with its num_nextn_predict_layers",
                fix="download the original again; conversions often leave this module out",
            )
    _check_parts(source, names, prefixes[:num_modules])


def _check_parts(source: ModelSource, names: set[str], prefixes: tuple[str, ...]) -> None:
    """What each module has besides its decoder layer is there, and as large as this model's."""
    parts = [f"{prefix}{name}.weight" for prefix in prefixes for name in (*OWN, "self_attn.o_proj")]
    if missing := [name for name in parts if name not in names]:
        raise TrtspecError(
            f"weight {missing[0]} of a multi-token prediction module is missing ({len(missing)} in all)",
            where=source.name,
            expected=f"in each module: {', '.join(OWN)} and a decoder layer",
            fix="download the original again; conversions often leave these out",
        )
    if source.is_quantized:  # packed weights have other shapes
        return
    hidden, vocab = source.config.hidden_size, source.config.vocab_size
    right = {name: (vocab, hidden) for name in SHARED} | {name: (hidden,) for name in OWN}
    right["eh_proj"] = (hidden, 2 * hidden)
    for prefix in prefixes:
        for part, size in right.items():
            name = f"{prefix}{part}.weight"
            if name in names and source.shape(name) != size:
                raise TrtspecError(
                    f"{name} has shape {list(source.shape(name))}",
                    where=source.name,
                    expected=f"{list(size)}, for a model of hidden size {hidden} and {vocab} ids",
                    fix="use a checkpoint whose modules were saved with it",
                )
