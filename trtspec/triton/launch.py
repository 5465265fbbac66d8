"""Start Triton inside its container: as many processes as the engines need, models one after another, and a watch.

The compose file mounts this file into the stock image and runs it there, so it imports the standard library only.
Models are loaded in order because a KV cache takes a part of the memory that is free when its model loads; Triton by
itself loads them in any order. The watch sends real requests through the whole pipeline, since Triton goes on calling a
model ready whose process died or hangs; a server that does not answer is ended, and the restart policy of the container
brings it back. Engines share the server's process here, so none is loaded again alone, and an engine that only drafts
is not missed: the pipeline goes on without it, as its metrics show.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

# in the order of loading
ENGINE_MODELS = (
    *("tensorrt_llm_draft", "tensorrt_llm_draft_2", "tensorrt_llm_draft_3", "tensorrt_llm_draft_4"),
    *("tensorrt_llm_middle_3", "tensorrt_llm_middle_2", "tensorrt_llm_middle", "tensorrt_llm"),
)
UNARY_MODEL = "tensorrt_llm_bls_unary"
TARGET_MODEL = LLMAPI_MODEL = "tensorrt_llm"
SAYS = "launch: "  # before every line of the launcher's own
CONTROL_KEY = "trtspec-control"
RESTRICTED = "model-repository,shared-memory,trace,logging"  # whoever loads a model may bring code along
EXIT_TIMEOUT_S = 30
KILL_AFTER_S = EXIT_TIMEOUT_S + 5
_MODELS_END_S = 5.0  # together less than a container is given to stop
PROBE_TIMEOUT_S = 60.0
WATCH_PERIOD_S = 30.0
_FULL = "texts are waiting"  # what the pipeline says when it takes no more
_FULL_WAIT_S = 5.0
PROBES_FAILED = 3  # in a row, until the server counts as dead


class LaunchFailed(Exception):
    """The server did not start, or stopped answering; the message is one line."""


class _NotInTime(LaunchFailed):
    """No answer yet."""


class _StopRequested(BaseException):
    """SIGTERM or SIGINT."""


def options_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="launch.py", description="Start Triton, load its models in order, watch it.")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="MPI processes; 1 starts no mpirun")
    parser.add_argument(
        "--orchestrator",
        choices=("off", "spawn", "ranks"),
        default="off",
        help="engines in worker processes, which the backend spawns, or which are the ranks from 1 on",
    )
    parser.add_argument("--num-gpus", type=int, default=1, metavar="N", help="GPUs of the container")
    parser.add_argument("--llmapi", action="store_true", help="the repository of an LLM API model")
    parser.add_argument("--gpus", metavar="IDS", help="GPUs that all processes may use, such as 1,3; default: all")
    parser.add_argument("--repository", type=Path, default=Path("/models"), metavar="DIR", help="model repository")
    parser.add_argument("--http-port", type=int, default=8000, metavar="PORT", help="port of HTTP")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="longest start")
    parser.add_argument("--watch-period", type=float, default=WATCH_PERIOD_S, metavar="S", help="between two probes")
    parser.add_argument("--probe", action="store_true", help="send one request to a running server, and end")
    parser.add_argument("--dry-run", action="store_true", help="print the command and the order of loading, and end")
    parser.add_argument("extra", nargs="*", metavar="OPTION", help="further options of tritonserver, after --")
    return parser


def server_command(options: argparse.Namespace, key: str, models: Sequence[str]) -> list[str]:
    """The command that starts all processes of the server.

    Args:
        options: of `options_parser`.
        key: what Triton asks of those who load models.
        models: names of the models in the repository.
    """
    common = [f"--model-repository={options.repository}", "--model-control-mode=explicit"]
    # Completing configurations would start every model's process twice.
    common += ["--disable-auto-complete-config", f"--exit-timeout-secs={EXIT_TIMEOUT_S}"]
    if options.orchestrator == "spawn":
        # The workers need this memory; the orchestrator's process computes nothing.
        common += ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"]
        common += [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(options.num_gpus)]
    first = [
        *("tritonserver", *common, f"--http-port={options.http_port}"),
        f"--http-restricted-api={RESTRICTED}:{CONTROL_KEY}={key}",
        f"--grpc-restricted-protocol={RESTRICTED}:{CONTROL_KEY}={key}",
        *(_shared_memory(0), *options.extra),
    ]
    mpirun = ["mpirun", "--allow-run-as-root"]
    if options.llmapi:
        # The launcher of the LLM API runs the command in rank 0 and a worker of its own in every other rank.
        every = [*mpirun, "-n", str(options.ranks), "trtllm-llmapi-launch"] if options.ranks > 1 else []
        return [*every, *first]
    if options.ranks == 1 and options.orchestrator == "off":
        return first
    command = [*mpirun, "-n", "1", *first]
    for rank in range(1, options.ranks):
        # A further rank holds its part of the engines and listens to nobody.
        loads = [f"--load-model={model}" for model in models if model in ENGINE_MODELS]
        deaf = [f"--allow-{protocol}=false" for protocol in ("http", "grpc", "metrics")]
        command += [":", "-n", "1", "tritonserver", *common, *loads, *deaf, _shared_memory(rank)]
    return command


def models_in_order(repository: Path) -> list[str]:
    """Models of the repository, the engines first and the target last of them.

    Raises:
        LaunchFailed: there are none.
    """
    found = {path.parent.name for path in repository.glob("*/config.pbtxt")}
    if not found:
        raise LaunchFailed(f"{repository}: no model here")
    engines = [name for name in ENGINE_MODELS if name in found]
    return [*engines, *sorted(found - {*engines})]


def launch(options: argparse.Namespace) -> None:
    """Run the server until a signal comes.

    Raises:
        LaunchFailed: it does not start, dies, or does not answer any more.
    """
    models = models_in_order(options.repository)
    key = secrets.token_hex(16)
    command = server_command(options, key, models)
    if options.dry_run:
        print(shlex.join(command).replace(key, "KEY"))
        print("then load:", *models)
        return
    environment = dict(os.environ)
    if options.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = options.gpus
    if options.orchestrator != "off":
        environment["TRTLLM_ORCHESTRATOR"] = "1"
        environment["TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"] = str(int(options.orchestrator == "spawn"))
    address, deadline = _address(options), time.monotonic() + options.timeout
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        _wait_until_live(server, address, deadline)
        for model in models:
            _load(server, address, model, key, deadline)
            print(f"{SAYS}loaded {model}", flush=True)
        _watch(server, options)
    finally:
        _end(server)


def probe(address: str, llmapi: bool, timeout_s: float = PROBE_TIMEOUT_S) -> None:
    """Send one request for one token through the whole pipeline of the server at `address`, host:port of its HTTP.

    Raises:
        LaunchFailed: no answer, or one without text.
    """
    # A model that can stream answers generate_stream only; what streams of the LLM API is its only model.
    model, length = (LLMAPI_MODEL, "sampling_param_max_tokens") if llmapi else (UNARY_MODEL, "max_tokens")
    body = json.dumps({"text_input": "Hello", length: 1}).encode()
    for call in ("generate", "generate_stream") if llmapi else ("generate",):
        answer = _call(address, f"/v2/models/{model}/{call}", body, {}, timeout_s)
        if b'"text_output"' in answer:
            return
    raise LaunchFailed(f"model {model} answers without text: {answer[:200].decode(errors='replace')}")


def _watch(server: subprocess.Popen[bytes], options: argparse.Namespace) -> None:
    """Probe until the server ends, or has not answered several times in a row."""
    address, failed, announced = _address(options), 0, False
    # A Python model's request counts as answered once it is taken: a probe of the LLM API counts itself.
    own = 1 if options.llmapi else 0
    while True:
        before = answered(address)
        try:
            probe(address, options.llmapi, PROBE_TIMEOUT_S)
            failed = 0
            if not announced:
                print(f"{SAYS}the server answers", flush=True)
                announced = True
        except LaunchFailed as error:
            _require_alive(server)
            failed = 0 if is_busy(error, address, before + own) else failed + 1
            print(f"{SAYS}{error} ({failed} of {PROBES_FAILED})", file=sys.stderr, flush=True)
            if failed == PROBES_FAILED:
                raise LaunchFailed("the server does not answer any more") from error
        try:
            server.wait(timeout=options.watch_period)
        except subprocess.TimeoutExpired:
            continue
        _require_alive(server)


def is_busy(error: LaunchFailed, address: str, before: int) -> bool:
    """Whether a probe only came too late, or found the queue full, while others are answered.

    Args:
        error: what the probe raised.
        address: host:port of the server's HTTP.
        before: what `answered` said before the probe.
    """
    if _FULL in str(error):
        time.sleep(_FULL_WAIT_S)  # it was refused at once, which leaves no time to see others answered
    elif not isinstance(error, _NotInTime):
        return False
    return answered(address) > before


def answered(address: str) -> int:
    """Calls that the target has answered so far; 0 if the server does not say.

    Not those of the pipeline, which takes them, and thereby counts them, whether or not they can be answered; nor those
    of a draft, whose answers are worth nothing without the target's.
    """
    try:
        stats = json.loads(_call(address, f"/v2/models/{TARGET_MODEL}/stats", None, {}, 5.0))["model_stats"]
        return sum(int(version["inference_stats"]["success"]["count"]) for version in stats)
    except (LaunchFailed, ValueError, LookupError, TypeError):
        return 0


def _address(options: argparse.Namespace) -> str:
    return f"127.0.0.1:{options.http_port}"


def _wait_until_live(server: subprocess.Popen[bytes], address: str, deadline: float) -> None:
    while True:
        _require_alive(server)
        try:
            _call(address, "/v2/health/live", None, {}, 2.0)
            return
        except LaunchFailed:
            if time.monotonic() > deadline:
                raise LaunchFailed("the server does not open its port") from None
        time.sleep(0.2)


def _load(server: subprocess.Popen[bytes], address: str, model: str, key: str, deadline: float) -> None:
    try:
        headers = {CONTROL_KEY: key}
        _call(address, f"/v2/repository/models/{model}/load", b"{}", headers, max(deadline - time.monotonic(), 1.0))
    except LaunchFailed as error:
        _require_alive(server)
        raise LaunchFailed(f"model {model} does not load: {error}") from error


def _call(address: str, path: str, body: bytes | None, headers: dict[str, str], timeout_s: float) -> bytes:
    """One HTTP request to the server, GET without a body and POST with one; the body of its answer."""
    request = urllib.request.Request(f"http://{address}{path}", data=body, headers=headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise LaunchFailed(_message(error.read().decode(errors="replace")) or str(error)) from error
    except (OSError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", error), TimeoutError):
            raise _NotInTime(f"no answer within {timeout_s:g} s") from error
        raise LaunchFailed(str(error) or type(error).__name__) from error


def _message(answer: str) -> str:
    """Triton's error in one line, without the place in a model's source."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        answer = str(json.loads(answer)["error"])
    return " ".join(answer.split("\n\nAt:")[0].split())


