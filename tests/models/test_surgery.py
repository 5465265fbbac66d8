"""The first layers of a model as a model of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trtspec.errors import TrtspecError
from trtspec.models.source import open_model
from trtspec.models.surgery import truncated
from trtspec.runtime.llama import Llama, load_weights


def test_the_first_layers_with_norm_and_head(tiny_model_dir: Path) -> None:
    whole = open_model(str(tiny_model_dir))
    cut = truncated(whole, 1)
    cut.check()
    assert cut.config.num_hidden_layers == 1
    assert (cut.config.vocab_size, cut.config.eos_token_ids) == (whole.config.vocab_size, whole.config.eos_token_ids)
    assert set(whole.tensor_names()) - set(cut.tensor_names()) == {
        name for name in whole.tensor_names() if name.startswith("model.layers.1.")
    }
    assert cut.tokenizer_json() == whole.tokenizer_json()
    assert cut.chat([{"role": "user", "content": "a"}]) == whole.chat([{"role": "user", "content": "a"}])
    with pytest.raises(TrtspecError, match=r"no weight model\.layers\.1\.mlp\.down_proj\.weight; expected layers 0"):
        cut.tensor("model.layers.1.mlp.down_proj.weight")


def test_it_computes_what_the_whole_model_computes_up_to_there(tiny_model_dir: Path) -> None:
    whole = open_model(str(tiny_model_dir))
    cut = truncated(whole, 1)
    ids = torch.tensor([[5, 6, 7]])
    model = Llama(cut.config, load_weights(cut))
    # The whole model with its second layer made to add nothing.
    weights = load_weights(whole)
    for name in ("attention.dense", "mlp.proj"):
        weights[f"transformer.layers.1.{name}.weight"] = torch.zeros_like(
            weights[f"transformer.layers.1.{name}.weight"]
        )
    plain = Llama(whole.config, weights)
    torch.testing.assert_close(
        model.forward(ids, model.new_cache(1, 3), 0), plain.forward(ids, plain.new_cache(1, 3), 0)
    )


def test_every_depth_has_its_own_fingerprint(tiny_model_dir: Path) -> None:
    whole = open_model(str(tiny_model_dir))
    assert truncated(whole, 1).fingerprint() == truncated(open_model(str(tiny_model_dir)), 1).fingerprint()
    assert truncated(whole, 1).fingerprint() != whole.fingerprint()


@pytest.mark.parametrize("layers", [0, 2, 3])
def test_it_must_be_shorter_than_the_model(tiny_model_dir: Path, layers: int) -> None:
    with pytest.raises(
        TrtspecError, match=rf"the first {layers} of 2 layers are no smaller model; expected 1 to 1 layers"
    ):
        truncated(open_model(str(tiny_model_dir)), layers)
