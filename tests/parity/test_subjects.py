"""The kinds of subjects: each honours every field of a query or refuses it, over stand-ins for what it asks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from parity_doubles import DRAFT, TARGET, VOCAB, Table, decode, engine

from trtspec.decoding.draft_target import DraftModel
from trtspec.decoding.engine_call import EngineCall, EngineError, EngineRequest, EngineResult
from trtspec.decoding.sampler import TokenSampler
from trtspec.decoding.sampling import SamplingParams, Uniforms
from trtspec.decoding.verify import verify
from trtspec.errors import TrtspecError
from trtspec.parity.replay import cycle_faults
from trtspec.parity.subjects import END, Answer, Lost, Query, Unsupported, Word
from trtspec.parity.subjects.engine_model import EngineModel
from trtspec.parity.subjects.in_process import InProcess
from trtspec.parity.subjects.runner import Runner, runner_subject
from trtspec.parity.subjects.server import Server
from trtspec.triton import contract
from trtspec.triton.client import Chunk, GenerationStats, ModelInfo, ServerGone

END_ID = 0
DRAWN = SamplingParams(temperature=1.0, seed=5)
# The likeliest token after i is i + 1, so that a greedy answer counts up.
COUNTING = Table(np.eye(VOCAB)[(np.arange(VOCAB) + 1) % VOCAB] * 0.9 + 0.1 / VOCAB)


def query(sampling: SamplingParams | None = None, **more: Any) -> Query:
    given: dict[str, Any] = {"max_tokens": 8, "num_draft_tokens": 3, **more}
    return Query(
        "d", (3,), given.pop("max_tokens"), sampling or SamplingParams(), given.pop("num_draft_tokens"), **given
    )


def whole_engine(table: Table) -> EngineCall:
    """The engine of a table, with logits and log probabilities wherever they are asked for."""

    def call(request: EngineRequest) -> EngineResult:
        rows, log_probs = [], []
        if request.draft_tokens is not None:
            rows = list(table.rows[[request.input_ids[-1], *request.draft_tokens]])
            outcome = verify(rows, request)
            tokens, log_probs, rows = outcome.tokens, outcome.log_probs or (), rows[: len(outcome.tokens)]
        else:
            sampler = TokenSampler(request)
            while not sampler.finished:
                rows.append(table.rows[sampler.tokens[-1] if sampler.tokens else request.input_ids[-1]])
                sampler.append(sampler.next(rows[-1]))
                log_probs.append(sampler.log_probability(rows[-1], sampler.tokens[-1]))
            tokens = sampler.tokens
        return EngineResult(
            np.array(tokens, dtype=np.int32),
            generation_logits=np.array(rows) if request.return_generation_logits else None,
            log_probs=np.array(log_probs, dtype=np.float32) if request.return_log_probs else None,
        )

    return call


def in_process(target: EngineCall, draft: Table = COUNTING, **settings: Any) -> InProcess:
    given = {"end_ids": (END_ID,), "decode": decode, **settings}
    return InProcess(target, lambda: DraftModel(engine(draft)), **given)


@pytest.fixture
def counting() -> InProcess:
    return in_process(whole_engine(COUNTING))


@pytest.mark.parametrize(
    ("asked", "ids", "text", "finish"),
    [
        ({}, (4, 5, 6, 7, 8, 9, 10, 11), "efghijkl", "length"),
        ({"max_tokens": 20}, tuple(range(4, 16)), "efghijklmnop", "stop"),
        ({"max_tokens": 20, "end_ids": (9,)}, (4, 5, 6, 7, 8), "efghi", "stop"),
        ({"max_tokens": 14, "end_ids": ()}, (*range(4, 16), 0, 1), "efghijklmnopab", "length"),
        ({"stop": ("hi",)}, (4, 5, 6, 7, 8), "efg", "stop"),
        ({"max_tokens": 2, "stream": False}, (4, 5), "ef", "length"),
    ],
)
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_in_process_honours_a_query(
    counting: InProcess, asked: dict[str, Any], ids: tuple[int, ...], text: str, finish: str, num_draft_tokens: int
) -> None:
    answer = counting.generate(query(num_draft_tokens=num_draft_tokens, **asked))
    assert (answer.ids, answer.text, answer.finish_reason) == (ids, text, finish)
    assert "".join(answer.pieces) == text
    assert len(answer.pieces) == (len(answer.blocks) if asked.get("stream", True) else 1)


def test_in_process_bans_words_and_early_ends(counting: InProcess) -> None:
    banned = counting.generate(query(bad_words=(Word("gh", (6, 7)),)))
    assert banned.tokens == (4, 5, 6, END), "of the others, all as likely, the lowest id comes next"
    early = query(max_tokens=16, min_tokens=14, num_draft_tokens=2)
    assert len(counting.generate(early).ids) == 16


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_in_process_gives_the_logits_and_scores_of_every_token(num_draft_tokens: int) -> None:
    subject = in_process(whole_engine(TARGET), DRAFT)
    asked = query(DRAWN, max_tokens=12, num_draft_tokens=num_draft_tokens, logits=True, log_probs=True)
    answer = subject.generate(asked)
    before = [3, *answer.ids][: len(answer.ids)]
    assert answer.logits is not None and answer.logits.dtype == np.float32
    assert np.array_equal(answer.logits, TARGET.rows[before])
    rows = TARGET.rows.astype(np.float64)
    expected = (rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)))[before, answer.ids]
    assert np.allclose(answer.log_probs, expected, atol=1e-5)
    plain = subject.generate(replace(asked, logits=False, log_probs=False))
    assert plain.ids == answer.ids and plain.logits is None and plain.log_probs is None


def test_in_process_counts_its_work(counting: InProcess) -> None:
    """12 tokens until the end: three drafts are accepted in each of three passes, and in the fourth the end itself."""
    counts = counting.generate(query(max_tokens=20)).counts
    assert (counts.input_tokens, counts.output_tokens) == (1, 12)
    assert (counts.drafted, counts.accepted, counts.target_passes) == (10, 10, 4)
    assert counts.accepted_per_pass == (3, 3, 3, 1)
    plain = counting.generate(query(num_draft_tokens=0)).counts
    assert (plain.drafted, plain.accepted, plain.target_passes, plain.accepted_per_pass) == (0, 0, 8, ())


def test_what_an_engine_cannot_give_is_not_applicable() -> None:
    """The doubles' engine has no logits where it verifies, and no log probabilities."""
    subject = in_process(engine(COUNTING))
    for asked in ({"logits": True}, {"log_probs": True}):
        with pytest.raises(Unsupported, match="the target's engine returns no"):
            subject.generate(query(**asked))
    with pytest.raises(Unsupported, match="built without generation logits"):
        in_process(engine(COUNTING), logits=False).generate(query(logits=True))


