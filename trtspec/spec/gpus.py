"""The GPUs that a spec may name: compute capability and memory, as the data sheets give them.

Does not know speeds or prices; those belong to the cost model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One catalogue row. `sm` is the compute capability times ten (80 = Ampere A100), 0 for the CPU;
    `memory_gb` is in 10^9 bytes."""

    sm: int
    memory_gb: int


GPUS = {
    "cpu": Gpu(sm=0, memory_gb=0),
    "A100-40GB": Gpu(sm=80, memory_gb=40),
    "A100-80GB": Gpu(sm=80, memory_gb=80),
    "A100-80GB-PCIe": Gpu(sm=80, memory_gb=80),
    "H100-SXM": Gpu(sm=90, memory_gb=80),
    "H100-PCIe": Gpu(sm=90, memory_gb=80),
    "H100-NVL": Gpu(sm=90, memory_gb=94),
    "H200": Gpu(sm=90, memory_gb=141),
}
