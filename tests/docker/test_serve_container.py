"""`trtspec serve` and `trtspec stop` on what looks like a GPU host, with stand-ins for docker and nvidia-smi.

The container's command is run on this machine: the launcher, and a real Triton server on scripted models.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.spec.load import load_spec
from trtspec.triton.launch import probe
from trtspec.triton.llmapi_repository import write_llmapi_repository
from trtspec.triton.server_state import ServerState, running, stop
from trtspec.trtllm.versions import RELEASES

SPEC = """\
version: 1
target: {model: ./target, dtype: bfloat16}
speculation: {method: draft_target, draft: {model: ./draft, dtype: bfloat16}, num_draft_tokens: 4}
hardware: {gpu: H100-SXM}
engine: {runtime: tensorrt_llm}
output: {engines: "the engines", model_repo: repo}
"""
pytestmark = pytest.mark.timeout(120)
GpuHost = Callable[..., Path]


def trtspec(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def serve(config: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trtspec", "serve", str(config), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def state_dir(config: Path) -> Path:
    return config.parent / "the engines" / ".server"


def write_engine(config: Path, role: str, **stamp: Any) -> None:
    """An engine directory with everything but an engine: what is in it is no more than its name says."""
    directory = config.parent / "the engines" / role
    directory.mkdir(parents=True, exist_ok=True)
    version = stamp.get("tensorrt_llm_version", "1.2.1")
    build = {"max_seq_len": 64, "max_draft_len": 4}
    content = {"version": version, "pretrained_config": {"vocab_size": 280}, "build_config": build}
    (directory / "config.json").write_text(json.dumps(content))
    ours = {"runtime": "tensorrt_llm", "compiled": True, "role": role, "sm": 90, "tensorrt_llm_version": version}
    (directory / "trtspec.json").write_text(json.dumps(ours | stamp))
    if stamp.get("compiled", True):
        (directory / "rank0.engine").write_text("not an engine")
    else:
        (directory / "rank0.engine").unlink(missing_ok=True)


@pytest.fixture
def built(
    tmp_path: Path,
    free_ports: Callable[[], dict[str, int]],
    scripted_repository: Callable[[Path], Path],
    gpu_host: GpuHost,  # so that its docker is still there at the end
) -> Iterator[Path]:
    """A spec that looks built; whatever was started for it is ended."""
    path = tmp_path / "demo.yaml"
    ports = ", ".join(f"{name}: {port}" for name, port in free_ports().items())
    path.write_text(SPEC + f"serving: {{{ports}, startup_timeout_s: 60}}\n", encoding="utf-8")
    scripted_repository(tmp_path / "repo")
    for role in ("target", "draft"):
        write_engine(path, role)
    yield path
    stop(state_dir(path))


def processes_of(tmp_path: Path) -> list[str]:
    """Command lines of living processes that name the test's directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "tritonserver" in line and str(tmp_path) in line:
            found.append(line)
    return found


def test_a_detached_life_in_the_container(built: Path, gpu_host: GpuHost) -> None:
    kept = gpu_host()
    os.environ["TRTSPEC_IMAGE"] = "one/that/does/not/count"
    try:
        first = serve(built, "--detach")
    finally:
        del os.environ["TRTSPEC_IMAGE"]
    assert first.returncode == 0, first.stderr
    state = running(state_dir(built))
    assert isinstance(state, ServerState) and state.ready and state.project.startswith("trtspec-")
    assert first.stderr == (
        f"starting the Triton server on {built.parent / 'repo'} (log: docker logs {state.project}-triton-1)\n"
    )
    assert f"ready: gRPC 127.0.0.1:{state.grpc_port}" in first.stdout
    assert f"(container {state.project})" in first.stdout

    resolved = json.loads((kept / state.project / "resolved.json").read_text())["services"]["triton"]
    assert resolved["image"] == RELEASES[0].image
    assert {port["host_ip"] for port in resolved["ports"]} == {"127.0.0.1"}
    sources = {volume["target"]: volume["source"] for volume in resolved["volumes"]}
    assert sources["/engines"] == str(built.parent / "the engines") and sources["/models"] == str(built.parent / "repo")
    assert resolved["deploy"]["resources"]["reservations"]["devices"][0]["count"] == "1"
    assert (resolved["shm_size"], resolved["restart"]) == (str(8 * 2**30), "on-failure:3")
    assert resolved["user"] == (f"{os.getuid()}:{os.getgid()}" if os.getuid() else "1000:1000")

    again = trtspec("serve", built, "--detach")
    assert (again.exit_code, again.stdout.split(":")[0]) == (0, "already running")
    generated = trtspec("generate", "--config", built, "--max-tokens", "3", "Hello")
    assert generated.exit_code == 0, generated.stderr

    stopped = trtspec("stop", built)
    assert stopped.stdout == f"stopped the server of demo (container {state.project}, gRPC {state.grpc_url})\n"
    assert processes_of(built.parent) == [] and not (kept / state.project).exists()
    assert running(state_dir(built)) is None
    assert trtspec("stop", built).stdout == "nothing was running for demo\n"


