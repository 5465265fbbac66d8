"""A tiny pair of engines with a repository written for them, and the real server on it.

The target is a random Llama of two layers over single bytes and a few specials; the draft is the target with noise on
its weights, so that some drafts are accepted and some are not. Beside the generated models stands a copy of the BLS
model whose draft is scripted (see scripted_draft/model.py).
"""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

BOS, EOS, SECOND_EOS, IM_START, IM_END = "<s>", "</s>", "<|end|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (BOS, EOS, SECOND_EOS, IM_START, IM_END)
MAX_DRAFT_LEN = 5
SCRIPTED_TIMEOUT_S = 5  # less than what the scripted draft sleeps
DEADLINE_S = 120.0
KV_CACHE_BYTES = 32 << 20
ARRAYS = ("output_ids", "sequence_length", "generation_logits", "output_log_probs")
SCRIPTED = Path(__file__).parent / "scripted_draft"
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


class Triton:
    """The public gRPC client, as people use it: named tensors in, one dictionary a response out."""

    def __init__(self, address: str) -> None:
        import tritonclient.grpc as grpcclient

        self.address = address
        self.client = grpcclient.InferenceServerClient(address)

    def close(self) -> None:
        self.client.close()

    def infer(self, model: str, outputs: tuple[str, ...] = (), request_id: str = "", **tensors: object) -> dict:
        """One unary call; raises InferenceServerException."""
        import tritonclient.grpc as grpcclient

        wanted = [grpcclient.InferRequestedOutput(name) for name in outputs] or None
        result = self.client.infer(
            model, as_inputs(tensors), outputs=wanted, request_id=request_id, client_timeout=DEADLINE_S
        )
        return as_outputs(result)

    def stream(
        self, model: str, leave_after: int | None = None, **tensors: object
    ) -> tuple[list[dict], Exception | None]:
        """Responses of one decoupled call, each with the key `final`, and its error; `leave_after` so many: cancel."""
        import tritonclient.grpc as grpcclient

        received: queue.Queue = queue.Queue()
        with grpcclient.InferenceServerClient(self.address) as client:
            client.start_stream(lambda result, error: received.put((result, error)), stream_timeout=DEADLINE_S)
            client.async_stream_infer(model, as_inputs(tensors), enable_empty_final_response=True)
            responses: list[dict] = []
            while True:
                result, error = received.get(timeout=DEADLINE_S)
                if error is not None:
                    return responses, error
                final = result.get_response().parameters["triton_final_response"].bool_param
                responses.append({**as_outputs(result), "final": final})
                if len(responses) == leave_after:
                    client.stop_stream(cancel_requests=True)
                    return responses, None
                if final:
                    client.stop_stream()
                    assert received.empty(), "a response after the final one"
                    return responses, None

    def calls(self, model: str) -> int:
        """How many requests the model has been asked so far."""
        statistics = self.client.get_inference_statistics(model, as_json=True)["model_stats"][0]["inference_stats"]
        return int(statistics["success"].get("count", 0)) + int(statistics["fail"].get("count", 0))


def as_inputs(tensors: dict) -> list:
    """Tensors of shape [1, n]: int -> INT32, float -> FP32, bool, str and bytes; arrays as they are."""
    import numpy as np
    import tritonclient.grpc as grpcclient
    from tritonclient.utils import np_to_triton_dtype

    kinds = {bool: np.bool_, int: np.int32, float: np.float32, str: np.object_, bytes: np.object_}
    inputs = []
    for name, value in tensors.items():
        if not isinstance(value, np.ndarray):
            items = value if isinstance(value, list) else [value]
            kind = np.uint64 if name == "seed" else kinds[type(items[0])]
            value = np.array([[item.encode() if isinstance(item, str) else item for item in items]], dtype=kind)
        tensor = grpcclient.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return inputs


def as_outputs(result: object) -> dict:
    """Name -> str for text, int or float for single values of the pipeline's outputs, else the array."""
    outputs = {}
    for output in result.get_response().outputs:  # type: ignore[attr-defined]
        array = result.as_numpy(output.name)  # type: ignore[attr-defined]
        if output.datatype == "BYTES":
            outputs[output.name] = b"".join(array.reshape(-1).tolist()).decode()
        elif array.size == 1 and output.name not in ARRAYS:
            outputs[output.name] = array.reshape(-1)[0].item()
        else:
            outputs[output.name] = array
    return outputs


