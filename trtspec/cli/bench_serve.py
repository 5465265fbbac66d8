"""`trtspec bench serve`: load a running server, with speculation and without, and report its times."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtspec.cli.common import load as load_config
from trtspec.cli.common import set_option
from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from trtspec.bench.serve import Observer
    from trtspec.bench.serve_prompts import Chat
    from trtspec.bench.serve_report import Report
    from trtspec.spec.schema import Spec
    from trtspec.triton.client import ModelInfo

_ARMS = ("on", "off", "adaptive", "default")
_DEFAULT_CONCURRENCY = (1, 2, 4, 8)
_MOST_CLIENTS = 512
_FEW = click.IntRange(min=1)
_FILE = click.Path(path_type=Path, dir_okay=False)
_MODEL = "tensorrt_llm_bls"


def _clients(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    try:
        numbers = [int(word) for word in text.split(",")] if text else []
    except ValueError:
        numbers = [0]
    if numbers and not 1 <= min(numbers) <= max(numbers) <= _MOST_CLIENTS:
        raise click.BadParameter(f"{text!r}; expected numbers from 1 to {_MOST_CLIENTS}, such as 1,4,16")
    return tuple(dict.fromkeys(numbers))


def _rates(context: click.Context, option: click.Parameter, text: str | None) -> tuple[float, ...]:
    try:
        rates = [float(word) for word in text.split(",")] if text else []
    except ValueError:
        rates = [0.0]
    if not all(0 < rate <= 1e4 for rate in rates):
        raise click.BadParameter(f"{text!r}; expected requests per second, above 0 and up to 10000, such as 0.5,2")
    return tuple(dict.fromkeys(rates))


def _arm_names(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in _ARMS:
            raise click.BadParameter(f"{name!r} is no arm; expected some of {','.join(_ARMS)}")
    return names


def _finite(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number to work with")
    return value


@click.command("bench serve")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@set_option
@click.option(
    "--prompts", "prompt_file", type=_FILE, help="Prompt file, JSON Lines [default: parity.prompts of CONFIG]."
)
@click.option(
    "--url", help="host:port of the server's gRPC [default: where the server of CONFIG is, or 127.0.0.1:8001]."
)
@click.option("--model", default=_MODEL, show_default=True, help="Model that is asked.")
@click.option(
    "--concurrency",
    callback=_clients,
    metavar="N,N,...",
    help="Clients at the same time, each with one request after the other (closed loop) [default: 1,2,4,8].",
)
@click.option(
    "--rate",
    "rates",
    callback=_rates,
    metavar="R,R,...",
    help="Requests per second that arrive by chance (Poisson) and wait for nobody (open loop).",
)
@click.option(
    "--arms",
    callback=_arm_names,
    metavar="ARM,ARM,...",
    help="What is compared: on (drafting), off (plain decoding), adaptive, default (what the server does by itself) "
    "[default: on,off, and adaptive where the server is].",
)
@click.option("--num-draft-tokens", type=_FEW, help="Of the arm on [default: CONFIG's, or the server's own].")
@click.option("--requests", type=_FEW, help="In a round of one arm at one load [default: each prompt, 4 a client].")
@click.option(
    "--duration",
    "seconds",
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
    help="Begin requests for so many seconds instead, in a round of one arm at one load.",
)
@click.option("--rounds", type=_FEW, default=3, show_default=True, help="Rounds; arms take turns in each.")
@click.option("--warmup", type=click.IntRange(min=0), help="Requests before the first round [default: 2 a client].")
@click.option("-n", "--max-tokens", type=_FEW, default=64, show_default=True, help="Longest answer.")
@click.option(
    "-t",
    "--temperature",
    type=click.FloatRange(0, 10),
    callback=_finite,
    default=0.0,
    show_default=True,
    help="0: greedy.",
)
@click.option("--unique", is_flag=True, help="Give every request a beginning of its own, so that no prompt is cached.")
@click.option("--raw", is_flag=True, help="Send texts as they are, without the model's chat template.")
@click.option(
    "--cache/--no-cache",
    default=True,
    help="Ask the server how much of its KV cache was reused; it costs it some 0.2 ms a response [default: ask].",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of arrivals and of sampling.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
    default=600.0,
    show_default=True,
    help="Longest wait for one answer, in seconds.",
)
@click.option(
    "--json", "json_file", type=_FILE, help="Result with every request [default: .cache/bench/NAME.serve.json]."
)
@click.option("--csv", "csv_file", type=_FILE, help="Table with a line a request.")
@click.option("--html", "html_file", type=_FILE, help="Page with plots.")
@click.option("--compare", "old_file", type=_FILE, help="Put an earlier --json file beside this run.")
@click.option("--plan", "plan_file", type=_FILE, help="Put the plan that `trtspec plan --json` wrote beside this run.")
def serve(
    config: Path | None,
    overrides: tuple[str, ...],
    prompt_file: Path | None,
    url: str | None,
    model: str,
    concurrency: tuple[int, ...],
    rates: tuple[float, ...],
    arms: tuple[str, ...] | None,
    num_draft_tokens: int | None,
    requests: int | None,
    seconds: float | None,
    rounds: int,
    warmup: int | None,
    max_tokens: int,
    temperature: float,
    unique: bool,
    raw: bool,
    cache: bool,
    seed: int,
    timeout_s: float,
    json_file: Path | None,
    csv_file: Path | None,
    html_file: Path | None,
    old_file: Path | None,
    plan_file: Path | None,
) -> None:
    """Send the prompts of a file to a running server, with speculation and without, and report how fast it is.

    What was measured is kept in FILE.partial beside the --json file until the run is over: the same command goes on
    where an interrupted one ended.
    """
    from trtspec.bench import compare
    from trtspec.bench.kept import Kept, kept_path
    from trtspec.bench.load import Sender
    from trtspec.bench.serve import Settings, chosen_arms, run, server_facts
    from trtspec.bench.serve_prompts import sent_prompts
    from trtspec.bench.serve_report import Report
    from trtspec.bench.serve_result import CONCURRENCY, RATE, Load, read
    from trtspec.prompts import read_prompts, spread
    from trtspec.triton.client import Client

    if requests and seconds:
        raise click.UsageError("--requests and --duration both say how long a round is; give one")
    if not config and not prompt_file:
        raise click.UsageError("give --prompts FILE, or CONFIG with its own prompts")
    spec = load_config(config, overrides) if config else None
    address = _address(url, spec)
    prompts_path = prompt_file or (spec.prompts_path if spec else Path())
    prompts = read_prompts(prompts_path, chats=True)
    old = read(old_file) if old_file else None
    plan = compare.read_plan(plan_file) if plan_file else []
    json_file = json_file or _default_file(spec, address)
    _check_files(json_file, csv_file, html_file)

    with Client(address) as client:
        with _explained(address):
            sender = Sender(client, model, cache=cache, timeout_s=timeout_s)
        chosen, length = chosen_arms(
            sender.info, arms, num_draft_tokens or (spec.default_num_draft_tokens if spec else None)
        )
        loads = [Load(CONCURRENCY, clients) for clients in concurrency] + [Load(RATE, rate) for rate in rates]
        settings = Settings(
            prompts=tuple(
                sent_prompts(spread(prompts, requests), None if raw else _chat(sender.info, spec), str(prompts_path))
            ),
            prompts_name=prompts_path.name,
            loads=tuple(loads or [Load(CONCURRENCY, clients) for clients in _DEFAULT_CONCURRENCY]),
            arms=chosen,
            num_draft_tokens=length,
            rounds=rounds,
            requests=requests,
            seconds=seconds,
            warmup=warmup,
            max_tokens=max_tokens,
            temperature=temperature,
            unique=unique,
            seed=seed,
        )
        asked = settings.as_dict()
        if old:
            compare.check_old(asked, old, str(old_file))
        if plan_file:
            compare.check_plan(asked, plan, str(plan_file))
        kept = Kept(kept_path(json_file), {"settings": asked, "server": server_facts(sender.info)})
        if kept.slices:
            click.echo(f"going on after {len(kept.slices)} rounds of {kept_path(json_file)}", err=True)
        try:
            with kept, _observer() as observer:
                result = run(sender, address, settings, kept, observer)
        except (KeyboardInterrupt, TrtspecError) as error:
            if kept.slices:
                said = f"{len(kept.rows)} requests are kept in {kept_path(json_file)}; the same command goes on there"
            else:
                kept.remove()
                said = "nothing was complete yet"
            if isinstance(error, TrtspecError):
                raise TrtspecError(error.problem, where=error.where, expected=error.expected, fix=said) from error
            click.echo(said, err=True)
            raise
    report = Report(result, old, old_file.name if old_file else "", plan, plan_file.name if plan_file else "")
    _write(report, json_file, csv_file, html_file)
    kept.remove()
    _show(report)


def _address(url: str | None, spec: Spec | None) -> str:
    """host:port of gRPC.

    Raises:
        TrtspecError: something else was given.
    """
    from trtspec.triton.client import DEFAULT_URL

    if url is None and spec is not None:
        from trtspec.triton.server import state_dir_of
        from trtspec.triton.server_state import connect_host, running

        state = running(state_dir_of(spec))
        return state.grpc_url if state else f"{connect_host(spec.serving.host)}:{spec.serving.grpc_port}"
    url = url or DEFAULT_URL
    host, _, port = url.rpartition(":")
    if not host or "/" in url or not (port.isdigit() and 0 < int(port) < 1 << 16):
        raise TrtspecError(
            f"{url!r} is no address", where="--url", expected="HOST:PORT of gRPC, such as 127.0.0.1:8001"
        )
    return url


@contextmanager
def _explained(address: str) -> Iterator[None]:
    """Tell nobody there from somebody who speaks another protocol.

    Raises:
        TrtspecError: there is no server, or not one of these.
    """
    import socket

    from trtspec.triton.client import ServerError, ServerGone

    try:
        yield
    except ServerGone as error:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
        except OSError:
            raise error from None
        raise _stranger(address) from error
    except ServerError as error:
        raise _stranger(address) if error.status == "UNIMPLEMENTED" else error from error


def _stranger(address: str) -> TrtspecError:
    return TrtspecError(
        "somebody listens there, but does not answer as Triton's gRPC does",
        where=address,
        fix="give the port of gRPC, 8001 unless it was changed, not that of HTTP (8000) or metrics (8002)",
    )


def _chat(info: ModelInfo, spec: Spec | None) -> Chat | None:
    """Applies the chat template: the server's, as `trtspec generate` does, else that of the spec's target."""
    from trtspec.models.tokenizer import render_chat

    if info.chat_template is not None:
        return lambda messages: render_chat(info.chat_template, messages, True, **info.special_tokens)
    if spec is None:
        return None
    from trtspec.build.sources import Sources

    source = Sources(spec).open("target")
    return source.chat if source.chat_template is not None else None


def _default_file(spec: Spec | None, address: str) -> Path:
    path = Path(".cache", "bench", f"{spec.name if spec else address.replace(':', '-')}.serve.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _check_files(json_file: Path, csv_file: Path | None, html_file: Path | None) -> None:
    """Refuse places for results before anything is measured.

    Raises:
        TrtspecError: a directory does not exist, two results have one place, or matplotlib is missing.
    """
    from trtspec.report.plots import require_matplotlib

    files = [file.absolute() for file in (json_file, csv_file, html_file) if file]
    for file in files:
        if not file.parent.is_dir():
            raise TrtspecError(f"{file.parent} is no directory", where=str(file))
    if len(set(files)) < len(files):
        raise TrtspecError("two results have one place", where=str(json_file), fix="give another name")
    if html_file:
        require_matplotlib("--html")


def _write(report: Report, json_file: Path, csv_file: Path | None, html_file: Path | None) -> None:
    from trtspec.bench.serve_page import to_html
    from trtspec.bench.serve_result import to_csv
    from trtspec.build.output import write_atomic

    forms = (
        (json_file, report.as_json),
        (csv_file, lambda: to_csv(report.result)),
        (html_file, lambda: to_html(report)),
    )
    for file, form in forms:
        if file:
            write_atomic(file, form())
            click.echo(f"written: {file}", err=True)


def _show(report: Report) -> None:
    from trtspec.bench import serve_report

    if not sys.stdout.isatty():
        click.echo("\n".join(serve_report.lines(report)))
        return
    from rich.console import Console

    console = Console()
    console.print(serve_report.table(report))
    for line in serve_report.beside_lines(report):
        console.print(line, markup=False, highlight=False)


class _Lines:
    """A line for each slice."""

    def started(self, what: str, requests: int | None) -> None:
        click.echo(f"{what}{f', {requests} requests' if requests is not None else ''}", err=True)

    def advance(self) -> None:
        """Nothing: lines are for files and pipes."""

    def progress(self, done: int, of: int) -> None:
        """Nothing: lines are for files and pipes."""


class _Bars:
    """One bar for the whole run, one for what runs now."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._all: TaskID = progress.add_task("all rounds", total=None)
        self._now: TaskID | None = None

    def started(self, what: str, requests: int | None) -> None:
        if self._now is not None:
            self._progress.remove_task(self._now)
        self._now = self._progress.add_task(what, total=requests)

    def advance(self) -> None:
        if self._now is not None:
            self._progress.advance(self._now)

    def progress(self, done: int, of: int) -> None:
        self._progress.update(self._all, total=of, completed=done)


@contextmanager
def _observer() -> Iterator[Observer]:
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, console=Console(stderr=True)) as progress:
        yield _Bars(progress)
