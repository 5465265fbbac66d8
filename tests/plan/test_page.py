"""The plan as a page: what a reader finds there, and that it needs nothing besides."""

from __future__ import annotations

import html
import importlib.util
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from plan_doubles import BATCHES, plan, point, points

from trtspec.errors import TrtspecError
from trtspec.plan.page import between, number, to_html
from trtspec.plan.plots import memory_bars, plots
from trtspec.plan.result import MethodPlan, Plan

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports

TITLES = [
    "Speed-up over draft length",
    "Speed-up over batch size",
    "Speed-up over acceptance rate",
    "Latency against throughput",
]


class Page(HTMLParser):
    """Ids, links, labels and text of a page; every element has to be closed where it should be."""

    VOID = ("meta", "link", "br", "use", "path", "rect")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.labels: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if given.get("id"):
            self.ids[str(given["id"])] += 1
        self.links += [str(given[name]) for name in ("href", "xlink:href", "src") if given.get(name)]
        if tag == "svg":
            assert given.get("role") == "img"
            self.labels.append(str(given["aria-label"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def priced(made: Plan, cost: float) -> Plan:
    """Every point of the own method costs so much, and less by batch."""
    own = replace(made.own, points=tuple(replace(each, cost_per_million=cost / each.batch) for each in made.own.points))
    return replace(made, methods=(own, *made.methods[1:]), price_per_gpu_hour=2.5)


def test_the_page_needs_nothing_besides() -> None:
    text = to_html(plan())
    page = Page(text)
    assert [name for name, times in page.ids.items() if times > 1] == []
    assert {link.removeprefix("#") for link in page.links if link != "data:,"} <= set(page.ids)
    for line in text.splitlines():
        for outside in re.findall(r'(?:src=|@import|url\((?!#)|https?://[^"<\s]*)', line):
            assert "www.w3.org" in outside or "purl.org" in outside, line
    assert "<script" not in text and "<metadata" not in text
    assert text == to_html(plan())


def test_it_begins_with_the_answer() -> None:
    made = priced(plan(latency_ms=15.0, within_latency=plan().own.best[16]), 12.8)
    text = to_html(made)
    page = Page(text)
    best = made.own.best[1]
    assert html.escape(made.headline) in text[: text.index("<h2>")]
    top = page.text[: page.text.index("Does it fit?")]
    for words in (
        f"Speed-up at batch 1 {best.speed_up:.2f} times",
        f"Draft tokens at batch 1 {best.num_draft_tokens}",
        "Plain decoding wins from batch 64",
        "7.5 GB left",
        "Within 15 ms per token 1,612 tokens/s batch 16, 4 draft tokens",
        "Lowest cost $0.4 for a million output tokens at batch 32",  # at 64 it does not fit
        "prompts look alike",
    ):
        assert words in top, words


def test_every_plot_says_in_words_what_is_seen() -> None:
    page = Page(to_html(plan()))
    best = plan().own.best[1]
    assert len(page.labels) == 5
    assert page.labels[0] == "Memory of 80 GB. GPUs 0 to 1: draft 11.0 GB, target 61.5 GB."
    assert (
        f"at batch 1 the best is {best.speed_up:.2f} times with {best.num_draft_tokens} draft tokens" in page.labels[1]
    )
    assert "prompt lookup" in page.labels[2] and "at rate 0.50" in page.labels[3]
    assert "plain decoding up to" in page.labels[4]
    for words in (
        "draft tokens a cycle",
        "batch size (sequences in flight)",
        "acceptance rate",
        "time per output token (ms)",
    ):
        assert words in page.text
    assert page.text.count("speed-up (times plain decoding)") == 3
    assert "plain decoding wins from batch 64" in page.text.replace("  ", " ")


def test_a_plot_without_figures_is_left_out() -> None:
    made = plan()
    unknown = replace(made, methods=(MethodPlan("draft_target", "draft"), *made.methods[1:]))
    assert [each.title for each in plots(made)] == TITLES
    assert [each.title for each in plots(unknown)] == TITLES[1:]
    assert [each.title for each in plots(replace(unknown, assumed=(), methods=unknown.methods[:1]))] == []
    single = replace(made.own, points=points(lengths=(4,)))
    assert [each.title for each in plots(replace(made, methods=(single,)))] == TITLES[1:]


@pytest.mark.parametrize(
    ("made", "shade", "words"),
    [
        (plan(), "good", "It pays"),
        (plan(methods=(replace(plan().own, points=points(0.03)),)), "open", "Plain decoding wins"),
        (plan(methods=(replace(plan().own, points=(point(1, 4, speed_up_interval=(2.5, 2.5)),)),)), "open", "assumed"),
        (plan(methods=(MethodPlan("draft_target", "draft"),)), "open", "Pays at batch 1 above 0.06"),
        (plan(methods=(replace(plan().own, refused="no engine"),)), "bad", "Refused: no engine."),
        (
            plan(memory=replace(plan().memory, problem="12 GB are missing", max_batch=0), nearest="batch 4"),
            "bad",
            "do not fit: 12 GB are missing. No batch fits.",
        ),
        (plan("none", methods=(plan().methods[1],), schedule={}), "none", "nothing is proposed"),
        (
            plan(methods=(replace(plan().own, points=(), refused="no"),), assumed=()),
            "bad",
            "Nothing is known of the speed",
        ),
    ],
)
def test_the_banner_has_the_colour_of_the_answer(made: Plan, shade: str, words: str) -> None:
    text = to_html(made)
    assert f'<div class="banner {shade}"' in text
    assert words in Page(text).text and made.headline in Page(text).text


def test_gpus_that_hold_the_same_are_one_bar() -> None:
    made = plan()
    assert list(memory_bars(made)) == ["GPUs 0 to 1"]
    other = tuple(replace(row, left_gb=row.left_gb - row.gpu) for row in made.memory.rows)
    assert list(memory_bars(replace(made, memory=replace(made.memory, rows=other)))) == ["GPU 0", "GPU 1"]
    host = replace(made, gpu="cpu", memory=replace(made.memory, rows=made.memory.rows[:2]))
    assert list(memory_bars(host)) == ["host"]
    assert "Processor of this machine" in to_html(host)


def test_all_methods_stand_in_the_table_with_their_state() -> None:
    text = Page(to_html(plan())).text
    rows = text[text.index("All methods") : text.index("The schedule")]
    for words in (
        "1B proposes (of the spec)",
        "token tree",
        "not measured",
        "lossy",
        "Refused: it needs heads; train some.",
    ):
        assert words in rows


def test_the_schedule_is_shown_for_every_server() -> None:
    text = Page(to_html(plan())).text
    assert "5 up to 4, 4 up to 8, 3 up to 16, 1 up to 32, none beyond" in text
    for words in ("draft_length_schedule", "draft_len_schedule", "max_concurrency", "num_speculative_tokens_per_batch"):
        assert words in text
    assert "The schedule" not in to_html(plan(schedule={}))


def test_names_are_text_and_not_markup() -> None:
    own = replace(plan().own, title='<b>"& own', notes=("a\x00b",))
    text = to_html(plan(name="<i>x", methods=(own,), warnings=("<script>",)))
    assert "<b>" not in text and "<i>" not in text and "<script" not in text and "\x00" not in text
    assert "&lt;b&gt;" in text and Page(text).labels


def test_points_that_do_not_fit_are_hollow() -> None:
    def hollow(made: Plan) -> int:
        (plot,) = [each for each in plots(made) if each.title == TITLES[1]]
        return plot.images[0].count("fill: #ffffff; stroke: #1f5f9c")

    own = plan().own
    small = replace(own, points=tuple(point(batch, 4, fits=batch < 16) for batch in BATCHES))
    assert hollow(plan(methods=(small,))) - hollow(plan(methods=(replace(own, points=points(batches=(1, 2))),))) == 3


def test_without_matplotlib_there_is_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TrtspecError, match=r"matplotlib, which is not installed; pip install 'trtspec\[plots\]'"):
        to_html(plan())


def test_figures_are_short() -> None:
    assert [number(value) for value in (0.01234, 7.6543, 26.5, 99.96, 1612.4)] == [
        "0.0123",
        "7.65",
        "26.5",
        "100",
        "1,612",
    ]
    assert (between((1.0, 1.0)), between((1.0, 2.0), " (%s)")) == ("", " (1.00 to 2.00)")
