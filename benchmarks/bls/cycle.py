"""What a cycle of the pipeline costs when its engines cost nothing, beside two bare hops in the same server.

The pipeline is that of the built quickstart, its engine models replaced by `models/free_engine.py`. Every draft token
is accepted, so a request of `cycles` passes emits as many blocks. Times are the server's own, from the first block to
the last. Streams carry text and ids, as they do unless a client asks for more, and the two times and the count that are
read here.
"""

from __future__ import annotations

import shutil
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from trtspec.triton.client import CHANNEL_OPTIONS, kept_open
from trtspec.triton.server import LocalServer

MODELS = Path(__file__).parent / "models"
NUM_DRAFT_TOKENS = 4
CONTEXT = 120  # ids; about the middle of what the pipeline sends in a request
TOKEN = 253  # a letter of the quickstart's vocabulary
PROMPT = "Count from one to ten."
_ENGINES = ("tensorrt_llm", "tensorrt_llm_draft")
_BLS = "tensorrt_llm_bls"
_HOPS = "bare_hops"
_TIMES = ("first_scheduled_time_ns", "last_token_time_ns", "total_target_passes")
_TENSORS = {
    bool: ("BOOL", "bool_contents"),
    int: ("INT32", "int_contents"),
    float: ("FP32", "fp32_contents"),
    str: ("BYTES", "bytes_contents"),
}
_TIMEOUT_S = 120.0
_BARE_INPUTS = {
    "cycles": "INT32",
    "num_draft_tokens": "INT32",
    "context": "INT32",
    "with_logits": "BOOL",
    "stream": "BOOL",
}


@dataclass(frozen=True)
class Row:
    """One line of the table, in milliseconds a cycle."""

    vocab_size: int
    with_logits: bool
    num_clients: int
    streaming: bool
    bare: float
    bare_streaming: float | None
    pipeline: float

    @property
    def ratio(self) -> float:
        """Of the pipeline's time to that of two bare hops, without a response a cycle."""
        return self.pipeline / self.bare


def measure(repository: Path, root: Path, ports: tuple[int, int, int], cycles: int, rounds: int) -> Iterator[Row]:
    """The rows, smaller vocabulary first; bare hops and pipeline take turns, and the median of `rounds` counts.

    A response a cycle takes a machine with few cores its time, whoever sends it: bare hops that send one are there too.
    """
    for vocab_size in (49152, 128256):
        with _server(repository, root / str(vocab_size), ports, vocab_size) as url:
            for with_logits in (False, True):
                if not with_logits and vocab_size > 49152:
                    continue  # ids only: the vocabulary does not matter
                for num_clients in (1, 8):
                    for streaming in (True, False):
                        bare, bare_streaming, pipeline = [], [], []
                        for _ in range(rounds):
                            bare.append(_bare(url, num_clients, cycles, with_logits))
                            if streaming:
                                bare_streaming.append(_bare(url, num_clients, cycles, with_logits, stream=True))
                            pipeline.append(_pipeline(url, num_clients, cycles, with_logits, streaming))
                        yield Row(
                            vocab_size,
                            with_logits,
                            num_clients,
                            streaming,
                            statistics.median(bare),
                            statistics.median(bare_streaming) if streaming else None,
                            statistics.median(pipeline),
                        )


@contextmanager
def _server(repository: Path, root: Path, ports: tuple[int, int, int], vocab_size: int) -> Iterator[str]:
    """gRPC address of a server on a copy of the repository with free engines."""
    models = root / "models"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(repository, models)
    shutil.rmtree(models / "ensemble")
    for name in _ENGINES:
        _free(models / name, vocab_size)
    for config in models.glob("tensorrt_llm_bls*/config.pbtxt"):
        text = config.read_text()
        config.write_text(text.replace('string_value: "49152"', f'string_value: "{vocab_size}"'))
    hops = models / _HOPS / "1"
    hops.mkdir(parents=True)
    shutil.copyfile(MODELS / "bare_hops.py", hops / "model.py")
    inputs = "\n".join(
        f'input {{ name: "{name}" data_type: TYPE_{kind} dims: 1 }}' for name, kind in _BARE_INPUTS.items()
    )
    (hops.parent / "config.pbtxt").write_text(
        f'name: "{_HOPS}"\nbackend: "python"\nmax_batch_size: 8\n{inputs}\n'
        "model_transaction_policy { decoupled: true }\n"
        'output { name: "seconds" data_type: TYPE_FP32 dims: -1 }\n'
        f'parameters {{ key: "token" value {{ string_value: "{TOKEN}" }} }}\n'
        "instance_group { count: 1 kind: KIND_CPU }\n"
    )
    server = LocalServer(
        models,
        engines_root=root,
        http_port=ports[0],
        grpc_port=ports[1],
        metrics_port=ports[2],
        num_threads=1,
        state_dir=root / "state",
    )
    with server:
        yield server.state.grpc_url


