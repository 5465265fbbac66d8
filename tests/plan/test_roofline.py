"""The roofline, part by part and by hand, on a small model and a GPU of round figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.plan.experts import experts_touched
from trtspec.plan.roofline import EFFICIENCY, LATENCY_S, NETWORK_LATENCY_S, Roofline, layer_weights
from trtspec.plan.shapes import shape_of
from trtspec.plan.step_times import HEADS
from trtspec.spec.gpus import GPUS, Gpu, Link
from trtspec.spec.schema import ModelRef, Spec

HIDDEN, HEADS_Q, HEADS_KV, SIZE, LAYERS, WIDE, VOCAB = 256, 8, 2, 32, 4, 1024, 1000
DENSE = ModelConfig.from_hf(
    {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS_Q, "num_key_value_heads": HEADS_KV, "head_dim": SIZE, "intermediate_size": WIDE,
    }
)  # fmt: skip
EXPERTS = replace(DENSE, num_experts=8, num_experts_per_token=2, moe_intermediate_size=WIDE)
ATTENTION = HIDDEN * SIZE * (2 * HEADS_Q + 2 * HEADS_KV)
MLP = 3 * HIDDEN * WIDE
LINEAR, HEAD = LAYERS * (ATTENTION + MLP), HIDDEN * VOCAB
KV = 2 * LAYERS * HEADS_KV * SIZE  # values a token
BANDWIDTH = 1e12


def gpu(**changes: Any) -> Gpu:
    """1 TB/s, and arithmetic that is never the limit unless `rate` (10^12/s) makes it so."""
    rate = changes.pop("rate", 1e9)
    rates = {"float32": rate, "float16": rate, "bfloat16": rate, "fp8": 2 * rate, "int8": 2 * rate}
    row = {
        "name": "round", "sm": 90, "memory_gb": 80, "bandwidth_gb_per_s": 1000.0, "dense_tflops": rates,
        "link": Link(kind="NVLink", gb_per_s=200), "sources": [],
    }  # fmt: skip
    return Gpu.model_validate({**row, **changes})


def roofline(
    config: ModelConfig = DENSE, row: Gpu | None = None, efficiency: float = 1.0, **precision: Any
) -> Roofline:
    return Roofline({"target": (config, ModelRef(model="any", **precision))}, row or gpu(), efficiency)


def test_bytes_alone() -> None:
    """Weights once, whatever the batch; keys and values of every sequence."""
    moved = 2 * (LINEAR + HEAD) + 3 * (100 + 5) * 2 * KV
    assert roofline().seconds("target", 3, 5, 100) == pytest.approx(moved / BANDWIDTH)


def test_arithmetic_alone() -> None:
    """Two operations a weight and token, and four a head, number, query and key that it sees, itself included."""
    slow = roofline(row=gpu(rate=1e-3))  # 10^9 operations a second
    pairs = 3 * sum(100 + i for i in range(1, 6))
    operations = 2 * (LINEAR + HEAD) * 3 * 5 + 4 * LAYERS * HEADS_Q * SIZE * pairs
    assert slow.seconds("target", 3, 5, 100) == pytest.approx(operations / 1e9)


def test_each_part_has_a_roof_of_its_own() -> None:
    """Many tokens make matrices a matter of arithmetic while the cache stays one of memory; the times add up."""
    ridge = roofline(row=gpu(rate=10.0))  # 10 operations a byte: 10 tokens in flight for 16-bit weights
    linear = max(2 * (LINEAR + HEAD) / 1e12, 2 * (LINEAR + HEAD) * 64 / 1e13)
    cache = 64 * 10_001 * 2 * KV / 1e12
    assert cache > 4 * LAYERS * HEADS_Q * SIZE * 64 * 10_001 / 1e13
    assert ridge.seconds("target", 64, 1, 10_000) == pytest.approx(linear + cache)


def test_the_ridge_is_where_the_data_sheet_has_it() -> None:
    """Of 16-bit weights at as many tokens in flight as the GPU has operations a byte; of fp8 at the same number."""
    row, model = GPUS["H100-SXM"], shape_of("Llama-3.1-70B")

    def time(batch: int, **precision: Any) -> float:
        return roofline(model, row, **precision).seconds("target", batch, 1, 0)

    for precision in ({}, {"quantization": "fp8"}):
        below, at, above = (time(batch, **precision) for batch in (1, 290, 600))
        assert at < 1.05 * below and above > 1.9 * below


def test_efficiency_scales_all_but_the_latency_between_gpus() -> None:
    args = ("target", 16, 5, 1000)
    assert roofline(efficiency=0.5).seconds(*args) == pytest.approx(2 * roofline().seconds(*args))


def test_a_prefill_needs_logits_of_one_token_a_sequence() -> None:
    slow = roofline(row=gpu(rate=1e-3))
    pairs = 2 * sum(range(1, 51))
    operations = 2 * LINEAR * 100 + 2 * HEAD * 2 + 4 * LAYERS * HEADS_Q * SIZE * pairs
    assert slow.seconds("target", 2, 50, 0) == pytest.approx(operations / 1e9)


@pytest.mark.parametrize(
    ("quantization", "width", "faster"),
    [("none", 2, 1), ("fp8", 1, 2), ("int8_sq", 1, 2), ("int4_awq", 0.5 + 2 / 128, 1), ("w4a8_awq", 0.5 + 2 / 128, 2)],
)
def test_quantised_layers(quantization: str, width: float, faster: float) -> None:
    """The head keeps its type, in memory and in arithmetic; so does attention."""
    moved = width * LINEAR + 2 * HEAD + 2 * KV * 101
    assert roofline(quantization=quantization).seconds("target", 1, 1, 100) == pytest.approx(moved / BANDWIDTH)
    slow = roofline(row=gpu(rate=1e-3), quantization=quantization)
    operations = 2 * LINEAR / faster + 2 * HEAD + 4 * LAYERS * HEADS_Q * SIZE * 101
    assert slow.seconds("target", 1, 1, 100) == pytest.approx(operations / 1e9)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_types(dtype: str, width: int) -> None:
    moved = width * (LINEAR + HEAD + KV * 101)
    assert roofline(dtype=dtype).seconds("target", 1, 1, 100) == pytest.approx(moved / BANDWIDTH)


def test_a_cache_of_eight_bits() -> None:
    whole, half = (roofline(kv_cache_dtype=kind).seconds("target", 8, 1, 5000) for kind in ("auto", "fp8"))
    assert whole - half == pytest.approx(8 * 5001 * KV / BANDWIDTH)


def test_experts_that_the_tokens_of_all_sequences_touch_are_read() -> None:
    rest = ATTENTION + HIDDEN * 8  # and the router
    for batch, tokens in ((1, 1), (1, 5), (4, 5)):
        touched = experts_touched(8, 2, batch * tokens)
        moved = 2 * (LAYERS * (rest + touched * MLP) + HEAD) + 2 * KV * batch * (100 + tokens)
        seconds = roofline(EXPERTS).seconds("target", batch, tokens, 100)
        assert seconds == pytest.approx(moved / BANDWIDTH)
    slow = roofline(EXPERTS, gpu(rate=1e-3))
    operations = 2 * (LAYERS * (rest + 2 * MLP) + HEAD) * 20 + 4 * LAYERS * HEADS_Q * SIZE * 4 * sum(range(101, 106))
    assert slow.seconds("target", 4, 5, 100) == pytest.approx(operations / 1e9)


def test_shared_experts_and_dense_layers() -> None:
    mixed = replace(EXPERTS, shared_expert_intermediate_size=512, num_dense_mlp_layers=1)
    sparse = 2 * MLP + 3 * HIDDEN * 512 + 8 * HIDDEN
    assert layer_weights(mixed, 2) == LAYERS * ATTENTION + MLP + 3 * sparse


def test_tensor_parallel_divides_and_reduces_twice_a_layer() -> None:
    state = 3 * 5 * HIDDEN * 2
    reduced = LATENCY_S + 2 * 3 / 4 * state / 100e9
    # Two KV heads on four ranks are held twice.
    moved = 2 * (LINEAR + HEAD) + 3 * 105 * 2 * (2 * KV)
    expected = moved / BANDWIDTH / 4 + 2 * LAYERS * reduced
    assert roofline(tensor_parallel=4).seconds("target", 3, 5, 100) == pytest.approx(expected)


def test_pipeline_parallel_sends_groups_of_sequences_one_behind_the_other() -> None:
    """Four sequences in two groups: each reads all stages' weights, and all groups are under way at the same time."""
    state = 2 * HIDDEN * 2
    moved = 2 * (LINEAR + HEAD) + 2 * 101 * 2 * KV
    expected = moved / BANDWIDTH + LATENCY_S + state / 100e9
    assert roofline(pipeline_parallel=2).seconds("target", 4, 1, 100) == pytest.approx(expected)


