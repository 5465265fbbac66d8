"""The speculative pipeline as one Triton model: text in, text out, the draft and target models called in between.

The same file is `tensorrt_llm_bls` (decoupled: every accepted block can be streamed) and `tensorrt_llm_bls_unary`
(one response a request, for clients that cannot stream). It translates between tensors and the decoding core, whose
cycle it runs once a request, each in a thread of its own, so that one process serves many requests at the same time.
That holds for both: Triton lets a model that is not decoupled answer later, from any thread, through the request's
response sender, as long as it sends one response (tried on 2.51).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from trtspec_decoding.cycle import Block, Drafter, generate
from trtspec_decoding.detokenize import continuation_ids
from trtspec_decoding.engine_call import EngineError
from trtspec_decoding.methods import IN_ENGINE, METHODS, DraftEngine, calls_at_a_time, make_chain_verifier, make_drafter

from .bls_request import ClientRequest, Settings, read_request
from .engine_model import EngineModel
from .tensors import Inputs, Refused
from .tokenization import Tokenization

_CANCEL_POLL_S = 0.0005  # asking is a round trip to the server process, and the cycle asks twice before a draft
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """One process of the model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the settings, load the tokenizer that lies beside this file; engines are called when needed."""
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        try:
            settings = Settings.parse(parameters)
        except ValueError as error:
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from None
        self._settings = settings
        self._streams = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self._tokenization = Tokenization(
            Path(__file__).with_name("tokenizer.json"),
            bos_token_id=settings.bos_token_id,
            add_bos=settings.add_bos,
            skip_special_tokens=settings.skip_special_tokens,
        )
        self._continuation_ids = continuation_ids(self._tokenization.token_to_id)
        self._engines: dict[str, EngineModel] = {}
        row = METHODS.get(settings.method)
        proposers = row.proposers(settings.engines) if row else ()
        num_calls = calls_at_a_time(settings.method, settings.drafting, len(proposers))
        num_ids = settings.vocab_size
        for role, engine in settings.engines.items():  # what one answers, those before it must know
            above = settings.vocab_size if role in proposers else num_ids
            num_ids = min(above, engine.vocab_size)
            self._engines[role] = EngineModel(
                engine.name,
                vocab_size=engine.vocab_size,
                num_ids=num_ids,
                logits_dtype=settings.logits_dtype,
                timeout_s=settings.call_timeout_s,
                max_calls=settings.max_concurrency * num_calls,
                rest_s=0.0 if role == "target" else settings.draft_rest_s,
            )
        self._requests = ThreadPoolExecutor(settings.max_concurrency, thread_name_prefix="request")

    def execute(self, requests: list[Any]) -> None:
        """Hand each request to a thread; the answers come through their response senders."""
        for request in requests:
            self._requests.submit(self._serve, request, request.get_response_sender(), time.time_ns())

    def finalize(self) -> None:
        """Finish what is under way."""
        self._requests.shutdown()
        for engine in self._engines.values():
            engine.close()

    def _serve(self, request: Any, sender: Any, arrival_ns: int) -> None:
        """Answer one request. Whatever happens, the sender gets exactly one final response."""
        try:
            try:
                client = self._read(request)
            except ValueError as error:
                _send_error(sender, str(error), pb_utils.TritonError.INVALID_ARG)
                return
            in_engine = self._settings.method in IN_ENGINE
            answer = Answer(client, request.requested_output_names(), arrival_ns, counts_passes=not in_engine)
            waiting: list[Block] = []
            for block in self._blocks(client, request):
                waiting.append(block)
                if block.finish_reason is not None:
                    _log(request, client, block)
                    sender.send(answer.response(waiting), flags=_FINAL)
                elif client.stream:
                    sender.send(answer.response(waiting))
                    waiting.clear()
        except EngineError as error:
            _send_error(sender, str(error), pb_utils.TritonError.UNAVAILABLE)
        except Exception as error:
            pb_utils.Logger.log_error(f"request {request.request_id()!r} failed: {error!r}")
            _send_error(sender, f"internal error: {error!r}", pb_utils.TritonError.INTERNAL)

    def _read(self, request: Any) -> ClientRequest:
        inputs = Inputs({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
        client = read_request(inputs, self._settings, self._tokenization)
        if client.stream and not self._streams:
            raise Refused("stream is true; this model answers once, expected false or the model tensorrt_llm_bls")
        return client

    def _blocks(self, client: ClientRequest, request: Any) -> Iterator[Block]:
        """Run the decoding cycle for one request."""
        # ids of our own: two clients may use the same one, and an engine tells requests apart by it
        call_id = uuid.uuid4().hex
        target = self._engines["target"]
        return generate(
            client.decoding,
            self._drafter(client, call_id),
            make_chain_verifier(self._settings.method, target.for_request(call_id), target.for_several(call_id)),
            decode=self._tokenization.decode,
            continuation_ids=self._continuation_ids,
            cancelled=Cancellation(request),
        )

    def _drafter(self, client: ClientRequest, call_id: str) -> Drafter | None:
        """The drafter of one generation; None when nothing is drafted out here."""
        if not client.decoding.num_draft_tokens:
            return None
        settings = self._settings
        engines = {
            role: DraftEngine(
                self._engines[role].for_request(call_id),
                engine.context,
                engine.returns_logits,
                calls=self._engines[role].for_several(call_id),
                num_ids=settings.vocab_size,
            )
            for role, engine in settings.engines.items()
        }
        return make_drafter(settings.method, engines, client.acceptance, **settings.drafting)


class Cancellation:
    """Whether the client has left; asked before every call to an engine."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._asked = 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._asked < _CANCEL_POLL_S:
            return False
        self._asked = now
        return bool(self._request.is_cancelled())


