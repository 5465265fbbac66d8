"""Keys that have to agree with each other, through the front door (`trtspec config validate` and `show`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from trtspec.cli import main
from trtspec.spec.load import load_spec

DRAFT = {"draft": {"model": "small"}}
H100 = {"hardware": {"gpu": "H100-SXM", "num_gpus": 4}, "engine": {"runtime": "tensorrt_llm"}}


def spec_of(method: str, **sections: Any) -> dict[str, Any]:
    """A spec of `method`; keyword `speculation` adds to that section, other keywords are whole sections."""
    speculation = {"method": method, **sections.pop("speculation", {})}
    return {"version": 1, "target": {"model": "big"}, "speculation": speculation, **sections}


Run = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Exit code, stdout, and the lines of stderr without `error: t.yaml:LINE: `, for a spec."""
    monkeypatch.chdir(tmp_path)

    def invoke(content: dict[str, Any], command: str = "validate") -> tuple[int, str, list[str]]:
        Path("t.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        result = CliRunner().invoke(main, ["config", command, "t.yaml"])
        return result.exit_code, result.stdout, [line.split(": ", 2)[2] for line in result.stderr.splitlines()]

    return invoke


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a method without its draft": (
        spec_of("draft_target"),
        "speculation: method draft_target needs a draft model; add speculation.draft.model",
    ),
    "a method without its settings": (
        spec_of("early_exit"),
        "speculation: method early_exit needs its settings; add speculation.early_exit.layer",
    ),
    "nothing to propose": (
        spec_of("draft_target", speculation=DRAFT | {"num_draft_tokens": 0}),
        "speculation.num_draft_tokens: 0 is not between 1 and 64 as method draft_target needs; set "
        "speculation.method: none for plain decoding",
    ),
    "engine without draft slots": (
        spec_of("draft_target", speculation=DRAFT | {"num_draft_tokens": 4}, engine={"max_draft_len": 0}),
        "engine.max_draft_len: 0 does not fit the 4 draft tokens of t.yaml:8: speculation.num_draft_tokens; remove "
        "this key, or write 4",
    ),
    "10 slots for 11": (
        spec_of("draft_target", speculation=DRAFT | {"num_draft_tokens": 11}, engine={"max_draft_len": 10}),
        "engine.max_draft_len: 10 does not fit the 11 draft tokens of t.yaml:8: speculation.num_draft_tokens; remove "
        "this key, or write 11",
    ),
    "serving asks for more than the engine verifies": (
        spec_of("draft_target", speculation=DRAFT, serving={"default_num_draft_tokens": 5}),
        "serving.default_num_draft_tokens: 5 draft tokens, but the target engine verifies at most 4; use at most 4, "
        "or raise engine.max_draft_len",
    ),
    "parity asks for more than the engine verifies": (
        spec_of("draft_target", speculation=DRAFT, parity={"num_draft_tokens": 5}),
        "parity.num_draft_tokens: 5 draft tokens, but the target engine verifies at most 4; use at most 4, or raise "
        "engine.max_draft_len",
    ),
    "lookahead that cannot look ahead": (
        spec_of(
            "lookahead",
            speculation={"lookahead": {"window_size": 4, "ngram_size": 1, "verification_set_size": 0}},
            **H100,
        ),
        "speculation.lookahead: window 4, n-gram 1, verification set 0 cannot look ahead; use a window and an n-gram "
        "of 2 or more and a verification set of 1 or more",
    ),
    "lookahead against another engine": (
        spec_of("lookahead", hardware=H100["hardware"], engine={"runtime": "tensorrt_llm", "max_draft_len": 39}),
        "engine.max_draft_len: 39 does not fit the 15 draft tokens of t.yaml:4: speculation.num_draft_tokens; remove "
        "this key, or write 15",
    ),
    "a draft length that is derived": (
        spec_of("lookahead", speculation={"num_draft_tokens": 16}, **H100),
        "speculation.num_draft_tokens: 16 does not fit the settings of lookahead, which give 15; remove this key, or "
        "write 15",
    ),
    "MTP modules": (
        spec_of("mtp", speculation={"mtp": {"num_modules": 2}, "num_draft_tokens": 3}, hardware=H100["hardware"])
        | {"engine": {"runtime": "tensorrt_llm", "track": "llmapi"}},
        "speculation.num_draft_tokens: 3 does not fit 2 MTP modules; remove this key, or write 2",
    ),
    "a tree without a parent": (
        spec_of("medusa", speculation={"medusa": {"heads": "h", "choices": [[0], [1, 0]]}}),
        "speculation.medusa.choices[1]: the parent of path [1, 0] is missing; add [1]",
    ),
    "a tree deeper than its heads": (
        spec_of("medusa", speculation={"medusa": {"heads": "h", "num_heads": 1, "choices": [[0], [0, 0]]}}),
        "speculation.medusa.choices[1]: path [0, 0] is deeper than num_heads 1; shorten it, or raise "
        "speculation.medusa.num_heads",
    ),
    "a tree with a node twice": (
        spec_of("medusa", speculation={"medusa": {"heads": "h", "choices": [[0], [1], [0]]}}),
        "speculation.medusa.choices: path [0] is listed 2 times; list every path once",
    ),
    "a tree with too many nodes": (
        spec_of("medusa", speculation={"medusa": {"heads": "h", "choices": [[i] for i in range(64)]}}),
        "speculation.medusa.choices: the tree has 64 nodes, more than 63; remove some",
    ),
    "a SpecInfer tree with too many nodes": (
        spec_of("tree", speculation=DRAFT | {"tree": {"branching": [8, 8, 8]}}),
        "speculation.tree.branching: the tree has 584 nodes, more than 256; use fewer children or levels",
    ),
    "the trees of several drafts with too many nodes": (
        spec_of("tree", speculation=DRAFT | {"tree": {"branching": [8, 8], "drafts": [DRAFT["draft"]] * 3}}),
        "speculation.tree.branching: the tree has 288 nodes, more than 256; use fewer children or levels",
    ),
    "a further draft that reads less than a prompt": (
        spec_of("tree", speculation=DRAFT | {"tree": {"drafts": [DRAFT["draft"] | {"max_seq_len": 64}]}}),
        "engine.max_input_len: 1024 leaves no room for output in the draft_2's max_seq_len 64; lower it, or raise "
        "max_seq_len",
    ),
    "a further middle model that reads less than a prompt": (
        spec_of(
            "cascade",
            speculation=DRAFT
            | {"cascade": {"middle": {"model": "mid"}, "middles": [{"model": "low", "max_seq_len": 64}]}},
        ),
        "engine.max_input_len: 1024 leaves no room for output in the middle_2's max_seq_len 64; lower it, or raise "
        "max_seq_len",
    ),
    "a further middle model on a GPU that is not there": (
        spec_of(
            "cascade",
            speculation=DRAFT | {"cascade": {"middle": {"model": "mid"}, "middles": [{"model": "low"}]}},
            serving={"gpu_device_ids": {"middle": [4]}},
            **H100,
        ),
        "serving.gpu_device_ids.middle: GPU 4 does not exist, hardware has 4; count from 0, or raise hardware.num_gpus",
    ),
    "a tree that is accepted by logits": (
        spec_of("tree", speculation=DRAFT | {"acceptance": "logits"}),
        "speculation.acceptance: the server verifies a tree path by path and accepts by equality, not by logits; use "
        "acceptance: auto, or tokens",
    ),
    "a tree from a draft without logits": (
        spec_of("tree", speculation=DRAFT | {"acceptance": "tokens"}, engine={"gather_generation_logits": False}),
        "engine.gather_generation_logits: the draft engine cannot return the logits that a tree grows from; use true",
    ),
    "a target of fewer layers": (
        spec_of("none", target={"model": "big", "num_layers": 4}),
        "target.num_layers: the target is what the output is measured by, and is not cut; remove this key; a draft or "
        "middle model may have it",
    ),
    "draft logits that the engine cannot return": (
        spec_of(
            "draft_target", speculation=DRAFT | {"acceptance": "logits"}, engine={"gather_generation_logits": False}
        ),
        "engine.gather_generation_logits: the draft engine cannot return the logits that acceptance: logits asks "
        "for; use true, or speculation.acceptance: tokens",
    ),
    "draft logits of a method without any": (
        spec_of("ngram", speculation={"acceptance": "logits"}),
        "speculation.acceptance: method ngram has no draft logits; use acceptance: tokens",
    ),
    "4 x 4 on 4 GPUs": (
        spec_of("none", hardware=H100["hardware"]) | {
            "target": {"model": "big", "tensor_parallel": 4, "pipeline_parallel": 4}
        },
        "target.tensor_parallel: tensor_parallel 4 x pipeline_parallel 4 needs 16 GPUs, but hardware has 4; lower "
        "them, or raise hardware.num_gpus or hardware.num_nodes",
    ),
    "a draft over more GPUs than there are": (
        spec_of("draft_target", speculation={"draft": {"model": "small", "tensor_parallel": 2}}),
        "speculation.draft.tensor_parallel: tensor_parallel 2 x pipeline_parallel 1 needs 2 GPUs, but hardware has "
        "1; lower them, or raise hardware.num_gpus or hardware.num_nodes",
    ),
    "several CPUs": (
        spec_of("none", hardware={"gpu": "cpu", "num_gpus": 2}),
        "hardware.num_gpus: gpu is cpu, but 2 GPUs are asked for; name the GPU, or use 1",
    ),
    "no room for output": (
        spec_of("none", engine={"max_input_len": 2048}),
        "engine.max_input_len: 2048 leaves no room for output in the target's max_seq_len 2048; lower it, or raise "
        "max_seq_len",
    ),
    "int8 cache of the draft": (
        spec_of("draft_target", speculation={"draft": {"model": "small", "kv_cache_dtype": "int8"}}),
        "engine.kv_cache_reuse: the draft engine cannot reuse its KV cache: an int8 KV cache turns paged context "
        "FMHA off; use kv_cache_dtype: auto, or set engine.kv_cache_reuse: false",
    ),
    "fp8 cache without fp8 weights": (
        spec_of("none", **H100) | {"target": {"model": "big", "kv_cache_dtype": "fp8"}},
        "engine.kv_cache_reuse: the target engine cannot reuse its KV cache: an fp8 KV cache without fp8 activations "
        "turns paged context FMHA off; use quantization: fp8, or set engine.kv_cache_reuse: false",
    ),
    "one port for two": (
        spec_of("none", serving={"http_port": 9000, "metrics_port": 9000}),
        "serving.metrics_port: port 9000 is used for http_port and metrics_port; use another port",
    ),
    "fewer GPUs than the model is split over": (
        spec_of("none", **H100, serving={"gpu_device_ids": {"target": [0]}})
        | {"target": {"model": "big", "tensor_parallel": 2}},
        "serving.gpu_device_ids.target: [0] are not the 2 different GPUs that the target is split over; name each GPU "
        "once, tensor_parallel x pipeline_parallel of them",
    ),
    "a GPU that is not there": (
        spec_of("draft_target", **H100, serving={"gpu_device_ids": {"draft": [4]}}, speculation=DRAFT),
        "serving.gpu_device_ids.draft: GPU 4 does not exist, hardware has 4; count from 0, or raise hardware.num_gpus",
    ),
    "ranks that nobody starts": (
        spec_of("none", **H100, serving={"spawn_processes": False}),
        "serving.spawn_processes: without orchestrator no processes are started at all; remove this key, or set "
        "serving.orchestrator: true",
    ),
    "fast logits between processes that the backend starts": (
        spec_of("draft_target", **H100, serving={"fast_logits": True, "orchestrator": True}, speculation=DRAFT),
        "serving.fast_logits: logits go from GPU to GPU only between processes that the launcher starts; set "
        "serving.orchestrator: true and serving.spawn_processes: false, or remove this key",
    ),
    "chunked context without paged context": (
        spec_of("none", serving={"chunked_context": True})
        | {"hardware": H100["hardware"], "engine": {"paged_context_fmha": False, "kv_cache_reuse": False}},
        "serving.chunked_context: long prompts cannot be cut without paged context FMHA; set "
        "engine.paged_context_fmha: true, or remove this key",
    ),
    "draft lengths of an engine that drafts by itself": (
        spec_of("lookahead", **H100, serving={"draft_length": {"policy": "adaptive"}}),
        "serving.draft_length.policy: method lookahead drafts inside the target's engine, always the same number of "
        "tokens; use fixed, or remove serving.draft_length",
    ),
    "a schedule beyond the draft tokens": (
        spec_of(
            "ngram",
            speculation={"num_draft_tokens": 3},
            serving={"draft_length": {"policy": "schedule", "schedule": {4: 4, 8: 2}}},
        ),
        "serving.draft_length.schedule.4: 4 draft tokens, but a cycle proposes at most 3; use at most 3, or raise "
        "speculation.num_draft_tokens",
    ),
    "a schedule of parts of a tree": (
        spec_of(
            "tree",
            speculation=DRAFT | {"tree": {"branching": [2, 1]}},
            serving={"draft_length": {"policy": "schedule", "schedule": {2: 4, 4: 2, 8: 0}}},
        ),
        "serving.draft_length.schedule.4: 2 draft tokens are a part of the tree, which is made whole or not at all; "
        "write 4, or 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_keys_that_do_not_agree_are_refused(run: Run, content: dict[str, Any], message: str) -> None:
    assert run(content) == (1, "", [message])


def test_cache_reuse_without_paged_context_is_refused_for_each_engine(run: Run) -> None:
    content = spec_of("draft_target", speculation=DRAFT, engine={"paged_context_fmha": False})
    code, _, errors = run(content)
    assert code == 1
    assert errors == [
        f"engine.kv_cache_reuse: the {role} engine cannot reuse its KV cache: it is built without paged context "
        "FMHA; set engine.paged_context_fmha: true, or set engine.kv_cache_reuse: false"
        for role in ("target", "draft")
    ]


def test_several_broken_rules_are_all_reported(run: Run) -> None:
    content = spec_of("draft_target", engine={"max_input_len": 4096}, serving={"http_port": 8001})
    code, _, errors = run(content)
    assert code == 1
    assert [error.split(":")[0] for error in errors] == ["speculation", "engine.max_input_len", "serving.grpc_port"]


@pytest.mark.parametrize(
    ("size", "num_draft_tokens"), [((4, 3, 4), 15), ((5, 5, 5), 39), ((7, 5, 3), 39), ((7, 7, 7), 83), ((2, 2, 1), 2)]
)
def test_the_draft_length_of_lookahead_is_derived(run: Run, size: tuple[int, int, int], num_draft_tokens: int) -> None:
    lookahead = dict(zip(("window_size", "ngram_size", "verification_set_size"), size, strict=True))
    code, shown, errors = run(spec_of("lookahead", speculation={"lookahead": lookahead}, **H100), "show")
    assert (code, errors) == (0, [])
    assert yaml.safe_load(shown)["speculation"]["num_draft_tokens"] == num_draft_tokens


DERIVED: dict[str, tuple[dict[str, Any], int]] = {
    "draft_target": (spec_of("draft_target", speculation=DRAFT), 4),
    "medusa's default tree": (spec_of("medusa", speculation={"medusa": {"heads": "h"}}), 63),
    "medusa's own tree": (spec_of("medusa", speculation={"medusa": {"heads": "h", "choices": [[0], [1], [0, 0]]}}), 3),
    "a tree of 2 + 4 + 4": (spec_of("tree", speculation=DRAFT), 10),
    "trees of two drafts": (spec_of("tree", speculation=DRAFT | {"tree": {"drafts": [{"model": "other"}]}}), 20),
    "a tree of 3 + 3": (spec_of("tree", speculation=DRAFT | {"tree": {"branching": [3, 1]}}), 6),
    "mtp": (spec_of("mtp"), 1),
    "one module twice": (spec_of("mtp", speculation={"num_draft_tokens": 2}), 2),
    "eagle": (spec_of("eagle", speculation={"eagle": {"heads": "h"}}), 63),
    "eagle 3": (spec_of("eagle", speculation={"eagle": {"heads": "h", "version": 3, "num_layers": 5}}), 5),
    "redrafter": (spec_of("redrafter", speculation={"redrafter": {"drafter": "d", "num_beams": 3}}), 15),
    "none": (spec_of("none"), 0),
    "none with leftovers": (spec_of("none", speculation=DRAFT | {"num_draft_tokens": 6}), 0),
}


@pytest.mark.parametrize(("content", "num_draft_tokens"), DERIVED.values(), ids=DERIVED)
def test_draft_tokens_a_cycle(tmp_path: Path, content: dict[str, Any], num_draft_tokens: int) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump(content))
    spec = load_spec(path)
    assert spec.speculation.num_draft_tokens == num_draft_tokens
    assert spec.max_draft_len == num_draft_tokens
    assert spec.default_num_draft_tokens == num_draft_tokens


