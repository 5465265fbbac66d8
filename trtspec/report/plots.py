"""Plots as SVG elements that stand in a page: fonts are the reader's, and the same figures give the same bytes.

Knows matplotlib and the colours of the pages. Does not know what is drawn.
"""

from __future__ import annotations

import html
import importlib.util
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT, GRID, BAND = "#22313f", "#55636f", "#e6ebef", "#dfe6ec"
# One for each curve of a plot, with its marker: told apart in grey and by the colour-blind too.
COLOURS = ("#1f5f9c", "#c2571a", "#1e8449", "#7b4fa3", "#b03a5b", "#17808a", "#7a5c2e", "#55636f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
SMALL, WIDE = (3.9, 2.4), (5.2, 3.4)  # inches


@dataclass(frozen=True)
class Plot:
    """One figure of a page.

    Attributes:
        title: what it is about, in a few words.
        caption: what it shows, and how to read it.
        images: SVG elements, side by side where there is room.
    """

    title: str
    caption: str
    images: tuple[str, ...]


def require_matplotlib(where: str) -> None:
    """Say that plots cannot be drawn, before anything is run for them.

    Args:
        where: the option that asks for a page.

    Raises:
        TrtspecError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise TrtspecError(
            "the page's plots need matplotlib, which is not installed",
            where=where,
            fix="pip install 'trtspec[plots]', or leave the page out",
        )


def svg(label: str, prefix: str, draw: Callable[[Axes], None], size: tuple[float, float] = WIDE) -> str:
    """An SVG element with one plot.

    Args:
        label: what is seen, in words, for those who do not see it.
        prefix: what its ids begin with, another one for each plot of a page.
        draw: draws into the axes; names both of them.
        size: width and height in inches.

    Raises:
        TrtspecError: matplotlib is not installed.
    """
    require_matplotlib("page")
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=INK)
    axes.set_axisbelow(True)
    axes.grid(True, color=GRID, lw=0.7)
    draw(axes)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trtspec"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    element = text.getvalue()
    element = re.sub(r"\s*<metadata>.*?</metadata>", "", element[element.index("<svg") :], flags=re.DOTALL)
    element = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{prefix}", element)
    return element.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def name_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Title and what the axes are, units included."""
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)


def legend_below(axes: Axes, columns: int = 3) -> None:
    """The names of the curves below the plot, where they hide nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure = axes.get_figure()
    if handles and figure is not None:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
