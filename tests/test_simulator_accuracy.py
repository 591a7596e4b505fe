"""The simulator against the rows that a card left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import simulator_accuracy
from mk.compose import load_config
from mk.errors import MkError
from tests.promotion import committed, folder_of, repository, require_kept

__all__ = ["committed", "repository"]


def test_it_ranks_and_times_what_a_card_has_run(
    committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dozen schedules and more, both batches: the bar is a rank correlation of 0.8 and a mean error of 10 %."""
    assert simulator_accuracy.main(load_config(["experiment=simulator_accuracy", f"run_dir={tmp_path / 'runs'}"])) == 0
    names = ("schedules", "rank_correlation", "mean_error")
    folder = folder_of(tmp_path / "runs")
    rows = require_kept(committed, folder, **dict.fromkeys(names, lambda value: value + 1))
    assert [row.batch for row in rows] == [1, 8] and all(row.schedules >= 12 for row in rows)
    assert all(row.rank_correlation >= 0.8 - 1e-9 and row.mean_error < 0.1 for row in rows)
    assert all(row.clock == "simulated" and row.engine == "simulator" for row in rows)
    assert "rank correlation" in capsys.readouterr().out


def test_rows_of_another_kind_are_left_out_and_none_is_an_error(tmp_path: Path) -> None:
    source = Path("results/h200/wave_order_ablation.jsonl").read_text().splitlines()
    others = [json.loads(line) for line in source[:4]]
    for row, change in zip(
        others, ({"bound": "zero_wait"}, {"gpu": "h100"}, {"routing": "checkpoint"}, {"model": "nano"}), strict=True
    ):
        row |= change
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, others)) + "\n")
    with pytest.raises(MkError, match="has no measured step of north_mini_code on h200"):
        simulator_accuracy.main(load_config(["experiment=simulator_accuracy", f"experiment.rows={path}"]))
    with pytest.raises(MkError, match="is no file"):
        simulator_accuracy.main(load_config(["experiment=simulator_accuracy", "experiment.rows=nowhere.jsonl"]))
