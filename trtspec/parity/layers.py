"""One layer of an executed checkpoint against the same layer of its model: how far they are apart, and what is wrong.

Both get the reference's own hidden states, so that a fault shows in the layer that has it and in no other. A weight is
compared as its inputs weigh it: SmoothQuant and AWQ round features that are never large as coarsely as they like.
Knows tensors and the layout of layers; not prompts, budgets or reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from trtspec.models.source import ModelSource
from trtspec.runtime.llama import Llama, stream_layer
from trtspec.runtime.weights import LARGEST, ExecutableWeights
from trtspec.trtllm.checkpoint import Checkpoint, Linear, linears

_ALIKE = 0.8  # cosine from which two blocks of weights count as the same one, however they were rounded
_COVERED = 1.5  # how many times the largest input of the calibration that of the prompts may be, or the other way round
_SHOWN = 4  # rows or inputs that are listed
_ROW_SPREAD = 4.0  # how much larger the relative error of one row may be than that of a whole head or rank
_NEGLIGIBLE = 0.01  # rows whose square is less than this part of the mean square are not looked at by themselves
_FED_BY = {"attention.qkv": "input_layernorm", "mlp.fc": "post_layernorm", "mlp.gate": "post_layernorm"}


@dataclass(frozen=True)
class Comparison:
    """One layer, or one linear layer or other tensor in it.

    Attributes:
        name: its module name, counted over the whole model.
        error: relative error; of a linear layer that of its worst head or rank.
        problem: what is wrong, in words; None while the error is within its bound.
    """

    name: str
    error: float
    problem: str | None = None


class _Recorder:
    """Stands where a quantizer stands, changes nothing, and remembers how large the inputs were."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.squares = torch.zeros(1)  # [features], summed over the rows
        self.largest = torch.zeros(1)  # [features]

    def __call__(self, x: torch.Tensor, expert: int | None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows):
            self.squares = self.squares + rows.square().sum(0)
            self.largest = torch.maximum(self.largest, rows.abs().amax(0))
            self.num_rows += len(rows)
        return x

    @property
    def size(self) -> torch.Tensor:
        """[features]: root mean square of each."""
        return (self.squares / self.num_rows).sqrt()