def write_tiny_model(directory: Path, noise: float = 0.0) -> Path:
    """A Hugging Face checkpoint of a random Llama: 261 ids, 512 positions."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    directory.mkdir(parents=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    bos, eos, second = (tokenizer.token_to_id(token) for token in SPECIALS[:3])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    tokenizer.save(str(directory / "tokenizer.json"))
    hidden, ffn, heads, layers, vocab = 32, 48, 4, 2, tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": bos,
        "eos_token_id": [eos, second],
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    norms = ["model.norm"]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
        shapes |= {f"{prefix}.self_attn.{name}_proj": (hidden // 2, hidden) for name in "kv"}
        shapes |= {f"{prefix}.mlp.{name}_proj": (ffn, hidden) for name in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj": (hidden, ffn)}
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
    random = torch.Generator().manual_seed(7)
    tensors = {f"{name}.weight": torch.randn(shape, generator=random) * 0.3 for name, shape in shapes.items()}
    for name in tensors:
        tensors[name] = tensors[name] + noise * torch.randn(tensors[name].shape, generator=random)
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`spec`, `engines` (role -> directory), `source` of the target, and `write(out_dir, **changes)`."""
    from trtspec.models.source import open_model
    from trtspec.runtime.engine import write_torch_engine
    from trtspec.spec.load import load_spec
    from trtspec.triton.repository import write_repository

    root = tmp_path_factory.mktemp("pair")
    write_tiny_model(root / "target-model")
    write_tiny_model(root / "draft-model", noise=0.01)
    (root / "tiny.yaml").write_text(
        f"""
version: 1
target: {{model: ./target-model, dtype: float32}}
speculation: {{method: draft_target, num_draft_tokens: 3, draft: {{model: ./draft-model, dtype: float32}}}}
engine: {{max_batch_size: 8, max_input_len: 256, max_seq_len: 512, max_draft_len: {MAX_DRAFT_LEN}}}
serving:
  num_threads: 1
"""
    )
    spec = load_spec(root / "tiny.yaml")
    sources = {role: open_model(str(root / f"{role}-model")) for role in ("target", "draft")}
    engines = {}
    for role, source in sources.items():
        build = {"max_batch_size": 8, "max_input_len": 256, "max_seq_len": 512}
        build |= {"max_draft_len": MAX_DRAFT_LEN} if role == "target" else {}
        engines[role] = root / "engines" / role
        write_torch_engine(source, engines[role], dtype="float32", role=role, build_config=build, stamp={})

    def write(out_dir: Path, **changes: object) -> Path:
        target = sources["target"]
        settings = {
            "spec": spec,
            "engines": engines,
            "tokenizer_json": target.tokenizer_json(),
            "add_bos": target.add_bos,
            "chat_template": target.chat_template,
            "kv_cache_bytes": {"target": KV_CACHE_BYTES, "draft": KV_CACHE_BYTES},
        }
        return write_repository(out_dir=out_dir, **(settings | changes))  # type: ignore[arg-type]

    return SimpleNamespace(spec=spec, engines=engines, source=sources["target"], write=write, root=root)


@pytest.fixture(scope="session")
def triton_class() -> type[Triton]:
    """For tests that start a server of their own."""
    return Triton


@pytest.fixture(scope="session")
def triton(server: SimpleNamespace) -> Iterator[Triton]:
    """A client of `server`."""
    client = Triton(server.grpc)
    yield client
    client.close()


@pytest.fixture(scope="session")
def server(
    pair: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[], dict[str, int]]
) -> Iterator[SimpleNamespace]:
    """The real server on the repository of `pair`, with `http` and `grpc` addresses and its `log`."""
    from trtspec.triton.server import LocalServer

    root = tmp_path_factory.mktemp("server")
    repository = pair.write(root / "repository")
    add_scripted_draft(repository)
    add_draft_lengths(repository, pair)
    ports = free_ports()
    local = LocalServer(
        repository,
        engines_root=pair.root / "engines",
        num_threads=1,
        startup_timeout_s=280.0,
        state_dir=root / "state",
        **ports,
    )
    with local:
        yield SimpleNamespace(
            http=f"http://127.0.0.1:{ports['http_port']}",
            grpc=f"127.0.0.1:{ports['grpc_port']}",
            metrics=f"http://127.0.0.1:{ports['metrics_port']}/metrics",
            log=local.log,
            repository=repository,
        )


def add_scripted_draft(repository: Path) -> None:
    """Model `scripted_draft`, and copies of the BLS models that draft with it: `bls_scripted`, `bls_scripted_unary`; or
    that have it for their target: `bls_scripted_target`."""
    scripted = _copy(repository, "tensorrt_llm_draft", "scripted_draft", backend="python")
    shutil.copy(SCRIPTED / "model.py", scripted / "1" / "model.py")
    changes = {
        "tensorrt_llm_draft_model_name": "scripted_draft",
        "draft_rest_s": "0",
        "call_timeout_s": str(SCRIPTED_TIMEOUT_S),
        "draft_timeout_s": str(SCRIPTED_TIMEOUT_S),
    }
    _copy(repository, "tensorrt_llm_bls", "bls_scripted", **changes)
    _copy(repository, "tensorrt_llm_bls_unary", "bls_scripted_unary", **changes)
    broken = {"tensorrt_llm_model_name": "scripted_draft", "call_timeout_s": str(SCRIPTED_TIMEOUT_S)}
    _copy(repository, "tensorrt_llm_bls", "bls_scripted_target", **broken)


def add_draft_lengths(repository: Path, pair: SimpleNamespace) -> None:
    """The pipeline of other specs: `bls_adaptive` and `bls_schedule`."""
    from trtspec.spec.load import load_spec

    for policy, more in (("adaptive", ""), ("schedule", ", schedule: {1: 2, 2: 1}")):
        spec = pair.root / f"{policy}.yaml"
        spec.write_text((pair.root / "tiny.yaml").read_text() + f"  draft_length: {{policy: {policy}{more}}}\n")
        written = pair.write(repository.parent / policy, spec=load_spec(spec))
        config = (written / "tensorrt_llm_bls" / "config.pbtxt").read_text()
        assert f'"{policy}"' in config
        shutil.copytree(repository / "tensorrt_llm_bls", repository / f"bls_{policy}")
        name = 'name: "tensorrt_llm_bls"'
        assert name in config
        (repository / f"bls_{policy}" / "config.pbtxt").write_text(config.replace(name, f'name: "bls_{policy}"', 1))


def _copy(repository: Path, model: str, name: str, backend: str | None = None, **parameters: str) -> Path:
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    shutil.copytree(repository / model, repository / name)
    file = repository / name / "config.pbtxt"
    config = text_format.Parse(file.read_text(), ModelConfig())
    config.name = name
    config.backend = backend or config.backend
    for key, value in parameters.items():
        assert key in config.parameters
        config.parameters[key].string_value = value
    file.write_text(text_format.MessageToString(config))
    return repository / name
