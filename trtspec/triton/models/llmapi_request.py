"""What a client asks of the LLM API model: its tensors as arguments of SamplingParams, or the reason why not.

Knows the names of the model's inputs and what this deployment cannot honour. Knows nothing of Triton's API, and does
not import tensorrt_llm.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .tensors import Inputs, Refused

_NOT_SUPPORTED = {
    "this deployment takes text only": ("image_url",),
    "the model is loaded without LoRA": ("lora_id", "lora_name", "lora_path", "lora_ckpt_source"),
}
# Outputs that come when the client asks for them.
OPTIONAL_OUTPUTS = ("finish_reason", "stop_reason", "cumulative_logprob")


@dataclass(frozen=True)
class Settings:
    """Defaults and limits of the model, from the parameters in config.pbtxt."""

    exclude_input: bool
    greedy_only: bool
    penalties: bool
    call_timeout_s: float
    gpu_device_ids: str | None

    @classmethod
    def parse(cls, parameters: Mapping[str, str]) -> Settings:
        """Read the parameters.

        Raises:
            ValueError: one is missing or malformed; the message names it.
        """
        try:
            return cls(
                exclude_input=parameters["exclude_input_in_output"] == "true",
                greedy_only=parameters["greedy_only"] == "true",
                penalties=parameters["penalties"] == "true",
                call_timeout_s=float(parameters["call_timeout_s"]),
                gpu_device_ids=parameters.get("gpu_device_ids"),
            )
        except KeyError as error:
            raise ValueError(f"parameter {error.args[0]} is missing from config.pbtxt") from None


@dataclass(frozen=True)
class ClientRequest:
    """One request, understood: the prompt, the arguments of SamplingParams, and how to answer."""

    prompt: str
    sampling: dict[str, Any]
    stream: bool
    exclude_input: bool
    outputs: frozenset[str]
    return_perf_metrics: bool


def read_request(inputs: Inputs, settings: Settings) -> ClientRequest:
    """Translate the tensors of one request.

    Raises:
        ValueError: something is missing, out of range or not supported; the message names the tensor.
    """
    for reason, names in _NOT_SUPPORTED.items():
        inputs.refuse(names, reason)
    text = inputs.array("text_input")
    if text is not None and text.size != 1:
        raise Refused(f"text_input has shape {list(text.shape)}; expected one text a request")
    prompt = inputs.text("text_input")
    if not prompt:
        raise Refused("text_input is empty; expected some text")
    best_of = inputs.integer("sampling_param_best_of", 1)
    if best_of != 1:
        raise Refused(f"sampling_param_best_of is {best_of}; one answer is generated a request, expected 1")
    outputs = frozenset(name for name in OPTIONAL_OUTPUTS if inputs.flag(f"return_{name}"))
    perf_metrics = inputs.flag("sampling_param_return_perf_metrics")
    arguments: dict[str, Any] = {
        "max_tokens": inputs.integer("sampling_param_max_tokens", minimum=1),
        "stop": inputs.words("sampling_param_stop") or None,
        "return_perf_metrics": perf_metrics or None,
        "logprobs": 1 if "cumulative_logprob" in outputs else None,
        **_penalties(inputs, settings),
        **_sampling(inputs, settings),
    }
    return ClientRequest(
        prompt=prompt,
        sampling={name: value for name, value in arguments.items() if value is not None},
        stream=inputs.flag("streaming"),
        exclude_input=inputs.flag("sampling_param_exclude_input_from_output", settings.exclude_input),
        outputs=outputs,
        return_perf_metrics=perf_metrics,
    )


def _sampling(inputs: Inputs, settings: Settings) -> dict[str, Any]:
    """Temperature, top-k, top-p and seed; nothing for the likeliest token at every step."""
    temperature = inputs.number("sampling_param_temperature")
    top_k = inputs.integer("sampling_param_top_k", minimum=0)
    top_p = inputs.number("sampling_param_top_p")
    seed = inputs.integer("sampling_param_seed")
    if temperature is not None and temperature < 0:
        raise Refused(f"sampling_param_temperature is {temperature}; expected 0 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise Refused(f"sampling_param_top_p is {top_p}; expected more than 0, at most 1")
    # As the LLM API reads them: top-k 0 and top-p 1 restrict nothing, and ask for no sampling by themselves.
    asking = {
        "temperature": temperature,
        "top_k": top_k if top_k != 0 else None,
        "top_p": top_p if top_p != 1 else None,
    }
    name = next((name for name, value in asking.items() if value is not None), None)
    if name is None or temperature == 0 or top_k == 1:
        return {}
    if settings.greedy_only:
        raise Refused(
            f"sampling_param_{name} is {asking[name]}; this TensorRT-LLM decodes greedily with these drafts, expected "
            "no sampling inputs or temperature 0"
        )
    # Without a seed every answer is a new draw; left out, every request would be drawn with the same one.
    return {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": secrets.randbits(63) if seed is None else seed,
    }


def _penalties(inputs: Inputs, settings: Settings) -> dict[str, Any]:
    penalties = {}
    for name in ("frequency_penalty", "presence_penalty"):
        value = inputs.number(f"sampling_param_{name}")
        if value and not settings.penalties:
            raise Refused(f"sampling_param_{name} is {value}; drafts are verified without penalties, expected 0")
        penalties[name] = value or None
    return penalties
