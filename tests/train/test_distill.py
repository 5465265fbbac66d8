"""Training: the loss, learning, validation on prompts kept aside, and going on exactly where a run stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trtspec.errors import TrtspecError
from trtspec.models.source import open_model
from trtspec.runtime.llama import load_weights
from trtspec.train.distill import FROZEN, Sample, Trainer, draft_config, head_ids, initial_weights, load_samples
from trtspec.train.generate import Answer, save_shard

IDS = torch.arange(3, 200)


@pytest.fixture(scope="module")
def target(tiny_model_dir: Path) -> dict[str, torch.Tensor]:
    return load_weights(open_model(str(tiny_model_dir)))


def samples(count: int = 90) -> list[Sample]:
    """A language in which the next token is the last one plus three."""
    made = []
    for index in range(count):
        length = 8 + index % 5
        tokens = 3 + (index % 20 + 3 * torch.arange(length)) % 190
        rows = torch.stack((tokens[2:] - 3, (tokens[2:] + 1) - 3), dim=1)
        probs = torch.tensor([[0.9, 0.1]]).expand(len(rows), 2)
        made.append(Sample(index, tokens, 2, rows, probs))
    return made


def trainer(target: dict[str, torch.Tensor], tiny_model_dir: Path, seed: int = 0) -> Trainer:
    config = draft_config(open_model(str(tiny_model_dir)).config, 1)
    return Trainer(config, initial_weights(target, 1, IDS), samples(), batch_tokens=64, lr=1e-2, seed=seed)


def test_loss_is_the_cross_entropy_over_head_and_top_k(target: dict[str, torch.Tensor], tiny_model_dir: Path) -> None:
    made = trainer(target, tiny_model_dir)
    batch = [samples()[0], samples()[4]]
    total = weight = 0.0
    for sample in batch:
        hidden = made.model.hidden(sample.tokens[None], None, 0)[0]
        q = (hidden.detach() @ target["lm_head.weight"][IDS].T).log_softmax(-1)
        for place, (rows, probs) in enumerate(zip(sample.rows, sample.probs, strict=True)):
            total -= sum(float(p * q[sample.prompt_len - 1 + place, r]) for r, p in zip(rows, probs, strict=True))
            weight += float(probs.sum())
    assert made.loss(batch).item() == pytest.approx(total / weight, rel=1e-4)


def test_it_learns_and_leaves_what_is_shared_alone(target: dict[str, torch.Tensor], tiny_model_dir: Path) -> None:
    made = trainer(target, tiny_model_dir)
    before = made.validate()
    made.train(steps=60)
    after = made.validate()
    assert after["loss"] < 0.7 * before["loss"]
    assert after["agreement"] > 0.6
    assert 0.4 < after["overlap"] <= 1.0
    for name in FROZEN:
        assert not made.model.weights[name].requires_grad
    assert torch.equal(made.model.weights["lm_head.weight"], target["lm_head.weight"][IDS])


def test_prompts_kept_aside_are_not_trained_on(target: dict[str, torch.Tensor], tiny_model_dir: Path) -> None:
    made = trainer(target, tiny_model_dir)
    assert [sample.index for sample in made.held_out] == [0, 40, 80]
    assert not {sample.index for sample in made.samples} & {0, 40, 80}


class Killed(Exception):
    """Stands for the end of the process."""


def test_a_stopped_run_ends_where_an_unbroken_one_ends(
    target: dict[str, torch.Tensor], tiny_model_dir: Path, tmp_path: Path
) -> None:
    unbroken = trainer(target, tiny_model_dir)
    unbroken.train(steps=24)

    def die(step: int, done: float, loss: float) -> None:
        if step == 11:
            raise Killed

    checkpoint = tmp_path / "checkpoint.pt"
    broken = trainer(target, tiny_model_dir)
    with pytest.raises(Killed):
        broken.train(steps=24, checkpoint=checkpoint, checkpoint_every=0.0, report=die)
    resumed = trainer(target, tiny_model_dir)
    resumed.train(steps=24, checkpoint=checkpoint)
    assert resumed.step == unbroken.step == 24
    for name, parameter in unbroken.parameters.items():
        torch.testing.assert_close(resumed.parameters[name], parameter, atol=1e-5, rtol=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_finished_run_is_not_trained_again(
    target: dict[str, torch.Tensor], tiny_model_dir: Path, tmp_path: Path
) -> None:
    trainer(target, tiny_model_dir).train(steps=3, checkpoint=tmp_path / "c.pt")
    again = trainer(target, tiny_model_dir)
    again.train(steps=3, checkpoint=tmp_path / "c.pt", report=lambda *_: pytest.fail("trained a step"))
    assert again.step == 3


def test_head_holds_the_ids_with_the_largest_mass(tmp_path: Path) -> None:
    ids = torch.tensor([[7, 9], [9, 30], [30, 7]], dtype=torch.int32)
    probs = torch.tensor([[0.9, 0.2], [0.5, 0.4], [0.2, 0.1]])
    rows = [(ids[i], probs[i].log().half()) for i in range(3)]
    states = [torch.zeros(4, dtype=torch.bfloat16)] * 3
    answer = Answer(5, [50, 51], 0.0, 9, [7, 9, 30], [r[0] for r in rows], [r[1] for r in rows], states)
    save_shard([answer], tmp_path / "answers-0-00000.safetensors")
    shards = list(tmp_path.iterdir())
    assert head_ids(shards, 60, 2).tolist() == [7, 9]  # masses: 1.0, 0.7, and 0.6 for id 30
    (sample,) = load_samples(shards, torch.tensor([7, 30]), 60)
    assert sample.tokens.tolist() == [50, 51, 7, 9, 30] and sample.prompt_len == 2
    assert sample.rows.tolist() == [[0, -1], [-1, 1], [1, 0]]
    torch.testing.assert_close(sample.probs, torch.tensor([[0.9, 0], [0, 0.4], [0.2, 0.1]]), atol=1e-3, rtol=0)


def test_nothing_to_train_on(target: dict[str, torch.Tensor], tiny_model_dir: Path) -> None:
    config = draft_config(open_model(str(tiny_model_dir)).config, 1)
    with pytest.raises(TrtspecError, match="no recorded answers"):
        Trainer(config, initial_weights(target, 1, IDS), [])
