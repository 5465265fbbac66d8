"""Which early exit to take: what is measured along answers is what speculation then does, and who wins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from trtspec.cli import main
from trtspec.decoding.cycle import Request
from trtspec.models.source import open_model
from trtspec.models.surgery import truncated
from trtspec.plan.acceptance import expected_acceptance
from trtspec.plan.exit import exit_matches, greedy_answers, judge, speed_up
from trtspec.runtime.engine import write_torch_engine
from trtspec.runtime.llama import Llama, load_weights
from trtspec.runtime.local import speculate
from trtspec.runtime.torch_runtime import TorchRuntime

LAYERS = 8
PROMPTS = ["Say hello.", "Why is the sky blue?", "Count to three."]


@pytest.fixture(scope="module")
def models(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`early`: what comes after the second of eight layers changes nothing; `late`: every layer counts; `fading`:
    later layers change less."""
    folder = tmp_path_factory.mktemp("models")
    factors = {"early": [1, 1] + [0] * 6, "late": [1] * LAYERS, "fading": [1, 1, 0.3, 0.3, 0.1, 0.1, 0.05, 0.05]}
    for name, by_layer in factors.items():
        path = save_model(folder / name, num_hidden_layers=LAYERS, vocab_size=280)
        tensors = load_file(path / "model.safetensors")
        tensors["lm_head.weight"][[0, 2]] = 0.0  # end ids: never the likeliest
        for layer, factor in enumerate(by_layer):
            for part in ("self_attn.o_proj", "mlp.down_proj"):
                tensors[f"model.layers.{layer}.{part}.weight"] *= factor
        save_file(tensors, path / "model.safetensors")
    return {name: folder / name for name in factors}


