"""NVIDIA ModelOpt: a Hugging Face model is calibrated, quantised and split into the tensors of each rank.

Knows how to drive ModelOpt and what its exporter leaves to be done: embedding and head (see `vocabulary`), config.json
(see `checkpoint_config`). Does not know files.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import io
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError
from trtspec.models.source import EMBEDDING, ModelSource
from trtspec.trtllm.convert.checkpoint_config import KV_CACHE_QUANT_ALGO, QUANT_ALGO
from trtspec.trtllm.convert.vocabulary import full_head, vocabulary_shard

if TYPE_CHECKING:
    import torch

    from trtspec.spec.schema import ModelRef
    from trtspec.trtllm.convert.calibration import CalibrationSet

Advance = Callable[[float], None]
# Called with a rank and its tensors.
Write = Callable[[int, "dict[str, torch.Tensor]"], None]

# ModelOpt's name of the settings, and how often they read the calibration prompts.
FORMATS = {
    "fp8": ("FP8_DEFAULT_CFG", 1),
    "int8_sq": ("INT8_SMOOTHQUANT_CFG", 1),
    "int4_awq": ("INT4_AWQ_CFG", 2),
    "w4a8_awq": ("W4A8_AWQ_BETA_CFG", 2),
}
# How much of the activations' outliers SmoothQuant moves into the weights. ModelOpt's default, all of it (1.0), is too
# much: SmolLM2-135M is then 0.32 nats (KL) from the original, with 0.8 it is 0.09.
SMOOTHING = 0.8
KV_CACHE_BITS: dict[str, Any] = {"fp8": (4, 3), "int8": 8}
_CALIBRATION_ROOM = 1.3  # memory to calibrate in, in sizes of the model: activations, and what is observed of them
_EMBEDDING = "transformer.vocab_embedding.weight"
_HEAD = "lm_head.weight"
# Linears of Hugging Face's layers, and of TensorRT-LLM's.
_LINEARS = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "attention.qkv"),
    "self_attn.o_proj": "attention.dense",
    "mlp.gate_proj": "mlp.fc",
    "mlp.up_proj": "mlp.gate",
    "mlp.down_proj": "mlp.proj",
    **dict.fromkeys(("block_sparse_moe.experts.w1", "block_sparse_moe.experts.w3"), "mlp.fc"),
    "block_sparse_moe.experts.w2": "mlp.proj",
}


def producer() -> str:
    """`nvidia-modelopt 0.37.0`.

    Raises:
        TrtspecError: it is not installed.
    """
    try:
        return f"nvidia-modelopt {importlib.metadata.version('nvidia-modelopt')}"
    except importlib.metadata.PackageNotFoundError:
        raise TrtspecError(
            "converting a model to a TensorRT-LLM checkpoint needs NVIDIA ModelOpt, which is not installed",
            fix="pip install 'trtspec[modelopt]'",
        ) from None


def needs_calibration(model: ModelRef) -> bool:
    """Whether anything is quantised, weights, activations or the KV cache."""
    return model.quantization != "none" or model.kv_cache_dtype != "auto"


class ModelOptModel:
    """One model on its way into a checkpoint: make it, `calibrate` it where something is quantised, then `export` it.

    Args:
        source: the model.
        ref: its precision and split.

    Raises:
        TrtspecError: ModelOpt is not installed, or the weights do not fit the model's class.
    """

    def __init__(self, source: ModelSource, ref: ModelRef) -> None:
        producer()
        import torch

        self._ref = ref
        self._dtype = getattr(torch, ref.dtype)
        self._model = _hugging_face_model(source, self._dtype, needs_calibration(ref))
        self._quant_algos = {
            "quant_algo": QUANT_ALGO[ref.quantization],
            "kv_cache_quant_algo": KV_CACHE_QUANT_ALGO[ref.kv_cache_dtype],
        }
        self.input_amax: dict[str, float] = {}

    def calibrate(self, prompts: CalibrationSet, advance: Advance) -> None:
        """Observe the activations and quantise. Sets `input_amax`: linear, under TensorRT-LLM's name with layers
        counted over the whole model, -> largest magnitude that its quantised input had."""
        import torch

        device = _device(self._model)
        batches = [torch.tensor(batch, device=device) for batch in prompts.batches]
        passes = FORMATS[self._ref.quantization][1] if self._ref.quantization in FORMATS else 1
        done = 0

        with _quiet() as aloud:

            def read(model: Any) -> None:
                nonlocal done
                for batch in batches:
                    # Without the head, which is not quantised and costs a fifth of the time of a small model.
                    model.model(input_ids=batch, use_cache=False)
                    done += 1
                    with aloud():
                        advance(min(done / (passes * len(batches)), 1.0))

            quantization = importlib.import_module("modelopt.torch.quantization")
            with torch.no_grad():
                self._model.to(device)
                self._model = quantization.quantize(self._model, _settings(quantization, self._ref), read).to("cpu")
        self.input_amax = _input_amax(self._model)

    def export(self, source: ModelSource, write: Write) -> None:
        """Split the model, calling `write` for each rank in order.

        Raises:
            TrtspecError: ModelOpt made another precision of it than was asked for.
        """
        import torch

        head, embedding = full_head(source).to(self._dtype), source.tensor(EMBEDDING).to(self._dtype)
        tensor_parallel = self._ref.tensor_parallel
        with _quiet() as aloud, torch.no_grad():
            exporter = importlib.import_module("modelopt.torch.export")
            for config, weights, _ in exporter.torch_to_tensorrt_llm_checkpoint(
                self._model,
                "llama",  # the decoder type that all families of `checkpoint_config` have in common
                self._dtype,
                inference_tensor_parallel=tensor_parallel,
                inference_pipeline_parallel=self._ref.pipeline_parallel,
            ):
                rank = config["rank"]
                for name, whole in ((_EMBEDDING, embedding), (_HEAD, head)):
                    if name in weights:
                        weights[name] = vocabulary_shard(whole, tensor_parallel, rank % tensor_parallel)
                for key, right in self._quant_algos.items():
                    if config["quantization"][key] != right:
                        raise TrtspecError(
                            f"ModelOpt wrote {key} {config['quantization'][key]}",
                            where=source.name,
                            expected=str(right),
                        )
                with aloud():
                    write(rank, weights)


def _settings(quantization: Any, ref: ModelRef) -> dict[str, Any]:
    """ModelOpt's settings for this precision."""
    if ref.quantization in FORMATS:
        settings = copy.deepcopy(getattr(quantization, FORMATS[ref.quantization][0]))
    else:
        settings = {"quant_cfg": {"default": {"enable": False}}, "algorithm": "max"}
    if ref.quantization == "int8_sq":
        settings["algorithm"] = {"method": "smoothquant", "alpha": SMOOTHING}
    if ref.kv_cache_dtype in KV_CACHE_BITS:
        bits = KV_CACHE_BITS[ref.kv_cache_dtype]
        settings["quant_cfg"]["*[kv]_bmm_quantizer"] = {"num_bits": bits, "axis": None, "enable": True}
    return settings


