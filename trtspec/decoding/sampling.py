"""From a row of logits to a distribution, and from a distribution to a token.

Bias, temperature and penalties are applied as TensorRT-LLM applies them, and in its order, so that one request means
the same in every runtime. Knows single rows; not models, drafts or blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

_GREEDY_BELOW = 1e-5  # a smaller temperature is greedy: dividing by it only loses digits
_BLOCK = 64  # ids looked at together when the largest logits are searched
_MASK64 = (1 << 64) - 1
_NEUTRAL = "temperature 1 alone is greedy, as with TensorRT-LLM; to sample, send top_p 1.0 or a seed as well"
_LANES = {"accept": 0x9E3779B97F4A7C15, "token": 0xD1B54A32D192ED03}


@dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn from a row of logits. The default is greedy.

    Raises:
        ValueError: a field out of range; the message begins with its name.
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off; keep ids with at least this share of the largest probability
    repetition_penalty: float = 1.0  # 1: off; divides positive logits of seen ids, multiplies negative ones
    presence_penalty: float = 0.0  # subtracted once from the logit of a seen id
    frequency_penalty: float = 0.0  # subtracted once for every time the id was seen
    seed: int = 0  # uint64

    def __post_init__(self) -> None:
        self.validate()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without any draw."""
        return self.temperature < _GREEDY_BELOW or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether the context changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def greedily(self) -> SamplingParams:
        """The same with temperature 0."""
        return self._changed(temperature=0.0)

    def seeded(self, seed: int) -> SamplingParams:
        """The same with another seed, a uint64."""
        return self._changed(seed=seed)

    def _changed(self, **values: Any) -> SamplingParams:
        """As `dataclasses.replace`, for values that need no validation; each cycle does it several times."""
        changed = object.__new__(SamplingParams)
        changed.__dict__.update(self.__dict__, **values)
        return changed

    def validate(self) -> None:
        """Raises ValueError naming the first field that is out of range."""
        _check("temperature", self.temperature, "a finite number of at least 0", lambda v: v >= 0)
        _check("top_k", self.top_k, "a whole number of at least 0 (0: off)", lambda v: v >= 0, whole=True)
        _check("top_p", self.top_p, "a number above 0 and at most 1 (1: off)", lambda v: 0 < v <= 1)
        _check("min_p", self.min_p, "a number from 0 (off) to 1", lambda v: 0 <= v <= 1)
        _check("repetition_penalty", self.repetition_penalty, "a finite number above 0 (1: off)", lambda v: v > 0)
        _check("presence_penalty", self.presence_penalty, "a finite number", lambda v: True)
        _check("frequency_penalty", self.frequency_penalty, "a finite number", lambda v: True)
        _check("seed", self.seed, "a whole number from 0 to 2**64 - 1", lambda v: 0 <= v <= _MASK64, whole=True)


def _check(name: str, value: Any, expected: str, holds: Callable[[Any], bool], whole: bool = False) -> None:
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or not holds(value):
        raise ValueError(f"{name}: {value!r} is not {expected}")


GREEDY = SamplingParams()


def request_sampling(
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    seed: int | None = None,
) -> tuple[SamplingParams, tuple[str, ...]]:
    """A request's optional fields as sampling parameters, and notes for whoever wrote the request.

    Nothing given is greedy; so are temperature 0 and top_k 1, and temperature 1 with nothing else, not even a seed:
    clients of the upstream repository always send it and get greedy text from TensorRT-LLM. Another temperature alone
    samples from the whole distribution; top_k, top_p or min_p alone sample at temperature 1. As in TensorRT-LLM, 0 for
    top_k or top_p is the same as leaving it out.

    Raises:
        ValueError: a field out of range; the message begins with its name.
    """
    given: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": None if top_p == 0 else top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if temperature is None and ("top_p" in given or given.get("top_k") or given.get("min_p")):
        given["temperature"] = 1.0
    elif (
        isinstance(temperature, float)
        and temperature == 1.0
        and not given.keys() & {"top_p", "seed"}
        and not (given.get("top_k") or given.get("min_p"))
    ):
        return SamplingParams(**(given | {"temperature": 0.0})), (_NEUTRAL,)
    params = SamplingParams(**given)
    if params.greedy:
        return replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0), ()
    if params.top_k or "top_p" in given:
        return params, ()
    note = (
        f"temperature {params.temperature:g} without top_k and top_p: TensorRT-LLM by itself would decode greedily;"
        " top_p 1.0 is sent, so that the whole distribution is sampled"
    )
    return params, (note,)


