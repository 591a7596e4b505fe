"""The ladder of schedules: round robin, row owner, the configured one, greedy, and the best that a search found.

The simulator proposes, on a CPU: its rows say `clock: simulated` and give each schedule's gap to the bounds, and its
regret under other routings. Where the card is there and `experiment.rounds` is not 0, the same schedules are then run
in turn, round after round, and compared in pairs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from experiments import decode_throughput, schedule_paired
from experiments.console import progress
from experiments.schedule_ladder import draw_ladder, ladder_table, regret_table
from experiments.unread import require_greedy
from mk.config import Config, RoutingConfig
from mk.errors import MkError
from mk.graph import LAYER_WAVES
from mk.model.geometry import PRESETS, Geometry
from mk.model.opening import geometry_of
from mk.programs import Plan, bucket_for
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.results.step_figures import raw_steps
from mk.schedule.bounds import bounds
from mk.schedule.search import Judge, search
from mk.schedule.simulate import costs_of, estimate, ring_of
from mk.schedule.simulator.expand import Sample
from mk.schedule.simulator.work import Ring
from mk.schedule.stored import StoredSchedule
from mk.verify import verify


@dataclass(frozen=True)
class Step:
    """A step of the ladder: how a configuration would spell it."""

    label: str
    config: Config

    @property
    def plan(self) -> Plan:
        return Plan.from_config(self.config)

    def ring(self, rows: int) -> Ring:
        return ring_of(self.config.engine.ring, rows)


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 where a schedule failed on the card, or the configured one differs from itself there."""
    settings, costs = cfg.experiment, costs_of(cfg.gpu)
    if cfg.schedule.name != "static":
        raise MkError(f"schedule_search starts from a static schedule, not {cfg.schedule.name}", hint="schedule=static")
    require_greedy(cfg)
    if cfg.model.preset not in PRESETS or cfg.model.path is not None:
        raise MkError("schedule_search takes a geometry alone", hint="model=north_mini_code, or model=slice")
    geometry = geometry_of(cfg.model)
    on_card = bool(settings.rounds) and torch.cuda.is_available()
    (decode_throughput.check if on_card else decode_throughput.check_settings)(
        decode_throughput.job_of(cfg), settings.name
    )
    found: list[Row] = []
    failed: list[str] = []
    with RunFolder.create(cfg) as run:
        for batch in settings.batches:
            sample = Sample.draw(geometry, cfg.routing, [settings.context] * batch)
            bucket = bucket_for(settings.context + settings.steps)
            sm_map = Plan.from_config(cfg).sm_map
            judge = Judge(geometry, sample, bucket, cfg.gpu.sms, costs, cfg.engine.ring.slots, sm_map)
            steps = ladder(cfg, run, judge)
            rows = [_append(step, run, judge) for step in steps]
            found += rows
            print(f"\nbatch {batch}, simulated\n{ladder_table(rows)}", flush=True)
            routed = robustness(steps, run, judge)
            if routed:
                print(f"\nmilliseconds by routing, and regret\n{regret_table(routed)}", flush=True)
            if on_card:
                simulated = {step.label: row.p50_ms or 0.0 for step, row in zip(steps, rows, strict=True)}
                failed += schedule_paired.compare(cfg, run, {s.label: s.config for s in steps}, simulated, batch)
        draw_ladder(found, run.path / "ladder.png", f"{cfg.model.name}, {cfg.gpu.name}, simulated")
        for message in failed:
            print(f"failed: {message}")
        print(f"\nrun folder: {run.path}")
    return int(bool(failed))


