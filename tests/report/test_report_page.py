"""The look that pages share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from trtspec import __version__
from trtspec.errors import TrtspecError
from trtspec.report.page import printable, render
from trtspec.report.plots import Plot, legend_below, name_axes, require_matplotlib, svg

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports


def draw(axes: object) -> None:
    axes.plot([0, 1], [0, 1], label="a curve")  # type: ignore[attr-defined]
    name_axes(axes, "a title", "time (ms)", "share (%)")  # type: ignore[arg-type]
    legend_below(axes)  # type: ignore[arg-type]


def test_a_page_extends_the_base_and_escapes(tmp_path: Path) -> None:
    template = tmp_path / "some.html.j2"
    template.write_text(
        '{% extends "base.html.j2" %}{% from "macros.html.j2" import figure %}'
        "{% block title %}T{% endblock %}{% block content %}{{ words }}{{ figure(plot) }}{% endblock %}"
    )
    plot = Plot("a plot", "how to <read> it", ("<svg>1</svg>", "<svg>2</svg>"))
    text = render(template, words="<i>\x07", plot=plot)
    assert text.startswith("<!doctype html>") and f"trtspec {__version__}" in text
    assert "&lt;i&gt;\ufffd" in text and "<svg>1</svg>" in text and "how to &lt;read&gt; it" in text
    with pytest.raises(UndefinedError):
        render(template, plot=plot)


def test_a_plot_is_an_element_with_ids_of_its_own() -> None:
    first, again, other = (svg('a "curve"', prefix, draw) for prefix in ("a-", "a-", "b-"))
    assert first == again and first.startswith('<svg role="img" aria-label="a &quot;curve&quot;"')
    ids = [set(re.findall(r'id="([^"]*)"', text)) for text in (first, other)]
    assert all(name.startswith("a-") for name in ids[0]) and not ids[0] & ids[1]
    used = set(re.findall(r'(?:href="#|url\(#)([^")]*)', first))
    assert used and used <= ids[0]
    for words in ("a title", "time (ms)", "share (%)", "a curve"):
        assert f">{words}</text>" in first


def test_matplotlib_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TrtspecError, match=r"^--html: .*pip install 'trtspec\[plots\]'"):
        require_matplotlib("--html")


def test_characters_that_steer_a_terminal_are_shown_as_such() -> None:
    assert printable("a\x1b[0m\n\u20ac") == "a\ufffd[0m\n\u20ac"
