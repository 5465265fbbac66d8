"""A plan in its spec file: what changes, what stays, and what is refused."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_doubles import plan

from trtspec.errors import TrtspecError
from trtspec.plan.apply import apply, edited
from trtspec.plan.result import MethodPlan, Plan
from trtspec.spec.load import load_spec

CONFIGS = Path(__file__).parents[2] / "configs"
DRAFT = """\
# A spec of our own.
version: 1
target:
  model: "big"                  # the one that counts
speculation:
  method: draft_target
  num_draft_tokens: 4           # a guess
  draft: {model: small, dtype: float16}   # in one line
  # and no more

serving:
  http_port: 9000
"""
STEPS = {1: 5, 2: 5, 4: 3, 8: 0}
ADVICE: dict[str, Any] = {"schedule": STEPS, "fractions": {}}


def advised(**changes: Any) -> Plan:
    return plan(**(ADVICE | changes))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(DRAFT)
    return path


def test_only_what_the_plan_decides_is_changed(file: Path) -> None:
    changes = apply(advised(fractions={"draft": 0.0851234567, "target": 0.9}), file)
    assert [str(change) for change in changes] == [
        "speculation.num_draft_tokens: 4 -> 5",
        "serving.draft_length.policy: not set -> schedule",
        "serving.draft_length.schedule: not set -> {2: 5, 4: 3}",
        "serving.kv_cache_free_gpu_mem_fraction.draft: not set -> 0.0851235",
        "serving.kv_cache_free_gpu_mem_fraction.target: not set -> 0.9",
    ]
    assert file.read_text() == DRAFT.replace("tokens: 4 ", "tokens: 5 ") + (
        "  draft_length:\n    policy: schedule\n    schedule: {2: 5, 4: 3}\n"
        "  kv_cache_free_gpu_mem_fraction:\n    draft: 0.0851235\n    target: 0.9\n"
    )
    spec = load_spec(file)
    assert spec.serving.draft_length is not None and spec.serving.draft_length.schedule == {2: 5, 4: 3}
    assert (spec.speculation.num_draft_tokens, spec.serving.http_port) == (5, 9000)


def test_requests_that_do_not_say_get_the_planned_length(file: Path) -> None:
    file.write_text(DRAFT + "  default_num_draft_tokens: 2\n")
    apply(advised(), file)
    assert load_spec(file).default_num_draft_tokens == 5
    file.write_text(DRAFT)
    apply(advised(), file)
    assert "default_num_draft_tokens" not in file.read_text()


def test_a_second_time_there_is_nothing_to_change(file: Path) -> None:
    made = advised(fractions={"target": 0.75})
    apply(made, file)
    before = file.stat()
    again = edited(made, file)
    assert (again.changes, again.diff, apply(made, file)) == ((), "", [])
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_the_diff_has_the_changed_lines_and_writes_nothing(file: Path) -> None:
    edit = edited(advised(), file)
    lines = edit.diff.splitlines()
    assert [line for line in lines if line.startswith("-")][1:] == ["-  num_draft_tokens: 4           # a guess"]
    assert [line for line in lines if line.startswith("+")][1:] == [
        "+  num_draft_tokens: 5           # a guess",
        "+  draft_length:",
        "+    policy: schedule",
        "+    schedule: {2: 5, 4: 3}",
    ]
    assert file.read_text() == DRAFT


def test_mode_and_links_stay(file: Path, tmp_path: Path) -> None:
    file.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(file.name)
    apply(advised(), link)
    assert link.is_symlink() and load_spec(file).speculation.num_draft_tokens == 5
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "spec.yaml"]


# What stands in the file -> what stands there afterwards, below the same head.
HEAD = "version: 1\ntarget: {model: big}\n"
STYLES = {
    "flow": (
        "speculation: {method: draft_target, draft: {model: small}, num_draft_tokens: 4}\nserving: {http_port: 9000}\n",
        "speculation: {method: draft_target, draft: {model: small}, num_draft_tokens: 5}\n"
        "serving: {http_port: 9000, draft_length: {policy: schedule, schedule: {2: 5, 4: 3}}}\n",
    ),
    "flow over several lines": (
        "speculation: {\n  method: draft_target,   # a chain\n  draft: {model: small},\n}\nserving: {}\n",
        "speculation: {\n  method: draft_target,   # a chain\n  draft: {model: small}, num_draft_tokens: 5,\n}\n"
        "serving: {draft_length: {policy: schedule, schedule: {2: 5, 4: 3}}}\n",
    ),
    "a section without keys": (
        "serving:   # later\n  # http_port: 9000\nspeculation:\n    method: draft_target\n    draft:\n"
        "        model: small\n        # dtype: float16\n\n# the end\n",
        "serving:   # later\n  draft_length:\n    policy: schedule\n    schedule: {2: 5, 4: 3}\n  # http_port: 9000\n"
        "speculation:\n    method: draft_target\n    draft:\n        model: small\n"
        "        # dtype: float16\n    num_draft_tokens: 5\n\n# the end\n",
    ),
    "no such section, no newline at the end": (
        "speculation:\n  num_draft_tokens: 4\n  method: draft_target\n  draft:\n    model: small",
        "speculation:\n  num_draft_tokens: 5\n  method: draft_target\n  draft:\n    model: small\n\n"
        "serving:\n  draft_length:\n    policy: schedule\n    schedule: {2: 5, 4: 3}\n",
    ),
    "a schedule in lines": (
        "serving:\n  draft_length:\n    schedule:\n      1: 4\n      64: 1\n    policy: adaptive\n"
        "    token_cost: {1: 0.2}\n"
        "speculation: {method: draft_target, draft: {model: small}}\n",
        "serving:\n  draft_length:\n    schedule:\n      2: 5\n      4: 3\n    policy: schedule\n"
        "    token_cost: {1: 0.2}\n"
        "speculation: {method: draft_target, draft: {model: small}, num_draft_tokens: 5}\n",
    ),
    "a value not yet given": (
        "serving:\n  draft_length: null   # by load\n  image:\nspeculation:\n  method: draft_target\n"
        "  draft: {model: small}\n...\n",
        "serving:\n  draft_length:   # by load\n    policy: schedule\n    schedule: {2: 5, 4: 3}\n  image:\n"
        "speculation:\n  method: draft_target\n  draft: {model: small}\n  num_draft_tokens: 5\n...\n",
    ),
}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", STYLES)
def test_the_style_of_the_file_stays(tmp_path: Path, name: str, newline: str, mark: str) -> None:
    before, after = STYLES[name]
    path = tmp_path / "spec.yaml"
    path.write_bytes((mark + HEAD + before).replace("\n", newline).encode())
    apply(advised(), path)
    assert path.read_bytes().decode() == (mark + HEAD + after).replace("\n", newline)
    assert load_spec(path).speculation.num_draft_tokens == 5
    assert apply(advised(), path) == []


def spec_of(method: str) -> Path:
    return next(path for path in sorted(CONFIGS.glob("*.yaml")) if load_spec(path).speculation.method == method)


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_every_example_takes_a_plan(tmp_path: Path, name: str) -> None:
    """What else the example says stays, key by key; so does every comment."""
    path = tmp_path / name
    path.write_bytes((CONFIGS / name).read_bytes())
    before = load_spec(path)
    made = advised(method=before.speculation.method, fractions={role: 0.5 for role in before.models})
    apply(made, path)
    after = load_spec(path)
    decided = {"speculation": {"num_draft_tokens"}, "serving": {"draft_length", "kv_cache_free_gpu_mem_fraction"}}

    def rest(content: dict[str, Any]) -> dict[str, Any]:
        for section, keys in decided.items():
            content[section] = {key: value for key, value in content[section].items() if key not in keys}
        return content

    assert rest(after.model_dump()) == rest(before.model_dump())
    assert after.serving.kv_cache_free_gpu_mem_fraction.target == 0.5

    def comments(file: Path) -> list[str]:
        return [line[line.index("#") :] for line in file.read_text().splitlines() if "#" in line]

    assert comments(path) == comments(CONFIGS / name)


def test_methods_inside_an_engine_keep_their_length(tmp_path: Path) -> None:
    path = tmp_path / "medusa.yaml"
    path.write_bytes(spec_of("medusa").read_bytes())
    assert apply(advised(method="medusa"), path) == []


@pytest.mark.parametrize(
    ("version", "schedule"), [("1.2.1", "{4: 5}"), ("1.3.0", "{2: 5, 4: 3}"), ("1.4.0rc4", "{2: 5, 4: 3}")]
)
def test_the_llm_api_gets_what_its_version_can_be_told(file: Path, version: str, schedule: str) -> None:
    """1.2 drafts all tokens or none: up to 4, the largest load that drafts, where all five still win."""
    file.write_text(DRAFT + f"engine: {{track: llmapi, version: {version}}}\n")
    file.write_text(file.read_text().replace(", dtype: float16", ""))
    apply(advised(fractions={"target": 0.8, "draft": 0.1}), file)
    text = file.read_text()
    assert f"schedule: {schedule}\n" in text
    assert "target: 0.8" in text and "draft: 0.1" not in text


def refused(made: Plan, path: Path) -> str:
    before = path.read_bytes()
    with pytest.raises(TrtspecError) as error:
        apply(made, path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
    return str(error.value)


def test_a_value_that_an_alias_repeats_is_left(file: Path) -> None:
    file.write_text(DRAFT.replace("tokens: 4 ", "tokens: &k 4 ") + "  default_num_draft_tokens: *k\n")
    message = refused(advised(), file)
    assert message.startswith(f"{file}: anchors") and "speculation.num_draft_tokens: 5" in message
    assert "\n" not in message


def test_a_merged_section_is_left(file: Path) -> None:
    """Written out beside the merge key, the new section would hide what the old one says besides."""
    lengths = "{draft_length: {policy: adaptive, token_cost: {1: 0.2}}, plain_chunk_tokens: 8}"
    file.write_text(DRAFT.replace("  http_port: 9000", f"  <<: {lengths}"))
    assert "merged keys" in refused(advised(), file)


def test_a_merged_value_is_overridden_where_that_is_all(file: Path) -> None:
    file.write_text(DRAFT.replace("  num_draft_tokens: 4 ", "  <<: {num_draft_tokens: 4} "))
    apply(advised(), file)
    assert load_spec(file).speculation.num_draft_tokens == 5


def test_what_would_not_load_is_left(file: Path) -> None:
    file.write_text(DRAFT + "  default_num_draft_tokens: 4\nengine:\n  max_draft_len: 4\n")
    message = refused(advised(), file)
    assert "left as it was" in message and f"{file}:" in message
    assert "engine.max_draft_len: 4 does not fit the 5 draft tokens" in message and ".part" not in message


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (advised(method="ngram"), "the plan is for method ngram, and the file says draft_target"),
        (advised(schedule={1: 0, 8: 0}), "does not pay"),
        (
            replace(plan(nearest="batch 4 fits"), memory=replace(plan().memory, problem="12 GB are missing")),
            "does not fit: 12 GB are missing; batch 4 fits",
        ),
    ],
)
def test_a_plan_that_says_no_is_not_written(file: Path, made: Plan, words: str) -> None:
    message = refused(made, file)
    assert words in message and message.startswith(str(file))


def test_a_file_that_is_no_spec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrtspecError, match="no such file"):
        apply(advised(), tmp_path / "none.yaml")


def test_a_folder_that_takes_no_file_is_an_error_in_one_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(TrtspecError, match=r"cannot be written \(No space left on device\)"):
        apply(advised(), file)
    assert file.read_text() == DRAFT


def test_a_plan_without_acceptance_changes_fractions_alone(file: Path) -> None:
    unknown = MethodPlan("draft_target", "draft")
    changes = apply(advised(methods=(unknown,), schedule={}, fractions={"draft": 0.05, "draft_2": 0.1}), file)
    assert [str(change) for change in changes] == ["serving.kv_cache_free_gpu_mem_fraction.draft: not set -> 0.05"]