def _require_alive(server: subprocess.Popen[bytes]) -> None:
    code = server.poll()
    if code is not None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise LaunchFailed(f"the server {how}")


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server in order, by force after a deadline."""
    server.terminate()
    try:
        server.wait(timeout=KILL_AFTER_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    _end_models(server.pid)


def _end_models(group: int) -> None:
    """Wait for the processes of models, which notice the end of their server a moment later, and kill who does not."""
    deadline = time.monotonic() + _MODELS_END_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-group, os.WNOHANG)  # in a container they are left to this process
            os.killpg(group, 0)
            time.sleep(0.02)
        os.killpg(group, signal.SIGKILL)


def _shared_memory(rank: int) -> str:
    """Ranks of one machine must not take each other's shared-memory regions for their own."""
    return f"--backend-config=python,shm-region-prefix-name=rank{rank}_"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when it was asked to stop, 1 when something failed."""
    options = options_parser().parse_args(arguments)

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise _StopRequested

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        if options.probe:
            probe(_address(options), options.llmapi, PROBE_TIMEOUT_S)
        else:
            launch(options)
    except _StopRequested:
        return 0
    except LaunchFailed as error:
        print(f"{SAYS}{error}", file=sys.stderr, flush=True)
        return 1
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return 0


if __name__ == "__main__":
    sys.exit(main())
