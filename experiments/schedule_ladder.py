"""Tables and the picture of a ladder of schedules, from its rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mk.report.palette import PALE, SIMULATED
from mk.results.rows import Row

LABELS = ("round_robin", "row_owner", "configured", "greedy", "search")
BOUNDS = {"bytes_ms": "bytes", "zero_wait_ms": "zero wait", "busiest_ms": "busiest SM", "dependencies_ms": "chain"}


def ladder_table(rows: list[Row]) -> str:
    """A line a schedule: milliseconds, its bounds, and how far above the highest of them it is."""
    head = "".join(f"{name:>12}" for name in ("ms", *BOUNDS.values(), "gap"))
    lines = [f"{'schedule':14}{head}"]
    for label, row in zip(LABELS, rows, strict=True):
        least = [getattr(row, name) for name in BOUNDS]
        cells = "".join(f"{value:12.4f}" for value in (row.p50_ms, *least))
        lines.append(f"{label:14}{cells}{100 * (row.p50_ms or 0.0) / max(least) - 100:11.1f}%")
    return "\n".join(lines)


def regret_table(times: Mapping[str, Mapping[str, float]]) -> str:
    """times: routing -> schedule -> milliseconds. Beside each the regret to the best schedule for that routing."""
    lines = [f"{'routing':14}" + "".join(f"{label:>18}" for label in LABELS)]
    for routing, of in times.items():
        best = min(of.values())
        lines.append(f"{routing:14}" + "".join(f"{of[la]:9.3f} +{100 * (of[la] / best - 1):6.2f}%" for la in LABELS))
    return "\n".join(lines)


def draw_ladder(rows: list[Row], path: Path, title: str) -> None:
    """A panel a batch: a bar a schedule, and its bounds as lines across them."""
    batches = sorted({row.batch for row in rows})
    figure = Figure(figsize=(3.6 * len(batches) + 1.2, 3.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for axes, batch in zip(panels, batches, strict=True):
        mine = [row for row in rows if row.batch == batch]
        places = range(len(mine))
        axes.bar(places, [row.p50_ms for row in mine], color=PALE, width=0.7)
        for name, colour in SIMULATED.items():
            for place, row in zip(places, mine, strict=True):
                low, high = place - 0.35, place + 0.35
                label = BOUNDS[name] if place == 0 else None
                axes.plot([low, high], [getattr(row, name)] * 2, color=colour, linewidth=2, label=label)
        for place, row in zip(places, mine, strict=True):
            axes.annotate(f"{row.p50_ms:.3f}", (place, row.p50_ms or 0.0), ha="center", va="bottom", fontsize=7)
        axes.set_xticks(list(places), LABELS, fontsize=7, rotation=30)
        axes.set_title(f"batch {batch}", fontsize=9)
        axes.tick_params(axis="y", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("ms a step", fontsize=8)
    panels[-1].legend(fontsize=7, frameon=False, loc="lower right")
    figure.savefig(path)
