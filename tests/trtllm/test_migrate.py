"""`trtspec migrate`: what a spec of compiled engines becomes on track llmapi, and what it loses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.cli.migrate import METHODS as OFFERED
from trtspec.spec.load import load_spec
from trtspec.trtllm import migrate
from trtspec.trtllm.llmapi import model_yaml

CONFIGS = Path(__file__).parents[2] / "configs"
HEAD = """
version: 1
target: {model: org/target}
hardware: {gpu: H100-SXM, num_gpus: 4}
"""
SPECULATION = {
    "none": "method: none",
    "draft_target": "method: draft_target, draft: {model: org/draft}",
    "early_exit": "method: early_exit, early_exit: {layer: 8}",
    "ngram": "method: ngram, ngram: {max_ngram: 4}",
    "mtp": "method: mtp",
    "medusa": "method: medusa, medusa: {heads: org/heads}",
    "tree": "method: tree, draft: {model: org/draft}, tree: {branching: [2, 2, 1]}",
    "cascade": "method: cascade, draft: {model: org/draft}, cascade: {middle: {model: org/middle}}",
    "lookahead": "method: lookahead, lookahead: {window_size: 5, ngram_size: 3, verification_set_size: 3}",
    "redrafter": "method: redrafter, redrafter: {drafter: org/drafter}",
    "eagle1": "method: eagle, eagle: {heads: org/heads, num_layers: 4}",
    "eagle3": "method: eagle, eagle: {heads: org/heads, version: 3, num_layers: 3, max_non_leaves_per_layer: 8}",
}
KEPT = ("none", "draft_target", "early_exit", "ngram", "mtp", "eagle3")
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write old.yaml with one method: `write("ngram", engine="{...}", serving="{...}")`."""

    def make(method: str, **sections: str) -> Path:
        lines = [f"{name}: {value}\n" for name, value in sections.items()]
        sections.setdefault("engine", "")
        path = tmp_path / "old.yaml"
        engine = "" if any(line.startswith("engine:") for line in lines) else "engine: {runtime: tensorrt_llm}\n"
        path.write_text(f"{HEAD}speculation: {{{SPECULATION[method]}}}\n{engine}{''.join(lines)}")
        return path

    return make


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["migrate", *map(str, args)])


def error_of(result: Result) -> str:
    """The one error line."""
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    return line.removeprefix("error: ")


@pytest.mark.parametrize("method", KEPT)
def test_a_method_that_both_tracks_have_stays(write: Write, tmp_path: Path, method: str) -> None:
    old = write(method)
    result = run(old)
    assert result.exit_code == 0, result.output
    out = tmp_path / "old-llmapi.yaml"
    assert result.output.endswith(f"wrote {out}; next: trtspec check {out}\n")
    spec = load_spec(out)
    before = load_spec(old)
    assert (spec.engine.track, spec.engine.runtime, spec.engine.version) == ("llmapi", "tensorrt_llm", "1.3.0")
    assert spec.speculation.method == before.speculation.method
    assert spec.speculation.num_draft_tokens == before.speculation.num_draft_tokens
    assert ("speculative_config" in model_yaml(spec)) == (method != "none")
    assert "engine.track: engine -> llmapi" in result.output
    assert "engine.version: 1.2.1 -> 1.3.0" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old-llmapi.yaml", "old.yaml"]


@pytest.mark.parametrize("method", sorted(set(SPECULATION) - set(KEPT)))
def test_a_method_that_the_llm_api_lacks_is_refused_with_ways_out(write: Write, tmp_path: Path, method: str) -> None:
    old = write(method)
    result = run(old)
    name = method.removesuffix("1")
    message = error_of(result)
    assert message.startswith(f"{old}:5: speculation.method: method {name} does not exist on track llmapi: ")
    assert "nearest: " in message and "--method ngram" in message
    assert ("--method draft_target" in message) == (method in ("tree", "cascade"))
    assert f"  method {name}: " in result.output.partition("lost:\n")[2]
    assert [path.name for path in tmp_path.iterdir()] == ["old.yaml"]
    for way in ("ngram", "none"):
        done = run(old, "--method", way, "--force")
        assert done.exit_code == 0, done.output
        assert f"speculation.method: {name} -> {way}" in done.output
        assert load_spec(tmp_path / "old-llmapi.yaml").speculation.method == way


