"""Start the real Triton server on a model repository, wait until it answers, keep it alive, end it cleanly.

The server is the one inside the nvidia-pytriton package; the engine models run on the stand-in backend, which this
module only hands the place of the engines. Knows nothing of how repositories or engines are made.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import re
import secrets
import signal
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from trtspec.errors import TrtspecError
from trtspec.triton.backend import assemble_backend_dir, server_files
from trtspec.triton.check import check_repository
from trtspec.triton.client import CONTROL_KEY, Client, GenerationStats
from trtspec.triton.life_signs import PROBE_PROMPT, PROBE_TIMEOUT_S, PROBE_TOKENS, LifeSigns
from trtspec.triton.ports import is_loopback, require_free
from trtspec.triton.server_state import (
    EXIT_TIMEOUT_S,
    KILL_AFTER_S,
    ServerState,
    build_stamp,
    clean_up,
    cpu_seconds,
    family,
    read,
    require_not_running,
)

if TYPE_CHECKING:
    from trtspec.spec.schema import Spec

LOG_FILE = "tritonserver.log"
DEAD_LOG_FILE = "tritonserver.died.log"
LOG_TAIL_LINES = 15
_WATCH_PERIOD_S = 1.0
_MAX_REVIVALS_A_MINUTE = 3
_MAX_RESTARTS, _RESTARTS_WITHIN_S = 3, 600.0
_POLL_S = 0.1
_SPINS = 20_000  # how long an OpenMP thread waits awake, in turns of a loop: about .2 ms


class ServerFailed(TrtspecError):
    """The server did not start, did not answer, or died.

    Attributes:
        log_tail: last lines of its log.
    """

    def __init__(self, problem: str, *, log: Path, fix: str | None = None) -> None:
        super().__init__(problem, where=str(log), fix=fix)
        self.log_tail = tail(log)


class _Died(ServerFailed):
    """It died while it was serving."""


class LocalServer:
    """One tritonserver process and the model processes it starts.

    Use it as a context manager (started and ready inside), or call `start`, `wait_ready`, `supervise`, `stop`.

    Args:
        model_repo: Triton model repository.
        engines_root: directory that the repository's `mount_point` stands for on this machine.
        mount_point: where the repository says the engines are.
        host: address to listen on.
        http_port, grpc_port, metrics_port: ports to listen on.
        startup_timeout_s: longest wait from start to the first answer, in seconds.
        num_threads: CPU threads of each model process; None: all cores this process may use.
        probe_interval_s: from one look whether the models still answer to the next, in seconds.
        probe_timeout_s: longest wait for the answer to one such question, in seconds.
        state_dir: directory for the record, the log and the backend directory; one server at a time.
    """

    def __init__(
        self,
        model_repo: Path,
        *,
        engines_root: Path,
        mount_point: str = "/engines",
        host: str = "127.0.0.1",
        http_port: int = 8000,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        startup_timeout_s: float = 300.0,
        num_threads: int | None = None,
        probe_interval_s: float = 30.0,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
        state_dir: Path,
    ) -> None:
        self.model_repo = model_repo
        self.engines_root = engines_root
        self.mount_point = mount_point
        self.host = host
        self.http_port = http_port
        self.grpc_port = grpc_port
        self.metrics_port = metrics_port
        self.startup_timeout_s = startup_timeout_s
        self.num_threads = num_threads or len(os.sched_getaffinity(0))
        self.probe_interval_s = probe_interval_s
        self.probe_timeout_s = probe_timeout_s
        self.state_dir = state_dir
        self.log = state_dir / LOG_FILE
        self._process: subprocess.Popen[bytes] | None = None
        self._state: ServerState | None = None
        self._deadline = 0.0
        self._watched: set[str] = set()  # model instances whose processes should be alive
        self._drafts = False  # were there for the first request

    @classmethod
    def from_spec(cls, spec: Spec) -> LocalServer:
        """The server of a built spec.

        Raises:
            TrtspecError: nothing is built yet, the repository has unfilled or unknown settings, or it is one for the
            LLM API.
        """
        if spec.engine.track == "llmapi":
            raise TrtspecError(
                "the LLM API runs on GPUs only, in the Triton container of TensorRT-LLM; the stand-in backend of the "
                "local server is for compiled engines",
                where=f"{spec.source}: engine.track",
                fix="serve on a GPU host, or build and serve with --set engine.runtime=torch --set engine.track=engine",
            )
        if not (spec.model_repo_dir / "tensorrt_llm_bls" / "config.pbtxt").is_file():
            raise TrtspecError(
                "there is no built model repository here",
                where=str(spec.model_repo_dir),
                fix=f"run: trtspec build {spec.source}",
            )
        check_repository(spec.model_repo_dir)
        serving = spec.serving
        return cls(
            spec.model_repo_dir,
            engines_root=spec.engines_dir,
            mount_point=serving.mount_point,
            host=serving.host,
            http_port=serving.http_port,
            grpc_port=serving.grpc_port,
            metrics_port=serving.metrics_port,
            startup_timeout_s=serving.startup_timeout_s,
            num_threads=serving.num_threads,
            probe_interval_s=serving.probe_interval_s,
            state_dir=state_dir_of(spec),
        )

    def __enter__(self) -> LocalServer:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def log_source(self) -> str:
        """Where to read what it writes."""
        return str(self.log)

    @property
    def state(self) -> ServerState:
        """The started server: its process, addresses and log."""
        assert self._state is not None, "start() comes first"
        return self._state

    def start(self) -> None:
        """Start the process; returns at once.

        Raises:
            TrtspecError: it cannot be started here: package missing, port taken, server already running, no repository.
        """
        binary = find_tritonserver()
        if not any(self.model_repo.glob("*/config.pbtxt")):
            raise TrtspecError("no Triton model in this directory", where=str(self.model_repo), fix="run trtspec build")
        self.state_dir.mkdir(parents=True, exist_ok=True)
        with _only_starter(self.state_dir):
            require_not_running(self.state_dir)
            require_free(
                self.host,
                {
                    "--http-port": self.http_port,
                    "--grpc-port": self.grpc_port,
                    "--metrics-port": self.metrics_port,
                },
            )
            backends = self.state_dir / "backends"
            assemble_backend_dir(backends)
            token = f"trtspec_{secrets.token_hex(6)}_"
            with self.log.open("wb") as log:
                # A session of its own: Ctrl-C in the terminal reaches the supervisor only, which ends it in order.
                self._process = subprocess.Popen(
                    [str(binary), *self._arguments(backends, token)],
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._deadline = time.monotonic() + self.startup_timeout_s
            self._state = ServerState(
                pid=self._process.pid,
                token=token,
                host=self.host,
                http_port=self.http_port,
                grpc_port=self.grpc_port,
                metrics_port=self.metrics_port,
                model_repo=str(self.model_repo),
                engines_root=str(self.engines_root),
                build=build_stamp(self.model_repo, self.engines_root),
                log=str(self.log),
            )
            try:
                # The command line that tells this process apart is there an instant after the process.
                while not self._state.alive and self._process.poll() is None:
                    time.sleep(0.005)
                self._state.write(self.state_dir)
            except OSError:
                self.stop()
                raise

    def wait_ready(self) -> GenerationStats:
        """Wait until a real request has gone through the BLS model; a server that says READY may still not answer.

        Returns:
            Figures of that request: whether drafts were proposed, for instance.

        Raises:
            ServerFailed: it died, answered with an error, or took longer than `startup_timeout_s`.
        """
        state, deadline = self.state, self._deadline
        with Client(state.grpc_url) as client:
            while not client.ready():
                self._require_alive("while it was starting")
                if time.monotonic() > deadline:
                    raise ServerFailed(
                        f"the server is not ready after {self.startup_timeout_s:g} s",
                        log=self.log,
                        fix="read the log, or allow more with --set serving.startup_timeout_s=SECONDS",
                    )
                time.sleep(_POLL_S)
            try:
                stats = client.complete(
                    PROBE_PROMPT, max_tokens=PROBE_TOKENS, timeout_s=max(deadline - time.monotonic(), 1.0)
                ).stats
            except TrtspecError as error:
                self._require_alive("at its first request")
                raise ServerFailed(f"the server started but does not answer: {error}", log=self.log) from error
        self._watched = set(_model_processes(state.token).values())
        self._drafts = stats.drafted > 0
        self._state = replace(state, ready=True)
        self._state.write(self.state_dir)
        return stats

    def supervise(self, say: Callable[[str], None]) -> None:
        """Watch the server until it is stopped by `trtspec stop` or ends by SIGTERM.

        Triton never restarts a model process that died or hangs, and goes on calling the model ready: it is loaded
        again here. Processes that are gone are noticed within seconds; for those that hang, every `probe_interval_s`
        the models that no traffic shows to be alive are asked with small real requests, which count in the metrics
        like any other. Triton itself is started again when it dies, as it may when a model's process is killed.

        Args:
            say: told in one line when a model was loaded or the server was started again.

        Raises:
            ServerFailed: the server, or a model's process, dies or hangs again and again.
        """
        deaths: list[float] = []
        while True:
            try:
                self._watch(say)
                return
            except _Died as death:
                now = time.monotonic()
                deaths = [*(then for then in deaths if now - then < _RESTARTS_WITHIN_S), now]
                if len(deaths) > _MAX_RESTARTS:
                    raise
                if not self._start_again():
                    return
                took = time.monotonic() - now
                say(f"{death.problem}; it is started again, after {took:.1f} s (its log: {self._dead_log})")

    def _watch(self, say: Callable[[str], None]) -> None:
        revivals: defaultdict[str, list[float]] = defaultdict(list)
        with Client(self.state.grpc_url, control_key=self.state.token) as client:
            signs = LifeSigns(
                client,
                f"http://{self.state.address}:{self.metrics_port}/metrics",
                drafts=self._drafts,
                cpu_s=self._cpu_seconds,
                timeout_s=self.probe_timeout_s,
            )
            looked = time.monotonic()
            while not self._ended():
                time.sleep(_WATCH_PERIOD_S)
                self._revive_dead(client, revivals, say)
                if time.monotonic() - looked > self.probe_interval_s:
                    silent = signs.silent_models({_model_of(instance) for instance in self._watched})
                    died_meanwhile = self._revive_dead(client, revivals, say)
                    for model in silent:
                        if model not in died_meanwhile:
                            self._revive_silent(client, signs, model, revivals[model], say)
                    looked = time.monotonic()

    def _start_again(self) -> bool:
        """Start a server that died once more, and wait until it answers; False if it is not wanted any more."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.log, self._dead_log)
        if read(self.state_dir) is None:  # `trtspec stop` came before
            return False
        self.start()
        try:
            self.wait_ready()
        except ServerFailed:
            if self._is_asked_to_stop():
                return False
            raise
        return True

    @property
    def _dead_log(self) -> Path:
        return self.state_dir / DEAD_LOG_FILE

    def _revive_dead(self, client: Client, revivals: Mapping[str, list[float]], say: Callable[[str], None]) -> set[str]:
        """Load models again whose processes are gone, unless that was meant; returns the models of these processes."""
        alive = set(_model_processes(self.state.token).values())
        self._watched |= alive
        dead = self._watched - alive
        models = {_model_of(instance) for instance in dead}
        for model in models:
            if self._reload(client, model, revivals[model]):
                say(f"the process of model {model} had died; the model is loaded again")
            else:
                self._watched -= {instance for instance in dead if _model_of(instance) == model}
        return models

    def _revive_silent(
        self, client: Client, signs: LifeSigns, model: str, revivals: list[float], say: Callable[[str], None]
    ) -> None:
        """Kill and load a model until it answers."""
        began = time.monotonic()
        while self._reload(client, model, revivals, hangs=True):
            if not signs.is_silent(model):
                took = time.monotonic() - began
                say(
                    f"model {model} left two small requests unanswered; its process is killed and the model loaded "
                    f"again, after {took:.1f} s"
                )
                return

    def _reload(self, client: Client, model: str, revivals: list[float], hangs: bool = False) -> bool:
        """Load a model again, unless it was unloaded on purpose or the server is ending: then this returns False.

        A model whose process dies while it is being loaded is loaded once more, until there were too many revivals.

        Args:
            revivals: when this model was revived before (monotonic seconds); added to.
            hangs: its process is there still, and is killed.
        """
        fate = "hangs" if hangs else "dies"
        problem = ""
        for _ in range(_MAX_REVIVALS_A_MINUTE):
            try:
                if not problem and model not in client.ready_models():
                    return False
                now = time.monotonic()
                if sum(now - then < 60.0 for then in revivals) >= _MAX_REVIVALS_A_MINUTE:
                    break
                revivals.append(now)
                if hangs:  # else the unloading would wait for its calls
                    self._kill(model)
                client.reload(model, timeout_s=self.startup_timeout_s)
                return True
            except ServerFailed:
                raise
            except TrtspecError as error:
                # An ending server loses its models first.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._running_process().wait(timeout=KILL_AFTER_S)
                if self._ended():
                    return False
                problem = f"; it cannot be loaded again: {error}"
        raise ServerFailed(f"the process of model {model} {fate} again and again{problem}", log=self.log)

    def _kill(self, model: str) -> None:
        for pid, instance in _model_processes(self.state.token).items():
            if _model_of(instance) == model:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _cpu_seconds(self, model: str | None) -> float:
        """CPU time that the processes of a model have used so far; of all models for None."""
        processes = _model_processes(self.state.token).items()
        return sum(cpu_seconds(pid) for pid, instance in processes if model in (None, _model_of(instance)))

    def stop(self) -> None:
        """End the server in order, by force after a deadline, and remove its shared memory and its record."""
        process, state = self._process, self._state
        if process is None:
            return
        self._process = None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if state is not None:
            clean_up(state, self.state_dir)

    def _running_process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "start() comes first"
        return self._process

    def _ended(self) -> bool:
        """Whether the server has ended as somebody wished; raises ServerFailed if it ended otherwise."""
        code = self._running_process().poll()
        if code is None:
            return False
        if code != 0 and not self._is_asked_to_stop():
            self._fail_dead("while it was serving", _Died)
        return True

    def _is_asked_to_stop(self) -> bool:
        """`trtspec stop` marks the record, and removes it in the end."""
        recorded = read(self.state_dir)
        return recorded is None or recorded.stopping

    def _require_alive(self, when: str) -> None:
        if self._running_process().poll() is not None:
            self._fail_dead(when)

    def _fail_dead(self, when: str, kind: type[ServerFailed] = ServerFailed) -> NoReturn:
        code = self._running_process().returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        cause = fault(self.log.read_text(encoding="utf-8", errors="replace"))
        raise kind(f"the server {how} {when}" + (f": {cause}" if cause else ""), log=self.log)

    def _arguments(self, backends: Path, token: str) -> list[str]:
        return [
            *self._control_restrictions(token),
            f"--model-repository={self.model_repo}",
            f"--backend-directory={backends}",
            # Explicit control, so that a model whose process died can be loaded again.
            "--model-control-mode=explicit",
            "--load-model=*",
            # Completing configurations would start every model's process twice.
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            f"--http-address={self.host}",
            f"--http-port={self.http_port}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-address={self.host}",
            f"--metrics-port={self.metrics_port}",
            "--allow-gpu-metrics=false",
            f"--backend-config=python,shm-region-prefix-name={token}",
            f"--backend-config=python,stub-timeout-seconds={max(int(self.startup_timeout_s), 1)}",
        ]

    def _control_restrictions(self, key: str) -> list[str]:
        """Options that keep control to ourselves where others can reach the server.

        Whoever may load models may send their Python code along, and traces and logs go to any file that is named.
        """
        if is_loopback(self.host):
            return []
        apis = "model-repository,shared-memory,trace,logging"
        return [
            f"--{option}={apis}:{CONTROL_KEY}={key}" for option in ("http-restricted-api", "grpc-restricted-protocol")
        ]

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        # Model processes ignore PYTHONPATH and VIRTUAL_ENV; they take the environment of the first python3 on PATH.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        library_dir = sysconfig.get_config_var("LIBDIR")
        if library_dir and (Path(library_dir) / str(sysconfig.get_config_var("INSTSONAME"))).exists():
            earlier = os.environ.get("LD_LIBRARY_PATH")
            environment["LD_LIBRARY_PATH"] = os.pathsep.join([library_dir, *([earlier] if earlier else [])])
        environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(self.num_threads)
        # Two engines share the cores: one whose threads wait awake for long is in the other's way when it is its turn.
        environment.setdefault("GOMP_SPINCOUNT", str(_SPINS))
        environment["TOKENIZERS_PARALLELISM"] = "false"
        environment["TRTSPEC_ENGINE_MOUNT"] = self.mount_point
        environment["TRTSPEC_ENGINE_ROOT"] = str(self.engines_root.absolute())
        return environment


