"""Traces: written while subjects answer, read back whole, answered from, compared, and judged again."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from parity_doubles import TARGET, broken_verifier, decode, engine, subject, trial

from trtspec.cli.parity_diff import diff as diff_command
from trtspec.decoding.sampling import SamplingParams, Uniforms
from trtspec.errors import EXIT_PARITY_FAILED, TrtspecError
from trtspec.parity.greedy import check_greedy
from trtspec.parity.replay import cycle_faults, replay
from trtspec.parity.result import Verdict
from trtspec.parity.sampled import check_sampled
from trtspec.parity.subjects import Answer, Counts, Cycle, Draw, Query, Unsupported, Word
from trtspec.parity.subjects.trace import Recorded
from trtspec.parity.trace import FORMAT, Recorder, Remembering, read
from trtspec.parity.trace_diff import diff
from trtspec.parity.trial import afresh

DRAWN = SamplingParams(temperature=1.0, seed=2**64 - 1)
QUERY = Query(
    "\u00e9\u2028 x", (1, 2), 8, DRAWN, 3, min_tokens=1, stop=("a", "b"), bad_words=(Word("no", (4, 5)),),
    end_ids=(0,), log_probs=True,
)  # fmt: skip
PLAIN = Query("p", (3,), 8, SamplingParams(), 0)
ANSWER = Answer(
    blocks=((4, 5), (), (6,)),
    text="x\ud800y",
    finish_reason="length",
    pieces=("x", "", "\ud800y"),
    counts=Counts(2, 3, 6, 2, 2, (1, 0)),
    log_probs=(-0.1, float("-inf"), -1e-300),
    cycles=(Cycle(2, (4, 9), (4, 5), 1, (Draw(4, 4, 0.1, 0.2, 0.5, 0.4, 0.0, 0.3),)), Cycle(4, (), (6,), 0)),
)


class Scripted:
    """Answers with the next of given answers, or raises it."""

    name = "scripted"
    streams = False

    def __init__(self, *answers: Answer | Exception) -> None:
        self._answers = list(answers)
        self.num_asked = 0

    def generate(self, query: Query) -> Answer:
        self.num_asked += 1
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def answer(*ids: int, finish: str = "length", **more: Any) -> Answer:
    return Answer(blocks=tuple((token,) for token in ids), text=decode(list(ids)), finish_reason=finish, **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def record(path: Path, *answers: tuple[Query, Answer], subject: str = "scripted") -> Path:
    with Recorder(path, {"name": "tiny"}) as recorder:
        for query, given in answers:
            recorder.answer(subject, query, given)
    return path


def test_what_is_written_is_read_back(path: Path) -> None:
    with Recorder(path, {"name": "tiny", "models": {"target": "abc"}, "settings": {"alpha": np.float64(0.001)}}) as out:
        out.got(out.answer("engines", QUERY, ANSWER))
        out.note("greedy", {"regrets": np.array([0.0, np.inf]), "place": np.int64(3), "path": Path("x")})
        out.error("server", PLAIN, Unsupported("cannot"))
    trace = read(path)
    assert trace.header["format"] == FORMAT and trace.header["settings"] == {"alpha": 0.001}
    first, second = trace.records
    assert (first.query, first.answer, first.left_out) == (QUERY, ANSWER, ())
    assert (second.query, second.answer, second.error, second.unsupported) == (PLAIN, None, "cannot", True)
    assert [record.number for record in trace.records] == [1, 2] and trace.subjects == ("engines", "server")
    (note,) = trace.notes
    assert (note.check, note.answer) == ("greedy", 1)
    assert note.record == {"regrets": [0.0, "inf"], "place": 3, "path": "x"}
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        json.loads(line, parse_constant=pytest.fail)


def test_arrays_are_left_out_and_the_record_says_so(path: Path) -> None:
    given = replace(ANSWER, logits=np.zeros((3, 50), dtype=np.float32))
    record(path, (replace(QUERY, logits=True), given))
    (read_back,) = read(path).records
    assert read_back.left_out == ("logits",) and read_back.answer == ANSWER
    with pytest.raises(Unsupported, match="does not keep logits"):
        Recorded(read(path)).generate(replace(QUERY, logits=True))


@pytest.mark.parametrize(
    ("spoil", "line", "message"),
    [
        (lambda text: text[:-20], 3, "cut off in this line"),
        (lambda text: text + '{"kind": "note"', 4, "cut off in this line"),
        (lambda text: text.replace('"blocks"', '"block"', 1), 2, "'blocks' is missing"),
        (lambda text: text.replace('"temperature"', '"warmth"', 1), 2, "not a line of a trace"),
        (lambda text: text.replace("answer", "anser", 1), 2, "kind 'anser'"),
        (lambda text: text.replace(f'"format": {FORMAT}', '"format": 99'), 1, "a trace of format 99"),
        (lambda text: text.split("\n", 1)[1], 1, "no header"),
        (lambda text: "hello", 1, "not a line of a trace"),
        (lambda text: "[1]\n", 1, "not an object"),
        (lambda text: "", 1, "the trace is empty"),
    ],
)
def test_a_broken_file_is_one_error_with_its_line(
    path: Path, spoil: Callable[[str], str], line: int, message: str
) -> None:
    record(path, (QUERY, ANSWER), (PLAIN, answer(4)))
    path.write_text(spoil(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(TrtspecError, match=message) as caught:
        read(path)
    assert caught.value.where == f"{path}:{line}" and "\n" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(TrtspecError, match="cannot be read: No such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(TrtspecError, match="cannot be written: No such file"):
        Recorder(tmp_path / "none" / "run.jsonl")


def test_a_known_query_is_answered_from_memory_and_afresh_when_asked(path: Path) -> None:
    inner = Scripted(answer(1), answer(2), answer(3))
    with Recorder(path) as recorder:
        remembering = Remembering(inner, recorder)
        assert (remembering.name, remembering.streams, afresh(remembering).name) == ("scripted", False, "scripted")
        assert [remembering.generate(PLAIN).ids for _ in range(2)] == [(1,), (1,)]
        assert afresh(remembering).generate(PLAIN).ids == (2,)
        assert remembering.generate(PLAIN).ids == (1,), "the first answer stands"
        assert remembering.generate(replace(PLAIN, stream=False)).ids == (3,)
    assert inner.num_asked == 3
    assert not hasattr(remembering, "max_draft_tokens")
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [line["again"] for line in lines] == [False, True, False]


def test_answers_with_logits_are_not_kept_in_memory() -> None:
    inner = Scripted(answer(1), answer(2))
    asked = replace(PLAIN, logits=True)
    remembering = Remembering(inner)
    assert [remembering.generate(asked).ids for _ in range(2)] == [(1,), (2,)]


def test_notes_belong_to_the_answer_that_the_thread_got_last(path: Path) -> None:
    """Also when it came from memory, and when others ask at the same time."""
    other = replace(PLAIN, text="q")
    with Recorder(path) as recorder:
        remembering = Remembering(Scripted(answer(1), answer(2)), recorder)
        remembering.generate(PLAIN)
        remembering.generate(other)
        remembering.generate(PLAIN)
        thread = threading.Thread(target=lambda: (remembering.generate(other), recorder.note("y", {})))
        thread.start()
        thread.join()
        recorder.note("x", {})
    assert [(note.check, note.answer) for note in read(path).notes] == [("y", 2), ("x", 1)]


def test_many_threads_write_whole_lines(path: Path) -> None:
    with Recorder(path) as recorder:
        remembering = Remembering(subject(), recorder)

        def ask(number: int) -> None:
            for seed in range(20):
                remembering.generate(replace(PLAIN, sampling=replace(DRAWN, seed=100 * number + seed)))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trace = read(path)
    assert [record.number for record in trace.records] == list(range(1, 81))
    assert len({record.query for record in trace.records}) == 80


def test_a_trace_answers_as_often_as_it_was_asked(path: Path) -> None:
    with Recorder(path) as recorder:
        remembering = Remembering(Scripted(answer(1), answer(2), Unsupported("no"), TrtspecError("broken")), recorder)
        remembering.generate(PLAIN)
        afresh(remembering).generate(PLAIN)
        for text, kind in (("u", Unsupported), ("e", TrtspecError)):
            with pytest.raises(kind):
                remembering.generate(replace(PLAIN, text=text))
    again = Remembering(Recorded(read(path)))
    assert (again.generate(PLAIN).ids, again.generate(PLAIN).ids, afresh(again).generate(PLAIN).ids) == (
        (1,),
        (1,),
        (2,),
    )
    with pytest.raises(Unsupported, match="has 2 of the answers"):
        afresh(again).generate(PLAIN)
    with pytest.raises(Unsupported, match="does not have this query"):
        again.generate(replace(PLAIN, max_tokens=9))
    with pytest.raises(Unsupported, match="no"):
        again.generate(replace(PLAIN, text="u"))
    with pytest.raises(TrtspecError, match="broken") as caught:
        again.generate(replace(PLAIN, text="e"))
    assert not isinstance(caught.value, Unsupported)


def test_whose_answers_must_be_clear(path: Path) -> None:
    with Recorder(path) as recorder:
        recorder.answer("engines", PLAIN, answer(1))
        recorder.answer("server", PLAIN, answer(2))
    with pytest.raises(TrtspecError, match="answers of engines, server; expected those of one subject"):
        Recorded(read(path))
    with pytest.raises(TrtspecError, match="expected those of runner"):
        Recorded(read(path), "runner")
    assert Recorded(read(path), "server").generate(PLAIN).ids == (2,)


def run(path: Path, target: Any = None, **settings: Any) -> dict[str, Verdict]:
    """Greedy and sampled checks of one engine, recorded; their verdicts."""
    with Recorder(path) as recorder:
        asked = trial(note=recorder.note, num_samples=300)
        remembering = Remembering(subject(target, uniforms=Uniforms, **settings), recorder)
        return {check.name: check.verdict for check in (check(asked, remembering) for check in CHECKED)}


CHECKED = (check_greedy, check_sampled)


def test_a_recorded_run_is_judged_as_the_run_was(path: Path) -> None:
    verdicts = run(path)
    assert set(verdicts.values()) == {Verdict.PASS}
    recorded = Remembering(Recorded(read(path)))
    assert {
        check.name: check.verdict for check in (check(trial(num_samples=300), recorded) for check in CHECKED)
    } == verdicts


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (None, {"greedy": "pass", "sampled": "pass"}),
        (broken_verifier(accept=lambda p, q: 1.0), {"greedy": "pass", "sampled": "fault"}),
    ],
)
def test_the_notes_alone_give_the_verdicts(path: Path, broken: Any, expected: dict[str, str]) -> None:
    verdicts = run(path, engine(TARGET, broken))
    judged = {check.name: check.verdict.value for check in replay(read(path))}
    assert {name: judged[name] for name in expected} == expected
    assert {name: verdict.value for name, verdict in verdicts.items()} == expected


def test_regrets_are_judged_by_the_tolerance_of_their_note(path: Path) -> None:
    def verdict(*regrets: float | str) -> tuple[Verdict, int]:
        with Recorder(path) as recorder:
            recorder.got(recorder.answer("engines", PLAIN, answer(1)))
            recorder.note("greedy", {"regrets": regrets, "tolerance": 0.5, "prompt": 3})
        (check,) = replay(read(path))
        return check.verdict, len(check.findings)

    assert verdict(0.0, 0.0) == (Verdict.PASS, 0)
    assert verdict(0.0, 0.5) == (Verdict.TIE, 1)
    assert verdict(0.1, 0.51) == (Verdict.FAULT, 2)
    assert verdict(float("inf")) == (Verdict.FAULT, 1)


def test_a_broken_note_is_an_error(path: Path) -> None:
    with Recorder(path) as recorder:
        recorder.got(recorder.answer("engines", PLAIN, answer(1)))
        recorder.note("sampled", {"settings": 2, "tokens": [{"by_id": 1}]})
    with pytest.raises(TrtspecError, match="a note of the check sampled is broken"):
        replay(read(path))


def draw(**changes: Any) -> Draw:
    """Draft 7 with p/q of one half, kept by a uniform below it."""
    given = {"token": 7, "draft": 7, "accept": 0.4, "choose": 0.9, "p": 0.2, "q": 0.4, "low": 0.0, "high": 0.0}
    return Draw(**(given | changes))


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (draw(), None),
        (draw(accept=0.6), "draft 7 was kept, uniform 0.6, p/q 0.2/0.4 = 0.5"),
        (draw(accept=0.6, token=8, low=0.85, high=0.95), None),
        (draw(accept=0.6, token=8, low=0.1, high=0.2), r"token 8 has \[0.1, 0.2\) of the residual, the uniform is 0.9"),
        (draw(token=8, low=0.85, high=0.95), "draft 7 was rejected, uniform 0.4"),
        (draw(p=0.0, accept=0.0), None),  # at the border, where rounding decides
        (draw(p=0.0), "draft 7 was kept"),
        (draw(p=0.5, accept=0.99), None),
        (draw(q=None, low=0.8, high=1.0), None),
        (draw(q=None, low=0.0, high=0.2), "of the target's distribution"),
        (draw(draft=None, p=None, q=None, low=0.0, high=0.2), "of the target's distribution"),
    ],
)
def test_a_draw_is_gone_through_by_its_numbers(told: Draw, problem: str | None) -> None:
    accepted = int(told.token == told.draft)
    drafts = () if told.draft is None else (told.draft,)
    faults = list(cycle_faults(Cycle(5, drafts, (told.token,), accepted, (told,))))
    assert [place for place, _ in faults] == ([] if problem is None else [0])
    if problem is not None:
        assert re.search(problem, faults[0][1])


def test_accepted_counts_must_be_those_of_the_tokens() -> None:
    assert list(cycle_faults(Cycle(5, (7,), (8,), 1, (draw(accept=0.6, token=8, low=0.85, high=0.95),))))
    assert list(cycle_faults(Cycle(5, (), (8,), 1)))


def test_a_rule_that_ignores_the_uniforms_is_found_from_the_trace(path: Path) -> None:
    """The drafts are all kept; the doubles' engine answers logits for it, so that the draws are told."""

    def always(request: Any) -> Any:
        result = engine(TARGET)(request)
        if request.draft_tokens is None:
            return result
        rows = TARGET.rows[[request.input_ids[-1], *request.draft_tokens]]
        ids = np.array([*request.draft_tokens, 3], dtype=np.int32)
        return replace(result, output_ids=ids, generation_logits=rows)

    run(path, always)
    cycles = next(check for check in replay(read(path)) if check.name == "cycles")
    assert cycles.verdict == Verdict.FAULT
    assert any("was kept, uniform" in finding.problem for finding in cycles.findings)


