"""Figures of loaded servers, of runs on a CPU: heights, colours and names are the rows'."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from experiments import agent_trial, serving
from mk.compose import load_config
from mk.report import palette
from mk.report.chart import Chart
from mk.report.page import charts, missing
from mk.results.rows import Row
from tests import test_agent_replay, test_serving_load
from tests.report_rig import drawn, only, ticks
from tests.test_serving_load import SITE


def figures_of(axes: Axes) -> list[tuple[str, float, bool]]:
    """(colour, height, hollow) of each point."""
    points = [line for line in axes.lines if line.get_marker() == "o"]
    return [
        (to_hex(p.get_color()), float(p.get_ydata()[0]), p.get_markerfacecolor() == "white")  # type: ignore[arg-type]
        for p in points
    ]


def require_load(chart: Chart, rows: Sequence[Row]) -> None:
    """Both engines' bars and points are these rows', in their colours."""
    rate, first, between = drawn(chart)
    colours = [to_hex(palette.ENGINE[row.engine]) for row in rows]
    assert [(to_hex(bar.get_facecolor()), bar.get_height()) for bar in rate.patches] == [
        (colour, row.tok_s) for colour, row in zip(colours, rows, strict=True)
    ]
    for axes, names in ((first, ("ttft_ms", "ttft_p99_ms")), (between, ("itl_p50_ms", "itl_p99_ms"))):
        wanted = [(colour, getattr(row, name), name == names[1]) for colour, row in zip(colours, rows, strict=True)
                  for name in names]  # fmt: skip
        assert figures_of(axes) == wanted and axes.get_ylabel() == "ms: median, and hollow p99"


def test_a_loaded_server_stands_beside_the_other_workload_by_workload(tmp_path: Path) -> None:
    made = [*test_serving_load.SMALL, f"baseline.vllm.site={SITE}", f"run_dir={tmp_path / 'cpu'}"]
    assert serving.main(load_config(made)) == 0
    (chart,) = only(tmp_path, "serving")
    rows = [of.row for of in chart.rows]
    assert [(row.engine, row.workload) for row in rows] == [
        (engine, workload) for engine in ("interpreter", "vllm") for workload in ("fixed", "aime")
    ]
    require_load(chart, rows)
    rate, first, _ = drawn(chart)
    assert ticks(rate, "x") == [f"{row.workload}\n{row.ratio:.2f} times" for row in rows[2:]]
    assert ticks(first, "x") == ["fixed", "aime"]
    assert rate.get_legend_handles_labels()[1] == ["this server, interpreted", "vLLM's"]
    heads = [column.head for column in chart.shown]
    assert {"tokens/s", "ratio", "first token, ms", "between tokens, ms", "version"} <= set(heads)

    later = dataclasses.replace(chart.rows[0].row, time="2999", tok_s=1.0).sealed()
    kept = [*chart.rows, dataclasses.replace(chart.rows[0], row=later)]
    (again,) = charts(kept)
    assert ticks(drawn(again)[0], "x")[0] == "fixed"  # the row that its ratio is to is no longer there
    other = dataclasses.replace(later, requests_hash="0")
    assert len(charts([*chart.rows, dataclasses.replace(chart.rows[0], row=other)])[0].rows) == 5
    assert charts([dataclasses.replace(of, row=dataclasses.replace(of.row, clock="simulated")) for of in kept]) == []


def test_a_replayed_conversation_is_drawn_alike_and_a_task_is_not(tmp_path: Path) -> None:
    made = [*test_agent_replay.SMALL, test_agent_replay.short(tmp_path), f"baseline.vllm.site={SITE}"]
    assert agent_trial.main(load_config([*made, f"run_dir={tmp_path / 'cpu'}"])) == 0
    (chart,) = only(tmp_path, "agent_replay")
    require_load(chart, [of.row for of in chart.rows])
    assert ticks(drawn(chart)[0], "x") == ["short"]  # the stand-in counts characters: no ratio
    tasks = [dataclasses.replace(of, row=dataclasses.replace(of.row, agent="opencode")) for of in chart.rows]
    assert charts(tasks) == [] and any(line.startswith("No figure is of") for line in missing(tasks, []))
