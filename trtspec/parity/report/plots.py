"""The plots of a report's page, as SVG text. Knows the series that checks leave in `Check.data`.

A check without a plot has no series, or none that could mislead: too few tokens draw nothing.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError
from trtspec.parity.result import Check

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ORDERS = {
    "by id": "order of ids",
    "by probability": "most probable first",
    "by odds": "most preferred by the draft first",
}
_INK, _BAND, _BAR, _BAD = "#22313f", "#dfe6ec", "#4a7fb0", "#c0392b"
_FEWEST = 40  # tokens in a histogram that can be read


def plots(check: Check, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Caption and SVG of each plot that the check has series for."""
    data = check.data
    if histograms := [name for name in data if _histogram(name) and sum(data[name]) >= _FEWEST]:
        yield (
            "Transforms of the emitted tokens. If the subject samples from the reference, every bar is as high as the "
            "others up to chance; 99 of 100 bars stay within the band.",
            _figure(len(histograms), lambda axes: _draw_histograms(axes, data, histograms)),
        )
    if regrets := data.get("regrets"):
        caption = "Regret of every token: the reference's largest logit minus its logit for the emitted token."
        yield caption, _figure(1, lambda axes: _draw_regrets(axes[0], data, regrets, settings.get("tolerance")))
    if counts := data.get("accepted_per_place"):
        caption = "How often a pass of the target emitted more than so many tokens, greedily."
        yield caption, _figure(1, lambda axes: _draw_survival(axes[0], counts))
    if rows := data.get("acceptance by place"):
        caption = "How often the answer goes on within the same pass, by place in the pass, when sampling."
        yield caption, _figure(1, lambda axes: _draw_acceptance(axes[0], rows))


def _histogram(name: str) -> bool:
    return name.split(", ")[0] in _ORDERS


def _figure(num: int, draw: Callable[[list[Axes]], None]) -> str:
    """One figure of `num` axes, three in a row."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise TrtspecError(
            "the page's plots need matplotlib, which is not installed",
            where="--report",
            fix="pip install 'trtspec[plots]', or write .json or .xml",
        ) from error
    columns = min(3, num)
    rows = -(-num // columns)
    figure = Figure(figsize=(3.9 * columns if num > 1 else 7.8, 2.3 * rows if num > 1 else 2.9), layout="constrained")
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(num)]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8, colors=_INK)
    draw(axes)
    text = io.StringIO()
    # Fonts stay the reader's, and the same report gives the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "parity"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _draw_histograms(axes: Sequence[Axes], data: Mapping[str, Any], names: Sequence[str]) -> None:
    from scipy import stats

    for each, name in zip(axes, names, strict=True):
        order, _, group = name.partition(", ")
        counts, total = data[name], sum(data[name])
        bins = len(counts)
        low, high = stats.binom.interval(0.99, total, 1 / bins)
        outside = [_BAD if not low <= count <= high else _BAR for count in counts]
        each.axhspan(low, high, color=_BAND, zorder=0)
        each.bar([(i + 0.5) / bins for i in range(bins)], counts, width=0.92 / bins, color=outside)
        each.set_title(f"{group} ({total})", fontsize=9, color=_INK)
        each.set_xlabel(f"transform, {_ORDERS[order]}", fontsize=8)
        each.set_ylabel("tokens", fontsize=8)
        each.set_xlim(0, 1)


def _draw_regrets(axes: Axes, data: Mapping[str, Any], regrets: Sequence[Sequence[float]], tolerance: Any) -> None:
    for number, row in zip(data.get("prompts", range(len(regrets))), regrets, strict=False):
        wrong = [(i, regret) for i, regret in enumerate(row) if regret > 0]
        axes.plot([i for i, _ in wrong], [r for _, r in wrong], "o", ms=4, label=f"prompt {number}", alpha=0.8)
    longest = max((len(row) for row in regrets), default=1)
    if tolerance is not None:
        axes.axhline(tolerance, color=_BAD, lw=1, ls="--")
        axes.text(longest, tolerance, "tolerance ", fontsize=8, color=_BAD, ha="right", va="bottom")
    exact = sum(regret <= 0 for row in regrets for regret in row)
    total = sum(len(row) for row in regrets)
    axes.set_title(f"{exact} of {total} tokens are the reference's own choice (regret 0, not drawn)", fontsize=9)
    axes.set_xlim(-1, longest)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("position in the answer", fontsize=8)
    axes.set_ylabel("regret in logits", fontsize=8)
    if any(regret > 0 for row in regrets for regret in row):
        axes.legend(fontsize=7, frameon=False, ncols=2)


def _draw_survival(axes: Axes, counts: Sequence[int]) -> None:
    shares = [count / counts[0] for count in counts]
    axes.bar(range(1, len(counts) + 1), shares, color=_BAR, width=0.7)
    for i, share in enumerate(shares, 1):
        axes.text(i, share, f"{share:.0%}", ha="center", va="bottom", fontsize=8, color=_INK)
    axes.set_ylim(0, 1.12)
    axes.set_xticks(range(1, len(counts) + 1))
    axes.set_xlabel("tokens emitted by a pass, at least", fontsize=8)
    axes.set_ylabel(f"share of {counts[0]} passes", fontsize=8)


def _draw_acceptance(axes: Axes, rows: Sequence[Sequence[float]]) -> None:
    for place, num, share in rows:
        error = 1.96 * (share * (1 - share) / max(1, num)) ** 0.5
        axes.bar(place + 1, share, color=_BAR, width=0.7)
        axes.errorbar(place + 1, share, yerr=error, color=_INK, lw=1, capsize=3)
        axes.text(place + 1.08, share, f" {share:.0%} of {num:.0f}", ha="left", va="bottom", fontsize=8, color=_INK)
    axes.set_ylim(0, 1.12)
    axes.set_xticks([int(row[0]) + 1 for row in rows])
    axes.set_xlabel("draft token", fontsize=8)
    axes.set_ylabel("accepted, if those before were", fontsize=8)
