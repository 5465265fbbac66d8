"""`trtspec build` through the front door, on small random models."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.errors import EXIT_ERROR, EXIT_OK

STEPS = ["resolve", "pair", "plan", "engine:target", "engine:draft", "engines", "repository", "manifest"]


class Project:
    """A spec with two small models of its own beside it."""

    def __init__(self, root: Path, target: Path, draft: Path) -> None:
        self.root = root
        self.target = Path(shutil.copytree(target, root / "models" / "target"))
        self.draft = Path(shutil.copytree(draft, root / "models" / "draft"))
        self.config = root / "tiny.yaml"
        self.content: dict[str, Any] = {
            "version": 1,
            "target": {"model": "./models/target", "dtype": "float32"},
            "speculation": {
                "method": "draft_target",
                "num_draft_tokens": 3,
                "draft": {"model": "./models/draft", "dtype": "float32"},
            },
            "engine": {"max_batch_size": 4, "max_input_len": 128, "max_seq_len": 256},
        }
        self.engines, self.model_repo = root / "engines" / "tiny", root / "model_repo" / "tiny"
        self.write()

    def write(self) -> None:
        self.config.write_text(yaml.safe_dump(self.content))

    def run(self, *options: str) -> Result:
        return CliRunner().invoke(main, ["build", str(self.config), *options])

    def build(self, *options: str) -> dict[str, Any]:
        """The summary of a build that must succeed."""
        result = self.run(*options, "--json")
        assert result.exit_code == EXIT_OK, result.output
        return summary(result)

    def refuse(self, *options: str) -> str:
        """What a build that must fail says: one line for each fault."""
        result = self.run(*options)
        assert result.exit_code == EXIT_ERROR, result.output
        assert "Traceback" not in result.output
        assert result.stderr and all(line.startswith("error: ") for line in result.stderr.splitlines())
        self.assert_nothing_half_written()
        return result.stderr

    def assert_nothing_half_written(self) -> None:
        """Whatever stands in an output's place is whole, and nothing lies beside it."""
        from trtspec.runtime.engine import EngineConfig
        from trtspec.triton.repository import check_repository

        for role in ("target", "draft"):
            if (self.engines / role).exists():
                EngineConfig.load(self.engines / role)
        if self.model_repo.exists():
            check_repository(self.model_repo)
        if (self.engines / "manifest.json").exists():
            json.loads((self.engines / "manifest.json").read_text())

    def start(self, *options: str, **streams: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "trtspec", "build", str(self.config), *options], **streams)


def summary(result: Result) -> dict[str, Any]:
    """The JSON object in the last line of stdout."""
    content: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return content


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {step["name"]: step["status"] for step in report["steps"]}


def ran(report: dict[str, Any]) -> list[str]:
    return [name for name, status in statuses(report).items() if status == "ok"]