def over_hosts(host_gpus: int, gbps: float | None, **split: Any) -> Roofline:
    return Roofline({"target": (DENSE, ModelRef(model="any", **split))}, gpu(), 1.0, {}, host_gpus, gbps)


@pytest.mark.parametrize(
    ("split", "host_gpus", "far"),
    [((1, 4), 4, 0), ((1, 4), 2, 1), ((1, 4), 1, 3), ((2, 4), 4, 1), ((2, 2), 2, 1), ((2, 2), 4, 0)],
)
def test_hand_overs_between_hosts_go_through_the_network(split: tuple[int, int], host_gpus: int, far: int) -> None:
    """80 Gb/s are 10 GB/s, a tenth of the link's 100 GB/s in one direction."""
    ranks = {"tensor_parallel": split[0], "pipeline_parallel": split[1]}
    there, here = (over_hosts(gpus, 80.0, **ranks).seconds("target", 4, 1, 100) for gpus in (host_gpus, 8))
    state = (4 // split[1]) * HIDDEN * 2
    slower = NETWORK_LATENCY_S + state / 10e9 - LATENCY_S - state / 100e9
    assert there - here == pytest.approx(far * slower)


def test_reductions_between_hosts_go_through_the_cards_of_all_gpus_of_a_host() -> None:
    """Four ranks on hosts of two: two cards of 10 GB/s; no network makes it faster than the link within a host."""
    state = 3 * 5 * HIDDEN * 2
    for gbps, ring in ((80.0, 20e9), (8000.0, 100e9)):
        far, near = (over_hosts(gpus, gbps, tensor_parallel=4).seconds("target", 3, 5, 100) for gpus in (2, 4))
        reduced = NETWORK_LATENCY_S - LATENCY_S + 2 * 3 / 4 * state * (1 / ring - 1 / 100e9)
        assert far - near == pytest.approx(2 * LAYERS * reduced)


def test_an_unknown_network_is_not_guessed() -> None:
    with pytest.raises(TrtspecError, match=r"the target lies on several hosts of 2 GPUs.*such as --network-gbps 400"):
        over_hosts(2, None, tensor_parallel=4)
    assert over_hosts(4, None, tensor_parallel=4).seconds("target", 1, 1, 1) > 0


def test_a_model_cut_to_its_first_layers() -> None:
    whole, half = (roofline(num_layers=layers).seconds("target", 1, 1, 100) for layers in (None, 2))
    assert whole - half == pytest.approx(2 * (LINEAR + KV * 101) / 2 / BANDWIDTH)


def spec(method: str, **speculation: Any) -> Spec:
    return Spec.model_validate(
        {
            "version": 1,
            "target": {"model": "big", "quantization": "fp8"},
            "speculation": {"method": method, "draft": {"model": "small"}, **speculation},
            "hardware": {"gpu": "H200"},
        }
    )


def test_the_roofline_of_a_spec() -> None:
    small = replace(DENSE, num_hidden_layers=1)
    made = Roofline.of(spec("draft_target"), {"target": DENSE, "draft": small}, gpu(), 1.0)
    assert set(made.models) == {"target", "draft"}
    # The draft is not quantised.
    moved = 2 * (ATTENTION + MLP + HEAD) + 2 * KV / LAYERS * 101
    assert made.seconds("draft", 1, 1, 100) == pytest.approx(moved / BANDWIDTH)
    assert made.source == "roofline of round at 100 % of its data sheet"
    assert made.overhead(8) == 0.0


def test_medusa_heads() -> None:
    """Three heads of two square layers each, and a matrix onto the vocabulary each; unlike the target not quantised."""
    heads = {"heads": "h", "num_heads": 3, "num_layers": 2}
    made = Roofline.of(spec("medusa", medusa=heads), {"target": DENSE}, gpu(), 1.0)
    moved = 2 * (3 * 2 * HIDDEN**2 + 3 * HEAD)
    assert made.seconds(HEADS, 1, 1, 100) == pytest.approx(moved / BANDWIDTH)


def test_a_multi_token_prediction_module() -> None:
    """A layer with experts, the matrix that joins two states, the target's head; quantised as the target."""
    mixed = replace(EXPERTS, num_dense_mlp_layers=1)
    made = Roofline.of(spec("mtp", mtp={}), {"target": mixed}, gpu(), 1.0)
    layer = ATTENTION + 2 * MLP + 8 * HIDDEN + 2 * HIDDEN**2
    moved = layer + 2 * HEAD + 2 * KV / LAYERS * 101
    assert made.seconds(HEADS, 1, 1, 100) == pytest.approx(moved / BANDWIDTH)


def test_latent_attention() -> None:
    """DeepSeek-V3's attention: 187 million weights a layer; a pair of query and key costs each of 128 heads 576 + 512
    multiplications in the absorbed form."""
    deepseek = shape_of("DeepSeek-V3")
    one = replace(deepseek, num_hidden_layers=1, num_dense_mlp_layers=1)
    by_hand = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert layer_weights(one, 0) == by_hand + 3 * 7168 * 18432
    slow = roofline(one, gpu(rate=1e-3))
    longer = slow.seconds("target", 1, 1, 2000) - slow.seconds("target", 1, 1, 1000)
    assert longer == pytest.approx(1000 * 2 * 128 * (576 + 512) / 1e9)


def test_the_efficiency_is_the_published_69_percent() -> None:
    assert round(EFFICIENCY, 2) == 0.69
    assert 1397.31 / GPUS["A100-80GB"].bandwidth_gb_per_s == EFFICIENCY  # type: ignore[operator]
    assert roofline(row=GPUS["H200"], efficiency=EFFICIENCY).source == "roofline of H200 at 69 % of its data sheet"


REFUSED = {
    "the CPU": ({"row": GPUS["cpu"]}, r"cpu has no roofline.*trtspec plan calibrate"),
    "fp8 on an A100": (
        {"row": GPUS["A100-80GB"], "quantization": "fp8"},
        r"no fp8 rate of A100-80GB, which the target computes with; expected one of float32, bfloat16, float16, int8",
    ),
    "a rate that no data sheet gives": ({"row": GPUS["H100-NVL"], "quantization": "int8_sq"}, r"no int8 rate of H100"),
    "a type that no data sheet gives": ({"row": GPUS["H100-NVL"], "dtype": "float32"}, r"no float32 rate of H100-NVL"),
    "several GPUs without a link": ({"row": gpu(link=None), "tensor_parallel": 2}, r"what joins GPUs of type round"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_catalogue_does_not_say_is_not_guessed(case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(TrtspecError, match=message) as error:
        roofline(**arguments)
    assert "\n" not in str(error.value)


def test_one_gpu_needs_no_link() -> None:
    assert roofline(row=gpu(link=None)).seconds("target", 1, 1, 1) > 0


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(TrtspecError, match="no model 'draft'; expected one of target"):
        roofline().seconds("draft", 1, 1, 1)
