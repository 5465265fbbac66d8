"""What a cycle of the pipeline costs when its engines cost nothing, beside two bare hops in the same server.

The pipeline is that of the built quickstart, its engine models replaced by `models/free_engine.py`. Every draft token
is accepted, so a request of `cycles` passes emits as many blocks. Times are the server's own, from the first block to
the last.
"""

from __future__ import annotations

import shutil
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtspec.triton.server import LocalServer

MODELS = Path(__file__).parent / "models"
NUM_DRAFT_TOKENS = 4
CONTEXT = 120  # ids; about the middle of what the pipeline sends in a request
TOKEN = 253  # a letter of the quickstart's vocabulary
PROMPT = "Count from one to ten."
_ENGINES = ("tensorrt_llm", "tensorrt_llm_draft")
_BLS = "tensorrt_llm_bls"
_HOPS = "bare_hops"
_BARE_INPUTS = {"cycles": "INT32", "num_draft_tokens": "INT32", "context": "INT32", "with_logits": "BOOL"}


@dataclass(frozen=True)
class Row:
    """One line of the table, in milliseconds a cycle."""

    vocab_size: int
    with_logits: bool
    num_clients: int
    streaming: bool
    bare: float
    pipeline: float

    @property
    def ratio(self) -> float:
        """Of the pipeline's time to that of two bare hops."""
        return self.pipeline / self.bare


def measure(repository: Path, root: Path, ports: tuple[int, int, int], cycles: int, rounds: int) -> Iterator[Row]:
    """The rows, smaller vocabulary first; bare hops and pipeline take turns, and the median of `rounds` counts."""
    for vocab_size in (49152, 128256):
        with _server(repository, root / str(vocab_size), ports, vocab_size) as url:
            for with_logits in (False, True):
                if not with_logits and vocab_size > 49152:
                    continue  # ids only: the vocabulary does not matter
                for num_clients in (1, 8):
                    for streaming in (True, False):
                        bare, pipeline = [], []
                        for _ in range(rounds):
                            bare.append(_bare(url, num_clients, cycles, with_logits))
                            pipeline.append(_pipeline(url, num_clients, cycles, with_logits, streaming))
                        yield Row(
                            vocab_size,
                            with_logits,
                            num_clients,
                            streaming,
                            statistics.median(bare),
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
        'output { name: "seconds" data_type: TYPE_FP32 dims: 1 }\n'
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


def _bare(url: str, num_clients: int, cycles: int, with_logits: bool) -> float:
    """Milliseconds that two bare hops take, in the aggregate of so many clients."""
    values = {"cycles": cycles, "num_draft_tokens": NUM_DRAFT_TOKENS, "context": CONTEXT, "with_logits": with_logits}

    def ask(client: Any) -> float:
        inputs = [_tensor(name, values[name], kind) for name, kind in _BARE_INPUTS.items()]
        return float(_stream(client, _HOPS, inputs)[-1].as_numpy("seconds").item())

    return 1e3 * max(_side_by_side(url, num_clients, ask)) / (cycles * num_clients)


def _pipeline(url: str, num_clients: int, cycles: int, with_logits: bool, streaming: bool) -> float:
    """Milliseconds that a cycle of the pipeline takes, in the aggregate of so many clients."""
    max_tokens = cycles * (NUM_DRAFT_TOKENS + 1)

    def ask(client: Any) -> tuple[int, int, int]:
        inputs = [
            _tensor("text_input", PROMPT.encode(), "BYTES"),
            _tensor("max_tokens", max_tokens, "INT32"),
            _tensor("num_draft_tokens", NUM_DRAFT_TOKENS, "INT32"),
            _tensor("stream", streaming, "BOOL"),
            _tensor("return_perf_metrics", True, "BOOL"),
            _tensor("end_id", -1, "INT32"),
        ]
        if with_logits:
            inputs += [_tensor("temperature", 1.0, "FP32"), _tensor("seed", 1, "UINT64")]
            inputs += [_tensor("use_draft_logits", True, "BOOL")]
        last = _stream(client, _BLS, inputs)[-1]
        names = ("first_scheduled_time_ns", "last_token_time_ns", "total_target_passes")
        began, ended, passes = (int(last.as_numpy(name).item()) for name in names)
        if passes != cycles:
            raise RuntimeError(f"{passes} target passes where {cycles} were expected: not every draft was accepted")
        return began, ended, passes

    times = _side_by_side(url, num_clients, ask)
    wall = max(ended for _, ended, _ in times) - min(began for began, _, _ in times)
    return wall / 1e6 / sum(passes for _, _, passes in times)


def _side_by_side(url: str, num_clients: int, ask: Any) -> list[Any]:
    """What `ask` gives for each of so many clients at the same time."""
    import tritonclient.grpc as grpcclient

    results: list[Any] = [None] * num_clients
    ready = threading.Barrier(num_clients)

    def work(number: int) -> None:
        try:
            with grpcclient.InferenceServerClient(url) as client:
                ready.wait()
                results[number] = ask(client)
        except RuntimeError as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors := [result for result in results if isinstance(result, RuntimeError)]:
        raise errors[0]
    return results


def _stream(client: Any, model: str, inputs: list[Any]) -> list[Any]:
    """All responses to one request."""
    done, responses, errors = threading.Event(), [], []

    def receive(result: Any, error: Any) -> None:
        if error is not None:
            errors.append(error)
            done.set()
            return
        responses.append(result)
        if result.get_response().parameters["triton_final_response"].bool_param:
            done.set()

    client.start_stream(receive)
    client.async_stream_infer(model, inputs, enable_empty_final_response=True)
    done.wait(120)
    client.stop_stream()
    if errors or not responses:
        raise RuntimeError(f"{model}: {errors[0] if errors else 'no answer'}")
    return [response for response in responses if response.get_response().outputs]


def _tensor(name: str, value: object, kind: str) -> Any:
    import tritonclient.grpc as grpcclient

    dtypes = {"INT32": np.int32, "BOOL": np.bool_, "BYTES": np.object_, "FP32": np.float32, "UINT64": np.uint64}
    tensor = grpcclient.InferInput(name, [1, 1], kind)
    tensor.set_data_from_numpy(np.array([[value]], dtype=dtypes[kind]))
    return tensor