def processed_logits(
    logits: NDArray[np.floating],
    history: NDArray[np.integer],
    num_generated: int,
    params: SamplingParams,
    *,
    end_ids: Iterable[int] = (),
    min_new_tokens: int = 0,
    bad_words: Sequence[Sequence[int]] = (),
    bias: NDArray[np.floating] | None = None,
) -> NDArray[np.floating]:
    """Logits after bias, temperature, penalties and bans, in the order of TensorRT-LLM's penalty kernel.

    Args:
        logits: [V], as the model gave them. Not changed; returned as they are when nothing applies.
        history: [L], every id before this position, prompt and output: what penalties count.
        num_generated: how many of them are output, compared with `min_new_tokens`.
        params: greedy parameters leave the temperature out.
        end_ids: banned while fewer than `min_new_tokens` tokens are generated.
        bad_words: id sequences; the last id is banned where the ids before it end the history.
        bias: added; ids beyond either length are left alone.

    Returns:
        [V]; float64 when a draw follows and anything applies.
    """
    banned = [word[-1] for word in bad_words if _ends_with(history, word[:-1])]
    if num_generated < min_new_tokens:
        banned.extend(end_ids)
    divisor = 1.0 if params.greedy else params.temperature
    if divisor == 1.0 and not params.penalised and not banned and bias is None:
        return logits

    vocab_size = len(logits)
    work: NDArray[Any] = logits.astype(np.float32 if params.greedy else np.float64)
    if bias is not None:
        shared = min(vocab_size, len(bias))
        work[:shared] += bias[:shared]
    if divisor != 1.0:
        work /= divisor
    if params.penalised and len(history):
        ids, counts = np.unique(history, return_counts=True)
        known = (ids >= 0) & (ids < vocab_size)
        ids, counts = ids[known], counts[known]
        seen = work[ids]
        seen = np.where(seen < 0, seen * params.repetition_penalty, seen / params.repetition_penalty)
        work[ids] = seen - params.presence_penalty - params.frequency_penalty * counts
    work[[token for token in banned if 0 <= token < vocab_size]] = -np.inf
    return work


def _ends_with(history: NDArray[np.integer], ids: Sequence[int]) -> bool:
    return len(ids) <= len(history) and history[len(history) - len(ids) :].tolist() == list(ids)


def most_likely(processed: NDArray[np.floating]) -> int:
    """The id with the largest logit, the lowest such id on a tie.

    Raises:
        ValueError: a logit is NaN, or every id is banned.
    """
    token = int(processed.argmax())
    if not math.isfinite(processed[token]):
        raise ValueError(_NO_DISTRIBUTION)
    return token


def likeliest(processed: NDArray[np.floating], count: int) -> list[int]:
    """The ids with the `count` largest logits, the largest first, of equal ones the lowest; banned ones left out.

    Raises:
        ValueError: as `most_likely`.
    """
    most_likely(processed)
    ids = _largest(processed, min(count, len(processed)))
    ids = ids[np.argsort(-processed[ids], kind="stable")]
    return ids[processed[ids] > -np.inf].tolist()


_NO_DISTRIBUTION = "logits: no distribution (a NaN or infinite logit, or every id banned)"


