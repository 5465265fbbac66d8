"""Stop strings on text that arrives in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.decoding.stop import StopStrings


def run(strings, pieces):
    stop = StopStrings(strings)
    deltas = [stop.push(piece) for piece in pieces]
    return deltas, stop.flush(), stop.stopped


@pytest.mark.parametrize(
    ("strings", "pieces", "deltas", "rest", "stopped"),
    [
        (["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J"], ["ABC", "", "", "", ""], "", True),
        (["DEFGHIJ"], ["DEF", "X"], ["", "DEFX"], "", False),
        (["DEFGHIJ"], ["ABC", "DEF"], ["ABC", ""], "DEF", False),
        ([".."], ["a", "...", "b"], ["a", "", ""], "", True),
        ([".."], ["a.", "b", ".", "."], ["a", ".b", "", ""], "", True),
        (["\n\n"], ["one\n", "two\n", "\nthree"], ["one", "\ntwo", ""], "", True),
        (["aab"], ["aaa", "b"], ["a", ""], "", True),
        (["bcd", "c"], ["abcd"], ["ab"], "", True),
        (["cd", "abcd"], ["xabcd"], ["x"], "", True),
        ([], ["anything", ""], ["anything", ""], "", False),
    ],
)
def test_cases(strings, pieces, deltas, rest, stopped):
    assert run(strings, pieces) == (deltas, rest, stopped)


def first_complete(strings, text):
    """The definition: the shortest beginning of the text that ends with a stop string, without the longest such."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in strings if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@settings(max_examples=60, deadline=None)
@given(
    strings=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("ab.", max_size=5), max_size=8),
)
def test_how_the_text_is_cut_does_not_matter(strings, pieces):
    deltas, rest, stopped = run(strings, pieces)
    assert ("".join(deltas) + rest, stopped) == first_complete(strings, "".join(pieces))


@settings(max_examples=60, deadline=None)
@given(
    strings=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("ab.", max_size=5), max_size=8),
)
def test_no_more_is_held_back_than_may_still_become_a_stop_string(strings, pieces):
    stop, sent, seen = StopStrings(strings), "", ""
    for piece in pieces:
        sent, seen = sent + stop.push(piece), seen + piece
        if stop.stopped:
            break
        held = seen[len(sent) :]
        assert seen.startswith(sent)
        assert held == "" or any(string.startswith(held) for string in strings)