def _free(model: Path, vocab_size: int) -> None:
    """Turn an engine model into one that costs nothing; its tensors stay."""
    config = model / "config.pbtxt"
    kept = config.read_text().split("parameters {", 1)[0].replace('backend: "tensorrtllm"', 'backend: "python"')
    config.write_text(
        kept
        + "\n".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
            for key, value in {"vocab_size": vocab_size, "token": TOKEN}.items()
        )
        + "\n"
    )
    shutil.copyfile(MODELS / "free_engine.py", model / "1" / "model.py")


def _bare(url: str, num_clients: int, cycles: int, with_logits: bool, *, stream: bool = False) -> float:
    """Milliseconds that two bare hops take, in the aggregate of so many clients."""
    values = {
        "cycles": cycles,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "context": CONTEXT,
        "with_logits": with_logits,
        "stream": stream,
    }
    answers = _side_by_side(url, _HOPS, num_clients, values)
    return 1e3 * max(answer.as_numpy("seconds").item() for answer in answers) / (cycles * num_clients)


def _pipeline(url: str, num_clients: int, cycles: int, with_logits: bool, streaming: bool) -> float:
    """Milliseconds that a cycle of the pipeline takes, in the aggregate of so many clients."""
    values = {
        "text_input": PROMPT,
        "max_tokens": cycles * (NUM_DRAFT_TOKENS + 1),
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "stream": streaming,
        "return_perf_metrics": True,
        "end_id": -1,
    }
    if with_logits:
        values |= {"temperature": 1.0, "top_p": 1.0, "use_draft_logits": True}
    answers = _side_by_side(url, _BLS, num_clients, values, ("text_output", "output_ids", *_TIMES))
    times = [tuple(int(answer.as_numpy(name).item()) for name in _TIMES) for answer in answers]
    if any(passes != cycles for *_, passes in times):
        raise RuntimeError(f"not {cycles} target passes each, but {times}: not every draft was accepted")
    wall = max(ended for _, ended, _ in times) - min(began for began, _, _ in times)
    return wall / 1e6 / sum(passes for _, _, passes in times)


def _side_by_side(
    url: str, model: str, num_clients: int, values: Mapping[str, object], outputs: Sequence[str] = ()
) -> list[Any]:
    """The last response that each of so many clients gets, all asking the same at the same time.

    What comes before is not looked at, and not even parsed: clients share the cores with the server.
    """
    from tritonclient.grpc import InferResult, service_pb2

    request = service_pb2.ModelInferRequest(model_name=model)
    for name, value in values.items():
        datatype, contents = _TENSORS[type(value)]
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        getattr(tensor.contents, contents).append(value.encode() if isinstance(value, str) else value)
    for name in outputs:
        request.outputs.add(name=name)
    with ExitStack() as stack:
        calls = [
            stack.enter_context(grpc.insecure_channel(url, CHANNEL_OPTIONS)).stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=service_pb2.ModelInferRequest.SerializeToString,
                response_deserializer=None,
            )
            for _ in range(num_clients)
        ]
        ready = threading.Barrier(num_clients)
        mark = service_pb2.ModelInferResponse()
        mark.parameters["triton_final_response"].bool_param = True
        final, error = mark.SerializeToString(), b"\n"  # within the last message; the first byte of one with an error

        def ask(call: Any) -> Any:
            answered = threading.Event()
            ready.wait()
            try:
                for message in call(kept_open(request, answered), timeout=_TIMEOUT_S, wait_for_ready=True):
                    if final in message or message.startswith(error):
                        answered.set()
            finally:
                answered.set()
            answer = service_pb2.ModelStreamInferResponse.FromString(message)
            if answer.error_message:
                raise RuntimeError(f"{model}: {answer.error_message}")
            return InferResult(answer.infer_response)

        with ThreadPoolExecutor(num_clients) as threads:
            return list(threads.map(ask, calls))