def ladder(cfg: Config, run: RunFolder, judge: Judge) -> list[Step]:
    """The steps for a batch; what the search found is stored in the run folder. Each one's program is verified."""
    settings, batch = cfg.experiment, len(judge.sample.keys)
    own = StoredSchedule.of(cfg, batch)
    steps = [
        Step("round_robin", dataclasses.replace(own, waves=LAYER_WAVES, placement="round_robin").apply(cfg)),
        Step("row_owner", dataclasses.replace(own, waves=LAYER_WAVES, placement="row_owner").apply(cfg)),
        Step("configured", cfg),
        Step("greedy", dataclasses.replace(cfg, schedule=dataclasses.replace(cfg.schedule, name="greedy"))),
    ]
    started = time.perf_counter()
    with progress(f"searching, batch {batch}", 1 + settings.candidates + settings.local_steps) as told:
        result = search(
            own,
            judge,
            cfg.gpu.sms,
            settings.candidates,
            settings.local_steps,
            settings.seed,
            lambda simulated, best: told(simulated),
        )
    print(f"batch {batch}: {result.simulated} candidates in {time.perf_counter() - started:.0f} s", flush=True)
    path = run.path / f"schedule_batch{batch}.yaml"
    comment = (
        f"{cfg.model.name}, batch {batch}, context {settings.context}, routing {cfg.routing.name}, {cfg.gpu.name}: "
    )
    result.schedule.save(path, f"{comment}{result.us / 1e3:.4f} ms simulated")
    print(f"  stored: schedule=search schedule.path={path}", flush=True)
    schedule = dataclasses.replace(cfg.schedule, name="search", path=str(path))
    steps.append(Step("search", result.schedule.apply(dataclasses.replace(cfg, schedule=schedule))))
    for step in steps:
        verify(step.plan.lower(judge.geometry, batch, judge.bucket))
    return steps


def _append(step: Step, run: RunFolder, judge: Judge) -> Row:
    """Writes the step's simulated row, with its bounds."""
    cfg = step.config
    ring = step.ring(len(judge.sample.keys))
    arguments = (step.plan, judge.geometry, judge.sample, judge.bucket, judge.costs, ring)
    assert cfg.gpu.measured_tb_s is not None  # a card with costs was measured
    least = bounds(*arguments, cfg.gpu.measured_tb_s)
    raw = {
        **_raw(estimate(*arguments) / 1e3, judge.sample),
        "bounds_ms": {
            "dependencies_ms": least.dependencies / 1e3,
            "zero_wait_ms": least.zero_wait / 1e3,
            "busiest_ms": least.busiest / 1e3,
            "bytes_ms": least.bytes / 1e3,
        },
    }
    program = step.plan.lower(judge.geometry, len(judge.sample.keys), judge.bucket)
    own = run.under(cfg)
    return own.append_row(own.measured(raw, **_axes(step, judge), schedule_hash=program.schedule_hash), raw)


def _raw(ms: float, sample: Sample) -> dict[str, Any]:
    return {**raw_steps([ms], list(sample.experts.values())), "kind": "simulated_schedule"}


def _axes(step: Step, judge: Judge) -> dict[str, Any]:
    """What a simulated row says of its step, beside what the step's configuration says."""
    keys = list(judge.sample.keys)
    return {
        "engine": "simulator",
        "dtype": "bfloat16",
        "clock": "simulated",
        "arm": step.label,
        "batch": len(keys),
        "context": keys,
    }


def routings(geometry: Geometry, rows: int, seed: int) -> dict[str, RoutingConfig]:
    """Routings that a batch may meet, from the same experts for all rows to different ones."""
    k, most = geometry.top_k, min(rows * geometry.top_k, geometry.experts)
    return {
        "uniform": RoutingConfig("uniform", seed=seed),
        "correlated": RoutingConfig("correlated", seed=seed, distinct=(k + most) // 2),
        "all_same": RoutingConfig("adversarial", pattern="all_same"),
        "all_different": RoutingConfig("adversarial", pattern="all_different"),
    }


def robustness(steps: list[Step], run: RunFolder, judge: Judge) -> Mapping[str, dict[str, float]]:
    """Simulated milliseconds by routing and schedule; writes a row of each, with its regret.

    One sequence has the same number of experts whatever routes it: nothing then.
    """
    rows = len(judge.sample.keys)
    if rows == 1 or not judge.geometry.sparse_layers:
        return {}
    table: dict[str, dict[str, float]] = {}
    for name, routing in routings(judge.geometry, rows, seed=1).items():
        sample = Sample.draw(judge.geometry, routing, judge.sample.keys)
        times = {
            step.label: estimate(step.plan, judge.geometry, sample, judge.bucket, judge.costs, step.ring(rows)) / 1e3
            for step in steps
        }
        table[name] = times
        raws = {label: _raw(ms, sample) for label, ms in times.items()}
        rivals = [ms for raw in raws.values() for ms in raw["step_ms"]]
        for step in steps:
            raw = {**raws[step.label], "rivals_ms": rivals}
            own = run.under(step.config)
            own.append_row(own.measured(raw, **_axes(step, judge), routing=name), raw)
    return table