@dataclass(frozen=True)
class _Part:
    """Some rows (dim 0) or columns (dim 1) of a weight."""

    dim: int
    numbers: Sequence[int]

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The part of `[out, in]`."""
        return weight.index_select(self.dim, torch.tensor(self.numbers))

    def fill(self, weight: torch.Tensor, value: torch.Tensor) -> None:
        """Set the part of `[out, in]`."""
        weight.index_fill_(self.dim, torch.tensor(self.numbers), value.item())


@dataclass(frozen=True)
class _Weights:
    """A weight of the checkpoint beside that of the model, both float32 `[out, in]`, with what inputs they get."""

    name: str
    linear: Linear
    found: torch.Tensor
    right: torch.Tensor
    size: torch.Tensor  # [in] or [out, in], root mean square of the inputs

    def part(self, part: _Part) -> _Weights:
        """Some rows or columns of both."""
        size = part.of(self.size.expand_as(self.right))
        return replace(self, found=part.of(self.found), right=part.of(self.right), size=size)

    def distance(self) -> torch.Tensor:
        """[out, in]: squared difference, as the inputs weigh it."""
        return ((self.found - self.right) * self.size).square()

    def norm(self) -> torch.Tensor:
        """[out, in]: squared weights of the model, as the inputs weigh them."""
        return (self.right * self.size).square()


class LayerComparison:
    """The layers of one checkpoint against those of its model.

    Args:
        checkpoint: the checkpoint.
        loaded: its tensors.
        model: the decoder over them.
        source: the model.
        linear_bound, layer_bound: relative errors that rounding explains.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        loaded: ExecutableWeights,
        model: Llama,
        source: ModelSource,
        linear_bound: float,
        layer_bound: float,
    ) -> None:
        self._checkpoint, self._loaded, self._model, self._source = checkpoint, loaded, model, source
        self._linear_bound, self._layer_bound = linear_bound, layer_bound
        self._heads = source.config.num_attention_heads

    def ends(self) -> Iterator[Comparison]:
        """Embedding, last norm and head."""
        config, source = self._source.config, self._source
        embedding = source.tensor("model.embed_tokens.weight").float()
        head = embedding if config.tie_word_embeddings else source.tensor("lm_head.weight").float()
        for name, right in (
            ("transformer.vocab_embedding.weight", embedding),
            ("transformer.ln_f.weight", source.tensor("model.norm.weight").float()),
            ("lm_head.weight", head),
        ):
            yield self._tensor(name, self._loaded.weights[name][: len(right)].float(), right)

    def layer(self, layer: int, states: Sequence[torch.Tensor]) -> list[Comparison]:
        """What is in one layer, and the layer as a whole last.

        Args:
            layer: its number.
            states: what goes into it, float32 `[1, tokens, hidden]` for each text.
        """
        name = f"transformer.layers.{layer}"
        stage, local = divmod(layer, self._checkpoint.num_stage_layers)
        prefix = f"transformer.layers.{local}."
        layers = [linear for linear in linears(self._checkpoint, stage) if linear.name.startswith(prefix)]
        recorders = {f"transformer.layers.0.{linear.name.removeprefix(prefix)}": _Recorder() for linear in layers}
        longest = max(state.shape[1] for state in states)
        reference = self._reference(layer, recorders, longest)
        errors = []
        with torch.inference_mode():
            for x in states:
                right, found = reference.layer_output(0, x), self._model.layer_output(layer, x)
                errors.append(((found - right).norm(dim=-1) / (right - x).norm(dim=-1)).flatten())
        error = float(torch.cat(errors).mean())

        model = {key.replace("layers.0.", f"layers.{layer}."): value for key, value in reference.weights.items()}
        seen = {key.replace("layers.0.", f"layers.{layer}."): recorder for key, recorder in recorders.items()}
        named = [replace(linear, name=f"{name}.{linear.name.removeprefix(prefix)}") for linear in layers]
        result = [self._linear(linear, model, seen[linear.name]) for linear in named]
        result += self._others(name, model, bad=[comparison.name for comparison in result if comparison.problem])
        problem = None
        if error > self._layer_bound and not any(comparison.problem for comparison in result):
            problem = self._inputs(named, seen) or (
                f"{name}: the output is {error:.2g} away from the model's, {self._layer_bound:g} is rounding, "
                "though its weights are right"
            )
        return [*result, Comparison(name, error, problem)]

    def _reference(self, layer: int, recorders: dict[str, _Recorder], longest: int) -> Llama:
        """The model's layer alone."""
        config = self._source.config
        weights = {
            name.replace(f"layers.{layer}.", "layers.0.", 1): tensor.float()
            for name, tensor in stream_layer(config, self._source.tensor, layer)
        }
        weights["transformer.ln_f.weight"] = torch.ones(config.hidden_size)
        alone = replace(config, num_hidden_layers=1, max_position_embeddings=longest)
        return Llama(alone, weights, activations=recorders)

    def _linear(self, linear: Linear, right: Mapping[str, torch.Tensor], recorder: _Recorder) -> Comparison:
        """One linear layer, or the experts of a stack."""
        pairs = self._pairs(linear, right, recorder)
        errors = [self._error(pair) for pair in pairs]
        worst = max(errors)
        if worst <= self._linear_bound:
            return Comparison(linear.name, worst)
        problem = _swapped_experts(pairs) if linear.experts else None
        if problem is None:
            problem = self._diagnosis(pairs[errors.index(worst)], right, worst)
        return Comparison(linear.name, worst, problem)

    def _pairs(self, linear: Linear, right: Mapping[str, torch.Tensor], recorder: _Recorder) -> list[_Weights]:
        """The weight, or those of the experts, with the factors that stand before it folded in."""
        weight = self._loaded.weights[f"{linear.name}.weight"].float()
        quantizer = self._loaded.activations.get(linear.name)
        if quantizer is not None and quantizer.prequant is not None:
            weight = weight * quantizer.prequant.unsqueeze(-2)
        if norm := self._norm_before(linear.name):
            weight = weight * _ratio(self._loaded.weights[norm].float(), right[norm])
        reference = right[f"{linear.name}.weight"]
        if not linear.experts:
            return [_Weights(linear.name, linear, weight, reference, recorder.size)]
        return [
            _Weights(f"{linear.name}, expert {i}", linear, weight[i], reference[i], recorder.size)
            for i in range(linear.experts)
        ]

    def _norm_before(self, name: str) -> str | None:
        """The norm whose factors an exporter may have moved into the linear layer behind it, or out of it."""
        layer, _, part = name.rpartition(".")
        layer, _, block = layer.rpartition(".")
        norm = _FED_BY.get(f"{block}.{part}")
        return f"{layer}.{norm}.weight" if norm else None

    def _error(self, pair: _Weights) -> float:
        """Relative error of the worst head or rank; of the worst row, which rounds less evenly, a fraction."""
        distance, norm = pair.distance(), pair.norm()
        errors = [
            (part.of(distance).sum() / part.of(norm).sum().clamp(min=1e-30)).sqrt().item()
            for part in self._parts(pair.linear)
        ]
        rows = norm.sum(1)
        heavy = rows > _NEGLIGIBLE * rows.mean()
        worst_row = (distance.sum(1)[heavy] / rows[heavy]).sqrt().max().item()
        return max(*errors, worst_row / _ROW_SPREAD)

    def _parts(self, linear: Linear) -> list[_Part]:
        """What of a weight `[out, in]` a fault may concern alone: heads, or parts of ranks."""
        if linear.unit > 1:
            return [_Part(0, range(i, i + linear.unit)) for i in range(0, sum(linear.blocks), linear.unit)]
        if linear.name.endswith("attention.dense"):
            size = linear.in_features // self._heads
            return [_Part(1, range(i, i + size)) for i in range(0, linear.in_features, size)]
        return self._rank_parts(linear)

    def _rank_parts(self, linear: Linear) -> list[_Part]:
        """What of a weight `[out, in]` each rank holds."""
        tp = self._checkpoint.tp_size
        if linear.split == "row":
            size = linear.in_features // tp
            return [_Part(1, range(rank * size, (rank + 1) * size)) for rank in range(tp)]
        parts = []
        for rank in range(tp):
            rows: list[int] = []
            start = 0
            for block, size in zip(linear.blocks, linear.rank_blocks(tp), strict=True):
                first = start + rank * block // tp // size * size  # a head that stands on several ranks is one
                rows += range(first, first + size)
                start += block
            parts.append(_Part(0, rows))
        return parts

    def _diagnosis(self, pair: _Weights, right: Mapping[str, torch.Tensor], error: float) -> str:
        """What is wrong with a weight, in words."""
        return (
            self._swapped(pair)
            or _in_wrong_place(pair, right)
            or self._scaled(pair)
            or self._of_another_layer(pair)
            or f"{pair.name}: the weights are {error:.2g} away from the model's, {self._linear_bound:g} is rounding"
        )

    def _swapped(self, pair: _Weights) -> str | None:
        """Heads, or the parts of ranks, that stand in each other's place."""
        linear = pair.linear
        problems: list[str | None]
        if linear.unit > 1:
            found, right = pair.found.split(linear.blocks), pair.right.split(linear.blocks)
            if _order(found[1:], right[1:]) == [1, 0]:
                return f"{pair.name}: keys and values are swapped"
            problems = [
                _exchange(f"{kind} heads", _order(a.split(linear.unit), b.split(linear.unit)))
                for kind, a, b in zip(("query", "key", "value"), found, right, strict=True)
            ]
        elif linear.name.endswith("attention.dense"):
            size = linear.in_features // self._heads
            order = _order(pair.found.split(size, dim=1), pair.right.split(size, dim=1))
            problems = [_exchange("the inputs of heads", order)]
        else:
            parts = self._rank_parts(linear)
            order = _order([part.of(pair.found) for part in parts], [part.of(pair.right) for part in parts])
            problems = [_exchange("the parts of ranks", order)]
        told = [problem for problem in problems if problem]
        return f"{pair.name}: {', '.join(told)}" if told else None

    def _scaled(self, pair: _Weights) -> str | None:
        """A factor too many: on the whole weight, on a rank's part of it, on some rows or on some inputs."""
        quantised = self._checkpoint.quantised(_local(self._checkpoint, pair.linear.name))
        what = f"{'weights_scaling_factor' if quantised else 'weight'} of {pair.name}"
        whole = _factors(pair)
        if self._explains(pair, whole):
            return f"{what} is {_times(whole)} what it should be"
        parts = self._rank_parts(pair.linear)
        by_rank = torch.ones_like(pair.right)
        for part in parts:
            part.fill(by_rank, _factors(pair.part(part)))
        if self._explains(pair, by_rank):
            wrong = [(rank, part.of(by_rank).mean()) for rank, part in enumerate(parts)]
            return ", ".join(
                f"{what} on rank {rank} is {_times(factor)} what it should be"
                for rank, factor in wrong
                if self._off(factor)
            )
        for dim, lines, owner in ((1, "rows", what), (0, "inputs", what.replace("weights_", "prequant_"))):
            factors = _factors(pair, dim)
            if self._explains(pair, factors):
                numbers = self._off(factors.flatten()).nonzero().flatten().tolist()
                return (
                    f"{owner} is {_times(factors.flatten()[numbers])} what it should be in {lines} {_listed(numbers)}"
                )
        return None

    def _explains(self, pair: _Weights, factors: torch.Tensor) -> bool:
        """Whether the weight is the model's times these factors, and they are not all 1."""
        usable = bool((factors.abs() > 1e-6).all()) and bool(self._off(factors).any())
        return usable and self._error(replace(pair, found=pair.found / factors)) <= self._linear_bound

    def _off(self, factors: torch.Tensor) -> torch.Tensor:
        """Which factors differ from 1 by more than rounding."""
        return (factors - 1).abs() > max(self._linear_bound, 0.02)

    def _of_another_layer(self, pair: _Weights) -> str | None:
        """The weights of another layer of the model, in this one's place."""
        layer = int(pair.linear.name.split(".")[2])
        config = self._source.config
        part = pair.linear.name.split(".", 3)[3]
        for other in range(config.num_hidden_layers):
            if other != layer and not pair.linear.experts:
                weights = dict(stream_layer(config, self._source.tensor, other))
                if _alike(pair.found, weights[f"transformer.layers.{other}.{part}.weight"].float()):
                    return f"{pair.name}: holds the weights of layer {other}"
        return None

    def _others(self, name: str, right: Mapping[str, torch.Tensor], bad: Sequence[str]) -> Iterator[Comparison]:
        """Norms, biases and the router of a layer.

        A norm in front of linear layers may hold other factors than the model's if these make up for it.
        """
        for key, tensor in right.items():
            part = key.removeprefix(f"{name}.")
            fed = [f"{name}.{linear}" for linear, norm in _FED_BY.items() if f"{norm}.weight" == part]
            fed = [linear for linear in fed if f"{linear}.weight" in right]
            if part == key or (part.endswith(".weight") and f"{name}.{part}" in self._linear_weights(name)):
                continue
            if not fed or all(linear in bad for linear in fed):
                yield self._tensor(key, self._loaded.weights[key].float(), tensor)

    def _linear_weights(self, name: str) -> set[str]:
        parts = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
        return {f"{name}.{part}.weight" for part in parts}

    def _tensor(self, name: str, found: torch.Tensor, right: torch.Tensor) -> Comparison:
        """A tensor that is not quantised."""
        error = float((found - right).norm() / right.norm().clamp(min=1e-30))
        if error <= self._linear_bound:
            return Comparison(name, error)
        factor = (found * right).sum() / right.square().sum().clamp(min=1e-30)
        if float((found / factor - right).norm() / right.norm()) <= self._linear_bound:
            return Comparison(name, error, f"{name} is {_times(factor)} what it should be")
        return Comparison(
            name, error, f"{name} is {error:.2g} away from the model's, {self._linear_bound:g} is rounding"
        )

    def _inputs(self, named: Sequence[Linear], seen: Mapping[str, _Recorder]) -> str | None:
        """The activation scale that fits what the prompts show worst."""
        worst, problem = _COVERED, None
        for linear in named:
            quantizer = self._loaded.activations.get(linear.name)
            if quantizer is None or quantizer.kind is None:
                continue
            largest = seen[linear.name].largest * (1.0 if quantizer.prequant is None else quantizer.prequant)
            reached, covered = float(largest.max()), float(quantizer.scale) * LARGEST[quantizer.kind]
            if max(reached / covered, covered / reached) > worst:
                worst = max(reached / covered, covered / reached)
                problem = (
                    f"activation_scaling_factor of {linear.name} covers inputs up to {covered:.3g}, those of the "
                    f"prompts reach {reached:.3g}: it is {_times(torch.tensor(covered / reached))} what they show"
                )
        return problem