@pytest.fixture
def plan_exit(models: dict[str, Path], tmp_path: Path) -> Callable[..., Result]:
    """`trtspec plan exit` on one of the models."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))

    def run(name: str, *arguments: str) -> Result:
        spec = {
            "version": 1,
            "target": {"model": str(models[name]), "dtype": "float32"},
            "speculation": {"method": "none"},
            "hardware": {"gpu": "cpu"},
            "engine": {"runtime": "torch"},
            "parity": {"prompts": "prompts.jsonl"},
        }
        (tmp_path / "spec.yaml").write_text(json.dumps(spec))
        command = ["plan", "exit", str(tmp_path / "spec.yaml"), "--max-tokens", "24", *arguments]
        return CliRunner().invoke(main, command)

    return run


def test_the_layer_after_which_nothing_changes_is_picked(plan_exit: Callable[..., Result]) -> None:
    """Every draft is right from the second layer on, so the first such layer with the most drafts wins."""
    result = plan_exit("early", "--max-draft-tokens", "4", "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    exits = {each["layer"]: each for each in figures["exits"]}
    assert list(exits) == list(range(1, LAYERS))
    assert figures["prompts"] == 3
    assert exits[1]["right"] < 0.9
    assert all(exits[layer]["right"] == 1.0 for layer in range(2, LAYERS))
    assert (figures["best"]["layer"], figures["best"]["num_draft_tokens"]) == (2, 4)
    assert exits[2]["acceptance_rate"] == 1.0
    assert exits[2]["tokens_per_pass"] == pytest.approx(24 / 5)
    # Weights: 32 wide, 4 heads and 2 of keys and values of 8, 64 inside, 280 ids.
    layer, head = 32 * (2 * 8 * (4 + 2) + 3 * 64), 32 * 280
    cost = (2 * layer + head) / (8 * layer + head)
    assert exits[2]["cost"] == pytest.approx(cost)
    assert exits[2]["speed_up"] == pytest.approx(exits[2]["tokens_per_pass"] / (4 * cost + 1))
    text = plan_exit("early", "--max-draft-tokens", "4").stdout.splitlines()
    assert text[-1] == "speculation: {method: early_exit, num_draft_tokens: 4, early_exit: {layer: 2}}"


def test_where_no_exit_pays_it_says_so(plan_exit: Callable[..., Result]) -> None:
    result = plan_exit("late", "--layers", "5,3")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line[:18] for line in lines[:2]] == ["after layer   3 of", "after layer   5 of"]
    assert lines[2].startswith("no early exit pays")
    assert json.loads(plan_exit("late", "--layers", "3", "--json").stdout)["best"] is None


@pytest.mark.parametrize(
    ("layers", "message"),
    [("0,3", "0,3 is not inside the model; expected layers from 1 to 7"), ("8", "8 is not inside"), ("4,x", "no list")],
)
def test_layers_outside_the_model_are_refused(plan_exit: Callable[..., Result], layers: str, message: str) -> None:
    result = plan_exit("early", "--layers", layers)
    assert result.exit_code == 1
    assert "--layers" in result.stderr
    assert message in result.stderr


def prompts(count: int, rng: np.random.Generator) -> list[list[int]]:
    return [rng.integers(3, 280, size=4 + number).tolist() for number in range(count)]


def test_answers_are_greedy_and_in_order(models: dict[str, Path], rng: np.random.Generator) -> None:
    source = open_model(str(models["fading"]))
    model = Llama(source.config, load_weights(source))
    asked = prompts(5, rng)
    texts = greedy_answers(model, asked, 12, source.config.eos_token_ids)
    assert [prompt for prompt, _ in texts] == asked
    for prompt, answer in texts:
        matches = exit_matches(model, prompt, answer, [LAYERS])
        assert matches[LAYERS] == [1.0] * len(answer)  # after all layers it is the target


@pytest.mark.parametrize("layer", [2, 4])
def test_tokens_a_pass_are_those_of_speculation(
    models: dict[str, Path], tmp_path: Path, rng: np.random.Generator, layer: int
) -> None:
    """What the plan says of an exit, and what method early_exit with that layer then does on the same prompts."""
    source = open_model(str(models["fading"]))
    model = Llama(source.config, load_weights(source))
    texts = greedy_answers(model, prompts(6, rng), 24, ())
    matches = [exit_matches(model, prompt, answer, [layer, 7])[layer] for prompt, answer in texts]
    runtimes: dict[str, Any] = {}
    for role, whole in (("target", source), ("draft", truncated(source, layer))):
        build_config = {"max_draft_len": 3} if role == "target" else {}
        stamp = {"source_fingerprint": whole.fingerprint()}
        write_torch_engine(whole, tmp_path / role, dtype="float32", role=role, build_config=build_config, stamp=stamp)
        runtimes[role] = TorchRuntime(tmp_path / role, kv_cache_bytes=1 << 23)
    passes = 0
    for prompt, answer in texts:
        *_, last = speculate("early_exit", runtimes, Request(prompt, len(answer), num_draft_tokens=3))
        assert last.generation.token_ids.tolist() == answer
        passes += last.generation.acceptance.num_target_passes
    said = expected_acceptance(matches, 3)
    assert (said.emitted, said.passes) == (sum(len(answer) for _, answer in texts), passes)
    assert 0.1 < said.rate < 0.95


def test_the_speed_up_is_that_of_the_paper() -> None:
    """Leviathan et al. 2023: alpha 0.8, gamma 5, c 0.04 give (1 - 0.8^6) / (0.2 (5 * 0.04 + 1))."""
    assert speed_up((1 - 0.8**6) / 0.2, 5, 0.04) == pytest.approx(3.0744, abs=1e-4)


def test_a_verification_of_experts_costs_more(models: dict[str, Path]) -> None:
    """Of two models of the same size a layer, drafts pay less where a verification reads more experts."""
    from dataclasses import replace

    dense = open_model(str(models["early"])).config
    experts = replace(dense, num_experts=16, num_experts_per_token=1)
    matches = [[1.0] * 24]
    assert judge(experts, 2, matches).speed_up < 0.8 * judge(dense, 2, matches).speed_up