def probabilities(processed: NDArray[np.floating], params: SamplingParams) -> NDArray[np.float64]:
    """The distribution that a token is drawn from: softmax, cut by top-k, then top-p, then min-p.

    Args:
        processed: [V], from `processed_logits`.

    Returns:
        [V], sums to 1; one-hot when greedy. Of ids with equal logits at a cut the lower ones stay.

    Raises:
        ValueError: a logit is NaN or +inf, or every id is banned.
    """
    if params.greedy:
        one_hot = np.zeros(len(processed), dtype=np.float64)
        one_hot[most_likely(processed)] = 1.0
        return one_hot

    peak = processed.max()
    if not math.isfinite(peak):
        raise ValueError(_NO_DISTRIBUTION)
    ids = _largest(processed, params.top_k) if 0 < params.top_k < len(processed) else None
    kept: NDArray[np.floating] = processed if ids is None else processed[ids]
    weights = np.subtract(kept, peak, dtype=np.float64)
    np.exp(weights, out=weights)  # the largest is exactly 1
    if params.top_p < 1.0:
        nucleus = _nucleus(weights, params.top_p)
        inside = weights[nucleus]
        weights[:] = 0.0
        weights[nucleus] = inside
    if params.min_p > 0.0:
        weights[weights < params.min_p] = 0.0
    weights /= weights.sum()
    if ids is None:
        return weights
    spread = np.zeros(len(processed), dtype=np.float64)
    spread[ids] = weights
    return spread


def _largest(values: NDArray[np.floating], count: int) -> NDArray[np.intp]:
    """Ids of the `count` largest values in rising order; of equal values the lower ids."""
    ids = np.arange(len(values))
    if count <= (num_blocks := len(values) // _BLOCK):
        # that many blocks have a maximum of at least this, so no smaller value is among the largest
        maxima = values[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK).max(axis=1)
        ids = np.flatnonzero(values >= np.partition(maxima, num_blocks - count)[num_blocks - count])
    candidates = values[ids]
    threshold = np.partition(candidates, len(ids) - count)[len(ids) - count]
    above = candidates >= threshold
    surplus = int(above.sum()) - count
    if surplus:
        above[np.flatnonzero(candidates == threshold)[-surplus:]] = False
    return ids[above]


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """The smallest set of ids that holds `top_p` of the weight, largest weights first."""
    wanted = top_p * weights.sum()
    for size in (256, 4096, len(weights)):  # a full sort only for a flat distribution
        ids = _largest(weights, min(size, len(weights)))
        order = ids[np.argsort(-weights[ids], kind="stable")]
        cumulative = np.cumsum(weights[order])
        if cumulative[-1] >= wanted:
            break
    return order[: int(np.searchsorted(cumulative, wanted)) + 1]


def log_probability(processed: NDArray[np.floating], token: int) -> float:
    """Natural logarithm of the token's probability before top-k, top-p and min-p."""
    row = processed.astype(np.float64)
    row -= row.max()
    return float(row[token] - math.log(np.exp(row).sum()))


def sample(probs: NDArray[np.float64], u: float) -> int:
    """The id at quantile `u` in [0, 1) of the distribution, ids in rising order; never one of probability 0."""
    cumulative = np.cumsum(probs)
    token = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    if token == len(probs):  # u * total was rounded up to the total
        token = int(np.flatnonzero(probs)[-1])
    return token


def derive_seed(seed: int, position: int, stream: str) -> int:
    """The uint64 seed for an engine call that starts at `position` of the context, for one role (`stream`).

    Streams begin far apart, and positions count up from there as `Uniforms` does. A runtime that draws with
    `Uniforms` therefore uses the same number for the same position, however the text is cut into calls.
    """
    start = int.from_bytes(blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest(), "big")
    return (start + position) & _MASK64


class Uniforms:
    """The random numbers of one engine call: one for each position and purpose, in any order, without state."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def accepts(self, position: int, probability: float, attempt: int = 0) -> bool:
        """True with this probability: is the draft token at `position` accepted? `attempt` counts those tried there."""
        return self.at(position, "accept", attempt) < probability

    def draw(self, position: int, probs: NDArray[np.float64]) -> int:
        """A token for `position` from the distribution `probs` [V]."""
        return sample(probs, self.at(position, "token"))

    def at(self, position: int, lane: str, attempt: int = 0) -> float:
        """Uniform on [0, 1) with 53 bits; `position` counts from the start of the call."""
        mixed = _mix(_mix((self._seed + position) & _MASK64) ^ ((_LANES[lane] + attempt) & _MASK64))
        return (mixed >> 11) * 2.0**-53


def _mix(x: int) -> int:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit changes half of the output bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