def test_the_llm_api_is_served_too(built: Path, gpu_host: GpuHost) -> None:
    gpu_host()
    settings = ["--set", "engine.track=llmapi", "--set", "output.model_repo=llm"]
    settings += ["--set", "engine.version=1.3.0", "--set", "serving.image=an/image:with-1.3"]
    spec = load_spec(built, settings[1::2])
    write_llmapi_repository(out_dir=spec.model_repo_dir, spec=spec, model_path="/engines/target")
    result = serve(built, "--detach", *settings)
    assert result.returncode == 0, result.stderr
    state = running(state_dir(built))
    assert state is not None and state.ready
    probe(f"127.0.0.1:{state.http_port}", llmapi=True)


def test_in_the_foreground_a_signal_removes_the_container(built: Path, gpu_host: GpuHost) -> None:
    kept = gpu_host()
    command = [sys.executable, "-m", "trtspec", "serve", str(built)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while (state := running(state_dir(built))) is None or not state.ready:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=90)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1] == "stopping"
    assert processes_of(built.parent) == [] and not (kept / state.project).exists()


def test_a_container_that_ends_at_the_start_shows_its_log(built: Path, gpu_host: GpuHost) -> None:
    gpu_host()
    (built.parent / "repo" / "tensorrt_llm_bls" / "1" / "model.py").write_text("import a_missing_module\n")
    result = serve(built)
    assert result.returncode == 1
    *log, error = result.stderr.splitlines()
    assert error.startswith(
        f"error: {state_dir(built) / 'container.log'}: the container ended with code 1 while it was starting: "
        "model tensorrt_llm_bls does not load: "
    )
    assert "a_missing_module" in error and log[-1].startswith("  launch: model tensorrt_llm_bls does not load: ")
    assert running(state_dir(built)) is None


def test_docker_starting_it_again_counts_as_a_failed_start(built: Path, gpu_host: GpuHost) -> None:
    (gpu_host() / "restarts").write_text("1")
    result = serve(built)
    assert result.returncode == 1
    assert "the container ended and was started again while it was starting" in result.stderr


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("version: Cannot connect to the Docker daemon", "docker version failed: Error: Cannot connect to the Docker"),
        ("compose version: unknown command", "docker has no compose; install the compose plugin of docker (v2)"),
        ("image inspect: No such image", f"is not on this host; run: docker pull {RELEASES[0].image}"),
        (
            'up: could not select device driver "nvidia" with capabilities: [[gpu]]',
            "install the NVIDIA Container Toolkit and restart docker",
        ),
        ("up: no space left on device", "docker compose up failed: Error: no space left on device"),
    ],
)
def test_what_docker_lacks_is_said(built: Path, gpu_host: GpuHost, broken: str, message: str) -> None:
    (gpu_host() / "broken").write_text(broken)
    result = trtspec("serve", built)
    assert result.exit_code == 1
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_no_docker(built: Path, gpu_host: GpuHost) -> None:
    gpu_host(docker=False)
    result = trtspec("serve", built)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: docker is not installed; expected Docker Engine with the compose plugin")


