"""Rules: what a request may ask beside its prompt is honoured, and what an answer says of itself is true.

The words, ids and lengths that are asked for come from the subject's own greedy answers, so that each rule has
something to do. What must come of it follows from that answer, or from the reference under the same rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from trtspec.decoding.detokenize import REPLACEMENT
from trtspec.decoding.sampling import GREEDY
from trtspec.parity.claims import Claim, Examination, Undecided, check_claims, some
from trtspec.parity.result import Check, Verdict
from trtspec.parity.subjects import Answer, Query, Subject, Unsupported, Word
from trtspec.parity.trial import Case, Trial

RULES = "rules"
HYPOTHESIS = "what a request asks beside its prompt is honoured, and what an answer says of itself is true"
_TOKENS = 16  # of an answer to a rule
_WORTH = 8  # tokens that an answer needs to make rules of
PENALTIES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
)
_STRONGER = 3  # times as strong, where a penalty decides nothing
FOREIGN = (
    " 日本語を勉強します。",
    " 🙂🎉🙂🎉🙂🎉",
    " Žluťoučký kůň pěl ďábelské ódy.",
)  # prompts for characters of several bytes
_NEVER = "\u2603\u2603"


def check_rules(trial: Trial, subject: Subject) -> Check:
    """What a request asks beside its prompt is honoured, and what an answer says of itself is true."""
    return check_claims(trial, subject, RULES, HYPOTHESIS, CLAIMS)


def cost(trial: Trial) -> int:
    """New tokens, about."""
    return 22 * min(_TOKENS, trial.max_tokens) + trial.max_tokens


def end_ids(exam: Examination) -> str:
    """An id of the answer, asked for as the end id, ends it where it comes first.

    The places are chosen so that the end comes at every offset of a block that the answer has.
    """
    case, answer = _own(exam)
    offsets = [offset for block in answer.blocks for offset in range(len(block))]
    places = [place for place in range(len(answer.ids)) if answer.ids[place] not in answer.ids[:place]]
    first = {offsets[place]: place for place in reversed(places)}  # the earliest place of each offset
    chosen = sorted({*first.values(), *places[: exam.trial.num_draft_tokens + 1]})
    for place in chosen:
        end_id = answer.ids[place]
        ended = exam.ask(case, max_tokens=max(_TOKENS, place + 2), end_ids=(end_id,))
        _ends(exam, case, ended, (*answer.ids[:place], end_id), end_id)
    return f"{len(chosen)} ends, at offsets {_listed(sorted({offsets[place] for place in chosen}))} of a block"


def _ends(exam: Examination, case: Case, ended: Answer, expected: Sequence[int], end_id: int) -> None:
    """Whether an answer is `expected`, whose last is the end id and no part of it."""
    if end_id in ended.ids:
        place = ended.ids.index(end_id)
        behind = len(ended.ids) - place - 1
        exam.fault(case, place, f"end id {end_id} is part of the output, and {behind} tokens follow it")
        return
    tokens = (*ended.ids, end_id) if ended.finish_reason == "stop" else ended.ids
    if not exam.same_tokens(case, tokens, expected, "{} with an end id, {} without"):
        return
    if len(tokens) != len(expected):
        problem = f"finish reason {ended.finish_reason} after {len(ended.ids)} tokens, expected stop after "
        exam.fault(case, min(len(tokens), len(expected)), f"{problem}{len(expected) - 1}")
    _as_decoded(exam, case, ended)


def natural_end(exam: Examination) -> str:
    """The model's own end: of an answer, and of prompts that leave out more and more of that answer's last tokens."""
    trial, seen = exam.trial, []
    for case in trial.cases:
        answer = _up_to_end(exam, case, trial.max_tokens)
        if answer.finish_reason == "stop" or exam.faulty:
            break
    if answer.finish_reason != "stop":
        raise Undecided(f"no answer came to an end within {trial.max_tokens} tokens")
    for left in range(min(len(answer.ids), trial.num_draft_tokens + 2) + 1):
        prompt = _continued(exam, case, answer.ids[: len(answer.ids) - left])
        if prompt is None:
            continue
        try:
            end = _up_to_end(exam, prompt, left + 4, legal=len(prompt.ids) <= _longest(exam))
        except Undecided:  # too long a prompt
            continue
        seen += [len(end.blocks[-1]) if end.blocks else 0] * (end.finish_reason == "stop")
    return f"{1 + len(seen)} ends, at offsets {_listed(sorted(set(seen)))} of a block; {exam.words}"


def _up_to_end(exam: Examination, case: Case, max_tokens: int, *, legal: bool = True) -> Answer:
    """An answer that may come to an end, compared with the reference's."""
    answer, _ = exam.ask_along(case, max_tokens=max_tokens, legal=legal)
    stray = next((place for place, token in enumerate(answer.ids) if token in exam.trial.yardstick.end_ids), None)
    if stray is not None:
        behind = len(answer.ids) - stray - 1
        exam.fault(case, stray, f"an end id is part of the output, and {behind} tokens follow it")
    _as_decoded(exam, case, answer)
    return answer


