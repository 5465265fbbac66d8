"""What a server has to answer where no spec is at hand: the spec it was built from, or one made around a named model.

Knows where a server that `trtspec serve` started keeps what it was built from, and what a model config says of its
target. Knows no subject and no check.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trtspec.build.sources import Sources
from trtspec.errors import TrtspecError
from trtspec.runtime.engine import EngineConfig
from trtspec.spec.load import Override, load_spec
from trtspec.spec.marks import Marks, dotted
from trtspec.spec.rules import broken_rules
from trtspec.spec.schema import SPEC_VERSION, Spec
from trtspec.triton.client import STREAMING_MODEL, Client, ServerGone
from trtspec.triton.server_state import find

UNKNOWN = "unknown"  # runtime of an engine that is not here
PROMPTS = Path(__file__).with_name("prompts.jsonl")
_NUM_DRAFT_TOKENS = 4  # asked of a server that drafts and does not say how much
_FIX = "give its spec, CONFIG, or its target model, --target MODEL (of pytest: --trtspec-config, --trtspec-target)"


def spec_of_server(url: str, overrides: Sequence[str] = ()) -> Spec:
    """The spec of a server that `trtspec serve` started on this machine, as it was built.

    How it is checked, the section parity, is what the spec file says today, as long as that can be read.

    Args:
        url: `host:port` of its gRPC.
        overrides: `section.key=value`.

    Raises:
        TrtspecError: there is no such server, it serves an earlier build, or an override is wrong.
    """
    state = find(url)
    if state is None:
        raise TrtspecError(
            "no server that trtspec serve started on this machine, so nothing says what it has to answer",
            where=url,
            fix=_FIX,
        )
    if state.outdated:
        raise TrtspecError("what it serves has been built again since", where=url, fix="stop it and serve again")
    record = Path(state.engines_root) / "manifest.json"
    try:
        built = json.loads(record.read_text(encoding="utf-8"))["spec"]
        source, content = Path(built["file"]), dict(built["resolved"])
    except (OSError, ValueError, KeyError, TypeError):
        raise TrtspecError("does not say what was built", where=str(record), fix=_FIX) from None
    with suppress(TrtspecError):  # moved, or being edited
        content["parity"] = load_spec(source).resolved()["parity"]
    content["output"] = {"engines": state.engines_root, "model_repo": state.model_repo}
    return _spec(content, source, overrides)


def spec_of_model(model: str, overrides: Sequence[str] = ()) -> Spec:
    """A spec in memory whose target is a model, in the model's own dtype, without speculation.

    Args:
        model: a directory, a hub name or `package:NAME`, as target.model of a spec; relative to the working directory.
        overrides: `section.key=value`.

    Raises:
        TrtspecError: there is no such model, or an override is wrong.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", re.split(r"[/:]", model.rstrip("/"))[-1]).strip("-._")
    content = {
        "version": SPEC_VERSION,
        "name": name or "model",
        "target": {"model": model},
        "speculation": {"method": "none"},
        "parity": {"prompts": str(PROMPTS)},
    }
    source = Path.cwd() / "--target"  # no file: what is relative is so to this directory
    spec = _spec(content, source, overrides)
    if "dtype" in spec.target.model_fields_set:
        return spec
    own = Sources(spec).open("target").config.dtype
    return _spec(content, source, [f"target.dtype={own}", *overrides])


def described(spec: Spec, url: str) -> EngineConfig:
    """The target of somebody's server, in place of the config of an engine that is not here.

    What the server's model config says (ours: ids that end an answer, lengths, draft tokens of a cycle, which stand in
    the stamp; upstream's: whether it drafts) comes first, then what the spec was told, then the model's own sizes.

    Args:
        spec: of `spec_of_model`.
        url: `host:port` of the server's gRPC.

    Raises:
        TrtspecError: no server there, or the model is no reference for its target.
    """
    target = spec.target
    if target.quantization != "none" or target.kv_cache_dtype != "auto":
        raise TrtspecError(
            "the model as it was published is no reference for a quantised target",
            where=f"--target {target.model}",
            fix="give the spec that it was built from, CONFIG: the checkpoint is the reference",
        )
    source, told = Sources(spec).open("target"), _parameters(url)
    told = {key: str(getattr(spec.engine, key)) for key in spec.engine.model_fields_set} | told
    model = source.config
    longest = _numbers(told.get("target_max_seq_len", told.get("max_seq_len"))) or [model.max_position_embeddings]
    longest_input = _numbers(told.get("max_input_len")) or longest
    drafts = _numbers(told.get("num_draft_tokens")) or [_NUM_DRAFT_TOKENS * ("tensorrt_llm_draft_model_name" in told)]
    return EngineConfig(
        path=source.path,
        version="",
        pretrained={"vocab_size": model.vocab_size, "dtype": target.dtype},
        build={"max_seq_len": longest[0], "max_input_len": longest_input[0]},
        stamp={
            "runtime": UNKNOWN,
            "source_fingerprint": source.fingerprint(),
            "eos_token_ids": _numbers(told.get("end_ids")) or list(model.eos_token_ids),
            "num_draft_tokens": drafts[0],
        },
    )


def _parameters(url: str) -> dict[str, str]:
    """Those that are set in the config of the model that speculates, ours or upstream's; empty if there is none."""
    with Client(url) as client:
        try:
            parameters = client.info(STREAMING_MODEL).parameters
        except ServerGone:
            raise
        except TrtspecError:  # it has an ensemble, say, which tells nothing
            return {}
    return {key: text for key, text in parameters.items() if text and not text.startswith("${")}  # of a template


def _numbers(text: str | None) -> list[int]:
    """Whole numbers with commas between them; none where it is no such text."""
    words = [word.strip() for word in (text or "").split(",")]
    return [int(word) for word in words] if all(word.isdecimal() for word in words) else []


def _spec(content: Mapping[str, Any], source: Path, overrides: Sequence[str]) -> Spec:
    """A spec from its content, with overrides; in messages, all its keys count as overridden."""
    written = copy.deepcopy(dict(content))
    for override in map(Override.parse, overrides):
        override.apply(written)
    try:
        spec = Spec.model_validate(written)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise TrtspecError(first["msg"], where=f"--set {dotted(first['loc'])}") from None
    spec._source, spec._marks = source, Marks(source, {}, [(section,) for section in Spec.model_fields])
    for broken in broken_rules(spec):
        raise TrtspecError(broken.problem, where=spec.where(broken.key), fix=broken.fix)
    return spec