def test_inside_the_container(built: Path, gpu_host: GpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_host(docker=False)
    monkeypatch.setenv("NVIDIA_TRITON_SERVER_VERSION", "26.07")
    result = trtspec("serve", built)
    assert result.exit_code == 1
    assert result.stderr == "error: this is the Triton container 26.07 itself; run trtspec serve on its host\n"


@pytest.mark.parametrize(
    ("stamp", "message"),
    [
        ({"compiled": False}, "target: not compiled yet"),
        ({"sm": 80}, "compiled for sm_80, but GPU 0 (NVIDIA H100 80GB HBM3) is sm_90"),
        ({"tensorrt_llm_version": "1.2.2"}, "TensorRT-LLM 1.2.2, newer than the 1.2.1 of container 26.07"),
    ],
)
def test_engines_for_another_place_are_refused(
    built: Path, gpu_host: GpuHost, stamp: dict[str, Any], message: str
) -> None:
    kept = gpu_host()
    write_engine(built, "target", **stamp)
    result = trtspec("serve", built)
    assert result.exit_code == 1
    assert message in result.stderr and f"trtspec build {built}" in result.stderr
    assert not (kept / "calls").exists(), "docker is not asked to do what cannot work"


def test_too_few_gpus(built: Path, gpu_host: GpuHost) -> None:
    gpu_host()
    result = trtspec(
        *("serve", built, "--set", "hardware.num_gpus=2", "--set", "serving.gpu_device_ids.draft=[1]"),
        *("--set", "serving.orchestrator=true"),
    )
    assert result.exit_code == 1
    assert "2 GPUs are needed, 1 are here" in result.stderr


def test_before_the_build_it_names_the_command_to_run(built: Path, gpu_host: GpuHost) -> None:
    gpu_host()
    result = trtspec("serve", built, "--set", "output.model_repo=elsewhere")
    assert result.exit_code == 1
    assert f"there is no built model repository here; run: trtspec build {built}" in result.stderr


@pytest.mark.parametrize(
    ("sets", "launch", "gpus"),
    [
        ((), "--timeout 60", "1"),
        (("serving.orchestrator=true",), "--orchestrator spawn --num-gpus 1 --timeout 60", "1"),
        (
            (
                *("target.tensor_parallel=2", "hardware.num_gpus=3", "serving.gpu_device_ids.draft=[2]"),
                *("serving.orchestrator=true", "serving.spawn_processes=false"),
            ),
            "--orchestrator ranks --num-gpus 3 --ranks 4 --timeout 60",
            "3",
        ),
        (("speculation.method=none", "target.tensor_parallel=2", "hardware.num_gpus=2"), "--ranks 2 --timeout 60", "2"),
        (
            (
                *("engine.track=llmapi", "target.tensor_parallel=2", "hardware.num_gpus=4"),
                "serving.gpu_device_ids.target=[1,3]",
            ),
            "--llmapi --gpus 1,3 --ranks 2 --timeout 60",
            "4",
        ),
    ],
)
def test_dry_run_prints_the_settings_of_a_spec(built: Path, sets: tuple[str, ...], launch: str, gpus: str) -> None:
    result = trtspec("serve", built, "--dry-run", *(word for each in sets for word in ("--set", each)))
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert f"TRTSPEC_LAUNCH='{launch}'" in lines and f"TRTSPEC_NUM_GPUS='{gpus}'" in lines
    assert f"TRTSPEC_ENGINES='{built.parent / 'the engines'}'" in lines
    assert lines[-1].startswith("# with these lines in ") and " up" in lines[-1]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("target.tensor_parallel=2", "hardware.num_gpus=2"), "serving.orchestrator"),
        (("engine.runtime=torch",), "engines of the runtime torch are served by the local server"),
        (("hardware.num_nodes=2",), "one container serves one node"),
        (("serving.host=my-machine",), "'my-machine' is no address that docker can publish ports on"),
        (("engine.version=1.2.9",), "no Triton container with TensorRT-LLM 1.2.9 is known"),
        (("output.engines=it's",), "expected no quotes and no line breaks"),
    ],
)
def test_what_no_container_can_do(built: Path, sets: tuple[str, ...], message: str) -> None:
    result = trtspec("serve", built, "--dry-run", *(word for each in sets for word in ("--set", each)))
    assert result.exit_code == 1
    assert message in result.stderr
