"""The shape of a spec file, as frozen pydantic models. The docstring under a field is its text in the JSON Schema.

Knows types, ranges, defaults and what each key means. Does not read files (see `load`), does not compare keys with
each other (see `rules`), and knows nothing of how an engine is built.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    Strict,
    ValidationInfo,
    field_validator,
)

from trtspec.decoding.draft_length import check_schedule, check_token_cost
from trtspec.errors import TrtspecError
from trtspec.spec.gpus import GPUS
from trtspec.spec.marks import Key, Marks
from trtspec.spec.size import Size

SPEC_VERSION = 1

Method = Literal[
    "none",
    "draft_target",
    "early_exit",
    "ngram",
    "tree",
    "cascade",
    "medusa",
    "mtp",
    "eagle",
    "lookahead",
    "redrafter",
]
GpuName = Literal[
    "cpu", "A100-40GB", "A100-80GB", "A100-80GB-PCIe", "H100-SXM", "H100-PCIe", "H100-NVL", "H200"
]  # the rows of gpus.GPUS
Positive = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_TEXT = r"^[^\x00-\x1f]+$"
_MOUNT = r"^/[^\x00-\x1f]*$"
_TRTLLM_VERSION = r"^\d+\.\d+(\.\d+)*((rc|\.post)\d+)?$"
# What each pattern asks for, in words, for messages.
PATTERNS = {
    _NAME: "letters, digits, dots, dashes and underscores",
    _TEXT: "some text on one line",
    _MOUNT: "an absolute path",
    _TRTLLM_VERSION: 'a version such as "1.2.1"',
}
Name = Annotated[str, Field(pattern=_NAME)]
Text = Annotated[str, Field(pattern=_TEXT)]
# YAML has lists only; strict mode would ask for Python tuples.
IntList = Annotated[tuple[Positive, ...], Strict(False), Field(min_length=1)]
DeviceList = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Strict(False), Field(min_length=1)]
Choices = Annotated[
    tuple[Annotated[tuple[Annotated[int, Field(ge=0)], ...], Strict(False), Field(min_length=1)], ...],
    Strict(False),
    Field(min_length=1),
]


def _loads(value: Any) -> Any:
    """A table by number of requests; keys of a YAML file are text."""
    if not isinstance(value, dict):
        shown = "a list" if isinstance(value, list) else "an empty value" if value is None else repr(value)
        raise ValueError(f"{shown} is not allowed; expected numbers by number of requests")
    table: dict[int, Any] = {}
    for key, entry in value.items():
        if not str(key).isdecimal():
            raise ValueError(f"{key!r} is no number of requests; expected a whole number")
        if int(key) in table:
            raise ValueError(f"load {int(key)} is given twice; expected rising loads")
        table[int(key)] = entry
    return table


class Section(BaseModel):
    """Base of every section: unknown keys and silent type conversions are refused, values never change."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelRef(Section):
    """A model and the precision and split it is built with."""

    model: Text
    """A local Hugging Face directory (relative to the spec file), a hub name such as meta-llama/Llama-3.1-8B, or
    package:NAME for a directory inside an installed Python package."""
    gguf_file: Text | None = None
    """A GGUF file inside the model's directory, when the weights are in that format."""
    num_layers: Positive | None = None
    """Take only the model's first so many layers, with its norm and head; for a draft or middle model."""
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    """Type of weights and activations that are not quantised. Use float32 where identity of output is claimed."""
    quantization: Literal["none", "fp8", "int8_sq", "int4_awq", "w4a8_awq"] = "none"
    """Weight (and activation) quantisation: fp8, int8_sq (SmoothQuant W8A8), int4_awq (W4A16), w4a8_awq (FP8
    activations)."""
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto"
    """Type of the KV cache; auto is the model's dtype. int8 turns paged context FMHA and KV cache reuse off."""
    tensor_parallel: Positive = 1
    """GPUs that each layer is split over."""
    pipeline_parallel: Positive = 1
    """Groups of GPUs that the layers are divided among."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint. Only for checkpoints you trust."""
    max_seq_len: Positive | None = None
    """Longest sequence (prompt and output) of this model, when it differs from engine.max_seq_len."""

    @property
    def world_size(self) -> int:
        """GPUs this model occupies: tensor_parallel x pipeline_parallel."""
        return self.tensor_parallel * self.pipeline_parallel


