"""The speculative pipeline on the real server, as public clients use it."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

STREAMING, UNARY, SCRIPTED = "tensorrt_llm_bls", "tensorrt_llm_bls_unary", "bls_scripted"
PROMPTS = ["Hello", "once upon a time", "def f(x):\n    return", "\u00e9\u4e2d \U0001f600!", "0123456789" * 12]
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "top_k": 50}
VOCAB, EOS, SECOND_EOS = 261, 257, 258


@pytest.fixture(scope="module")
def ask(triton) -> Callable[..., SimpleNamespace]:
    """Stream one generation: `text`, `ids`, `blocks` (ids of each response), `last` (outputs of the last one)."""

    def run(prompt: str, model: str = STREAMING, **tensors: object) -> SimpleNamespace:
        settings = {"max_tokens": 24, "stream": True, "exclude_input_in_output": True} | tensors
        responses, error = triton.stream(model, text_input=prompt, **settings)
        if error is not None:
            raise error
        blocks = [response["output_ids"].reshape(-1).tolist() for response in responses]
        return SimpleNamespace(
            text="".join(response["text_output"] for response in responses),
            ids=[token for block in blocks for token in block],
            blocks=blocks,
            finals=[response["final"] for response in responses],
            last=responses[-1],
            responses=responses,
        )

    return run


def biased(*words: str) -> dict[str, object]:
    """Settings under which nothing but the words' ids can come."""
    return {"embedding_bias_words": list(words), "embedding_bias_weights": [200.0] * len(words)}