def test_an_engine_that_answers_nonsense_is_one_error() -> None:
    def failing(request: EngineRequest) -> EngineResult:
        raise EngineError("not ids")

    with pytest.raises(TrtspecError, match="engines: not ids"):
        in_process(failing).generate(query())
    with pytest.raises(TrtspecError, match="min_tokens: 9 is not"):
        in_process(engine(COUNTING)).generate(query(min_tokens=9))


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_the_draws_that_are_told_explain_every_token(num_draft_tokens: int) -> None:
    subject = in_process(whole_engine(TARGET), DRAFT, uniforms=Uniforms)
    cycles = subject.generate(query(DRAWN, max_tokens=40, num_draft_tokens=num_draft_tokens, end_ids=())).cycles
    assert sum(len(cycle.draws) for cycle in cycles) >= 40
    assert [fault for cycle in cycles for fault in cycle_faults(cycle)] == []
    assert any(cycle.accepted < len(cycle.drafts) for cycle in cycles) or not num_draft_tokens
    assert cycles[0].position == 1


def test_draws_of_an_engine_that_accepts_everything_do_not_explain_its_tokens() -> None:
    def always(request: EngineRequest) -> EngineResult:
        result = whole_engine(TARGET)(request)
        if request.draft_tokens is None:
            return result
        rows = TARGET.rows[[request.input_ids[-1], *request.draft_tokens]]
        own = TokenSampler(request).next(rows[-1])
        return EngineResult(np.array([*request.draft_tokens, own], dtype=np.int32), generation_logits=rows)

    cycles = in_process(always, DRAFT, uniforms=Uniforms).generate(query(DRAWN, max_tokens=40, end_ids=())).cycles
    problems = [problem for cycle in cycles for _, problem in cycle_faults(cycle)]
    assert problems and any("was kept, uniform" in problem for problem in problems)


