"""Each rule: the right subject passes, and one that breaks it is found by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import parity_words as words
import pytest
from parity_words import Altered, respelled

from trtspec.parity.result import Check, Verdict
from trtspec.parity.rules import PARTS, check_rules
from trtspec.parity.subjects import Answer, Counts, Query, Subject, Unsupported
from trtspec.parity.trial import Trial

Ask = Callable[[Query], Answer]
ENDS = (words.END, words.END_TOO)


def faults(check: Check) -> list[str]:
    return [part.name for part in check.parts if part.verdict == Verdict.FAULT]


def only(part: str) -> Trial:
    return words.trial(wanted=lambda check, name: name == part)


def altered(change: Callable[[Query, Answer], Answer]) -> Callable[[], Subject]:
    """A subject whose right answers are changed afterwards."""
    return lambda: Altered(lambda query, right: change(query, right(query)))


def asked(change: Callable[[Query], Query]) -> Callable[[], Subject]:
    """A subject that understands another query."""
    return lambda: Altered(lambda query, right: right(change(query)))


def counting(change: Callable[[Query, Answer], Counts]) -> Callable[[], Subject]:
    return altered(lambda query, answer: replace(answer, counts=change(query, answer)))


def test_the_right_subject_passes() -> None:
    found = check_rules(words.trial(), words.subject())
    assert found.verdict == Verdict.PASS, found
    assert tuple(part.name for part in found.parts) == PARTS
    assert {part.verdict for part in found.parts} == {Verdict.PASS}, found.parts


def deaf_inside_a_block(query: Query, right: Ask) -> Answer:
    """Looks for end ids at the end of a block only, and takes them out of the text."""
    ends = ENDS if query.end_ids is None else query.end_ids
    blocks: list[tuple[int, ...]] = []
    for block in right(replace(query, end_ids=())).blocks:
        blocks.append(tuple(token for token in block if token not in ends) if query.end_ids is None else block)
        if any(token in ends for token in block):
            return respelled(right(query), *blocks, finish="stop")
    return respelled(right(query), *blocks)


def cut_behind_the_stop_word(query: Query, right: Ask) -> Answer:
    answer = right(query)
    if answer.finish_reason != "stop" or not query.stop:
        return answer
    whole = right(replace(query, stop=())).text
    end = min(whole.find(word) + len(word) for word in query.stop if word in whole)
    return replace(answer, text=whole[:end], pieces=(whole[:end],))


def leaks_while_streaming(query: Query, answer: Answer) -> Answer:
    return replace(answer, pieces=(*answer.pieces, *query.stop[:1])) if query.stop else answer


def stops_at_tokens_only(query: Query, right: Ask) -> Answer:
    """Finds stop words that begin and end where tokens do."""
    found = right(query)
    if not query.stop or found.finish_reason != "stop":
        return found
    ids = right(replace(query, stop=())).ids
    starts = [len(words.decode(list(ids[:n]))) for n in range(len(ids))]
    return found if len(found.text) in starts else right(replace(query, stop=()))


def goes_on_after_a_stop_word(query: Query, right: Ask) -> Answer:
    found = right(query)
    return replace(found, blocks=right(replace(query, stop=())).blocks) if query.stop else found


def bans_each_token_of_a_word(query: Query) -> Query:
    return replace(
        query, bad_words=tuple(replace(word, ids=(token,)) for word in query.bad_words for token in word.ids)
    )


def splits_characters(query: Query, answer: Answer) -> Answer:
    pieces = tuple(words.decode(list(block)) for block in answer.blocks)
    return answer if query.stop else replace(answer, pieces=pieces, text="".join(pieces))


def without(**settings: float) -> Callable[[], Subject]:
    return asked(lambda query: replace(query, sampling=replace(query.sampling, **settings)))


def presence_for_frequency(query: Query) -> Query:
    given = query.sampling
    swapped = replace(given, presence_penalty=given.frequency_penalty, frequency_penalty=given.presence_penalty)
    return replace(query, sampling=swapped)


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        ("end-ids", lambda: Altered(deaf_inside_a_block)),
        ("end-ids", asked(lambda query: replace(query, end_ids=None))),
        ("natural-end", lambda: Altered(deaf_inside_a_block)),
        ("natural-end", asked(lambda query: replace(query, end_ids=(words.END_TOO,)))),
        ("stop-words", lambda: Altered(cut_behind_the_stop_word)),
        ("stop-words", altered(leaks_while_streaming)),
        ("stop-words", lambda: Altered(stops_at_tokens_only)),
        ("stop-words", lambda: Altered(goes_on_after_a_stop_word)),
        ("stop-words", asked(lambda query: replace(query, stop=query.stop[:1]))),
        ("stop-words", asked(lambda query: replace(query, stop=()))),
        ("max-tokens", asked(lambda query: replace(query, max_tokens=query.max_tokens + 1))),
        ("max-tokens", asked(lambda query: replace(query, max_tokens=query.max_tokens + query.num_draft_tokens))),
        ("min-tokens", asked(lambda query: replace(query, min_tokens=0))),
        ("min-tokens", asked(lambda query: replace(query, min_tokens=max(0, query.min_tokens - 1)))),
        ("bad-words", asked(lambda query: replace(query, bad_words=()))),
        ("bad-words", asked(lambda query: replace(query, bad_words=query.bad_words[1:]))),
        ("bad-words", asked(bans_each_token_of_a_word)),
        ("penalties", without(repetition_penalty=1.0)),
        ("penalties", without(presence_penalty=0.0)),
        ("penalties", without(frequency_penalty=0.0)),
        ("penalties", asked(presence_for_frequency)),
        ("utf-8", altered(splits_characters)),
        ("utf-8", altered(lambda query, answer: replace(answer, text=answer.text.encode().decode("latin-1")))),
        ("utf-8", altered(lambda query, answer: replace(answer, pieces=(*answer.pieces, "x")))),
        ("finish-reason", altered(lambda query, answer: replace(answer, finish_reason="eos"))),
        ("token-counts", counting(lambda query, answer: replace(answer.counts, input_tokens=1))),
        ("token-counts", counting(lambda query, answer: replace(answer.counts, output_tokens=len(answer.ids) + 2))),
        ("acceptance", counting(lambda query, answer: replace(answer.counts, accepted=1000))),
        ("acceptance", counting(lambda query, answer: replace(answer.counts, target_passes=len(answer.ids)))),
        ("acceptance", counting(lambda query, answer: replace(answer.counts, target_passes=1))),
        ("acceptance", counting(lambda query, answer: replace(answer.counts, accepted_per_pass=(1, 1)))),
    ],
)
def test_what_breaks_a_rule_is_found_by_name(part: str, broken: Callable[[], Subject]) -> None:
    check = check_rules(only(part), broken())
    assert faults(check) == [part], check
    assert all(f.part == part and f.reproduce.startswith(f"rules:{part} ") for f in check.findings)


def test_what_a_subject_cannot_do_is_not_applicable() -> None:
    """A server without further inputs, which counts nothing."""

    def answer(query: Query, right: Ask) -> Answer:
        if query.end_ids is not None or query.bad_words or query.sampling.penalised or query.min_tokens:
            raise Unsupported("has no such input")
        given = right(query)
        return replace(given, counts=Counts(), pieces=(given.text,), blocks=(given.ids,))

    check = check_rules(words.trial(), Altered(answer))
    assert check.verdict == Verdict.PASS, check
    inapplicable = {part.name: part.evidence for part in check.parts if part.verdict == Verdict.NOT_APPLICABLE}
    assert inapplicable == {
        "end-ids": "has no such input",
        "min-tokens": "has no such input",
        "bad-words": "has no such input",
        "penalties": "has no such input",
        "token-counts": "the subject counts no tokens",
        "acceptance": "the subject counts no draft tokens",
    }


def test_without_an_answer_that_ends_natural_ends_are_not_applicable() -> None:
    made = words.trial()
    endless = replace(made, cases=made.cases[:2])
    parts = {part.name: part for part in check_rules(endless, words.subject()).parts}
    assert parts["natural-end"].verdict == Verdict.NOT_APPLICABLE
    assert parts["natural-end"].evidence == "no answer came to an end within 24 tokens"
    assert parts["min-tokens"].evidence.startswith("an end id of the request")


def test_a_tokenizer_without_other_scripts_has_no_characters_of_several_tokens() -> None:
    made = words.trial(wanted=lambda check, name: name == "utf-8")
    ascii_only = replace(made, encode=lambda text: words.encode(text.encode("ascii", "replace").decode()))
    (part,) = check_rules(ascii_only, words.subject()).parts
    assert part.verdict == Verdict.NOT_APPLICABLE