def test_where_two_traces_part(tmp_path: Path) -> None:
    blocks = {"blocks": ((4, 5), (6, 7)), "pieces": ("ef", "gh"), "counts": Counts(accepted_per_pass=(1, 1))}
    ours = replace(answer(4, 5, 6, 7), **blocks)
    other = replace(ours, blocks=((4, 5), (6, 8)), pieces=("ef", "gi"), text="efgi")
    queries = [replace(PLAIN, text=f"prompt {number}") for number in range(6)]
    a = [
        (queries[0], ours),
        (queries[1], ours),
        (queries[2], answer(4, 5)),
        (queries[3], answer(4)),
        (queries[4], ours),
    ]
    b = [
        (queries[0], ours),
        (queries[1], other),
        (queries[2], answer(4, 5, finish="stop")),
        (queries[3], replace(answer(4), text="?")),
        (queries[5], ours),
    ]
    found = diff(read(record(tmp_path / "a", *a)), read(record(tmp_path / "b", *b, subject="server")))
    assert (found.num_common, len(found.partings), found.only_a, found.only_b) == (4, 3, (queries[4],), (queries[5],))
    tokens, end, text = found.partings
    assert (tokens.what, tokens.position) == ("tokens", 3) and tokens.a is not None and tokens.b is not None
    assert (tokens.a.token, tokens.a.text, tokens.a.block, tokens.a.place) == (7, "gh", 2, 2)
    assert (tokens.b.token, tokens.b.text, tokens.b.accepted) == (8, "gi", (1, 1, None))
    assert (end.what, end.position) == ("tokens", 2) and end.a is not None and end.a.token is None
    assert (text.what, text.words) == ("text", "the same 1 tokens, but text 'e' and '?'")
    lines = "\n".join(found.lines())
    assert f"A: {tmp_path / 'a'}: scripted, 5 answers" in lines
    assert "4 answers to the same queries: 1 equal, 3 part; only in A: 1; only in B: 1" in lines
    assert "'prompt 1' (greedy, num_draft_tokens 0): part at token 3 of 4 and 4" in lines
    assert "  B: answer 2: token 8, the 2nd of block 2 'gi'; drafts accepted: 1 before, 1 there" in lines
    assert "  A: answer 3: is over\n  B: answer 3: the end" in lines


