"""The experiment that watches one sequence's bits: on a CPU, where the interpreter stands for the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import kernel_bits as experiment
from experiments.bits_machines import InterpreterBits, KernelBits, digest
from mk.compose import load_config
from mk.errors import MkError
from mk.graph import LAYER_WAVES
from mk.kv import PageAllocator
from mk.programs import Plan, Programs
from mk.results.rows import Row, read_rows
from tests.device_rig import FakeLibrary, fake_device
from tests.interpreter_rig import GEOMETRY
from tests.promotion import committed, folder_of, no, repository, require_kept
from tests.test_engine_cuda import PAGES, SPLITS, stand_in

__all__ = ["committed", "fake_device", "repository"]

SMALL = [
    *("experiment=kernel_bits", "model=nano", "weights=checkpoint", "gpu=cpu", "gpu.sms=2", "engine=interpreter"),
    *("experiment.context=70", "experiment.neighbours=[1,300]", "experiment.repeats=2", "experiment.switches=5"),
    "experiment.delays=3",
]


def run(folder: Path, *more: str) -> tuple[int, Row, Path]:
    status = experiment.main(load_config([*SMALL, f"run_dir={folder}", *more]))
    path = folder_of(folder)
    (row,) = read_rows(path / "rows.jsonl")
    return status, row, path


def test_no_arrangement_changes_a_bit(committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, row, path = run(tmp_path)
    assert status == 0 and all(row.checks.values())
    assert {f"bits_{group}" for group in experiment.GROUPS} < row.checks.keys()
    assert (row.engine, row.batch, row.context) == ("interpreter", 3, [70, 1, 300])
    require_kept(committed, path, steps=lambda n: n + 1, checks=no)
    said = capsys.readouterr().out
    orders = said.split("schedules")[1].split()[0]
    assert int(orders) >= 14 and "not " not in said


def test_bits_that_depend_on_the_arrangement_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The token is another where a fault would make the sums others; groups without a fault pass."""
    sound = InterpreterBits.step
    order, parted = (tuple(load_config([*SMALL, *more]).wave_order.waves) for more in ((), ("wave_order=parted",)))

    def unsound(self: InterpreterBits, keys: list[int], tokens: list[int], tables: Any, row: int) -> str:
        program, rows = self.machine.program, len(keys)
        assert program is not None
        wrong = (
            (rows == 3 and row == 2 and program.wave_order == order)
            or keys == [70, 300]
            or (rows == 3 and (program.placement == "round_robin" or program.wave_order == parted))
            or self.machine.epoch >= 2**32 - 1
        )
        return sound(self, keys, [token + wrong for token in tokens], tables, row)

    monkeypatch.setattr(InterpreterBits, "step", unsound)
    status, row, _ = run(tmp_path)
    failed = {name for name, passed in row.checks.items() if not passed}
    said = capsys.readouterr().out
    assert status == 1 and failed - {"bits_delays"} == {
        "bits_" + group for group in ("rows", "neighbours", "schedules", "shared", "epochs")
    }
    for told in (
        "neighbours, 300 keys: ",
        "static default round_robin: ",
        "work_stealing parted row_owner: ",
        "epochs, 4294967293 + ",
    ):
        assert told in said


def test_logits_that_are_not_finite_fail() -> None:
    """Equal garbage would agree too."""
    broken = digest(np.array([0.0, np.nan], np.float32))
    raw = {
        "kind": "bits",
        "bases": {"owned": broken, "shared": "a"},
        "digests": {key: [broken] for key in experiment.GROUPS},
    }
    checks = experiment.figures(Row.__new__(Row), raw)["checks"]
    assert not checks["logits_finite"] and checks["bits_rows"]


def test_a_group_without_arrangements_fails() -> None:
    raw = {
        "kind": "bits",
        "bases": {"owned": "a", "shared": "a"},
        "digests": {**{key: ["a"] for key in experiment.GROUPS}, "rows": []},
    }
    checks = experiment.figures(Row.__new__(Row), raw)["checks"]
    assert [name for name, passed in checks.items() if not passed] == ["bits_rows"]


@pytest.mark.parametrize(("delayed", "passes"), [([2.0, 2.2], True), ([1.01, 1.02], False)])
def test_delays_that_hold_nothing_up_fail(delayed: list[float], passes: bool) -> None:
    digests = {key: ["a"] for key in experiment.GROUPS}
    raw = {"bases": {"owned": "a", "shared": "a"}, "digests": digests, "quiet_ms": [1.0], "delayed_ms": delayed}
    assert experiment.figures(Row.__new__(Row), raw)["checks"]["held_up"] is passes


def test_the_kernels_machine_steps_given_rows(fake_device: FakeLibrary) -> None:
    """The stand-in's logits follow from a row's token and context, so a row that is fed wrongly shows."""
    engine = stand_in(fake_device, 2, PAGES)
    machine = KernelBits(engine.runtime, seed=0)
    pages = PageAllocator(GEOMETRY, PAGES, 2, 5, seed=0)
    for slot, keys in enumerate((70, 130)):
        pages.reserve(slot, keys)
    plan = Plan(6, LAYER_WAVES, "row_owner", splits=SPLITS)
    machine.load(Programs(GEOMETRY, 2, plan).get(256))
    first = machine.step([70, 130], [5, 9], pages.table.rows([0, 1]), 0)
    machine.poison()
    assert machine.step([130, 70], [9, 5], pages.table.rows([1, 0]), 1) == first
    assert machine.step([130, 70], [9, 5], pages.table.rows([1, 0]), 0) != first
    assert machine.step([70, 130], [6, 9], pages.table.rows([0, 1]), 0) != first


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine=reference", "engine=reference has none"),
        ("routing=uniform", "not to routing=uniform"),
        ("experiment.neighbours=[5,0]", "every neighbour has at least 1 key"),
        ("experiment.repeats=0", "experiment.repeats=0"),
        ("experiment.context=99999999", "the model has 65536 positions"),
    ],
)
def test_what_cannot_be_run_is_refused(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(MkError, match=message):
        run(tmp_path, override)