def test_a_tree_becomes_a_chain_as_deep_as_it(write: Write, tmp_path: Path) -> None:
    assert run(write("tree"), "--method", "draft_target").exit_code == 0
    spec = load_spec(tmp_path / "old-llmapi.yaml")
    assert (spec.speculation.num_draft_tokens, spec.speculation.tree) == (3, None)
    assert spec.speculation.draft is not None and spec.speculation.draft.model == "org/draft"


def test_a_draft_cannot_be_made_up(write: Write) -> None:
    assert "method draft_target needs a draft model, and this spec has none" in error_of(
        run(write("medusa"), "--method", "draft_target")
    )


def test_what_one_llm_shares_is_made_equal(write: Write, tmp_path: Path) -> None:
    old = write("draft_target")
    result = run(
        *(old, "--set", "target.tensor_parallel=4", "--set", "target.dtype=float16"),
        *("--set", "speculation.draft.max_seq_len=1500"),
    )
    assert result.exit_code == 0, result.output
    spec = load_spec(tmp_path / "old-llmapi.yaml")
    draft = spec.speculation.draft
    assert draft is not None
    assert (draft.tensor_parallel, draft.dtype, draft.max_seq_len) == (4, "float16", None)
    assert "speculation.draft.tensor_parallel: 1 -> 4: one LLM loads target and draft with one setting" in result.output
    assert "  max_seq_len of the draft: " in result.output


LOST = [
    ("engine", "{runtime: tensorrt_llm, build_options: {gemm_plugin: auto}}", "engine.build_options"),
    ("engine", "{runtime: tensorrt_llm, gather_generation_logits: true}", "engine.gather_generation_logits"),
    ("engine", "{runtime: tensorrt_llm, paged_context_fmha: true}", "engine.paged_context_fmha"),
    ("engine", "{runtime: tensorrt_llm, logits_dtype: float16}", "engine.logits_dtype"),
    ("serving", "{engine_parameters: {cuda_graph_mode: 'true'}}", "serving.engine_parameters"),
    ("serving", "{orchestrator: true}", "serving.orchestrator"),
    ("serving", "{max_concurrency: 4}", "serving.max_concurrency"),
    ("serving", "{default_num_draft_tokens: 2}", "serving.default_num_draft_tokens"),
    ("serving", "{kv_cache_free_gpu_mem_fraction: {target: 0.8, draft: 0.2}}", "part of the memory of the draft alone"),
    ("serving", "{gpu_device_ids: {target: [0], draft: [1]}}", "GPUs of the draft alone"),
    ("calibration", "{num_prompts: 64}", "calibration"),
]


@pytest.mark.parametrize(("section", "value", "what"), LOST)
def test_every_loss_is_named_and_gone(write: Write, tmp_path: Path, section: str, value: str, what: str) -> None:
    result = run(write("draft_target", **{section: value}))
    assert result.exit_code == 0, result.output
    lost = result.output.partition("lost:\n")[2].splitlines()
    assert any(line.startswith(f"  {what}: ") for line in lost), lost
    model_yaml(load_spec(tmp_path / "old-llmapi.yaml"))  # nothing is left that the LLM API refuses


