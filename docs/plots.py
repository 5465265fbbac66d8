"""The handbook's pictures, drawn from the project's own formulas (`trtspec.plan.speedup`) while it is built.

Knows what is drawn, and the figures of models that come with the project. Does not measure.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.plan.speedup import best_length, expected_tokens, needed_acceptance, speed_up
from trtspec.report.plots import COLOURS, INK, MARKERS, legend_below, name_axes, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ALPHAS = (0.3, 0.5, 0.7, 0.9)
_LENGTHS = range(0, 13)
_MOST = 16
DRAFT = Path(__file__).parent.parent / "configs/models/smollm2-135m-draft/acceptance.json"


def _tokens(axes: Axes) -> None:
    for alpha, colour, marker in zip(_ALPHAS, COLOURS, MARKERS, strict=False):
        curve = [expected_tokens(alpha, length) for length in _LENGTHS]
        axes.plot(_LENGTHS, curve, color=colour, marker=marker, ms=4, label=f"acceptance {alpha:g}")
    name_axes(axes, "what a target pass gives", "draft tokens a cycle", "tokens per target pass")
    legend_below(axes, columns=2)


def _lengths(axes: Axes, alpha: float) -> None:
    for cost, colour in zip((0.02, 0.1, 0.3), COLOURS, strict=False):
        curve = [speed_up(expected_tokens(alpha, length), length, cost) for length in _LENGTHS]
        axes.plot(_LENGTHS, curve, color=colour, lw=1.5, label=f"draft step {100 * cost:g} % of a target step")
        best = max(_LENGTHS, key=curve.__getitem__)
        axes.plot(best, curve[best], "o", color=colour, ms=6)
    axes.axhline(1.0, color=INK, lw=1)
    name_axes(axes, f"acceptance {alpha:g}; a dot is the best length", "draft tokens a cycle", "times plain decoding")
    legend_below(axes, columns=1)


def _acceptance(axes: Axes) -> None:
    alphas = [step / 50 for step in range(51)]
    for verify, colour in zip((1.0, 1.5, 2.5), COLOURS, strict=False):
        # An extra draft token costs a part of a pass: nothing at batch 1, more where arithmetic is the limit.
        extra = (verify - 1) / 4

        def at(alpha: float, length: int, extra: float = extra) -> float:
            return speed_up(expected_tokens(alpha, length), length, 0.05, 1 + extra * length)

        curve = [best_length(partial(at, alpha), _MOST)[1] for alpha in alphas]
        axes.plot(alphas, curve, color=colour, lw=1.5, label=f"verifying 4 tokens takes {verify:g} plain passes")
        needed = needed_acceptance([length * 0.05 + 1 + extra * length for length in range(1, _MOST + 1)])
        if needed is not None:
            axes.plot(needed, 1.0, "x", color=colour, ms=8, mew=2)
    name_axes(axes, "a draft step costs 5 % of a target step", "acceptance of a draft token", "times plain decoding")
    legend_below(axes, columns=1)


def _measured(axes: Axes) -> None:
    shown = {"all": "all prompts", "structured": "structured text", "code": "code", "summarizing": "summaries"}
    figures = json.loads(DRAFT.read_text())["modes"]["greedy"]
    for (category, words), colour, marker in zip(shown.items(), COLOURS, MARKERS, strict=False):
        lengths = figures[category]["acceptance_length"]
        x, y = [0, *map(int, lengths)], [1.0, *lengths.values()]
        axes.plot(x, y, color=colour, marker=marker, ms=4, label=words)
    name_axes(axes, "SmolLM2-135M with the shipped draft, greedy", "draft tokens a cycle", "tokens per target pass")
    legend_below(axes, columns=2)


PICTURES: dict[str, tuple[str, Callable[[Axes], None]]] = {
    "img/tokens.svg": ("Tokens per target pass over draft length, for four acceptance rates.", _tokens),
    "img/lengths.svg": ("Speed-up over draft length, for three costs of a draft step.", partial(_lengths, alpha=0.7)),
    "img/acceptance.svg": ("Speed-up over acceptance, for three costs of verification.", _acceptance),
    "img/measured.svg": ("Measured tokens per target pass over draft length, by kind of prompt.", _measured),
}


def picture(name: str) -> str:
    """One of `PICTURES` as an SVG file's text."""
    label, draw = PICTURES[name]
    element = svg(label, Path(name).stem + "-", draw)
    return element if "xmlns=" in element else element.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)


def on_files(files: Any, config: Any) -> Any:
    """Hook of mkdocs: add the pictures to the files of the site."""
    from mkdocs.structure.files import File

    for name in PICTURES:
        files.append(File.generated(config, name, content=picture(name)))
    return files