def files_below(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.fixture
def project(tmp_path: Path, tiny_model_dir: Path, tiny_draft_dir: Path) -> Project:
    return Project(tmp_path, tiny_model_dir, tiny_draft_dir)


def test_a_build_and_a_second_one_that_does_nothing(project: Project) -> None:
    report = project.build()
    assert report["ok"] and report["changed"] and ran(report) == STEPS
    assert {path.name for path in project.model_repo.iterdir()} >= {"tensorrt_llm", "tensorrt_llm_draft"}
    before = files_below(project.root)
    result = project.run()
    assert result.exit_code == EXIT_OK
    assert f"nothing to do, {project.engines} and {project.model_repo} up to date" in result.stdout
    assert files_below(project.root) == before
    second = project.build()
    assert not second["changed"] and set(statuses(second).values()) == {"cached"}


def test_the_built_engines_run_and_are_stamped(project: Project) -> None:
    import numpy as np

    from trtspec.decoding.engine_call import EngineRequest
    from trtspec.runtime.torch_runtime import TorchRuntime

    project.build()
    for role, max_draft_len, mode in (("target", 3, 2), ("draft", 0, 1)):
        config = json.loads((project.engines / role / "config.json").read_text())
        assert config["build_config"]["max_draft_len"] == max_draft_len
        assert config["build_config"]["speculative_decoding_mode"] == mode
        assert config["build_config"]["max_seq_len"] == 256
        assert config["trtspec"]["role"] == role and config["trtspec"]["source"] == f"./models/{role}"
        assert len(config["trtspec"]["source_fingerprint"]) == len(config["trtspec"]["spec_hash"]) == 64
        runtime = TorchRuntime(project.engines / role, kv_cache_bytes=1 << 22)
        answer = runtime.execute(EngineRequest(input_ids=np.array([5, 6, 7], dtype=np.int32), max_new_tokens=4))
        assert len(answer.output_ids) >= 1


def test_manifest_says_what_was_built_from_what(project: Project) -> None:
    import hashlib

    project.build()
    manifest = json.loads((project.engines / "manifest.json").read_text())
    assert set(manifest["versions"]) >= {"trtspec", "python", "platform", "torch", "transformers", "numpy"}
    assert manifest["hardware"]["cores"] >= 1 and manifest["hardware"]["memory_bytes"] > 1 << 28
    assert manifest["spec"]["resolved"]["speculation"]["num_draft_tokens"] == 3
    assert manifest["models"]["draft"]["model"] == "./models/draft"
    steps = manifest["steps"]
    assert list(steps) == STEPS[:-1]
    assert all(step["status"] == "ok" and step["gpu"] == "not run on a GPU" for step in steps.values())
    for name in ("engine:target", "engine:draft", "repository"):
        assert steps[name]["files"] and steps[name]["commands"] and steps[name]["seconds"] > 0
        for path, file in steps[name]["files"].items():
            content = (Path(steps[name]["output"]) / path).read_bytes()
            assert file == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def test_planned_memory_is_what_the_weights_take(project: Project) -> None:
    """Apart from norms and the file's header, which are a few percent in so small a model."""
    project.build()
    steps = json.loads((project.engines / "manifest.json").read_text())["steps"]
    for role in ("target", "draft"):
        planned = steps["plan"]["facts"]["memory"][role]["weights"]
        written = steps[f"engine:{role}"]["files"]["rank0.safetensors"]["bytes"]
        assert 0.9 * written < planned <= written


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("serving.http_port=9000", ["manifest"]),
        ("serving.startup_timeout_s=10.0", ["manifest"]),
        ("parity.seed=7", ["manifest"]),
        ("serving.plain_chunk_tokens=8", ["repository", "manifest"]),
        ("serving.kv_cache_bytes.target=8MiB", ["plan", "repository", "manifest"]),
        ("speculation.acceptance=tokens", ["plan", "engines", "repository", "manifest"]),
        (
            "speculation.num_draft_tokens=5",
            ["plan", "engine:target", "engines", "repository", "manifest"],
        ),
        (
            "speculation.draft.dtype=bfloat16",
            ["plan", "engine:draft", "engines", "repository", "manifest"],
        ),
        (
            "engine.max_seq_len=200",
            ["plan", "engine:target", "engine:draft", "engines", "repository", "manifest"],
        ),
        ("engine.version='1.2.0'", ["plan", "repository", "manifest"]),
    ],
)
def test_a_setting_runs_the_steps_that_depend_on_it(project: Project, setting: str, expected: list[str]) -> None:
    project.build()
    preview = project.build("--set", setting, "--dry-run")
    report = project.build("--set", setting)
    assert ran(report) == expected
    would_run = [name for name, status in statuses(preview).items() if status == "would run"]
    assert set(expected) <= set(would_run)


