"""Every example config with engines of TensorRT-LLM, from its spec to an answer of the real Triton server.

The models are tiny random ones of the families that the example names; everything else is the example's own: method,
precision, split, quantisation, serving. The engines are prepared, not compiled, and the repository is loaded as it was
written: the stand-in backend executes the checkpoints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from trtspec.cli import main
from trtspec.decoding.engine_call import EngineRequest
from trtspec.errors import TrtspecError
from trtspec.runtime.engine import EngineConfig
from trtspec.runtime.torch_runtime import TorchRuntime
from trtspec.spec.load import load_spec
from trtspec.triton.client import Client
from trtspec.triton.server import LocalServer

CONFIGS = Path(__file__).parents[2] / "configs"
NUM_TOKENS = 12
PROMPT = "the draft proposes what the target verifies"
VOCAB, HIDDEN = 280, 32
COMPILED = ("engine", "tensorrt_llm")  # track and runtime
SMALL = (
    "engine.max_batch_size=2",
    "engine.max_input_len=128",
    "engine.max_seq_len=256",
    "engine.max_num_tokens=512",
    "calibration.num_prompts=2",
    "calibration.max_tokens=16",
    "serving.max_concurrency=2",
)
# Example -> what takes the place of its models: spec key -> name in stand_ins; and further overrides.
EXAMPLES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "llama-3.1-70b-draft-1b-h100": ({"target": "llama", "speculation.draft": "draft"}, ()),
    "llama-3.1-70b-draft-8b-h100": (
        {"target": "llama", "speculation.draft": "draft"},
        ("engine.logits_dtype=float16",),  # draft logits then cross the server in two bytes each
    ),
    "llama-3.1-70b-early-exit-32": ({"target": "llama"}, ("speculation.early_exit.layer=1",)),
    "llama-3.1-8b-medusa-a100": ({"target": "llama", "speculation.medusa": "heads"}, ()),
    "llama-cascade-1b-8b-70b": (
        {"target": "llama", "speculation.cascade.middle": "draft", "speculation.draft": "second draft"},
        (),
    ),
    "mixtral-8x7b-h100": ({"target": "mixtral"}, ()),
    "quickstart-h100": ({"target": "llama", "speculation.draft": "draft"}, ("target.gguf_file=null",)),
}
SAMPLING = {"temperature": 0.8, "top_p": 0.95}
# Example -> the method drafts outside the engine, so that the pipeline counts drafts.
DRAFTS_OUTSIDE = {name: "medusa" not in name for name in EXAMPLES}


def test_every_example_with_compiled_engines_is_here() -> None:
    engines = {path.stem: load_spec(path).engine for path in CONFIGS.glob("*.yaml")}
    compiled = {name for name, engine in engines.items() if (engine.track, engine.runtime) == COMPILED}
    assert compiled == set(EXAMPLES)


def write_mixtral(directory: Path, tokenizer_json: str) -> Path:
    """A random Mixtral of two layers and four experts."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(5)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
    )
    MixtralForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text(tokenizer_json)
    (directory / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    return directory


def write_heads(directory: Path) -> Path:
    """Three Medusa heads of one layer, which share the target's output matrix."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(6)
    tensors = {}
    for head in range(3):
        tensors[f"{head}.0.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=random) * 0.1
        tensors[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN)
        tensors[f"{head}.1.weight"] = torch.randn(VOCAB, HIDDEN, generator=random)
    directory.mkdir()
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    (directory / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    return directory


@pytest.fixture(scope="module")
def stand_ins(
    save_model: Callable[..., Path], tiny_tokenizer_json: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """What takes the place of the examples' models, by the names in EXAMPLES."""
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": save_model(root / "llama"),
        "draft": save_model(root / "draft", blend=(1, 0.03)),
        "second draft": save_model(root / "second-draft", blend=(2, 0.06)),
        "mixtral": write_mixtral(root / "mixtral", tiny_tokenizer_json),
        "heads": write_heads(root / "heads"),
    }


@pytest.fixture(scope="module", params=EXAMPLES)
def served(
    request: pytest.FixtureRequest,
    stand_ins: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[], dict[str, int]],
) -> Iterator[SimpleNamespace]:
    """One example: built by the command without compiling, and the server on what was built."""
    name = request.param
    models, further = EXAMPLES[name]
    root = tmp_path_factory.mktemp(name)
    config = CONFIGS / f"{name}.yaml"
    places = [f"{key}.{'heads' if what == 'heads' else 'model'}={stand_ins[what]}" for key, what in models.items()]
    overrides = [*places, *further, *SMALL, f"output.engines={root / 'engines'}", f"output.model_repo={root / 'repo'}"]
    built = CliRunner().invoke(main, ["build", str(config), "--no-compile", *(f"--set={each}" for each in overrides)])
    assert built.exit_code == 0, built.output
    repository, ports = root / "repo", free_ports()
    before = checksum(repository)
    with LocalServer(
        repository,
        engines_root=root / "engines",
        num_threads=1,
        startup_timeout_s=200.0,
        state_dir=root / "state",
        **ports,
    ):
        yield SimpleNamespace(
            name=name,
            spec=load_spec(config, overrides),
            engines=root / "engines",
            repository=repository,
            before=before,
            url=f"127.0.0.1:{ports['grpc_port']}",
        )


def checksum(directory: Path) -> str:
    """Of the names and contents of all files."""
    content = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        content.update(str(path.relative_to(directory)).encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()


def greedy_ids(engine: Path, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """What the engine's runtime says alone, without a server, drafts or a pipeline."""
    request = EngineRequest(np.array(prompt_ids, dtype=np.int32), num_tokens)
    return TorchRuntime(engine, kv_cache_bytes=32 << 20).execute(request).output_ids.tolist()


def test_an_example_is_served_from_the_repository_that_was_written(
    served: SimpleNamespace, tiny_tokenizer_json: str
) -> None:
    from tokenizers import Tokenizer

    spec = served.spec
    for role in spec.models:
        engine = EngineConfig.load(served.engines / role)
        assert (engine.runtime, engine.compiled) == ("tensorrt_llm", False)
    with Client(served.url) as client:
        roles = {"target": "tensorrt_llm", "draft": "tensorrt_llm_draft", "middle": "tensorrt_llm_middle"}
        assert {roles[role] for role in spec.models} <= client.ready_models()
        completion = client.complete(PROMPT, max_tokens=NUM_TOKENS, timeout_s=120)
    tokenizer = Tokenizer.from_str(tiny_tokenizer_json)
    expected = greedy_ids(served.engines / "target", tokenizer.encode(PROMPT).ids, NUM_TOKENS)
    end = next((i for i, token in enumerate(expected) if token in (0, 2)), len(expected))
    assert completion.text == tokenizer.decode(expected[:end])
    assert (completion.stats.drafted > 0) == DRAFTS_OUTSIDE[served.name]
    assert checksum(served.repository) == served.before


def test_an_example_samples_with_a_seed_or_says_why_not(served: SimpleNamespace) -> None:
    with Client(served.url) as client:
        if served.spec.speculation.method == "medusa":
            with pytest.raises(TrtspecError, match="temperature"):
                client.complete(PROMPT, max_tokens=NUM_TOKENS, seed=1, **SAMPLING)
            return
        answers = [client.complete(PROMPT, max_tokens=NUM_TOKENS, seed=seed, **SAMPLING) for seed in (1, 1, 2, 3)]
    assert answers[0].text == answers[1].text
    assert len({answer.text for answer in answers}) > 1
    assert all(answer.stats.drafted > 0 for answer in answers)
