"""A lean decoder for the Llama family (Llama, Mistral, Mixtral, Qwen2, Qwen3, their mixtures of experts) over
TensorRT-LLM's names and layout.

Knows tensors, a static KV cache and one forward pass. Does not know files, tokenizers, sampling or requests.
The weights are used as they are given (no copies, no stacking), so memory-mapped files stay shared by processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.models.source import ModelSource
from trtspec.runtime.kernels import Linear, RMSNorm, rotate

_EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *_EXPERT_FAMILIES)


class KVCache:
    """Keys and values of a batch, `[layers, batch, kv_heads, capacity, head]` each.

    Positions at or after the next `start` are never read, so rolling back means nothing but a smaller `start`.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k = k
        self.v = v

    @property
    def capacity(self) -> int:
        """Positions a row can hold."""
        return self.k.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return 2 * self.k.numel() * self.k.element_size()

    def of_layers(
        self, layers: range, batch: int, start: int | torch.Tensor, slots: torch.Tensor, end: int
    ) -> list[LayerCache]:
        """What each of some layers needs in a pass over tokens at `slots` `[B or 1, Q]`, all of them before `end`."""
        # A view of all layers that is taken apart costs less than one of each.
        keys, values = (store[layers.start : layers.stop, :batch, :, :end].unbind() for store in (self.k, self.v))
        return [LayerCache(k, v, start, slots) for k, v in zip(keys, values, strict=True)]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of a KV cache in one pass.

    Attributes:
        keys, values: what the new tokens see, `[B, kv_heads, end, head]`, their own included.
        start: first position of the new tokens, one for all rows or int64 `[B]`.
        places: all their positions, `[B or 1, Q]`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    start: int | torch.Tensor
    places: torch.Tensor

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v `[B, kv_heads, Q, head]` of the new tokens."""
        for store, new in ((self.keys, k), (self.values, v)):
            if isinstance(self.start, int):
                store.narrow(2, self.start, new.shape[2]).copy_(new)
            else:
                rows = torch.arange(len(new), device=new.device).unsqueeze(1)
                store[rows, :, self.places] = new.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Span:
    """The new tokens of one sequence in a pass over several.

    Attributes:
        length: how many.
        cache: its row 0 is the sequence's.
        start: position of the first of them.
        mask, positions: those of `Llama.forward`.
    """

    length: int
    cache: KVCache
    start: int
    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None


class Llama:
    """One model: `forward` turns token ids into float32 logits and extends a KV cache.

    Args:
        config: sizes and switches of the model.
        weights: tensors under TensorRT-LLM names, see `to_trtllm`; with `d2t` [n] the head has n rows, and row i
            stands for target id `i + d2t[i]` (the offsets of an EAGLE-3 head).
            A head of more than vocab_size rows is padded: the rows behind stand for no token.
        device: where the forward pass runs; weights elsewhere are moved there.
        activations: what a quantised engine does to the input of a layer (given it, and the number of the expert in a
            stack), see `ExecutableWeights`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        device: str | torch.device = "cpu",
        activations: Mapping[str, Callable[[torch.Tensor, int | None], torch.Tensor]] | None = None,
    ) -> None:
        check_family(config)
        self.config = config
        self.device = torch.device(device)
        self.weights = {name: tensor.to(self.device) for name, tensor in weights.items()}
        self.activations = dict(activations or {})
        self.dtype = self.weights["transformer.ln_f.weight"].dtype
        self._cos, self._sin = (table.to(self.device, self.dtype) for table in rope_table(config))
        d2t = self.weights.get("d2t")
        self._layers: dict[int, _Layer] = {}
        self._norms: dict[str, RMSNorm] = {}
        # head_ids: [rows of the head], the vocabulary id of each row, where the head is a reduced one
        self.head_ids = None if d2t is None else d2t.long() + torch.arange(len(d2t), device=self.device)

    def new_cache(self, batch: int, capacity: int, extra_layers: int = 0) -> KVCache:
        """An empty cache for `batch` rows of `capacity` positions, of the model's layers and others behind them."""
        c = self.config
        shape = (c.num_hidden_layers + extra_layers, batch, c.num_key_value_heads, capacity, c.head_size)
        return KVCache(*(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)))

    def forward(
        self,
        input_ids: torch.Tensor,
        cache: KVCache,
        start: int | torch.Tensor,
        *,
        num_logits: int | None = None,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run Q tokens a row and write their keys and values at `start .. start+Q-1`.

        Rows of different length need no padding on the left: give each its own `start`, pad on the right, and
        ignore the logits of the padding; what it wrote is overwritten before it can be read.

        Args:
            input_ids: int64 `[B, Q]`.
            cache: rows 0..B-1 are used.
            start: first position, one int for all rows or int64 `[B]`.
            num_logits: logits of the last so many positions only.
            mask: bool `[Q, Q]`, which of the Q new tokens each one sees, instead of the causal triangle
                (a token tree); the cached positions before `start` are always seen. Needs an int `start`.
            positions: int64 `[Q]`, rope position of each new token relative to `start` (depth in a token tree).

        Returns:
            float32 logits `[B, num_logits or Q, vocab]`; with a reduced head, -inf outside its ids; with a padded one,
            as many as it has rows, -inf from vocab_size on.

        Raises:
            TrtspecError: the cache is too short.
        """
        return self.head(self.hidden(input_ids, cache, start, mask=mask, positions=positions)[:, -(num_logits or 0) :])

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits over the full vocabulary `[.., vocab]` of normalised hidden states `[.., hidden]`."""
        return self.over_vocabulary(self.scores(hidden))

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits of what the head has rows for `[.., rows]`, of normalised hidden states `[.., hidden]`."""
        scores = self._linear("lm_head")(hidden).to(torch.float32, memory_format=torch.contiguous_format)
        if self.head_ids is None and scores.shape[-1] > self.config.vocab_size:
            scores[..., self.config.vocab_size :] = -math.inf  # zeros, which would win where all real ones are negative
        return scores

    def over_vocabulary(self, scores: torch.Tensor) -> torch.Tensor:
        """`scores` `[.., rows]` of a reduced head spread over the full vocabulary; of another one as they are."""
        if self.head_ids is None:
            return scores
        full = scores.new_full((*scores.shape[:-1], self.config.vocab_size), -math.inf)
        full[..., self.head_ids] = scores
        return full

    def hidden(
        self,
        input_ids: torch.Tensor,
        cache: KVCache | None,
        start: int | torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states after the last norm, `[B, Q, hidden]`; the arguments are those of `forward`.

        Without a cache, whole sequences run from position 0 and nothing is kept (training).
        """
        layers = range(self.config.num_hidden_layers)
        return self.norm(self.run(layers, self.embed(input_ids), cache, start, mask=mask, positions=positions))

    def hidden_of_spans(self, input_ids: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Hidden states after the last norm `[N, hidden]` of the new tokens of several sequences, in one pass.

        Every weight is read once for all of them. Attention goes span by span: nobody sees another's keys.

        Args:
            input_ids: int64 `[N]`, the tokens of one span after those of the other.
            spans: where they belong; each writes to its own cache.

        Raises:
            TrtspecError: a cache is too short; nothing was written.
        """
        layers, lengths = range(self.config.num_hidden_layers), [span.length for span in spans]
        ropes, memories, visible = [], [], []
        for span in spans:
            rope, slots, end, seen = self._places(span.length, span.cache, span.start, span.mask, span.positions, None)
            ropes.append(rope)
            memories.append(span.cache.of_layers(layers, 1, span.start, slots, end))
            visible.append(seen)
        cos, sin = (torch.cat(tables, dim=2) for tables in zip(*ropes, strict=True))
        x = self.embed(input_ids).unsqueeze(0)
        for layer, caches in zip(layers, zip(*memories, strict=True), strict=True):
            x = self._layer(layer, x, (cos, sin), partial(self._attend_spans, lengths, caches, visible))
        return self.norm(x[0])

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What goes into the first layer, `[B, Q, hidden]`."""
        return F.embedding(input_ids, self.weights["transformer.vocab_embedding.weight"])

    def run(
        self,
        layers: range,
        x: torch.Tensor,
        cache: KVCache | None,
        start: int | torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        end: int | None = None,
    ) -> torch.Tensor:
        """x `[B, Q, hidden]` after some of the layers; the other arguments are those of `hidden`.

        Args:
            end: attention goes over the first `end` positions of the cache, masked, not only over those up to the last
                token. With a tensor as `start`, no shape and nothing the CPU must know then depends on where the tokens
                stand. Not together with `mask`; that the tokens stand before `end` is not checked.
        """
        rope, slots, end, visible = self._places(x.shape[1], cache, start, mask, positions, end)
        caches: Sequence[LayerCache | None] = [None] * len(layers)
        if cache is not None:
            caches = cache.of_layers(layers, x.shape[0], start, slots, end)
        for layer, memory in zip(layers, caches, strict=True):
            x = self._layer(layer, x, rope, partial(self._attend, memory, visible))
        return x

    def norm(self, x: torch.Tensor, name: str = "transformer.ln_f") -> torch.Tensor:
        """x `[.., hidden]` normalised: by the norm before the head, or the one of that name."""
        found = self._norms.get(name)
        if found is None:
            found = self._norms[name] = self._norm(name)
        return found(x)

    def layer_output(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """What one layer makes of whole sequences x `[B, Q, hidden]` from position 0, by itself."""
        return self.run(range(layer, layer + 1), x, None, 0)

    def _places(
        self,
        length: int,
        cache: KVCache | None,
        start: int | torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        end: int | None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, int, torch.Tensor | None]:
        """Where Q new tokens stand: cosine and sine, cache slots `[B or 1, Q]`, their end, and what each token sees."""
        offsets = torch.arange(length, device=self.device)
        begin = torch.as_tensor(start, device=self.device).reshape(-1, 1)  # [B or 1, 1]
        slots = begin + offsets  # [B or 1, Q]
        sees_all = end is None and slots.numel() == 1
        if end is None:
            end = (start if isinstance(start, int) else int(begin.max())) + length
        if cache is not None and end > cache.capacity:
            raise TrtspecError(
                f"the KV cache holds {cache.capacity} positions, {end} are needed",
                fix="allocate a longer cache or shorten the input",
            )
        where = slots if positions is None else begin + positions
        rope = self._cos[where].unsqueeze(1), self._sin[where].unsqueeze(1)  # [B or 1, 1, Q, head]
        return rope, slots, end, None if sees_all else self._visible(slots, begin, end, mask)

    def _visible(self, slots: torch.Tensor, begin: torch.Tensor, end: int, mask: torch.Tensor | None) -> torch.Tensor:
        """`[B or 1, 1, group * Q, end]`: 0 at the cache positions that a new token sees, else -inf.

        Attention adds it to the scores; a bool mask would be made into this in every layer.
        """
        length = slots.shape[1]
        keys = torch.arange(end, device=self.device)
        if mask is None:
            seen = keys <= slots.unsqueeze(-1)  # [B or 1, Q, end]
        else:
            seen = (keys < begin.unsqueeze(-1)).repeat(1, length, 1)
            seen[:, :, end - length :] |= mask
        hidden = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, -math.inf)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        return hidden.unsqueeze(1).repeat(1, 1, group, 1)

    def _layer(
        self,
        layer: int,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """One decoder layer over x `[B, Q, hidden]`; `attend` is `_attend`, given where the tokens stand."""
        parts = self._layers.get(layer)
        if parts is None:
            parts = self._layers[layer] = _Layer(self, f"transformer.layers.{layer}")
        c = self.config
        batch, length, _ = x.shape
        heads, kv_heads, size = c.num_attention_heads, c.num_key_value_heads, c.head_size
        qkv = parts.qkv(parts.input_layernorm(x))
        qkv = qkv.view(batch, length, heads + 2 * kv_heads, size).transpose(1, 2)
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        if parts.q_layernorm is not None and parts.k_layernorm is not None:
            q, k = qk.split((heads, kv_heads), dim=1)
            qk = torch.cat((parts.q_layernorm(q), parts.k_layernorm(k)), dim=1)
        q, k = rotate(qk, *rope).split((heads, kv_heads), dim=1)
        if parts.kv_quantizer is not None:
            k, v = parts.kv_quantizer(k, None), parts.kv_quantizer(v, None)
        x = x + parts.dense(attend(q, k, v))
        h = parts.post_layernorm(x)
        return x + (parts.mlp(h) if parts.mlp is not None else self._experts(h, f"{parts.name}.mlp"))

    def _attend(
        self,
        cache: LayerCache | None,
        visible: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Attention `[B, Q, heads * head]` of q `[B, heads, Q, head]` over the cache, which k, v go into before.

        Without a cache it goes over k, v `[B, kv_heads, Q, head]` themselves.
        """
        batch, heads, length, size = q.shape
        if cache is not None:
            cache.write(k, v)
            k, v = cache.keys, cache.values
        # The query heads of one KV head stand side by side as extra queries: grouped attention without a copy of K, V.
        q = q.reshape(batch, k.shape[1], -1, size)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return attended.view(batch, heads, length, size).transpose(1, 2).reshape(batch, length, heads * size)

    def _attend_spans(
        self,
        lengths: Sequence[int],
        caches: Sequence[LayerCache],
        visible: Sequence[torch.Tensor | None],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """`_attend` for spans of so many tokens one behind the other, each over its own cache."""
        pieces = (each.split(lengths, dim=2) for each in (q, k, v))
        return torch.cat([self._attend(*span) for span in zip(caches, visible, *pieces, strict=True)], dim=1)

    def route(self, rows: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Share (float32) and number (int64) of the experts of each token, `[rows, top_k]`; rows `[rows, hidden]`."""
        router = self.weights[f"{name}.router.weight"]  # [experts, hidden]
        shares, chosen = (
            F.linear(rows.to(router.dtype), router).float().softmax(-1).topk(self.config.num_experts_per_token)
        )
        return shares / shares.sum(-1, keepdim=True) if self.config.norm_topk_prob else shares, chosen

    def _experts(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """A mixture of experts over x `[B, Q, hidden]`: each token's top-k experts, and what all tokens share."""
        rows = x.reshape(-1, x.shape[-1])
        shares, chosen = self.route(rows, name)
        shares = shares.to(x.dtype)
        result = torch.zeros_like(rows)
        fc, proj = self._linear(f"{name}.fc"), self._linear(f"{name}.proj")
        for expert in chosen.unique().tolist():
            row, place = (chosen == expert).nonzero(as_tuple=True)
            up, gate = fc(rows[row], expert).chunk(2, dim=-1)
            out = proj(F.silu(gate) * up, expert)
            result.index_add_(0, row, out * shares[row, place].unsqueeze(-1))
        if self.config.shared_expert_intermediate_size:
            share = self._linear(f"{name}.shared_expert_gate")(rows).sigmoid()
            result += share * _Mlp(self, f"{name}.shared_expert")(rows)
        return result.view_as(x)

    def _linear(self, name: str) -> Linear:
        """One linear layer, or a stack of them, with the quantisation of its input that the engine does."""
        weights = self.weights
        return Linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"), self.activations.get(name))

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.weights[f"{name}.weight"], self.config.norm_epsilon)


class _Mlp:
    """A gated feed-forward block."""

    def __init__(self, model: Llama, name: str) -> None:
        self.fc, self.gate, self.proj = (model._linear(f"{name}.{part}") for part in ("fc", "gate", "proj"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(F.silu(self.fc(x)) * self.gate(x))


class _Layer:
    """The parts of one decoder layer, looked up once: by name they would cost as much as the norms do."""

    def __init__(self, model: Llama, name: str) -> None:
        self.name = name
        self.input_layernorm = model._norm(f"{name}.input_layernorm")
        self.qkv = model._linear(f"{name}.attention.qkv")
        self.q_layernorm, self.k_layernorm = (
            model._norm(f"{name}.attention.{part}_layernorm") if model.config.qk_layernorm else None for part in "qk"
        )
        self.kv_quantizer = model.activations.get(f"{name}.attention.kv_cache")
        self.dense = model._linear(f"{name}.attention.dense")
        self.post_layernorm = model._norm(f"{name}.post_layernorm")
        self.mlp = None if model.config.num_experts else _Mlp(model, f"{name}.mlp")


def rope_table(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 cosine and sine `[max_position_embeddings, head]` for `rotate`, the first half of the sine negated.

    Raises:
        TrtspecError: another kind of rope scaling.
    """
    size = config.head_size
    inverse = 1.0 / config.rotary_base ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    scaling = config.rotary_scaling
    if scaling:
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind == "linear":
            inverse = inverse / scaling["factor"]
        elif kind == "llama3":
            inverse = _llama3_frequencies(inverse, scaling)
        else:
            raise TrtspecError(
                f"rope scaling {kind!r} is not supported by the torch runtime",
                where="config.json: rope_scaling",
                expected="llama3, linear or none",
                fix="use the tensorrt_llm runtime for this model",
            )
    angles = torch.outer(torch.arange(config.max_position_embeddings).float(), inverse)
    sine = angles.sin()
    return torch.cat((angles.cos(),) * 2, dim=-1), torch.cat((-sine, sine), dim=-1)


def _llama3_frequencies(inverse: torch.Tensor, scaling: Mapping[str, float]) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1 model card)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    turns = context * inverse / (2 * math.pi)  # rotations within the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inverse * (keep + (1.0 - keep) / scaling["factor"])


def load_weights(source: ModelSource) -> dict[str, torch.Tensor]:
    """All weights of a model under TensorRT-LLM names, in the type they are stored in; with `d2t` if it has one."""
    weights = to_trtllm(source.config, source.tensor)
    if "d2t" in source.tensor_names():
        weights["d2t"] = source.tensor("d2t")
    return weights


def check_family(config: ModelConfig) -> None:
    """Refuse what this decoder would run wrongly.

    Raises:
        TrtspecError: another family, experts in a family without, or an activation other than SiLU.
    """
    if config.model_type not in FAMILIES or bool(config.num_experts) != (config.model_type in _EXPERT_FAMILIES):
        raise TrtspecError(
            f"the torch runtime does not run {config.architecture}",
            expected=f"a model of the families {', '.join(FAMILIES)}",
            fix="use engine.runtime: tensorrt_llm",
        )
    if config.num_dense_mlp_layers:
        raise TrtspecError(
            f"{config.num_dense_mlp_layers} of {config.num_hidden_layers} layers have no experts, which the torch "
            "runtime does not run",
            expected="experts in every layer: mlp_only_layers empty, decoder_sparse_step 1",
            fix="use engine.runtime: tensorrt_llm",
        )
    if config.hidden_act not in ("silu", "swish"):
        raise TrtspecError(f"activation {config.hidden_act!r} is not supported by the torch runtime", expected="silu")


def to_trtllm(config: ModelConfig, tensor: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights under TensorRT-LLM names from a reader of Hugging Face names; a tied head is the embedding itself."""
    return dict(stream_trtllm(config, tensor))


def stream_trtllm(config: ModelConfig, tensor: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs of `to_trtllm` one after another, so that a model larger than the memory can be converted."""
    embedding = tensor("model.embed_tokens.weight")
    yield "transformer.vocab_embedding.weight", embedding
    yield "lm_head.weight", embedding if config.tie_word_embeddings else tensor("lm_head.weight")
    yield "transformer.ln_f.weight", tensor("model.norm.weight")
    del embedding
    for layer in range(config.num_hidden_layers):
        yield from stream_layer(config, tensor, layer)


def stream_layer(
    config: ModelConfig, tensor: Callable[[str], torch.Tensor], layer: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs of one layer."""
    ours, theirs = f"transformer.layers.{layer}", f"model.layers.{layer}"
    for kind in ("weight", "bias") if config.attn_bias else ("weight",):
        parts = [tensor(f"{theirs}.self_attn.{p}_proj.{kind}") for p in ("q", "k", "v")]
        yield f"{ours}.attention.qkv.{kind}", torch.cat(parts)
    for a, b in _LAYER_NAMES.items():
        if not (config.num_experts and a.startswith("mlp.")):
            yield f"{ours}.{a}.weight", tensor(f"{theirs}.{b}.weight")
    if config.num_experts:
        block, up, gate, down = _EXPERT_NAMES["mixtral" if config.model_type == "mixtral" else "qwen"]
        experts = [f"{theirs}.{block}.experts.{i}" for i in range(config.num_experts)]
        yield f"{ours}.mlp.router.weight", tensor(f"{theirs}.{block}.gate.weight")
        up_gate = [torch.cat([tensor(f"{expert}.{part}.weight") for part in (up, gate)]) for expert in experts]
        yield f"{ours}.mlp.fc.weight", torch.stack(up_gate)
        yield f"{ours}.mlp.proj.weight", torch.stack([tensor(f"{expert}.{down}.weight") for expert in experts])
    if config.shared_expert_intermediate_size:
        shared = f"{theirs}.mlp.shared_expert"
        yield f"{ours}.mlp.shared_expert_gate.weight", tensor(f"{shared}_gate.weight")
        for a, b in (("fc", gate), ("gate", up), ("proj", down)):
            yield f"{ours}.mlp.shared_expert.{a}.weight", tensor(f"{shared}.{b}.weight")
    if config.attn_bias and config.model_type in ("llama", "mistral"):
        yield f"{ours}.attention.dense.bias", tensor(f"{theirs}.self_attn.o_proj.bias")
    if config.mlp_bias:
        for a in ("mlp.fc", "mlp.gate", "mlp.proj"):
            yield f"{ours}.{a}.bias", tensor(f"{theirs}.{_LAYER_NAMES[a]}.bias")
    if config.qk_layernorm:
        for p in ("q", "k"):
            yield f"{ours}.attention.{p}_layernorm.weight", tensor(f"{theirs}.self_attn.{p}_norm.weight")


def to_hf(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The way back: weights under Hugging Face names, qkv split; `d2t` keeps its name."""
    names = {
        "transformer.vocab_embedding": "model.embed_tokens",
        "transformer.ln_f": "model.norm",
        "lm_head": "lm_head",
    }
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"transformer.layers.{layer}", f"model.layers.{layer}"
        names |= {f"{ours}.{a}": f"{theirs}.{b}" for a, b in _LAYER_NAMES.items()}
        names |= {f"{ours}.attention.{p}_layernorm": f"{theirs}.self_attn.{p}_norm" for p in ("q", "k")}
    sizes = [n * config.head_size for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
    result = {}
    for name, tensor in weights.items():
        stem, _, kind = name.rpartition(".")
        if stem.endswith("attention.qkv"):
            layer_name = stem.replace("transformer.", "model.").removesuffix("attention.qkv")
            for part, piece in zip(("q", "k", "v"), tensor.split(sizes), strict=True):
                result[f"{layer_name}self_attn.{part}_proj.{kind}"] = piece
        else:
            result[f"{names[stem]}.{kind}" if stem else name] = tensor
    return result


_LAYER_NAMES = {
    "input_layernorm": "input_layernorm",
    "attention.dense": "self_attn.o_proj",
    "post_layernorm": "post_attention_layernorm",
    "mlp.fc": "mlp.gate_proj",
    "mlp.gate": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
}
# Where a layer's experts are, and what each calls its matrices: up, gate, down.
_EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe", "w3", "w1", "w2"),
    "qwen": ("mlp", "up_proj", "gate_proj", "down_proj"),
}