OURS = ModelInfo(
    batched=True,
    decoupled=True,
    inputs=frozenset(tensor.name for tensor in contract.BLS_INPUTS),
    outputs=frozenset(("text_output", "output_ids", "finish_reason")),
    chat_template=None,
    special_tokens={},
)
FOREIGN = replace(OURS, decoupled=False, outputs=frozenset(("text_output",)))


class FakeClient:
    """Answers with given chunks and records what was asked."""

    url = "somewhere:1"

    def __init__(
        self,
        *pieces: tuple[str, list[int] | None],
        finish: str | None = "stop",
        models: dict[str, ModelInfo] | None = None,
        scores: Sequence[float] | None = None,
        passes: int = 2,
    ) -> None:
        self._pieces, self._finish, self._scores, self._passes = pieces, finish, scores, passes
        unary = replace(OURS, decoupled=False)
        self._models = models or {"tensorrt_llm_bls": OURS, "tensorrt_llm_bls_unary": unary}
        self.asked: dict[str, Any] = {}

    def info(self, model: str) -> ModelInfo:
        if model not in self._models:
            raise TrtspecError(f"unknown model {model}")
        return self._models[model]

    def generate(self, prompt: str, **settings: Any) -> Iterator[Chunk]:
        self.asked = {"prompt": prompt, **settings}
        tokens = sum(len(ids or ()) for _, ids in self._pieces)
        stats = GenerationStats(1, tokens, 3, 1, self._passes, 1.0, None, self._finish)
        for number, (text, ids) in enumerate(self._pieces, 1):
            last = number == len(self._pieces)
            scores = None if self._scores is None else list(self._scores[: len(ids or ())])
            yield Chunk(text, ids, stats if last else None, scores)


def server(client: FakeClient, **settings: Any) -> Server:
    return Server(client, timeout_s=5.0, **settings)  # type: ignore[arg-type]


def test_blocks_and_pieces_are_kept_as_they_were_streamed() -> None:
    answer = server(FakeClient(("a", [4]), ("", [5, 6]), ("b", []))).generate(query())
    assert (answer.blocks, answer.pieces) == (((4,), (5, 6), ()), ("a", "", "b"))
    assert (answer.ids, answer.tokens) == ((4, 5, 6), (4, 5, 6, END))
    assert (answer.text, answer.finish_reason) == ("ab", "stop")
    counts = answer.counts
    assert (counts.input_tokens, counts.output_tokens, counts.drafted, counts.accepted) == (1, 3, 3, 1)
    assert (counts.target_passes, counts.accepted_per_pass) == (2, None)


