"""Which Triton container carries which TensorRT-LLM, as data.

Source: the compatibility matrix of the Triton Inference Server documentation. Knows nothing of specs; what a version
can do beyond having compiled engines is in `trtspec.trtllm.support`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# From 1.3 on there is no TensorRT backend: no trtllm-build, no C++ Triton backend.
FIRST_WITHOUT_ENGINES = (1, 3)
IMAGE = "nvcr.io/nvidia/tritonserver:{tag}-trtllm-python-py3"


@dataclass(frozen=True)
class Release:
    """One Triton container with TensorRT-LLM; versions as the matrix prints them."""

    tag: str
    tensorrt_llm: str
    tensorrt: str
    cuda: str
    driver: str

    @property
    def image(self) -> str:
        """Name of the container image."""
        return IMAGE.format(tag=self.tag)


# Newest first.
RELEASES = (
    Release("26.07", "1.2.1", "10.14.1.48", "13.1.0.036", "590.44.01"),
    Release("26.06", "1.2.1", "10.14.1.48", "13.1.0.036", "590.44.01"),
    Release("26.05", "1.2.1", "10.14.1.48", "13.1.0.036", "590.44.01"),
    Release("26.04", "1.2.1", "10.14.1.48", "13.1.0.036", "590.44.01"),
    Release("26.03", "1.2.0", "10.14.1.48", "13.1.0.036", "590.44.01"),
    Release("26.02", "1.1.0", "10.13.3.9", "13.0.2.006", "580.95.05"),
    Release("26.01", "1.1.0", "10.13.3.9", "13.0.2.006", "580.95.05"),
    Release("25.12", "1.1.0", "10.13.3.9", "13.0.2.006", "580.95.05"),
    Release("25.11", "1.0.3.2510", "10.13.3.9", "13.0.2.006", "580.95.05"),
    Release("25.10", "1.0.0", "10.11.0.33", "12.9.1.010", "575.57.08"),
    Release("25.09", "1.0.0", "10.11.0.33", "12.9.1.010", "575.57.08"),
    Release("25.08", "0.21.0", "10.11.0.33", "12.9.0.043", "575.51.03"),
    Release("25.07", "0.20.0", "10.10.0.31", "12.9.0.036", "575.51.03"),
    Release("25.06", "0.20.0", "10.10.0.31", "12.9.0.036", "575.51.03"),
    Release("25.05", "0.19.0", "10.9.0.34", "12.8.1.012", "570.124.06"),
    Release("25.04", "0.18.2", "10.9.0.34", "12.8.1.012", "570.124.06"),
    Release("25.03", "0.18.0", "10.9.0.34", "12.8.1.012", "570.124.06"),
    Release("25.02", "0.17.0.post1", "10.8.0.43", "12.8.0.038", "570.86.10"),
    Release("25.01", "0.17.0", "10.8.0.43", "12.8.0.038", "570.86.10"),
    Release("24.12", "0.16.0", "10.7.0", "12.6.3", "560.35.05"),
)


def major_minor(version: str) -> tuple[int, int]:
    """`(1, 2)` of `1.2.1`; pre-releases count as the version they lead to.

    Raises:
        ValueError: text that does not begin with two numbers.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if not match:
        raise ValueError(f"{version!r} is no version")
    return int(match[1]), int(match[2])


def has_engine_track(version: str) -> bool:
    """Whether this TensorRT-LLM compiles engines (trtllm-build and the C++ Triton backend)."""
    return major_minor(version) < FIRST_WITHOUT_ENGINES


def release_for(version: str) -> Release | None:
    """The newest known container with this TensorRT-LLM, None when none is known."""
    return next((release for release in RELEASES if release.tensorrt_llm == version), None)