def _local(checkpoint: Checkpoint, name: str) -> str:
    """The name within its stage of a name counted over the whole model."""
    parts = name.split(".")
    parts[2] = str(int(parts[2]) % checkpoint.num_stage_layers)
    return ".".join(parts)


def _in_wrong_place(pair: _Weights, right: Mapping[str, torch.Tensor]) -> str | None:
    """Gate and up projection in each other's place, or a weight whose rows are columns."""
    linear = pair.linear
    if len(linear.blocks) == 2 and _order(pair.found.split(linear.blocks), pair.right.split(linear.blocks)) == [1, 0]:
        return f"{pair.name}: the halves for up and gate are swapped"
    stem, _, part = linear.name.rpartition(".")
    other = f"{stem}.{({'fc': 'gate', 'gate': 'fc'}).get(part)}"
    if not linear.experts and f"{other}.weight" in right and _alike(pair.found, right[f"{other}.weight"]):
        return f"{pair.name}: holds what belongs into {other}"
    if pair.found.shape[0] == pair.found.shape[1] and _alike(pair.found.t(), pair.right):
        return f"{pair.name}: the weights are transposed"
    return None


def _swapped_experts(pairs: Sequence[_Weights]) -> str | None:
    """Experts that stand in each other's place."""
    problem = _exchange("experts", _order([pair.found for pair in pairs], [pair.right for pair in pairs]))
    return f"{pairs[0].linear.name}: {problem}" if problem else None


