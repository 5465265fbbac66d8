"""Reading a spec file: every message, its file, line and key, through the front door (`trtspec config`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.cli import main
from trtspec.errors import TrtspecError
from trtspec.spec.load import SpecError, load_spec

MINIMAL = """\
version: 1
target:
  model: big
speculation:
  method: draft_target
  draft: {model: small}
"""

Validate = Callable[..., list[str]]


@pytest.fixture
def validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Validate:
    """Write t.yaml, run `config validate`, check the exit code, return the lines of stderr without `error: `."""
    monkeypatch.chdir(tmp_path)

    def run(content: str | bytes, *overrides: str, code: int = 1) -> list[str]:
        Path("t.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
        options = [part for override in overrides for part in ("--set", override)]
        result = CliRunner().invoke(main, ["config", "validate", "t.yaml", *options])
        assert result.exit_code == code, result.output
        lines = result.stderr.splitlines()
        assert all(line.startswith("error: ") for line in lines)
        return [line.removeprefix("error: ") for line in lines]

    return run


MALFORMED: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "t.yaml: is empty; see: trtspec config init"),
    "only comments": ("# nothing\n", "t.yaml: is empty; see: trtspec config init"),
    "a list": (
        "- 1\n",
        "t.yaml:1: holds no sections; expected keys such as version, target, speculation",
    ),
    "a text": (
        "hello\n",
        "t.yaml:1: holds no sections; expected keys such as version, target, speculation",
    ),
    "not UTF-8": (b"version: 1\nname: \xff\n", "t.yaml:2: is not UTF-8 text; save the file as UTF-8"),
    "UTF-16": ("version: 1\n".encode("utf-16"), "t.yaml:1: is not UTF-8 text; save the file as UTF-8"),
    "control character": ("version: 1\nname: a\x01b\n", "t.yaml:2: the character U+0001 is not allowed in YAML"),
    "tab": (
        "version: 1\ntarget:\n\tmodel: a\n",
        "t.yaml:3: a tab is used for indentation; YAML allows spaces only",
    ),
    "unclosed": (
        "version: 1\ntarget: {model: a\nname: b\n",
        "t.yaml:3: malformed YAML: expected ',' or '}', but got ':' (while parsing a flow mapping)",
    ),
    "two documents": (
        "version: 1\n---\nversion: 1\n",
        "t.yaml:2: malformed YAML: but found another document (expected a single document in the stream)",
    ),
    "duplicate key": (
        "version: 1\ntarget:\n  model: a\n  dtype: float32\n  model: b\n",
        "t.yaml:5: the key model is given twice (first on line 3)",
    ),
    "duplicate section": (
        MINIMAL + "target: {model: b}\n",
        "t.yaml:7: the key target is given twice (first on line 2)",
    ),
    "undefined alias": (
        "version: 1\ntarget: *t\n",
        "t.yaml:2: malformed YAML: found undefined alias 't'",
    ),
    "python object": (
        "version: 1\ntarget: !!python/object/apply:os.system [ls]\n",
        "t.yaml:2: malformed YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.system'",
    ),
    "key that is a list": ("version: 1\n? [a, b]\n: 1\n", "t.yaml:2: a key must be a plain word"),
    "merge of a value": ("version: 1\n<<: 3\n", "t.yaml:2: << must name a mapping"),
    "impossible date": ("version: 1\nname: 2026-13-45\n", "t.yaml:2: month must be in 1..12"),
    "endless nesting": (
        "version: 1\nname: " + "[" * 100_000,
        "t.yaml:2: values are nested too deeply",
    ),
    "an anchor that holds itself": ("version: 1\nname: &a [*a]\n", "t.yaml:2: values are nested too deeply"),
    "anchors that multiply": (
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(f"{n}: &{n} [{', '.join(['*' + chr(ord(n) - 1)] * 10)}]\n" for n in "bcdefgh"),
        "t.yaml:1: anchors expand to too many values",
    ),
    "too large": ("#" * (1 << 17) + "\n", "t.yaml: is larger than 128 KiB; expected a YAML spec"),
    "no version": ("target: {model: a}\n", "t.yaml:1: version is missing; add the line version: 1"),
    "other version": ("name: a\nversion: 2\n", "t.yaml:2: version: version 2 is not supported; expected version: 1"),
    "version as text": (
        'version: "1"\n',
        "t.yaml:1: version: version '1' is not supported; expected version: 1",
    ),
    "version true": ("version: yes\n", "t.yaml:1: version: version True is not supported; expected version: 1"),
}


@pytest.mark.parametrize(("content", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_one_clear_line(validate: Validate, content: str | bytes, message: str) -> None:
    assert validate(content) == [message]


WRONG_KEYS: dict[str, tuple[str, str]] = {
    "unknown section": (
        MINIMAL + "hardwere: {gpu: cpu}\n",
        "t.yaml:7: hardwere: unknown key; did you mean hardware?",
    ),
    "unknown key": (
        MINIMAL + "engine:\n  max_batchsize: 4\n",
        "t.yaml:8: engine.max_batchsize: unknown key; did you mean engine.max_batch_size?",
    ),
    "key of another section": (
        MINIMAL + "num_draft_tokens: 4\n",
        "t.yaml:7: num_draft_tokens: unknown key; did you mean speculation.num_draft_tokens?",
    ),
    "key like no other": (
        MINIMAL + "output: {zzz: 1}\n",
        "t.yaml:7: output.zzz: unknown key; known keys are engines, model_repo",
    ),
    "key that is no text": (
        MINIMAL + "output: {1: a}\n",
        "t.yaml:7: output.1: unknown key; known keys are engines, model_repo",
    ),
    "missing key": (
        "version: 1\ntarget:\n  dtype: float32\nspeculation: {method: none}\n",
        "t.yaml:2: target: model is missing; add target.model",
    ),
    "missing section": ("version: 1\ntarget: {model: a}\n", "t.yaml:1: speculation is missing; add speculation"),
    "empty section": (
        "version: 1\ntarget:\nspeculation: {method: none}\n",
        "t.yaml:2: target: model is missing; add target.model",
    ),
    "section that is a value": (
        MINIMAL + "engine: fast\n",
        "t.yaml:7: engine: 'fast' is not allowed; expected a section with keys",
    ),
    "value that is a section": (
        MINIMAL + "engine: {max_seq_len: {a: 1}}\n",
        "t.yaml:7: engine.max_seq_len: a section is not allowed; expected a whole number",
    ),
    "word for number": (
        MINIMAL + "engine:\n  max_seq_len: long\n",
        "t.yaml:8: engine.max_seq_len: 'long' is not allowed; expected a whole number",
    ),
    "quoted number": (
        MINIMAL + 'serving: {http_port: "8000"}\n',
        "t.yaml:7: serving.http_port: '8000' is not allowed; expected a whole number",
    ),
    "fraction for whole number": (
        MINIMAL + "engine: {max_seq_len: 2.5}\n",
        "t.yaml:7: engine.max_seq_len: 2.5 is not allowed; expected a whole number",
    ),
    "yes for number": (
        MINIMAL + "engine: {max_seq_len: yes}\n",
        "t.yaml:7: engine.max_seq_len: True is not allowed; expected a whole number",
    ),
    "number for yes": (
        MINIMAL + "engine: {kv_cache_reuse: 1}\n",
        "t.yaml:7: engine.kv_cache_reuse: 1 is not allowed; expected true or false",
    ),
    "unquoted version": (
        MINIMAL + "engine: {version: 1.2}\n",
        't.yaml:7: engine.version: 1.2 is not allowed; expected text; put it in quotes: "1.2"',
    ),
    "no version": (
        MINIMAL + "engine: {version: newest}\n",
        "t.yaml:7: engine.version: 'newest' is not allowed; expected a version such as \"1.2.1\"",
    ),
    "empty value": (
        MINIMAL + "engine:\n  max_seq_len:\n",
        "t.yaml:8: engine.max_seq_len: an empty value is not allowed; expected a whole number",
    ),
    "zero": (
        MINIMAL + "engine: {max_batch_size: 0}\n",
        "t.yaml:7: engine.max_batch_size: 0 is not allowed; expected at least 1",
    ),
    "port": (
        MINIMAL + "serving: {grpc_port: 65536}\n",
        "t.yaml:7: serving.grpc_port: 65536 is not allowed; expected at most 65535",
    ),
    "infinite": (
        MINIMAL + "serving: {call_timeout_s: .inf}\n",
        "t.yaml:7: serving.call_timeout_s: inf is not allowed; expected a finite number",
    ),
    "percentage for top_p": (
        MINIMAL + "parity: {top_p: 100}\n",
        "t.yaml:7: parity.top_p: 100 is not allowed; expected at most 1.0",
    ),
    "false alarm rate": (
        MINIMAL + "parity: {false_alarm_rate: 0.0}\n",
        "t.yaml:7: parity.false_alarm_rate: 0.0 is not allowed; expected more than 0.0",
    ),
    "size": (
        MINIMAL + "serving:\n  kv_cache_bytes:\n    target: 1 potato\n",
        "t.yaml:9: serving.kv_cache_bytes.target: '1 potato' is no size; expected bytes or a number with KiB, MiB, "
        "GiB, TiB, KB, MB, GB or TB",
    ),
    "size zero": (
        MINIMAL + "serving: {kv_cache_bytes: {target: 0MiB}}\n",
        "t.yaml:7: serving.kv_cache_bytes.target: '0MiB' is not allowed; expected more than 0",
    ),
    "choice": (
        MINIMAL + "hardware: {gpu: H100}\n",
        "t.yaml:7: hardware.gpu: 'H100' is not allowed; expected one of cpu, A100-40GB, A100-80GB, A100-80GB-PCIe, "
        "H100-SXM, H100-PCIe, H100-NVL, H200; did you mean H200?",
    ),
    "optional text": (
        MINIMAL + "parity: {prompts: [a]}\n",
        "t.yaml:7: parity.prompts: a list is not allowed; expected text",
    ),
    "NUL in a path": (
        MINIMAL + 'parity: {prompts: "a\\0b"}\n',
        "t.yaml:7: parity.prompts: 'a\\x00b' is not allowed; expected some text on one line",
    ),
    "relative mount point": (
        MINIMAL + "serving: {mount_point: engines}\n",
        "t.yaml:7: serving.mount_point: 'engines' is not allowed; expected an absolute path",
    ),
    "name": (
        MINIMAL + "name: ../up\n",
        "t.yaml:7: name: '../up' is not allowed; expected letters, digits, dots, dashes and underscores",
    ),
    "empty list": (
        "version: 1\ntarget: {model: a}\nspeculation: {method: tree, draft: {model: b}, tree: {branching: []}}\n",
        "t.yaml:3: speculation.tree.branching: a list is not allowed; expected at least 1 items",
    ),
    "too long a list": (
        "version: 1\ntarget: {model: a}\nspeculation: {method: tree, draft: &b {model: b}, tree: {drafts: [*b, *b, *b, "
        "*b]}}\n",
        "t.yaml:3: speculation.tree.drafts: a list is not allowed; expected at most 3 items",
    ),
    "too many middle models": (
        "version: 1\ntarget: {model: a}\nspeculation: {method: cascade, draft: &b {model: b}, cascade: {middle: *b, "
        "middles: [*b, *b, *b]}}\n",
        "t.yaml:3: speculation.cascade.middles: a list is not allowed; expected at most 2 items",
    ),
    "no good item in a list of lists": (
        "version: 1\ntarget: {model: a}\nspeculation: {method: medusa, medusa: {heads: h, choices: [[-1]]}}\n",
        "t.yaml:3: speculation.medusa.choices[0][0]: -1 is not allowed; expected at least 0",
    ),
    "draft length by an unknown policy": (
        MINIMAL + "serving: {draft_length: {policy: auto}}\n",
        "t.yaml:7: serving.draft_length.policy: 'auto' is not allowed; expected one of fixed, schedule, adaptive",
    ),
    "schedule without one": (
        MINIMAL + "serving:\n  draft_length: {policy: schedule}\n",
        "t.yaml:8: serving.draft_length.schedule: empty; expected loads and lengths such as {4: 4, 8: 2, 16: 0}",
    ),
    "schedule that falls": (
        MINIMAL + "serving:\n  draft_length:\n    schedule: {8: 2, 4: 4}\n",
        "t.yaml:9: serving.draft_length.schedule: load 4 stands after 8; expected rising loads",
    ),
    "schedule from no request on": (
        MINIMAL + "serving: {draft_length: {schedule: {0: 2}}}\n",
        "t.yaml:7: serving.draft_length.schedule: load 0; expected 1 or more requests",
    ),
    "schedule by words": (
        MINIMAL + "serving: {draft_length: {schedule: {few: 2}}}\n",
        "t.yaml:7: serving.draft_length.schedule: 'few' is no number of requests; expected a whole number",
    ),
    "schedule twice at a load": (
        MINIMAL + "serving: {draft_length: {schedule: {4: 4, 04: 2}}}\n",
        "t.yaml:7: serving.draft_length.schedule: load 4 is given twice; expected rising loads",
    ),
    "schedule of a negative length": (
        MINIMAL + "serving: {draft_length: {schedule: {4: -1}}}\n",
        "t.yaml:7: serving.draft_length.schedule[4]: -1 is not allowed; expected at least 0",
    ),
    "schedule as a list": (
        MINIMAL + "serving: {draft_length: {schedule: [4, 2]}}\n",
        "t.yaml:7: serving.draft_length.schedule: a list is not allowed; expected numbers by number of requests",
    ),
    "negative cost": (
        MINIMAL + "serving: {draft_length: {token_cost: {1: -0.5}}}\n",
        "t.yaml:7: serving.draft_length.token_cost[1]: -0.5 is not allowed; expected at least 0.0",
    ),
    "cost that is no number": (
        MINIMAL + "serving: {draft_length: {token_cost: {1: .nan}}}\n",
        "t.yaml:7: serving.draft_length.token_cost[1]: nan is not allowed; expected a finite number",
    ),
    "no costs": (
        MINIMAL + "serving: {draft_length: {token_cost: {}}}\n",
        "t.yaml:7: serving.draft_length.token_cost: empty; expected loads and costs such as {1: 0.2, 16: 1.1}",
    ),
    "costs that fall behind": (
        MINIMAL + "serving: {draft_length: {token_cost: {4: 0.2, 2: 0.1}}}\n",
        "t.yaml:7: serving.draft_length.token_cost: load 2 stands after 4; expected rising loads",
    ),
    "item of a list": (
        "version: 1\ntarget: {model: a}\nspeculation:\n  method: tree\n  draft: {model: b}\n  tree:\n"
        "    branching:\n      - 2\n      - many\n",
        "t.yaml:9: speculation.tree.branching[1]: 'many' is not allowed; expected a whole number",
    ),
}


@pytest.mark.parametrize(("content", "message"), WRONG_KEYS.values(), ids=WRONG_KEYS)
def test_a_wrong_key_or_value_is_one_line_with_file_line_and_key(
    validate: Validate, content: str, message: str
) -> None:
    assert validate(content) == [message]


def test_every_problem_is_reported_in_the_order_of_the_file(validate: Validate) -> None:
    content = """\
