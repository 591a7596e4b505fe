"""The experiment that runs part of a step: on a CPU, where the tested machine is a second interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments import partial_step as experiment
from mk.compose import load_config
from mk.errors import MkError
from mk.parts import InterpreterWorker, StepInput
from mk.parts.workers import Ids
from mk.results.rows import Row, read_rows
from mk.schedule.lower import Program
from tests.promotion import committed, folder_of, no, repository, require_kept

__all__ = ["committed", "repository"]

PART = ["experiment=partial_step", "experiment.start_at=1.qkv", "experiment.stop_after=2.topk"]


def run(folder: Path, *more: str) -> tuple[int, Row, Path]:
    status = experiment.main(load_config([*PART, f"run_dir={folder}", *more]))
    path = folder_of(folder)
    (row,) = read_rows(path / "rows.jsonl")
    return status, row, path


def test_waves_are_told_one_by_one_and_kept(
    committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, row, path = run(tmp_path, "experiment.dump=true")
    assert status == 0 and row.checks["waves_within_noise"] and row.worst_of_tolerance == 0
    assert (row.engine, row.context, row.batch) == ("interpreter", [300, 0, 129, 64], 4)
    require_kept(committed, path, waves=lambda n: n + 1, worst_of_tolerance=lambda value: value + 1, checks=no)
    told = capsys.readouterr().out
    assert "1.attn " in told and "1.oproj                stays in the SMs" in told and "2.router " in told
    assert "1.embed" not in told and "2.attn " not in told
    with np.load(path / "waves.npz") as dump:
        attention = dump["1.attn/PARTIAL/o"]  # [rows, KV heads, splits, query heads, dim]
        assert attention.shape[0] == 4 and np.isnan(attention[1]).all()
        assert np.isfinite(attention[0, :, :2]).all() and np.isnan(attention[3, :, 1:]).all()
        assert len({name.split("/")[0] for name in dump}) < row.waves


def test_a_wave_that_differs_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = InterpreterWorker.run

    def unsound(self: InterpreterWorker, part: Program, inputs: StepInput) -> Ids:
        ids = sound(self, part, inputs)
        if part.cut.name == "1.qkv" and self is workers[1]:
            self.memory.qkv[0, 0, 0] += np.float32(2**-16)
        return ids

    workers: list[InterpreterWorker] = []
    made = InterpreterWorker.__init__

    def remember(self: InterpreterWorker, *args: object) -> None:
        made(self, *args)
        workers.append(self)

    monkeypatch.setattr(InterpreterWorker, "__init__", remember)
    monkeypatch.setattr(InterpreterWorker, "run", unsound)
    status, row, _ = run(tmp_path)
    assert status == 1 and not row.checks["waves_within_noise"]
    assert "1 beyond the noise: 1.qkv" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine=reference", "engine=reference has none"),
        ("routing=uniform", "not to routing=uniform"),
        ("experiment.start_at=2.qkw", "^experiment.start_at=2.qkw: no such wave"),
        ("experiment.contexts=[0,0]", "every row is inactive"),
        ("experiment.contexts=[99999999]", "the model has 65536 positions"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(MkError, match=message):
        experiment.main(load_config([*PART, f"run_dir={tmp_path}", override]))
    assert not list(tmp_path.glob("*"))
