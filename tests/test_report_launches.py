"""Figures of runs of the kernel, on a stand-in for the card: lengths, names and their order are the rows'."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch, Rectangle

from experiments import decode_variants, ladder
from mk.compose import load_config
from mk.errors import MkError
from mk.report import palette
from mk.report.kept_rows import Kept, raw_of, read_kept
from mk.report.launches import STRETCHES
from mk.report.page import charts, draw, missing, stale
from mk.report.plans import _short
from tests import report_rig, test_ladder, test_occupancy, test_op_bench
from tests.device_rig import FakeLibrary, fake_device
from tests.report_rig import drawn, edited, only, ticks, widths
from tests.test_decode_throughput import stand_in
from tests.test_decode_variants import CARD
from tests.test_op_bench import bench

__all__ = ["bench", "fake_device", "stand_in"]


# ---- the ladder ----
ARMS = [
    "a launch a wave",
    "a CUDA graph of them",
    "dependent launch",
    "one kernel, barriers between waves",
    "counters, no barriers",
    "32 KB in flight",
    "weights past the waits",
    "56 or 64 KB in flight",
    "owned strips",
    "no waits: a bound",
]


def test_the_ladder_has_a_bar_an_arm_from_the_launches_to_the_bound(stand_in: FakeLibrary, tmp_path: Path) -> None:
    made = [*test_ladder.SMALL, "experiment.batches=[1,2]", f"run_dir={tmp_path / 'h200'}"]
    assert ladder.main(load_config(made)) == 0
    (chart,) = only(tmp_path, "ladder")
    assert len(chart.rows) == 2 * (9 + 1 + 1)  # the first arm again is in the table alone

    def slower(number: int, of: Kept) -> dict[str, Any]:
        ms = 10.0 - 0.25 * number
        return {"p50_ms": ms, "p10_ms": ms - 0.125, "p90_ms": ms + 0.5, "bytes_per_step": 4.8e9}

    chart = edited(chart, slower)
    panels = drawn(chart)
    assert [axes.get_title(loc="left") for axes in panels] == ["batch 1, 300 keys", "batch 2, 300 keys"]
    assert ticks(panels[0]) == ARMS and ticks(panels[1]) == [""] * len(ARMS)
    colours = ["launches"] * 3 + ["kernel"] * 6 + ["zero_wait"]
    for axes, batch in zip(panels, (1, 2), strict=True):
        own = [of.row for of in chart.rows if of.row.batch == batch and not (of.row.arm or "").endswith("(again)")]
        assert widths(axes) == [row.p50_ms for row in own] and len(own) == len(ARMS)
        bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
        assert [bar.get_y() + bar.get_height() / 2 for bar in bars] == pytest.approx(range(len(ARMS)))
        assert [to_hex(bar.get_facecolor()) for bar in bars] == [to_hex(palette.STEP[kind]) for kind in colours]
        *intervals, floor = axes.lines
        assert [list(line.get_xdata()) for line in intervals] == [[row.p10_ms, row.p90_ms] for row in own]
        assert list(floor.get_xdata()) == pytest.approx([1.0, 1.0])  # ms, of 4.8 GB at 4.8 TB/s
        assert [text.get_text() for text in axes.texts] == [f"{row.p50_ms:.2f}" for row in own]
        assert axes.get_xlabel() == "ms a step"
    assert {"ratio", "95 % from", "to", "bound"} <= {column.head for column in chart.shown}

    # a later run of batch 2, which left most arms out, stands alone
    few = [of for of in chart.rows if of.row.batch == 2 and of.row.bound is None]
    few = [
        dataclasses.replace(of, run="later", row=dataclasses.replace(of.row, time="2999"))
        for of in (*few[:1], *few[3:5])
    ]
    (later,) = charts([*chart.rows, *few])
    assert [of.run for of in later.rows if of.row.batch == 2] == ["later"] * 3
    left, right = drawn(later)
    assert len(widths(left)) == len(ARMS) and widths(right) == [of.row.p50_ms for of in few]


# ---- SMs in a layer ----
MADE: list[Path] = []  # the run that these tests have copies of


@pytest.fixture
def occupied(stand_in: FakeLibrary, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not MADE:
        stand_in.fault = test_occupancy.fills
        made = tmp_path_factory.mktemp("occupied")
        test_occupancy.run(made / "h200", "experiment.batches=[1,2]")
        MADE.append(made)
    return shutil.copytree(MADE[0], tmp_path, dirs_exist_ok=True)


def test_a_layer_is_work_and_idle_time_by_wave(occupied: Path) -> None:
    chart, *_ = only(occupied, "occupancy", "timeline_batch1", "timeline_batch2")
    panels = drawn(chart)
    assert [axes.get_title(loc="left") for axes in panels] == [f"batch {b}, 300 keys, layer 2" for b in (1, 2)]
    _, labels = panels[0].get_legend_handles_labels()
    for axes, batch in zip(panels, (1, 2), strict=True):
        own = [of.row for of in chart.rows if of.row.batch == batch]
        assert [name.replace("\n", " ") for name in ticks(axes)] == [
            "a launch a wave",
            "a CUDA graph of them",
            "one kernel, barriers between waves",
            "counters, no barriers, weights past the waits, owned strips",
        ]
        assert axes.get_legend_handles_labels()[1] == labels and axes.get_xlabel() == "us"
        parts = [widths(axes)[at : at + len(own)] for at in range(0, len(labels) * len(own), len(own))]
        assert labels[0] == "SMs at work" and len(parts) == len(labels)
        for label, lengths in zip(labels[1:], parts[1:], strict=True):
            wave = label.removeprefix("idle, ")
            assert lengths == pytest.approx([(row.idle_us_by_wave or {}).get(wave, 0.0) for row in own])
        assert [sum(lengths) for lengths in zip(*parts, strict=True)] == pytest.approx([row.layer_us for row in own])
        told = [text.get_text().strip() for text in axes.texts if text.get_text().endswith("idle")]
        assert told == [f"{row.idle_pct:.0f} % idle" for row in own]
    waves = [label.removeprefix("idle, ") for label in labels[1:]]
    assert waves == sorted(waves, key=list(palette.WAVE).index)
    shown = [column.source for column in chart.shown]
    assert [f"idle_us_by_wave/{wave}" for wave in waves] == [name for name in shown if "/" in name]
    of = chart.rows[0]
    cells = {column.source: column.text(of) for column in chart.shown}
    assert cells["idle_us_by_wave/qkv"] == f"{(of.row.idle_us_by_wave or {})['qkv']:.2f}"


def test_a_timeline_is_the_raw_datas(occupied: Path) -> None:
    _, _, chart = only(occupied, "occupancy", "timeline_batch1", "timeline_batch2")
    panels = drawn(chart)
    assert len({axes.get_xlim() for axes in panels}) == 1 and panels[-1].get_xlabel().startswith("us since layer 1 was")
    colours = [palette.STEP[kind] for kind in ("launches", "launches", "kernel", "kernel")]
    for axes, raw, colour in zip(panels, raw_of(chart.rows), colours, strict=True):
        ends, busy = raw["wave_ends_us"], raw["busy_us"]
        step = int((re.findall(r"every (\d+)", axes.get_ylabel()) or ["1"])[0])
        (bars,) = [patch for patch in axes.patches if isinstance(patch, PathPatch)]
        assert to_hex(bars.get_facecolor()) == to_hex(colour)
        corners = bars.get_path().vertices.reshape(-1, 5, 2)  # type: ignore[union-attr]
        lanes = [(lane, *stretch) for lane, sm in enumerate(busy[::step]) for stretch in sm]
        assert [tuple(corner) for corner in corners[:, :, 0][:, :2]] == [(begin, end) for _, begin, end in lanes]
        assert corners[:, :, 1].mean(axis=1).round() == pytest.approx([lane for lane, *_ in lanes])
        marks = {
            text.get_text().strip(): line.get_xdata()[0] for text, line in zip(axes.texts, axes.lines, strict=True)
        }
        assert marks == ends and list(marks) == sorted(ends, key=ends.__getitem__)
        boxes = [text.get_window_extent() for text in axes.texts]
        assert [box for box in boxes if box.y1 > axes.get_window_extent().y1] == []  # under the title
        assert all(left.x1 <= right.x0 + 1 for left, right in itertools.pairwise(boxes))
    assert len(chart.svg()) < 250_000


def test_of_many_stretches_every_nth_sm_is_drawn(occupied: Path) -> None:
    """And the axis says which."""
    _, _, chart = only(occupied, "occupancy", "timeline_batch1", "timeline_batch2")
    (path,) = {of.raw for of in chart.rows}
    assert path is not None
    made, rows = [], []
    for of, raw in zip(chart.rows, raw_of(chart.rows), strict=True):
        end = max(raw["wave_ends_us"].values())
        raw["busy_us"] = [[[end * n / 12, end * (n + 0.7) / 12] for n in range(12)] for _ in range(132)]
        made.append(json.dumps(raw))
        row = dataclasses.replace(of.row, raw_sha256=hashlib.sha256(made[-1].encode()).hexdigest())
        rows.append(dataclasses.replace(of, row=row))
    path.write_text("\n".join(made) + "\n")
    _, dense = charts(rows)
    panels = drawn(dense)
    assert {axes.get_ylabel() for axes in panels} == {"every 4th SM"} and ticks(panels[0]) == ["0", "128"]
    assert 4 * 12 * len(range(0, 132, 4)) <= STRETCHES < 4 * 12 * len(range(0, 132, 3))
    assert 50_000 < len(dense.svg()) < 250_000
    path.unlink()
    with pytest.raises(MkError, match=r"rows.jsonl:\d: its raw data is not beside it"):
        dense.svg()


def test_simulated_arms_are_not_drawn_beside_measured_ones(occupied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [chart.drawn_from for chart in charts(read_kept(occupied))]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    test_occupancy.run(occupied / "simulated", "experiment.batches=[1,2]")
    made = [*test_ladder.SMALL, "experiment.batches=[1]", f"run_dir={occupied / 'simulated'}"]
    assert ladder.main(load_config(made)) == 0
    kept = read_kept(occupied)
    assert {of.row.clock for of in kept} == {None, "simulated"}
    found = charts(kept)
    assert [chart.drawn_from for chart in found] == before
    assert sum(line.startswith("No figure is of simulated/") for line in missing(kept, found)) == 2
    assert any(line.endswith("no kept run of ladder.") for line in missing(kept, found))


# ---- operations alone ----
def test_every_operation_stands_above_the_same_by_torch(bench: FakeLibrary, tmp_path: Path) -> None:
    test_op_bench.run(tmp_path / "h200", "experiment.batches=[1,2]")
    (chart,) = only(tmp_path, "operations")
    chart = edited(chart, lambda n, of: {"p50_ms": 0.001 * (n + 2), "p10_ms": 0.001, "p90_ms": 0.001 * (n + 9)})
    left, right = drawn(chart)
    names = ticks(left)
    assert ticks(right) == [""] * len(names) and len(set(left.get_yticks())) == len(names)
    places = list(left.get_yticks())
    assert places == sorted(places)
    compared = {of.row.kernel for of in chart.rows if of.row.ratio is not None}
    order = [name for name in names if not name.startswith("torch")]
    assert set(order) == {of.row.kernel for of in chart.rows} and set(order[: len(compared)]) == compared
    at: dict[tuple[str, str | None], float] = {}
    operation = ""
    for name, place in zip(names, places, strict=True):
        operation = operation if name.startswith("torch, ") else name
        at[operation, name.removeprefix("torch, ") if name.startswith("torch, ") else None] = place
    assert at["attention_full", "flash"] == at["attention_full", None] + 1
    for axes, batch in ((left, 1), (right, 2)):
        assert axes.get_xlabel() == "us" and axes.get_xscale() == "log"
        points = {
            float(line.get_ydata()[0]): line  # type: ignore[index]
            for line in axes.lines
            if line.get_marker() == "o"
        }
        own = [of.row for of in chart.rows if of.row.batch == batch]
        assert len(points) == len(own)
        for row in own:
            point = points[at[row.kernel or "", row.method]]
            assert float(point.get_xdata()[0]) == pytest.approx(1e3 * (row.p50_ms or 0))  # type: ignore[index]
            assert to_hex(point.get_color()) == to_hex(palette.ENGINE[row.engine])
            assert (point.get_markerfacecolor() == "white") == (row.engine == "torch" and row.ratio is None)
        floors = [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "|"]  # type: ignore[index]
        wanted = [(row.p50_ms or 0) * row.pct_nominal * 10 for row in own if row.pct_nominal is not None]
        assert sorted(floors) == pytest.approx(sorted(wanted))
    assert {"ratio", "95 % from", "to", "GB/s", "% of nominal bandwidth"} <= {column.head for column in chart.shown}


# ---- ablations whose runs come ----
@pytest.mark.parametrize("experiment", ["sampling_ablation", "trace_ablation"])
def test_an_ablation_is_drawn_as_soon_as_it_is_kept(experiment: str, stand_in: FakeLibrary, tmp_path: Path) -> None:
    assert decode_variants.main(load_config([f"experiment={experiment}", *CARD, f"run_dir={tmp_path / 'h200'}"])) == 0
    (chart,) = only(tmp_path, experiment)
    (arm, *_) = [of.row.arm for of in chart.rows]
    assert ticks(drawn(chart)[0]) == list(
        dict.fromkeys(_short(of.row.arm or "") for of in chart.rows if of.row.arm != arm)
    )
    assert not any(line.endswith(f"no kept run of {experiment}.") for line in missing(chart.rows, [chart]))


def test_a_page_of_such_runs_is_written_and_stays_theirs(occupied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = draw(occupied)
    assert {path.stem for path in written} == {"report", "occupancy", "timeline_batch1", "timeline_batch2"}
    assert list(stale(occupied, read_kept(occupied))) == []
    text = (occupied / "report.html").read_text()
    assert 'data-field="idle_us_by_wave/qkv"' in text and "no kept run of wave_occupancy" not in text
    monkeypatch.setattr(report_rig, "RESULTS", occupied)
    cells = [(of.place, column.source, column.unit, column.text(of)) for chart in charts(read_kept(occupied))
             for of in chart.rows for column in chart.shown]  # fmt: skip
    assert len(cells) > 100 and [cell for cell in cells if not report_rig.cell_is_right(*cell)] == []
    place, wave = cells[0][0], "idle_us_by_wave/attn"
    assert not report_rig.cell_is_right(place, wave, 1.0, f"{report_rig.value_at(place, wave) + 0.01:.2f}")
    rows = next(occupied.glob("h200/*/rows.jsonl"))
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))
    told = list(stale(occupied, read_kept(occupied)))
    assert told == [f"report.html: {name} is not drawn from the rows that are kept: make figures"
                    for name in ("occupancy", "timeline_batch2")]  # fmt: skip
