"""The server's models as subjects of the parity suite: what they answer, the same engines answer in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trtspec.decoding.detokenize import continuation_ids
from trtspec.decoding.engine_call import EngineRequest
from trtspec.decoding.methods import make_drafter
from trtspec.decoding.sampling import SamplingParams, Uniforms
from trtspec.errors import TrtspecError
from trtspec.parity.replay import cycle_faults
from trtspec.parity.subjects import Lost, Query, Subject, Unsupported, Word
from trtspec.parity.subjects.engine_model import EngineModel
from trtspec.parity.subjects.in_process import InProcess
from trtspec.parity.subjects.server import Server
from trtspec.runtime.local import draft_engines
from trtspec.runtime.torch_runtime import TorchRuntime
from trtspec.triton.client import Client
from trtspec.triton.models.tokenization import Tokenization

DRAWN = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=11)
PENALISED = SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)


@dataclass(frozen=True)
class Subjects:
    """The same engines, asked in three ways."""

    local: InProcess
    bls: Server
    engine: EngineModel
    tokenization: Tokenization

    def query(self, sampling: SamplingParams | None = None, num_draft_tokens: int = 3, **more: Any) -> Query:
        text = "the draft"
        ids = tuple(self.tokenization.encode(text))
        return Query(text, ids, more.pop("max_tokens", 24), sampling or SamplingParams(), num_draft_tokens, **more)


@pytest.fixture(scope="module")
def subjects(pair: SimpleNamespace, server: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(pair.source.tokenizer_json())
    tokenization = Tokenization(path, bos_token_id=pair.source.config.bos_token_id, add_bos=pair.source.add_bos)
    runtimes = {role: TorchRuntime(path, kv_cache_bytes=32 << 20) for role, path in pair.engines.items()}
    config = runtimes["target"].config
    common: dict[str, Any] = {
        "end_ids": config.eos_token_ids,
        "decode": tokenization.decode,
        "continuation_ids": continuation_ids(tokenization.token_to_id),
    }
    local = InProcess(
        runtimes["target"].execute,
        partial(make_drafter, "draft_target", draft_engines(runtimes)),
        contexts=(config.max_seq_len, runtimes["draft"].config.max_seq_len),
        uniforms=Uniforms,
        **common,
    )
    with Client(server.grpc) as client:
        yield Subjects(local, Server(client, 60.0), EngineModel(client, timeout_s=60.0, **common), tokenization)


def word(subjects: Subjects, text: str) -> Word:
    return Word(text, tuple(subjects.tokenization.encode_word(text)))


@pytest.mark.parametrize("sampling", [SamplingParams(), DRAWN, PENALISED])
@pytest.mark.parametrize("stream", [True, False])
def test_the_bls_model_answers_as_the_engines_do(subjects: Subjects, sampling: SamplingParams, stream: bool) -> None:
    plain = subjects.local.generate(subjects.query(sampling)).text
    asked = subjects.query(
        sampling,
        min_tokens=24,
        bad_words=(word(subjects, plain[3]),),
        end_ids=(7,),
        stream=stream,
        log_probs=True,
    )
    ours, theirs = subjects.bls.generate(asked), subjects.local.generate(asked)
    assert (ours.ids, ours.text, ours.finish_reason) == (theirs.ids, theirs.text, theirs.finish_reason)
    assert len(ours.ids) == 24 and ours.text != plain
    assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-5) and len(ours.log_probs or ()) == 24
    assert ours.counts == replace(theirs.counts, accepted_per_pass=None)
    assert ours.blocks == (theirs.blocks if stream else (theirs.ids,))
    assert ours.pieces == theirs.pieces


def test_stop_words_end_both_at_the_same_place(subjects: Subjects) -> None:
    plain = subjects.local.generate(subjects.query())
    stop = plain.text[5:7]
    asked = subjects.query(stop=(stop,))
    ours, theirs = subjects.bls.generate(asked), subjects.local.generate(asked)
    assert ours.text == theirs.text == plain.text[: plain.text.index(stop)]
    assert ours.ids == theirs.ids and ours.finish_reason == theirs.finish_reason == "stop"


@pytest.mark.parametrize("sampling", [SamplingParams(), DRAWN, PENALISED])
def test_the_engine_model_answers_as_the_engine_does(
    subjects: Subjects, pair: SimpleNamespace, sampling: SamplingParams
) -> None:
    """In one call each, so that both draw with the numbers of one seed."""
    runtime = TorchRuntime(pair.engines["target"], kv_cache_bytes=32 << 20)
    asked = subjects.query(sampling, 0, logits=True, log_probs=True, bad_words=(word(subjects, "e"),), max_tokens=12)
    ours = subjects.engine.generate(asked)
    result = runtime.execute(
        EngineRequest(
            np.array(asked.ids, dtype=np.int32),
            12,
            sampling,
            end_id=runtime.config.eos_token_ids[0],
            bad_words=(asked.bad_words[0].ids,),
            return_generation_logits=True,
            return_log_probs=True,
        )
    )
    assert ours.ids == tuple(result.output_ids.tolist())
    assert ours.text == subjects.tokenization.decode(list(ours.ids))
    assert ours.logits is not None and result.generation_logits is not None and result.log_probs is not None
    assert np.abs(ours.logits - result.generation_logits).max() < 1e-4
    assert ours.log_probs == pytest.approx(result.log_probs.tolist(), abs=1e-5)
    assert (ours.counts.input_tokens, ours.counts.output_tokens) == (len(asked.ids), 12)
    assert not subjects.engine.streams


def test_the_torch_runtime_tells_draws_that_explain_its_tokens(subjects: Subjects) -> None:
    """Its generation logits are what it drew from, and its random numbers are those of the seed."""
    asked = subjects.query(replace(DRAWN, seed=3), max_tokens=40, logits=True)
    answer = subjects.local.generate(asked)
    assert [fault for cycle in answer.cycles for fault in cycle_faults(cycle)] == []
    assert any(cycle.accepted < len(cycle.drafts) for cycle in answer.cycles)
    assert answer.logits is not None and len(answer.logits) == len(answer.ids)


@pytest.mark.parametrize(
    ("kind", "asked", "reason"),
    [
        ("bls", {"logits": True}, "generation logits"),
        ("engine", {"num_draft_tokens": 1}, "given no drafts"),
    ],
)
def test_what_they_cannot_do(subjects: Subjects, kind: str, asked: dict[str, Any], reason: str) -> None:
    subject: Subject = getattr(subjects, kind)
    with pytest.raises(Unsupported, match=reason):
        subject.generate(subjects.query(**asked))


def test_a_refusal_of_the_server_is_no_loss(subjects: Subjects) -> None:
    with pytest.raises(TrtspecError, match="the server answered with an error") as caught:
        subjects.bls.generate(subjects.query(num_draft_tokens=100))
    assert not isinstance(caught.value, (Lost, Unsupported))


def test_nobody_listens(free_ports: Callable[[], dict[str, int]]) -> None:
    with Client(f"127.0.0.1:{free_ports()['grpc_port']}") as client, pytest.raises(Lost, match="no server at"):
        Server(client)