class Answer:
    """The responses to one request: new text with its ids, and with the last of it counters of the whole generation."""

    def __init__(self, client: ClientRequest, wanted: list[str], arrival_ns: int, counts_passes: bool) -> None:
        self._client = client
        self._wanted = frozenset(wanted)
        self._arrival_ns = arrival_ns
        self._counts_passes = counts_passes  # an engine that drafts by itself makes several tokens a pass, unseen here
        self._scheduled_ns = time.time_ns()
        self._first_ns = 0
        self._prefix = "" if client.exclude_input else client.prompt
        self._cum_log_prob = 0.0

    def response(self, blocks: list[Block]) -> Any:
        """Response that carries `blocks`, the new ones since the last response."""
        outputs = self._outputs(blocks)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in outputs.items() if name in self._wanted]
        )

    def _outputs(self, blocks: list[Block]) -> dict[str, np.ndarray]:
        self._first_ns = self._first_ns or time.time_ns()
        text = self._prefix + "".join(block.text for block in blocks)
        self._prefix = ""
        outputs = {
            "text_output": _text(text),
            "output_ids": np.array([[token for block in blocks for token in block.token_ids]], dtype=np.int32),
        }
        if self._client.decoding.return_log_probs:
            log_probs = [value for block in blocks for value in block.log_probs or ()]
            self._cum_log_prob += sum(log_probs)
            outputs["output_log_probs"] = np.array([[log_probs]], dtype=np.float32)
            outputs["cum_log_probs"] = np.array([[self._cum_log_prob]], dtype=np.float32)
        # every tensor costs some 30 us a response, so what only matters in the end is sent in the end
        return outputs if blocks[-1].finish_reason is None else outputs | self._totals(blocks[-1])

    def _totals(self, last: Block) -> dict[str, np.ndarray]:
        generation, acceptance = last.generation, last.generation.acceptance
        totals = {
            "finish_reason": _text(last.finish_reason or ""),
            "batch_index": _int32(0),
            "sequence_index": _int32(0),
            "num_input_tokens": _int32(len(self._client.decoding.prompt_ids)),
            "num_output_tokens": _int32(generation.num_generated),
            "acceptance_rate": np.array([[acceptance.rate]], dtype=np.float32),
            "total_accepted_draft_tokens": _int32(acceptance.num_accepted),
            "total_draft_tokens": _int32(acceptance.num_drafted),
            "total_target_passes": _int32(acceptance.num_target_passes if self._counts_passes else 0),
        }
        if self._client.return_perf_metrics:
            times_ns = (self._arrival_ns, self._scheduled_ns, self._first_ns, time.time_ns())
            names = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
            totals |= {
                name: np.array([[time_ns]], dtype=np.int64) for name, time_ns in zip(names, times_ns, strict=True)
            }
        return totals


def _log(request: Any, client: ClientRequest, last: Block) -> None:
    """Say what the client may not expect, and why it had to do without drafts."""
    for note in client.notes:
        pb_utils.Logger.log_warn(f"request {request.request_id()!r}: {note}")
    error = last.generation.draft_error
    if error is not None:
        pb_utils.Logger.log_warn(f"request {request.request_id()!r} went on without drafts: {error}")


def _send_error(sender: Any, message: str, code: Any) -> None:
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)), flags=_FINAL)


def _text(text: str) -> np.ndarray:
    return np.array([[text.encode("utf-8")]], dtype=np.object_)


def _int32(value: int) -> np.ndarray:
    return np.array([[value]], dtype=np.int32)
