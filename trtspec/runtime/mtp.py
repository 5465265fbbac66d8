"""Multi-token prediction inside the engine: the modules of a DeepSeek-V3-like checkpoint draft, the target verifies.

Module k (from 1) stands behind the target's last layer. At position i it sees the hidden state that the target
(k = 1) or module k - 1 has there, and the embedding of token i + k, and predicts token i + k + 1:

    x_k[i] = norm(layer(eh_proj([enorm(embed(t[i + k])); hnorm(x_{k-1}[i])])))

with x_0 the target's, after its last norm (DeepSeek-V3, arXiv 2412.19437, section 2.2; there the two halves are written
the other way round, but the published weights want the embedding first: TensorRT-LLM, vLLM and SGLang have it so).
Further drafts come from the last module again, one position on, fed with its own state. Keys and values of the modules
are further layers of the same cache.

The drafts are chosen (argmax), not drawn, and kept while they equal the target's own token, argmax or draw: the rule of
`decoding.verify` for drafts without logits. So the answer is that of plain decoding, random numbers included. Knows
tensors, sequences and requests; not files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from trtspec.decoding.engine_call import EngineRequest, EngineResult
from trtspec.decoding.sampler import TokenSampler
from trtspec.errors import TrtspecError
from trtspec.models.mtp import OWN, SHARED, check_mtp, module_prefixes
from trtspec.models.source import ModelSource
from trtspec.runtime.engine import EngineConfig
from trtspec.runtime.kernels import linear
from trtspec.runtime.kv_cache import Sequence
from trtspec.runtime.llama import KVCache, Llama, stream_layer
from trtspec.runtime.passes import Calls

_MAX_PASS = 512  # tokens in one forward pass of a module, as in one of the target

T = TypeVar("T")


def module_weights(source: ModelSource, num_modules: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The tensors of the first modules of a checkpoint, under an engine's names, each with what reads it.

    The decoder layer of module k is layer num_hidden_layers + k; `mtp.k.` begins the names of the rest.

    Raises:
        TrtspecError: the checkpoint has fewer modules, or one of their tensors is missing.
    """
    check_mtp(source, num_modules)
    config, names = source.config, set(source.tensor_names())

    @lru_cache(maxsize=1)
    def read_layer(layer: int) -> dict[str, torch.Tensor]:
        return dict(stream_layer(config, source.tensor, layer))

    def layer_tensor(layer: int, name: str) -> torch.Tensor:
        return read_layer(layer)[name]

    result: dict[str, Callable[[], torch.Tensor]] = {}
    for number, prefix in enumerate(module_prefixes(config)[:num_modules]):
        for name in (*OWN, *SHARED):
            if f"{prefix}{name}.weight" in names:
                result[f"mtp.{number}.{name}.weight"] = partial(source.tensor, f"{prefix}{name}.weight")
        layer = config.num_hidden_layers + number
        for name in dict(stream_layer(config, lambda name: torch.empty(1), layer)):
            result[name] = partial(layer_tensor, layer, name)
    return result


class Forward(Protocol):
    """A pass over ids [n] that follow a sequence; returns `head` of the last states [num_rows, hidden]."""

    def __call__(self, ids: NDArray[np.int32], num_rows: int, head: Callable[[torch.Tensor], T]) -> T: ...


