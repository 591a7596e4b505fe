"""Figures of comparisons: every plan beside the others, and the arms of an ablation with their intervals."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mk.report import palette
from mk.report.chart import ARM, BATCH, CONTEXT, PLAN, RATIOS, SHARE, TIMES, Chart, panels, point
from mk.report.kept_rows import Kept, newest, told_apart
from mk.results.rows import Row
from mk.results.step_figures import Ratio

MARKERS = {"static": "o", "work_stealing": "^"}


def charts(kept: Sequence[Kept]) -> Iterator[Chart]:
    plans = [of for of in kept if of.row.experiment == "plan_ablation" and of.row.clock is None]
    if plans:
        yield _plans(newest(plans, lambda row: (row.wave_order, row.placement, row.schedule, row.batch)))
    arms = [of for of in kept if of.row.arm is not None and of.row.experiment.endswith("_ablation")]
    compared = [of for of in arms if of.row.ratio_low is not None]
    for experiment in sorted({of.row.experiment for of in compared}):
        mine = [of for of in arms if of.row.experiment == experiment]
        comparisons = _last_of_each(mine)
        others = told_apart([_base(rows) for rows in comparisons])
        for number, (rows, other) in enumerate(zip(comparisons, others, strict=True), start=1):
            yield _arms(experiment + f"_{number}" * (len(comparisons) > 1), rows, other)


def _last_of_each(rows: Sequence[Kept]) -> list[list[Kept]]:
    """The runs, each the last that compared the same configurations."""
    runs: dict[str, list[Kept]] = {}
    for of in rows:
        runs.setdefault(of.run, []).append(of)
    last = {frozenset(of.row.config_hash for of in run): run for run in sorted(runs.values(), key=_ended)}
    return sorted(last.values(), key=_ended)


def _ended(run: Sequence[Kept]) -> str:
    return max(of.row.time for of in run)


def _base(run: Sequence[Kept]) -> Kept:
    """A row of the arm that the others are compared with; of any where it failed."""
    return next((of for of in run if of.row.ratio is None), run[0])


def _plans(rows: Sequence[Kept]) -> Chart:
    return Chart(
        "plans",
        f"Every plan: {len({_plan(of.row) for of in rows})} combinations of wave order, placement and schedule",
        "Time of a step, each plan run once; bars p10 to p90 of its steps. Dashed: the step's bytes at the card's "
        "nominal bandwidth. Wave orders are sorted by their fastest plan.",
        rows,
        (BATCH, *PLAN, *TIMES, *SHARE),
        lambda figure: _draw_plans(figure, rows),
        (10.0, 4.2),
    )


def _plan(row: Row) -> tuple[str, str, str]:
    return row.wave_order, row.placement, row.schedule


def _draw_plans(figure: Figure, rows: Sequence[Kept]) -> None:
    batches = sorted({of.row.batch for of in rows})
    every = panels(figure, *(f"batch {batch}" for batch in batches))
    for axes, batch in zip(every, batches, strict=True):
        mine = [of.row for of in rows if of.row.batch == batch]
        times = {order: min(row.p50_ms or 0 for row in mine if row.wave_order == order) for order in _orders(mine)}
        order_of = {order: place for place, order in enumerate(sorted(times, key=times.__getitem__))}
        for row in mine:
            lane = list(palette.PLACEMENT).index(row.placement) - 1
            place = order_of[row.wave_order] + 0.2 * lane
            colour = palette.colour(palette.PLACEMENT, row.placement)
            point(axes, place, row.p50_ms, row.p10_ms, row.p90_ms, colour, marker=MARKERS[row.schedule])
        floors = [row.p50_ms * row.pct_nominal / 100 for row in mine if row.p50_ms and row.pct_nominal]
        if floors:
            axes.axvline(min(floors), color=palette.BOUND["nominal"], linestyle="--", linewidth=1.2)
        axes.set_yticks(range(len(order_of)), list(order_of))
        axes.invert_yaxis()
        axes.set_xlabel("ms a step")
        axes.set_xlim(left=0)
    looks = [(str(name), colour, "s") for name, colour in palette.PLACEMENT.items()]
    looks += [(name, palette.GREY, marker) for name, marker in MARKERS.items()]
    keys = [Line2D([], [], color=colour, marker=mark, linestyle="", label=name) for name, colour, mark in looks]
    keys.append(Line2D([], [], color=palette.BOUND["nominal"], linestyle="--", label="floor, nominal"))
    figure.legend(handles=keys, loc="outside lower center", ncols=6, fontsize=8, frameon=False)


def _orders(rows: Sequence[Row]) -> set[str]:
    return {row.wave_order for row in rows}


def _arms(name: str, rows: Sequence[Kept], other: str) -> Chart:
    """other: what the first arm has otherwise than those of the experiment's other comparisons."""
    base = _short(_base(rows).row.arm or "") + f", {other}" * bool(other)
    count = len({of.row.arm for of in rows if of.row.ratio is not None})
    return Chart(
        name,
        f"{rows[0].row.experiment}: each arm beside “{base}”",
        "Ratio of step times over blocks that ran in turn, with its 95 % interval; left of 1 is faster. Grey: no "
        "detectable difference (the interval holds 1, or the effect is under 0.3 %). “(again)”: the first arm itself.",
        rows,
        (BATCH, CONTEXT, ARM, TIMES[0], *RATIOS),
        lambda figure: _draw_arms(figure, [of.row for of in rows]),
        (10.0, 1.4 + 0.24 * count),
    )


def _draw_arms(figure: Figure, rows: Sequence[Row]) -> None:
    batches = sorted({row.batch for row in rows})
    names = list(dict.fromkeys(row.arm or "" for row in rows if row.ratio is not None))
    for number, (axes, batch) in enumerate(zip(panels(figure, *(f"batch {b}" for b in batches)), batches, strict=True)):
        axes.axvline(1, color=palette.BLACK, linewidth=0.8)
        for row in rows:
            if row.batch != batch or row.ratio is None or row.ratio_low is None or row.ratio_high is None:
                continue
            differs = Ratio(row.ratio, row.ratio_low, row.ratio_high).detectable
            colour = palette.VERDICT["differs" if differs else "no difference"]
            place = names.index(row.arm or "")
            marker = "D" if "(again)" in (row.arm or "") else "o"
            point(axes, place, row.ratio, row.ratio_low, row.ratio_high, colour, marker=marker)
        axes.set_yticks(range(len(names)), map(_short, names) if number == 0 else [""] * len(names))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel("ratio of times")


def _short(arm: str) -> str:
    """Without `engine.` and the folders of files."""
    return re.sub(r"=\S*/", "=", arm.replace("engine.", ""))
