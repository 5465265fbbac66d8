"""Which hosts a spec needs in a cluster: their GPUs, the MPI ranks on each, memory and storage.

Knows the spec and the sizes of models; does not know manifests, nor what a real cluster has.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from trtspec.errors import TrtspecError
from trtspec.plan.memory import memory_plan
from trtspec.plan.sizes import ModelSizes
from trtspec.spec.gpus import GPUS
from trtspec.spec.schema import Spec
from trtspec.trtllm.placement import device_ids, participants

# What GPU feature discovery writes into the node label nvidia.com/gpu.product: the driver's name with dashes.
PRODUCTS = {
    "A100-40GB": ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"),
    "A100-80GB": ("NVIDIA-A100-SXM4-80GB",),
    "A100-80GB-PCIe": ("NVIDIA-A100-80GB-PCIe",),
    "H100-SXM": ("NVIDIA-H100-80GB-HBM3",),
    "H100-PCIe": ("NVIDIA-H100-PCIe",),
    "H100-NVL": ("NVIDIA-H100-NVL",),
    "H200": ("NVIDIA-H200",),
}
_SERVER_GB = 8.0  # Triton, the pipeline's processes, CUDA contexts
_BUILD_GB = 16.0
_CONVERSION = 3.0  # a model in 16 bits, and its quantised copy, in memory at the same time
_ON_DISK = 4.0  # a model in 16 bits (twice its quantised size), its checkpoint, its engine
_STORAGE_STEP_GB = 10


@dataclass(frozen=True)
class Sizes:
    """GB of 10^9 bytes that pods ask for.

    Attributes:
        server_gb: memory of a pod that serves, its shared memory included.
        build_gb: memory of a pod that builds.
        storage_gb: the volume of models, checkpoints, engines and repository.
        known: whether the models' own sizes were found; otherwise all follow from the memory of the GPUs.
    """

    server_gb: int
    build_gb: int
    storage_gb: int
    known: bool


def ranks_of_hosts(spec: Spec) -> list[int]:
    """How many MPI ranks each host runs, the first host first.

    Raises:
        TrtspecError: a target that needs no second host, or ranks that do not fill the hosts one after another.
    """
    hardware, target = spec.hardware, spec.target
    if hardware.num_nodes > 1 and target.world_size <= hardware.num_gpus:
        raise TrtspecError(
            f"the target is split over {target.world_size} GPUs, which one host of {hardware.num_gpus} has",
            where=spec.where(("hardware", "num_nodes")),
            expected=f"tensor_parallel x pipeline_parallel = {hardware.total_gpus} on {hardware.num_nodes} hosts",
            fix=f"set target.pipeline_parallel: {hardware.num_nodes} and target.tensor_parallel: {hardware.num_gpus}, "
            "or hardware.num_nodes: 1",
        )
    devices = device_ids(spec)
    if spec.serving.orchestrator:
        order = [0, *(device for role in participants(spec) for device in devices[role])]
    else:
        order = list(devices["target"])
    hosts = [device // hardware.num_gpus for device in order]
    if hosts != sorted(hosts) or {*hosts} != {*range(hardware.num_nodes)}:
        raise TrtspecError(
            f"the ranks would lie on the hosts {', '.join(map(str, hosts))}, which mpirun does not fill in this order",
            where=spec.where(("serving", "gpu_device_ids")),
            expected="all other models on the first host, and the target's GPUs in rising order over all hosts",
            fix="change serving.gpu_device_ids, or split the other models over fewer GPUs",
        )
    counts = Counter(hosts)
    return [counts[host] for host in range(hardware.num_nodes)]


def sizes_of(spec: Spec) -> Sizes:
    """What pods of a spec ask for; without the config of a model, an upper bound."""
    gpu = GPUS[spec.hardware.gpu]
    devices = {device for role in device_ids(spec).values() for device in role}
    try:
        rows = memory_plan(spec, ModelSizes()(spec), gpu.memory_gb, spec.engine.max_batch_size).rows
        weights = {(row.role, row.gpu): row.weights_gb for row in rows}
        known = True
    except TrtspecError:
        weights = {("target", device): float(gpu.memory_gb) for device in devices}
        known = False
    of_host, of_model = defaultdict[int, float](float), defaultdict[str, float](float)
    for (role, device), gb in weights.items():
        of_host[device // spec.hardware.num_gpus] += gb
        of_model[role] += gb
    return Sizes(
        server_gb=math.ceil(spec.serving.shm_size / 1e9 + max(of_host.values()) + _SERVER_GB),
        build_gb=math.ceil(_BUILD_GB + _CONVERSION * max(of_model.values())),
        storage_gb=_STORAGE_STEP_GB * math.ceil((1 + _ON_DISK * sum(of_model.values())) / _STORAGE_STEP_GB),
        known=known,
    )
