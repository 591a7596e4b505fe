"""Steps that a card took, for the simulator to be fitted to and judged by: rows of run folders, with what they ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mk.config import ModelConfig, RoutingConfig
from mk.errors import MkError
from mk.kernel.trace import StepTrace
from mk.model.geometry import PRESETS, Geometry
from mk.model.opening import geometry_of
from mk.programs import Plan, bucket_for
from mk.results.kept import read_configs
from mk.results.rows import Row, read_raw, read_rows
from mk.ring import SLOT_KB, window_for, windows_of
from mk.schedule.costs import Costs
from mk.schedule.simulate import estimate
from mk.schedule.simulator.expand import Sample, expand
from mk.schedule.simulator.work import Ring, Work
from mk.splits import SplitPolicy


@dataclass(frozen=True)
class Measured:
    """A timed step: its row, plan, ring and sample, and the trace of the same step if there is one."""

    row: Row
    geometry: Geometry
    plan: Plan
    ring: Ring
    sample: Sample
    bucket: int
    trace: StepTrace | None

    @property
    def p50_ms(self) -> float:
        assert self.row.p50_ms is not None  # `read_folder` takes no other row
        return self.row.p50_ms

    @property
    def label(self) -> str:
        row, ring = self.row, self.ring
        return (
            f"{row.schedule} {row.wave_order} {row.placement} {max(row.context):,} keys {ring.window * SLOT_KB} KB of "
            f"{ring.slots} slots" + ", barriers" * self.plan.barriers + ", no run-ahead" * (not ring.run_ahead)
        )

    @property
    def handover(self) -> tuple[Ring, bool]:
        """What of the machine, not of the plan, may differ between steps: its ring, and whether barriers part waves."""
        return self.ring, self.plan.barriers

    def work(self) -> Work:
        return expand(self.plan.lower(self.geometry, len(self.sample.keys), self.bucket), self.sample)

    def simulated_ms(self, costs: Costs) -> float:
        return estimate(self.plan, self.geometry, self.sample, self.bucket, costs, self.ring) / 1e3


def read_folder(folder: Path, tell: Callable[[str], None] = lambda why: None) -> list[Measured]:
    """The whole steps of a run or kept folder that can be simulated, each configuration and batch once.

    Bounds, other builds (another poll, smaller copies, delays, a trace), steps of many launches and those that draw
    tokens are left out: the simulator knows nothing of them. So are rows of other things than decode steps, and single
    ones of a model or routing that cannot be opened here, which `tell` hears of. Raises MkError for a folder without
    rows or with a row whose configuration is not beside it, and for a trace that cannot be read.
    """
    if not (folder / "rows.jsonl").is_file():
        raise MkError(f"{folder}: has no rows.jsonl", hint="a run of decode_throughput or an ablation")
    configs, raw = read_configs(folder), read_raw(folder / "raw.jsonl")
    found: dict[tuple[str, int], Measured] = {}
    for row in read_rows(folder / "rows.jsonl"):
        config = configs.get(row.config_hash)
        if config is None:
            raise MkError(f"{folder}: the configuration {row.config_hash[:16]} of a row is not beside it")
        # the first variant of an ablation runs twice
        if (row.config_hash, row.batch) in found or not _whole_step(row, raw.get(row.raw_sha256 or "")):
            continue
        if not _simulable(config):
            continue
        try:
            step = _measured(row, config)
        except MkError as error:  # no geometry of its own, no trace to replay, leaves of another time
            tell(f"left out: {folder.name}, {row.arm or row.engine}, batch {row.batch}: {error}")
        else:
            path = folder / f"trace_batch{row.batch}.npz"
            trace = StepTrace.load(path) if path.is_file() else None
            found[row.config_hash, row.batch] = dataclasses.replace(step, trace=trace)
    return list(found.values())


def _whole_step(row: Row, raw: Mapping[str, Any] | None) -> bool:
    """Whether decode steps were timed on the card from end to end, in the build that serves: not one operation, a layer
    or a prompt, nor the build that can delay an SM. raw: what the row's figures are from; None beside it if lost."""
    timed = row.engine == "cuda" and row.p50_ms is not None and row.bound is None and row.clock is None
    of_steps = raw is None or raw.get("kind") == "steps"
    others = (row.slow_ns_per_tile, row.prompt_tokens, row.kernel, row.layer)
    return timed and of_steps and all(value is None for value in others)


def _simulable(config: Mapping[str, Any]) -> bool:
    """Whether the simulator knows what ran, and this alone gives the plan. Rows may be older than a leaf."""
    engine, experiment = config["engine"], config["experiment"]
    handoff, ring = engine.get("handoff", {}), engine["ring"]
    unknown = (
        handoff.get("pollers", "controller") != "controller",
        handoff.get("polls", "acquire") != "acquire",
        ring.get("copy_kb", 8) != 8,
        engine.get("trace", "none") != "none",
        experiment.get("launches", "step") != "step",
        config["schedule"]["name"] == "greedy",
        config["placement"]["name"] == "sm_map",
        config["sampling"]["temperature"] > 0,
    )
    return not any(unknown)


def _measured(row: Row, config: Mapping[str, Any]) -> Measured:
    """Without a trace. Raises MkError for a model without a geometry of its own, a routing that cannot be drawn, and
    leaves of another time."""
    try:
        model, routing = ModelConfig(**config["model"]), RoutingConfig(**config["routing"])
    except TypeError as error:
        raise MkError(f"its configuration is of another time: {error}") from error
    if model.preset not in PRESETS:
        raise MkError(f"model.preset={model.preset} has no geometry of its own")
    attention, schedule, ring = config["engine"]["attention"], config["schedule"], config["engine"]["ring"]
    plan = Plan(
        config["gpu"]["sms"],
        tuple(config["wave_order"]["waves"]),
        config["placement"]["name"],
        schedule["attention_claimers"] or 0,
        schedule["moe_claimers"] or 0,
        schedule["claim_ahead"] or 0,
        SplitPolicy(attention["split_keys"], attention["max_splits"]),
        barriers=config["engine"].get("handoff", {}).get("barriers", False),
    )
    window = window_for(windows_of(ring["window_kb"]), row.batch)
    return Measured(
        row,
        geometry_of(model),
        plan,
        Ring(slots=ring["slots"], window=window, run_ahead=ring.get("run_ahead", True)),
        Sample.draw(geometry_of(model), routing, row.context),
        bucket_for(max(row.context) + (row.steps or 0)),
        None,
    )