class Modules:
    """The modules of one engine.

    Args:
        model: the target; its weights hold the modules' (`module_weights`), its caches have `num_modules` layers more
            than it has.
        num_modules: how many modules there are.
        num_draft_tokens: drafted in one go at most.
    """

    def __init__(self, model: Llama, num_modules: int, num_draft_tokens: int) -> None:
        self.num_modules = min(num_modules, num_draft_tokens)  # the others would never be asked
        self.num_draft_tokens = num_draft_tokens
        self._model = model

    @classmethod
    def of_engine(cls, config: EngineConfig, model: Llama) -> Modules | None:
        """The modules that an engine drafts with; None where its stamp names none.

        Raises:
            TrtspecError: one of their tensors is missing.
        """
        section: Mapping[str, int] = config.stamp.get("speculation") or {}
        if section.get("method") != "mtp":
            return None
        num_modules = section["num_modules"]
        needed = {f"mtp.{number}.{name}.weight" for number in range(num_modules) for name in OWN}
        for number in range(num_modules):
            layer = config.model.num_hidden_layers + number
            needed |= dict(stream_layer(config.model, lambda name: torch.empty(1), layer)).keys()
        if missing := sorted(needed - model.weights.keys()):
            raise TrtspecError(
                f"tensor {missing[0]} of a multi-token prediction module is missing ({len(missing)} in all)",
                where=str(config.path.parent),
                fix="build the engine again",
            )
        return cls(model, num_modules, section["num_draft_tokens"])

    def generate(
        self,
        request: EngineRequest,
        sequence: Sequence,
        forward: Forward,
        alone: Calls,
    ) -> EngineResult:
        """Answer a request without draft tokens.

        Args:
            request: the call.
            sequence: of the request, acquired.
            forward: a pass of all layers over ids behind `sequence`, which it appends.
            alone: what it is given computes while no other request does.
        """
        reused = sequence.length
        sampler = TokenSampler(request)
        rows: list[NDArray[np.float32]] = []
        log_probs: list[float] = []
        num_drafted = num_accepted = 0

        # Where the modules have to begin, the target's states are needed, so it runs again from there.
        begin = sequence.length = self._settled(min(sequence.drafter_length, reused))
        fresh, drafts = request.input_ids[begin:], np.empty(0, dtype=np.int32)
        states = self._model.embed(torch.empty(0, dtype=torch.int64, device=self._model.device))  # [0, hidden]
        while True:
            new = self._states(np.concatenate([fresh, drafts]), forward)
            logits = self._logits(new[len(fresh) - 1 :], alone)  # [drafts + 1, V]
            accepted = 0
            for row, draft in zip(logits, [*drafts.tolist(), None], strict=True):
                token = sampler.next(row)
                if request.return_generation_logits:
                    rows.append(row)
                if request.return_log_probs:
                    log_probs.append(sampler.log_probability(row, token))
                sampler.append(token)
                accepted += token == draft
                if token != draft or sampler.finished:
                    break
            num_drafted += len(drafts)
            num_accepted += accepted
            sequence.length -= len(drafts) - accepted  # forget the rejected drafts
            if sampler.finished:
                break
            # Now the text has one token more than the sequence; states are those of positions begin to length - 1.
            states = torch.cat([states, new[: len(fresh) + accepted]])
            fresh = np.array(sampler.tokens[-1:], dtype=np.int32)
            room = min(self.num_draft_tokens, request.max_new_tokens - len(sampler.tokens) - 1)
            known = np.append(sequence.tokens[begin + 1 : sequence.length], fresh)
            drafts = alone(partial(self.propose, sequence.cache, begin, states, known, room))
            if room >= self.num_modules:  # else the last modules have seen nothing yet
                sequence.drafter_length = sequence.length + 1
                settled = self._settled(sequence.drafter_length)
                states, begin = states[settled - begin :], settled
        return EngineResult(
            output_ids=np.array(sampler.tokens, dtype=np.int32),
            generation_logits=np.stack(rows) if rows else None,
            log_probs=np.array(log_probs, dtype=np.float32) if log_probs else None,
            num_draft_tokens=num_drafted,
            num_accepted=num_accepted,
            reused_tokens=reused,
        )

    def propose(
        self, cache: KVCache, begin: int, states: torch.Tensor, known: NDArray[np.int32], num_draft_tokens: int
    ) -> NDArray[np.int32]:
        """Draft the tokens that follow `known`.

        Args:
            cache: positions before `begin` are filled in the layers of the modules too.
            begin: first position that the modules have to see.
            states: [n, hidden], the target's at positions begin to begin + n - 1, after its last norm.
            known: int32 [n], tokens of positions begin + 1 to begin + n.
            num_draft_tokens: how many.

        Returns:
            int32 [num_draft_tokens].
        """
        n, tokens = len(known), known.tolist()
        x = states
        for step in range(num_draft_tokens):
            if step < self.num_modules:
                module, where, ids = step, begin, tokens[step : step + n]
            else:  # the last module again, after its own draft
                module, where, ids, x = self.num_modules - 1, begin + n + step - self.num_modules, tokens[-1:], x[-1:]
            x = self._module(module, ids, x, cache, where)
            head = self._model.weights.get(f"mtp.{module}.shared_head.head.weight")
            logits = self._model.head(x[-1:]) if head is None else linear(x[-1:], head)
            tokens.append(int(logits.argmax()))
        return np.array(tokens[n:], dtype=np.int32)

    def _module(self, number: int, ids: list[int], x: torch.Tensor, cache: KVCache, start: int) -> torch.Tensor:
        """States [n, hidden] of one module at positions start to start + n - 1."""
        model, name = self._model, f"mtp.{number}"
        layer = model.config.num_hidden_layers + number
        shared = model.weights["transformer.vocab_embedding.weight"]
        embedding = model.weights.get(f"{name}.embed_tokens.weight", shared)
        results = []
        for first in range(0, len(ids), _MAX_PASS):
            tokens = torch.tensor(ids[first : first + _MAX_PASS], device=model.device)
            halves = (
                model.norm(torch.nn.functional.embedding(tokens, embedding), f"{name}.enorm"),
                model.norm(x[first : first + _MAX_PASS], f"{name}.hnorm"),
            )
            joined = linear(torch.cat(halves, dim=-1), model.weights[f"{name}.eh_proj.weight"])
            results.append(model.run(range(layer, layer + 1), joined[None], cache, start + first)[0])
        return model.norm(torch.cat(results), f"{name}.shared_head.norm")

    def _settled(self, num_tokens: int) -> int:
        """Positions whose keys and values in all modules rest on the first `num_tokens` tokens alone."""
        return max(0, num_tokens - self.num_modules)

    def _states(self, ids: NDArray[np.int32], forward: Forward) -> torch.Tensor:
        """The target's states [n, hidden] at ids [n]."""
        pieces = [ids[first : first + _MAX_PASS] for first in range(0, len(ids), _MAX_PASS)]
        return torch.cat([forward(piece, len(piece), lambda states: states) for piece in pieces])

    def _logits(self, states: torch.Tensor, alone: Calls) -> NDArray[np.float32]:
        return alone(lambda: self._model.head(states).cpu().numpy())
