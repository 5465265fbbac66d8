"""Opening a model: a Hugging Face directory, a hub name, or a GGUF file, all behind one interface.

Knows where config, tokenizer, chat template and weights lie and whether they are whole. Weights come under their
Hugging Face names. Does not know TensorRT-LLM or Triton.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.models.gguf import GGUFFile, gguf_array, gguf_config, gguf_names
from trtspec.models.tokenizer import gguf_tokenizer, render_chat

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

PACKAGE_PREFIX = "package:"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
EMBEDDING = "model.embed_tokens.weight"


class ModelSource(ABC):
    """One model's config, tokenizer and weights.

    Attributes:
        name: what the user called it.
        path: directory or file it was read from.
        config: sizes and special ids.
        chat_template: jinja2 text, or None.
        add_bos: whether the tokenizer puts a BOS in front of plain text.
    """

    name: str
    path: Path
    config: ModelConfig
    chat_template: str | None
    add_bos: bool

    @abstractmethod
    def tensor_names(self) -> list[str]:
        """Hugging Face names of the weights, without reading them."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """One weight; raises TrtspecError when there is none of that name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one weight, without reading it where its file has a header that says it."""
        return tuple(self.tensor(name).shape)

    @abstractmethod
    def tokenizer_json(self) -> str:
        """The fast tokenizer, serialised."""

    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 over the small files' contents and the big ones' names, sizes and times: cheap, and stable."""

    @abstractmethod
    def check(self) -> None:
        """Raise TrtspecError unless every weight that the config calls for is there and whole."""

    def tokenizer(self) -> Tokenizer:
        """The fast tokenizer of the `tokenizers` library."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.tokenizer_json())

    @property
    def is_quantized(self) -> bool:
        """Whether the checkpoint says how its weights are quantised."""
        return False

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands: special tokens are recognised, none is added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text of a conversation, up to the header of the assistant's answer."""
        ids = {"bos_token": self.config.bos_token_id, "eos_token": next(iter(self.config.eos_token_ids), None)}
        texts = {name: self._tokenizer.id_to_token(i) for name, i in ids.items() if i is not None}
        return render_chat(self.chat_template, messages, **texts)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.tokenizer()


def open_model(
    model: str,
    *,
    gguf_file: str | None = None,
    base_dir: Path | None = None,
    target: ModelSource | None = None,
) -> ModelSource:
    """Open a model without reading its weights.

    Args:
        model: a directory (relative to `base_dir`), a hub name `org/name`, or `package:NAME`, the directory of an
            installed Python package.
        gguf_file: name of a GGUF file inside the directory; then everything is read from that file.
        base_dir: what relative paths are relative to; the working directory by default.
        target: the target, for a draft that shares its embedding and tokenizer.

    Raises:
        TrtspecError: nothing there, not a model, or a draft whose target is missing or another one.
    """
    folder = locate(model, base_dir or Path.cwd(), [gguf_file] if gguf_file else HUB_FILES)
    if gguf_file:
        path = folder / gguf_file
        if not path.is_file():
            found = ", ".join(sorted(p.name for p in folder.glob("*.gguf"))) or "no GGUF file"
            raise TrtspecError("no such GGUF file", where=str(path), expected=f"one of: {found}")
        return GGUFSource(model, path)
    source = HFSource(model, folder)
    return source if "trtspec" not in source.raw_config else SharedDraft(source, target)