@pytest.mark.parametrize(
    ("method", "lost"),
    [
        ("draft_target", ["inputs num_draft_tokens and use_draft_logits", "acceptance by the draft's logits"]),
        ("ngram", ["inputs num_draft_tokens and use_draft_logits"]),
        ("none", []),
    ],
)
def test_what_the_pipeline_did_is_lost(write: Write, method: str, lost: list[str]) -> None:
    output = run(write(method)).output
    always = ["models tensorrt_llm_bls", "outputs output_ids, total_target_passes", "inputs min_tokens"]
    for what in (*always, "inputs num_draft_tokens and use_draft_logits", "acceptance by the draft's logits"):
        assert (f"  {what}" in output) == (what in always + lost), what


@pytest.mark.parametrize(
    ("quantization", "kept", "words"),
    [
        ("int8_sq", "none", "int8 SmoothQuant of the target"),
        ("fp8", "fp8", "quantisation of the target by trtspec build: the LLM API loads fp8 weights"),
        ("int4_awq", "int4_awq", "quantisation of the target by trtspec build: the LLM API loads int4_awq weights"),
    ],
)
def test_what_remains_of_a_precision(write: Write, tmp_path: Path, quantization: str, kept: str, words: str) -> None:
    result = run(write("none"), "--set", f"target.quantization={quantization}", "--set", "engine.kv_cache_reuse=false")
    assert result.exit_code == 0, result.output
    assert words in result.output
    assert load_spec(tmp_path / "old-llmapi.yaml").target.quantization == kept


def test_an_early_exit_is_cut_out_of_unquantised_weights(write: Write, tmp_path: Path) -> None:
    result = run(write("early_exit"), "--set", "target.quantization=fp8")
    assert "target.quantization: fp8 -> none" in result.output
    assert "  fp8 weights of the target: " in result.output
    assert load_spec(tmp_path / "old-llmapi.yaml").target.quantization == "none"


def test_an_int8_kv_cache_becomes_the_models_own_type(write: Write, tmp_path: Path) -> None:
    result = run(write("none", engine="{kv_cache_reuse: false}"), "--set", "target.kv_cache_dtype=int8")
    assert "target.kv_cache_dtype: int8 -> auto" in result.output
    assert "  int8 KV cache of the target: " in result.output
    assert load_spec(tmp_path / "old-llmapi.yaml").target.kv_cache_dtype == "auto"


@pytest.mark.parametrize(("version", "acceptance"), [("1.2.1", "auto"), ("1.3.0", "logits")])
def test_acceptance_by_logits_stays_where_the_version_has_it(
    write: Write, tmp_path: Path, version: str, acceptance: str
) -> None:
    result = run(write("draft_target"), "--set", "speculation.acceptance=logits", "--version", version)
    assert result.exit_code == 0, result.output
    spec = load_spec(tmp_path / "old-llmapi.yaml")
    assert (spec.engine.version, spec.speculation.acceptance) == (version, acceptance)
    assert ("  acceptance by the draft's logits: " in result.output) == (acceptance == "auto")


def test_the_file_says_where_it_is_from_and_keeps_the_rest(write: Write, tmp_path: Path) -> None:
    old = write("ngram", parity="{prompts: p.jsonl, max_tokens: 7}", output="{engines: out/e, model_repo: out/r}")
    assert run(old, "--set", "engine.max_batch_size=3").exit_code == 0
    text = (tmp_path / "old-llmapi.yaml").read_text()
    assert text.startswith(
        "# Made by trtspec migrate from old.yaml, for TensorRT-LLM 1.3.0.\n#\n# Lost on the way:\n# - "
    )
    content = yaml.safe_load(text)
    assert list(content) == ["version", "name", "target", "speculation", "hardware", "engine", "parity", "output"]
    assert content["target"] == {"model": "org/target"}
    assert content["engine"] == {
        "track": "llmapi",
        "runtime": "tensorrt_llm",
        "version": "1.3.0",
        "max_batch_size": 3,
    }
    assert content["parity"] == {"prompts": "p.jsonl", "max_tokens": 7}
    # the engines that are there stay there
    assert content["output"] == {"engines": "out/e-llmapi", "model_repo": "out/r-llmapi"}
    assert content["name"] == "old-llmapi"


