"""Tokens, word lists and request tensors of the models in the repository, without a server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from trtspec.triton.models.tensors import Inputs, Refused, embedding_bias, split_word_list, word_list
from trtspec.triton.models.tokenization import Tokenization


@pytest.fixture(scope="module")
def tokenizer_json(pair: SimpleNamespace) -> Path:
    return pair.root / "target-model" / "tokenizer.json"


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("text", ["hi", "<s>hi", "<s><s>hi"])
def test_a_prompt_has_one_bos(tokenizer_json: Path, tmp_path: Path, in_file: bool, text: str) -> None:
    """Whether tokenizer.json adds it or not, and whether the (templated) text already has it or not."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    bos = tokenizer.token_to_id("<s>")
    if not in_file:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenization = Tokenization(tmp_path / "tokenizer.json", bos_token_id=bos, add_bos=True)
    assert tokenization.encode(text) == [bos, ord("h") - ord("!"), ord("i") - ord("!")]


def test_a_model_without_bos_gets_none(tokenizer_json: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenization = Tokenization(tmp_path / "tokenizer.json", bos_token_id=tokenizer.token_to_id("<s>"), add_bos=False)
    assert tokenization.encode("hi") == [ord("h") - ord("!"), ord("i") - ord("!")]


def test_words_have_no_bos(tokenizer_json: Path) -> None:
    tokenization = Tokenization(tokenizer_json, bos_token_id=256, add_bos=True)
    assert tokenization.encode_word("hi") == [ord("h") - ord("!"), ord("i") - ord("!")]


def test_word_list_rows() -> None:
    rows = word_list([[4996, 13685], [4996, 13685, 29898, 1266, 29897]])
    assert rows.dtype == np.int32
    assert rows.tolist() == [[4996, 13685, 4996, 13685, 29898, 1266, 29897], [2, 7, -1, -1, -1, -1, -1]]
    assert split_word_list(rows, "x") == ((4996, 13685), (4996, 13685, 29898, 1266, 29897))
    assert word_list([]).shape == (2, 0)
    assert split_word_list(word_list([]), "x") == ()


@pytest.mark.parametrize("rows", [[[1, 2], [3, -1]], [[1, 2], [2, 1]], [[1, 2], [0, -1]], [[1, 2]]])
def test_a_broken_word_list_is_refused(rows: list[list[int]]) -> None:
    with pytest.raises(Refused, match="stop_words_list has"):
        split_word_list(np.array(rows, dtype=np.int32), "stop_words_list")


def test_a_bias_falls_on_every_id_of_a_word() -> None:
    bias = embedding_bias([([1, 3, 1], 0.5), ([3], -2.0)], 5)
    assert bias is not None
    assert bias.tolist() == [0.0, 1.0, 0.0, -1.5, 0.0]
    assert embedding_bias([], 5) is None


def test_every_biased_word_has_its_weight() -> None:
    def pairs(words: list[bytes], weights: list[float]) -> list[tuple[str, float]]:
        arrays = {"words": np.array([words], dtype=np.object_), "weights": np.array([weights], dtype=np.float32)}
        return Inputs(arrays).weighted_words("words", "weights")

    assert pairs([b"a", b"", b"c"], [1.0, 2.0, 3.0]) == [("a", 1.0), ("c", 3.0)]
    assert pairs([b""], []) == []
    with pytest.raises(Refused, match="weights has 1 values for 2 words"):
        pairs([b"a", b"b"], [1.0])
    with pytest.raises(Refused, match="weights holds a value that is not finite"):
        pairs([b"a"], [float("nan")])


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_scalars_come_in_every_shape(shape: tuple[int, ...]) -> None:
    inputs = Inputs(
        {
            "top_k": np.full(shape, 5, dtype=np.int32),
            "temperature": np.full(shape, 0.7, dtype=np.float32),
            "stream": np.full(shape, True),
            "text_input": np.full(shape, "h\u00e9".encode(), dtype=np.object_),
        }
    )
    assert inputs.integer("top_k") == 5
    assert inputs.number("temperature") == 0.7  # the same number as in process, not float32's 0.699999988
    assert inputs.flag("stream") is True
    assert inputs.text("text_input") == "h\u00e9"
    assert inputs.integer("top_p_typo", 3) == 3


@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_words_come_in_every_shape_and_empty_ones_mean_none(shape: tuple[int, ...]) -> None:
    words = np.array([b"stop", b""], dtype=np.object_).reshape(shape)
    assert Inputs({"stop_words": words}).words("stop_words") == ["stop"]


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("top_k", np.array([[1, 2]], dtype=np.int32), r"top_k has shape \[1, 2\]; expected one value"),
        ("top_k", np.array([[-1]], dtype=np.int32), "top_k is -1; expected 0 or more"),
        ("top_k", np.zeros((1, 0), dtype=np.int32), r"top_k has shape \[1, 0\]"),
    ],
)
def test_bad_numbers_are_refused_by_name(name: str, array: np.ndarray, message: str) -> None:
    with pytest.raises(Refused, match=message):
        Inputs({name: array}).integer(name, minimum=0)


def test_a_million_stop_words_are_refused() -> None:
    with pytest.raises(Refused, match="stop_words has 1000000 entries; expected at most 1024"):
        Inputs({"stop_words": np.full((1, 1_000_000), b"a", dtype=np.object_)}).words("stop_words")


def test_words_of_many_bytes_are_refused() -> None:
    def words(*lengths: int) -> list[str]:
        values = np.array([[b"a" * length for length in lengths]], dtype=np.object_)
        return Inputs({"bad_words": values}).words("bad_words")

    assert [len(word) for word in words(65_535, 1)] == [65_535, 1]
    with pytest.raises(Refused, match="bad_words holds 65537 bytes; expected at most 65536"):
        words(65_536, 1)


def test_rows_that_came_together_are_read_one_by_one() -> None:
    inputs = Inputs(
        {
            "top_k": np.array([[1], [2]], dtype=np.int32),
            "stop_words": np.array([[b"a", b"b"], [b"c", b""]], dtype=np.object_),
        }
    )
    assert [inputs.row(index, 2).integer("top_k") for index in range(2)] == [1, 2]
    assert [inputs.row(index, 2).words("stop_words") for index in range(2)] == [["a", "b"], ["c"]]
    with pytest.raises(Refused, match=r"top_k has shape \[2, 1\]; expected 3 rows"):
        inputs.row(0, 3)


def test_only_what_asks_for_something_is_refused() -> None:
    inputs = Inputs({"return_context_logits": np.array([[False]]), "image": np.zeros((1, 0)), "lora": np.array([[7]])})
    inputs.refuse(["return_context_logits", "image", "absent"], "no")
    with pytest.raises(Refused, match="lora is not supported: no"):
        inputs.refuse(["lora"], "no")
