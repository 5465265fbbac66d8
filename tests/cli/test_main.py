"""The front door: help without heavy imports, and how every kind of error is shown and which code it exits with."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from trtspec import __version__
from trtspec.cli import COMMANDS, main
from trtspec.errors import EXIT_PARITY_FAILED, TrtspecError

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)


HELP = """\
Usage: trtspec [OPTIONS] COMMAND [ARGS]...

  Build, serve and check speculative decoding on TensorRT-LLM and Triton, from
  one YAML file.

Options:
  --debug     Show tracebacks of errors.
  --version   Show the version and exit.
  -h, --help  Show this message and exit.

Commands:
  config            Write, validate and show spec files.
  check             Check that target and draft pair and that this release can
                    build the spec.
  build             Build engines and the Triton model repository.
  serve             Start the Triton server on a built repository.
  stop              Stop a server started with serve --detach.
  generate          Stream text from a running server.
  parity            Check checkpoints, engines and server against the
                    reference sampler.
  parity diff       Show where the answers in two traces part.
  parity replay     Judge a trace again, without models.
  inspect           Say what an engine or a checkpoint is, and whether it fits
                    this host and its partner.
  doctor            Check driver, GPUs, container, versions, disk and ports of
                    this host.
  plan              Say whether it pays, with how many draft tokens, what
                    fits, and where plain decoding wins.
  plan calibrate    Measure what passes of the models take on this machine.
  plan tree         Find the best token tree of Medusa heads or a draft model.
  plan exit         Find the layer of the target to leave after for drafts.
  bench acceptance  Measure on your prompts what every draft length, tree and
                    cascade accepts.
  bench serve       Load a running server, with speculation and without, and
                    report its times.
  deploy k8s        Write Kubernetes manifests that build and serve a spec.
  deploy slurm      Write an sbatch script that serves over several GPUs or
                    nodes.
  rollout           Bring a new build into the running server without a gap.
  rollback          Let the version before serve again.
  migrate           Turn a spec for compiled engines into one for the LLM API.
  train             Train draft models and Medusa heads.
"""


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    """CPU time, best of three, so that a busy machine does not decide."""
    code = """
import json, sys, time
from trtspec.cli import main
try:
    main(["--help"], prog_name="trtspec")
except SystemExit:
    print("\\0" + json.dumps([time.process_time(), sorted(m.split(".")[0] for m in sys.modules)]))
"""
    seconds = []
    for _ in range(3):
        result = python(code)
        text, report = result.stdout.split("\0")
        used, modules = json.loads(report)
        seconds.append(used)
        assert (text, result.stderr) == (HELP, "")
        heavy = {"torch", "transformers", "pydantic", "numpy", "tritonclient", "scipy", "tokenizers", "yaml", "rich"}
        assert heavy.isdisjoint(modules)
    assert min(seconds) < 0.3


def test_a_command_imports_only_itself() -> None:
    code = """
import sys
from trtspec.cli import main
try:
    main(["config", "--help"], prog_name="trtspec")
except SystemExit:
    print(sorted(m for m in sys.modules if m.startswith("trtspec.") or m in ("torch", "transformers")))
"""
    loaded = python(code).stdout.splitlines()[-1]
    assert loaded == "['trtspec.cli', 'trtspec.cli.common', 'trtspec.cli.config', 'trtspec.errors']"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists_and_explains_itself(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: main {name} ")
    command = main.get_command(click.Context(main), name)
    assert command is not None and command.name == name and command.help


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output) == (0, f"trtspec {__version__}\n")


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "trtspec", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"trtspec {__version__}\n", "")


USAGE = {
    "near": (["buidl"], "Error: No such command 'buidl'. Did you mean 'build'?"),
    "nothing near": (["xyz"], f"Error: No such command 'xyz'. Commands: {', '.join(COMMANDS)}."),
    "option": (["--debgu", "config"], "Error: No such option '--debgu'. Did you mean '--debug'?"),
    "sub-command": (["config", "valdate", "a"], "Error: No such command 'valdate'. Did you mean 'validate'?"),
    "argument": (["config", "validate"], "Error: Missing argument 'CONFIG'."),
}


@pytest.mark.parametrize(("args", "message"), USAGE.values(), ids=USAGE)
def test_a_wrong_command_line_exits_with_2(args: list[str], message: str) -> None:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].replace("option: --", "option '--") == message


class ParityFailed(TrtspecError):
    exit_code = EXIT_PARITY_FAILED


RAISED: dict[str, tuple[BaseException, int, str]] = {
    "an error for users": (
        TrtspecError("is wrong", where="a.yaml", expected="right", fix="mend it"),
        1,
        "error: a.yaml: is wrong; expected right; mend it\n",
    ),
    "several problems": (TrtspecError("one\ntwo"), 1, "error: one\nerror: two\n"),
    "a code of its own": (ParityFailed("differs"), 3, "error: differs\n"),
    "interrupted": (KeyboardInterrupt(), 130, "error: interrupted\n"),
    "disk full": (
        OSError(errno.ENOSPC, "No space left on device", "/x/rank0.safetensors"),
        1,
        "error: /x/rank0.safetensors: no space left on the disk; free some and run again\n",
    ),
    "disk full, file unknown": (
        OSError(errno.ENOSPC, "No space left on device"),
        1,
        "error: no space left on the disk; free some and run again\n",
    ),
    "no permission": (
        PermissionError(errno.EACCES, "Permission denied", "/x"),
        1,
        "error: /x: no permission (Permission denied); choose another place or change its permissions\n",
    ),
    "read-only": (
        OSError(errno.EROFS, "Read-only file system", "/x"),
        1,
        "error: /x: no permission (Read-only file system); choose another place or change its permissions\n",
    ),
    "another file error": (
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"),
        1,
        "error: /x: No such file or directory\n",
    ),
    "missing package": (
        ModuleNotFoundError("No module named 'tritonclient'", name="tritonclient"),
        1,
        "error: the Python package tritonclient is not installed; install the extra that holds it (see README)\n",
    ),
    "a fault of ours": (
        ValueError("bad\n  luck"),
        1,
        "error: internal error: ValueError: bad luck; run with trtspec --debug for the traceback\n",
    ),
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(("error", "code", "message"), RAISED.values(), ids=RAISED)
def test_an_error_is_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str, debug: bool
) -> None:
    @click.command("config")
    def fails() -> None:
        click.echo("working")
        raise error

    monkeypatch.setattr("trtspec.cli.config.config", fails)
    result = CliRunner().invoke(main, [*(["--debug"] if debug else []), "config"])
    assert (result.exit_code, result.stdout) == (code, "working\n")
    if debug:
        assert result.stderr.startswith("Traceback (most recent call last):\n")
        assert result.stderr.endswith(message)
    else:
        assert result.stderr == message


def test_ctrl_c_exits_with_130() -> None:
    code = """
import os, signal, time, click
import trtspec.cli, trtspec.cli.config
@click.command("config")
def waits():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
trtspec.cli.config.config = waits
trtspec.cli.main(["config"])
"""
    result = python(code)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "error: interrupted\n")


def test_output_to_a_full_disk() -> None:
    command = [sys.executable, "-m", "trtspec", "config", "schema"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=60, check=False
        )
    assert (result.returncode, result.stderr) == (1, "error: no space left on the disk; free some and run again\n")


def test_a_reader_that_goes_away_is_no_error_message() -> None:
    command = [sys.executable, "-m", "trtspec", "config", "schema"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=60, check=False
        )
    finally:
        os.close(writer)
    assert result.stderr == ""