class Medusa(Section):
    """Medusa heads on the target."""

    heads: Text
    """Directory or hub name of the trained heads."""
    num_heads: Positive = 4
    """Number of heads: how many tokens ahead the tree can reach."""
    num_layers: Positive = 1
    """Layers in each head."""
    choices: Choices | None = None
    """The token tree as paths of head ranks, every prefix listed, without the root; unset is the runtime's default tree
    of 63 nodes. `trtspec plan tree` finds the best one."""
    acceptance: Literal["lossless", "typical"] = "lossless"
    """lossless: the target's own token decides; typical: sampled requests also take a tree's token that is likely
    enough, which is lossy (runtime torch only)."""
    epsilon: Fraction = 0.09
    """Of typical acceptance: a token whose probability is above it is taken."""
    delta: Fraction = 0.3
    """Of typical acceptance: so is one above delta * exp(-entropy), where that is less than epsilon."""


class Eagle(Section):
    """EAGLE heads on the target."""

    heads: Text
    """Directory or hub name of the EAGLE weights."""
    version: Literal[1, 3] = 1
    """1 for EAGLE-1 heads (track engine), 3 for EAGLE-3 heads (track llmapi)."""
    num_layers: Positive = 4
    """Depth of the token tree (num_eagle_layers)."""
    max_non_leaves_per_layer: Positive = 10
    """Most nodes with children on one level of the tree."""
    choices: Choices | None = None
    """The token tree, as in medusa.choices; unset is the runtime's default tree of 63 nodes."""


class Redrafter(Section):
    """A ReDrafter recurrent head on the target."""

    drafter: Text
    """Directory or hub name of the drafter (config.json and weights)."""
    num_beams: Positive = 5
    """Beams the drafter searches."""
    draft_len_per_beam: Positive = 5
    """Tokens in each beam."""
    greedy: bool = True
    """Greedy verification, baked into the engine."""


class EarlyExit(Section):
    """Self-speculation: the target's own first layers propose."""

    layer: Positive
    """Number of layers that the draft keeps."""


class Ngram(Section):
    """Prompt lookup: proposals are copied from the text so far."""

    max_ngram: Annotated[int, Field(ge=1, le=16)] = 3
    """Longest match that is looked for at the end of the text."""
    window: Positive | None = None
    """Search only this many last tokens; unset is the whole text."""


class Tree(Section):
    """SpecInfer: the draft proposes a token tree, or several drafts do, whose trees are merged."""

    branching: IntList = (2, 2, 1)
    """Children of each node of a draft's tree, level by level; `trtspec plan tree` finds the best."""
    drafts: Annotated[tuple[ModelRef, ...], Strict(False), Field(max_length=3)] = ()
    """Up to three more draft models beside speculation.draft, each with a tree of its own: roles draft_2 to draft_4."""

    @property
    def depth(self) -> int:
        """Levels of the tree: tokens on its longest path."""
        return len(self.branching)

    @property
    def num_nodes(self) -> int:
        """Nodes without the root, of the trees of all drafts: tokens proposed a cycle."""
        each = sum(math.prod(self.branching[:level]) for level in range(1, self.depth + 1))
        return each * (1 + len(self.drafts))

    @property
    def num_parents(self) -> int:
        """Nodes of one draft's tree that have children."""
        return sum(math.prod(self.branching[:level]) for level in range(1, self.depth))


class Cascade(Section):
    """Three models or more: the draft proposes to a middle model, and what that accepts is proposed to the target, or
    to the next middle model."""

    middle: ModelRef
    """The model that proposes to the target."""
    middles: Annotated[tuple[ModelRef, ...], Strict(False), Field(max_length=2)] = ()
    """Up to two more models between middle and draft, from the target down: roles middle_2 and middle_3."""
    num_draft_tokens: Annotated[int, Field(ge=1, le=64)] = 3
    """Tokens that are proposed to a middle model a cycle; speculation.num_draft_tokens is what the first middle model
    proposes to the target."""


class Mtp(Section):
    """Multi-token prediction modules inside the target's checkpoint (DeepSeek-V3)."""

    num_modules: Positive = 1
    """MTP modules to use; the checkpoint must hold as many (num_nextn_predict_layers)."""