def stop_words(exam: Examination) -> str:
    """Texts that occur in the answer, asked for as stop words, cut it before their first occurrence."""
    case, answer = _own(exam)
    texts = _texts(exam.trial, answer.ids)
    stops = dict(_stops(case.text, texts))
    if not stops:
        raise Undecided("the answer has no text to stop at")
    for kind, stop in stops.items():
        cut = min((place for text in stop if (place := texts[-1].find(text)) >= 0), default=None)
        length = min(len(answer.ids), _TOKENS) if cut is None else len(answer.ids)
        stopped = exam.ask(case, max_tokens=length, stop=stop)
        _cut(exam, case, stopped, stop, f"stop word ({kind})", answer.ids[:length], cut)
    return f"{', '.join(stops)}; {exam.words}"


def _cut(
    exam: Examination, case: Case, stopped: Answer, stop: Sequence[str], what: str, ids: Sequence[int], cut: int | None
) -> None:
    """Whether an answer is the one of `ids` up to the character `cut`; None: all of it."""
    texts = _texts(exam.trial, ids)
    needed = next((n for n, text in enumerate(texts) if any(word in text for word in stop)), len(ids))
    pieces = "".join(stopped.pieces)
    if not exam.same_tokens(case, stopped.ids, ids, "{} with a stop word, {} without"):
        return
    expected = texts[-1][:cut]
    leaked = next((word for word in stop if word in stopped.text or word in pieces), None)
    if leaked is not None:
        exam.fault(case, needed, f"{what} {leaked!r} is part of the text")
    elif stopped.text.rstrip(REPLACEMENT) != expected.rstrip(REPLACEMENT):
        exam.fault(case, needed, f"{what} {stop}: the text ends {stopped.text[-20:]!r}, expected {expected[-20:]!r}")
    elif len(stopped.ids) > needed:
        exam.fault(case, needed, f"{what} {stop} is complete, and {len(stopped.ids) - needed} tokens follow")
    elif cut is not None and stopped.finish_reason != "stop":
        exam.fault(case, len(stopped.ids), f"{what}: finish reason {stopped.finish_reason}, expected stop")
    elif cut is None and len(stopped.ids) < len(ids):
        exam.fault(case, len(stopped.ids), f"{what} {stop} never comes, and ends the answer")
    elif len(stopped.ids) < sum(len(text) <= len(expected) for text in texts) - 1:  # those before the stop word's first
        exam.fault(case, len(stopped.ids), f"{what}: {len(stopped.ids)} token ids say less than the text")


def _texts(trial: Trial, ids: Sequence[int]) -> list[str]:
    """The text of the first n ids, for each n from 0; characters that are not whole yet left out."""
    return [trial.yardstick.decode(list(ids[:n])).rstrip(REPLACEMENT) for n in range(len(ids) + 1)]