def test_settings_of_the_launcher_are_not_in_the_repository(project: Project) -> None:
    """Backs the settings that leave the repository cached: written again with all of them changed, it is the same."""
    project.build()
    before = files_below(project.model_repo)
    changes = ("host=127.0.0.2", "http_port=1", "grpc_port=2", "metrics_port=3", "startup_timeout_s=1", "num_threads=1")
    changes += ("probe_interval_s=1",)
    report = project.build("--force", *(word for change in changes for word in ("--set", f"serving.{change}")))
    assert ran(report) == STEPS
    assert files_below(project.model_repo) == before


def test_comments_and_spelled_out_defaults_do_not_matter(project: Project) -> None:
    project.build()
    project.content["serving"] = {"http_port": 8000}
    project.write()
    project.config.write_text("# a comment\n" + project.config.read_text())
    assert not project.build()["changed"]


def test_another_draft_rebuilds_the_draft_and_not_the_target(project: Project, save_model: Callable[..., Path]) -> None:
    project.build()
    shutil.rmtree(project.draft)
    save_model(project.draft, seed=5)
    assert ran(project.build()) == ["resolve", "pair", "plan", "engine:draft", "engines", "repository", "manifest"]


def test_method_none_builds_the_target_alone(project: Project) -> None:
    project.content["speculation"] = {"method": "none"}
    project.write()
    report = project.build()
    assert ran(report) == ["resolve", "plan", "engine:target", "engines", "repository", "manifest"]
    assert not (project.engines / "draft").exists() and not (project.model_repo / "tensorrt_llm_draft").exists()


@pytest.mark.parametrize("output", ["engines/tiny/target", "engines/tiny/draft", "model_repo/tiny"])
def test_a_deleted_or_corrupted_output_is_built_again(project: Project, output: str) -> None:
    project.build()
    path = project.root / output
    right = files_below(path)
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    report = project.build()
    step = next(step for step in report["steps"] if step["output"] == str(path))
    assert step["status"] == "ok" and str(largest) in step["reason"]
    assert files_below(path) == right
    shutil.rmtree(path)
    report = project.build()
    assert statuses(report)[step["name"]] == "ok" and files_below(path) == right


def test_dry_run_prints_every_step_and_writes_nothing(project: Project) -> None:
    before = files_below(project.root)
    result = project.run("--dry-run")
    assert result.exit_code == EXIT_OK
    assert files_below(project.root) == before and not project.engines.exists() and not project.model_repo.exists()
    for name in STEPS:
        assert f"{name}: would run" in result.stdout
    for output in (project.engines / "target", project.engines / "draft", project.model_repo):
        assert f"output: {output}" in result.stdout
    assert "write ./models/target as float32 weights for the torch runtime" in result.stdout
    project.build()
    assert "engine:target: cached (unchanged)" in project.run("--dry-run").stdout


