"""Which GPUs and which MPI ranks each engine of a spec gets, and how the processes of the C++ backend are started.

The backend has two ways. Leader: the Triton process itself holds the engine's first rank, and mpirun starts a Triton
process for each further one. Orchestrator: one Triton process without an engine, and a worker process for every rank of
every model, spawned by it, or started beside it by mpirun with ranks that are named in advance. Knows the spec; does
not know memory, config.pbtxt or containers.
"""

from __future__ import annotations

from trtspec.decoding.methods import DRAFTS, MIDDLES
from trtspec.errors import TrtspecError
from trtspec.spec.schema import Spec

# A KV cache takes a part of the memory that is free when its model loads, so the order of loading is part of the plan:
# the target comes last and takes what the others leave.
LOAD_ORDER = (*DRAFTS, *reversed(MIDDLES), "target")


def load_order(spec: Spec) -> list[str]:
    """The roles of `spec` in the order in which their engines must be loaded.

    Triton does not keep to one by itself: with several load threads (four by default) models load side by side, with
    one in an order that changes from start to start, also when they are listed (tried on 2.51). Whoever starts the
    server loads them one after another through the model repository API.
    """
    return [role for role in LOAD_ORDER if role in spec.models]


def device_ids(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Role -> GPUs, one for each rank; on several nodes the GPUs of the second count on from those of the first."""
    return {
        role: spec.serving.gpu_device_ids.of(role) or tuple(range(model.world_size))
        for role, model in spec.models.items()
    }


def participants(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Role -> its MPI ranks where mpirun starts the workers; rank 0 is the orchestrator."""
    ranks, first = {}, 1
    for role in load_order(spec):
        size = spec.models[role].world_size
        ranks[role] = tuple(range(first, first + size))
        first += size
    return ranks


def mpi_world_size(spec: Spec) -> int:
    """Processes that mpirun starts together: all of them, where none is spawned."""
    if not spec.serving.orchestrator:
        return max(model.world_size for model in spec.models.values())
    if spec.serving.spawn_processes:
        return 1
    return 1 + sum(model.world_size for model in spec.models.values())


def check_placement(spec: Spec) -> None:
    """Refuse a way of starting the processes in which the engines would never all be loaded.

    Raises:
        TrtspecError: several models, one of them split, without an orchestrator; an orchestrator on several nodes.
    """
    serving, models = spec.serving, spec.models
    split = next((role for role, model in models.items() if model.world_size > 1), None)
    if not serving.orchestrator and split is not None and len(models) > 1:
        # In leader mode a rank stays inside the loading of its first model for good.
        raise TrtspecError(
            f"{len(models)} engine models, of which the {split} is split over {models[split].world_size} GPUs, cannot "
            "be loaded in one server without an orchestrator",
            where=spec.where(("serving", "orchestrator")),
            expected="true",
            fix="set serving.orchestrator: true",
        )
    if serving.orchestrator and serving.spawn_processes and spec.hardware.num_nodes > 1:
        raise TrtspecError(
            "an orchestrator spawns processes on its own node only",
            where=spec.where(("serving", "spawn_processes")),
            fix="set serving.spawn_processes: false, or hardware.num_nodes: 1",
        )