def _order(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> list[int] | None:
    """Of each block found, which of the right ones it is; None unless that is one to one."""
    if len(found) < 2 or len({block.shape for block in (*found, *right)}) > 1:
        return None
    a, b = (torch.nn.functional.normalize(torch.stack([x.flatten() for x in blocks])) for blocks in (found, right))
    likeness, order = (a @ b.t()).max(dim=1)
    if bool((likeness < _ALIKE).any()) or len(set(order.tolist())) < len(found):
        return None
    result: list[int] = order.tolist()
    return result


def _exchange(what: str, order: list[int] | None) -> str | None:
    """Blocks that are not where they belong, in words; None if all are."""
    moved = [place for place, block in enumerate(order or ()) if block != place]
    if not moved:
        return None
    if len(moved) == 2:
        return f"{what} {moved[0]} and {moved[1]} are swapped"
    return f"{what} stand in the order {', '.join(map(str, order or ()))}"


def _alike(found: torch.Tensor, right: torch.Tensor) -> bool:
    if found.shape != right.shape:
        return False
    return float(torch.nn.functional.cosine_similarity(found.flatten(), right.flatten(), dim=0)) > _ALIKE


def _factors(pair: _Weights, dim: int | None = None) -> torch.Tensor:
    """By what the model's weight must be multiplied to come nearest: one factor, or one for each row or column."""
    weighed = pair.right * pair.size.square()
    above, below = pair.found * weighed, pair.right * weighed
    if dim is None:
        return above.sum() / below.sum()
    below = below.sum(dim, keepdim=True)
    return torch.where(below > 0, above.sum(dim, keepdim=True) / below, 1.0)


def _ratio(found: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.where(right.abs() > 1e-6, found / right, 1.0)


def _times(factors: torch.Tensor) -> str:
    """Factors as `2 times`; what rounding adds to several of them is not shown."""
    low, high, mean = (float(value) for value in (factors.min(), factors.max(), factors.mean()))
    spread = (high - low) / abs(mean)
    return (
        f"{mean:.3g} times"
        if spread < 1e-3
        else f"{mean:.2g} times"
        if spread < 0.2
        else f"{low:.2g} to {high:.2g} times"
    )


def _listed(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _SHOWN} more" if numbers[_SHOWN:] else ""
    return ", ".join(map(str, numbers[:_SHOWN])) + more