def test_an_engine_that_drafts_by_itself_tells_no_passes() -> None:
    counts = server(FakeClient(("a", [4]), passes=0)).generate(query()).counts
    assert (counts.output_tokens, counts.drafted, counts.target_passes) == (1, None, None)


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        (query(), {}),
        (query(stream=False), {"stream": False, "model": "tensorrt_llm_bls_unary"}),
        (
            query(SamplingParams(temperature=1.0, seed=9)),
            {"temperature": 1.0, "top_k": None, "top_p": 1.0, "seed": 9},
        ),
        (
            query(SamplingParams(temperature=0.8, top_k=50, top_p=0.9, presence_penalty=0.5, seed=2**64 - 1)),
            {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 2**64 - 1, "presence_penalty": 0.5},
        ),
        (
            query(SamplingParams(repetition_penalty=1.5, frequency_penalty=-1.0), min_tokens=2, end_ids=(7,)),
            {"repetition_penalty": 1.5, "frequency_penalty": -1.0, "min_tokens": 2, "end_id": 7},
        ),
        (
            query(stop=("x", "yz"), bad_words=(Word("no", (1, 2)),), end_ids=()),
            {"stop": ("x", "yz"), "bad_words": ("no",), "end_id": -1},
        ),
    ],
)
def test_what_the_server_is_asked(asked: Query, sent: dict[str, Any]) -> None:
    client = FakeClient(("a", [4]))
    server(client).generate(asked)
    common = {"prompt": "d", "max_tokens": 8, "num_draft_tokens": 3, "timeout_s": 5.0}
    assert client.asked == common | {"stream": True, "model": "tensorrt_llm_bls"} | sent


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (query(logits=True), "generation logits"),
        (query(end_ids=(1, 2)), "one end id"),
        (query(SamplingParams(temperature=1.0, min_p=0.1)), "min_p"),
    ],
)
def test_what_the_server_cannot_be_asked(asked: Query, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        server(FakeClient(("a", [4]))).generate(asked)


def test_scores_of_the_server() -> None:
    client = FakeClient(("a", [4, 5]), scores=[-1.0, -2.0])
    answer = server(client).generate(query(log_probs=True))
    assert client.asked["log_probs"] is True and answer.log_probs == (-1.0, -2.0)
    with pytest.raises(Unsupported, match="0 log probabilities for 1 tokens"):
        server(FakeClient(("a", [4]))).generate(query(log_probs=True))


def test_a_server_that_is_gone_is_lost() -> None:
    class Gone(FakeClient):
        def generate(self, prompt: str, **settings: Any) -> Iterator[Chunk]:
            raise ServerGone("no server at somewhere:1")

    with pytest.raises(Lost, match="no server at somewhere:1"):
        server(Gone()).generate(query())

    class NeverThere(FakeClient):
        def info(self, model: str) -> ModelInfo:
            raise ServerGone("no server at somewhere:1")

    with pytest.raises(Lost, match="no server at somewhere:1"):
        server(NeverThere())


def encode(text: str) -> list[int]:
    """`decode` backwards, but ` ` is in no token, and "ab" is one (id 15)."""
    ids = [ord(letter) - ord("a") for letter in text.replace("ab", "p")]
    if any(not 0 <= token < VOCAB for token in ids):
        raise AssertionError(text)
    return ids


def foreign(text: str, **changes: Any) -> FakeClient:
    return FakeClient((text, None), finish=None, models={"ensemble": replace(FOREIGN, **changes)})


@pytest.mark.parametrize(
    ("text", "asked", "ids", "finish"),
    [
        ("efg", {}, (4, 5, 6), "stop"),
        ("efg", {"max_tokens": 3}, (4, 5, 6), "length"),
        ("defg", {"max_tokens": 3}, (4, 5, 6), "length"),  # the prompt is "d"
        ("defg", {"num_draft_tokens": 3}, (4, 5, 6), "stop"),
        ("def", {"num_draft_tokens": 3, "max_tokens": 3}, (4, 5), "stop"),
        ("d", {"num_draft_tokens": 3}, (), "stop"),
    ],
)
def test_a_server_without_ids_is_judged_by_its_text(
    text: str, asked: dict[str, Any], ids: tuple[int, ...], finish: str
) -> None:
    client = foreign(text)
    subject = server(client, encode=encode, decode=decode)
    answer = subject.generate(query(**{"num_draft_tokens": 0, **asked}))
    assert (answer.blocks, answer.finish_reason, answer.text) == ((ids,), finish, decode(list(ids)))
    assert not subject.streams and answer.pieces == (answer.text,)
    assert answer.counts.drafted is None, "upstream counts the last round only"
    assert client.asked["stream"] is False and client.asked["model"] == "ensemble"
    # Upstream's BLS takes what its target answers for the whole context, so it must not be told to leave it out.
    assert client.asked["exclude_input"] is (asked.get("num_draft_tokens", 0) == 0)


@pytest.mark.parametrize(
    ("text", "asked", "reason"),
    [
        ("ef\ufffd", {}, "a part of a character"),
        ("abc", {"max_tokens": 1}, "2 tokens, where max_tokens is 1"),
        ("p", {}, "its tokens have another text"),
        ("e", {"stop": ("g",)}, "where a stop word cut its text"),
        ("def", {"max_tokens": 3}, "begin with the prompt or repeat it"),
    ],
)
def test_a_text_that_does_not_tell_its_ids_is_not_applicable(text: str, asked: dict[str, Any], reason: str) -> None:
    def decode_pairs(ids: list[int]) -> str:
        return decode(ids).replace("p", "ab")

    subject = server(foreign(text), encode=encode, decode=decode_pairs)
    with pytest.raises(Unsupported, match=reason):
        subject.generate(query(**{"num_draft_tokens": 0, **asked}))


def test_a_text_that_joins_with_its_prompt_is_not_applicable() -> None:
    asked = replace(query(num_draft_tokens=0), text="a", ids=(0,))
    with pytest.raises(Unsupported, match="together with the prompt it has other tokens"):
        server(foreign("bc"), encode=encode, decode=decode).generate(asked)


def test_a_server_without_an_input_cannot_honour_it() -> None:
    client = foreign("ef", inputs=FOREIGN.inputs - {"num_draft_tokens", "min_tokens", "exclude_input_in_output"})
    subject = server(client, encode=encode, decode=decode)
    assert subject.generate(query(num_draft_tokens=0)).ids == (4, 5)
    assert "num_draft_tokens" not in client.asked and client.asked["exclude_input"] is None
    for asked, name in (({}, "num_draft_tokens"), ({"num_draft_tokens": 0, "min_tokens": 2}, "min_tokens")):
        with pytest.raises(Unsupported, match=f"the model ensemble has no input {name}"):
            subject.generate(query(**asked))


def test_without_ids_and_tokenizer_there_is_nothing_to_compare() -> None:
    with pytest.raises(TrtspecError, match="does not send output_ids"):
        server(foreign("ef")).generate(query())
    with pytest.raises(TrtspecError, match="no model tensorrt_llm_bls or ensemble"):
        server(FakeClient(models={"other": OURS}))


class FakeEngineClient:
    """An engine model that counts up from the last id of its input; checks the tensors it is sent."""

    url = "somewhere:1"

    def __init__(self, *, decoupled: bool = False, keeps_input: bool = False, shows_end: bool = False) -> None:
        names = "input_ids input_lengths request_output_len end_id pad_id streaming runtime_top_k runtime_top_p seed "
        names += "temperature min_tokens bad_words_list stop_words_list return_generation_logits return_log_probs "
        names += "" if keeps_input else "exclude_input_in_output "
        outputs = frozenset(("num_input_tokens", "total_draft_tokens"))
        self._info = ModelInfo(True, decoupled, frozenset(names.split()), outputs, None, {})
        self._keeps_input, self._shows_end = keeps_input, shows_end
        self.asked: dict[str, np.ndarray] = {}

    def info(self, model: str) -> ModelInfo:
        assert model == "tensorrt_llm"
        return self._info

    def infer(
        self, model: str, inputs: dict[str, np.ndarray], outputs: Sequence[str], timeout_s: float
    ) -> Iterator[dict[str, np.ndarray]]:
        self.asked = inputs
        ids = inputs["input_ids"]
        assert ids.dtype == np.int32 and ids.shape == (1, inputs["input_lengths"][0, 0])
        assert "streaming" not in inputs or self._info.decoupled
        new = [(ids[0, -1] + 1 + i) % VOCAB for i in range(inputs["request_output_len"][0, 0])]
        end_id = inputs["end_id"][0, 0] if "end_id" in inputs else -1
        if end_id in new:
            new = new[: new.index(end_id) + self._shows_end]
        blocks = [[token] for token in new] if "streaming" in inputs else [new]
        for number, block in enumerate(blocks):
            shown = [*ids[0], *block] if self._keeps_input and not number else block
            rows = COUNTING.rows[[(token - 1) % VOCAB for token in block]]
            values = {
                "output_ids": np.array([[[*shown, 7, 7]]], dtype=np.int32),  # the rest of the buffer is no answer
                "sequence_length": np.array([[len(shown)]], dtype=np.int32),
                "generation_logits": rows[np.newaxis, np.newaxis].astype(np.float16),
                "output_log_probs": np.full((1, 1, len(block)), -0.5, dtype=np.float32),
                "num_input_tokens": np.array([[ids.shape[1]]], dtype=np.int32),
                "total_draft_tokens": np.zeros((1, 1), dtype=np.int32),
            }
            yield {name: values[name] for name in outputs}


def engine_model(client: FakeEngineClient, end_ids: Sequence[int] = (END_ID,)) -> EngineModel:
    return EngineModel(client, end_ids=end_ids, decode=decode)  # type: ignore[arg-type]


@pytest.mark.parametrize("keeps_input", [False, True])
@pytest.mark.parametrize("shows_end", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_an_engine_model_answers_in_ids(decoupled: bool, keeps_input: bool, shows_end: bool) -> None:
    client = FakeEngineClient(decoupled=decoupled, keeps_input=keeps_input, shows_end=shows_end)
    subject = engine_model(client)
    assert subject.streams == decoupled
    answer = subject.generate(query(num_draft_tokens=0, log_probs=True))
    assert (answer.ids, answer.text, answer.finish_reason) == (tuple(range(4, 12)), "efghijkl", "length")
    assert len(answer.blocks) == len(answer.pieces) == (8 if decoupled else 1)
    assert answer.log_probs == (-0.5,) * 8
    ended = subject.generate(query(num_draft_tokens=0, max_tokens=16))
    assert (ended.ids, ended.finish_reason) == (tuple(range(4, 16)), "stop")
    assert (ended.counts.input_tokens, ended.counts.drafted) == (1, None)
    logits = subject.generate(query(num_draft_tokens=0, logits=True)).logits
    assert logits is not None and np.allclose(logits, COUNTING.rows[3:11], atol=1e-2) and logits.dtype == np.float32


def test_what_an_engine_model_is_asked() -> None:
    client = FakeEngineClient()
    subject = engine_model(client, (END_ID, 9))
    sampling = SamplingParams(temperature=0.5, top_p=0.9, seed=3)
    subject.generate(query(sampling, num_draft_tokens=0, bad_words=(Word("x", (1, 2)),)))
    sent = {name: array.tolist() for name, array in client.asked.items()}
    assert sent["end_id"] == [[END_ID]] and sent["stop_words_list"] == [[[9], [1]]]
    assert sent["bad_words_list"] == [[[1, 2], [2, -1]]]
    assert sent["temperature"] == [[0.5]] and sent["seed"] == [[3]] and "runtime_top_k" not in sent
    assert sent["exclude_input_in_output"] == [[True]]
    subject.generate(query(num_draft_tokens=0))
    assert client.asked["runtime_top_k"].tolist() == [[1]] and "temperature" not in client.asked


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"num_draft_tokens": 2}, "given no drafts"),
        ({"stop": ("x",)}, "stops at ids"),
        ({"min_tokens": 2}, "one end id, not 2"),
        ({"sampling": SamplingParams(repetition_penalty=2.0)}, "no input repetition_penalty"),
    ],
)
def test_what_an_engine_model_cannot_be_asked(asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        engine_model(FakeEngineClient(), (END_ID, 9)).generate(query(**{"num_draft_tokens": 0, **asked}))


def test_the_runner_needs_tensorrt_llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(TrtspecError, match="TensorRT-LLM cannot be imported") as caught:
        Runner(tmp_path)
    assert "\n" not in str(caught.value)


class FakeModelRunner:
    """Stands for `ModelRunnerCpp`: takes what its `generate` takes, in its types, and answers as it does."""

    table = COUNTING

    @classmethod
    def from_dir(cls, engine_dir: str, **settings: Any) -> FakeModelRunner:
        known = {"rank", "kv_cache_free_gpu_memory_fraction", "kv_cache_enable_block_reuse", "gather_generation_logits"}
        assert isinstance(engine_dir, str) and set(settings) <= known | {"medusa_choices", "eagle_choices"}
        return cls()

    def generate(self, batch_input_ids: list[Any], **settings: Any) -> dict[str, Any]:
        import torch

        known = {
            "max_new_tokens", "end_id", "pad_id", "stop_words_list", "bad_words_list", "return_dict",
            "output_sequence_lengths", "output_generation_logits", "output_log_probs", "top_k", "top_p", "temperature",
            "min_tokens", "random_seed", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "draft_tokens_list", "draft_logits_list",
        }  # fmt: skip
        assert set(settings) <= known and settings["return_dict"] and settings["output_sequence_lengths"]
        for name in ("stop_words_list", "bad_words_list"):
            assert all(isinstance(token, int) for words in settings.get(name, [[]])[0] for token in words)
        (ids,) = (tensor.tolist() for tensor in batch_input_ids)
        assert batch_input_ids[0].dtype == torch.int32
        drafts = settings.get("draft_tokens_list", [[]])[0]
        logits = settings.get("draft_logits_list", [None])[0]
        request = EngineRequest(
            input_ids=np.array(ids, dtype=np.int32),
            max_new_tokens=settings["max_new_tokens"],
            sampling=SamplingParams(
                temperature=0.0 if settings.get("top_k") == 1 else settings["temperature"],
                top_p=settings.get("top_p", 1.0),
                seed=settings.get("random_seed", 0),
            ),
            end_id=None if settings["end_id"] == -1 else settings["end_id"],
            stop_sequences=tuple(map(tuple, settings.get("stop_words_list", [[]])[0])),
            bad_words=tuple(map(tuple, settings.get("bad_words_list", [[]])[0])),
            draft_tokens=np.array(drafts, dtype=np.int32) if drafts else None,
            draft_logits=None if logits is None else logits.numpy(),
            min_new_tokens=settings.get("min_tokens", 0),
            return_generation_logits=True,
            return_log_probs=True,
        )
        result = whole_engine(self.table)(request)
        new = [token for token in result.output_ids.tolist() if token != request.end_id]
        assert result.generation_logits is not None
        outputs = {
            "output_ids": torch.tensor([[[*ids, *new, *[settings["end_id"]] * 9]]], dtype=torch.int32),
            "sequence_lengths": torch.tensor([[len(ids) + len(new)]], dtype=torch.int32),
        }
        if settings.get("output_generation_logits"):
            rows = torch.from_numpy(result.generation_logits).half()
            outputs["generation_logits"] = [rows[None]] if drafts else rows[None, None]
        if settings.get("output_log_probs"):
            outputs["log_probs"] = torch.from_numpy(result.log_probs)[None, None]
        return outputs


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Runner]]:
    """Two engines over `table` and the counting draft, as `Runner` loads them."""
    config = SimpleNamespace(
        compiled=True,
        returns_generation_logits=True,
        stamp={},
        pretrained={},
        max_seq_len=64,
        path=Path("engine/config.json"),
    )
    runtime = ModuleType("tensorrt_llm.runtime")
    monkeypatch.setitem(sys.modules, "tensorrt_llm", ModuleType("tensorrt_llm"))
    monkeypatch.setitem(sys.modules, "tensorrt_llm.runtime", runtime)
    monkeypatch.setattr("trtspec.parity.subjects.runner.EngineConfig.load", lambda path: config)

    def load(table: Table, draft: Table) -> dict[str, Runner]:
        result = {}
        for role, rows in (("target", table), ("draft", draft)):
            runtime.ModelRunnerCpp = type("ModelRunnerCpp", (FakeModelRunner,), {"table": rows})  # type: ignore
            result[role] = Runner(Path(role))
        return result

    return load


