"""The simulator against the rows that a card left."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments import simulator_accuracy
from mk.compose import load_config, vary
from mk.errors import MkError
from mk.results.kept import published, read_configs
from mk.results.rows import read_rows
from mk.results.runs import RunFolder
from mk.results.sources import ROOT
from mk.schedule.measured import read_folder
from tests.promotion import committed, folder_of, repository, require_kept

__all__ = ["committed", "repository"]


KEPT = ROOT / "results/h200"
SOME = f"experiment.rows=[{KEPT}/2026-12-01-ladder-89391c00]"


def test_it_ranks_and_times_what_a_card_has_run(
    committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What of the ladder is one launch. The bar is a rank correlation of 0.8 and a mean error of 10 %."""
    cfg = load_config(["experiment=simulator_accuracy", SOME, f"run_dir={tmp_path / 'runs'}"])
    assert simulator_accuracy.main(cfg) == 0
    names = ("schedules", "rank_correlation", "mean_error")
    monkeypatch.setattr("mk.results.verify.ranked_problems", lambda kept: [])  # what it was judged by is kept elsewhere
    rows = require_kept(committed, folder_of(tmp_path / "runs"), **dict.fromkeys(names, lambda value: value + 1))
    found = {row.arm: row for row in rows}
    assert [found[f"batch {batch}: plans"].schedules for batch in (1, 8)] == [2, 2]
    assert [found[f"batch {batch}: row_owner"].schedules for batch in (1, 8)] == [1, 1]
    assert [found[f"batch {batch}: handover"].schedules for batch in (1, 8)] == [5, 5]
    for batch, group in itertools.product((1, 8), ("plans", "handover")):
        row = found[f"batch {batch}: {group}"]
        assert row.rank_correlation >= 0.8 and row.mean_error < 0.1, row
    assert all(row.clock == "simulated" and row.engine == "simulator" for row in rows)
    assert "rank correlation" in capsys.readouterr().out


def test_rows_that_the_constants_were_fitted_to_are_told_apart() -> None:
    steps = read_folder(KEPT / "2026-11-30-plan_ablation-1a36092d")
    found = simulator_accuracy.groups(steps, ["parted"])
    orders = {name: {steps[place].row.wave_order for place in places} for name, places in found.items()}
    assert orders["batch 1, fitted"] == {"parted"} and orders["batch 1: plans"] == {"oproj_prefetch"}
    assert "batch 1: row_owner" not in found  # none is left to judge by
    assert "batch 1, fitted" not in simulator_accuracy.groups(steps, [])


def test_a_ladder_and_a_sweep_are_told_apart_by_what_they_vary() -> None:
    """Steps of many launches are not simulated; barriers, held weights and windows are no plans, contexts are."""
    (ladder,) = KEPT.glob("*-ladder-89391c00")
    steps = [step for step in read_folder(ladder) if step.row.batch == 8]
    assert [step.label.partition("keys ")[2] for step in steps] == [
        "64 KB of 22 slots, barriers, no run-ahead",
        "64 KB of 22 slots, no run-ahead",
        "32 KB of 22 slots, no run-ahead",
        "32 KB of 22 slots",
        "64 KB of 22 slots",
        "64 KB of 22 slots",
    ]
    groups = simulator_accuracy.groups(steps, [])
    assert groups["batch 8: plans"] == [4, 5] and groups["batch 8: handover"] == [0, 1, 2, 3, 4]
    assert all(step.plan.barriers == (place == 0) for place, step in enumerate(steps))
    (sweep,) = KEPT.glob("*-context_sweep-a8180f6e")
    steps = read_folder(sweep)
    groups = simulator_accuracy.groups(steps, [])
    assert len(groups["batch 1 and 4 and 8: plans"]) == len(steps) == 18
    assert not any("handover" in name for name in groups)


@pytest.mark.parametrize("leaf", ["engine.trace", "sampling.temperature", "engine.ring.copy_kb"])
def test_what_the_simulator_knows_nothing_of_is_left_out(tmp_path: Path, leaf: str) -> None:
    """Each read from the configuration beside the row."""
    folder = tmp_path / "rows"
    shutil.copytree(KEPT / "2026-11-30-plan_ablation-4b3ce8d8", folder)
    assert read_folder(folder)
    *groups, name = leaf.split(".")
    configs = read_configs(folder)
    for config in configs.values():
        at = config
        for group in groups:
            at = at[group]
        at[name] = {"engine.trace": "moments", "sampling.temperature": 1.0, "engine.ring.copy_kb": 4}[leaf]
    files, hashes = published(configs)
    rows = (folder / "rows.jsonl").read_text()
    for before, after in hashes.items():
        rows = rows.replace(before, after)
    for file, text in {**files, "rows.jsonl": rows}.items():
        (folder / file).write_text(text)
    assert read_folder(folder) == []


