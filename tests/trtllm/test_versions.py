"""The compatibility table: which container carries which TensorRT-LLM, and which versions compile engines."""

from __future__ import annotations

import pytest

from trtspec.trtllm.versions import RELEASES, has_engine_track, major_minor, release_for


@pytest.mark.parametrize(
    ("version", "tag"),
    [
        ("1.2.1", "26.07"),  # the newest of four
        ("1.2.0", "26.03"),
        ("1.1.0", "26.02"),
        ("1.0.0", "25.10"),
        ("0.16.0", "24.12"),
    ],
)
def test_the_newest_container_of_a_version(version: str, tag: str) -> None:
    release = release_for(version)
    assert release is not None and release.tag == tag
    assert release.image.endswith(f"tritonserver:{tag}-trtllm-python-py3")


def test_a_version_without_a_container() -> None:
    assert release_for("1.3.0") is None


@pytest.mark.parametrize(
    ("version", "compiles"),
    [("0.16.0", True), ("1.2.1", True), ("1.2.0rc8", True), ("1.3.0rc1", False), ("1.3.0", False), ("1.10", False)],
)
def test_engines_end_with_1_2(version: str, compiles: bool) -> None:
    assert has_engine_track(version) is compiles


def test_releases_are_newest_first_and_unique() -> None:
    tags = [release.tag for release in RELEASES]
    assert tags == sorted(set(tags), reverse=True)
    assert major_minor(RELEASES[0].tensorrt_llm) == (1, 2)


def test_what_is_no_version() -> None:
    with pytest.raises(ValueError, match="'newest' is no version"):
        major_minor("newest")