def runner_answer(runners: dict[str, Runner], asked: Query, method: str = "draft_target") -> Answer:
    return runner_subject(runners, method, end_ids=(END_ID,), decode=decode).generate(asked)


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_the_runner_answers_as_the_engines_do(runners: Callable[..., dict[str, Runner]], num_draft_tokens: int) -> None:
    """The double draws with the decoding core's numbers, so the same query gives the same answer."""
    loaded = runners(TARGET, DRAFT)
    expected = in_process(whole_engine(TARGET), DRAFT, plain_chunk_tokens=None)
    for sampling in (SamplingParams(), DRAWN, SamplingParams(temperature=0.7, top_p=0.8, seed=2)):
        asked = query(sampling, max_tokens=30, num_draft_tokens=num_draft_tokens, logits=True, log_probs=True)
        ours, theirs = runner_answer(loaded, asked), expected.generate(asked)
        assert (ours.ids, ours.text, ours.finish_reason) == (theirs.ids, theirs.text, theirs.finish_reason)
        assert ours.logits is not None and np.allclose(ours.logits, theirs.logits, atol=1e-2)
        assert ours.logits.shape == (len(ours.ids), VOCAB)
        assert ours.log_probs == theirs.log_probs
    words = query(max_tokens=20, num_draft_tokens=num_draft_tokens, bad_words=(Word("x", (4, 5)),), min_tokens=3)
    assert runner_answer(loaded, words).ids == expected.generate(words).ids


def test_the_runner_takes_no_trees_and_no_prepared_engine(
    runners: Callable[..., dict[str, Runner]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = runners(TARGET, DRAFT)
    with pytest.raises(TrtspecError, match="method tree proposes token trees"):
        runner_subject(loaded, "tree", end_ids=(END_ID,), decode=decode)
    monkeypatch.setattr(
        "trtspec.parity.subjects.runner.EngineConfig.load", lambda path: SimpleNamespace(compiled=False)
    )
    with pytest.raises(TrtspecError, match="prepared, not compiled"):
        Runner(Path("target"))
