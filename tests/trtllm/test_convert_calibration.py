"""The calibration prompts: the shipped ones, the user's, and how they are laid out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtspec.errors import TrtspecError
from trtspec.models.source import HFSource, open_model
from trtspec.spec.schema import Calibration
from trtspec.trtllm.convert.calibration import DEFAULT_PROMPTS, calibration_set


@pytest.fixture
def model(tiny_model_dir: Path) -> HFSource:
    source = open_model(str(tiny_model_dir))
    assert isinstance(source, HFSource)
    return source


def test_the_shipped_prompts_are_many_short_and_different(model: HFSource) -> None:
    lines = DEFAULT_PROMPTS.read_text(encoding="utf-8").splitlines()
    texts = [json.dumps(json.loads(line)) for line in lines]
    assert len(set(texts)) == len(texts) == Calibration().num_prompts
    assert max(map(len, texts)) < 600
    # As varied as the whole, also where only a few are taken.
    assert len({text[:24] for text in texts[:12]}) == 12
    found = calibration_set(model, Calibration(), None)
    assert found.num_prompts == 128
    assert found == calibration_set(model, Calibration(), None)


@pytest.mark.parametrize("template", [None, "no system messages"])
def test_the_shipped_prompts_suit_every_model(model: HFSource, template: str | None) -> None:
    """Base models have no template, and some templates raise on a system message or on two turns of one role."""
    model.chat_template = template and (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    found = calibration_set(model, Calibration(), None)
    assert found.num_prompts == 128
    assert found.num_tokens > 128 * 10


def test_batches_are_cut_and_never_padded(model: HFSource, tmp_path: Path) -> None:
    model.chat_template, model.add_bos = None, True
    path = tmp_path / "prompts.jsonl"
    texts = ["the draft proposes", "the", "the target verifies", "one token after the other, one after the other", "x"]
    rows = [{"prompt": text} for text in texts[:4]] + [{"messages": [{"role": "user", "content": texts[4]}]}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    ids = sorted(([0, *model.encode(text)][:20] for text in texts), key=len)
    found = calibration_set(model, Calibration(num_prompts=5, batch_size=2, max_tokens=20), path)
    expected = [[row[: len(batch[0])] for row in batch] for batch in (ids[:2], ids[2:4], ids[4:])]
    assert [[list(row) for row in batch] for batch in found.batches] == expected
    assert len(ids[2]) < len(ids[3])  # so that something was cut
    assert found.num_tokens == sum(len(row) for batch in expected for row in batch)
    assert calibration_set(model, Calibration(num_prompts=2), path).num_prompts == 2


def test_the_chat_template_is_applied(model: HFSource, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello"}')
    ((row,),) = calibration_set(model, Calibration(), path).batches
    assert list(row) == model.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_refuses_the_users_conversation(model: HFSource, tmp_path: Path) -> None:
    model.chat_template = "{{ raise_exception('no such role') }}"
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "tool", "content": "x"}]}')
    with pytest.raises(TrtspecError, match=r"prompts\.jsonl: prompt 1: .* no such role"):
        calibration_set(model, Calibration(), path)
