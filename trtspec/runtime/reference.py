"""The reference sampler: the slow, plain sampler that defines what is right.

transformers' own model with the unconverted weights, no KV cache, no speculation, and a distribution written down
step by step. Shares no code with the decoding core or the torch runtime, so that it can contradict them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from trtspec.errors import TrtspecError
from trtspec.models.mtp import module_prefixes
from trtspec.models.source import ModelSource

if TYPE_CHECKING:
    from trtspec.decoding.sampling import SamplingParams


class ReferenceSampler:
    """One model, in float32 unless told otherwise.

    Args:
        source: the model, as its author published it.
        dtype: float32, float16 or bfloat16, in which it computes; logits and probabilities come in float32 and float64
            all the same.

    Raises:
        TrtspecError: weights that transformers' model does not know, or lacks.
    """

    def __init__(self, source: ModelSource, dtype: str = "float32") -> None:
        self._model = _transformers_model(source, getattr(torch, dtype))

    def logits(self, ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """[L, V]: row i is for the token after `ids[: i + 1]`."""
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([[int(i) for i in ids]]), use_cache=False)
        return output.logits[0].float().numpy()

    def trace(self, ids: Sequence[int] | NDArray[np.integer]) -> tuple[NDArray[np.float32], list[torch.Tensor]]:
        """The logits [L, V] as `logits` gives them, and what goes into each decoder layer, [1, L, hidden]."""
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([[int(i) for i in ids]]), use_cache=False, output_hidden_states=True
            )
        return output.logits[0].float().numpy(), list(output.hidden_states[:-1])

    def continuation(
        self, ids: Sequence[int] | NDArray[np.integer], max_new_tokens: int, end_ids: tuple[int, ...] = ()
    ) -> list[int]:
        """The greedy continuation, the end id that stopped it included; with a KV cache, as nothing is judged by it."""
        text = torch.tensor([[int(i) for i in ids]])
        new: list[int] = []
        cache = None
        with torch.inference_mode():
            while len(new) < max_new_tokens and not set(new) & set(end_ids):
                output = self._model(input_ids=text, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                new.append(int(output.logits[0, -1].argmax()))
                text = torch.tensor([[new[-1]]])
        return new

    def distribution(
        self, ids: Sequence[int] | NDArray[np.integer], sampling: SamplingParams, **rules: Any
    ) -> NDArray[np.float64]:
        """[V]: what the token after `ids` is drawn from; `rules` are the keywords of the function `distribution`."""
        return distribution(self.logits(ids)[-1], ids, sampling, **rules)

    def generate(
        self,
        ids: Sequence[int] | NDArray[np.integer],
        sampling: SamplingParams,
        max_new_tokens: int,
        *,
        end_ids: tuple[int, ...] = (),
        **rules: Any,
    ) -> list[int]:
        """New tokens, the end id that stopped it included; everything is computed again for each of them.

        Args:
            ids: the prompt.
            sampling: its seed seeds PyTorch's generator, so draws are not those of the decoding core.
            max_new_tokens: at most so many.
            end_ids: ids that end the answer.
            rules: other keywords of the function `distribution`, except `num_generated`.
        """
        generator = torch.Generator().manual_seed(sampling.seed % 2**63)
        text = [int(i) for i in ids]
        new: list[int] = []
        while len(new) < max_new_tokens and not set(new) & set(end_ids):
            p = self.distribution(text + new, sampling, num_generated=len(new), end_ids=end_ids, **rules)
            new.append(int(torch.multinomial(torch.from_numpy(p), 1, generator=generator)))
        return new


def distribution(
    logits: NDArray[np.floating],
    history: Sequence[int] | NDArray[np.integer],
    sampling: SamplingParams,
    *,
    num_generated: int = 0,
    min_new_tokens: int = 0,
    end_ids: Iterable[int] = (),
    bad_words: Iterable[Sequence[int]] = (),
    bias: NDArray[np.floating] | None = None,
) -> NDArray[np.float64]:
    """The distribution that one row of logits stands for, in the order of TensorRT-LLM.

    Args:
        logits: [V].
        history: all ids before this position, prompt and output.
        sampling: temperature, cuts and penalties.
        num_generated: how many of the history are output.
        min_new_tokens: `end_ids` are impossible while fewer are generated.
        end_ids: ids that end the answer.
        bad_words: the last id of each is impossible after the ids before it.
        bias: [V], added.

    Returns:
        [V], one-hot for greedy parameters.
    """
    row = torch.tensor(logits, dtype=torch.float64)
    history = [int(i) for i in history]
    # 1. bias
    if bias is not None:
        row = row + torch.tensor(bias, dtype=torch.float64)
    # 2. temperature
    if not sampling.greedy:
        row = row / sampling.temperature
    # 3. penalties, for every id that was seen
    for token, count in Counter(history).items():
        value = float(row[token])
        value = value * sampling.repetition_penalty if value < 0 else value / sampling.repetition_penalty
        row[token] = value - sampling.presence_penalty - sampling.frequency_penalty * count
    # 4. what is forbidden here
    forbidden = [word[-1] for word in bad_words if history[len(history) - len(word) + 1 :] == list(word[:-1])]
    if num_generated < min_new_tokens:
        forbidden += end_ids
    for token in forbidden:
        row[token] = -torch.inf
    if sampling.greedy:
        result = torch.zeros_like(row)
        result[row.argmax()] = 1.0
        return result.numpy()
    # 5. top-k, top-p, min-p on the probabilities in falling order
    values, order = torch.sort(torch.softmax(row, dim=0), descending=True, stable=True)
    if sampling.top_k:
        values[sampling.top_k :] = 0.0
        values = values / values.sum()
    before = torch.cumsum(values, dim=0) - values  # what stands before each id
    if sampling.top_p < 1.0:
        values[before >= sampling.top_p] = 0.0
    values[values < sampling.min_p * values[0]] = 0.0
    result = torch.zeros_like(row)
    result[order] = values / values.sum()
    return result.numpy()


def _transformers_model(source: ModelSource, dtype: torch.dtype) -> torch.nn.Module:
    import transformers

    kind = getattr(transformers, source.config.architecture, None)
    if kind is None:
        raise TrtspecError(f"transformers has no {source.config.architecture}", where=source.name)
    model, report = kind.from_pretrained(
        None,
        config=kind.config_class(**source.config.to_hf()),
        state_dict={
            name: source.tensor(name).to(dtype)
            for name in source.tensor_names()
            if not name.startswith(module_prefixes(source.config))  # modules that draft are no part of the model
        },
        dtype=dtype,
        attn_implementation="eager",
        output_loading_info=True,
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            raise TrtspecError(
                f"weights do not fit transformers' {kind.__name__}: {problem} {sorted(report[problem])[:3]}",
                where=source.name,
            )
    return model.eval()
