"""A cell of the report beside the row that it says it is of, read from the row's file without the report's own code;
and charts of runs, drawn and laid out."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mk.config import hash_of
from mk.report.chart import Chart
from mk.report.kept_rows import Kept, read_kept
from mk.report.page import charts, missing
from mk.results.sources import ROOT

RESULTS = ROOT / "results"


@functools.cache
def row_at(place: str) -> dict[str, Any]:
    """The JSON object at `<card>/<run>/rows.jsonl:<line>`."""
    name, _, line = place.rpartition(":")
    found: dict[str, Any] = json.loads((RESULTS / name).read_text().splitlines()[int(line) - 1])
    return found


@functools.cache
def configs_beside(folder: Path) -> dict[str, dict[str, Any]]:
    values = [yaml.safe_load(path.read_text()) for path in [folder / "config.yaml", *folder.glob("configs/*.yaml")]]
    return {hash_of(of): of for of in values}


def value_at(place: str, field: str) -> Any:
    """Of the row, of a dictionary in it where the field is `name/key`, or where it is a dotted key, of its
    configuration."""
    row = row_at(place)
    name, _, key = field.partition("/")
    if key:
        return row.get(name, {}).get(key)
    if "." not in field:
        return row.get(field)
    value: Any = configs_beside((RESULTS / place.rpartition(":")[0]).parent)[row["config_hash"]]
    for key in field.split("."):
        value = value[key] if value else None
    return value


def cell_is_right(place: str, field: str, unit: float, shown: str) -> bool:
    """Whether a cell shows the row's value, a number to the digits that it has."""
    value = value_at(place, field)
    if value is None:
        return shown == ""
    if isinstance(value, list):
        counts = [int(text.replace(",", "")) for text in shown.split(", ")]
        return counts == value or (counts == [value[0]] and set(value) == set(counts))
    if isinstance(value, str):
        return shown == value
    digits = len(shown.partition(".")[2])
    return abs(value / unit - float(shown.replace(",", ""))) <= 0.5 * 10.0**-digits * (1 + 1e-9)


def assert_labelled(figure: Figure) -> None:
    """Every panel has a title, and every axis its unit, or ticks that are words."""
    for axes in figure.axes:
        assert axes.get_title(loc="left")
        for axis in (axes.xaxis, axes.yaxis):
            ticks = [tick.get_text() for tick in axis.get_ticklabels()]
            words = any(re.search(r"[a-z]", text) for text in ticks) or not any(ticks)
            assert axis.label.get_text() or words, (axes.get_title(loc="left"), ticks)


def only(root: Path, *names: str) -> list[Chart]:
    """The charts of the runs in `root`, whose names these are. Nothing of them is called not drawn."""
    kept = read_kept(root)
    found = charts(kept)
    assert [chart.name for chart in found] == list(names)
    assert not any(line.startswith("No figure is of") for line in missing(kept, found))
    return found


def drawn(chart: Chart) -> list[Axes]:
    """Its panels, laid out."""
    figure = Figure(figsize=chart.size, layout="constrained")
    chart.draw(figure)
    figure.draw_without_rendering()
    assert_labelled(figure)
    assert chart.svg() == chart.svg()  # no date and no random id in it: committed files are compared by their text
    return figure.axes


def edited(chart: Chart, fields: Callable[[int, Kept], dict[str, Any]]) -> Chart:
    """The chart of its rows with other fields, by their number."""
    rows = [
        dataclasses.replace(of, row=dataclasses.replace(of.row, **fields(n, of))) for n, of in enumerate(chart.rows)
    ]
    return next(other for other in charts(rows) if other.name == chart.name)


def ticks(axes: Axes, axis: str = "y") -> list[str]:
    return [tick.get_text() for tick in getattr(axes, f"get_{axis}ticklabels")()]


def widths(axes: Axes) -> list[float]:
    return [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]
