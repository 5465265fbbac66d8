"""Running `trtllm-build`: one process group of its own, its whole output in a log, its failures in one line.

Knows what the tool prints; does not know what its options mean.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from trtspec.errors import TrtspecError

TOOL = "trtllm-build"
_POLL_S = 0.2  # how soon a silent compiler is ended when the build is interrupted
_GRACE_S = 5.0  # from asking the process group to end to killing it
# What the tool prints on the way to each rank's engine.
_MILESTONES = ("Build TensorRT engine", "Engine generation completed", "Engine serialized")
_LONGEST = 300  # characters of the tool's own words in a message


def run_compiler(
    arguments: Sequence[str],
    role: str,
    log: Path,
    advance: Callable[[float], None],
    world_size: int,
    gpu_indexes: Sequence[int],
) -> None:
    """Run the tool to its end.

    Args:
        arguments: words after the tool's name.
        role: whose engine it is, for messages.
        log: file for all that it prints; replaced.
        advance: called with the fraction that is done, a few times a second; if it raises, the tool is ended.
        world_size: engines (ranks) that it makes.
        gpu_indexes: GPUs that it sees, numbered as nvidia-smi does.

    Raises:
        TrtspecError: it cannot be started, fails, or is killed: the reason in its own words, with the log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order of nvidia-smi
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpu_indexes)),
        "PYTHONUNBUFFERED": "1",
    }
    with open(log, "wb") as file:
        try:
            process = subprocess.Popen(
                [TOOL, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )
        except OSError as error:
            raise TrtspecError(f"{TOOL} cannot be started: {error.strerror}", where=f"engine:{role}") from error
        try:
            seen = 0
            for line in _lines(process):
                if line is not None:
                    file.write(line)
                    file.flush()
                    seen += any(mark in line.decode(errors="replace") for mark in _MILESTONES)
                advance(min(seen / (len(_MILESTONES) * world_size + 1), 1.0))
        finally:
            _end(process)
    if process.returncode:
        raise _failure(process.returncode, role, log)
    advance(1.0)


def _lines(process: subprocess.Popen[bytes]) -> Iterator[bytes | None]:
    """The lines of the process's output, and None now and then while it is silent; ends when it has ended."""
    assert process.stdout is not None
    descriptor, rest = process.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(_POLL_S):
                if process.poll() is not None:  # a grandchild may still hold the pipe
                    break
                yield None
                continue
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line + b"\n" for line in lines)
    if rest:
        yield rest
    while process.poll() is None:
        time.sleep(0.01)
        yield None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group, whoever of it is left: by asking while its leader lives, then by force."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    _signal(process, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # nobody is left
        os.killpg(process.pid, number)


# What the tool or the system below it says, what that means, and what helps. The first that fits counts.
_CAUSES = (
    (
        r"CUDA out of memory|OutOfMemoryError|cudaErrorMemoryAllocation|CUDA error: out of memory|"
        r"Requested amount of GPU memory|Cuda Runtime \(out of memory\)",
        "the GPU has too little free memory for this build",
        "end what else uses the GPU, or lower engine.max_batch_size, engine.max_num_tokens or engine.max_seq_len",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "no space left on the disk",
        "free some space and run this again; finished engines are kept",
    ),
    (
        r"no kernel image is available|[Uu]nsupported SM|not supported (on|for) SM|SM ?>= ?\d+|"
        r"only supported on \w+ (and \w+ )?Arch|[Uu]nsupported (GPU )?arch",
        "the GPU's architecture cannot run this",
        "take another precision or method, or a GPU that can; see the support table in the documentation",
    ),
    (
        r"driver version is insufficient|version mismatch|incompatible (with|version)|"
        r"built (with|for|by) (a )?(different|another|newer|older) version|undefined symbol",
        "versions do not match",
        "build in the container that belongs to engine.version, with a driver that it supports",
    ),
    (
        r"terminated abruptly|BrokenProcessPool|MemoryError|bad_alloc",
        "a process of the compiler ended, most likely for want of memory",
        "free memory of the machine and run this again; finished engines are kept",
    ),
)
_PREFIX = re.compile(r"^(\[[^\]]*\]\s*)+")
_ERROR = re.compile(r"(\[(E|F)\])|(^(\w+\.)*\w*(Error|Exception)\b)|(\berror: )|(terminate called)|(^Killed)")
_EMPTY_WORDS = re.compile(r"please check error log|^Traceback|^concurrent\.futures\.process\._RemoteTraceback")


def _failure(returncode: int, role: str, log: Path) -> TrtspecError:
    """One line for a compiler that failed."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for pattern, meaning, fix in _CAUSES:
        words = next((line for line in reversed(lines) if re.search(pattern, line)), None)
        if words:
            return TrtspecError(f"{TOOL} failed on the {role}: {meaning} ({_shown(words)})", where=str(log), fix=fix)
    number = -returncode if returncode < 0 else returncode - 128 if returncode in (134, 137, 139, 143) else 0
    if number == signal.SIGKILL:
        return TrtspecError(
            f"{TOOL} was killed on the {role} (signal 9), most likely because the machine ran out of memory",
            where=str(log),
            fix="free memory or raise the container's limit and run this again; finished engines are kept",
        )
    if number:
        return TrtspecError(
            f"{TOOL} was ended on the {role} by signal {number} ({signal.Signals(number).name})",
            where=str(log),
            fix="run this again; finished engines are kept",
        )
    said = [line for line in lines if _ERROR.search(_bare(line)) or _ERROR.search(line)]
    telling = [line for line in said if not _EMPTY_WORDS.search(_bare(line))] or said or [x for x in lines if x.strip()]
    words = _shown(telling[-1]) if telling else "it printed nothing"
    return TrtspecError(f"{TOOL} failed on the {role} (exit code {returncode}): {words}", where=str(log))


def _bare(line: str) -> str:
    """A line without time, origin and level."""
    return _PREFIX.sub("", line)


def _shown(line: str) -> str:
    words = " ".join(_bare(line).split())
    return words if len(words) <= _LONGEST else words[:_LONGEST] + " ..."
