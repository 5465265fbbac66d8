"""The catalogue of GPUs: its rows, and rows of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from trtspec.errors import TrtspecError
from trtspec.spec.gpus import GPUS, Gpu, Link, find_gpu, load_gpus
from trtspec.spec.schema import GpuName

ROW = """\
B200:
  sm: 100
  memory_gb: 180
  bandwidth_gb_per_s: 7700
  dense_tflops: {bfloat16: 2250, fp8: 4500}
  link: {kind: NVLink, gb_per_s: 1800}
  sources: [a data sheet]
"""


def test_a_spec_may_name_the_rows_and_no_others() -> None:
    assert list(GPUS) == list(get_args(GpuName))
    assert all(GPUS[name].name == name for name in GPUS)


# Memory GB, bandwidth TB/s, dense bf16, fp8 and int8 in 10^12/s, and tokens in flight at which matrices of 16-bit
# weights turn from memory to arithmetic (operations per byte).
FIGURES = {
    "A100-40GB": (40, 1.555, 312, None, 624, 201),
    "A100-80GB": (80, 2.039, 312, None, 624, 153),
    "A100-80GB-PCIe": (80, 1.935, 312, None, 624, 161),
    "H100-PCIe": (80, 2.0, 756.5, 1513, 1513, 378),
    "H100-SXM": (80, 3.35, 989.4, 1978.9, 1978.9, 295),
    "H100-NVL": (94, 3.9, 835, 1671, None, 214),
    "H200": (141, 4.8, 989, 1979, 1979, 206),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_the_data_sheets(name: str) -> None:
    memory, bandwidth, bf16, fp8, int8, ridge = FIGURES[name]
    gpu = GPUS[name]
    assert (gpu.memory_gb, gpu.bandwidth_gb_per_s) == (memory, pytest.approx(1000 * bandwidth))
    rates = gpu.dense_tflops
    assert (rates["bfloat16"], rates.get("fp8"), rates.get("int8")) == (bf16, fp8, int8)
    assert rates["float16"] == rates["bfloat16"]
    assert round(rates["bfloat16"] / bandwidth) == ridge
    assert gpu.link is not None and gpu.link.kind == ("PCIe" if name.endswith(("PCIe", "NVL")) else "NVLink")
    assert gpu.sources and all(source.startswith("NVIDIA ") for source in gpu.sources)


def test_the_table_is_complete() -> None:
    assert {*FIGURES, "cpu"} == set(GPUS)
    assert (GPUS["cpu"].sm, GPUS["cpu"].memory_gb, GPUS["cpu"].bandwidth_gb_per_s) == (0, 0, None)


def test_an_unknown_gpu_lists_the_known_ones_and_says_how_to_add_one() -> None:
    with pytest.raises(TrtspecError) as error:
        find_gpu("B200")
    text = str(error.value)
    assert "'B200'" in text and all(name in text for name in GPUS) and "--gpu-file" in text and "\n" not in text


def test_a_row_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text(ROW)
    gpus = load_gpus(tmp_path / "g.yaml")
    assert list(gpus) == [*GPUS, "B200"]
    assert find_gpu("B200", gpus) == Gpu(
        name="B200",
        sm=100,
        memory_gb=180,
        bandwidth_gb_per_s=7700,
        dense_tflops={"bfloat16": 2250, "fp8": 4500},
        link=Link(kind="NVLink", gb_per_s=1800),
        sources=["a data sheet"],
    )
    (tmp_path / "g.yaml").write_text(ROW.replace("B200", "H200"))
    assert find_gpu("H200", load_gpus(tmp_path / "g.yaml")).memory_gb == 180
    assert GPUS["H200"].memory_gb == 141


BROKEN = {
    "empty": ("", r"g\.yaml: holds no GPUs; expected rows such as"),
    "a list": ("- 1\n", r"g\.yaml: holds no GPUs"),
    "no YAML": ("a: [\n", r"g\.yaml:2: "),
    "given twice": (ROW + ROW, r"g\.yaml:8: the key B200 is given twice"),
    "no row": ("B200: fast\n", r"g\.yaml:1: B200: 'fast' is no row"),
    "no memory": (ROW.replace("  memory_gb: 180\n", ""), r"g\.yaml:1: B200\.memory_gb: Field required"),
    "a typo": (ROW.replace("bandwidth_gb", "bandwith_gb"), r"g\.yaml:4: B200\.bandwith_gb_per_s: Extra inputs"),
    "no number": (ROW.replace("7700", "fast"), r"g\.yaml:4: B200\.bandwidth_gb_per_s: "),
    "negative": (ROW.replace("7700", "-1"), r"g\.yaml:4: B200\.bandwidth_gb_per_s: .* greater than 0"),
    "not finite": (ROW.replace("7700", ".inf"), r"g\.yaml:4: B200\.bandwidth_gb_per_s: "),
    "unknown arithmetic": (ROW.replace("fp8:", "fp6:"), r"g\.yaml:5: B200\.dense_tflops\.fp6: "),
    "unknown link": (ROW.replace("NVLink", "rope"), r"g\.yaml:6: B200\.link\.kind: "),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, case: str) -> None:
    content, message = BROKEN[case]
    (tmp_path / "g.yaml").write_text(content)
    with pytest.raises(TrtspecError, match=message) as error:
        load_gpus(tmp_path / "g.yaml")
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TrtspecError, match=r"none\.yaml: cannot be read: No such file"):
        load_gpus(tmp_path / "none.yaml")
    (tmp_path / "g.yaml").write_bytes(b"\xff")
    with pytest.raises(TrtspecError, match=r"g\.yaml: is not UTF-8 text"):
        load_gpus(tmp_path / "g.yaml")
