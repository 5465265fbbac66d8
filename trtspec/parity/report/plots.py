"""The plots of a report's page, as SVG text. Knows the series that checks leave in `Check.data`.

A check without a plot has no series, or none that could mislead: too few tokens draw nothing, and neither do answers
that are the reference's to the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from trtspec.parity.result import Check
from trtspec.report.plots import BAND, INK, SMALL, Plot, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ORDERS = {
    "by id": "order of ids",
    "by probability": "most probable first",
    "by odds": "most preferred by the draft first",
}
_COUNTS = "first tokens, prompt "
_BAR, _BAD = "#4a7fb0", "#c0392b"
_FEWEST = 40  # tokens in a histogram that can be read
_MOST = 12  # bars that can be labelled one by one
_WIDE = (5.0, 2.5)  # inches


def plots(check: Check, settings: Mapping[str, Any], prefix: str = "") -> Iterator[Plot]:
    """Each plot that the check has series for.

    Args:
        check: the check.
        settings: those of the report.
        prefix: what the ids inside the SVG begin with, another one for each check of a page.

    Raises:
        TrtspecError: matplotlib is not installed.
    """
    data, numbers = check.data, count(1)

    def image(label: str, size: tuple[float, float], draw: Callable[..., None], *given: Any) -> str:
        return svg(label, f"{prefix}p{next(numbers)}-", lambda axes: draw(axes, *given), size)

    if histograms := [name for name in data if _is_histogram(name) and sum(data[name]) >= _FEWEST]:
        yield Plot(
            "Distribution",
            "Transforms of the emitted tokens. If the subject samples from the reference, all bars of a histogram are "
            "as high as the line, up to chance. Bars outside the band are red: about one in 100 of a right subject, "
            "so a few mean nothing, and the verdict comes from the tests.",
            tuple(image(name, SMALL, _draw_histogram, name, data[name]) for name in histograms),
        )
    if draws := {name: bins for name, bins in data.items() if name.startswith(_COUNTS) and bins}:
        yield Plot(
            "First tokens",
            "How often the first tokens came (bars), and how often the reference lets them come (lines, with the "
            "range of 99 of 100 right subjects). The most probable token is on the left, all rare ones together on "
            "the right.",
            tuple(image(name, SMALL, _draw_counts, name, bins) for name, bins in draws.items()),
        )
    regrets, tolerance = data.get("regrets", ()), settings.get("tolerance")
    if others := sum(regret > 0 for row in regrets for regret in row):
        yield Plot(
            "Regrets",
            f"Regret of the {others} of {sum(map(len, regrets))} tokens that are not the reference's own choice: its "
            "largest logit minus its logit for the emitted token. Below the tolerance rounding decided (a tie); above "
            "it the token is wrong.",
            (image("regrets", _WIDE, _draw_regrets, regrets, tolerance),),
        )
    if places := data.get("accepted_per_place"):
        yield Plot(
            "Tokens a pass",
            "How many tokens the passes of the target emitted, greedily: each bar is the share of passes with at "
            "least so many.",
            (image("tokens a pass", _WIDE, _draw_survival, places),),
        )
    if rows := data.get("acceptance by place"):
        yield Plot(
            "Acceptance",
            "How often a draft token was accepted where those before it were, by its place in the pass, when sampling "
            "(with 95 % confidence).",
            (image("acceptance", _WIDE, _draw_acceptance, rows),),
        )


def _is_histogram(name: str) -> bool:
    return name.split(", ")[0] in _ORDERS


def _draw_histogram(axes: Axes, name: str, counts: Sequence[int]) -> None:
    from scipy import stats

    order, _, group = name.partition(", ")
    bins, total = len(counts), sum(counts)
    low, high = stats.binom.interval(0.99, total, 1 / bins)
    axes.axhspan(low, high, color=BAND, zorder=0)
    axes.axhline(total / bins, color=INK, lw=0.8, ls=":")
    colours = [_BAR if low <= num <= high else _BAD for num in counts]
    axes.bar([(i + 0.5) / bins for i in range(bins)], counts, width=0.92 / bins, color=colours)
    axes.set_title(f"{group} ({total})", fontsize=9, color=INK)
    axes.set_xlabel(f"transform, {_ORDERS[order]}", fontsize=8)
    axes.set_ylabel("tokens", fontsize=8)
    axes.set_xlim(0, 1)


def _draw_counts(axes: Axes, name: str, bins: Sequence[Sequence[float]]) -> None:
    """Each bin is an observed and an expected number."""
    from scipy import stats

    total = sum(observed for observed, _ in bins)
    for place, (observed, expected) in enumerate(bins):
        low, high = stats.binom.interval(0.99, total, min(1.0, expected / total))
        axes.bar(place, observed, width=0.8, color=_BAR if low <= observed <= high else _BAD)
        axes.errorbar(place, expected, xerr=0.4, color=INK, lw=1)
        axes.errorbar(place, expected, yerr=[[expected - low], [high - expected]], color=INK, lw=1, capsize=2)
    axes.set_title(f"prompt {name.removeprefix(_COUNTS)} ({total:.0f} answers)", fontsize=9, color=INK)
    axes.set_xlabel("first token, most probable first", fontsize=8)
    axes.set_ylabel("answers", fontsize=8)
    axes.set_xticks([])


def _draw_regrets(axes: Axes, regrets: Sequence[Sequence[float]], tolerance: float | None) -> None:
    limit = float("inf") if tolerance is None else tolerance
    wrong = [(i, regret) for row in regrets for i, regret in enumerate(row) if regret > 0]
    for marker, colour, kind, points in (
        ("o", _BAR, "tie", [(i, regret) for i, regret in wrong if regret <= limit]),
        ("x", _BAD, "wrong token", [(i, regret) for i, regret in wrong if regret > limit]),
    ):
        if points:
            axes.plot(*zip(*points, strict=True), marker, ms=5, color=colour, label=f"{kind} ({len(points)})")
    sizes = [regret for _, regret in wrong]
    if tolerance is not None:
        axes.axhline(tolerance, color=INK, lw=1, ls="--", label=f"tolerance {tolerance:g}")
        sizes.append(tolerance)
    axes.set_xlim(-1, max(map(len, regrets)))
    axes.set_yscale("log")
    axes.set_ylim(min(sizes) / 3, max(sizes) * 3)
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.minorticks_off()
    axes.set_xlabel("position in the answer, from 0", fontsize=8)
    axes.set_ylabel("regret in logits", fontsize=8)
    axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3)


def _draw_survival(axes: Axes, counts: Sequence[int]) -> None:
    _draw_shares(axes, [(place, num / counts[0], "") for place, num in enumerate(counts, 1)])
    axes.set_xlabel("tokens emitted by a pass, at least", fontsize=8)
    axes.set_ylabel(f"share of {counts[0]} passes", fontsize=8)


def _draw_acceptance(axes: Axes, rows: Sequence[Sequence[float]]) -> None:
    for place, num, share in rows:
        error = 1.96 * (share * (1 - share) / max(1, num)) ** 0.5
        ends = [[min(error, share)], [min(error, 1 - share)]]
        axes.errorbar(place + 1.25, share, yerr=ends, color=INK, lw=1, capsize=2)
    _draw_shares(axes, [(int(place) + 1, share, f" of {num:.0f}") for place, num, share in rows])
    axes.set_xlabel("draft token", fontsize=8)
    axes.set_ylabel("accepted", fontsize=8)


def _draw_shares(axes: Axes, bars: Sequence[tuple[int, float, str]]) -> None:
    """Bars of shares of 1 at their places, with labels where there is room for them."""
    places = [place for place, _, _ in bars]
    axes.bar(places, [share for _, share, _ in bars], color=_BAR, width=0.7)
    if len(bars) <= _MOST:
        for place, share, more in bars:
            axes.text(place - 0.05, share, f"{share:.0%}{more}", ha="center", va="bottom", fontsize=8, color=INK)
        axes.set_xticks(places)
    axes.set_ylim(0, 1.12)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
