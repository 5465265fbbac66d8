"""What a body means to the pipeline, where that depends on the model."""

from __future__ import annotations

from typing import Any

import pytest

from trtspec.openai.errors import ApiError
from trtspec.openai.requests import ChatRequest, CompletionRequest, chat_job, completion_job
from trtspec.triton.client import ModelInfo

TOKENS: Any = None  # these requests need none


def info(chat_template: str | None = None, **parameters: str) -> ModelInfo:
    return ModelInfo(True, True, frozenset(), frozenset(), chat_template, {"bos_token": "<s>"}, parameters)


def completion(model: ModelInfo, **body: Any) -> dict[str, Any]:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "a"} | body)
    (inputs,) = completion_job(request, model, TOKENS).inputs
    return inputs


def test_an_engine_that_only_decodes_greedily_does_so_unless_asked_otherwise() -> None:
    greedy_only = info(greedy_only="true")
    assert completion(greedy_only)["temperature"] == completion(greedy_only, top_p=1)["temperature"] == 0
    assert completion(greedy_only, temperature=0.5)["temperature"] == 0.5, "for the pipeline to refuse"
    assert completion(greedy_only, top_p=0.5)["temperature"] == 1
    assert completion(info())["temperature"] == completion(info())["top_p"] == 1, "OpenAI's defaults"


def test_a_chat_template_may_refuse_or_be_missing() -> None:
    body = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "a", "name": "me"}]})
    template = "{{ bos_token }}{{ messages[0]['name'] }}: {{ messages[0]['content'] }}"
    (inputs,) = chat_job(body, info(template, target_max_seq_len="64"), TOKENS).inputs
    assert (inputs["text_input"], inputs["max_tokens"]) == ("<s>me: a", 64)
    for bad, words in ((None, "no chat template"), ("{{ raise_exception('roles must alternate') }}", "must alternate")):
        with pytest.raises(ApiError, match=words) as caught:
            chat_job(body, info(bad), TOKENS)
        assert caught.value.param == "messages"