class Lookahead(Section):
    """Lookahead decoding: the target verifies n-grams of its own Jacobi iterations."""

    window_size: Positive = 4
    """W: positions guessed in parallel."""
    ngram_size: Positive = 3
    """N: length of the collected n-grams."""
    verification_set_size: Annotated[int, Field(ge=0)] = 4
    """G: n-grams verified in one pass."""

    @property
    def draft_len(self) -> int:
        """max_draft_len of the engine: (0 if N = 1 else N - 2) + (W - 1 + G)(N - 1), as TensorRT-LLM computes it."""
        w, n, g = self.window_size, self.ngram_size, self.verification_set_size
        return max(n - 2, 0) + (w - 1 + g) * (n - 1)


def serving_key(role: str) -> str:
    """Where a role's value stands in the sections that have one for each model: several of a kind share one."""
    return role.partition("_")[0]


def _default_num_draft_tokens(data: dict[str, Any]) -> int:
    """Draft tokens a cycle where the method's own settings decide them; 4 where the user is free to choose."""
    method = data.get("method")
    medusa, eagle, redrafter = data.get("medusa"), data.get("eagle"), data.get("redrafter")
    if method == "none":
        return 0
    if method == "medusa" and medusa:
        return len(medusa.choices) if medusa.choices else 63
    if method == "eagle" and eagle:
        return eagle.num_layers if eagle.version == 3 else len(eagle.choices) if eagle.choices else 63
    if method == "redrafter" and redrafter:
        return redrafter.num_beams * redrafter.draft_len_per_beam
    if method == "lookahead":
        return (data.get("lookahead") or Lookahead()).draft_len
    if method == "tree":
        return (data.get("tree") or Tree()).num_nodes
    if method == "mtp":
        return (data.get("mtp") or Mtp()).num_modules
    return 4


class Speculation(Section):
    """Who proposes, how much, and how proposals are accepted."""

    method: Method
    """none: plain decoding; draft_target: a smaller model; early_exit: the target's first layers; ngram: copied from
    the prompt; tree: a token tree from a draft; cascade: drafts in a row; medusa, eagle, mtp, redrafter: heads
    inside the target's engine; lookahead: the target's own n-grams."""
    draft: ModelRef | None = None
    """The draft model of draft_target, tree and cascade. It, and settings of other methods than the one above, are kept
    but unused, so that changing `method` alone switches."""
    acceptance: Literal["auto", "logits", "tokens"] = "auto"
    """How the target accepts: logits (rejection sampling on the draft's distribution), tokens (equality with its own
    sample), auto (logits when sampling, tokens when greedy). All are lossless."""
    medusa: Medusa | None = None
    """Settings of method medusa."""
    eagle: Eagle | None = None
    """Settings of method eagle."""
    redrafter: Redrafter | None = None
    """Settings of method redrafter."""
    early_exit: EarlyExit | None = None
    """Settings of method early_exit."""
    ngram: Ngram | None = None
    """Settings of method ngram."""
    tree: Tree | None = None
    """Settings of method tree."""
    cascade: Cascade | None = None
    """Settings of method cascade."""
    mtp: Mtp | None = None
    """Settings of method mtp."""
    lookahead: Lookahead | None = None
    """Settings of method lookahead."""
    # Last, because its default is derived from the fields above.
    num_draft_tokens: Annotated[int, Field(ge=0, le=1024)] = Field(default_factory=_default_num_draft_tokens)
    """Tokens proposed a cycle (gamma in the papers), at most 64 where it is free to choose. Default 4; derived from the
    method's settings for tree, medusa, eagle, redrafter, mtp and lookahead; 0 with method none."""

    @field_validator("num_draft_tokens")
    @classmethod
    def _none_proposes_nothing(cls, value: int, info: ValidationInfo) -> int:
        # So that `--set speculation.method=none` alone turns a spec into its plain counterpart.
        return 0 if info.data.get("method") == "none" else value

    @property
    def heads(self) -> str | None:
        """Directory or hub name of the weights that the method adds to the target; None: it adds none."""
        if self.method == "medusa" and self.medusa:
            return self.medusa.heads
        if self.method == "eagle" and self.eagle:
            return self.eagle.heads
        if self.method == "redrafter" and self.redrafter:
            return self.redrafter.drafter
        return None

    @property
    def derived_num_draft_tokens(self) -> int | None:
        """Draft tokens a cycle that the method's own settings dictate; None where they are free to choose."""
        if self.method not in ("tree", "medusa", "eagle", "redrafter", "lookahead"):
            return None
        return _default_num_draft_tokens(dict(self))


