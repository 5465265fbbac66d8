"""OpenAI's own client against the front end, the real Triton server and the whole pipeline behind it.

What the answers should be is asked of the server directly, without the front end.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from trtspec.openai.answers import CompletionAnswer
from trtspec.triton.client import Client

PROMPT = "the target verifies"
HELLO: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
HELLO_PROMPT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
MODEL = "tiny"
FULL = {"ignore_eos": True}  # as long as max_tokens says
COMPLETION = {"model": MODEL, "prompt": PROMPT}
CHAT = {"model": MODEL, "messages": HELLO}
LONG = 200


@pytest.fixture(scope="module")
def client(api: SimpleNamespace) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=api.url, api_key="any", max_retries=0, timeout=100) as connected:
        yield connected


@pytest.fixture(scope="module")
def pipeline(api: SimpleNamespace) -> Iterator[Client]:
    """The server itself."""
    with Client(api.grpc) as connected:
        yield connected


def post(api: SimpleNamespace, path: str, body: Any) -> tuple[int, str]:
    """Status and body of a request by hand."""
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=100)
    text = body if isinstance(body, str) else json.dumps(body)
    connection.request("POST", path, text, {"Content-Type": "application/json"})
    response = connection.getresponse()
    status, answer = response.status, response.read().decode()
    connection.close()
    return status, answer


def test_the_model_is_listed_under_its_names(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "tensorrt_llm_bls"]
    assert client.models.retrieve(MODEL).owned_by == "trtspec"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another")
    assert caught.value.code == "model_not_found"


def test_a_completion_is_the_pipelines_answer_with_its_figures(client: openai.OpenAI, pipeline: Client) -> None:
    expected = pipeline.complete(PROMPT, max_tokens=24, end_id=-1)
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, extra_body=FULL)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == MODEL
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, expected.text, "length")
    ]
    usage, stats = answer.usage, expected.stats
    assert usage is not None and usage.completion_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (stats.input_tokens, 24)
    assert usage.total_tokens == usage.prompt_tokens + 24
    details = usage.completion_tokens_details
    assert 0 < stats.accepted < stats.drafted, "the draft of this test is neither always right nor always wrong"
    assert details.accepted_prediction_tokens == stats.accepted
    assert details.rejected_prediction_tokens == stats.drafted - stats.accepted


def test_without_max_tokens_a_completion_has_sixteen(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, extra_body=FULL)
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_without_max_tokens_a_chat_fills_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, extra_body=FULL)
    assert answer.usage is not None and answer.usage.total_tokens == 256
    assert answer.choices[0].finish_reason == "length"


def test_a_chat_goes_through_the_models_template(client: openai.OpenAI, pipeline: Client) -> None:
    expected = pipeline.complete(HELLO_PROMPT, max_tokens=12, end_id=-1)
    parts: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "hello", "refusal": None},
    ]
    for messages in (HELLO, parts):
        for limit in ({"max_tokens": 12}, {"max_completion_tokens": 12}):
            answer = client.chat.completions.create(
                model=MODEL, messages=messages, temperature=0, extra_body=FULL | limit
            )
            assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
            assert answer.choices[0].message.content == expected.text


def test_a_streamed_completion_is_the_same_in_pieces(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**settings, extra_body=FULL)
    pieces = list(client.completions.create(**settings, extra_body=FULL, stream=True))
    texts = [piece.choices[0].text for piece in pieces]
    assert "".join(texts) == whole.choices[0].text
    assert len([text for text in texts if text]) >= 24 / (3 + 1)
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len({piece.id for piece in pieces}) == 1 and all(piece.usage is None for piece in pieces)


def test_a_streamed_chat_begins_with_the_role_and_ends_with_usage(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 24, "seed": 5, "logprobs": True}
    whole = client.chat.completions.create(**settings)
    stream = client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    *pieces, last = list(stream)
    assert pieces[0].choices[0].delta.role == "assistant" and pieces[0].choices[0].delta.content == ""
    assert all(piece.choices[0].delta.role is None for piece in pieces[1:])
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    scores = [piece.choices[0].logprobs.content for piece in pieces if piece.choices[0].logprobs]
    assert whole.choices[0].logprobs is not None
    assert [score for piece in scores for score in piece or ()] == whole.choices[0].logprobs.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(piece.usage is None for piece in pieces)
    assert last.choices == [] and last.usage == whole.usage
    assert whole.usage is not None and whole.usage.completion_tokens > 0


def test_a_stream_is_server_sent_events(api: SimpleNamespace) -> None:
    body = COMPLETION | {"max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    status, text = post(api, "/v1/completions", body)
    *events, done, nothing = text.split("\n\n")
    assert (status, done, nothing) == (200, "data: [DONE]", "")
    objects = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [event["usage"] for event in objects[:-1]] == [None] * (len(objects) - 1)
    assert objects[-1]["choices"] == [] and objects[-1]["usage"]["completion_tokens"] <= 4
    unasked = post(api, "/v1/completions", body | {"stream_options": None})[1].split("\n\n")[:-2]
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in unasked)


def test_openais_defaults_sample_and_a_seed_repeats(client: openai.OpenAI) -> None:
    def ask(**settings: Any) -> str:
        return client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, **settings).choices[0].text

    assert ask() != ask()
    assert ask(seed=3) == ask(seed=3) != ask(seed=4)
    assert ask(seed=-1) == ask(seed=2**64 - 1), "OpenAI's seeds have a sign"
    greedy = ask(temperature=0)
    assert ask(top_p=0, seed=1) == ask(temperature=1, extra_body={"top_k": 1}) == greedy
    assert ask(seed=3, temperature=0.1) != ask(seed=3)
    assert ask(seed=3, top_p=0.2) != ask(seed=3)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_arrive(client: openai.OpenAI, pipeline: Client, name: str) -> None:
    expected = pipeline.complete(PROMPT, max_tokens=24, **{name: 2.0}).text
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, **{name: 2.0})
    assert answer.choices[0].text == expected != pipeline.complete(PROMPT, max_tokens=24).text


def test_settings_beyond_openais_arrive(client: openai.OpenAI, pipeline: Client) -> None:
    settings = {"repetition_penalty": 1.5, "min_tokens": 20, "num_draft_tokens": 1}
    expected = pipeline.complete(PROMPT, max_tokens=24, **settings)
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, extra_body=settings)
    assert answer.choices[0].text == expected.text and answer.usage is not None
    assert answer.usage.completion_tokens == expected.stats.tokens >= 20
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.rejected_prediction_tokens == expected.stats.drafted - expected.stats.accepted


def test_several_prompts_with_several_answers_each(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "extra_body": FULL}
    prompts = [PROMPT, "what the draft proposes"]
    answer = client.completions.create(prompt=prompts, n=2, seed=7, **settings)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and len(set(texts)) == 4
    singles = [client.completions.create(prompt=prompt, seed=7, **settings) for prompt in prompts]
    assert [texts[0], texts[2]] == [single.choices[0].text for single in singles]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(single.usage.prompt_tokens for single in singles if single.usage)
    assert answer.usage.completion_tokens == 4 * 12
    streamed = [""] * 4
    for piece in client.completions.create(prompt=prompts, n=2, seed=7, stream=True, **settings):
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert streamed == texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_before_it(client: openai.OpenAI, pipeline: Client, stream: bool) -> None:
    full = pipeline.complete(PROMPT, max_tokens=40, end_id=-1).text
    stop = full[20:23]
    for stops in (stop, ["never in it", stop]):
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0, stop=stops, stream=stream, extra_body=FULL
        )
        choices = [piece.choices[0] for piece in answer] if stream else [answer.choices[0]]
        assert "".join(choice.text for choice in choices) == full[: full.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_log_probs_are_the_pipelines(client: openai.OpenAI, pipeline: Client) -> None:
    chunks = list(pipeline.generate(PROMPT, max_tokens=24, log_probs=True, end_id=-1))
    expected = [value for chunk in chunks for value in chunk.log_probs or ()]
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, logprobs=1, extra_body=FULL
    ).choices[0]
    scores = answer.logprobs
    assert scores is not None and scores.tokens is not None and scores.text_offset is not None
    assert scores.token_logprobs == pytest.approx(expected, abs=1e-4) and len(expected) == 24
    assert scores.top_logprobs == [
        {text: value} for text, value in zip(scores.tokens, scores.token_logprobs or (), strict=True)
    ]
    for begin, end, token in zip(scores.text_offset, [*scores.text_offset[1:], None], scores.tokens, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert answer.text[begin:end] == token
    plain = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, logprobs=0).choices[0].logprobs
    assert plain is not None and plain.top_logprobs is None and plain.token_logprobs


def test_log_probs_of_a_chat_carry_bytes(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=24, temperature=0, logprobs=True, top_logprobs=1, extra_body=FULL
    ).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content
    spelled = b"".join(bytes(score.bytes or ()) for score in choice.logprobs.content if "<|" not in score.token)
    assert spelled.decode("utf-8", "replace") == choice.message.content
    assert all(score.top_logprobs[0].logprob == score.logprob < 0 for score in choice.logprobs.content)


def test_a_bias_on_a_token(client: openai.OpenAI, pipeline: Client) -> None:
    settings: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "extra_body": FULL}
    forced = client.completions.create(**settings, logit_bias={"40": 100}, logprobs=0).choices[0]
    assert forced.logprobs is not None and forced.logprobs.tokens is not None
    assert len(set(forced.logprobs.tokens)) == 1 and forced.text == forced.logprobs.tokens[0] * 6
    greedy = pipeline.complete(PROMPT, max_tokens=6, end_id=-1)
    first = next(token for token in greedy.output_ids or () if 3 <= token < 97)  # a printable ASCII character
    banned = client.completions.create(**settings, temperature=0, logit_bias={str(first): -100}).choices[0]
    assert chr(first - 3 + ord("!")) in greedy.text and chr(first - 3 + ord("!")) not in banned.text


def test_echo_and_prompts_as_ids(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    answer = client.completions.create(prompt="abc", **settings).choices[0].text
    for stream in (False, True):
        echoed = client.completions.create(prompt=["abc", "abd"], echo=True, stream=stream, **settings)
        texts = ["", ""]
        for piece in echoed if stream else [echoed]:
            for choice in piece.choices:
                texts[choice.index] += choice.text
        assert texts[0] == "abc" + answer and texts[1].startswith("abd")
    first = ord("a") - ord("!") + 3  # single bytes come after the three special tokens
    ids = [first, first + 1, first + 2]
    for prompt in (ids, [ids]):
        given = client.completions.create(prompt=prompt, echo=True, **settings)  # type: ignore[arg-type]
        assert given.choices[0].text == "abc" + answer


TOOL = {"type": "function", "function": {"name": "f"}}
REFUSED = [  # body, field at fault, words of the message
    (COMPLETION | {"prompt": ""}, "prompt", "is empty"),
    (COMPLETION | {"prompt": []}, "prompt", "empty"),
    (COMPLETION | {"prompt": 5}, "prompt", "valid string or"),
    (COMPLETION | {"prompt": ["a", 5]}, "prompt", "valid string"),
    (COMPLETION | {"prompt": [5, 9999]}, "prompt", "no token 9999; expected 0 to 279"),
    (COMPLETION | {"prompt": [100]}, "prompt", "other ids"),
    (COMPLETION | {"prompt": "a " * 200}, "prompt", "has 400 tokens; expected 1 to 128"),
    (COMPLETION | {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    (COMPLETION | {"max_tokens": "5"}, "max_tokens", "valid integer"),
    (COMPLETION | {"max_tokens": 2**40}, "max_tokens", "less than"),
    (COMPLETION | {"min_tokens": 17}, "min_tokens", "at most max_tokens (16)"),
    (COMPLETION | {"temperature": 2.5}, "temperature", "less than or equal to 2"),
    (COMPLETION | {"top_p": -0.1}, "top_p", "greater than or equal to 0"),
    (COMPLETION | {"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    (COMPLETION | {"n": 129}, "n", "128"),
    (COMPLETION | {"n": 65, "prompt": ["a", "b"]}, "n", "128 answers together"),
    (COMPLETION | {"best_of": 2}, "best_of", "expected n (1)"),
    (COMPLETION | {"stop": list("abcde")}, "stop", "at most 4"),
    (COMPLETION | {"stop": ["a", ""]}, "stop", "empty text"),
    (COMPLETION | {"logprobs": 2, "temperature": 0}, "logprobs", "chosen token only"),
    (COMPLETION | {"logprobs": 1}, "logprobs", "expected 0, or 1 with temperature 0"),
    (COMPLETION | {"logprobs": 0, "echo": True}, "echo", "not scored"),
    (COMPLETION | {"logit_bias": {"a": 1}}, "logit_bias", "'a' is no token id"),
    (COMPLETION | {"logit_bias": {"280": 1}}, "logit_bias", "no token 280"),
    (COMPLETION | {"logit_bias": {"100": 1}}, "logit_bias", "token 100 has no text of its own"),
    (COMPLETION | {"logit_bias": {"40": 101}}, "logit_bias", "less than or equal to 100"),
    (COMPLETION | {"suffix": "end"}, "suffix", "only continues"),
    (COMPLETION | {"num_draft_tokens": 4}, "num_draft_tokens", "verifies at most 3"),
    (COMPLETION | {"stream_options": {"include_usage": True}}, "stream_options", "expected stream true"),
    (COMPLETION | {"foo": 1}, "foo", "Unrecognized request argument supplied: foo"),
    (COMPLETION | {"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo", "Unrecognized"),
    ({"prompt": PROMPT}, "model", "required"),
    (CHAT | {"messages": []}, "messages", "at least 1"),
    (CHAT | {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "'system', 'developer'"),
    (CHAT | {"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    (CHAT | {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "valid string or"),
    (
        CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        "type 'image_url'; the pipeline takes and gives text only",
    ),
    (
        CHAT | {"messages": [{"role": "assistant", "content": "", "tool_calls": [TOOL]}]},
        "messages[0].tool_calls",
        "text only",
    ),
    (CHAT | {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "max_completion_tokens is 4"),
    (CHAT | {"top_logprobs": 1}, "top_logprobs", "expected logprobs true"),
    (CHAT | {"logprobs": True, "top_logprobs": 2, "temperature": 0}, "top_logprobs", "chosen token only"),
    (CHAT | {"tools": [TOOL]}, "tools", "calls no tools"),
    (CHAT | {"tool_choice": "required"}, "tool_choice", "calls no tools"),
    (CHAT | {"response_format": {"type": "json_object"}}, "response_format", "expected type text"),
    (CHAT | {"store": True}, "store", "not stored"),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_honoured_is_refused_by_name(
    api: SimpleNamespace, body: dict[str, Any], param: str, words: str
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, text = post(api, path, body)
    error = json.loads(text)["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"] and set(error) == {"message", "type", "param", "code"}


def test_fields_without_a_part_in_the_answer_pass(api: SimpleNamespace) -> None:
    passing = {"user": "me", "metadata": {"a": "b"}, "tools": [], "tool_choice": "auto", "store": False, "n": None}
    passing |= {"response_format": {"type": "text"}, "service_tier": "auto", "modalities": ["text"], "tools": None}
    status, text = post(api, "/v1/chat/completions", CHAT | passing | {"max_tokens": 2})
    assert status == 200, text


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_pipeline_has_its_status_also_when_streamed(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a " * 200, stream=stream)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "words"),
    [
        ("/v1/completions", "{", 400, None, "the body is not JSON"),
        ("/v1/completions", "[]", 400, None, "the body: "),
        ("/v1/nothing", "{}", 404, "unknown_url", "POST /v1/nothing"),
        ("/v1/models", "{}", 405, "unknown_url", "Method Not Allowed"),
        ("/v1/completions", json.dumps(COMPLETION | {"model": "other"}), 404, "model_not_found", "'other'"),
    ],
)
def test_other_errors_have_openais_shape_too(
    api: SimpleNamespace, path: str, body: str, status: int, code: str | None, words: str
) -> None:
    got, text = post(api, path, body)
    error = json.loads(text)["error"]
    assert (got, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert words in error["message"]


def test_sixteen_clients_at_once(api: SimpleNamespace, client: openai.OpenAI) -> None:
    start = threading.Barrier(16)

    def ask(i: int, connected: openai.OpenAI) -> tuple[str, float, float]:
        texts, times = [], []
        stream = connected.completions.create(
            model=MODEL, prompt=f"{i} {PROMPT}", max_tokens=48, seed=i, stream=True, extra_body=FULL
        )
        for piece in stream:
            texts.append(piece.choices[0].text)
            times.append(time.monotonic())
        return "".join(texts), times[0], times[-1]

    def together(i: int) -> tuple[str, float, float]:
        with openai.OpenAI(base_url=api.url, api_key="any", max_retries=0, timeout=100) as own:
            start.wait(timeout=60)
            return ask(i, own)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(together, range(16)))
    assert max(first for _, first, _ in answers) < min(last for _, _, last in answers), "they waited for each other"
    for i in (0, 15):
        assert answers[i][0] == ask(i, client)[0]


@pytest.fixture
def target_calls(api: SimpleNamespace) -> Callable[[], int]:
    """How often the target has been called so far."""
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    with Client(api.grpc) as connected:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(connected._channel)

        def count() -> int:
            statistics = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name="tensorrt_llm"), timeout=30)
            return int(statistics.model_stats[0].inference_stats.success.count)

        yield count


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_generation(
    api: SimpleNamespace, target_calls: Callable[[], int], stream: bool
) -> None:
    body = COMPLETION | FULL | {"max_tokens": LONG, "num_draft_tokens": 1, "stream": stream, "n": 2}
    before = target_calls()
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=100)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    while (begun := target_calls() - before) < 4:
        time.sleep(0.005)
    connection.close()
    at_least = 2 * LONG / 2  # calls: two answers, at most two tokens a call
    assert begun < at_least / 2, "too late to tell"
    seen = -1
    while seen != (seen := target_calls() - before):
        time.sleep(0.5)
    assert seen < at_least * 0.75


def test_text_offsets_are_those_of_the_whole_stream() -> None:
    """Pieces of one choice go on counting where the last one ended."""
    from trtspec.openai.requests import Job
    from trtspec.triton.client import Chunk

    tokens: Any = SimpleNamespace(bytes_of=lambda token_id: b"ab"[token_id : token_id + 1], is_special=lambda _: False)
    job = Job(inputs=[{}], num_prompts=1, echoes=[""], log_probs=True, likeliest=False)
    answer = CompletionAnswer(MODEL, job, tokens)
    offsets = [answer.pieces(0, Chunk("a", [0], None, [-1.0]))[0]["logprobs"]["text_offset"] for _ in range(2)]
    assert offsets == [[0], [1]]