version: 1
target:
  modle: a
  dtype: float64
speculation: {method: guess}
engine:
  max_seq_len: -1
"""
    lines = validate(content)
    assert [line.split(" ")[0] for line in lines] == [
        "t.yaml:2:",
        "t.yaml:3:",
        "t.yaml:4:",
        "t.yaml:5:",
        "t.yaml:7:",
    ]
    assert lines[:3] == [
        "t.yaml:2: target: model is missing; add target.model",
        "t.yaml:3: target.modle: unknown key; did you mean target.model?",
        "t.yaml:4: target.dtype: 'float64' is not allowed; expected one of float32, float16, bfloat16; "
        "did you mean float16?",
    ]


def test_a_missing_file_and_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for name, message in {
        "none.yaml": "none.yaml: no such file; write a starter file with: trtspec config init none.yaml",
        ".": ".: is a directory; expected a YAML file",
        "pipe": "pipe: is not a regular file; expected a YAML file",
    }.items():
        result = CliRunner().invoke(main, ["config", "validate", name])
        assert (result.exit_code, result.stderr) == (1, f"error: {message}\n")


OVERRIDES: dict[str, tuple[str, int, str]] = {
    "no equals sign": ("engine", 2, "--set engine: malformed override; expected section.key=value"),
    "no key": ("=3", 2, "--set =3: malformed override; expected section.key=value"),
    "empty part": ("engine..track=llmapi", 2, "--set engine..track=llmapi: malformed override; "
                   "expected section.key=value"),
    "no YAML": ("engine.version=[", 2, "--set engine.version: malformed YAML: expected the node content, but found "
                "'<stream end>' (while parsing a flow node)"),
    "unknown section": ("engin.track=engine", 1, "--set engin.track: unknown key; did you mean engine?"),
    "unknown key": ("engine.trak=engine", 1, "--set engine.trak: unknown key; did you mean engine.track?"),
    "through a value": ("version.x=1", 1, "--set version.x: version is a value, not a section"),
    "wrong value": (
        "speculation.num_draft_tokens=many", 1,
        "--set speculation.num_draft_tokens: 'many' is not allowed; expected a whole number",
    ),
    "rule": (
        "speculation.num_draft_tokens=65", 1,
        "--set speculation.num_draft_tokens: 65 is not between 1 and 64 as method draft_target needs; use fewer",
    ),
    "version": ("version=3", 1, "--set version: version 3 is not supported; expected version: 1"),
}  # fmt: skip


@pytest.mark.parametrize(("override", "code", "message"), OVERRIDES.values(), ids=OVERRIDES)
def test_a_wrong_override_is_named_as_such(validate: Validate, override: str, code: int, message: str) -> None:
    assert validate(MINIMAL, override, code=code) == [message]


def write(tmp_path: Path, content: str, name: str = "my spec.yaml") -> Path:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    return path


def test_overrides_are_parsed_as_yaml_and_the_last_one_wins(tmp_path: Path) -> None:
    spec = load_spec(
        write(tmp_path, MINIMAL),
        [
            "speculation.num_draft_tokens=2",
            "speculation.num_draft_tokens=7",
            "engine={max_seq_len: 512, max_input_len: 100}",
            "engine.kv_cache_reuse=false",
            "engine.version=1.2",
            "serving.kv_cache_bytes.draft=1.5MiB",
            "parity.false_alarm_rate=1e-4",
            "parity.prompts=a=b.jsonl",
        ],
    )
    assert spec.speculation.num_draft_tokens == 7
    assert (spec.engine.max_seq_len, spec.engine.max_input_len, spec.engine.kv_cache_reuse) == (512, 100, False)
    assert spec.engine.version == "1.2"  # text is meant, and quotes do not survive a shell
    assert spec.serving.kv_cache_bytes.draft == 3 * 2**19
    assert spec.parity.false_alarm_rate == 1e-4
    assert spec.parity.prompts == "a=b.jsonl"


def test_an_override_reaches_one_place_of_an_aliased_section(tmp_path: Path) -> None:
    content = "version: 1\ntarget: &m {model: a, dtype: float32}\nspeculation: {method: draft_target, draft: *m}\n"
    spec = load_spec(write(tmp_path, content), ["target.model=b"])
    assert spec.target.model == "b"
    assert spec.speculation.draft is not None and spec.speculation.draft.model == "a"


def test_merge_keys_numbers_and_a_byte_order_mark(tmp_path: Path) -> None:
    content = """\