class GGUFSource(ModelSource):
    """A model in one GGUF file; weights are expanded to float32."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.file = GGUFFile(path)
        self.config = gguf_config(self.file)
        self.chat_template = self.file.fields.get("tokenizer.chat_template")
        self.add_bos = bool(self.file.fields.get("tokenizer.ggml.add_bos_token", False))

    def tensor_names(self) -> list[str]:
        return list(gguf_names(self.file))

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        names = gguf_names(self.file)
        if name not in names:
            raise _no_tensor(name, self.path)
        return torch.from_numpy(gguf_array(self.file, self.config, name, names[name]))

    def tokenizer_json(self) -> str:
        return gguf_tokenizer(self.file.fields, str(self.path)).to_str()

    def fingerprint(self) -> str:
        return _digest([_stat_line(self.path)])

    def check(self) -> None:
        _check_names(self.config, self.tensor_names(), self.path)


class HFSource(ModelSource):
    """A Hugging Face directory with config.json, tokenizer.json and safetensors weights."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.raw_config = _read_json(path / "config.json", "a Hugging Face model directory")
        generation = path / "generation_config.json"
        try:
            self.config = ModelConfig.from_hf(
                self.raw_config, _read_json(generation, "JSON") if generation.exists() else None
            )
        except TrtspecError as error:
            raise TrtspecError(error.problem, where=str(path / "config.json"), expected=error.expected) from error
        self._tokenizer_config = (
            _read_json(path / "tokenizer_config.json", "JSON") if (path / "tokenizer_config.json").exists() else {}
        )
        self.chat_template = self._read_template()
        self.add_bos = bool(self._tokenizer_config.get("add_bos_token", False))

    def _read_template(self) -> str | None:
        beside = self.path / "chat_template.jinja"
        if beside.exists():
            return beside.read_text(encoding="utf-8")
        template = self._tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return template

    def weight_files(self) -> list[Path]:
        """The safetensors files, as the index lists them where there is one."""
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            shards = _read_json(index, "a safetensors index").get("weight_map", {})
            return [self.path / shard for shard in sorted(set(shards.values()))]
        return sorted(self.path.glob("*.safetensors"))

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Tensor name -> file, from the headers."""
        paths = self.weight_files()
        if not paths:
            pickled = next((p.name for p in sorted(self.path.glob("*.bin")) + sorted(self.path.glob("*.pt*"))), None)
            if pickled:
                raise TrtspecError(
                    f"weights are pickled ({pickled}), which can run code when opened",
                    where=str(self.path),
                    expected="safetensors",
                    fix="convert once: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR, "
                    "safe_serialization=True)",
                )
            raise TrtspecError("no weights", where=str(self.path), expected="*.safetensors")
        return {name: path for path in paths for name in safetensors_header(path) if name != "__metadata__"}

    def tensor_names(self) -> list[str]:
        return list(self._files)

    def tensor(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        if name not in self._files:
            raise _no_tensor(name, self.path)
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._files:
            raise _no_tensor(name, self.path)
        return tuple(safetensors_header(self._files[name])[name]["shape"])

    @property
    def is_quantized(self) -> bool:
        return "quantization_config" in self.raw_config or (self.path / "hf_quant_config.json").is_file()

    def tokenizer_json(self) -> str:
        path = self.path / "tokenizer.json"
        if not path.exists():
            raise TrtspecError(
                "tokenizer.json is missing",
                where=str(self.path),
                expected="a fast tokenizer",
                fix="save it once: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
            )
        return path.read_text(encoding="utf-8")

    def fingerprint(self) -> str:
        small = [p for p in sorted(self.path.iterdir()) if p.suffix in (".json", ".jinja")]
        lines = [f"{p.name} {hashlib.sha256(p.read_bytes()).hexdigest()}" for p in small]
        return _digest(lines + [_stat_line(p) for p in self.weight_files()])

    def check(self) -> None:
        _check_names(self.config, self.tensor_names(), self.path)


class SharedDraft(ModelSource):
    """A draft directory that stores its layers only and takes embedding, head and tokenizer from its target.

    config.json says so: `"trtspec": {"shares": ["embedding", "tokenizer"], "tokenizer_sha256": ...,
    "draft_vocab_size": n}`. With a tensor `d2t` [n] int32, the head has n rows: row i is the target's head
    row of id `i + d2t[i]`.
    """

    def __init__(self, own: HFSource, target: ModelSource | None) -> None:
        shared = own.raw_config["trtspec"]
        self.own, self.name, self.path, self.config = own, own.name, own.path, own.config
        if target is None:
            raise TrtspecError(
                "this draft stores neither embedding nor tokenizer, it shares those of its target",
                where=str(own.path),
                fix="name it as speculation.draft beside its target",
            )
        for what, ours, theirs in (
            ("hidden size", own.config.hidden_size, target.config.hidden_size),
            ("vocabulary size", own.config.vocab_size, target.config.vocab_size),
            ("tokenizer hash", shared["tokenizer_sha256"], tokenizer_sha256(target)),
        ):
            if ours != theirs:
                raise TrtspecError(
                    f"this draft was made for another target: its {what} is {ours}, that of {target.name} is {theirs}",
                    where=str(own.path),
                    fix="use the target it was distilled from, or train a draft with: trtspec train draft",
                )
        self.target = target
        self.chat_template, self.add_bos = target.chat_template, target.add_bos

    def tensor_names(self) -> list[str]:
        return [EMBEDDING, "lm_head.weight", *self.own.tensor_names()]

    def tensor(self, name: str) -> torch.Tensor:
        if name == EMBEDDING:
            return self.target.tensor(EMBEDDING)
        if name == "lm_head.weight" and name not in self.own.tensor_names():
            head = self.target.tensor(EMBEDDING if self.target.config.tie_word_embeddings else name)
            return head[self.head_ids()] if "d2t" in self.own.tensor_names() else head
        return self.own.tensor(name)

    def head_ids(self) -> torch.Tensor:
        """int64 `[n]`: the target id of each row of the reduced head."""
        import torch

        offsets = self.own.tensor("d2t").long()
        return offsets + torch.arange(len(offsets))

    def tokenizer_json(self) -> str:
        return self.target.tokenizer_json()

    def fingerprint(self) -> str:
        return _digest([self.own.fingerprint(), self.target.fingerprint()])

    def check(self) -> None:
        self.target.check()
        _check_names(self.config, self.tensor_names(), self.path)


def tokenizer_sha256(source: ModelSource) -> str:
    """Hash of a source's vocabulary: every id with its token, special tokens included."""
    vocabulary = source.tokenizer().get_vocab(with_added_tokens=True)
    return _digest([f"{i} {token}" for token, i in sorted(vocabulary.items(), key=lambda item: item[1])])


