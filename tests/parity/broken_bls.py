"""Ways to break the BLS model of a served repository; lies beside its `model.py`, which installs it.

A file says which one is in force, so that one server can be broken in many ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from trtspec_decoding import detokenize, generation, stop


def install(model: dict[str, Any], switch: Path) -> None:
    """Wrap what can be broken.

    Args:
        model: the globals of `model.py`.
        switch: holds the name of a breakage, or nothing.
    """

    def broken(name: str) -> bool:
        return switch.read_text() == name

    def wrap(owner: Any, name: str, changed: Callable[..., Any]) -> None:
        real = owner[name] if isinstance(owner, dict) else getattr(owner, name)

        def either(*args: Any, **keywords: Any) -> Any:
            return changed(real, *args, **keywords)

        if isinstance(owner, dict):
            owner[name] = either
        else:
            setattr(owner, name, either)

    def read_requests(real: Callable[..., Any], *args: Any) -> Any:
        return [changed(client) for client in real(*args)]

    def changed(client: Any) -> Any:
        decoding = client.decoding
        if broken("forgets min_tokens"):
            decoding = replace(decoding, min_tokens=0)
        if broken("bans the first token of a bad word"):
            decoding = replace(decoding, bad_words=tuple(word[:1] for word in decoding.bad_words))
        if broken("one seed for all"):
            decoding = replace(decoding, sampling=replace(decoding.sampling, seed=7))
        if broken("forgets the frequency penalty"):
            decoding = replace(decoding, sampling=replace(decoding.sampling, frequency_penalty=0.0))
        if broken("one token too many"):
            decoding = replace(decoding, max_tokens=decoding.max_tokens + 1)
        if broken("deaf to ends inside a block"):
            ends, decoding = decoding.end_ids, replace(decoding, end_ids=())
            object.__setattr__(decoding, "heard", ends)
        return replace(client, decoding=decoding)

    def commit(real: Callable[..., Any], self: Any, *args: Any) -> Any:
        block = real(self, *args)
        if set(block.token_ids) & set(getattr(self.request, "heard", ())):
            self.finish_reason = "stop"
            return replace(block, finish_reason="stop")
        return block

    def push_stop(real: Callable[..., Any], self: Any, text: str) -> str:
        before = self.stopped
        passed: str = real(self, text)
        leaks = broken("leaks the stop word") and self.stopped and not before
        return passed + self._strings[0] if leaks else passed

    def push_ids(real: Callable[..., Any], self: Any, ids: list[int]) -> str:
        if broken("splits characters"):
            return "".join(str(self._decode([token])) for token in ids)
        return str(real(self, ids))

    def totals(real: Callable[..., Any], self: Any, last: Any) -> dict[str, np.ndarray]:
        counted: dict[str, np.ndarray] = real(self, last)
        if broken("counts the prompt as output"):
            counted["num_output_tokens"] = counted["num_output_tokens"] + counted["num_input_tokens"]
        if broken("counts rejected drafts as accepted"):
            counted["total_accepted_draft_tokens"] = counted["total_draft_tokens"]
        return counted

    def verifier(real: Callable[..., Any], method: str, call: Callable[..., Any], *rest: Any) -> Any:
        return real(method, _stale(call) if broken("cache off by one") else call, *rest)

    wrap(model, "read_requests", read_requests)
    wrap(model, "make_chain_verifier", verifier)
    wrap(model["Answer"], "_totals", totals)
    wrap(generation.Generation, "commit", commit)
    wrap(stop.StopStrings, "push", push_stop)
    wrap(detokenize.Detokenizer, "push", push_ids)


def _stale(call: Callable[..., Any]) -> Callable[..., Any]:
    """A target that, after a rejection, still sees the rejected draft token in place of its own."""
    state: dict[str, int] = {}

    def stale(request: Any) -> Any:
        ids = request.input_ids.copy()
        if state.get("length") == len(ids):
            ids[-1] = state["token"]
        result = call(replace(request, input_ids=ids))
        drafts = request.draft_tokens
        state.clear()
        if drafts is not None and result.num_accepted < len(drafts):
            state.update(length=len(ids) + len(result.output_ids), token=int(drafts[result.num_accepted]))
        return result

    return stale