def test_every_kept_folder_of_the_card_is_read_whatever_it_is_of() -> None:
    """And none gives steps but those of whole steps in the build that serves."""
    found = {folder.name: read_folder(folder) for folder in sorted(KEPT.iterdir())}
    kinds = {name.split("-")[3] for name, steps in found.items() if steps}
    assert {"decode_throughput", "routing_ablation", "ladder"} <= kinds
    assert not kinds & {"slow_sm", "prefill_throughput", "prefill_correctness", "kernel_correctness", "batch_switching"}
    assert all(step.row.slow_ns_per_tile is None for steps in found.values() for step in steps)
    (routed,) = (steps for name, steps in found.items() if "routing_ablation" in name)
    arms = {row.routing for row in read_rows(next(KEPT.glob("*-routing_ablation-*")) / "rows.jsonl")}
    assert arms - {step.row.routing for step in routed} == {"checkpoint", "oracle"}  # logits; a bound


RAW = {"kind": "steps", "step_ms": [2.0], "experts_by_layer": [8.0] * 48}
LEFT_OUT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "of a build with delays": ({"slow_ns_per_tile": 0}, {}),
    "of a build with delays, one slow": ({"slow_ns_per_tile": 40}, {}),
    "of a prompt": ({"prompt_tokens": 128}, {}),
    "of one operation": ({"kernel": "qkv"}, {}),
    "of a layer": ({"layer": 3}, {}),
    "simulated": ({"clock": "simulated"}, {}),
    "prefilled": ({}, {"kind": "prefill_calls"}),
    "of requests": ({}, {"kind": "draining"}),
    "of another engine": ({"engine": "vllm"}, {}),
}


@pytest.mark.parametrize(("fields", "raw"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_row_that_is_no_whole_step_is_left_out_alone(
    fields: dict[str, Any], raw: dict[str, Any], tmp_path: Path
) -> None:
    cfg = load_config(["experiment=decode_throughput", "batch.size=1", f"run_dir={tmp_path}"])
    with RunFolder.create(cfg) as run:
        axes: dict[str, Any] = {"dtype": "bfloat16", "context": [8192], "checks": {}, "p50_ms": 2.0, "steps": 8}
        run.append_row(run.row(**{"engine": "cuda", **axes, **fields}), RAW | raw)
        assert read_folder(run.path) == []
        other = vary(cfg, ["routing=checkpoint"])  # nothing says which experts
        run.under(other).append_row(run.under(other).row(engine="cuda", **axes), RAW)
        run.append_row(run.row(engine="cuda", **axes), RAW)
        (step,) = read_folder(run.path)
        assert step.row.routing == "uniform" and step.p50_ms == 2.0 and step.trace is None


def test_other_builds_bounds_and_repetitions_are_no_steps_of_the_simulator() -> None:
    steps = read_folder(KEPT / "2026-11-30-kernel_ablation-81aa6eff")
    assert sorted(step.ring.window for step in steps if step.row.batch == 1) == [4, 5, 6, 7, 8]
    assert {step.row.routing for step in steps} == {"uniform"} and len(steps) == 10


def test_rows_of_another_kind_are_left_out_and_none_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    shutil.copytree(KEPT / "2026-11-30-plan_ablation-4b3ce8d8", folder)
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    others = [
        {**lines[0], **change}
        for change in ({"bound": "zero_wait"}, {"gpu": "h100"}, {"routing": "checkpoint"}, {"model": "nano"})
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, others)) + "\n")
    with pytest.raises(MkError, match="has no measured step of north_mini_code on h200"):
        simulator_accuracy.main(load_config(["experiment=simulator_accuracy", f"experiment.rows=[{folder}]"]))
    with pytest.raises(MkError, match="no folder is nowhere"):
        simulator_accuracy.main(load_config(["experiment=simulator_accuracy", "experiment.rows=[nowhere]"]))
    (folder / "rows.jsonl").write_text(json.dumps({**lines[0], "config_hash": "0" * 64}) + "\n")
    with pytest.raises(MkError, match="the configuration 0000000000000000 of a row is not beside it"):
        read_folder(folder)
