"""The spec files in configs/: each validates, says what it claims, and fits the memory of the machine it names."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from trtspec.cli import main
from trtspec.spec.gpus import GPUS
from trtspec.spec.load import load_spec
from trtspec.spec.schema import ModelRef
from trtspec.trtllm.support import check_support

CONFIGS = Path(__file__).parents[2] / "configs"
EXAMPLES = sorted(path.name for path in CONFIGS.glob("*.yaml"))

# file -> (method, gpu, number of GPUs, track)
CLAIMS = {
    "quickstart.yaml": ("draft_target", "cpu", 1, "engine"),
    "quickstart-medusa.yaml": ("medusa", "cpu", 1, "engine"),
    "quickstart-tree.yaml": ("tree", "cpu", 1, "engine"),
    "quickstart-ngram.yaml": ("ngram", "cpu", 1, "engine"),
    "quickstart-early-exit.yaml": ("early_exit", "cpu", 1, "engine"),
    "quickstart-cascade.yaml": ("cascade", "cpu", 1, "engine"),
    "quickstart-h100.yaml": ("draft_target", "H100-SXM", 1, "engine"),
    "llama-3.1-70b-draft-8b-h100.yaml": ("draft_target", "H100-SXM", 4, "engine"),
    "llama-3.1-70b-draft-1b-h100.yaml": ("draft_target", "H100-SXM", 2, "engine"),
    "llama-3.1-8b-medusa-a100.yaml": ("medusa", "A100-80GB", 1, "engine"),
    "mixtral-8x7b-h100.yaml": ("ngram", "H100-SXM", 2, "engine"),
    "deepseek-v3-mtp-llmapi.yaml": ("mtp", "H200", 8, "llmapi"),
    "llama-3.1-70b-early-exit-32.yaml": ("early_exit", "H100-SXM", 4, "engine"),
    "llama-cascade-1b-8b-70b.yaml": ("cascade", "H100-SXM", 4, "engine"),
}
# Billions of parameters, and bytes of a bf16 KV cache for one token, from the published configs.
SIZES = {
    "meta-llama/Llama-3.1-70B-Instruct": (70.6, 320 * 1024),
    "meta-llama/Llama-3.1-8B-Instruct": (8.0, 128 * 1024),
    "meta-llama/Llama-3.2-1B-Instruct": (1.24, 32 * 1024),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (46.7, 128 * 1024),
    "deepseek-ai/DeepSeek-V3": (685.0, 61 * 576 * 2 * 8),  # latent cache, whole on each of the eight GPUs
}


def test_every_example_is_claimed() -> None:
    assert set(CLAIMS) == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_validates_and_is_what_it_claims(name: str) -> None:
    result = CliRunner().invoke(main, ["config", "validate", str(CONFIGS / name)])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1] == f"{CONFIGS / name}: valid"
    spec = load_spec(CONFIGS / name)
    found = (spec.speculation.method, spec.hardware.gpu, spec.hardware.total_gpus, spec.engine.track)
    assert found == CLAIMS[name]
    assert spec.engines_dir.parent == CONFIGS.parent / "engines"
    assert spec.model_repo_dir.parent == CONFIGS.parent / "model_repo"
    assert spec.prompts_path.is_file()
    assert (CONFIGS / name).read_text().startswith("# ")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_can_be_built(name: str) -> None:
    assert check_support(load_spec(CONFIGS / name)) == []


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.startswith("quickstart")])
def test_a_quickstart_needs_no_download(name: str) -> None:
    """Its models are in the installed package or beside the file."""
    spec = load_spec(CONFIGS / name)
    assert spec.target.gguf_file
    for model in spec.models.values():
        if model.gguf_file:
            package = find_spec(model.model.removeprefix("package:"))
            assert package and package.origin
            assert (Path(package.origin).parent / model.gguf_file).is_file()
        else:
            assert (CONFIGS / model.model / "config.json").is_file()
    if spec.engine.runtime == "torch":  # the answers with and without drafts are compared token by token
        assert {model.dtype for model in spec.models.values()} == {"float32"}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if not name.startswith("quickstart")])
def test_an_example_fits_its_gpus(name: str) -> None:
    """Weights and a full KV cache for max_batch_size sequences leave at least a fifth of every GPU free."""
    spec = load_spec(CONFIGS / name)
    tokens = spec.engine.max_batch_size * spec.engine.max_seq_len

    def gigabytes(model: ModelRef, part: float = 1.0) -> float:
        parameters, cache = SIZES[model.model]
        weights = parameters * (1 if model.quantization == "fp8" else 2)
        cache_bytes = cache / (2 if model.kv_cache_dtype == "fp8" else 1)
        return part * (weights + tokens * cache_bytes / 1e9) / model.tensor_parallel

    exit_layer = spec.speculation.early_exit.layer if spec.speculation.early_exit else 80
    needed = sum(gigabytes(model, exit_layer / 80 if role == "draft" else 1.0) for role, model in spec.models.items())
    assert needed < 0.8 * GPUS[spec.hardware.gpu].memory_gb