class Hardware(Section):
    """The machine the engines are built for."""

    gpu: GpuName = "cpu"
    """GPU model, or cpu for the torch runtime without one."""
    num_gpus: Positive = 1
    """GPUs in each node."""
    num_nodes: Positive = 1
    """Nodes that share the model."""

    @property
    def sm(self) -> int:
        """Compute capability times ten (90 = Hopper); 0 for the CPU."""
        return GPUS[self.gpu].sm

    @property
    def total_gpus(self) -> int:
        """GPUs in all nodes together."""
        return self.num_gpus * self.num_nodes


class Engine(Section):
    """How the engines are built, and their limits."""

    track: Literal["engine", "llmapi"] = "engine"
    """engine: compiled engines and the C++ Triton backend, TensorRT-LLM up to 1.2; llmapi: the PyTorch backend, no
    compile step."""
    runtime: Literal["torch", "tensorrt_llm"] = "torch"
    """What executes the engines: torch runs anywhere, tensorrt_llm needs a GPU."""
    version: Annotated[str, Field(pattern=_TRTLLM_VERSION)] = "1.2.1"
    """TensorRT-LLM version, quoted."""
    max_batch_size: Positive = 8
    """Most requests in one forward pass."""
    max_input_len: Positive = 1024
    """Longest prompt, in tokens."""
    max_seq_len: Positive = 2048
    """Longest prompt and output together, in tokens."""
    max_num_tokens: Positive | None = None
    """Most tokens in one forward pass; unset is TensorRT-LLM's default (8192), raised where drafts need more."""
    max_draft_len: Annotated[int, Field(ge=0)] | None = None
    """Draft tokens that the target engine can verify in one pass; unset is what speculation needs."""
    paged_context_fmha: bool = True
    """Attention over paged context (use_paged_context_fmha), which KV cache reuse needs."""
    kv_cache_reuse: bool = True
    """Keep the KV cache of a prefix for the next call. Without it, every cycle computes the whole text again."""
    tokens_per_block: Literal[16, 32, 64, 128] = 32
    """Tokens in one block of the paged KV cache."""
    gather_generation_logits: bool = True
    """Engines can return generation logits, which acceptance by logits needs."""
    logits_dtype: Literal["float32", "float16"] = "float32"
    """Type of the logits that engines answer with."""
    build_options: dict[str, str | int | bool] = Field(default_factory=dict)
    """Further options of trtllm-build by name, without dashes, such as `gemm_plugin: auto`; for all engines."""


class Calibration(Section):
    """What quantisation is calibrated with: activations are observed while these texts are read."""

    prompts: Text | None = None
    """JSON Lines file of prompts (key prompt), relative to the spec file; unset is a set that comes with trtspec."""
    num_prompts: Positive = 128
    """Prompts to take from the file, from its beginning."""
    max_tokens: Positive = 512
    """Tokens to take of each prompt."""
    batch_size: Positive = 4
    """Prompts in one forward pass."""


class PerModel(Section):
    """Base of sections with a value for each model."""

    def of(self, role: str) -> Any:
        """The value for a role (a key of `Spec.models`)."""
        return getattr(self, serving_key(role))


class PerModelSize(PerModel):
    """A byte size for each model."""

    target: Size | None = None
    """Bytes for the target, such as 256MiB."""
    draft: Size | None = None
    """Bytes for the draft; for each, where there are several."""
    middle: Size | None = None
    """Bytes for the middle model of a cascade; for each, where there are several."""


class PerModelDevices(PerModel):
    """GPU numbers for each model."""

    target: DeviceList | None = None
    """GPUs of the target."""
    draft: DeviceList | None = None
    """GPUs of the draft; of each, where there are several."""
    middle: DeviceList | None = None
    """GPUs of the middle model of a cascade; of each, where there are several."""


class PerModelFraction(PerModel):
    """A fraction of free GPU memory for each model, in the order in which they load."""

    target: Fraction | None = None
    """Fraction for the target."""
    draft: Fraction | None = None
    """Fraction for the draft; for each, where there are several."""
    middle: Fraction | None = None
    """Fraction for the middle model of a cascade; for each, where there are several."""


