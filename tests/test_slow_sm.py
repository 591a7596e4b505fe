"""The experiment with a slow SM: its arithmetic and its verdicts, on a stand-in for the card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments import slow_sm as experiment
from experiments.slow_sm import Run, table, verdicts
from mk.compose import load_config
from mk.errors import MkError
from mk.kernel.launches import RUNTIMES
from mk.kernel.runtime import Runtime
from mk.model.geometry import Geometry
from mk.model.opening import NANO
from mk.results.rows import read_rows
from tests.device_rig import FakeEvent, FakeLibrary, fake_build, fake_device

__all__ = ["fake_device"]

LAYERS = Geometry.from_hf_config(NANO).layers
RUN = [
    "experiment=slow_sm",
    "model=nano",
    "weights=checkpoint",
    "experiment.batch=2",
    "experiment.context=300",
    "experiment.steps=8",
    "experiment.warmup=2",
]


def one(schedule: str, slow_ns: int, p50: float, tiles: float, logits: float = 0.5) -> Run:
    return Run(schedule, slow_ns, [p50], [4.0], "0" * 16, tiles, 10.0, torch.full((1, 4), logits))


def test_verdicts_and_table() -> None:
    static, slow_static = one("static", 0, 1.0, 10), one("static", 500, 1.25, 10)
    stealing, slow_stealing = one("work_stealing", 0, 1.01, 11), one("work_stealing", 500, 1.05, 3)
    runs = [static, slow_static, stealing, slow_stealing]
    assert all(verdicts(runs).values())
    assert not verdicts([static, slow_static, stealing, one("work_stealing", 500, 1.3, 3)])["loses_less"]
    assert not verdicts([static, slow_static, stealing, one("work_stealing", 500, 1.05, 11)])["fewer_tiles"]
    assert not verdicts([static, slow_static, stealing, one("work_stealing", 500, 1.05, 3, 0.6)])["same_bits"]
    lines = table(runs, layers=5).splitlines()
    assert lines[2].split() == ["static", "500", "1.2500", "50.00", "10.0", "10.0"]
    assert lines[4].split() == ["work_stealing", "500", "1.0500", "8.00", "3.0", "10.0"]


@pytest.fixture
def stand_in(fake_device: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """A card on which static lists lose what the slow SM loses, and stealing a tenth of it."""

    def runtime(*args: object, **more: object) -> object:
        fake_device.runtime = made(*args, **more)
        return fake_device.runtime

    def launch(rt: Runtime, step: int) -> None:
        assert rt.program is not None
        stealing = rt.program.shape.moe_claimers > 0
        slowed = rt.params.slow_ns > 0
        tiles = torch.full_like(rt["tiles_taken"], 20)
        tiles[rt.params.slow_sm] = 4 if stealing and slowed else 20
        rt["tiles_taken"].add_(tiles)
        FakeEvent.ticks += (1 if stealing else 10) * slowed

    made = RUNTIMES["step"]
    fake_device.fault = launch
    monkeypatch.setitem(RUNTIMES, "step", runtime)
    monkeypatch.setattr("mk.kernel.build.build", fake_build)
    monkeypatch.setattr(experiment, "DEVICE", torch.device("cpu"))
    return fake_device


def test_a_run_writes_four_rows_and_a_table(
    stand_in: FakeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert experiment.main(load_config([*RUN, f"run_dir={tmp_path}"])) == 0
    rows = [row for path in tmp_path.glob("*/rows.jsonl") for row in read_rows(path)]
    assert [row.schedule for row in rows] == ["static", "static", "work_stealing", "work_stealing"]
    # 20 tiles a step over all layers are to lose 50 us a layer
    assert [row.slow_ns_per_tile for row in rows] == [0, 50_000 * LAYERS // 20, 0, 50_000 * LAYERS // 20]
    assert [row.slow_sm_tiles for row in rows] == [20, 20, 20, 4]
    assert [row.p50_ms for row in rows] == [1, 11, 1, 2]
    assert rows[0].checks == {"schedule_verified": True, "same_bits": True, "fewer_tiles": True, "loses_less": True}
    assert "growth us/layer" in capsys.readouterr().out


def test_without_a_card_it_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert experiment.main(load_config(["experiment=slow_sm", "experiment.context=512", f"run_dir={tmp_path}"])) == 0
    static, slow_static, stealing, slow_stealing = [
        row for path in tmp_path.glob("*/rows.jsonl") for row in read_rows(path)
    ]
    for row in (static, slow_static, stealing, slow_stealing):
        assert (row.clock, row.engine, row.build_hash) == ("simulated", "simulator", None)
        assert row.checks == {"schedule_verified": True, "fewer_tiles": True, "loses_less": True}
    # lists leave an SM its tiles, and it is late by as much as they take longer, less what it waited for anyway
    layers, settings = 5, load_config(["experiment=slow_sm"]).experiment
    growth = 1e3 * (slow_static.p50_ms - static.p50_ms) / layers
    assert slow_static.slow_sm_tiles == static.slow_sm_tiles and 0 < growth < settings.slow_us
    assert slow_stealing.mean_sm_tiles == stealing.mean_sm_tiles and "simulated" in capsys.readouterr().out


def test_other_bits_fail_the_run(stand_in: FakeLibrary, tmp_path: Path) -> None:
    sound = stand_in.fault

    def fault(rt: Runtime, step: int) -> None:
        sound(rt, step)
        rt["logits"][0, 0] += 0.25 * (rt.params.slow_ns > 0)

    stand_in.fault = fault
    assert experiment.main(load_config([*RUN, f"run_dir={tmp_path}"])) == 1
    rows = [row for path in tmp_path.glob("*/rows.jsonl") for row in read_rows(path)]
    assert not any(row.checks["same_bits"] for row in rows)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("experiment.sm=132", "experiment.sm=132 must lie in 0..131"),
        ("experiment.context=6", "leaves no room"),
        ("experiment.batch=0", "experiment.batch=0 must be at least 1"),
    ],
)
def test_what_cannot_be_timed_is_refused(override: str, message: str) -> None:
    with pytest.raises(MkError, match=message):
        experiment.main(load_config([*RUN, override]))
