"""What a figure is: rows, a table of them and a drawing; and how a panel, a line with intervals and a cell look."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from mk.report import palette
from mk.report.kept_rows import Kept


@dataclass(frozen=True, slots=True)
class Column:
    """Of a table: a field of `Row`, of one that is a dictionary the value of `key`, or with `leaf` a key of the
    configuration."""

    field: str
    head: str  # with its unit
    digits: int | None = None  # after the point, of a number; None: as it is
    unit: float = 1.0  # that the number is divided by
    leaf: bool = False
    key: str | None = None

    @property
    def source(self) -> str:
        """Where the value stands."""
        return self.field if self.key is None else f"{self.field}/{self.key}"

    def value(self, kept: Kept) -> Any:
        value = kept.leaf(self.field) if self.leaf else getattr(kept.row, self.field)
        return value if self.key is None else (value or {}).get(self.key)

    def text(self, kept: Kept) -> str:
        value = self.value(kept)
        if value is None:
            return ""
        if isinstance(value, list):  # contexts, of which most batches have one for all
            return f"{value[0]:,}" if len(set(value)) == 1 else ", ".join(map(str, value))
        return str(value) if self.digits is None else f"{value / self.unit:,.{self.digits}f}"


BATCH, CONTEXT = Column("batch", "batch"), Column("context", "keys a row")
ENGINE, BOUND, ARM = Column("engine", "engine"), Column("bound", "bound"), Column("arm", "arm")
TIMES = (Column("p50_ms", "p50, ms", 3), Column("p10_ms", "p10, ms", 3), Column("p90_ms", "p90, ms", 3))
RATIOS = (Column("ratio", "ratio", 4), Column("ratio_low", "95 % from", 4), Column("ratio_high", "to", 4))
PLAN = (Column("wave_order", "wave order"), Column("placement", "placement"), Column("schedule", "schedule"))
SHARE = (
    Column("bytes_per_step", "GB a step", 2, 1e9),
    Column("pct_nominal", "% of nominal bandwidth", 1),
    Column("distinct_experts", "experts a layer", 1),
)


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure. `draw` gets an empty one of `size` inches."""

    name: str  # of its file and its place on the page
    title: str
    says: str  # how to read it, and what no row gives
    rows: Sequence[Kept]
    columns: Sequence[Column]
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (9.0, 3.6)

    @property
    def shown(self) -> list[Column]:
        """Columns that any row fills."""
        return [column for column in self.columns if any(column.text(of) for of in self.rows)]

    @property
    def drawn_from(self) -> str:
        """The first 16 digits of a sha256 of its rows with their places."""
        text = "".join(sorted(kept.place + kept.row.line() for kept in self.rows))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def svg(self) -> str:
        """The drawing as an SVG element with text as text: the same rows give the same characters."""
        style: Any = {"svg.hashsalt": self.name, "svg.fonttype": "none", "font.size": 9.0, "axes.titlesize": 10.0}
        with matplotlib.rc_context(style):
            figure = Figure(figsize=self.size, layout="constrained")
            FigureCanvasSVG(figure)
            self.draw(figure)
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        text = file.getvalue()
        return "\n".join(line.rstrip() for line in text[text.index("<svg") :].splitlines()) + "\n"


def panels(figure: Figure, *titles: str, down: bool = False, share: bool = False) -> list[Axes]:
    """Panels side by side, or one below the other. share: all have one horizontal axis, labelled at the last."""
    shape = (len(titles), 1) if down else (1, len(titles))
    row: list[Axes] = list(figure.subplots(*shape, squeeze=False, sharex=share).flat)
    for axes, title in zip(row, titles, strict=True):
        axes.set_title(title, loc="left")
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return row


def line(
    axes: Axes,
    points: Sequence[tuple[float, float, float, float]],
    colour: str,
    label: str,
    *,
    marker: str = "o",
    hollow: bool = False,
    style: str = "-",
) -> None:
    """points: (x, y, low, high) each; y from low to high is drawn as its interval."""
    points = sorted(points)
    x, y, low, high = zip(*points, strict=True)
    below = [max(0.0, at - lo) for at, lo in zip(y, low, strict=True)]
    above = [max(0.0, hi - at) for at, hi in zip(y, high, strict=True)]
    axes.errorbar(
        x,
        y,
        yerr=(below, above),
        fmt=marker + (style if len(points) > 1 else ""),
        color=colour,
        markerfacecolor="white" if hollow else colour,
        label=label,
        linewidth=1.5,
        markersize=5,
        elinewidth=1.2,
        capsize=2.5,
    )


def floor(axes: Axes, points: Sequence[tuple[float, float]], colour: str, label: str, style: str = "--") -> None:
    """A bound: (x, y) each."""
    x, y = zip(*sorted(set(points)), strict=True)
    axes.plot(x, y, style, color=colour, label=label, linewidth=1.2, marker="_" if len(x) == 1 else None)


def point(
    axes: Axes,
    place: float,
    x: float | None,
    low: float | None,
    high: float | None,
    colour: str,
    *,
    marker: str = "o",
    hollow: bool = False,
) -> None:
    """A figure with its interval on a lane of its own."""
    axes.plot([drawn(low), drawn(high)], [place] * 2, color=colour, linewidth=1.5)
    inside = "white" if hollow else colour
    axes.plot(drawn(x), place, marker, color=colour, markersize=5, markerfacecolor=inside)


def stacked(
    axes: Axes, names: Sequence[str], parts: Sequence[tuple[str, str, Sequence[float]]], least: float = 0.035
) -> None:
    """A horizontal bar for each of `names`. parts: (label, colour, length in each bar); lengths stand on those that
    are longer than that share of the longest bar."""
    longest = max(map(sum, zip(*(lengths for *_, lengths in parts), strict=True)))
    left = [0.0] * len(names)
    for label, colour, lengths in parts:
        axes.barh(range(len(names)), lengths, left=left, color=colour, label=label, height=0.65)
        for place, length in enumerate(lengths):
            if length > least * longest:
                at, text = left[place] + length / 2, f"{length:.1f}"
                axes.text(at, place, text, ha="center", va="center", fontsize=8, color=palette.ink(colour))
            left[place] += length
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def powers(axes: Axes, values: Sequence[float], name: str) -> None:
    """A logarithmic horizontal axis with a tick a value, in K from 1,024 on."""
    at: list[float] = []
    for value in sorted(set(values)):  # no label on top of another
        if not at or value > 1.3 * at[-1]:
            at.append(value)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(at))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:.0f}K" if x >= 1024 else f"{x:g}"))
    axes.set_xlabel(name)


def legend(axes: Axes, where: Literal["upper left", "lower right"]) -> None:
    axes.legend(fontsize=8, frameon=False, loc=where)


def legend_below(figure: Figure, axes: Axes, columns: int = 6) -> None:
    """The one of a panel, for all panels."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(len(labels), columns)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def drawn(value: float | None) -> float:
    """What is not there is not drawn."""
    return math.nan if value is None else value


def spread(kept: Kept) -> tuple[float, float, float]:
    """(p50, p10, p90) in ms; a row without the last two has no interval."""
    row = kept.row
    assert row.p50_ms is not None
    return row.p50_ms, row.p10_ms or row.p50_ms, row.p90_ms or row.p50_ms