def test_dry_run_does_not_download(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a dry run has asked the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    preview = project.build("--dry-run", "--set", "target.model=some-org/some-model")
    assert set(statuses(preview).values()) == {"would run"}


def test_a_method_that_is_not_built_yet_is_refused(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a release that lacks its row."""
    monkeypatch.setattr("trtspec.trtllm.support.BUILT", {("draft_target", "engine", "torch")})
    project.content["speculation"] = {"method": "mtp"}
    project.write()
    assert "does not build method mtp for runtime torch yet" in project.refuse()
    assert not project.engines.exists()


def test_a_tree(project: Project) -> None:
    """The target verifies all nodes, the draft takes those that have children; the server is told the branching."""
    from trtspec.build.limits import build_config
    from trtspec.spec.load import load_spec

    project.content["speculation"] |= {"method": "tree", "tree": {"branching": [3, 2, 1]}}
    del project.content["speculation"]["num_draft_tokens"]
    project.write()
    project.build()
    limits = {
        role: json.loads((project.engines / role / "config.json").read_text())["build_config"]["max_draft_len"]
        for role in ("target", "draft")
    }
    assert limits == {"target": 3 + 6 + 6, "draft": 3 + 6}
    compiled = load_spec(project.config, ("engine.runtime=tensorrt_llm", "hardware.gpu=H100-SXM"))
    assert build_config(compiled, "draft", None)["max_draft_len"] == 0  # engines of TensorRT-LLM take no trees
    values = parameters(project.model_repo / "tensorrt_llm_bls")
    assert (values["tree_branching"], values["acceptance"], values["num_draft_tokens"]) == ("3,2,1", "tokens", "15")


def test_the_trees_of_several_drafts(project: Project) -> None:
    """An engine for each, named in the manifest and in the repository; one that does not pair is refused by its key."""
    further = [project.content["target"] | {"num_layers": 1}, project.content["speculation"]["draft"]]
    tree = {"branching": [2, 1], "drafts": further}
    project.content["speculation"] |= {"method": "tree", "tree": tree}
    del project.content["speculation"]["num_draft_tokens"]
    project.content["serving"] = {"kv_cache_bytes": {"draft": "8MiB"}}
    project.write()
    report = project.build()
    assert [f"engine:{role}" for role in ("draft", "draft_2", "draft_3")] == ran(report)[4:7]
    roles = ("target", "draft", "draft_2", "draft_3")
    built = {role: json.loads((project.engines / role / "config.json").read_text()) for role in roles}
    assert [built[role]["build_config"]["max_draft_len"] for role in roles] == [12, 2, 2, 2]
    assert built["draft_2"]["pretrained_config"]["num_hidden_layers"] == 1
    values = parameters(project.model_repo / "tensorrt_llm_bls")
    assert (values["tree_branching"], values["num_draft_tokens"]) == ("2,1", "12")
    for role in roles[1:]:
        assert values[f"tensorrt_llm_{role}_model_name"] == f"tensorrt_llm_{role}"
        engine = parameters(project.model_repo / f"tensorrt_llm_{role}")
        assert (engine["gpt_model_path"], engine["trtspec_kv_cache_bytes"]) == (f"/engines/{role}", str(8 << 20))
    assert list(json.loads((project.engines / "manifest.json").read_text())["models"]) == list(roles)

    swap_two_tokens(Path(shutil.copytree(project.draft, project.root / "models" / "other")))
    tree["drafts"] = [further[0], {"model": "./models/other", "dtype": "float32"}]
    project.write()
    message = project.refuse()
    assert "speculation.tree.drafts[1]: the draft_3 does not fit the target" in message and "first in id 5" in message


def test_a_cascade_of_four_models(project: Project) -> None:
    """An engine for each, named in the manifest and in the repository; one that does not pair is refused by its key."""
    middle, lower = (project.content[name] for name in ("target", "speculation"))
    cascade = {"num_draft_tokens": 2, "middle": lower["draft"], "middles": [middle | {"num_layers": 1}]}
    project.content["speculation"] |= {"method": "cascade", "cascade": cascade}
    project.content["serving"] = {"kv_cache_bytes": {"middle": "8MiB"}}
    project.write()
    report = project.build()
    roles = ("target", "middle", "middle_2", "draft")
    assert [f"engine:{role}" for role in roles] == ran(report)[3:7]
    built = {role: json.loads((project.engines / role / "config.json").read_text()) for role in roles}
    assert [built[role]["build_config"]["max_draft_len"] for role in roles[1:]] == [2, 2, 0]
    assert built["middle_2"]["pretrained_config"]["num_hidden_layers"] == 1
    values = parameters(project.model_repo / "tensorrt_llm_bls")
    assert (values["method"], values["cascade_num_draft_tokens"]) == ("cascade", "2")
    for role in roles[1:]:
        assert values[f"tensorrt_llm_{role}_model_name"] == f"tensorrt_llm_{role}"
        engine = parameters(project.model_repo / f"tensorrt_llm_{role}")
        assert engine["gpt_model_path"] == f"/engines/{role}"
        assert (engine["trtspec_kv_cache_bytes"] == str(8 << 20)) == (role != "draft")
    assert list(json.loads((project.engines / "manifest.json").read_text())["models"]) == list(roles)

    swap_two_tokens(Path(shutil.copytree(project.draft, project.root / "models" / "other")))
    cascade["middles"] = [*cascade["middles"], {"model": "./models/other", "dtype": "float32"}]
    project.write()
    message = project.refuse()
    assert "speculation.cascade.middles[1]: the middle_3 does not fit the target" in message


def test_one_word_switches_the_method(project: Project) -> None:
    """What each method needs stands side by side in one file, and only `method` changes."""
    speculation = project.content["speculation"]
    del speculation["num_draft_tokens"]  # 4 where a method's settings do not say it
    speculation |= {
        "early_exit": {"layer": 1},
        "ngram": {"max_ngram": 2},
        "tree": {"branching": [2, 1]},
        "cascade": {"middle": project.content["target"] | {"num_layers": 1}},
        "medusa": {"heads": "./heads", "choices": [[0]]},
    }
    roles = {"early_exit": ["draft"], "ngram": [], "tree": ["draft"], "cascade": ["middle", "draft"], "none": []}
    for method, proposers in {**roles, "draft_target": ["draft"]}.items():
        speculation["method"] = method
        project.write()
        built = [step.removeprefix("engine:") for step in statuses(project.build()) if step.startswith("engine:")]
        assert built == ["target", *proposers]
        values = parameters(project.model_repo / "tensorrt_llm_bls")
        assert values["method"] == method
        named = {role for role in ("middle", "draft") if f"tensorrt_llm_{role}_model_name" in values}
        assert named == set(proposers)
        notes = CliRunner().invoke(main, ["config", "validate", str(project.config)]).stdout
        assert f"speculation.medusa: unused, because method is {method}" in notes
        assert f"speculation.{method}: unused" not in notes


def parameters(model: Path) -> dict[str, str]:
    """What a model's config.pbtxt tells it."""
    text = (model / "config.pbtxt").read_text()
    return dict(re.findall(r'key: "(\w+)"\s+value \{\s+string_value: "([^"]*)"', text))


def test_the_first_layers_of_a_model(project: Project) -> None:
    """A middle model cut out of the target; another number of layers builds it, and only it, again."""
    from trtspec.runtime.engine import EngineConfig

    speculation = project.content["speculation"]
    middle = project.content["target"] | {"num_layers": 1}
    speculation |= {"method": "cascade", "cascade": {"middle": middle}}
    project.write()
    project.build()

    def layers(role: str) -> int:
        return EngineConfig.load(project.engines / role).model.num_hidden_layers

    whole = layers("target")
    assert whole > 1 and layers("middle") == 1
    speculation["cascade"]["middle"] = project.content["target"] | {"num_layers": whole}
    project.write()
    message = project.refuse()
    assert f"the first {whole} of {whole} layers are no smaller model" in message
    assert f"the model's num_layers, to at most {whole - 1}" in message
    speculation["cascade"]["middle"] = project.content["target"]
    project.write()
    again = ran(project.build())
    assert "engine:middle" in again and "engine:target" not in again and "engine:draft" not in again
    assert layers("middle") == whole


def test_only(project: Project) -> None:
    message = project.refuse("--only", "engine:target")
    assert "step resolve is not up to date (not built yet); run it first: --only resolve" in message
    for name in STEPS[:4]:
        report = project.build("--only", name)
        assert ran(report) == [name]
    assert (project.engines / "target").is_dir() and not (project.engines / "draft").exists()
    assert statuses(project.build("--only", "engine:target"))["engine:target"] == "cached"
    assert ran(project.build("--only", "engine:target", "--force")) == ["engine:target"]
    assert "expected one of resolve, pair, plan" in project.refuse("--only", "engine")
    assert ran(project.build()) == STEPS[4:]


def test_force_runs_every_step_and_gives_the_same_bytes(project: Project) -> None:
    project.build()
    before = files_below(project.engines / "target"), files_below(project.model_repo)
    assert ran(project.build("--force")) == STEPS
    assert (files_below(project.engines / "target"), files_below(project.model_repo)) == before


def test_json_is_the_last_line_also_of_a_failure(project: Project) -> None:
    project.build()
    (project.draft / "config.json").unlink()
    result = project.run("--json")
    report = summary(result)
    assert result.exit_code == EXIT_ERROR and not report["ok"]
    assert statuses(report)["resolve"] == "failed"
    assert set(list(statuses(report).values())[1:]) == {"skipped"}
    assert f"error: {report['error']}" == result.stderr.strip()
    assert "config.json is missing" in report["error"] and str(project.draft) in report["error"]
    missing = CliRunner().invoke(main, ["build", str(project.root / "no.yaml"), "--json"])
    assert missing.exit_code == EXIT_ERROR and "no such file" in summary(missing)["error"]


def test_a_truncated_weight_file(project: Project) -> None:
    weights = project.target / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    message = project.refuse()
    assert "truncated safetensors file" in message and str(weights) in message
    assert not (project.engines / "target").exists()
    weights.write_bytes(whole)
    project.build()


def test_a_weight_that_is_missing(project: Project) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(project.target / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, project.target / "model.safetensors")
    assert "model.layers.1.mlp.down_proj.weight is missing" in project.refuse()


def test_a_draft_that_does_not_fit_stops_the_build(project: Project) -> None:
    swap_two_tokens(project.draft)
    message = project.refuse()
    assert "the draft does not fit the target" in message and "first in id 5" in message
    assert not (project.engines / "target").exists()


def swap_two_tokens(model: Path) -> None:
    """Of the tokenizer; the number of ids stays."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    five, six = (next(token for token, i in vocabulary.items() if i == n) for n in (5, 6))
    vocabulary[five], vocabulary[six] = 6, 5
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def test_notes_of_the_pair_check_are_shown(project: Project) -> None:
    config = json.loads((project.draft / "config.json").read_text())
    config["max_position_embeddings"] = 100
    (project.draft / "config.json").write_text(json.dumps(config))
    result = project.run()
    assert result.exit_code == EXIT_OK
    assert "pair: note: the draft's context of 100 tokens is shorter than the target's 512" in result.stdout
    assert "plan: note: max_seq_len of the draft is 100 instead of 256" in result.stdout
    built = json.loads((project.engines / "draft" / "config.json").read_text())["build_config"]
    assert (built["max_seq_len"], built["max_input_len"]) == (100, 100)


def test_more_memory_than_there_is(project: Project) -> None:
    message = project.refuse("--set", "serving.kv_cache_bytes.draft=900TiB")
    assert "GiB of memory are needed" in message and "lower serving.kv_cache_bytes" in message


def test_a_kv_cache_that_holds_no_sequence(project: Project) -> None:
    # 2 (k, v) x 2 layers x 2 KV heads x 8 values x 4 bytes x 256 tokens
    message = project.refuse("--set", "serving.kv_cache_bytes.target=65535")
    assert "do not hold one sequence of 256 tokens" in message and "at least 65536" in message
    project.build("--set", "serving.kv_cache_bytes.target=65536")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["engine.max_draft_len=0"], "max_draft_len"),
        (["engine.max_draft_len=10", "speculation.num_draft_tokens=11"], "max_draft_len"),
        (["serving.default_num_draft_tokens=4"], "num_draft_tokens"),
        (["engine.paged_context_fmha=false"], "the target engine"),
        (["engine.paged_context_fmha=false"], "the draft engine"),
        (["engine.gather_generation_logits=false", "speculation.acceptance=logits"], "logits"),
    ],
)
def test_engines_that_could_not_work_together(project: Project, settings: list[str], message: str) -> None:
    assert message in project.refuse(*(word for setting in settings for word in ("--set", setting)))
    assert not project.model_repo.exists()


def test_engines_that_agree_in_their_draft_length(project: Project) -> None:
    project.build("--set", "engine.max_draft_len=10", "--set", "speculation.num_draft_tokens=10")


def test_outputs_inside_each_other(project: Project) -> None:
    project.content["output"] = {"engines": "out", "model_repo": "out/repo"}
    project.write()
    assert "lies inside the engines directory" in project.refuse()


def test_a_model_repository_that_is_not_ours(project: Project) -> None:
    project.model_repo.mkdir(parents=True)
    (project.model_repo / "thesis.tex").write_text("years of work")
    result = project.run()
    assert result.exit_code == EXIT_ERROR and "was not written by trtspec build" in result.stderr
    assert files_below(project.model_repo) == {"thesis.tex": b"years of work"}


def test_a_file_where_a_directory_must_go(project: Project) -> None:
    (project.root / "engines").write_text("")
    message = project.refuse()
    assert str(project.root / "engines") in message and "move it away" in message


def test_no_permission(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, for whom nothing is forbidden: the refusal is the system call's."""
    mkdir = Path.mkdir

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.is_relative_to(project.model_repo.parent) and self != project.model_repo.parent:
            raise PermissionError(13, "Permission denied", str(self))
        mkdir(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        message = project.refuse()
    assert "no permission" in message and str(project.model_repo.parent) in message
    assert ran(project.build()) == ["repository", "manifest"]


def test_a_full_disk(project: Project, save_model: Callable[..., Path]) -> None:
    """A limit on the size of files stands for a full disk: the write fails in the middle, in the same place."""
    shutil.rmtree(project.draft)
    save_model(project.draft, intermediate_size=2048)  # 1.7 MB; the target has 0.2 MB
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (800_000, hard))  # Python ignores the signal and raises OSError
    try:
        result = project.run("--json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == EXIT_ERROR
    (message,) = result.stderr.splitlines()
    assert f"{project.engines / 'draft'}: " in message and "File too large" in message
    assert statuses(summary(result))["engine:target"] == "ok"
    assert not (project.engines / "draft").exists()
    project.assert_nothing_half_written()
    assert ran(project.build()) == ["engine:draft", "engines", "repository", "manifest"]


class Builds:
    """Builds in processes of their own, forked from one that has imported everything, so that they start at once."""

    CODE = """
import os, signal, sys
import torch, tokenizers, tritonclient.grpc
import trtspec.build.steps, trtspec.models.pair, trtspec.models.source, trtspec.runtime.engine, trtspec.runtime.llama
import trtspec.triton.repository, trtspec.cli.build
from trtspec.cli import main
for line in sys.stdin:
    cpu_seconds, *arguments = line.split()
    pid = os.fork()
    if pid == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1), os.dup2(quiet, 2)
        signal.setitimer(signal.ITIMER_PROF, float(cpu_seconds))
        try:
            main(arguments)
        except SystemExit as end:
            os._exit(end.code)
        os._exit(99)
    print(pid, flush=True)
    _, status, usage = os.wait4(pid, 0)
    print(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, flush=True)
"""

    def __init__(self) -> None:
        self.parent = subprocess.Popen(
            [sys.executable, "-c", self.CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, *arguments: str, cpu_seconds: float = 0.0) -> int:
        """The pid of a new build. After `cpu_seconds` of CPU time (0: never) the kernel ends it with SIGPROF, which
        nobody handles: as sudden as SIGKILL, and at the same place however busy the machine is."""
        assert self.parent.stdin and self.parent.stdout
        print(cpu_seconds, "build", *arguments, file=self.parent.stdin, flush=True)
        return int(self.parent.stdout.readline())

    def wait(self) -> tuple[int, float]:
        """The exit code of the build (minus the signal that ended it) and its CPU time in seconds."""
        assert self.parent.stdout
        code, cpu_seconds = self.parent.stdout.readline().split()
        return int(code), float(cpu_seconds)

    def close(self) -> None:
        assert self.parent.stdin and self.parent.stdout
        self.parent.stdin.close()
        self.parent.wait(timeout=60)
        self.parent.stdout.close()


@pytest.fixture(scope="module")
def builds() -> Iterator[Builds]:
    started = Builds()
    yield started
    started.close()


def start_and_halt(project: Project, builds: Builds) -> int:
    """The pid of a build that holds the lock and does not get on."""
    pid = builds.start(str(project.config))
    lock = project.engines / ".build" / "lock"
    deadline = time.monotonic() + 60
    while not (lock.exists() and lock.read_text() == f"{pid}\n"):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_build_beside_another_is_refused_at_once(project: Project, builds: Builds) -> None:
    pid = start_and_halt(project, builds)
    try:
        begin = time.monotonic()
        message = project.refuse()
        assert time.monotonic() - begin < 10
        assert f"process {pid} is building here" in message and "run this again" in message
        assert project.run("--dry-run").exit_code == EXIT_OK
    finally:
        os.kill(pid, signal.SIGCONT)
    assert builds.wait()[0] == EXIT_OK
    assert not project.build()["changed"]


def test_the_lock_of_a_killed_build_is_no_obstacle(project: Project, builds: Builds) -> None:
    os.kill(start_and_halt(project, builds), signal.SIGKILL)
    assert builds.wait()[0] == -signal.SIGKILL
    assert project.build()["ok"]


def test_killed_at_any_moment_a_build_goes_on(project: Project, builds: Builds) -> None:
    """End builds after random CPU times (fixed seed), every other one with --force so that each step is hit again and
    again. Each output is then absent or whole to the byte, finished steps stay finished, and the next build ends as if
    nothing had happened."""
    project.build()
    outputs = project.engines / "target", project.engines / "draft", project.model_repo
    undisturbed = [files_below(output) for output in outputs]
    builds.start(str(project.config), "--force")
    code, whole = builds.wait()
    assert code == EXIT_OK
    for output in (project.engines, project.model_repo):
        shutil.rmtree(output)
    moments = random.Random(20240229)
    finished: set[str] = set()
    kills = leftovers = 0
    for attempt in range(24):
        force = ["--force"] if attempt % 2 else []
        builds.start(str(project.config), *force, cpu_seconds=max(moments.uniform(0, whole / (1 + attempt % 3)), 0.001))
        kills += builds.wait()[0] == -signal.SIGPROF
        for output, whole_output in zip(outputs, undisturbed, strict=True):
            assert not output.exists() or files_below(output) == whole_output
        leftovers += any(path.name.endswith(".staging") for path in project.root.rglob("*"))
        state = project.engines / ".build" / "state.json"
        now = set(json.loads(state.read_text())["steps"]) if state.exists() else set()
        assert finished <= now
        finished = now
    assert kills >= 10 and leftovers >= 2
    project.build()
    assert [files_below(output) for output in outputs] == undisturbed
    assert not [path for path in project.root.rglob("*") if path.name.endswith((".staging", ".tmp"))]
    assert not project.build()["changed"]


def test_on_a_terminal(project: Project) -> None:
    """Bars instead of lines; a cached build, which needs no heavy import, shows the endings and cleans up."""
    project.build()
    ours, theirs = pty.openpty()
    process = project.start(stdout=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert process.wait(timeout=60) == EXIT_OK
    assert b"engine:target: cached" in shown and b"nothing to do" in shown


def test_an_unchanged_build_is_quick_and_imports_no_torch(project: Project) -> None:
    project.build()
    code = (
        "import sys; from trtspec.cli import main\n"
        f"try: main(['build', {str(project.config)!r}])\n"
        "finally: print('torch' in sys.modules, 'transformers' in sys.modules, 'tokenizers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines()[-1] == "False False False"
    assert "nothing to do" in result.stdout