def _input_amax(model: torch.nn.Module) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        linear = _LINEARS.get(re.sub(r"\.experts\.\d+\.", ".experts.", match[2])) if match else None
        quantizer: Any = getattr(module, "input_quantizer", None)
        if match and linear and quantizer is not None and quantizer.is_enabled and quantizer.amax is not None:
            key = f"transformer.layers.{match[1]}.{linear}"
            found[key] = max(found.get(key, 0.0), float(quantizer.amax.max()))
    return found


def _device(model: torch.nn.Module) -> str:
    """Where to read the calibration prompts: on a GPU that has room for the whole model, else on the CPU."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    needed = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    free, _ = torch.cuda.mem_get_info()
    return "cuda" if needed * _CALIBRATION_ROOM < free else "cpu"


def _hugging_face_model(source: ModelSource, dtype: torch.dtype, is_run: bool) -> torch.nn.Module:
    """transformers' own model with these weights, and the whole head where the source has a reduced one.

    A model that is run gets float32 weights if they fit into memory: CPUs compute several times faster in it.

    Raises:
        TrtspecError: weights that the class does not know, or lacks.
    """
    import torch
    import transformers

    kind = getattr(transformers, source.config.architecture, None)
    if kind is None:
        raise TrtspecError(f"transformers has no {source.config.architecture}", where=str(source.path))
    names = sorted(set(source.tensor_names()) - {"d2t", _HEAD})
    state = {name: source.tensor(name) for name in names}
    if not source.config.tie_word_embeddings:
        state[_HEAD] = full_head(source)
    if is_run and 4 * sum(tensor.numel() for tensor in state.values()) < _free_memory():
        dtype = torch.float32
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    with _quiet():
        model, report = kind.from_pretrained(
            None,
            config=kind.config_class(**source.config.to_hf()),
            state_dict=state,
            dtype=dtype,
            output_loading_info=True,
        )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            raise TrtspecError(
                f"weights do not fit transformers' {kind.__name__}: {problem} {sorted(report[problem])[:3]}",
                where=str(source.path),
            )
    loaded: torch.nn.Module = model.eval()
    return loaded


def _free_memory() -> int:
    """Bytes that can be had without swapping, about."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Muted(io.TextIOBase):
    """A stream that drops what one thread writes, and passes on what others write."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread, self.muted = stream, threading.get_ident(), True

    def write(self, text: str) -> int:
        if self.muted and threading.get_ident() == self._thread:
            return len(text)
        written: int = self._stream.write(text)
        return written

    def flush(self) -> None:
        self._stream.flush()


@contextlib.contextmanager
def _quiet() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """ModelOpt prints and warns about what it does well; inside, only what runs under the yielded context is heard."""
    out, err = _Muted(sys.stdout), _Muted(sys.stderr)

    @contextlib.contextmanager
    def aloud() -> Iterator[None]:
        out.muted = err.muted = False
        try:
            yield
        finally:
            out.muted = err.muted = True

    with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        warnings.simplefilter("ignore")
        yield aloud