def post(server: SimpleNamespace, path: str, body: dict) -> tuple[int, str]:
    request = urllib.request.Request(
        f"{server.http}/v2/models/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def logged(server: SimpleNamespace, start: int, pattern: str) -> bool:
    """Whether the server's log says `pattern` after byte `start`; it may be written a little later than the answer."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if re.search(pattern, Path(server.log).read_bytes()[start:].decode(errors="replace")):
            return True
        time.sleep(0.05)
    return False


def calls_at_rest(triton) -> int:
    """Calls of the scripted draft, as soon as none has come for a second: five times what a slow one takes."""
    deadline = time.monotonic() + 30
    calls, since = triton.calls("scripted_draft"), time.monotonic()
    while time.monotonic() - since < 1.0:
        assert time.monotonic() < deadline, "the work goes on"
        time.sleep(0.05)
        if (now := triton.calls("scripted_draft")) != calls:
            calls, since = now, time.monotonic()
    return calls


# Texts


def test_the_whole_repository_loads(triton) -> None:
    index = triton.client.get_model_repository_index(as_json=True)["models"]
    states = {model["name"]: model["state"] for model in index}
    names = {"preprocessing", "tensorrt_llm", "tensorrt_llm_draft", STREAMING, UNARY, "postprocessing", "ensemble"}
    assert {name: states.get(name) for name in names} == dict.fromkeys(names, "READY")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_the_same_with_and_without_speculation(ask, triton, prompt: str) -> None:
    speculated, plain = ask(prompt, num_draft_tokens=5), ask(prompt, num_draft_tokens=0)
    unary = triton.infer(UNARY, text_input=prompt, max_tokens=24)
    assert speculated.ids == plain.ids == unary["output_ids"].reshape(-1).tolist()
    assert speculated.text == plain.text == unary["text_output"]
    assert speculated.last["total_draft_tokens"] > speculated.last["total_accepted_draft_tokens"] > 0
    assert plain.last["total_draft_tokens"] == 0


@pytest.mark.parametrize("settings", [{}, SAMPLED, SAMPLED | {"use_draft_logits": False}])
def test_the_server_says_what_the_decoding_core_says_in_process(
    ask, pair: SimpleNamespace, settings: dict[str, object]
) -> None:
    from trtspec.decoding.cycle import generate
    from trtspec.decoding.draft_target import DraftModel, Target
    from trtspec.decoding.request import Request
    from trtspec.decoding.sampling import request_sampling
    from trtspec.runtime.torch_runtime import TorchRuntime
    from trtspec.triton.models.tokenization import Tokenization

    runtimes = {role: TorchRuntime(path, kv_cache_bytes=32 << 20) for role, path in pair.engines.items()}
    tokenization = Tokenization(pair.root / "target-model" / "tokenizer.json", bos_token_id=256, add_bos=True)
    given = {name: value for name, value in settings.items() if name != "use_draft_logits"}
    for seed, prompt in enumerate(PROMPTS):
        request = Request(
            prompt_ids=tokenization.encode(prompt),
            max_tokens=24,
            sampling=request_sampling(**given, seed=seed)[0],
            end_ids=(EOS, SECOND_EOS),
            num_draft_tokens=3,
        )
        drafter = DraftModel(runtimes["draft"].execute, "tokens" if "use_draft_logits" in settings else "auto")
        blocks = list(generate(request, drafter, Target(runtimes["target"].execute), decode=tokenization.decode))
        served = ask(prompt, seed=seed, num_draft_tokens=3, **settings)
        assert served.ids == [token for block in blocks for token in block.token_ids]
        assert served.text == "".join(block.text for block in blocks)


def test_a_seed_repeats_the_text_and_no_seed_does_not(ask, triton) -> None:
    first, again, other = (ask("Hello", seed=seed, **SAMPLED).ids for seed in (11, 11, 12))
    assert first == again != other
    unary = triton.infer(UNARY, text_input="Hello", max_tokens=24, seed=11, **SAMPLED)
    assert unary["output_ids"].reshape(-1).tolist() == first
    assert ask("Hello", **SAMPLED).ids != ask("Hello", **SAMPLED).ids


def test_streamed_pieces_are_whole_characters_and_join_to_the_whole_text(ask, pair: SimpleNamespace) -> None:
    """The tiny model writes random bytes: most of its text is broken UTF-8, which comes out as in one decode."""
    tokenizer = pair.source.tokenizer()
    for seed, prompt in enumerate(PROMPTS):
        answer = ask(prompt, max_tokens=60, seed=seed, **SAMPLED)
        assert answer.text == tokenizer.decode(answer.ids, skip_special_tokens=True)
        assert len(answer.responses) > 5


def test_the_prompt_comes_first_when_asked_for_but_never_in_a_stream(ask, triton) -> None:
    alone = ask("Hello").text
    assert ask("Hello", exclude_input_in_output=False).text == alone
    assert ask("Hello", exclude_input_in_output=False, stream=False).text == "Hello" + alone
    assert triton.infer(UNARY, text_input="Hello", max_tokens=24, exclude_input_in_output=False)["text_output"] == (
        "Hello" + alone
    )


def test_one_bos_for_a_templated_prompt(ask) -> None:
    plain, templated = ask("hi"), ask("<s>hi")
    assert plain.last["num_input_tokens"] == templated.last["num_input_tokens"] == 3
    assert plain.ids == templated.ids


def test_the_ensemble_says_what_the_pipeline_says(ask, triton) -> None:
    for prompt in PROMPTS[:2]:
        whole = triton.infer("ensemble", text_input=prompt, max_tokens=24)["text_output"]
        new = triton.infer("ensemble", text_input=prompt, max_tokens=24, exclude_input_in_output=True)["text_output"]
        assert new == ask(prompt).text
        assert whole == prompt + new


# Clients


def test_http_generate_stream(server: SimpleNamespace, ask) -> None:
    status, body = post(
        server, f"{STREAMING}/generate_stream", {"text_input": "Hello", "max_tokens": 24, "stream": True}
    )
    events = [json.loads(line.removeprefix("data: ")) for line in body.split("\n\n") if line]
    assert status == 200
    assert len(events) > 3
    assert "".join(event["text_output"] for event in events) == ask("Hello").text
    assert events[-1]["finish_reason"] == "length"


def test_http_generate_with_the_empty_strings_that_clients_send(server: SimpleNamespace, ask) -> None:
    body = {"text_input": "Hello", "max_tokens": 24, "bad_words": "", "stop_words": "", "num_draft_tokens": 3}
    status, answer = post(server, f"{UNARY}/generate", body)
    assert status == 200, answer
    assert json.loads(answer)["text_output"] == ask("Hello").text


def test_a_client_that_sends_every_setting_at_its_default(triton, ask) -> None:
    settings = {
        "bad_words": "",
        "stop_words": "",
        "embedding_bias_words": "",
        "beam_width": 1,
        "top_k": 1,
        "top_p": 0.0,
    }
    settings |= {"temperature": 1.0, "length_penalty": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    settings |= {"frequency_penalty": 0.0, "min_tokens": 0, "seed": 0, "stream": False, "pad_id": 0, "end_id": EOS}
    flags = (
        "log_probs",
        "context_logits",
        "generation_logits",
        "perf_metrics",
        "num_input_tokens",
        "num_output_tokens",
    )
    settings |= {f"return_{name}": False for name in flags} | {
        "use_draft_logits": False,
        "exclude_input_in_output": True,
    }
    answer = triton.infer(UNARY, text_input="Hello", max_tokens=24, num_draft_tokens=3, **settings)
    assert answer["text_output"] == ask("Hello").text


def test_infer_returns_the_outputs_it_was_asked_for(triton) -> None:
    asked = ("text_output", "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
    answer = triton.infer(UNARY, asked, text_input="Hello", max_tokens=24, stream=False)
    assert set(answer) == set(asked)
    accepted, drafted = answer["total_accepted_draft_tokens"], answer["total_draft_tokens"]
    assert 0 < accepted < drafted
    assert answer["acceptance_rate"] == pytest.approx(accepted / drafted, abs=1e-6)


def test_a_stream_can_be_had_in_one_piece(ask) -> None:
    whole = ask("Hello", stream=False)
    assert whole.finals == [True]
    assert whole.text == ask("Hello").text


def test_counters_cover_the_whole_generation(ask) -> None:
    answer = ask("Hello", max_tokens=40)
    last = answer.last
    assert last["num_output_tokens"] == len(answer.ids) == 40
    assert last["total_target_passes"] == len(answer.responses)
    assert last["total_accepted_draft_tokens"] + last["total_target_passes"] == 40
    assert last["num_input_tokens"] == 6


def test_several_clients_at_once_get_what_they_get_alone(ask, triton) -> None:
    jobs = [(prompt, seed) for prompt in PROMPTS for seed in (1, 2, 3)]
    alone = [ask(prompt, seed=seed, **SAMPLED).ids for prompt, seed in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        streamed = pool.map(lambda job: ask(job[0], seed=job[1], **SAMPLED).ids, jobs)
        unary = pool.map(
            lambda job: triton.infer(UNARY, text_input=job[0], seed=job[1], max_tokens=24, **SAMPLED)["output_ids"],
            jobs,
        )
        assert list(streamed) == alone
        assert [array.reshape(-1).tolist() for array in unary] == alone


@pytest.mark.parametrize("model", [SCRIPTED, f"{SCRIPTED}_unary"])
def test_one_process_works_on_several_requests_at_once(ask, triton, model: str) -> None:
    """A request whose drafts take 0.2 s each, and one that is over long before, sent after it to the same process."""

    def run(prompt: str, **tensors: object) -> object:
        if model == SCRIPTED:
            return ask(prompt, model, **tensors)
        return triton.infer(model, text_input=prompt, **{"max_tokens": 24, **tensors})

    with ThreadPoolExecutor(1) as pool:
        before = triton.calls("scripted_draft")
        slow = pool.submit(run, "wait", max_tokens=30, num_draft_tokens=1, **biased("b"))
        while triton.calls("scripted_draft") == before and not slow.done():
            time.sleep(0.05)
        run("quick", max_tokens=2, num_draft_tokens=0)
        assert not slow.done()
        slow.result()


def test_two_requests_in_one_round_grow_by_what_each_accepts(ask) -> None:
    """Both are drafted `aaa`; the one may only write `b`, the other only `a`."""
    with ThreadPoolExecutor(2) as pool:
        never = pool.submit(ask, "wait", SCRIPTED, max_tokens=8, num_draft_tokens=3, **biased("b"))
        always = pool.submit(ask, "wait", SCRIPTED, max_tokens=8, num_draft_tokens=3, **biased("a"))
        assert [len(block) for block in never.result().blocks] == [1] * 8
        assert [len(block) for block in always.result().blocks] == [4, 4]
    assert never.result().text == "b" * 8
    assert always.result().text == "a" * 8


# Ends


def test_success_and_zero_tokens_end_with_one_final_response(ask) -> None:
    for settings, reason in (({}, "length"), (biased("</s>"), "stop")):
        answer = ask("Hello", **settings)
        assert answer.finals == [False] * (len(answer.finals) - 1) + [True]
        assert answer.last["finish_reason"] == reason
    assert (answer.text, answer.ids) == ("", [])


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("end", ["</s>", "<|end|>"])
def test_every_end_id_counts_but_not_before_min_tokens(ask, end: str, num_draft_tokens: int) -> None:
    at_once = ask("Hello", num_draft_tokens=num_draft_tokens, **biased(end))
    later = ask("Hello", num_draft_tokens=num_draft_tokens, min_tokens=5, **biased(end))
    assert at_once.ids == []
    assert len(later.ids) == 5
    assert not {EOS, SECOND_EOS} & set(later.ids)
    assert at_once.last["finish_reason"] == later.last["finish_reason"] == "stop"


def test_the_request_can_name_its_own_end(ask) -> None:
    assert ask("Hello", end_id=-1, max_tokens=6, **biased("</s>")).ids == [EOS] * 6
    own = ask("Hello", end_id=ord("a") - ord("!"), **biased("a"))
    assert (own.ids, own.last["finish_reason"]) == ([], "stop")


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_a_stop_word_cuts_at_the_character_and_is_never_sent(ask, num_draft_tokens: int) -> None:
    settings = {"num_draft_tokens": num_draft_tokens, "bad_words": ["bb", "aaa"], "max_tokens": 24, **biased("a", "b")}
    whole = ask("Hello", **settings).text
    assert set(whole) == {"a", "b"}
    stop = whole[5:9]
    stopped = ask("Hello", stop_words=[stop, ""], **settings)
    assert stopped.text == whole[: whole.index(stop)]
    assert stopped.last["finish_reason"] == "stop"
    assert stopped.last["num_output_tokens"] == whole.index(stop) + 4


def test_bad_words_never_come(ask) -> None:
    answer = ask("Hello", bad_words=["aaa"], max_tokens=30, **biased("a", "b"))
    assert "aa" in answer.text
    assert "aaa" not in answer.text


def test_the_target_context_is_a_limit(ask) -> None:
    answer = ask("x" * 250, max_tokens=100_000, end_id=-1)
    assert answer.last["num_input_tokens"] + len(answer.ids) == 512
    assert answer.last["finish_reason"] == "length"


def test_log_probabilities_belong_to_the_tokens_that_came(ask) -> None:
    plain = ask("Hello", return_log_probs=True, num_draft_tokens=0)
    drafted = ask("Hello", return_log_probs=True, num_draft_tokens=4)
    values = [
        np.concatenate([response["output_log_probs"].reshape(-1) for response in answer.responses])
        for answer in (plain, drafted)
    ]
    assert plain.ids == drafted.ids
    assert len(values[0]) == len(plain.ids)
    np.testing.assert_allclose(values[1], values[0], atol=1e-4)
    assert (values[0] < 0).all()
    assert drafted.last["cum_log_probs"] == pytest.approx(values[1].sum(), abs=1e-3)


def test_times_come_in_order_when_asked_for(ask) -> None:
    last = ask("Hello", return_perf_metrics=True).last
    times = [last[f"{name}_time_ns"] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)
    assert "arrival_time_ns" not in ask("Hello").last


# Clients that leave


def test_a_client_that_leaves_ends_the_work(triton) -> None:
    """Slow drafts, 40 tokens one by one: after the second block the client goes."""
    before = triton.calls("scripted_draft")
    triton.stream(
        SCRIPTED, leave_after=2, text_input="wait", max_tokens=40, num_draft_tokens=3, stream=True, **biased("b")
    )
    at_leaving = triton.calls("scripted_draft")
    assert at_leaving - before <= 3
    assert calls_at_rest(triton) - at_leaving <= 1


def test_a_closed_http_stream_ends_the_work(server: SimpleNamespace, triton) -> None:
    before = triton.calls("scripted_draft")
    body = {"text_input": "wait", "max_tokens": 40, "num_draft_tokens": 3, "stream": True}
    body |= {"embedding_bias_words": "b", "embedding_bias_weights": 200.0}
    request = urllib.request.Request(
        f"{server.http}/v2/models/{SCRIPTED}/generate_stream",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.readline().startswith(b"data: ")
    assert calls_at_rest(triton) - before < 10


# A draft that fails


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("f", "broken on purpose"),
        ("h", "scripted_draft did not answer within 5 s"),
        ("s", r"scripted_draft answered output_ids as int32 \[1, \d+\]; expected int32 with 3 dimensions"),
        ("d", r"scripted_draft answered output_ids as int64 \[1, 1, \d+\]"),
        ("n", r"scripted_draft answered \[5000, 5000, 5000\]; expected up to 3 ids from 0 to 260"),
        ("m", "scripted_draft answered without sequence_length"),
    ],
)
def test_a_draft_that_fails_is_left_out(ask, server: SimpleNamespace, script: str, reason: str) -> None:
    start = Path(server.log).stat().st_size
    prompt = f"{script} prompt"
    answer = ask(prompt, SCRIPTED, num_draft_tokens=3)
    assert answer.ids == ask(prompt, num_draft_tokens=0).ids
    assert answer.finals[-1] is True
    assert answer.last["total_draft_tokens"] == 0
    assert logged(server, start, f"went on without drafts: .*{reason}")


def test_a_draft_that_proposes_nothing_does_not_stop_the_target(ask) -> None:
    answer = ask("z prompt", SCRIPTED, num_draft_tokens=3, end_id=-1)
    assert answer.ids == ask("z prompt", num_draft_tokens=0, end_id=-1).ids
    assert len(answer.ids) == 24


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("f", "scripted_draft: broken on purpose"),
        ("h", "scripted_draft did not answer within 5 s"),
        ("d", "scripted_draft answered output_ids as int64"),
    ],
)
def test_a_target_that_fails_is_one_clear_error(triton, script: str, reason: str) -> None:
    settings = {"max_tokens": 8, "num_draft_tokens": 0, "stream": True}
    responses, error = triton.stream("bls_scripted_target", text_input=f"{script} prompt", **settings)
    assert responses == []
    assert reason in str(error)
    assert "Traceback" not in str(error)


# Requests that are refused


def refusal(ask, prompt: object = "Hello", **tensors: object) -> str:
    with pytest.raises(InferenceServerException) as refused:
        ask(prompt, **tensors)
    return refused.value.message()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; expected 1 or more"),
        ({"max_tokens": -5}, "max_tokens is -5; expected 1 or more"),
        ({"min_tokens": -1}, "min_tokens is -1; expected 0 or more"),
        ({"min_tokens": 25}, "min_tokens"),
        ({"temperature": float("nan")}, "temperature is nan; expected a finite number"),
        ({"temperature": -0.5}, "temperature"),
        ({"top_p": 100.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"num_draft_tokens": 6}, "num_draft_tokens is 6; the target engine verifies at most 5"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1; expected 0 or more"),
        ({"beam_width": 2}, "beam_width is 2; speculation gives one sequence, expected 1"),
        ({"num_return_sequences": 3}, "num_return_sequences is 3"),
        ({"return_context_logits": True}, "return_context_logits is not supported"),
        (
            {"image_url_input": "http://example.com/a.png"},
            "image_url_input is not supported: this pipeline takes text only",
        ),
        ({"decoder_text_input": "x"}, "decoder_text_input is not supported"),
        ({"guided_decoding_guide_type": "json"}, "guided_decoding_guide_type is not supported"),
        ({"lora_task_id": np.array([[1]], dtype=np.uint64)}, "lora_task_id is not supported"),
        ({"prompt_vocab_size": 4}, "prompt_vocab_size is not supported"),
        ({"stop_words": b"\xff"}, "stop_words is not UTF-8 (byte 0: 0xff)"),
        ({"end_id": VOCAB}, f"end_id is {VOCAB}; expected an id below {VOCAB}"),
        ({"end_id": -2}, "end_id is -2; expected -1 or more"),
        ({"pad_id": -1}, "pad_id is -1; expected 0 or more"),
        ({"embedding_bias_words": "a"}, "embedding_bias_weights has 0 values for 1 embedding_bias_words"),
        (
            {"embedding_bias_words": "a", "embedding_bias_weights": float("nan")},
            "embedding_bias_weights holds a value that is not finite",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(ask, tensors: dict[str, object], message: str) -> None:
    assert message in refusal(ask, **tensors)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "text_input is empty; expected some text"),
        (b"ab\xff", "text_input is not UTF-8 (byte 2: 0xff)"),
        ("x" * 300, "text_input has 301 tokens; expected 1 to 256"),
        ("x" * 1_000_000, "text_input has 1000000 characters; expected at most 256 tokens"),
        (np.array([[b"a"], [b""]], dtype=np.object_), "text 1: text_input is empty; expected some text"),
    ],
)
def test_what_is_no_prompt_is_refused(ask, prompt: object, message: str) -> None:
    tensors = {"max_tokens": np.array([[4], [4]], dtype=np.int32)} if isinstance(prompt, np.ndarray) else {}
    if tensors:
        tensors |= {name: np.array([[True], [True]]) for name in ("stream", "exclude_input_in_output")}
    assert message in refusal(ask, prompt, **tensors)


def absurd(name: str) -> dict[str, object]:
    """A request that nobody can mean, made when it is sent."""
    words = np.full((1, 1_000_000), b"a", dtype=np.object_) if name == "many words" else "w" * 1_000_000
    return {
        "long prompt": {"text_input": "x" * (16 << 20)},
        "no text": {"text_input": b"a\xff"},
        "two texts in a row": {"text_input": ["a", "b"]},
        "two numbers": {"max_tokens": [4, 4]},
        "three dimensions": {"temperature": np.zeros((1, 1, 2), dtype=np.float32)},
        "negative": {"max_tokens": -(2**31)},
        "not a number": {"temperature": float("nan")},
        "many words": {"stop_words": words},
        "long word": {"bad_words": words},
        "many logits": {"max_tokens": 1_000_000, "return_generation_logits": True},
    }[name]


ABSURD = {
    "long prompt": "text_input has 16777216 characters; expected at most 256 tokens",
    "no text": "text_input is not UTF-8 (byte 1: 0xff)",
    "two texts in a row": "text_input",
    "two numbers": "max_tokens",
    "three dimensions": "temperature",
    "negative": "max_tokens is -2147483648; expected 1 or more",
    "not a number": "temperature is nan; expected a finite number",
    "many words": "stop_words has 1000000 entries; expected at most 1024",
    "long word": "bad_words holds 1000000 bytes; expected at most 65536",
    "many logits": "return_generation_logits for 1000000 tokens takes 995 MiB; expected at most 256 MiB: 257122 tokens",
}


def test_absurd_requests_are_refused_at_once_while_another_one_goes_on(ask, triton) -> None:
    """All by the same process; the other request takes 0.2 s a token, and gets each of them as it is made."""
    with ThreadPoolExecutor(1) as pool:
        before = triton.calls("scripted_draft")
        slow = pool.submit(ask, "wait", SCRIPTED, max_tokens=40, num_draft_tokens=1, **biased("b"))
        while triton.calls("scripted_draft") == before and not slow.done():
            time.sleep(0.02)
        for name, message in ABSURD.items():
            tensors = {"text_input": "a prompt", "max_tokens": 4, "stream": True} | absurd(name)
            responses, error = triton.stream(SCRIPTED, **tensors)
            assert responses == []
            assert message in str(error), name
            assert "Traceback" not in str(error)
        assert not slow.done()
        answer = slow.result()
    assert answer.text == "b" * 40
    assert [len(block) for block in answer.blocks] == [1] * 40


def test_refusals_are_invalid_arguments_on_both_models(server: SimpleNamespace, triton) -> None:
    with pytest.raises(InferenceServerException) as refused:
        triton.infer(UNARY, text_input="Hello", max_tokens=4, beam_width=2)
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert post(server, f"{UNARY}/generate", {"text_input": "Hello", "max_tokens": 4, "beam_width": 2})[0] == 400
    responses, error = triton.stream(STREAMING, text_input="Hello", max_tokens=-1, stream=True)
    assert responses == []
    assert error is not None


def test_the_unary_model_names_the_one_that_streams(triton) -> None:
    with pytest.raises(InferenceServerException, match="expected false or the model tensorrt_llm_bls"):
        triton.infer(UNARY, text_input="Hello", max_tokens=4, stream=True)


def test_a_temperature_alone_samples_and_leaves_a_note(ask, server: SimpleNamespace) -> None:
    start = Path(server.log).stat().st_size
    draws = {tuple(ask("Hello", temperature=1.0, seed=seed, max_tokens=4).ids) for seed in range(4)}
    assert len(draws) > 1
    assert logged(server, start, "temperature 1 without top_k and top_p")


# Several texts in one request


def rows(**tensors: list) -> dict[str, np.ndarray]:
    """A value for each text, as tensors of shape [texts, 1]."""
    kinds = {str: np.object_, int: np.int32, bool: np.bool_, float: np.float32}
    return {
        name: np.array(
            [[value.encode() if isinstance(value, str) else value] for value in values],
            dtype=np.uint64 if name == "seed" else kinds[type(values[0])],
        )
        for name, values in tensors.items()
    }


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_several_texts_are_what_each_is_alone(ask, triton, sampling: dict[str, object]) -> None:
    lengths, count = [24, 9, 1, 24, 30], len(PROMPTS)
    alone = [
        ask(prompt, seed=seed, max_tokens=length, **sampling)
        for seed, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True))
    ]
    settings = {name: [value] * count for name, value in {**sampling, "exclude_input_in_output": True}.items()}
    tensors = rows(text_input=PROMPTS, max_tokens=lengths, seed=list(range(count)), **settings)

    responses, error = triton.stream(STREAMING, **tensors, **rows(stream=[True] * count))
    assert error is None
    assert [response["final"] for response in responses] == [False] * (len(responses) - 1) + [True]
    for index, expected in enumerate(alone):
        own = [response for response in responses if response["batch_index"] == index]
        assert [token for response in own for token in response["output_ids"].reshape(-1)] == expected.ids
        assert "".join(response["text_output"] for response in own) == expected.text
        assert len(own) == len(expected.responses)
        assert own[-1]["finish_reason"] == expected.last["finish_reason"]

    whole = triton.infer(UNARY, **tensors)
    assert whole["output_ids"].shape == (count, 30)
    assert whole["num_output_tokens"].reshape(-1).tolist() == [len(expected.ids) for expected in alone]
    for row, expected in zip(whole["output_ids"].reshape(count, -1), alone, strict=True):
        assert row[: len(expected.ids)].tolist() == expected.ids
    assert whole["text_output"] == "".join(expected.text for expected in alone)


# Logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def logits_of(answer: SimpleNamespace) -> np.ndarray:
    """[n, V] of all responses of a stream."""
    return np.concatenate([response["generation_logits"][0, 0] for response in answer.responses])


def log_probs_of(answer: SimpleNamespace) -> np.ndarray:
    return np.concatenate([response["output_log_probs"].reshape(-1) for response in answer.responses])


ROWS = {"return_generation_logits": True, "return_log_probs": True, "temperature": 0.0}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("sampling", [{}, SAMPLED | {"seed": 3, "use_draft_logits": False}], ids=["greedy", "sampled"])
def test_logits_with_drafts_are_those_without(ask, triton, prompt: str, sampling: dict[str, object]) -> None:
    settings = ROWS | sampling
    plain, drafted = (ask(prompt, num_draft_tokens=count, **settings) for count in (0, 5))
    assert drafted.ids == plain.ids
    assert drafted.last["total_accepted_draft_tokens"] > 0
    assert logits_of(plain).shape == logits_of(drafted).shape == (len(plain.ids), VOCAB)
    np.testing.assert_allclose(logits_of(drafted), logits_of(plain), atol=1e-4)
    np.testing.assert_allclose(log_probs_of(drafted), log_probs_of(plain), atol=1e-4)
    for response in drafted.responses:
        assert response["generation_logits"].shape[2] == response["output_ids"].size
    unary = triton.infer(UNARY, text_input=prompt, max_tokens=24, num_draft_tokens=5, **settings)
    np.testing.assert_allclose(unary["generation_logits"][0, 0], logits_of(plain), atol=1e-4)


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_sampled_tokens_have_the_probability_of_their_logits(ask, num_draft_tokens: int) -> None:
    """Accepted by the draft's logits, the text is another one than without drafts; what belongs to it is checked."""
    settings = ROWS | {"temperature": 0.8, "top_p": 1.0, "seed": 4, "use_draft_logits": True}
    answer = ask("Hello", num_draft_tokens=num_draft_tokens, max_tokens=40, **settings)
    logits = logits_of(answer)
    assert logits.shape == (len(answer.ids), VOCAB)
    of_ids = log_softmax(logits / 0.8)[np.arange(len(answer.ids)), answer.ids]
    np.testing.assert_allclose(log_probs_of(answer), of_ids, atol=1e-4)


def test_an_end_id_has_no_logits(ask) -> None:
    for settings, count in ((biased("</s>"), 0), (biased("</s>") | {"min_tokens": 3}, 3)):
        answer = ask("Hello", num_draft_tokens=3, **ROWS, **settings)
        assert (len(answer.ids), answer.last["finish_reason"]) == (count, "stop")
        assert logits_of(answer).shape == (count, VOCAB)


# Draft lengths and metrics


@pytest.mark.parametrize("policy", ["adaptive", "schedule"])
def test_no_policy_of_draft_lengths_changes_a_greedy_text(ask, policy: str) -> None:
    """Also when several requests change the load."""
    alone = [ask(prompt, max_tokens=60).text for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for answers in (
            [ask(prompt, f"bls_{policy}", max_tokens=60) for prompt in PROMPTS],
            list(pool.map(lambda prompt: ask(prompt, f"bls_{policy}", max_tokens=60), PROMPTS)),
        ):
            assert [answer.text for answer in answers] == alone
            if policy == "schedule":
                assert all(answer.last["total_draft_tokens"] > 0 for answer in answers[:1])


def counted(server: SimpleNamespace, model: str) -> dict[str, float]:
    """The pipeline's metrics on the endpoint: `drafts_total`, `requests_total length`."""
    with urllib.request.urlopen(server.metrics, timeout=60) as response:
        text = response.read().decode()
    found = {}
    for name, labels, value in re.findall(r"^trtspec_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if values.pop("model") == model:
            found[" ".join((name, *values.values()))] = float(value)
    return found


def test_the_metrics_are_those_of_the_responses(ask, server: SimpleNamespace) -> None:
    def settled() -> dict[str, float]:
        time.sleep(1.2)  # written twice a second
        return counted(server, STREAMING)

    before = settled()
    answers = [ask(prompt, num_draft_tokens=count) for prompt in PROMPTS[:3] for count in (0, 2, 5)]
    with pytest.raises(InferenceServerException):
        ask("")
    after = settled()
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    totals = {
        name: sum(answer.last[name] for answer in answers)
        for name in ("total_draft_tokens", "total_accepted_draft_tokens", "total_target_passes")
    }
    assert change["draft_tokens_total"] == totals["total_draft_tokens"] > 0
    assert change["accepted_tokens_total"] == totals["total_accepted_draft_tokens"] > 0
    assert change["target_passes_total"] == totals["total_target_passes"]
    assert change["cycles_total"] == sum(len(answer.responses) for answer in answers)
    assert change["emitted_tokens_total"] == sum(len(answer.ids) for answer in answers)
    assert change["requests_total length"] == len(answers)
    assert change["requests_total refused"] == 1
    at_positions = [change[f"accepted_at_position_total {position}"] for position in range(1, 6)]
    assert sum(at_positions) == totals["total_accepted_draft_tokens"]
    assert at_positions == sorted(at_positions, reverse=True)
    assert sum(value for name, value in change.items() if name.startswith("fallbacks")) == 0
    assert after["requests_in_flight"] == 0
