"""Constants that a fit finds again: in steps simulated with other ones, written as a run on the card would be."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mk.compose import load_config
from mk.errors import MkError
from mk.model.geometry import PRESETS
from mk.programs import Plan
from mk.results.runs import RunFolder
from mk.schedule import fit
from mk.schedule.costs import Costs, OpCosts
from mk.schedule.fit import fit_operations, fit_shared, mean_error, moved, to_yaml
from mk.schedule.measured import read_folder
from mk.schedule.simulate import Simulated, costs_of, estimate, ring_of, simulate
from mk.schedule.simulator.expand import Sample

CONFIG = ["experiment=decode_throughput", "model=slice", "gpu.sms=32", "experiment.context=512"]
GEOMETRY = PRESETS["slice"]


def truth() -> Costs:
    """Of a card on which everything costs something else."""
    costs = costs_of(load_config(CONFIG).gpu)
    ops = {
        name: OpCosts(op.open * 1.3, op.slot * 0.8, op.tile, op.close * 1.2, op.row) for name, op in costs.ops.items()
    }
    return dataclasses.replace(costs, next_entry=0.5, next_store=0.2, memory_tb_s=3.0, ops=ops)


def simulated(batch: int) -> tuple[Simulated, float]:
    """A whole step of the batch, and what the periodic model makes of it in ms."""
    cfg = load_config(CONFIG)
    plan, ring = Plan.from_config(cfg), ring_of(cfg.engine.ring, batch)
    sample = Sample.draw(GEOMETRY, cfg.routing, [512] * batch)
    whole = simulate(plan.lower(GEOMETRY, batch, 1024), sample, truth(), ring)
    return whole, estimate(plan, GEOMETRY, sample, 1024, truth(), ring) / 1e3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as decode_throughput leaves it, of simulated steps whose build for traces is 6 % slower."""
    cfg = load_config([*CONFIG, f"run_dir={tmp_path_factory.mktemp('fit')}"])
    with RunFolder.create(cfg) as run:
        for batch in (1, 3):
            step, ms = simulated(batch)
            row = run.row(engine="cuda", dtype="bfloat16", batch=batch, context=[512] * batch, checks={}, p50_ms=ms)
            run.append_row(dataclasses.replace(row, steps=256))
            trace = step.trace()
            slower = {name: values * 1.06 for name, values in trace.us.items()}
            dataclasses.replace(trace, us=slower).save(run.path / f"trace_batch{batch}.npz")
    return run.path


def test_operations_are_read_off_traces(folder: Path) -> None:
    steps = read_folder(folder)
    assert [len(step.sample.keys) for step in steps] == [1, 3] and all(step.trace for step in steps)
    start, wanted = costs_of(load_config(CONFIG).gpu), truth()
    found = fit_operations(steps, start)
    assert found.next_entry == pytest.approx(0.5, rel=0.02) and found.next_store == pytest.approx(0.2, rel=0.02)
    for name, key in (("topk", "row"), ("topk", "close"), ("residual", "close"), ("moe_down_owned", "slot")):
        assert getattr(found.of(name), key) == pytest.approx(getattr(wanted.of(name), key), rel=0.1), (name, key)
    assert found.memory_tb_s == start.memory_tb_s  # that is not seen in a trace


def test_a_fit_meets_the_measured_steps(folder: Path) -> None:
    steps = read_folder(folder)
    start = fit_operations(steps, costs_of(load_config(CONFIG).gpu))
    fitted = fit_shared(start, lambda tried: mean_error(steps, tried))
    assert mean_error(steps, fitted) < min(0.03, mean_error(steps, start))
    block = yaml.safe_load(to_yaml(fitted))["costs"]
    ops = {name: OpCosts(**values) for name, values in block.pop("ops").items()}
    assert mean_error(steps, Costs(**block, ops=ops)) == pytest.approx(mean_error(steps, fitted), abs=0.005)


def test_rows_of_other_wave_orders_are_left_to_judge_by(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fit, "fit_shared", lambda costs, error, told: costs)
    assert fit.main([str(folder), "orders=parted,oproj_before_down"]) == 0
    assert capsys.readouterr().out.count(": measured") == 2
    with pytest.raises(MkError, match="no measured steps"):
        fit.main([str(folder), "orders=parted"])


def test_a_fit_starts_from_the_card_that_its_rows_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(fit, "fit_shared", lambda costs, error, told: started.append(costs) or costs)
    monkeypatch.setattr(fit, "fit_operations", lambda steps, costs: costs)
    assert fit.main([str(folder)]) == 0 and started == [costs_of(load_config(["gpu=h200"]).gpu)]
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    rows = [json.loads(line) | {"gpu": "h100"} for line in (folder / "rows.jsonl").read_text().splitlines()]
    (other / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(MkError, match="gpu=h100 has no costs"):
        fit.main([str(other)])
    with pytest.raises(MkError, match="rows of h100 and h200: constants are fitted to one card"):
        fit.main([str(folder), str(other)])


def test_descent_moves_one_constant_at_a_time() -> None:
    costs = costs_of(load_config(CONFIG).gpu)
    wanted = moved(costs, "handoff", 1.15 * 1.09)
    fitted = fit_shared(costs, lambda tried: abs(tried.handoff - wanted.handoff))
    assert fitted.handoff == pytest.approx(wanted.handoff) and fitted.ops == costs.ops
    assert moved(costs, "operations", 2.0).of("topk").row == 2 * costs.of("topk").row


def test_a_step_has_the_reading_of_the_window_that_it_ran_with(tmp_path: Path) -> None:
    with RunFolder.create(load_config([*CONFIG, "model.window=vllm", f"run_dir={tmp_path}"])) as run:
        row = run.row(engine="cuda", dtype="bfloat16", batch=1, context=[512], checks={}, p50_ms=2.0)
        run.append_row(dataclasses.replace(row, steps=256))
    (step,) = read_folder(run.path)
    assert step.geometry == dataclasses.replace(GEOMETRY, window_includes_extra=True)


def test_folders_that_cannot_be_fitted(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(MkError, match=r"has no rows\.jsonl"):
        read_folder(tmp_path)
    with pytest.raises(MkError, match="no run folder holds a trace"):
        fit_operations([], truth())
    first, second = read_folder(folder)
    with pytest.raises(MkError, match="not of the program that its run folder describes"):
        fit_operations([dataclasses.replace(first, trace=second.trace)], truth())