\ufeffversion: 1
target: &t {model: big, dtype: float32, tensor_parallel: 1}
speculation:
  method: draft_target
  draft:
    <<: *t
    model: small
parity: {false_alarm_rate: 1e-3, tolerance: 5E-2}
serving:
"""
    spec = load_spec(write(tmp_path, content))
    draft = spec.speculation.draft
    assert draft is not None and (draft.model, draft.dtype) == ("small", "float32")
    assert (spec.parity.false_alarm_rate, spec.parity.tolerance) == (0.001, 0.05)
    assert spec.serving.http_port == 8000  # a section whose keys are all left out is an empty one


@pytest.mark.parametrize(
    ("written", "size"),
    [("256MiB", 2**28), ("1 GiB", 2**30), ("1GB", 10**9), ("1.5 kib", 1536), ("100", 100), ("77B", 77), (1024, 1024)],
)
def test_sizes(tmp_path: Path, written: str | int, size: int) -> None:
    value = json.dumps(written)
    assert load_spec(write(tmp_path, MINIMAL + f"serving: {{kv_cache_bytes: {{target: {value}}}}}\n")).serving == (
        load_spec(write(tmp_path, MINIMAL + f"serving: {{kv_cache_bytes: {{target: {size}}}}}\n")).serving
    )
    spec = load_spec(write(tmp_path, MINIMAL), [f"serving.kv_cache_bytes.target={value}"])
    assert spec.serving.kv_cache_bytes.target == size


def test_the_name_defaults_to_the_file_and_paths_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    write(tmp_path, MINIMAL + "parity: {prompts: ~/p.jsonl}\noutput: {engines: ../e}\n")
    monkeypatch.setenv("HOME", "/home/someone")
    spec = load_spec(Path("../my spec.yaml"))
    assert spec.name == "my-spec"
    assert spec.source == tmp_path / "my spec.yaml" and spec.base_dir == tmp_path
    assert spec.engines_dir == tmp_path.parent / "e"
    assert spec.model_repo_dir == tmp_path / "model_repo" / "my-spec"
    assert spec.prompts_path == Path("/home/someone/p.jsonl")


def test_prompts_that_are_not_named_are_asked_for(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, MINIMAL, "t.yaml"))
    with pytest.raises(TrtspecError, match=r"t\.yaml:1: parity\.prompts: no prompts to check with"):
        _ = spec.prompts_path


def test_draft_lengths_by_load(tmp_path: Path) -> None:
    section = "{policy: adaptive, schedule: {4: 4, 8: 2, 16: 0}, token_cost: {1: 0.2, 16: 1}}"
    spec = load_spec(write(tmp_path, MINIMAL + f"serving: {{draft_length: {section}}}\n"))
    chosen = spec.serving.draft_length
    assert chosen is not None and chosen.policy == "adaptive"
    assert chosen.schedule == {4: 4, 8: 2, 16: 0}
    assert chosen.token_cost == {1: 0.2, 16: 1.0}
    again = load_spec(write(tmp_path, yaml.safe_dump(spec.resolved(), sort_keys=False), "again.yaml"))
    assert again.serving == spec.serving
    assert again.hash() == spec.hash()
    assert load_spec(write(tmp_path, MINIMAL)).serving.draft_length is None


def test_the_hash_sees_content_and_nothing_else(tmp_path: Path) -> None:
    plain = load_spec(write(tmp_path, MINIMAL, "a.yaml"))
    (tmp_path / "b").mkdir()
    rewritten = load_spec(
        write(
            tmp_path / "b",
            "# comment\nspeculation: {draft: {model: small, dtype: bfloat16}, method: 'draft_target', "
            "num_draft_tokens: 4}\ntarget: {model: big}\nname: a\nversion: 1\nengine: {max_batch_size: 8}\n",
        )
    )
    other = load_spec(write(tmp_path, MINIMAL, "a.yaml"), ["speculation.num_draft_tokens=5"])
    assert plain.hash() == rewritten.hash()
    assert plain.hash() != other.hash()
    assert len(plain.hash()) == 64


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from(["target", "speculation", "engine", "serving", "output", "speculation.draft", "parity.prompts"]),
)
def test_any_value_anywhere_is_accepted_or_refused_with_a_message(
    tmp_path_factory: pytest.TempPathFactory, value: object, key: str
) -> None:
    """No value may end in anything but a spec or an error with a place; 60 random YAML values."""
    path = write(tmp_path_factory.mktemp("any"), MINIMAL, "t.yaml")
    try:
        spec = load_spec(path, [f"{key}={yaml.safe_dump(value, width=10**6)}"])
    except TrtspecError as error:
        first = str(error).splitlines()[0]
        assert first.startswith(("--set ", str(path)))
    else:
        assert spec.version == 1


def test_several_problems_can_be_read_one_by_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(write(tmp_path, MINIMAL), ["engine.a=1", "engine.b=2"])
    assert [problem.where for problem in caught.value.problems] == ["--set engine.a", "--set engine.b"]
