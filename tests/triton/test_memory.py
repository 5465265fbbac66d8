"""Memory of a server under load: what Triton keeps of a stream, and how the soak tells a leak from what fills up."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from trtspec.triton.client import STREAMING_MODEL, Client, generation_request, kept_open

BLS = Path(__file__).parents[2] / "benchmarks" / "bls"
MIB = 1 << 20
SECONDS = [2.0 * number for number in range(300)]
WARM_UP, REQUESTS = 150, 400
MOST_BYTES_A_REQUEST = 2048  # of a stream that it does not let go, Triton 2.51 keeps three times as much


@pytest.fixture(scope="module")
def soak() -> Iterator[Any]:
    """The module, imported as if its directory had been started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BLS))
        import soak

        yield soak


def noisy(size_mib: Callable[[float], float], seed: int) -> list[float]:
    random = Random(seed)
    return [(size_mib(at) + random.gauss(0, 0.3)) * MIB for at in SECONDS]


# A leak and what fills up


def test_what_fills_up_settles(soak: Any) -> None:
    lines = [soak.trend(SECONDS, noisy(lambda at: 100 + 20 * (1 - math.exp(-at / 90)), seed)) for seed in range(50)]
    assert not any(line.steady for line in lines)
    assert all(line.settling for line in lines)
    assert soak.Soaked({"server": lines[0]}, {"stop": 1}).steady


@pytest.mark.parametrize("mib_an_hour", [0.0, 20.0, 250.0])
def test_a_leak_never_settles(soak: Any, mib_an_hour: float) -> None:
    lines = [soak.trend(SECONDS, noisy(lambda at: 100 + mib_an_hour * at / 3600, seed)) for seed in range(300)]
    assert sum(line.settling for line in lines) <= 6  # by chance: three standard errors of few degrees of freedom
    if mib_an_hour == 250.0:
        assert not any(line.settling or soak.Soaked({"server": line}, {"stop": 1}).steady for line in lines)


def test_a_leak_shows_behind_what_fills_up_first(soak: Any) -> None:
    line = soak.trend(SECONDS, noisy(lambda at: 100 + 5 * (1 - math.exp(-at / 90)) + 100 * at / 3600, 1))
    assert not line.steady and not line.settling


def test_few_pieces_do_not_tell(soak: Any) -> None:
    assert not soak.trend(SECONDS, [100 * MIB] * 150 + [50 * MIB] * 150, pieces=5).settling


def test_files_and_shared_memory_are_not_private(soak: Any, tmp_path: Path) -> None:
    import mmap

    (tmp_path / "file").write_bytes(b"x" * (32 * MIB))
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        before = soak._private(os.getpid(), "this", SimpleNamespace())
        assert sum(pages[at] for at in range(0, 32 * MIB, 4096)) == 120 * 8192
        assert soak._private(os.getpid(), "this", SimpleNamespace()) - before < 8 * MIB
    # Pages of its own: a large process may have room for them that is resident already.
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        before = soak._private(os.getpid(), "this", SimpleNamespace())
        held.write(os.urandom(MIB) * 32)
        assert soak._private(os.getpid(), "this", SimpleNamespace()) - before > 0.9 * len(held)


# The real server


def test_the_server_keeps_nothing_of_a_stream_that_is_read_to_its_end(server: SimpleNamespace) -> None:
    import grpc
    from tritonclient.grpc import service_pb2_grpc

    with Client(server.grpc) as client:
        info = client.info(STREAMING_MODEL)
    request = generation_request(STREAMING_MODEL, info, text_input="Once", max_tokens=1, num_draft_tokens=0)

    def ask(times: int) -> None:
        for _ in range(times):
            answered = threading.Event()
            for message in stub.ModelStreamInfer(kept_open(request, answered), timeout=60.0):
                final = message.infer_response.parameters["triton_final_response"].bool_param
                if final or message.error_message:
                    answered.set()
            assert final and not message.error_message

    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        ask(WARM_UP)
        before = _server_bytes(server)
        ask(REQUESTS)
        assert _server_bytes(server) - before < REQUESTS * MOST_BYTES_A_REQUEST


def _server_bytes(server: SimpleNamespace) -> int:
    """Private memory of the server's own process."""
    port = f"--grpc-port={server.grpc.rpartition(':')[2]}"
    (pid,) = (
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and port.encode() in _command_line(entry)
    )
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def _command_line(process: Path) -> list[bytes]:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