def test_relative_paths_are_seen_from_the_new_file(write: Write, tmp_path: Path) -> None:
    (tmp_path / "models" / "big").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    old = write("draft_target", parity="{prompts: p.jsonl}", output="{engines: e, model_repo: /abs/r}")
    text = old.read_text().replace("org/target", "models/big").replace("org/draft", "./models/small")
    old.write_text(text)
    out = tmp_path / "elsewhere" / "new.yaml"
    assert run(old, "-o", out).exit_code == 0
    before, after = load_spec(old), load_spec(out)
    assert after.path(after.target.model) == before.path(before.target.model) == tmp_path / "models" / "big"
    assert before.speculation.draft and after.speculation.draft
    assert after.path(after.speculation.draft.model) == before.path(before.speculation.draft.model)
    assert after.prompts_path == before.prompts_path
    assert after.engines_dir == tmp_path / "e-llmapi"
    assert after.model_repo_dir == Path("/abs/r-llmapi")


def test_nothing_is_overwritten_unless_told(write: Write, tmp_path: Path) -> None:
    old = write("none")
    out = tmp_path / "mine.yaml"
    out.write_text("mine")
    assert error_of(run(old, "-o", out)) == (
        f"{out}: exists already; choose another name with -o, or overwrite it with --force"
    )
    assert out.read_text() == "mine"
    assert run(old, "-o", out, "--force").exit_code == 0
    before = old.read_text()
    assert "exists already" in error_of(run(old, "-o", old, "--force"))
    assert old.read_text() == before
    assert "no such directory" in error_of(run(old, "-o", tmp_path / "x" / "y.yaml"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.track=llmapi"], "--set engine.track: this spec is on track llmapi already; nothing to migrate"),
        (
            ["hardware.gpu=cpu", "hardware.num_gpus=1"],
            "--set hardware.gpu: the LLM API needs a GPU, and hardware.gpu is cpu; name it: --set "
            "hardware.gpu=H100-SXM",
        ),
    ],
)
def test_what_cannot_be_migrated(write: Write, tmp_path: Path, overrides: list[str], message: str) -> None:
    args = [word for override in overrides for word in ("--set", override)]
    assert error_of(run(write("none"), *args)) == message
    assert [path.name for path in tmp_path.iterdir()] == ["old.yaml"]


def test_a_result_that_is_no_valid_spec_is_not_written(write: Write, tmp_path: Path) -> None:
    error = error_of(run(write("none"), "--version", "1.1.0"))
    assert "track llmapi needs TensorRT-LLM 1.2 or later, not 1.1.0" in error
    assert error.startswith(f"{tmp_path / 'old-llmapi.yaml'}:") and ".tmp" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["old.yaml"]


def test_a_version_that_is_none(write: Write) -> None:
    assert error_of(run(write("none"), "--version", "next")) == (
        "--version: 'next' is no TensorRT-LLM version; expected such as 1.3.0"
    )


def test_the_command_offers_what_the_library_knows() -> None:
    assert OFFERED == migrate.METHODS


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_every_example_migrates_or_says_why_not(tmp_path: Path, name: str) -> None:
    shutil.copytree(CONFIGS / "prompts", tmp_path / "prompts")
    result = run(CONFIGS / name, "-o", tmp_path / name)
    spec = load_spec(CONFIGS / name)
    if spec.engine.track == "llmapi" or spec.hardware.gpu == "cpu":
        assert result.exit_code == 1
        return
    if spec.speculation.method in migrate._NO_COUNTERPART:
        assert "does not exist on track llmapi" in error_of(result)
        result = run(CONFIGS / name, "-o", tmp_path / name, "--method", "ngram")
    assert result.exit_code == 0, result.output
    assert model_yaml(load_spec(tmp_path / name))["backend"] == "pytorch"
