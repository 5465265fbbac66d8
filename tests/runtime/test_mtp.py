"""Multi-token prediction in the engine: the modules' arithmetic, their cache, and that the text stays the target's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from trtspec.cli import main
from trtspec.decoding.engine_call import Cancelled, EngineRequest, EngineResult
from trtspec.decoding.sampling import SamplingParams
from trtspec.errors import TrtspecError
from trtspec.models.source import open_model
from trtspec.runtime.engine import write_torch_engine
from trtspec.runtime.mtp import module_weights
from trtspec.runtime.torch_runtime import TorchRuntime

LAYERS, HIDDEN = 2, 32
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1)


def save_with_modules(save_model: Callable[..., Path], path: Path, num_modules: int, **config: Any) -> Path:
    """A target whose layers add little to the embedding, so that a module knows the next token from it.

    A module takes the normalised embedding through `eh_proj` (and a little of the hidden state), and its layer is the
    target's last one: often right, and not always.
    """
    save_model(path, num_hidden_layers=LAYERS, num_nextn_predict_layers=num_modules, **config)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]:
        tensors[name] *= 0.05
    generator = torch.Generator().manual_seed(7)
    for layer in range(LAYERS, LAYERS + num_modules):
        last = f"model.layers.{LAYERS - 1}."
        tensors |= {
            name.replace(last, f"model.layers.{layer}."): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(last)
        }
        little = 0.02 * torch.randn(HIDDEN, HIDDEN, generator=generator)
        tensors |= {
            f"model.layers.{layer}.enorm.weight": torch.ones(HIDDEN),
            f"model.layers.{layer}.hnorm.weight": 1.0 + 0.1 * torch.randn(HIDDEN, generator=generator),
            f"model.layers.{layer}.eh_proj.weight": torch.cat([torch.eye(HIDDEN), little], dim=1),
            f"model.layers.{layer}.shared_head.norm.weight": tensors["model.norm.weight"].clone(),
        }
    save_file(tensors, path / "model.safetensors")
    return path


def build(model: Path, out: Path, num_modules: int, num_draft_tokens: int) -> Path:
    source = open_model(str(model))
    section = {"method": "mtp", "num_modules": num_modules, "num_draft_tokens": num_draft_tokens}
    write_torch_engine(
        source,
        out,
        dtype="float32",
        role="target",
        build_config={"max_draft_len": 4},
        stamp={"speculation": section} if num_modules else {},
        extra=module_weights(source, num_modules) if num_modules else {},
    )
    return out


@pytest.fixture(scope="module")
def model(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_modules(save_model, tmp_path_factory.mktemp("mtp") / "model", 2)


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TorchRuntime]:
    """A fresh runtime of the model with so many modules and draft tokens; 0 modules decode plainly."""
    out = tmp_path_factory.mktemp("engines")

    def make(num_modules: int, num_draft_tokens: int = 0) -> TorchRuntime:
        path = out / f"{num_modules}-{num_draft_tokens}"
        if not path.exists():
            build(model, path, num_modules, num_draft_tokens)
        return TorchRuntime(path, kv_cache_bytes=1 << 23)

    return make


SETTINGS = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 5)]  # modules, draft tokens


def ids(result: EngineResult) -> list[int]:
    return result.output_ids.tolist()


@pytest.mark.parametrize(("num_modules", "num_draft_tokens"), SETTINGS)
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_the_answer_is_that_of_plain_decoding(
    engines: Callable[..., TorchRuntime],
    rng: np.random.Generator,
    num_modules: int,
    num_draft_tokens: int,
    sampling: SamplingParams,
) -> None:
    """Token by token with the same random numbers, so with the same distribution; prompts from one token on."""
    plain, drafting = engines(0), engines(num_modules, num_draft_tokens)
    drafted = accepted = 0
    for number in range(12):
        request = EngineRequest(
            rng.integers(3, 280, size=1 + 3 * number).astype(np.int32), 30, replace(sampling, seed=number)
        )
        result = drafting.execute(request)
        assert ids(result) == ids(plain.execute(request))
        drafted += result.num_draft_tokens
        accepted += result.num_accepted
    # Chance would be 1 in 280. A draw of this temperature equals the likeliest token less often.
    assert (0.3 if sampling.greedy else 0.02) < accepted / drafted < 0.98


def test_a_conversation_in_chunks_with_end_ids_bans_and_outputs(
    engines: Callable[..., TorchRuntime], rng: np.random.Generator
) -> None:
    """As the pipeline asks: a few tokens a call, everything that was said so far as input."""
    plain, drafting = engines(0), engines(2, 3)
    context = rng.integers(3, 280, size=9).astype(np.int32)
    common: list[int] = []
    for chunk in (1, 2, 7, 3, 16, 5):
        request = EngineRequest(
            context,
            chunk,
            SamplingParams(repetition_penalty=1.1),
            end_id=common[2] if len(common) > 8 else None,
            min_new_tokens=min(2, chunk),
            bad_words=((17,), (5, 6)),
            return_log_probs=True,
            return_generation_logits=True,
        )
        mine, theirs = drafting.execute(request), plain.execute(request)
        assert ids(mine) == ids(theirs)
        np.testing.assert_allclose(mine.log_probs, theirs.log_probs, atol=1e-4)
        np.testing.assert_allclose(mine.generation_logits, theirs.generation_logits, atol=1e-3)
        common += ids(mine)
        context = np.concatenate([context, mine.output_ids])


@pytest.mark.parametrize("num_modules", [1, 2])
def test_the_cache_is_that_of_a_fresh_prefill(
    engines: Callable[..., TorchRuntime], rng: np.random.Generator, num_modules: int
) -> None:
    """All layers, those of the modules among them, after several calls in which drafts were accepted and rejected; and
    again after a call that goes back and says something else."""
    used = engines(num_modules, 4)
    context = rng.integers(3, 280, size=6).astype(np.int32)
    drafted = accepted = 0
    for number in range(6):
        result = used.execute(EngineRequest(context, 11, replace(SAMPLED, seed=number)))
        context = np.concatenate([context, result.output_ids])
        drafted += result.num_draft_tokens
        accepted += result.num_accepted
        if number == 3:
            context = np.concatenate([context[:-9], np.array([5, 9, 7, 11], dtype=np.int32)])
            # Drafts from elsewhere are verified as in any other engine; the modules do not see that call.
            used.execute(EngineRequest(context, 4, draft_tokens=np.array([8, 8, 8], dtype=np.int32)))
    assert 0 < accepted < drafted
    ours = used._cache._sequences[-1]
    length = ours.length
    fresh = engines(num_modules, 4)
    fresh.execute(EngineRequest(np.append(ours.tokens[:length], context[length:]).astype(np.int32), 4))
    theirs = fresh._cache._sequences[-1]
    settled = ours.drafter_length - num_modules
    assert settled > 40
    for mine, other in ((ours.cache.k, theirs.cache.k), (ours.cache.v, theirs.cache.v)):
        assert mine.shape[0] == LAYERS + num_modules
        torch.testing.assert_close(mine[:LAYERS, :, :, :length], other[:LAYERS, :, :, :length], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine[:, :, :, :settled], other[:, :, :, :settled], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_drafts_are_those_of_the_published_formula(
    model: Path, engines: Callable[..., TorchRuntime], rng: np.random.Generator
) -> None:
    """The modules over a whole text in transformers' own layers, without a cache: the first two drafts."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaRMSNorm

    tensors = load_file(model / "model.safetensors")
    config = LlamaConfig(**json.loads((model / "config.json").read_text()), attn_implementation="eager")
    target = LlamaForCausalLM(config).eval()
    modules = ("model.layers.2.", "model.layers.3.")
    target.load_state_dict({name: tensor for name, tensor in tensors.items() if not name.startswith(modules)})

    def module(number: int, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        prefix = f"model.layers.{LAYERS + number}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        layer = LlamaDecoderLayer(config, 0).eval()
        layer.load_state_dict({name: tensor for name, tensor in own.items() if name in layer.state_dict()})
        norms = {}
        for name in ("enorm", "hnorm", "shared_head.norm"):
            norms[name] = LlamaRMSNorm(HIDDEN, config.rms_norm_eps)
            norms[name].weight = torch.nn.Parameter(own[f"{name}.weight"])
        joined = torch.cat([norms["enorm"](target.model.embed_tokens(tokens)), norms["hnorm"](x)], dim=-1)
        length = x.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        places = torch.arange(length)[None]
        y = layer(
            joined @ own["eh_proj.weight"].T,
            attention_mask=mask,
            position_ids=places,
            position_embeddings=target.model.rotary_emb(joined, places),
        )
        return norms["shared_head.norm"](y[0] if isinstance(y, tuple) else y)

    runtime = engines(2, 2)
    for _ in range(5):
        text = torch.from_numpy(rng.integers(3, 280, size=15))[None]
        states = target.model(text).last_hidden_state[:, :-1]  # at positions 0 to 13; the text has one token more
        first = module(0, states, text[:, 1:])
        one = target.lm_head(first[0, -1]).argmax()
        second = module(1, first, torch.cat([text[:, 2:], one.reshape(1, 1)], dim=1))
        two = target.lm_head(second[0, -1]).argmax()
        assert runtime._modules is not None
        cache = runtime._model.new_cache(1, 32, 2)
        ours = runtime._model.hidden(text[:, :-1], cache, 0)[0]
        drafts = runtime._modules.propose(cache, 0, ours, text[0, 1:].numpy().astype(np.int32), 2)
        assert drafts.tolist() == [int(one), int(two)]


def test_modules_of_a_long_prompt_run_in_pieces(
    engines: Callable[..., TorchRuntime], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = EngineRequest(rng.integers(3, 280, size=100).astype(np.int32), 20)
    whole = engines(2, 3).execute(request)
    monkeypatch.setattr("trtspec.runtime.mtp._MAX_PASS", 16)
    pieces = engines(2, 3).execute(request)
    assert (ids(pieces), pieces.num_accepted) == (ids(whole), whole.num_accepted)


def test_a_cancelled_request_stops_between_passes(engines: Callable[..., TorchRuntime]) -> None:
    runtime, calls = engines(1, 3), iter(range(100))
    with pytest.raises(Cancelled):
        runtime.execute(EngineRequest(np.array([5, 6], dtype=np.int32), 60), cancelled=lambda: next(calls) > 6)
    assert ids(runtime.execute(EngineRequest(np.array([5, 6], dtype=np.int32), 9))) == ids(
        engines(0).execute(EngineRequest(np.array([5, 6], dtype=np.int32), 9))
    )


def test_a_module_with_its_own_head_and_embedding_uses_them(
    save_model: Callable[..., Path], tmp_path: Path, rng: np.random.Generator
) -> None:
    """As DeepSeek-V3 stores copies of both; here the head's rows are turned round, so that drafts are hardly right."""
    path = save_with_modules(save_model, tmp_path / "model", 1)
    request = EngineRequest(rng.integers(3, 280, size=8).astype(np.int32), 60)
    shared = TorchRuntime(build(path, tmp_path / "shared", 1, 3), kv_cache_bytes=1 << 22).execute(request)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    copied = TorchRuntime(build(path, tmp_path / "copied", 1, 3), kv_cache_bytes=1 << 22).execute(request)
    assert (ids(copied), copied.num_accepted) == (ids(shared), shared.num_accepted)
    for name in ("model.layers.2.shared_head.head.weight", "model.layers.2.embed_tokens.weight"):
        save_file({**tensors, name: tensors[name].flip(0)}, path / "model.safetensors")
        turned = TorchRuntime(build(path, tmp_path / name, 1, 3), kv_cache_bytes=1 << 22).execute(request)
        assert ids(turned) == ids(shared)
        assert turned.num_accepted < shared.num_accepted / 2


@pytest.mark.parametrize("name", ["enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.o_proj"])
def test_a_checkpoint_without_a_tensor_of_a_module_is_refused(
    save_model: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    path = save_with_modules(save_model, tmp_path / "model", 2)
    tensors = load_file(path / "model.safetensors")
    del tensors[f"model.layers.3.{name}.weight"]
    save_file(tensors, path / "model.safetensors")
    source = open_model(str(path))
    assert module_weights(source, 1)
    with pytest.raises(TrtspecError, match=rf"weight model\.layers\.3\.{name}\.weight of a multi-token prediction"):
        module_weights(source, 2)


def test_an_engine_that_lost_a_module_is_refused(model: Path, tmp_path: Path) -> None:
    path = build(model, tmp_path / "engine", 1, 2)
    config = json.loads((path / "config.json").read_text())
    config["trtspec"]["speculation"]["num_modules"] = 2
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrtspecError, match="of a multi-token prediction module is missing") as refused:
        TorchRuntime(path, kv_cache_bytes=1 << 22)
    assert "build the engine again" in str(refused.value)


def test_a_spec_of_method_mtp_is_built_and_passes_parity(
    save_model: Callable[..., Path], tmp_path: Path, rng: np.random.Generator
) -> None:
    """Through the front door: the modules come into the engine, the pipeline decodes plainly over it, and the reference
    sampler, which has no modules, agrees with what comes out."""
    from trtspec.triton.repository import check_repository

    save_with_modules(save_model, tmp_path / "model", 2)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Say hello."}\n{"prompt": "Why?"}\n')
    spec = {
        "version": 1,
        "target": {"model": "./model", "dtype": "float32"},
        "speculation": {"method": "mtp", "mtp": {"num_modules": 2}},
        "engine": {"max_batch_size": 4, "max_input_len": 128, "max_seq_len": 256},
        "serving": {"max_concurrency": 1},
        "parity": {"prompts": "prompts.jsonl", "num_prompts": 2, "max_tokens": 24},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(spec))
    built = CliRunner().invoke(main, ["build", str(path), "--json"])
    assert built.exit_code == 0, built.output
    preview = CliRunner().invoke(main, ["build", str(path), "--dry-run", "--force"])
    assert "add 2 multi-token prediction modules of the same checkpoint" in preview.stdout
    check_repository(tmp_path / "model_repo" / "tiny")
    pipeline = (tmp_path / "model_repo" / "tiny" / "tensorrt_llm_bls" / "config.pbtxt").read_text()
    assert 'string_value: "mtp"' in pipeline
    # What the plan gives the KV cache of one request is enough for the layers of the modules too.
    planned = json.loads(built.stdout.splitlines()[-1])
    runtime = TorchRuntime(tmp_path / "engines" / "tiny" / "target", kv_cache_bytes=2 * 4 * 2 * 8 * 4 * 256)
    assert runtime.execute(EngineRequest(np.array([5, 6], dtype=np.int32), 40)).num_accepted > 5
    assert planned["ok"]
    manifest = json.loads((tmp_path / "engines" / "tiny" / "manifest.json").read_text())
    weights = manifest["steps"]["plan"]["facts"]["memory"]["target"]["weights"]
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / "engines/tiny/target/rank0.safetensors").values())
    assert weights == pytest.approx(stored, rel=0.02)  # norms are not counted
    checked = CliRunner().invoke(main, ["parity", str(path), "--subject", "engines", "--check", "greedy", "--json"])
    assert checked.exit_code == 0, checked.output
    # The pipeline refuses a request for drafts: the engine drafts by itself.
    assert json.loads(checked.stdout.splitlines()[-1])["settings"]["num_draft_tokens"] == 0


def test_a_spec_of_method_mtp_whose_model_has_no_modules_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    spec = {
        "version": 1,
        "target": {"model": str(tiny_model_dir), "dtype": "float32"},
        "speculation": {"method": "mtp"},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(spec))
    built = CliRunner().invoke(main, ["build", str(path)])
    assert built.exit_code == 1
    assert "this model has no multi-token prediction module" in built.stderr
