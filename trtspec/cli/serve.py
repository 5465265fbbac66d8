"""`trtspec serve`: the Triton server on a built repository, in the foreground or detached, with or without OpenAI's API
in front of it."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import click

from trtspec.cli.common import config_argument, load, set_option

if TYPE_CHECKING:
    from trtspec.openai.process import FrontEndProcess
    from trtspec.spec.schema import Spec
    from trtspec.triton.container import ContainerServer
    from trtspec.triton.server import LocalServer
    from trtspec.triton.server_state import ServerState

    Server = LocalServer | ContainerServer

SUPERVISOR_LOG = "serve.log"
_READY = "ready:"
_PORT = click.IntRange(1, 65535)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command()
@config_argument
@set_option
@click.option("--dry-run", is_flag=True, help="Print what the container of a GPU host would be started with, and end.")
@click.option("--detach", is_flag=True, help="Return when the server is ready; end it with trtspec stop CONFIG.")
@click.option("--host", help="Address to listen on [default: 127.0.0.1, this machine only].")
@click.option("--http-port", type=_PORT, help="Port of HTTP [default: 8000].")
@click.option("--grpc-port", type=_PORT, help="Port of gRPC [default: 8001].")
@click.option("--metrics-port", type=_PORT, help="Port of the Prometheus metrics [default: 8002].")
@click.option("--openai", is_flag=True, help="Serve OpenAI's API too: /v1/models, completions, chat/completions.")
@click.option("--openai-port", type=_PORT, help="Port of OpenAI's API; implies --openai [default: 9000].")
def serve(
    config: Path,
    overrides: tuple[str, ...],
    dry_run: bool,
    detach: bool,
    openai: bool,
    openai_port: int | None,
    **serving: str | int | None,
) -> None:
    """Start the Triton server on the repository that `trtspec build CONFIG` wrote.

    With engine.runtime: tensorrt_llm this is the Triton container with TensorRT-LLM on a GPU host; elsewhere a stand-in
    executes the checkpoints. Returns 0 after Ctrl-C or trtspec stop, 1 if the server does not start or dies again and
    again.
    """
    from trtspec.openai.process import DEFAULT_PORT

    overrides += tuple(f"serving.{key}={value}" for key, value in serving.items() if value is not None)
    spec = load(config, overrides)
    if openai_port is None and openai:
        openai_port = DEFAULT_PORT
    if openai_port is not None:
        _require_openai(spec, openai_port)
    if dry_run:
        _show_container(spec)
    elif detach:
        _serve_detached(spec, config, overrides, openai_port)
    else:
        _serve(spec, openai_port)


def _show_container(spec: Spec) -> None:
    """Print the settings of the compose file, for a file that `docker compose --env-file` reads, and the command."""
    from trtspec.triton.container import compose_settings, composition

    project = composition(spec)
    click.echo(project.settings_text(compose_settings(spec)), nl=False)
    click.echo(f"# with these lines in {project.env_file}: {shlex.join(project.command('up'))}")


def _server_of(spec: Spec) -> Server:
    """The server that can serve this spec on this machine."""
    from trtspec.triton.server import LocalServer
    from trtspec.trtllm.host import look

    if spec.engine.runtime == "tensorrt_llm" and (host := look()).gpus:
        from trtspec.triton.container import ContainerServer

        return ContainerServer.from_spec(spec, host)
    server = LocalServer.from_spec(spec)
    if spec.engine.runtime == "tensorrt_llm":
        click.echo("no GPU here: the stand-in backend executes the checkpoints with PyTorch")
    return server


def _require_openai(spec: Spec, port: int) -> None:
    """Refuse what OpenAI's API cannot stand before, and a port that is given away already."""
    from trtspec.errors import TrtspecError
    from trtspec.openai.process import require_packages

    require_packages()
    if spec.engine.track == "llmapi":
        raise TrtspecError(
            "--openai speaks to the pipeline of compiled engines; the LLM API's model takes other tensors",
            where=spec.where(("engine", "track")),
            fix="leave --openai out, or serve with TensorRT-LLM's own trtllm-serve",
        )
    for name in ("http_port", "grpc_port", "metrics_port"):
        if port == getattr(spec.serving, name):
            option = f"--{name.replace('_', '-')}"
            raise TrtspecError(f"{option} and --openai-port are both {port}", fix="choose another with --openai-port")


def _front_end_of(spec: Spec, server: Server, port: int) -> FrontEndProcess:
    from trtspec.openai.process import FrontEndProcess
    from trtspec.triton.client import STREAMING_MODEL

    return FrontEndProcess(
        server.state_dir,
        host=spec.serving.host,
        port=port,
        grpc_url=server.state.grpc_url,
        tokenizer=spec.model_repo_dir / STREAMING_MODEL / "1" / "tokenizer.json",
        names=(spec.name, STREAMING_MODEL),
    )