class DraftLength(Section):
    """How many tokens are drafted at which load: where drafts are made outside the target's engine, and by schedule in
    the LLM API. Token trees are made whole or not at all."""

    policy: Literal["fixed", "schedule", "adaptive"] = "fixed"
    """fixed: as many as the request asks for; schedule: at most what the schedule says; adaptive: what emits most
    tokens in a time, by the running acceptance and the cost of a draft token. The output's distribution is the same."""
    schedule: Annotated[dict[int, Annotated[int, Field(ge=0)]], BeforeValidator(_loads)] = Field(
        default_factory=dict, validate_default=True
    )
    """Most draft tokens for up to so many requests worked on, such as {4: 4, 8: 2, 16: 0}; 0 beyond the last. Kept but
    unused with another policy."""
    token_cost: Annotated[dict[int, Annotated[float, Field(ge=0)]], BeforeValidator(_loads)] | None = None
    """With adaptive: time that one more draft token adds, drafted and verified, as part of the time of a plain pass of
    the target, by requests worked on, such as {1: 0.2, 16: 1.1}; unset is measured while serving."""

    @field_validator("schedule")
    @classmethod
    def _rising_schedule(cls, value: dict[int, int], info: ValidationInfo) -> dict[int, int]:
        if value or info.data.get("policy") == "schedule":
            check_schedule(value)
        return value

    @field_validator("token_cost")
    @classmethod
    def _rising_costs(cls, value: dict[int, float] | None) -> dict[int, float] | None:
        if value is not None:
            check_token_cost(value)
        return value


class Serving(Section):
    """How the Triton server is started and what it allows."""

    host: Text = "127.0.0.1"
    """Address the server listens on. The default is reachable from this machine only."""
    http_port: Port = 8000
    """Port of HTTP/REST."""
    grpc_port: Port = 8001
    """Port of gRPC."""
    metrics_port: Port = 8002
    """Port of the Prometheus metrics."""
    mount_point: Annotated[str, Field(pattern=_MOUNT)] = "/engines"
    """Where the server sees the engines; an absolute path, as in the container."""
    exclude_input_in_output: bool = True
    """Answer with the new text only, unless the request says otherwise."""
    kv_cache_bytes: PerModelSize = PerModelSize()
    """Size of each model's KV cache; unset is the runtime's default."""
    kv_cache_free_gpu_mem_fraction: PerModelFraction = PerModelFraction()
    """On GPUs: the part of the memory still free that each model's KV cache takes when it loads; unset is derived from
    what the models need."""
    gpu_device_ids: PerModelDevices = PerModelDevices()
    """GPUs that each model runs on; unset is the first ones, shared by all models."""
    orchestrator: bool = False
    """Let the backend run each engine model in processes of its own (TRTLLM_ORCHESTRATOR)."""
    spawn_processes: bool = True
    """With orchestrator: the backend starts these processes; false: they are MPI ranks that the launcher starts."""
    fast_logits: bool = False
    """Hand the draft's logits from GPU to GPU; needs orchestrator: true and spawn_processes: false."""
    chunked_context: bool = False
    """Process long prompts in pieces between the decoding steps of others (enable_chunked_context)."""
    engine_parameters: dict[str, str] = Field(default_factory=dict)
    """Further parameters of the engine models in the C++ backend, such as `cuda_graph_mode: "true"`."""
    image: Text | None = None
    """Container image for GPU hosts; unset is the Triton image with TensorRT-LLM of engine.version."""
    shm_size: Size = 8 * 2**30
    """Shared memory of the container."""
    num_threads: Positive | None = None
    """CPU threads of each engine in the torch runtime; unset gives every engine all cores, since they take turns."""
    max_concurrency: Positive = 8
    """Texts that the BLS model works on at the same time."""
    max_queued: Positive = 256
    """Texts that may wait for it; a request beyond that is refused at once."""
    alternate_phases: bool | None = None
    """Let all requests draft together and verify together, in turns: for models that share a processor. Unset: with the
    torch runtime, whose engines share the cores."""
    call_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest wait for one call to the target's engine, in seconds."""
    draft_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Longest wait for one call to an engine that drafts, in seconds; then the target goes on alone for a while."""
    startup_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest wait for the server to answer its first request, in seconds."""
    probe_interval_s: Annotated[float, Field(gt=0)] = 30.0
    """How often the local server's supervisor sends small requests to models that no traffic shows to be alive, in
    seconds; one that answers none is loaded again."""
    default_num_draft_tokens: Annotated[int, Field(ge=0)] | None = None
    """Draft tokens for requests that do not say; unset is speculation.num_draft_tokens."""
    draft_length: DraftLength | None = None
    """How many tokens are drafted at which load; unset is policy fixed."""
    plain_chunk_tokens: Positive = 16
    """Tokens of one target call when decoding without drafts; streamed text arrives in such pieces."""


