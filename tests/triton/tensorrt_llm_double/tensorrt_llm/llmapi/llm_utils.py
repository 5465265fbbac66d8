"""Part of the test double of tensorrt_llm."""

from __future__ import annotations

from typing import Any


def update_llm_args_with_extra_dict(llm_args: dict[str, Any], llm_args_dict: dict[str, Any]) -> dict[str, Any]:
    """The real one turns sections into config objects; this double checks them as they are, in LLM(...)."""
    return {**llm_args, **llm_args_dict}
