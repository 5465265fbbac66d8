"""Models in memory, to be measured: those of a spec, or random ones of named shapes.

Knows how models are loaded or made up. Does not know how they are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trtspec.decoding.methods import METHODS, MIDDLES, Setting
from trtspec.errors import TrtspecError
from trtspec.plan.shapes import shape_of
from trtspec.spec.schema import Mtp

if TYPE_CHECKING:
    import torch

    from trtspec.build.sources import Sources
    from trtspec.models.config import ModelConfig
    from trtspec.models.source import ModelSource
    from trtspec.runtime.llama import Llama
    from trtspec.spec.schema import Spec


@dataclass(frozen=True)
class Loaded:
    """One model in memory.

    Attributes:
        name: for people.
        config: of the whole model.
        model: what is measured, which may have fewer layers.
        scores_all: whether the scores of all tokens of a pass are wanted, as of what judges drafts or grows a tree of
            them; else those of the last one. What drafts in its own engine makes those that it needs after the pass.
        fewer: the same with fewer layers still, where `model` has not all; times are scaled from both.
    """

    name: str
    config: ModelConfig
    model: Llama
    scores_all: bool
    fewer: Llama | None = None

    @property
    def dtype(self) -> str:
        """Name of the type of its weights."""
        return str(self.model.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Pair:
    """The models of one way to speculate.

    Attributes:
        models: by role.
        method: a value of speculation.method that the torch runtime runs.
        num_draft_tokens: proposed to the target a cycle.
        settings: of the method.
        heads: the section `speculation` of the engine's stamp, for a method inside the target's engine.
    """

    models: Mapping[str, Loaded]
    method: str
    num_draft_tokens: int
    settings: Mapping[str, Setting] = field(default_factory=dict)
    heads: Mapping[str, Any] | None = None


def pair_of_spec(spec: Spec, sources: Sources, device: str) -> Pair:
    """The models of a spec in their types, heads or modules included; unquantised, each on one device.

    Args:
        spec: names them.
        sources: opens them.
        device: cpu or cuda.

    Raises:
        TrtspecError: missing or damaged files, a model that the torch runtime does not run, or one whose type or split
            it cannot measure.
    """
    import torch

    speculation = spec.speculation
    models: dict[str, Loaded] = {}
    for role, ref in spec.models.items():
        for found, what in ((ref.quantization, "none"), (ref.world_size, 1)):
            if found != what:
                setting = "quantization" if what == "none" else "tensor_parallel x pipeline_parallel"
                raise TrtspecError(
                    f"passes of a {role} with {setting} {found} cannot be measured by the torch runtime",
                    expected=f"{what}",
                    fix="plan it with the roofline, or measure it as if it were with --set",
                )
        source = sources.open(role)
        source.check()
        if role == "draft" and speculation.method == "early_exit":  # the target's own weights
            model = _cut(models["target"].model, source.config.num_hidden_layers)
        else:
            more = _heads(spec, sources, source) if role == "target" else {}
            model = _loaded(source, getattr(torch, ref.dtype), device, more)
        in_engine = speculation.method in ("medusa", "mtp")
        scores_all = (role == "target" and not in_engine) or role in MIDDLES or speculation.method == "tree"
        models[role] = Loaded(ref.gguf_file or ref.model, source.config, model, scores_all)
    row = METHODS.get(speculation.method)
    section = getattr(speculation, speculation.method, None)
    runs = row is not None or speculation.method in ("medusa", "mtp")
    return Pair(
        models,
        speculation.method if runs else "none",
        speculation.num_draft_tokens,
        row.chosen(section) if row else {},
        _stamp(spec),
    )


def pair_of_shapes(
    target: str, draft: str | None, dtype: str, device: str, layers: int | None = None, num_draft_tokens: int = 4
) -> Pair:
    """Random weights of named shapes, made on the device.

    Args:
        target, draft: see `trtspec.plan.shapes`.
        dtype: of weights and KV cache.
        device: cpu or cuda.
        layers: make only so many of each; None: all.
        num_draft_tokens: of the cycles that are timed.

    Raises:
        TrtspecError: an unknown shape, one that the torch runtime does not run, or no memory for it.
    """
    models = {}
    for role, name in (("target", target), ("draft", draft)):
        if name is not None:
            config = shape_of(name)
            kept = min(layers or config.num_hidden_layers, config.num_hidden_layers)
            model = _made_up(replace(config, num_hidden_layers=kept), dtype, device, name)
            scaled = kept < config.num_hidden_layers
            models[role] = Loaded(name, config, model, role == "target", _cut(model, kept // 2) if scaled else None)
    return Pair(models, "draft_target" if draft else "none", num_draft_tokens if draft else 0)


def _loaded(
    source: ModelSource, dtype: torch.dtype, device: str, more: Mapping[str, Callable[[], torch.Tensor]]
) -> Llama:
    from trtspec.runtime.llama import Llama, check_family, load_weights

    check_family(source.config)
    weights = load_weights(source) | {name: read() for name, read in more.items()}
    typed = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    return Llama(source.config, typed, device)


def _cut(model: Llama, layers: int) -> Llama:
    """The first layers of a model, with its weights."""
    from trtspec.runtime.llama import Llama

    return Llama(replace(model.config, num_hidden_layers=layers), model.weights, model.device)


def _heads(spec: Spec, sources: Sources, source: ModelSource) -> dict[str, Callable[[], torch.Tensor]]:
    """What the method adds to the target, by name, each with what reads it."""
    speculation, directory = spec.speculation, sources.heads()
    if speculation.method == "medusa" and speculation.medusa and directory is not None:
        from trtspec.models.medusa import open_medusa

        heads = open_medusa(directory)
        heads.check(source.config, speculation.medusa)
        return heads.tensors(speculation.medusa.num_heads)
    if speculation.method == "mtp":
        from trtspec.runtime.mtp import module_weights

        return module_weights(source, (speculation.mtp or Mtp()).num_modules)
    return {}


def _stamp(spec: Spec) -> dict[str, Any] | None:
    """What an engine would say of how it drafts by itself; None where it does not."""
    speculation, medusa = spec.speculation, spec.speculation.medusa
    if speculation.method == "medusa" and medusa:
        from trtspec.models.medusa import DEFAULT_CHOICES
        from trtspec.runtime.medusa import MedusaSettings

        choices = medusa.choices or DEFAULT_CHOICES
        return MedusaSettings(choices, medusa.acceptance, medusa.epsilon, medusa.delta).to_stamp()
    if speculation.method == "mtp":
        modules = (speculation.mtp or Mtp()).num_modules
        return {"method": "mtp", "num_modules": modules, "num_draft_tokens": speculation.num_draft_tokens}
    return None


def _made_up(config: ModelConfig, dtype: str, device: str, name: str) -> Llama:
    """A model of random weights; half the scale of trained ones, so that nothing overflows."""
    import torch

    from trtspec.runtime.llama import Llama, check_family, to_trtllm

    check_family(config)

    def tensor(name: str) -> torch.Tensor:
        made = torch.empty(_shape(config, name), dtype=getattr(torch, dtype), device=device)
        return made.fill_(1.0) if made.dim() == 1 else made.normal_(std=0.01)

    try:
        return Llama(config, to_trtllm(config, tensor), device)
    except (RuntimeError, MemoryError) as error:  # what torch raises without memory
        reason = " ".join(str(error).split())[:120]
        raise TrtspecError(
            f"cannot be made on {device} ({reason})", where=f"shape {name}", fix="measure fewer layers with --layers"
        ) from error


def _shape(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Of a tensor under its Hugging Face name."""
    hidden, size = config.hidden_size, config.head_size
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    *_, part, kind = name.split(".")
    if ".experts." in name:
        inner = config.moe_intermediate_size or config.intermediate_size
    elif ".shared_expert." in name:
        inner = config.shared_expert_intermediate_size
    else:
        inner = config.intermediate_size
    rows_and_columns = {
        **{f"{letter}_proj": (count * size, hidden) for letter, count in heads.items()},
        **{f"{letter}_norm": (size,) for letter in heads},
        **dict.fromkeys(("embed_tokens", "lm_head"), (config.vocab_size, hidden)),
        **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), (inner, hidden)),
        **dict.fromkeys(("down_proj", "w2"), (hidden, inner)),
        "o_proj": (hidden, heads["q"] * size),
        "gate": (config.num_experts, hidden),
        "shared_expert_gate": (1, hidden),
    }
    found = rows_and_columns.get(part, (hidden,))  # else a norm
    return found[:1] if kind == "bias" else found
