"""The figure of every operation of a step alone, beside the same by torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from mk.report import palette
from mk.report.chart import BATCH, CONTEXT, ENGINE, RATIOS, Chart, Column, panels, point, spread
from mk.report.kept_rows import Kept, newest, with_common_keys
from mk.results.rows import Row

Lane = tuple[str, str | None]  # an operation, and how torch does it; None of the kernel
GAP = 0.5  # lanes between two operations


def charts(kept: Sequence[Kept]) -> Iterator[Chart]:
    alone = [of for of in kept if of.row.experiment == "op_bench" and of.row.clock is None and of.row.kernel]
    rows = newest(with_common_keys(alone), lambda row: (row.batch, row.kernel, row.engine, row.method))
    if rows:
        yield Chart(
            "operations",
            f"Every operation of a step alone, beside torch: {rows[0].row.context[0]:,} keys a row",
            "Time of one run, a layer's, in sweeps over all layers with nothing of theirs in the L2: medians, bars p10 "
            "to p90; a tick is the least that the bytes which it must read take at the card's nominal bandwidth. "
            "Hollow: torch does less than the kernel, and has no ratio. Operations that torch does in one stand first.",
            rows,
            (BATCH, CONTEXT, Column("kernel", "operation"), ENGINE, Column("method", "method"))
            + tuple(Column(f"{p}_ms", f"{p}, us", 2, 1e-3) for p in ("p50", "p10", "p90"))
            + (Column("kernel_bytes", "MB", 1, 1e6), Column("gb_s", "GB/s", 0))
            + (Column("pct_nominal", "% of nominal bandwidth", 1), *RATIOS),
            lambda figure: _draw(figure, rows),
            (10.0, 1.2 + 0.15 * max(_lanes([of.row for of in rows]).values())),
        )


def _lanes(rows: Sequence[Row]) -> dict[Lane, float]:
    """Where each stands from the top: what has a ratio first, torch's ways under the kernel's."""
    compared = {row.kernel for row in rows if row.ratio is not None}
    operations = list(dict.fromkeys(row.kernel or "" for row in rows))
    found: dict[Lane, float] = {}
    at = 0.0
    for operation in sorted(operations, key=lambda name: name not in compared):
        methods = [row.method for row in rows if row.kernel == operation]
        for method in sorted(set(methods), key=lambda method: (method is not None, methods.index(method))):
            found[operation, method] = at
            at += 1
        at += GAP
    return found


def _draw(figure: Figure, kept: Sequence[Kept]) -> None:
    rows = [of.row for of in kept]
    lanes = _lanes(rows)
    batches = sorted({row.batch for row in rows})
    for number, (axes, batch) in enumerate(zip(panels(figure, *(f"batch {b}" for b in batches)), batches, strict=True)):
        for of in (of for of in kept if of.row.batch == batch):
            row = of.row
            place, colour = lanes[row.kernel or "", row.method], palette.colour(palette.ENGINE, row.engine)
            p50, p10, p90 = (1e3 * ms for ms in spread(of))
            if row.pct_nominal is not None:
                least = p50 * row.pct_nominal / 100
                axes.plot([least, p50], [place] * 2, color=colour, linewidth=0.8)
                axes.plot(least, place, "|", color=palette.BOUND["nominal"], markersize=7)
            point(axes, place, p50, p10, p90, colour, hollow=row.engine == "torch" and row.ratio is None)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([m * 10.0**e for e in range(-2, 5) for m in (1, 2, 5)]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
        axes.set_xlabel("us")
        names = [operation if method is None else f"torch, {method}" for operation, method in lanes]
        axes.set_yticks(list(lanes.values()), names if number == 0 else [""] * len(lanes), fontsize=8)
        axes.set_ylim(max(lanes.values()) + 0.7, -0.7)
    looks = (
        ("the kernel", "cuda", False),
        ("torch, the same work", "torch", False),
        ("torch, less work", "torch", True),
    )
    keys = [
        Line2D([], [], color=(colour := palette.ENGINE[engine]), marker="o", linestyle="", label=label,
               markerfacecolor="white" if hollow else colour, markersize=5)
        for label, engine, hollow in looks
    ]  # fmt: skip
    tick = Line2D([], [], color=palette.BOUND["nominal"], marker="|", linestyle="", label="floor: its bytes, nominal")
    figure.legend(handles=[*keys, tick], loc="outside lower center", ncols=4, fontsize=8, frameon=False)