class CheckpointBudget(Section):
    """How far an executed TensorRT-LLM checkpoint may be from the model that it was made from."""

    max_kl: Annotated[float, Field(gt=0)] | None = None
    """Largest mean Kullback-Leibler divergence of the next-token distributions, in nats; unset is by precision."""
    min_top1: Fraction | None = None
    """Smallest part of the tokens whose likeliest id is the same, or as likely within rounding; unset is by
    precision."""
    max_tokens: Positive = 256
    """Tokens compared for each prompt, its own and those of the reference's answer."""


class Parity(Section):
    """How the built engines are checked against the reference sampler."""

    prompts: Text | None = None
    """JSON Lines file of prompts (key prompt, optional category), relative to the spec file."""
    num_prompts: Positive = 8
    """Prompts to take from the file, evenly spread over it."""
    max_tokens: Positive = 48
    """Longest answer to a prompt, in tokens."""
    num_draft_tokens: Annotated[int, Field(ge=0)] | None = None
    """Draft tokens a cycle in the check; unset is speculation.num_draft_tokens."""
    temperature: Annotated[float, Field(gt=0)] = 0.8
    """Temperature of the second sampled setting; the first is always temperature 1 without top-k and top-p."""
    top_k: Annotated[int, Field(ge=0)] = 50
    """Top-k of the second sampled setting; 0 is off."""
    top_p: Fraction = 0.95
    """Top-p of the second sampled setting; 1 is off."""
    num_samples: Positive = 400
    """Tokens drawn in the sampled check, all settings together; more see smaller deviations."""
    detect: Annotated[float, Field(gt=0, le=1)] | None = None
    """Total variation that the sampled check is to find with probability 95 %, instead of num_samples."""
    num_draws: Annotated[int, Field(ge=0)] = 200
    """Answers of two tokens drawn for one prompt in the check of plain counts; 0 leaves it out."""
    tolerance: Annotated[float, Field(ge=0)] | None = None
    """Largest difference of reference logits that still counts as a tie; unset is chosen by dtype."""
    reference_dtype: Literal["float32", "subject"] = "float32"
    """Type in which the reference computes: float32, or the target's own."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the sampled check."""
    false_alarm_rate: Annotated[float, Field(gt=0, lt=1)] = 0.001
    """Probability that a run fails although the output is right; all statistical checks share it."""
    checkpoint: CheckpointBudget = CheckpointBudget()
    """Budget of the comparison of checkpoints with their models."""


class Output(Section):
    """Where results land; relative to the spec file."""

    engines: Text | None = None
    """Directory of the engines; unset is engines/NAME."""
    model_repo: Text | None = None
    """Directory of the Triton model repository; unset is model_repo/NAME."""


