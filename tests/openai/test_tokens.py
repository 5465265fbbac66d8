"""Token ids that become text, for vocabularies of bytes and of pieces with a sign for the space."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from trtspec.openai.errors import ApiError
from trtspec.openai.tokens import Offsets, Tokens


@pytest.fixture
def of_bytes(tmp_path: Path, tiny_tokenizer_json: str) -> Tokens:
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer_json, encoding="utf-8")
    return Tokens(tmp_path / "tokenizer.json", {})


@pytest.fixture
def of_pieces(tmp_path: Path) -> Tokens:
    """As Llama 2 has it: a BOS in front, spaces as signs, bytes for what has no piece."""
    vocab = {"<unk>": 0, "<s>": 1, "\u2581": 2, "\u2581a": 3, "a": 4, "b": 5, "<0xC3>": 6, "<0xA9>": 7}
    merges = [("\u2581", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return Tokens(tmp_path / "tokenizer.json", {"bos_token_id": "1", "add_bos": "true"})


def test_the_bytes_of_a_token(of_bytes: Tokens, of_pieces: Tokens) -> None:
    every_byte = sorted(of_bytes.bytes_of(token_id) for token_id in range(3, 259))
    assert every_byte == [bytes([byte]) for byte in range(256)]
    assert of_bytes.bytes_of(1) == b"<|im_start|>"
    assert [of_pieces.bytes_of(token_id) for token_id in (1, 3, 5, 6)] == [b"<s>", b" a", b"b", b"\xc3"]


def test_words_and_prompts_are_those_that_come_back(of_pieces: Tokens) -> None:
    assert (of_pieces.word(3), of_pieces.word(5), of_pieces.word(1)) == (" a", "b", "<s>")
    assert of_pieces.prompt([1, 5, 3, 6, 7]) == "<s>b a\u00e9"
    for ids in ([5, 3], [1, 2, 4], [1, 6]):  # no BOS; two tokens that would be one; half a character
        with pytest.raises(ApiError, match="other ids"):
            of_pieces.prompt(ids)
    with pytest.raises(ApiError, match="token 6 has no text of its own"):
        of_pieces.word(6)


def test_offsets_count_characters_not_bytes(of_bytes: Tokens) -> None:
    ids = {of_bytes.bytes_of(token_id): token_id for token_id in range(3, 259)}
    offsets = Offsets(of_bytes, 0)
    # a, é in two tokens, a special token, é cut short, b
    sequence = [ids[b"a"], ids[b"\xc3"], ids[b"\xa9"], 1, ids[b"\xc3"], ids[b"b"]]
    assert [offsets.of(token_id) for token_id in sequence] == [0, 1, 1, 2, 2, 3]
