"""Token ids to text in pieces: whole characters, all of them, as early as possible."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from trtspec.decoding.detokenize import Detokenizer, continuation_ids

REPLACEMENT = "\ufffd"


def decode_bytes(ids):
    """A tokenizer whose ids are the bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


def byte_level_tokenizer():
    """A real byte-level BPE tokenizer: the 256 bytes and a few longer pieces, some of which cut characters apart."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelling = {byte: chr(byte) for byte in printable}
    spelling.update({byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in spelling)})
    pieces = ["Deep", " learning", " is", "ab", "\u6f22", "\U0001f923!", "é ", "\ufffd"]
    cut = [bytes.fromhex("20e8"), bytes.fromhex("81aa"), bytes.fromhex("f09fa4"), bytes.fromhex("a361")]
    spellings = [spelling[b] for b in range(256)]
    spellings += ["".join(spelling[b] for b in raw) for raw in [*(p.encode() for p in pieces), *cut]]
    tokenizer = Tokenizer(BPE(vocab={s: i for i, s in enumerate(spellings)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_tokenizer():
    """A real tokenizer with leading-space marks and byte fallback, as of Llama 2."""
    pieces = ["\u2581Deep", "\u2581learning", "\u2581is", "\u2581", "ing", "é", "\u6f22", "\u2581\u2581", ".", "\u00bf"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab.update({piece: 256 + i for i, piece in enumerate(pieces)})
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_LEVEL, SENTENCEPIECE = byte_level_tokenizer(), sentencepiece_tokenizer()


def detokenizer(tokenizer, with_continuation_ids=True):
    known = continuation_ids(tokenizer.token_to_id) if with_continuation_ids else ()
    return Detokenizer(tokenizer.decode, known)


def stream(detok, chunks):
    deltas = [detok.push(chunk) for chunk in chunks]
    return deltas, detok.flush()


def chunked(ids, sizes):
    """`ids` cut into pieces of the given sizes, the rest one by one."""
    chunks, at = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        chunks.append(ids[at : at + size])
        at += size
    return chunks


def test_continuation_ids_in_both_conventions():
    assert continuation_ids(BYTE_LEVEL.token_to_id) == (0x80, 0xBF)
    assert continuation_ids(SENTENCEPIECE.token_to_id) == (0x80, 0xBF)  # not the id of the character "\u00bf"
    assert continuation_ids({"a": 0}.get) == ()


@pytest.mark.parametrize("known", [(0x80, 0xBF), ()])
@pytest.mark.parametrize(
    ("chunks", "deltas", "rest"),
    [
        (["e881", "aa"], ["", "\u806a"], ""),
        (["f09f", "a4", "a3"], ["", "", "\U0001f923"], ""),
        (["e881"], [""], REPLACEMENT),
        (["41", "e881", "aa42"], ["A", "", "\u806aB"], ""),
        (["41e8", "8142"], ["A", REPLACEMENT + "B"], ""),
        (["e881", "e881", "aa"], ["", REPLACEMENT, "\u806a"], ""),
        (["efbf", "bd", "41"], ["", REPLACEMENT, "A"], ""),
    ],
)
def test_characters_spread_over_tokens(chunks, deltas, rest, known):
    got, got_rest = stream(Detokenizer(decode_bytes, known), [bytes.fromhex(chunk) for chunk in chunks])
    if known:
        assert (got, got_rest) == (deltas, rest)
    else:  # without them a U+FFFD may come a token later, but nothing else changes
        assert "".join(got) + got_rest == "".join(deltas) + rest
        assert [d.replace(REPLACEMENT, "") for d in got] == [d.replace(REPLACEMENT, "") for d in deltas]


@pytest.mark.parametrize("bad", ["ff", "c0", "80", "f5", "e080", "eda0", "f490", "ffff"])
def test_a_bad_byte_is_replaced_at_once(bad):
    detok = Detokenizer(decode_bytes, (0x80, 0xBF))
    bad_bytes = bytes.fromhex(bad)
    assert detok.push(b"a") == "a"
    assert detok.push(bad_bytes) == decode_bytes(bad_bytes)
    assert set(decode_bytes(bad_bytes)) == {REPLACEMENT}
    assert detok.push(b"b") == "b"
    assert detok.flush() == ""


def test_a_bad_byte_does_not_delay_later_text_without_continuation_ids():
    assert stream(Detokenizer(decode_bytes), [b"a", b"\xff", b"b", b"c"]) == (["a", "", REPLACEMENT + "b", "c"], "")


@pytest.mark.parametrize("first", [*range(0xC2, 0xF5)])
def test_every_first_byte_waits_for_its_character(first):
    """All first bytes of UTF-8, those with a narrow range for the second byte too."""
    detok = Detokenizer(decode_bytes, (0x80, 0xBF))
    second = {0xE0: 0xA0, 0xF0: 0x90}.get(first, 0x80)
    size = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    character = bytes([first, second, 0x80, 0x80][:size])
    assert [detok.push([byte]) for byte in character] == [""] * (size - 1) + [character.decode()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])
def test_leading_spaces_stay(tokenizer):
    pieces = ["\u2581Deep", "\u2581learning", "\u2581is"] if tokenizer is SENTENCEPIECE else []
    ids = [tokenizer.token_to_id(piece) for piece in pieces] or [256, 257, 258]
    assert stream(detokenizer(tokenizer), [[i] for i in ids]) == (["Deep", " learning", " is"], "")


def test_a_leading_space_alone_keeps_the_next_one():
    space, deep = SENTENCEPIECE.token_to_id("\u2581"), SENTENCEPIECE.token_to_id("\u2581Deep")
    assert stream(detokenizer(SENTENCEPIECE), [[space], [deep], [deep]]) == (["", " Deep", " Deep"], "")


def test_skipped_tokens_change_nothing():
    def decode(ids):
        return SENTENCEPIECE.decode([i for i in ids if i != 999])

    deep = SENTENCEPIECE.token_to_id("\u2581Deep")
    deltas, rest = stream(Detokenizer(decode), [[999], [deep], [999], [999, deep], [999] * 40, [deep]])
    assert (deltas, rest) == (["", "Deep", "", " Deep", "", " Deep"], "")


sizes = st.lists(st.integers(0, 5), max_size=20)


@settings(max_examples=120, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 255), st.integers(256, 267)), max_size=60), sizes=sizes)
@pytest.mark.parametrize("known", [True, False])
def test_byte_level_deltas_joined_are_the_whole(known, ids, sizes):
    """Any tokens, broken characters included, in any chunks."""
    deltas, rest = stream(detokenizer(BYTE_LEVEL, known), chunked(ids, sizes))
    assert "".join(deltas) + rest == BYTE_LEVEL.decode(ids)


sentencepiece_text = st.lists(st.sampled_from("a \u806a\u6f22\U0001f923é\u00bf."), max_size=30)


@settings(max_examples=60, deadline=None)
@given(text=sentencepiece_text, as_bytes=st.lists(st.booleans(), min_size=30, max_size=30), sizes=sizes)
@pytest.mark.parametrize("known", [True, False])
def test_sentencepiece_deltas_joined_are_the_whole(known, text, as_bytes, sizes):
    """Any text, each character as a piece where there is one or as byte tokens, in any chunks."""
    ids = []
    for character, spelled in zip(text, as_bytes, strict=False):
        piece = SENTENCEPIECE.token_to_id("\u2581" if character == " " else character)
        ids += list(character.encode()) if piece is None or spelled else [piece]
    deltas, rest = stream(detokenizer(SENTENCEPIECE, known), chunked(ids, sizes))
    assert "".join(deltas) + rest == SENTENCEPIECE.decode(ids)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), sizes=sizes)
def test_valid_text_never_shows_a_replacement(text, sizes):
    deltas, rest = stream(
        Detokenizer(decode_bytes, (0x80, 0xBF)), chunked(text.encode("utf-8", "surrogatepass"), sizes)
    )
    whole = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    assert "".join(deltas) + rest == whole
    assert all(whole.startswith("".join(deltas[:i])) for i in range(len(deltas)))


def test_byte_fallback_cut_off_inside_a_character_gives_one_replacement():
    """That decoder makes one U+FFFD of every byte; a reader should see one for the one character that is missing."""
    detok = detokenizer(SENTENCEPIECE)
    assert stream(detok, [[0xE8, 0x81, 0xAA], [0xF0], [0x9F, 0xA4]]) == (["\u806a", "", ""], REPLACEMENT)


def test_an_emitted_character_is_never_taken_back():
    """Byte fallback turns a whole run of byte tokens into U+FFFD when one of them is bad."""
    deltas, rest = stream(detokenizer(SENTENCEPIECE), [[0xE8, 0x81, 0xAA], [0xFF], [260]])
    assert deltas[0] == "\u806a"
    assert "".join(deltas) + rest == "\u806a" + REPLACEMENT * 3 + "ing"


def test_only_a_small_window_is_decoded_again():
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return BYTE_LEVEL.decode(ids)

    detok = Detokenizer(decode, (0x80, 0xBF))
    text = "".join(detok.push([token]) for token in [256, 257, 258, 260] * 500)
    assert text == BYTE_LEVEL.decode([256, 257, 258, 260] * 500)
    assert max(decoded) <= 20
    assert len(decoded) <= 2 * 2000 + 300
