"""A job that serves a built spec over the GPUs of one node or several: the scripts for it, as text.

Slurm starts every MPI rank itself (srun with PMIx), so nothing needs ssh between nodes. Rank 0 is the leader: the
launcher, which loads the models in order and watches the server, and Triton, which alone listens. Every other rank is a
Triton that holds its part of the engines. Knows the spec and what the launcher runs; does not talk to Slurm.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from trtspec.cluster.slurm import Options
from trtspec.errors import TrtspecError
from trtspec.spec.schema import Spec
from trtspec.triton import launch
from trtspec.triton.container import image_of, require_built
from trtspec.trtllm.placement import check_placement, device_ids, load_order, mpi_world_size

SCRIPT, RANK, LAUNCHER = "serve.sbatch", "rank.sh", "launch.py"
_MOUNT = "/opt/trtspec"
_MODELS = "/models"
_LEADER_ONLY = {"127.0.0.1", "localhost"}


def serving_files(
    spec: Spec, options: Options, gpus: str, *, mpi: str = "pmix", container: bool = True
) -> dict[str, str]:
    """What to put into one directory, by file name; `sbatch serve.sbatch` there starts the server.

    Args:
        spec: what was built.
        options: what the user says about the job.
        gpus: generic resource of one node, such as `gpu:h100:8`.
        mpi: how srun connects the ranks.
        container: run in the spec's image, by pyxis; False: in the job's own environment, which has Triton in it.

    Raises:
        TrtspecError: nothing is built, engines that no server loads together, or settings that have no meaning here.
    """
    if spec.engine.runtime != "tensorrt_llm":
        raise TrtspecError(
            f"engines of the runtime {spec.engine.runtime} are served by trtspec serve, on one machine",
            where=spec.where(("engine", "runtime")),
            expected="tensorrt_llm",
        )
    if spec.serving.host not in {*_LEADER_ONLY, "0.0.0.0"}:
        raise TrtspecError(
            f"the leader's node is not known before the job runs, so it cannot listen on {spec.serving.host}",
            where=spec.where(("serving", "host")),
            expected="0.0.0.0 (every address of the leader's node) or 127.0.0.1 (that node only)",
        )
    if spec.engine.track != "llmapi":
        check_placement(spec)
    require_built(spec)
    nodes = _nodes(spec)
    return {
        SCRIPT: _script(spec, options, gpus, nodes, mpi, container),
        RANK: _rank_script(spec, len(nodes), Path(_MODELS) if container else spec.model_repo_dir),
        LAUNCHER: Path(launch.__file__).read_text(encoding="utf-8"),
    }


def _nodes(spec: Spec) -> list[int]:
    """The node of each rank, from 0; where the GPU of the rank is."""
    devices = device_ids(spec)
    if spec.engine.track == "llmapi" or not spec.serving.orchestrator:
        longest = max(devices.values(), key=len)
        return [device // spec.hardware.num_gpus for device in longest]
    if spec.serving.spawn_processes:
        return [0]
    workers = [device for role in load_order(spec) for device in devices[role]]
    assert len(workers) + 1 == mpi_world_size(spec)
    return [0, *(device // spec.hardware.num_gpus for device in workers)]


def _script(spec: Spec, options: Options, gpus: str, nodes: Sequence[int], mpi: str, container: bool) -> str:
    num_nodes = 1 + max(nodes)
    words = [f"--job-name=trtspec-serve-{spec.name}", f"--nodes={num_nodes}"]
    words += [f"--ntasks-per-node={max(map(nodes.count, nodes))}"]
    words += [] if {"gres", "gpus", "gpus-per-node"} & set(options.more) else [f"--gres={gpus}"]
    words += ["--output=%x-%j.log", "--signal=TERM@60", *options.words()]
    if wrong := next((word for word in words if re.search(r"[\x00-\x1f]", word)), None):
        raise TrtspecError("control characters in an option of sbatch", where=repr(wrong))
    run = ["srun", f"--mpi={mpi}", f"--ntasks={len(nodes)}", "--distribution=arbitrary", "--overcommit"]
    run += ["--kill-on-bad-exit=1"]
    inside, start = [], f'bash "$place/{RANK}"'
    if container:
        mounts = [(spec.model_repo_dir, _MODELS), (spec.engines_dir, spec.serving.mount_point)]
        if wrong := next((str(path) for path, _ in mounts if {":", ","} & set(str(path))), None):
            raise TrtspecError("a colon or comma in a path that is mounted", where=wrong, fix="rename the directory")
        run += [f"--container-image={image_of(spec)}", "--no-container-mount-home"]
        text = ",".join(f"{path}:{place}:ro" for path, place in mounts)
        inside = [f"mounts={shlex.quote(text)},$place:{_MOUNT}:ro"]
        start = f'--container-mounts="$mounts" bash {_MOUNT}/{RANK}'
    reach = "that node only" if spec.serving.host in _LEADER_ONLY else "every host that reaches it"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {shlex.quote(word)}" for word in words),
        "",
        f"# MPI ranks: {len(nodes)}, nodes: {num_nodes}. Submit it from its own directory.",
        "# On a cluster without pyxis write it again with --no-container; the job's environment then provides Triton.",
        "set -euo pipefail",
        "place=$SLURM_SUBMIT_DIR",
        'hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))',
        "export SLURM_HOSTFILE=$place/hosts.$SLURM_JOB_ID  # the node of each rank, in order",
        f'for node in {" ".join(map(str, nodes))}; do echo "${{hosts[node]}}"; done >"$SLURM_HOSTFILE"',
        "trap 'rm -f \"$SLURM_HOSTFILE\"' EXIT",
        f'echo "leader: http://${{hosts[0]}}:{spec.serving.http_port} (gRPC {spec.serving.grpc_port}), for {reach}"',
        *inside,
        # srun refuses an arbitrary distribution beside the job's own number of tasks a node.
        "unset SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE",
        f"{shlex.join(run)} {start}",
    ]
    return "\n".join(lines) + "\n"


def _rank_script(spec: Spec, num_ranks: int, repository: Path) -> str:
    lines = ["#!/bin/bash", "# What one MPI rank of the server runs; rank 0 is the leader.", "set -eu"]
    lines += ['cd "$(dirname "$0")"', "export HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1"]
    if spec.engine.track != "llmapi" and spec.serving.orchestrator:
        spawn = int(spec.serving.spawn_processes)
        lines += [f"export TRTLLM_ORCHESTRATOR=1 TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES={spawn}"]
    lines += ['case "$SLURM_PROCID" in']
    lines += [
        f"{rank}) exec {shlex.join(command)} ;;" for rank, command in enumerate(_commands(spec, num_ranks, repository))
    ]
    return "\n".join([*lines, "esac", ""])


def _commands(spec: Spec, num_ranks: int, repository: Path) -> list[list[str]]:
    """What each rank runs."""
    serving = spec.serving
    address = "127.0.0.1" if serving.host in _LEADER_ONLY else serving.host
    own = ["--repository", str(repository), "--http-port", str(serving.http_port)]
    own += ["--timeout", f"{serving.startup_timeout_s:g}"]
    listens = [f"--http-address={address}", f"--grpc-address={address}", f"--grpc-port={serving.grpc_port}"]
    listens += [f"--metrics-address={address}", f"--metrics-port={serving.metrics_port}"]
    if spec.engine.track == "llmapi":
        # The LLM API's launcher runs the command in rank 0 and a worker of its own in every other rank.
        return [["trtllm-llmapi-launch", "python3", LAUNCHER, "--llmapi", *own, "--", *listens]] * num_ranks
    if serving.orchestrator and serving.spawn_processes:
        own += ["--orchestrator", "spawn", "--num-gpus", str(spec.hardware.num_gpus)]
    every = launch.options_parser().parse_args(["--ranks", str(num_ranks), "--repository", str(repository)])
    command = launch.server_command(every, "", launch.models_in_order(spec.model_repo_dir))
    others: list[list[str]] = []
    while ":" in command:
        command = command[command.index(":") + 3 :]  # behind `: -n 1`
        others.append(command[: command.index(":")] if ":" in command else command)
    return [["python3", LAUNCHER, *own, "--", *listens], *others]