REMARKS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "10 slots for 10": (
        spec_of("draft_target", speculation=DRAFT | {"num_draft_tokens": 10}, engine={"max_draft_len": 10}),
        [],
    ),
    "a draft kept for later": (
        spec_of("none", speculation=DRAFT | {"tree": {"branching": [2]}}),
        ["speculation.draft: unused, because method is none", "speculation.tree: unused, because method is none"],
    ),
    "what other methods need stays, so that one word switches": (
        spec_of("ngram", speculation=DRAFT | {"ngram": {"max_ngram": 2}, "early_exit": {"layer": 2}}),
        [
            "speculation.draft: unused, because method is ngram",
            "speculation.early_exit: unused, because method is ngram",
        ],
    ),
    "63 Medusa slots for 7 nodes": (
        spec_of(
            "medusa",
            speculation={"medusa": {"heads": "h", "choices": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]}},
            hardware=H100["hardware"],
            engine={"runtime": "tensorrt_llm", "max_draft_len": 63},
        ),
        ["engine.max_draft_len: 56 of 63 draft slots are never used"],
    ),
    "no cache reuse": (
        spec_of("draft_target", speculation=DRAFT, engine={"kv_cache_reuse": False, "paged_context_fmha": False}),
        ["engine.kv_cache_reuse: without it every cycle computes the whole text again"],
    ),
    "draft lengths by load that are right": (
        spec_of("ngram", serving={"draft_length": {"policy": "schedule", "schedule": {4: 4, 8: 2, 16: 0}}}),
        [],
    ),
    "draft lengths of plain decoding": (
        spec_of("none", serving={"draft_length": {"policy": "schedule", "schedule": {4: 4}}}),
        [],
    ),
    "a short draft": (
        spec_of("draft_target", speculation={"draft": {"model": "small", "max_seq_len": 1025}}),
        ["speculation.draft.max_seq_len: texts longer than 1025 tokens are decoded without the draft model"],
    ),
}


@pytest.mark.parametrize(("content", "notes"), REMARKS.values(), ids=REMARKS)
def test_what_is_legal_but_wasteful_is_a_note(run: Run, content: dict[str, Any], notes: list[str]) -> None:
    code, out, errors = run(content)
    assert (code, errors) == (0, [])
    lines = out.splitlines()
    assert lines[-1] == "t.yaml: valid"
    found = [line.split(": ", 2)[2] for line in lines[:-1] if "not built yet" not in line]
    assert all(line.startswith("note: t.yaml:") for line in lines[:-1])
    assert found == notes