def safetensors_header(path: Path) -> dict[str, Any]:
    """Parsed header of a safetensors file: name -> dtype, shape, data_offsets.

    Raises:
        TrtspecError: missing, not safetensors, or shorter than its header says.
    """
    if not path.is_file():
        raise TrtspecError("weight file is missing", where=str(path), fix="download the model again")
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        try:
            header: dict[str, Any] = json.loads(file.read(length)) if 8 + length <= size else {}
        except (ValueError, UnicodeDecodeError):
            header = {}
    if not header:
        raise TrtspecError("not a safetensors file, or cut short", where=str(path), fix="download it again")
    needed = (
        8 + length + max((entry["data_offsets"][1] for name, entry in header.items() if "shape" in entry), default=0)
    )
    if size < needed:
        raise TrtspecError(
            f"truncated safetensors file of {size} bytes", where=str(path), expected=f"{needed} bytes",
            fix="download it again",
        )  # fmt: skip
    return header


def expected_tensors(config: ModelConfig) -> list[str]:
    """Names that a dense decoder of this config must have, enough to notice a missing shard."""
    names = [EMBEDDING, "model.norm.weight"]
    if not config.tie_word_embeddings:
        names.append("lm_head.weight")
    for layer in range(config.num_hidden_layers):
        names.append(f"model.layers.{layer}.input_layernorm.weight")
        if not config.num_experts:
            names += [f"model.layers.{layer}.self_attn.o_proj.weight", f"model.layers.{layer}.mlp.down_proj.weight"]
    return names


def _check_names(config: ModelConfig, names: list[str], path: Path) -> None:
    missing = sorted(set(expected_tensors(config)) - set(names))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise TrtspecError(
            f"weight {missing[0]}{more} is missing", where=str(path), expected="the weights that config.json describes"
        )


def locate(model: str, base_dir: Path, files: Sequence[str] = HUB_FILES) -> Path:
    """The directory that `model` names; of a hub name, `files` (patterns) are downloaded.

    Raises:
        TrtspecError: there is no such directory, package or hub name.
    """
    if model.startswith(PACKAGE_PREFIX):
        name = model.removeprefix(PACKAGE_PREFIX)
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise TrtspecError(
                f"Python package {name!r} is not installed", where=model, fix=f"pip install {name.replace('_', '-')}"
            )
        return Path(next(iter(spec.submodule_search_locations)))
    path = base_dir / Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise TrtspecError(
            "the model is a file", where=str(path), expected="a directory",
            fix="name its directory, and the file as gguf_file if it is a GGUF file",
        )  # fmt: skip
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise TrtspecError("no such model directory", where=str(path))
    return _download(model, files, path)


def _download(model: str, files: Sequence[str], tried: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(files)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise TrtspecError(
            f"neither a directory ({tried}) nor available from the hub ({type(error).__name__})",
            where=model,
            fix="check the name and the network, log in for a gated model, or give a local directory",
        ) from error


def _read_json(path: Path, expected: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrtspecError(f"{path.name} is missing", where=str(path.parent), expected=expected) from None
    except (ValueError, OSError) as error:
        raise TrtspecError(f"cannot be read: {error}", where=str(path), expected="JSON") from error
    if not isinstance(value, dict):
        raise TrtspecError("not a JSON object", where=str(path), expected=expected)
    return value


def _no_tensor(name: str, path: Path) -> TrtspecError:
    return TrtspecError(f"no weight {name}", where=str(path), expected="the weights that config.json describes")


def _stat_line(path: Path) -> str:
    stat = path.stat()
    return f"{path.name} {stat.st_size} {stat.st_mtime_ns}"


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
