"""`trtspec config`: init, validate, show and schema."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.spec.load import load_spec
from trtspec.spec.schema import Spec

MINIMAL = "version: 1\ntarget: {model: big}\nspeculation: {method: draft_target, draft: {model: small}}\n"


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["config", *args])


def test_init_writes_a_commented_file_that_validates() -> None:
    result = run("init")
    assert (result.exit_code, result.output) == (0, "wrote trtspec.yaml; next: trtspec check trtspec.yaml\n")
    assert Path("trtspec.yaml").read_text().count("#") > 20
    result = run("validate", "trtspec.yaml")
    assert (result.exit_code, result.output) == (0, "trtspec.yaml: valid\n")
    assert [path.name for path in Path().iterdir()] == ["trtspec.yaml"]


def test_every_key_that_the_starter_comments_out_exists() -> None:
    """Uncomment the examples of keys: what a user turns on must validate."""
    run("init", "a.yaml")
    lines = []
    for line in Path("a.yaml").read_text().splitlines():
        indented = line.startswith("  # ") and ": " in line
        lines.append(line.replace("# ", "", 1) if indented and "gguf_file" not in line else line)
    Path("b.yaml").write_text("\n".join(lines))
    result = run("validate", "b.yaml")
    assert (result.exit_code, result.output) == (0, "b.yaml: valid\n")
    assert load_spec("b.yaml").parity.prompts == "prompts.jsonl"


def test_init_overwrites_only_when_told() -> None:
    Path("a.yaml").write_text("mine")
    result = run("init", "a.yaml")
    assert (result.exit_code, result.output) == (
        1,
        "error: a.yaml: exists already; choose another name, or overwrite it with --force\n",
    )
    assert Path("a.yaml").read_text() == "mine"
    assert run("init", "--force", "a.yaml").exit_code == 0
    assert Path("a.yaml").read_text().startswith("# A trtspec file")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", ".: is not a file; name a file, such as trtspec.yaml"),
        ("no/such/a.yaml", "no/such: no such directory; create it first"),
    ],
)
def test_init_somewhere_impossible(path: str, message: str) -> None:
    for options in ([], ["--force"]):
        result = run("init", path, *options)
        assert (result.exit_code, result.output) in (
            (1, f"error: {message}\n"),
            (1, "error: .: exists already; choose another name, or overwrite it with --force\n"),
        )
    assert run("init", "--force", path).output == f"error: {message}\n"


def test_init_that_cannot_be_finished_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device", "a.yaml")

    monkeypatch.setattr("os.replace", no_space)
    result = run("init", "a.yaml")
    assert (result.exit_code, result.output) == (
        1,
        "error: a.yaml: no space left on the disk; free some and run again\n",
    )
    assert list(Path().iterdir()) == []


def test_show_prints_the_whole_spec() -> None:
    Path("small.yaml").write_text(MINIMAL)
    result = run("show", "small.yaml", "--set", "serving.kv_cache_bytes.target=1MiB")
    assert result.exit_code == 0
    # All but the settings of the parity check, which change with it.
    assert (
        re.sub(r"(?<=\nparity:)(\n  .*)+", "", result.output)
        == """\
version: 1
name: small
target:
  model: big
  dtype: bfloat16
  quantization: none
  kv_cache_dtype: auto
  tensor_parallel: 1
  pipeline_parallel: 1
  trust_remote_code: false
speculation:
  method: draft_target
  draft:
    model: small
    dtype: bfloat16
    quantization: none
    kv_cache_dtype: auto
    tensor_parallel: 1
    pipeline_parallel: 1
    trust_remote_code: false
  acceptance: auto
  num_draft_tokens: 4
hardware:
  gpu: cpu
  num_gpus: 1
  num_nodes: 1
engine:
  track: engine
  runtime: torch
  version: 1.2.1
  max_batch_size: 8
  max_input_len: 1024
  max_seq_len: 2048
  paged_context_fmha: true
  kv_cache_reuse: true
  tokens_per_block: 32
  gather_generation_logits: true
  logits_dtype: float32
  build_options: {}
calibration:
  num_prompts: 128
  max_tokens: 512
  batch_size: 4
serving:
  host: 127.0.0.1
  http_port: 8000
  grpc_port: 8001
  metrics_port: 8002
  mount_point: /engines
  exclude_input_in_output: true
  kv_cache_bytes:
    target: 1048576
  kv_cache_free_gpu_mem_fraction: {}
  gpu_device_ids: {}
  orchestrator: false
  spawn_processes: true
  fast_logits: false
  chunked_context: false
  engine_parameters: {}
  shm_size: 8589934592
  max_concurrency: 8
  max_queued: 256
  call_timeout_s: 60.0
  draft_timeout_s: 10.0
  startup_timeout_s: 300.0
  probe_interval_s: 30.0
  plain_chunk_tokens: 16
parity:
output:
  engines: engines/small
  model_repo: model_repo/small
"""
    )


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["speculation={method: lookahead}"],
        ["speculation={method: medusa, medusa: {heads: h, choices: [[0], [1], [0, 0]]}}"],
        ["speculation={method: tree, draft: {model: d}, tree: {branching: [3, 2]}}"],
        ["speculation.method=none"],
        ["engine.version='1.2'", "hardware.gpu=H100-SXM", "parity.tolerance=1e-3"],
    ],
)
def test_what_show_prints_is_the_same_spec(overrides: list[str]) -> None:
    Path("a.yaml").write_text(MINIMAL)
    options = [part for override in overrides for part in ("--set", override)]
    shown = run("show", "a.yaml", *options)
    assert shown.exit_code == 0
    Path("b.yaml").write_text(shown.stdout)
    assert load_spec("b.yaml").hash() == load_spec("a.yaml", overrides).hash()
    assert run("show", "b.yaml").stdout == shown.stdout


def test_schema_describes_every_key() -> None:
    result = run("schema")
    assert result.exit_code == 0
    schema = json.loads(result.stdout)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(schema["properties"]) == set(Spec.model_fields)
    assert schema["required"] == ["version", "target", "speculation"]
    for name, section in {"Spec": schema, **schema["$defs"]}.items():
        assert section["additionalProperties"] is False
        for key, described in section["properties"].items():
            # A key whose text is that of its section refers to it.
            described = schema["$defs"][described["$ref"].rsplit("/", 1)[1]] if "$ref" in described else described
            assert len(described.get("description", "")) > 10, f"{name}.{key} has no description"
    speculation = schema["$defs"]["Speculation"]
    assert speculation["required"] == ["method"]
    assert "lookahead" in speculation["properties"]["method"]["enum"]
    sizes = schema["$defs"]["PerModelSize"]["properties"]["target"]
    assert "string" in json.dumps(sizes)  # 256MiB is no error in an editor


def test_a_spec_of_every_section_agrees_with_its_schema() -> None:
    """The JSON Schema knows every key that `show` prints, section by section."""
    Path("a.yaml").write_text(MINIMAL)
    content = yaml.safe_load(run("show", "a.yaml").stdout)
    schema = json.loads(run("schema").stdout)
    for section, keys in content.items():
        if isinstance(keys, dict):
            definition = schema["properties"][section]["$ref"].rsplit("/", 1)[1]
            assert set(keys) <= set(schema["$defs"][definition]["properties"])