def test_repeated_queries_are_compared_turn_by_turn_and_settings_can_be_ignored(tmp_path: Path) -> None:
    drafted = replace(PLAIN, num_draft_tokens=3, stream=False)
    a = read(record(tmp_path / "a", (PLAIN, answer(4)), (PLAIN, answer(5))))
    b = read(record(tmp_path / "b", (PLAIN, answer(4)), (PLAIN, answer(6)), (drafted, answer(7))))
    assert [parting.position for parting in diff(a, b).partings] == [0]
    c = read(record(tmp_path / "c", (drafted, answer(4))))
    assert diff(a, c).num_common == 0
    found = diff(a, c, ignore=("num_draft_tokens", "stream"))
    assert (found.num_common, found.partings) == (1, ())
    with pytest.raises(TrtspecError, match="sampling cannot be ignored"):
        diff(a, c, ignore=("sampling",))
    with pytest.raises(TrtspecError, match="no answers of runner"):
        diff(a, c, ("runner", None))


def test_errors_are_compared_too(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a") as recorder:
        recorder.error("x", PLAIN, TrtspecError("broken"))
    a, b = read(tmp_path / "a"), read(record(tmp_path / "b", (PLAIN, answer(4))))
    assert diff(a, a).partings == ()
    assert diff(a, b).partings[0].words == "the error 'broken' and an answer"


def test_the_command(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a", (PLAIN, answer(4))), record(tmp_path / "b", (PLAIN, answer(5)))
    same = CliRunner().invoke(diff_command, [str(a), str(a)])
    assert same.exit_code == 0 and "1 equal, 0 part" in same.output
    parted = CliRunner().invoke(diff_command, [str(a), str(b)])
    assert parted.exit_code == EXIT_PARITY_FAILED and "part at token 0" in parted.output
    c = record(tmp_path / "c", (replace(PLAIN, num_draft_tokens=2), answer(4)))
    nothing = CliRunner().invoke(diff_command, [str(a), str(c)])
    assert isinstance(nothing.exception, TrtspecError) and "no query in common" in str(nothing.exception)


def test_every_field_of_the_records_is_kept() -> None:
    """A field that is added to a query or an answer must not be lost on the way to the file."""
    from trtspec.parity.trace import answer_fields, plain, query_fields, read_answer, read_query

    assert set(query_fields(QUERY)) == set(asdict(QUERY))
    assert set(answer_fields(ANSWER)) == set(asdict(ANSWER)) - {"logits"} | {"left_out"}
    assert read_query(plain(query_fields(QUERY))) == QUERY
    assert read_answer(plain(answer_fields(ANSWER))) == ANSWER
