"""How well the simulator ranks and times schedules that a card has run: measured rows beside their simulation."""

from __future__ import annotations

from pathlib import Path

from mk.compose import vary
from mk.config import Config
from mk.errors import MkError
from mk.model.geometry import PRESETS, Geometry
from mk.programs import Plan, bucket_for
from mk.rows import Row, read_rows
from mk.runs import RunFolder
from mk.schedule.simulate import costs_of, estimate, ring_of
from mk.schedule.simulator.expand import Sample

AHEAD = 256  # keys beyond a row's mean context that its lists have room for


def main(cfg: Config) -> int:
    """Exit status 0; a row a batch, with the rank correlation and the mean error over its schedules."""
    path = Path(cfg.experiment.rows)
    if not path.is_file():
        raise MkError(
            f"experiment.rows={path} is no file", hint="experiment.rows=results/h200/wave_order_ablation.jsonl"
        )
    geometry = PRESETS.get(cfg.model.preset or "")
    if geometry is None or cfg.model.path is not None:
        raise MkError("simulator_accuracy takes a geometry alone", hint="model=north_mini_code, or model=slice")
    measured = [row for row in read_rows(path) if usable(cfg, row)]
    if not measured:
        raise MkError(f"experiment.rows={path} has no measured step of {cfg.model.name} on {cfg.gpu.name}")
    with RunFolder.create(cfg) as run:
        for batch in sorted({row.batch for row in measured}):
            rows = [row for row in measured if row.batch == batch]
            simulated = [simulate_row(cfg, geometry, row) for row in rows]
            raw = {"kind": "simulated_ranks", "p50_ms": [row.p50_ms for row in rows], "simulated_ms": simulated}
            found = run.measured(
                raw, engine="simulator", dtype="bfloat16", clock="simulated", batch=batch, context=rows[0].context
            )
            run.append_row(found, raw)
            print(
                f"\nbatch {batch}, {found.schedules} schedules: rank correlation {found.rank_correlation:.2f}, "
                f"mean error {found.mean_error:.1%}"
            )
            for row, ms in sorted(zip(rows, simulated, strict=True), key=lambda pair: pair[0].p50_ms or 0.0):
                name = f"{row.schedule} {row.wave_order} {row.placement}"
                print(f"{name:48}{row.p50_ms:9.4f} ms   simulated {ms:9.4f}  {ms / row.p50_ms - 1:+7.1%}")
        print(f"\nrun folder: {run.path}")
    return 0


def usable(cfg: Config, row: Row) -> bool:
    """Whether the row is a whole step, by the clock of a card, of the configured model, card and routing."""
    axes = (row.engine, row.model, row.gpu, row.routing) == ("cuda", cfg.model.name, cfg.gpu.name, cfg.routing.name)
    return axes and row.clock is None and row.bound is None and row.p50_ms is not None


def simulate_row(cfg: Config, geometry: Geometry, row: Row) -> float:
    """The step that a row measured, simulated, in milliseconds."""
    axes = [f"schedule={row.schedule}", f"wave_order={row.wave_order}", f"placement={row.placement}"]
    varied = vary(cfg, axes)
    sample = Sample.draw(geometry, cfg.routing, row.context * (row.batch // len(row.context)))
    bucket = bucket_for(max(row.context) + AHEAD)
    us = estimate(Plan.from_config(varied), geometry, sample, bucket, costs_of(varied.gpu), ring_of(varied.engine.ring))
    return us / 1e3