def state_dir_of(spec: Spec) -> Path:
    """Where the server of a spec keeps its record and its log."""
    return spec.engines_dir / ".server"


def find_tritonserver() -> Path:
    """The tritonserver binary of the installed nvidia-pytriton package.

    Raises:
        TrtspecError: the package is missing or numpy is too new for its Python backend.
    """
    binary = server_files() / "bin" / "tritonserver"
    version = importlib.metadata.version("numpy")
    if int(version.split(".")[0]) >= 2:
        # With numpy 2 its models report READY and then fail on every string or number.
        raise TrtspecError(
            f"Triton's Python backend does not work with numpy {version}",
            expected="numpy<2",
            fix="pip install 'numpy<2'",
        )
    return binary


def tail(log: Path, lines: int = LOG_TAIL_LINES) -> list[str]:
    """Last lines of a log, without the tables that Triton prints; empty if there is none."""
    try:
        written = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in written if line and not line.startswith(("+--", "| "))][-lines:]


_FAULTS = (
    re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*?)\"?$", re.MULTILINE),
    re.compile(r"\"(?P<reason>failed to start .*? service: .*?)\"?$", re.MULTILINE),
    re.compile(r"^(?:error|tritonserver): (?P<reason>.*)$", re.MULTILINE),
)


def fault(log_text: str) -> str | None:
    """What a Triton log says went wrong, in one line; None if it names nothing.

    A model that failed to load comes first, since the server's own last words only say that some model did.
    """
    for pattern in _FAULTS:
        found = pattern.search(log_text)
        if found:
            reason = found["reason"].split(r"\n\nAt:")[0].replace(r"\n", " ").strip()
            reason = reason.removeprefix("Internal: ")
            model = found.groupdict().get("model")
            return f"model {model} failed to load: {reason}" if model else reason
    return None


def _model_processes(token: str) -> dict[int, str]:
    """Process id -> model instance, such as tensorrt_llm_0_0, of every living model process."""
    # Words: program, model.py, region, two sizes, server's pid, library directory, offset, instance, backend.
    lines = {pid: line.split("\0") for pid, line in family(token).items() if "triton_python_backend_stub" in line}
    # Triton starts each through a shell, which carries the whole line as one word until it becomes the process.
    return {pid: words[8] for pid, words in lines.items() if len(words) > 8}


def _model_of(instance: str) -> str:
    """Model of an instance, which is called MODEL_GROUP_NUMBER."""
    return instance.rsplit("_", 2)[0]


@contextmanager
def _only_starter(state_dir: Path) -> Iterator[None]:
    """Hold off a second start in the same directory while the first one is between its check and its record."""
    with (state_dir / "starting.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrtspecError("another trtspec is starting a server here", where=str(state_dir)) from None
        yield