class Spec(Section):
    """Speculative decoding from one file: what to build, for which GPU, how to serve it and how to check it."""

    version: Literal[1]
    """Version of this file format."""
    name: Name = Field(default_factory=lambda: "spec")
    """Name of the deployment; unset is the name of the file."""
    target: ModelRef
    """The model whose output counts."""
    speculation: Speculation
    """Who proposes, how much, and how proposals are accepted."""
    hardware: Hardware = Hardware()
    """The machine the engines are built for."""
    engine: Engine = Engine()
    """How the engines are built, and their limits."""
    calibration: Calibration = Calibration()
    """What quantisation is calibrated with."""
    serving: Serving = Serving()
    """How the Triton server is started and what it allows."""
    parity: Parity = Parity()
    """How the built engines are checked against the reference sampler."""
    output: Output = Output()
    """Where results land."""

    _source: Path = PrivateAttr(default=Path("spec.yaml"))
    _marks: Marks = PrivateAttr(default=Marks(Path("spec.yaml"), {}))

    @property
    def source(self) -> Path:
        """Absolute path of the file that this spec was read from."""
        return self._source

    @property
    def base_dir(self) -> Path:
        """Directory that relative paths in the spec are relative to."""
        return self._source.parent

    @property
    def models(self) -> dict[str, ModelRef]:
        """The models that are loaded, by role, in the order target, middles, drafts; only those the method uses."""
        models = {"target": self.target}
        if self.speculation.method == "cascade" and self.speculation.cascade:
            models["middle"] = self.speculation.cascade.middle
            models |= {f"middle_{number}": middle for number, middle in enumerate(self.speculation.cascade.middles, 2)}
        if self.speculation.method in ("draft_target", "tree", "cascade") and self.speculation.draft:
            models["draft"] = self.speculation.draft
        if self.speculation.method == "tree" and self.speculation.tree:
            models |= {f"draft_{number}": draft for number, draft in enumerate(self.speculation.tree.drafts, 2)}
        if self.speculation.method == "early_exit" and self.speculation.early_exit:
            models["draft"] = self.target.model_copy(update={"num_layers": self.speculation.early_exit.layer})
        return models

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Who verifies what whom proposes, by role; every draft also has to fit the target."""
        roles = list(self.models)[1:]
        return [*(("target", role) for role in roles), *(pairwise(roles) if "middle" in roles else ())]

    @property
    def max_draft_len(self) -> int:
        """Draft tokens that the target engine verifies in one pass (build option max_draft_len)."""
        if self.engine.max_draft_len is not None:
            return self.engine.max_draft_len
        return self.speculation.num_draft_tokens

    @property
    def default_num_draft_tokens(self) -> int:
        """Draft tokens of a request that does not say."""
        given = self.serving.default_num_draft_tokens
        return self.speculation.num_draft_tokens if given is None else given

    @property
    def alternates_phases(self) -> bool:
        """Whether all requests draft together and verify together."""
        given = self.serving.alternate_phases
        return self.engine.runtime == "torch" if given is None else given

    @property
    def engines_dir(self) -> Path:
        """Absolute directory of the engines."""
        return self.path(self.resolved()["output"]["engines"])

    @property
    def checkpoints_dir(self) -> Path:
        """Absolute directory of the TensorRT-LLM checkpoints, one directory a role."""
        return self.engines_dir / "checkpoints"

    @property
    def calibration_path(self) -> Path | None:
        """Absolute path of the calibration prompts; None: those that come with trtspec."""
        return None if self.calibration.prompts is None else self.path(self.calibration.prompts)

    @property
    def model_repo_dir(self) -> Path:
        """Absolute directory of the Triton model repository."""
        return self.path(self.resolved()["output"]["model_repo"])

    @property
    def prompts_path(self) -> Path:
        """Absolute path of the parity prompts.

        Raises:
            TrtspecError: the spec names none.
        """
        if self.parity.prompts is None:
            raise TrtspecError(
                "no prompts to check with", where=self.where(("parity", "prompts")), expected="a JSON Lines file"
            )
        return self.path(self.parity.prompts)

    def where(self, key: Key) -> str:
        """`file:line: dotted.key` of a key, for messages."""
        return self._marks.where(key)

    def max_seq_len(self, role: str) -> int:
        """Longest sequence of the engine of `role` (a key of `models`)."""
        return self.models[role].max_seq_len or self.engine.max_seq_len

    def path(self, text: str) -> Path:
        """Absolute path of a path written in the spec: relative to the spec file, `~` expanded."""
        return Path(os.path.normpath(self.base_dir / Path(text).expanduser()))

    def resolved(self) -> dict[str, Any]:
        """The content as plain JSON values with every default filled in; loading it again gives an equal spec."""
        content = self.model_dump(mode="json", exclude_none=True)
        content["output"] = {"engines": f"engines/{self.name}", "model_repo": f"model_repo/{self.name}"} | content[
            "output"
        ]
        return content

    def hash(self) -> str:
        """sha256 (hex) of the resolved content: comments, order, format and spelled-out defaults do not matter."""
        canonical = json.dumps(self.resolved(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