def _serve(spec: Spec, openai_port: int | None) -> None:
    from trtspec.triton.server import ServerFailed

    server = _server_of(spec)
    front_end = None
    try:
        with _stop_signals():
            try:
                server.start()
                click.echo(f"starting the Triton server on {server.model_repo} (log: {server.log_source})")
                if openai_port is not None:
                    front_end = _front_end_of(spec, server, openai_port)
                    front_end.start()
                stats = server.wait_ready()
                drafts = "draft" in spec.models and spec.default_num_draft_tokens
                if stats is not None and drafts and not stats.drafted:
                    warning = f"warning: no draft was proposed at the first request; see {server.log_source}"
                    click.echo(warning, err=True)
                if front_end is not None:
                    front_end.wait_ready()
                    front_end.watch(click.echo)
                click.echo(f"{_READY} {_address(server.state, openai_port)}")
                click.echo("Ctrl-C stops it")
                server.supervise(click.echo)
                click.echo("stopped")
            except _StopRequested:
                click.echo("stopping")
            finally:
                _ignore_stop_signals()
                if front_end is not None:
                    front_end.stop()
                server.stop()
    except ServerFailed as failure:
        for line in failure.log_tail:
            click.echo(f"  {line}", err=True)
        raise


def _serve_detached(spec: Spec, config: Path, overrides: tuple[str, ...], openai_port: int | None) -> None:
    """Run the same command in the background, with its supervisor, and wait until it is ready or has failed."""
    from trtspec.errors import TrtspecError
    from trtspec.openai.process import running_port
    from trtspec.triton.server import state_dir_of
    from trtspec.triton.server_state import running

    state_dir = state_dir_of(spec)
    state = running(state_dir)
    if state is not None and state.ready:
        asked = (spec.serving.host, spec.serving.http_port, spec.serving.grpc_port, spec.serving.metrics_port)
        if asked != (state.host, state.http_port, state.grpc_port, state.metrics_port):
            raise TrtspecError(
                f"this configuration is already being served elsewhere (gRPC on {state.grpc_url})",
                where=state.model_repo,
                fix=f"use that server, or end it with trtspec stop {config}",
            )
        if state.outdated:
            raise TrtspecError(
                f"the running server (gRPC on {state.grpc_url}) serves an earlier build",
                where=state.model_repo,
                fix=f"run: trtspec stop {config}; then serve again",
            )
        served_on = running_port(state_dir)
        if openai_port is not None and openai_port != served_on:
            raise TrtspecError(
                f"this configuration is already being served, with OpenAI's API on port {served_on}"
                if served_on
                else "this configuration is already being served, without OpenAI's API",
                where=state.model_repo,
                fix=f"run: trtspec stop {config}; then serve again",
            )
        click.echo(f"already running: {_address(state, served_on)}")
        return
    state_dir.mkdir(parents=True, exist_ok=True)
    output = state_dir / SUPERVISOR_LOG
    settings = [word for override in overrides for word in ("--set", override)]
    settings += [] if openai_port is None else ["--openai-port", str(openai_port)]
    with output.open("ab") as sink:
        begin = sink.tell()
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "trtspec", "serve", str(config), *settings],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with _stop_signals(), output.open(encoding="utf-8", errors="replace") as said:
            said.seek(begin)
            while True:
                ended = supervisor.poll() is not None
                for line in said:
                    if line.startswith(_READY):
                        click.echo(line, nl=False)
                        click.echo(f"trtspec stop {config} ends it")
                        return
                    click.echo(line, nl=False, err=True)
                if ended:
                    sys.exit(supervisor.returncode)
                time.sleep(0.1)
    except _StopRequested:
        supervisor.terminate()
        supervisor.wait()
        raise KeyboardInterrupt from None


def _address(state: ServerState, openai_port: int | None) -> str:
    from trtspec.openai.process import url_of

    openai = "" if openai_port is None else f"OpenAI {url_of(state.host, openai_port)}, "
    return (
        f"{openai}gRPC {state.grpc_url}, HTTP http://{state.address}:{state.http_port}, "
        f"metrics http://{state.address}:{state.metrics_port}/metrics ({state.kept_by})"
    )


class _StopRequested(BaseException):
    """Ctrl-C, SIGTERM or SIGHUP."""


@contextmanager
def _stop_signals() -> Iterator[None]:
    """Turn the first of the stop signals into `_StopRequested`; later ones do not disturb what it sets off."""

    def request_stop(number: int, frame: FrameType | None) -> NoReturn:
        _ignore_stop_signals()
        raise _StopRequested

    before = {each: signal.signal(each, request_stop) for each in _STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _ignore_stop_signals() -> None:
    for each in _STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
