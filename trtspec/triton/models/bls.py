"""The speculative pipeline as one Triton model: text in, text out, the draft and target models called in between.

The same file is `tensorrt_llm_bls` (decoupled: every accepted block can be streamed) and `tensorrt_llm_bls_unary`
(one response a request, for clients that cannot stream). It translates between tensors and the decoding core, whose
cycles it runs once for each text of a request, each in a thread of its own, so that one process serves many requests at
the same time. That holds for both: Triton lets a model that is not decoupled answer later, from any thread, through the
request's response sender, as long as it sends one response (tried on 2.51).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from trtspec_decoding.cycle import Block, Drafter, Generation, NoDrafter, Verifier, run
from trtspec_decoding.detokenize import continuation_ids
from trtspec_decoding.engine_call import EngineError
from trtspec_decoding.methods import IN_ENGINE, METHODS, DraftEngine, calls_at_a_time, make_chain_verifier, make_drafter

from .bls_answer import Answer, Reply
from .bls_request import ClientRequest, Settings, read_requests
from .engine_model import EngineModel, Rescue
from .metrics import Metrics
from .pace import Load, MeasuredPace
from .phases import DRAFT, VERIFY, Phases
from .tensors import Inputs, Refused
from .threads import Departure, Departures, Outbox, Watch, Workers
from .tokenization import Tokenization

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
        self._watch, self._departures, self.load = Watch(), Departures(), Load(settings.max_concurrency)
        self._counts_passes = settings.method not in IN_ENGINE  # else several tokens come out of a pass, unseen here
        self.metrics = Metrics(
            args["model_name"], max_draft_len=settings.max_draft_len, counts_passes=self._counts_passes
        )
        self._engines = self._make_engines()
        row = METHODS.get(settings.method)
        self._proposers = [self._engines[role] for role in (row.proposers(settings.engines) if row else ())]
        self._outbox = Outbox()
        self.workers = Workers(settings.max_concurrency, "request")

    def _make_engines(self) -> dict[str, EngineModel]:
        settings = self._settings
        row = METHODS.get(settings.method)
        proposers = row.proposers(settings.engines) if row else ()
        num_calls = calls_at_a_time(settings.method, settings.drafting, len(proposers))
        phases = Phases() if settings.alternate_phases else None
        engines = {}
        num_ids = settings.vocab_size
        for role, engine in settings.engines.items():  # what one answers, those before it must know
            is_target = role == "target"
            num_ids = min(settings.vocab_size if role in proposers else num_ids, engine.vocab_size)
            engines[role] = EngineModel(
                engine.name,
                vocab_size=engine.vocab_size,
                num_ids=num_ids,
                logits_dtype=settings.logits_dtype,
                timeout_s=settings.call_timeout_s if is_target else settings.draft_timeout_s,
                watch=self._watch,
                max_calls=settings.max_concurrency * num_calls,
                rest_s=0.0 if is_target else settings.draft_rest_s,
                phases=phases,
                phase=VERIFY if is_target else DRAFT,
            )
        return engines

    def execute(self, requests: list[Any]) -> None:
        """Accept requests; the answers come through their response senders."""
        for request in requests:
            self._accept(request, request.get_response_sender(), time.time_ns())

    def finalize(self) -> None:
        """Finish what is under way."""
        self.workers.close()
        self._outbox.close()
        self._watch.close()
        for engine in self._engines.values():
            engine.close()
        self.metrics.close()

    def _accept(self, request: Any, sender: Any, arrival_ns: int) -> None:
        """Read a request and queue its texts; what is wrong with it is answered at once."""
        self.metrics.request_began()
        try:
            if self.workers.num_waiting >= self._settings.max_queued:
                waiting = (
                    f"{self.workers.num_waiting} texts are waiting; expected fewer than {self._settings.max_queued}"
                )
                self._refuse(sender, f"too many requests: {waiting}", pb_utils.TritonError.UNAVAILABLE)
                return
            clients = self._read(request)
        except ValueError as error:
            self._refuse(sender, str(error), pb_utils.TritonError.INVALID_ARG)
            return
        except Exception as error:
            pb_utils.Logger.log_error(f"request {request.request_id()!r} cannot be read: {error!r}")
            self._refuse(sender, f"internal error: {error!r}", pb_utils.TritonError.INTERNAL)
            return
        departure = self._departures.watch(request.is_cancelled)

        def ending(finish_reason: str) -> None:
            departure.end()  # the request is gone with its last response
            self.metrics.request_ended(finish_reason)

        wanted = request.requested_output_names()
        streams = clients[0].stream or (self._streams and len(clients) > 1)  # a response a text, where there can be
        reply = Reply(sender, self._outbox, wanted, len(clients), streams, self._settings.pad_id, ending)
        self.load.add(len(clients))
        for index, client in enumerate(clients):
            answer = Answer(client, index, arrival_ns, wanted, self._counts_passes)
            text = Text(client, answer, reply, departure, self)
            self.workers.submit(text.serve)

    def _read(self, request: Any) -> list[ClientRequest]:
        inputs = Inputs({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
        clients = read_requests(inputs, self._settings, self._tokenization)
        if clients[0].stream and not self._streams:
            raise Refused("stream is true; this model answers once, expected false or the model tensorrt_llm_bls")
        return [replace(client, request_id=request.request_id()) for client in clients]

    def _refuse(self, sender: Any, message: str, code: Any) -> None:
        self.metrics.request_ended("refused")
        try:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)), flags=_FINAL)
        except Exception as problem:  # the other requests that came with it are not to suffer
            pb_utils.Logger.log_error(f"a refusal could not be sent: {problem!r}")

    def drafter(self, client: ClientRequest, call_id: str, rescue: Callable[[str], Rescue]) -> Drafter:
        """A drafter that knows nothing yet; of a request that drafts nothing, one that proposes nothing."""
        settings = self._settings
        if not client.decoding.num_draft_tokens:
            return NoDrafter()
        engines = {
            role: DraftEngine(
                self._engines[role].for_request(call_id, rescue(role)),
                engine.context,
                engine.returns_logits,
                calls=self._engines[role].for_several(call_id, rescue(role)),
                num_ids=settings.vocab_size,
            )
            for role, engine in settings.engines.items()
        }
        return make_drafter(settings.method, engines, client.acceptance, **settings.drafting)

    def verifier(self, call_id: str, rescue: Rescue) -> Verifier:
        """The target."""
        target = self._engines["target"]
        return make_chain_verifier(
            self._settings.method, target.for_request(call_id, rescue), target.for_several(call_id, rescue)
        )

    def generation(self, client: ClientRequest, cancelled: Callable[[], bool]) -> Generation:
        """The state of one text."""
        return Generation(
            client.decoding,
            self._tokenization.decode,
            self._continuation_ids,
            cancelled,
            may_draft=client.decoding.num_draft_tokens > 0,
        )

    def pace(self, client: ClientRequest) -> MeasuredPace:
        """The pace of one text."""
        fixed = client.length_is_given or self._settings.draft_length.policy == "fixed"
        return MeasuredPace(None if fixed else self._settings.draft_length, self._proposers, self.load, self.metrics)


class Text:
    """One text of a request, from its first cycle to its last, in whatever thread.

    Args:
        client: what was asked.
        answer: makes its tensors.
        reply: sends them.
        departure: whether the client has left.
        model: what all texts share.
    """

    def __init__(
        self, client: ClientRequest, answer: Answer, reply: Reply, departure: Departure, model: TritonPythonModel
    ) -> None:
        self._client, self._answer, self._reply, self._model = client, answer, reply, model
        self._departure = departure
        self._call_id = uuid.uuid4().hex  # of our own: two clients may use the same id, and engines tell requests by it
        self._unsent: list[Block] = []

    def serve(self) -> None:
        """Generate the text; the reply is ended, whatever happens."""
        self._send(self._begin)

    def _begin(self) -> Iterator[Block]:
        departure, reply = self._departure, self._reply
        # It must not lead back to this text: a cycle of references stays, with all that the text knows, for minutes.
        self._generation = self._model.generation(self._client, lambda: departure() or reply.ended)
        self._pace = self._model.pace(self._client)
        return self._go_on()

    def _go_on(self) -> Iterator[Block]:
        drafter = self._model.drafter(self._client, self._call_id, self._rescue)
        verifier = self._model.verifier(self._call_id, self._rescue("target"))
        return run(self._generation, drafter, verifier, self._pace)

    def _send(self, blocks: Callable[[], Iterator[Block]]) -> None:
        try:
            for block in blocks():
                self._add(block)
        except EngineError as error:
            self._fail_for(error)
            return
        except Exception as error:
            pb_utils.Logger.log_error(f"a request failed: {error!r}")
            self._reply.fail(f"internal error: {error!r}", pb_utils.TritonError.INTERNAL)
        self._model.load.add(-1)

    def _rescue(self, role: str) -> Rescue:
        """Goes on in another thread when a call to `role` takes too long."""
        return lambda error: self._model.workers.add(partial(self._go_on_without, role, error))

    def _go_on_without(self, role: str, error: EngineError) -> None:
        if role == "target":
            self._fail_for(error)
            return
        self._generation.draft_failed(error)
        self._pace.draft_late(error)
        self._send(self._go_on)

    def _fail_for(self, error: EngineError) -> None:
        """The target did not answer."""
        self._model.metrics.target_error("timeout" if getattr(error, "reason", "") == "timeout" else "failed")
        self._reply.fail(str(error), pb_utils.TritonError.UNAVAILABLE)
        self._model.load.add(-1)

    def _add(self, block: Block) -> None:
        final = block.finish_reason is not None
        self._unsent.append(block)
        if final:
            self._log(block)
        if final or self._client.stream:
            self._reply.add(self._answer.index, self._answer.tensors(self._unsent), block.finish_reason)
            self._unsent = []

    def _log(self, last: Block) -> None:
        """Say what the client may not expect, and why it had to do without drafts."""
        for note in self._client.notes:
            pb_utils.Logger.log_warn(f"request {self._client.request_id!r}: {note}")
        if last.generation.draft_error is not None:
            error = last.generation.draft_error
            pb_utils.Logger.log_warn(f"request {self._client.request_id!r} went on without drafts: {error}")