def _stops(prompt: str, texts: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Stop words by kind, from the texts that grow token by token. Those that occur do so early, to save tokens."""
    whole = texts[-1]
    near = texts[min(len(texts) - 1, 10)]
    words = [match.group() for match in re.finditer(r"\w{2,}", near) if match.start() > 0]
    if words:
        yield "a word", (words[0],)
    if words and words[0] not in words[-1] and words[-1] not in words[0]:
        yield "two words", (words[-1], words[0])
    ends = [len(grown) for grown in texts[:10]]
    clean = [whole.startswith(grown) and REPLACEMENT not in grown for grown in texts[:10]]
    spans = [
        (ends[n], ends[n + 1]) for n in range(1, len(ends) - 1) if clean[n] and clean[n + 1] and ends[n] < ends[n + 1]
    ]
    if spans:
        start, end = spans[-1]
        yield "over two tokens", (whole[start - 1 : start + 1],)
        yield "one the beginning of the other", (whole[start : end + 3], whole[start:end])
    inside = next(((start, end) for start, end in reversed(spans) if end - start > 1), None)
    if inside:
        yield "inside a token", (whole[inside[0] + 1 : inside[1] + 1],)
    never = [near[: len(near) // 2][-4:] + _NEVER, near[-3:] + _NEVER, prompt[-3:] + whole[:3], prompt[:8]]
    yield "ones that never come", tuple(text for text in never if text not in whole)


def max_tokens(exam: Examination) -> str:
    """Exactly so many tokens, the first of the longer answer."""
    case, answer = _own(exam)
    k = exam.trial.num_draft_tokens
    lengths = sorted(length for length in {1, 2, k, k + 1, k + 2} if 0 < length < len(answer.ids))
    for length in lengths:
        short = exam.ask(case, max_tokens=length)
        if not exam.same_tokens(case, short.tokens, answer.ids[:length], "{} with fewer max_tokens, {} with more"):
            continue
        if len(short.ids) != length:
            exam.fault(case, min(length, len(short.ids)), f"{len(short.ids)} tokens where max_tokens is {length}")
        elif short.finish_reason != "length":
            exam.fault(case, length, f"finish reason {short.finish_reason} after {length} tokens, expected length")
        _as_decoded(exam, case, short)
    return f"max_tokens {_listed(lengths)}"


def min_tokens(exam: Examination) -> str:
    """An end does not come before min_tokens; then it may."""
    trial, tried = exam.trial, []
    case, answer = _own(exam)
    place = next((n for n in range(3, len(answer.ids)) if answer.ids[n] not in answer.ids[:n]), None)
    if place is not None:
        end = (answer.ids[place],)
        try:
            for least in (place, place + 1):  # it may come at once, and it may not
                _late(exam, case, least, end_ids=end)
            tried.append(f"an end id of the request, due after {place} tokens")
        except Unsupported:
            pass
    try:
        ending, full = _ending(exam)
        prompt = _continued(exam, ending, full.ids[: max(0, len(full.ids) - 2)])
    except Undecided:
        prompt = None
    if prompt is not None and len(prompt.ids) <= _longest(exam):
        _late(exam, prompt, 5)
        tried.append("the model's own end, due after 2 tokens")
    if not tried:
        raise Undecided(f"no answer came to an end within {trial.max_tokens} tokens, and no end id can be asked for")
    return f"{'; '.join(tried)}; {exam.words}"


def _late(exam: Examination, case: Case, least: int, **more: Any) -> None:
    """Ask for so many tokens before the end, and compare with the reference."""
    late, _ = exam.ask_along(case, max_tokens=least + 4, min_tokens=least, **more)
    if len(late.ids) < least:
        exam.fault(case, len(late.ids), f"the end comes after {len(late.ids)} tokens, min_tokens is {least}")


def bad_words(exam: Examination) -> str:
    """A word of the answer, and one of several tokens, banned: another token comes, the one of the reference."""
    case, answer = _own(exam)
    words = [word for length in (1, 2, 3) if (word := _word(exam.trial, answer.ids, length)) is not None]
    if not words:
        raise Undecided("no token of the answer is a word that can be banned as such")
    decided = 0
    for given in [(word,) for word in words[:2]] + [tuple(words[1:])] * (len(words) > 2):
        decided += exam.ask_along(case, max_tokens=_TOKENS, bad_words=given)[1]
    shown = ", ".join(f"{word.text!r} ({len(word.ids)} tokens)" for word in words)
    return f"{shown}; decided {decided} of {exam.compared} tokens"


def _word(trial: Trial, ids: Sequence[int], length: int) -> Word | None:
    """So many neighbouring tokens of an answer that are, as text by themselves, the same tokens."""
    for start in range(1, min(len(ids), _TOKENS - 4) - length):
        part = ids[start : start + length]
        text = trial.yardstick.decode(list(ids[: start + length]))[len(trial.yardstick.decode(list(ids[:start]))) :]
        if text.strip() and REPLACEMENT not in text and tuple(trial.encode(text)) == tuple(part):
            return Word(text, tuple(part))
    return None


def penalties(exam: Examination) -> str:
    """Each token is the reference's choice under the penalties, for prompt and output so far and nothing else."""
    decided: dict[str, int] = {}
    unsupported = None
    for case, settings in zip(_cycled(list(some(exam.trial.cases, 2))), PENALTIES, strict=False):
        name = " and ".join(settings)
        try:
            decided[name] = exam.ask_along(case, replace(GREEDY, **settings), _TOKENS)[1]
            if not decided[name]:
                stronger: dict[str, Any] = {key: value * _STRONGER for key, value in settings.items()}
                decided[name] = exam.ask_along(case, replace(GREEDY, **stronger), _TOKENS)[1]
        except Unsupported as error:
            unsupported = error
    if unsupported is not None and not decided:
        raise unsupported
    shown = ", ".join(f"{name} decided {count}" for name, count in decided.items())
    if not all(decided.values()):
        raise Undecided(f"a penalty that decides nothing is not seen: {shown}", Verdict.INCONCLUSIVE)
    return f"{shown} of {exam.compared} tokens" + f"; {unsupported}" * (unsupported is not None)


def finish_reason(exam: Examination) -> str:
    """Stop or length, and length only where the answer is as long as it may be."""
    judged = _asked(exam)
    for case, query, answer in judged:
        num, reason = len(answer.ids), answer.finish_reason
        full = exam.trial.context is not None and len(query.ids) + num >= exam.trial.context
        if reason not in ("stop", "length"):
            exam.fault(case, num, f"finish reason {reason!r}, expected stop or length")
        elif reason == "length" and num != query.max_tokens and not full:
            exam.fault(case, num, f"finish reason length after {num} tokens, where max_tokens is {query.max_tokens}")
        elif num > query.max_tokens:
            exam.fault(case, query.max_tokens, f"{num} tokens where max_tokens is {query.max_tokens}")
    return f"{len(judged)} answers"


def token_counts(exam: Examination) -> str:
    """The counts of tokens are those of the ids; whether an end id counts is left open."""
    judged = [asked for asked in _asked(exam) if asked[2].counts.input_tokens or asked[2].counts.output_tokens]
    if not judged:
        raise Undecided("the subject counts no tokens")
    for case, query, answer in judged:
        counts, num = answer.counts, len(answer.ids)
        most = query.max_tokens if query.stop else num + (answer.finish_reason == "stop")
        if counts.input_tokens is not None and counts.input_tokens != len(query.ids):
            exam.fault(case, 0, f"counts {counts.input_tokens} tokens of input, the prompt has {len(query.ids)}")
        if counts.output_tokens is not None and not num <= counts.output_tokens <= most:
            exam.fault(case, num, f"counts {counts.output_tokens} tokens of output, and emitted {num}")
    return f"{len(judged)} answers"


def utf_8(exam: Examination) -> str:
    """No character is split, whether tokens, blocks or the end of the answer cut through its bytes."""
    like, several = exam.trial.cases[0], 0
    for text in FOREIGN:
        prompt = exam.prompt(like, text)
        known = all(0 <= token < exam.trial.yardstick.vocab_size for token in prompt.ids)
        if not known or not exam.trial.yardstick.decode(list(prompt.ids)).endswith(text):
            continue  # the tokenizer has no spelling for it
        answer = exam.ask(prompt, max_tokens=_TOKENS)
        _as_decoded(exam, prompt, answer)
        texts = [exam.trial.yardstick.decode(list(answer.ids[:n])) for n in range(1, len(answer.ids) + 1)]
        inside = [n for n, text in enumerate(texts, 1) if text.endswith(REPLACEMENT) and n < len(texts)]
        several += len(inside)
        if inside:
            _as_decoded(exam, prompt, exam.ask(prompt, max_tokens=inside[0]))
            break
    for case, query, answer in _asked(exam):
        if answer.pieces and "".join(answer.pieces) != answer.text:
            exam.fault(case, 0, "the streamed pieces joined are not the text")
        if not query.stop:
            _as_decoded(exam, case, answer)
    if not several and not exam.findings:
        raise Undecided("no answer has a character of several tokens")
    return f"{several} tokens end inside a character"


def _as_decoded(exam: Examination, case: Case, answer: Answer) -> None:
    """Whether the text is that of the ids; how an unfinished character at the end shows is left open."""
    text = exam.trial.yardstick.decode(list(answer.ids))
    lone = next(
        (piece for piece in (*answer.pieces, answer.text) if any("\ud800" <= c <= "\udfff" for c in piece)), None
    )
    if lone is not None:
        exam.fault(case, 0, f"a piece of text is not valid: {lone!r}")
    elif answer.text.rstrip(REPLACEMENT) != text.rstrip(REPLACEMENT):
        place = len(_common(text, answer.text))
        shown = f"{answer.text[place : place + 20]!r}, the token ids say {text[place : place + 20]!r}"
        exam.fault(case, 0, f"text differs from its token ids at character {place}: {shown}")


def acceptance(exam: Examination) -> str:
    """The counters of drafts agree with each other and with the tokens."""
    judged = [asked for asked in _asked(exam) if asked[2].counts.drafted is not None]
    if not judged:
        raise Undecided("the subject counts no draft tokens")
    for case, query, answer in judged:
        for problem in _miscounted(exam.trial, query, answer):
            exam.fault(case, 0, problem)
    drafted, accepted = (sum(getattr(answer.counts, name) or 0 for *_, answer in judged) for name in _DRAFTS)
    return f"{len(judged)} answers, {accepted} of {drafted} draft tokens accepted"


_DRAFTS = ("drafted", "accepted")


def _miscounted(trial: Trial, query: Query, answer: Answer) -> Iterator[str]:
    """What cannot be true in the counters of one answer.

    A pass emits its accepted drafts and a token of its own. Of the last one, less may be kept: an answer may have been
    drafted over its length, and behind an end there may be anything. An end id is a token like any other here.
    """
    counts, k = answer.counts, query.num_draft_tokens
    told = trial.num_draft_tokens > 0  # else the engine drafts by itself, as much as it likes
    drafted, accepted = counts.drafted or 0, counts.accepted or 0
    passes, each = counts.target_passes, counts.accepted_per_pass
    emitted = len(answer.ids) + (answer.finish_reason == "stop" and not query.stop)
    blocks = [len(block) for block in answer.blocks if block]
    if not 0 <= accepted <= drafted:
        yield f"{accepted} draft tokens accepted of {drafted}"
    if told and not k and drafted:
        yield f"{drafted} draft tokens in an answer without drafts"
    if each is not None:
        if sum(each) != accepted:
            yield f"{accepted} draft tokens accepted, but {sum(each)} in the passes together"
        if told and k and max(each, default=0) > k:
            yield f"{max(each)} draft tokens accepted in one pass, of {k}"
        if passes is not None and len(each) > passes:
            yield f"drafts verified in {len(each)} passes of {passes}"
    if passes is None or not blocks:
        return
    if told and accepted > passes * k:
        yield f"{accepted} draft tokens accepted in {passes} passes of at most {k}"
    if emitted > accepted + passes:
        yield f"{emitted} tokens from {passes} passes and {accepted} accepted draft tokens"
    lost = k + 1 if told else max(each or (drafted,)) + 1
    if answer.finish_reason == "length" and emitted < max(passes - 1, accepted + passes - lost):
        yield f"only {emitted} tokens from {passes} passes and {accepted} accepted draft tokens"
    if told and k and len(blocks) == passes and max(blocks) > k + 1:
        yield f"a block of {max(blocks)} tokens, where {k} are drafted"


def _asked(exam: Examination) -> list[tuple[Case, Query, Answer]]:
    """What was asked for other rules, or by itself if there is nothing yet."""
    if not any(query.num_draft_tokens == exam.trial.num_draft_tokens for _, query, _ in exam.asked):
        for case in some(exam.trial.cases, 2):
            exam.ask(case)
    return list(exam.asked)


def _own(exam: Examination) -> tuple[Case, Answer]:
    """A prompt and the subject's greedy answer, the first that is long enough; it is also the greedy check's."""
    for case in exam.trial.cases:
        answer = exam.ask(case)
        if len(answer.ids) >= _WORTH:
            return case, answer
    raise Undecided(f"no answer has {_WORTH} tokens")


def _ending(exam: Examination) -> tuple[Case, Answer]:
    """A prompt and a greedy answer that the model ended."""
    for case in exam.trial.cases:
        answer = exam.ask(case)
        if answer.finish_reason == "stop":
            return case, answer
    raise Undecided(f"no answer came to an end within {exam.trial.max_tokens} tokens")


def _continued(exam: Examination, case: Case, ids: Sequence[int]) -> Case | None:
    """The prompt with so much of the answer behind it; None if the text of both has other ids."""
    prompt = exam.prompt(case, case.text + exam.trial.yardstick.decode(list(ids)))
    return prompt if prompt.ids == (*case.ids, *ids) else None


def _longest(exam: Examination) -> int:
    """Tokens that a prompt may have for all that is known."""
    return max(len(case.ids) for case in exam.trial.cases)


def _cycled(cases: Sequence[Case]) -> Iterator[Case]:
    while True:
        yield from cases


def _common(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


CLAIMS = (
    Claim("end-ids", "an end id ends the answer wherever in a block it comes", end_ids),
    Claim("natural-end", "the model's own end ends the answer wherever in a block it comes", natural_end),
    Claim("stop-words", "a stop word cuts the text exactly before its first occurrence", stop_words),
    Claim("max-tokens", "an answer has exactly max_tokens tokens unless it ends", max_tokens),
    Claim("min-tokens", "no end comes before min_tokens", min_tokens),
    Claim("bad-words", "a banned word does not come, and what comes instead is the reference's choice", bad_words),
    Claim("penalties", "penalties count what is in prompt and output, and nothing else", penalties),
    Claim("utf-8", "streamed text never splits a character", utf_8),
    Claim("finish-reason", "the finish reason is true", finish_reason),
    Claim("token-counts", "the counts of tokens are true", token_counts),
    Claim("acceptance", "the counts of drafts agree with each other and with the tokens", acceptance),
)
PARTS = tuple(claim.name for claim in CLAIMS)
