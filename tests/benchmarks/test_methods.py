"""The benchmark of all methods on small random models: what it prints has to hang together. Speed is not asserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from small_specs import SPECULATION

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """The script, imported as if it had been started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import methods

        return methods


def invoke(benchmark: ModuleType, configs: dict[str, Path], *words: str) -> Result:
    root = configs["tree"].parent
    files = ("--prompt-file", str(root / "prompts.jsonl"), "--work-dir", str(root / "work"))
    options = (*files, "--prompts", "1", "--max-tokens", str(MAX_TOKENS), *words)
    return CliRunner().invoke(benchmark.main, [*map(str, configs.values()), *options])


@pytest.fixture(scope="module")
def result(benchmark: ModuleType, configs: dict[str, Path]) -> Result:
    return invoke(benchmark, configs, "--transformers")


def test_all_methods_answer_as_plain_decoding_does(result: Result) -> None:
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ceiling: reading the weights at")
    report = json.loads(lines[-1])
    foreign = {"plain": "none", "assisted": "draft_target", "early exit": "early_exit", "prompt lookup": "ngram"}
    assert set(report["methods"]) == {"none", *SPECULATION, *(f"transformers {name}" for name in foreign)}
    assert set(report["counterparts"]) == {f"{own} / transformers {name}" for name, own in foreign.items()}
    assert all(difference["tie"] for difference in report["differences"])
    assert len(report["differences"]) <= 1  # in float32 a tie is rare
    for group in report["methods"].values():
        assert list(group) == ["all", "chat", "code"]
        assert group["all"]["tokens"] == group["chat"]["tokens"] + group["code"]["tokens"]
        assert 0 < group["all"]["tokens"] < 2 * MAX_TOKENS  # the first tokens come before the clock


@pytest.mark.parametrize("method", SPECULATION)
def test_figures_agree_with_each_other(result: Result, method: str) -> None:
    rows = json.loads(result.stdout.splitlines()[-1])["methods"]
    for category, row in rows[method].items():
        passes = sum(row["accepted"])
        by_histogram = 1 + sum(count * number for count, number in enumerate(row["accepted"])) / passes
        assert row["acceptance_length"] == pytest.approx(by_histogram)
        # An answer may end with an accepted draft: one token less in its last pass.
        assert row["tokens"] <= round(by_histogram * passes) <= row["tokens"] + row["num_prompts"]
        assert 0 < row["num_draft_tokens"] <= len(row["by_position"])
        time = row["num_draft_tokens"] * row["draft_cost"] + row["verify_cost"]
        assert row["predicted"] == pytest.approx(row["acceptance_length"] / time)
        assert row["reached"] == pytest.approx(row["speed_up"] / row["predicted"])
        assert row["speed_up"] == pytest.approx(row["tokens_per_s"] / rows["none"][category]["tokens_per_s"])


@pytest.mark.parametrize("method", SPECULATION)
def test_drafts_and_passes_take_no_longer_than_the_answer(
    benchmark: ModuleType, configs: dict[str, Path], method: str
) -> None:
    ours = benchmark.Ours(benchmark.built(configs[method], (), None, configs[method].parent / "work"))
    answer = ours.answer([5, 6, 7, 5, 6, 7, 5, 6], MAX_TOKENS)
    assert all(one.target_s > 0 for one in answer.passes)
    assert any(one.draft_s > 0 and one.drafted > 0 for one in answer.passes)
    assert sum(one.draft_s + one.target_s for one in answer.passes) <= answer.seconds
    assert sum(one.accepted + 1 for one in answer.passes) - answer.num_tokens in (0, 1)


def test_the_type_is_that_of_every_model(benchmark: ModuleType, configs: dict[str, Path]) -> None:
    """Also of the further drafts of a tree."""
    root = configs["tree"].parent
    content = yaml.safe_load(configs["tree"].read_text())
    content["name"] = "drafts"
    content["speculation"]["tree"]["drafts"] = [{"model": "./middle", "dtype": "float32", "num_layers": 1}]
    (root / "drafts.yaml").write_text(yaml.safe_dump(content))
    built = benchmark.built(root / "drafts.yaml", (), "bfloat16", root / "work")
    assert {role: model.dtype for role, model in built.models.items()} == dict.fromkeys(
        ("target", "draft", "draft_2"), "bfloat16"
    )
    assert built.models["draft_2"].num_layers == 1


def test_the_type_is_that_of_every_middle_model(benchmark: ModuleType, configs: dict[str, Path]) -> None:
    root = configs["cascade"].parent
    content = yaml.safe_load(configs["cascade"].read_text())
    content["name"] = "middles"
    content["speculation"]["cascade"]["middles"] = [{"model": "./middle", "dtype": "float32", "num_layers": 1}]
    (root / "middles.yaml").write_text(yaml.safe_dump(content))
    built = benchmark.built(root / "middles.yaml", (), "bfloat16", root / "work")
    roles = ("target", "middle", "middle_2", "draft")
    assert {role: model.dtype for role, model in built.models.items()} == dict.fromkeys(roles, "bfloat16")


def test_another_target_is_refused(
    benchmark: ModuleType, configs: dict[str, Path], save_model: Callable[..., Path]
) -> None:
    root = configs["ngram"].parent
    save_model(root / "other", seed=5)
    content = yaml.safe_load(configs["ngram"].read_text())
    content |= {"name": "other", "target": {"model": "./other", "dtype": "float32"}}
    (root / "other.yaml").write_text(yaml.safe_dump(content))
    pair = {"tree": configs["tree"], "ngram": root / "other.yaml"}
    outcome = invoke(benchmark, pair)
    assert outcome.exit_code == 1
    assert "another target" in outcome.stderr


def test_theorem_3_8(benchmark: ModuleType) -> None:
    """Two passes that keep 2 and 0 of 2 drafts; a pass takes twice a plain step of 1 s, a draft step a quarter."""
    from contenders import Pass, Timed

    plain = [Timed((1, 2, 3, 4), 4, 4.0, (Pass(0, 0, 0.0, 1.0),) * 4)]
    drafted = [Timed((1, 2, 3, 4), 4, 5.0, (Pass(2, 2, 0.5, 2.0), Pass(2, 0, 0.5, 2.0)))]
    row = benchmark.figures(drafted, plain)
    assert (row.acceptance_length, row.num_draft_tokens) == (2.0, 2.0)
    assert (row.draft_cost, row.verify_cost) == (0.25, 2.0)
    assert row.by_position == [0.5, 1.0]
    assert row.predicted == pytest.approx(2 / 2.5) == row.speed_up
    assert row.reached == pytest.approx(1.0)


def test_a_text_that_differs_is_an_error(
    benchmark: ModuleType, configs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target keeps whatever is proposed."""
    from trtspec.decoding.verify import Verification

    def keep_all(rows: Any, request: Any) -> Verification:
        drafts = request.draft_tokens.tolist()
        return Verification((*drafts, int(rows[len(drafts)].argmax())), len(drafts))

    monkeypatch.setattr("trtspec.runtime.torch_runtime.verify", keep_all)
    outcome = invoke(benchmark, configs, "--methods", "draft_target")
    assert outcome.exit_code == 1
    assert "NOT A TIE" in outcome.stdout
    assert "differs from that of plain decoding" in outcome.stderr


def test_an_unknown_method_is_refused(benchmark: ModuleType, configs: dict[str, Path]) -> None:
    outcome = invoke(benchmark, configs, "--methods", "medusae")
    assert outcome.exit_code == 1
    assert "no config for method medusae" in outcome.stderr
