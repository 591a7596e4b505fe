"""Slow one SM down and time decode steps under static lists and under work stealing, which must give the same bits.

The SM is slower with every attention split and expert tile, the work that others could take from it. How much follows
from `slow_us`, the time by which its share of a layer is to take longer under static lists, and from how many tiles
such a share has, which is counted first. Under stealing it takes fewer tiles, and the step should lose less. Without a
card the same is simulated, which has no bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.decode_throughput import check_context, measure
from experiments.device_weights import open_weights, pack
from experiments.forced_routing import forced_ids
from experiments.kernel_checks import same_bits
from experiments.opening import make_runtime
from experiments.unread import require_greedy, require_kernel, require_untouched
from mk.config import Config
from mk.device import DeviceFacts
from mk.errors import MkError
from mk.kernel.build import build_for
from mk.kernel.runtime import DELAYS, Runtime
from mk.kv import blocks_of
from mk.model.opening import geometry_of
from mk.programs import Plan, Programs, bucket_for
from mk.results.runs import RunFolder
from mk.results.step_figures import raw_steps, simulated_figures, step_figures
from mk.sampling import SamplingParams
from mk.schedule.lower import Program
from mk.schedule.simulate import costs_of, ring_of, simulate
from mk.schedule.simulator.expand import Sample

DEVICE = torch.device("cuda")
SEED = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One schedule at one speed. tiles: that the slow SM took in a step. mean_tiles: that an SM takes on average."""

    schedule: str
    slow_ns: int  # a tile
    step_ms: list[float]
    experts_by_layer: list[float]
    schedule_hash: str
    tiles: float
    mean_tiles: float
    logits: Tensor | None  # of the last step, float32 [rows, vocab]; none of a simulated one

    @property
    def p50_ms(self) -> float:
        return float(np.median(self.step_ms))


Measure = Callable[[str, int], Run]  # of a schedule, with so many nanoseconds more a tile


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when bits differ, or stealing does not help."""
    _check_settings(cfg)
    settings, measured = cfg.experiment, torch.cuda.is_available()
    if measured:
        DeviceFacts.read().require(cfg.gpu)
    g = geometry_of(cfg.model)
    static = replace(Plan.from_config(cfg), attention_claimers=0, moe_claimers=0)
    stealing = replace(static, attention_claimers=static.n_sm, moe_claimers=static.n_sm, claim_ahead=2)
    bucket = bucket_for(settings.context + settings.steps)
    programs = {
        name: Programs(g, settings.batch, plan).get(bucket)
        for name, plan in (("static", static), ("work_stealing", stealing))
    }
    measure, fields = _on_card(cfg, programs) if measured else _by_simulator(cfg, programs)
    with RunFolder.create(cfg) as run:
        counted = measure("static", 0)
        slow_ns = round(settings.slow_us * 1000 * g.layers / counted.tiles) if counted.tiles else 0
        others = (("static", slow_ns), ("work_stealing", 0), ("work_stealing", slow_ns))
        runs = [counted, *(measure(name, ns) for name, ns in others)]
        checks = verdicts(runs)
        for one in runs:
            context = [settings.context] * settings.batch
            raw = raw_steps(one.step_ms, one.experts_by_layer)
            figures = (step_figures if measured else simulated_figures)(g, cfg.gpu, context, raw)
            row = run.row(
                dtype="bfloat16",
                batch=settings.batch,
                context=context,
                checks={"schedule_verified": True, **checks},
                schedule=one.schedule,
                schedule_hash=one.schedule_hash,
                slow_ns_per_tile=one.slow_ns,
                slow_sm_tiles=one.tiles,
                mean_sm_tiles=one.mean_tiles,
                **fields,
                **figures,
            )
            run.append_row(row, raw)
        print("" if measured else f"\nsimulated step times, {cfg.model.name} on {cfg.gpu.name}")
        print(table(runs, g.layers))
        print(", ".join(name if passed else f"{name} FAILED" for name, passed in checks.items()))
        print(f"run folder: {run.path}")
    return 0 if all(checks.values()) else 1


def _check_settings(cfg: Config) -> None:
    s = cfg.experiment
    require_kernel(cfg)
    require_greedy(cfg)
    require_untouched(cfg, ("schedule",))
    if not 0 <= s.sm < cfg.gpu.sms:
        raise MkError(f"experiment.sm={s.sm} must lie in 0..{cfg.gpu.sms - 1}", hint="experiment.sm=0")
    check_context(cfg)


def _on_card(cfg: Config, programs: dict[str, Program]) -> tuple[Measure, dict[str, Any]]:
    """And fields of its rows."""
    settings, source = cfg.experiment, open_weights(cfg, DEVICE)
    library = build_for(cfg, source.geometry, programs["static"].shape.splits, DELAYS)
    longest = settings.context + settings.steps
    blocks = blocks_of(longest)
    count = settings.batch * blocks + 1
    runtime = make_runtime(cfg, library, pack(source, DEVICE), {"full": count, "sliding": count}, blocks, longest)
    fields = {"engine": "cuda", "build_hash": library.build_hash}
    return lambda name, slow_ns: _run(cfg, runtime, programs[name], name, slow_ns), fields


def _by_simulator(cfg: Config, programs: dict[str, Program]) -> tuple[Measure, dict[str, Any]]:
    """As `_on_card`. Raises MkError for a card that nothing was fitted for."""
    settings, costs, ring = cfg.experiment, costs_of(cfg.gpu), ring_of(cfg.engine.ring, cfg.experiment.batch)
    sample = Sample.draw(geometry_of(cfg.model), cfg.routing, [settings.context] * settings.batch)

    def one(name: str, slow_ns: int) -> Run:
        step = simulate(programs[name], sample, costs, ring, slow=(settings.sm, slow_ns / 1e3))
        taken, experts = step.tiles_taken(), list(sample.experts.values())
        hashed = programs[name].schedule_hash
        mean = float(np.mean(taken))
        return Run(name, slow_ns, [step.step_us / 1e3], experts, hashed, float(taken[settings.sm]), mean, None)

    print("simulated: torch sees no GPU here", flush=True)
    return one, {"engine": "simulator", "clock": "simulated", "build_hash": None}


def _run(cfg: Config, runtime: Runtime, program: Program, schedule: str, slow_ns: int) -> Run:
    settings = cfg.experiment
    steps = settings.warmup + settings.steps
    forced = forced_ids(cfg.routing, runtime.geometry, settings.batch, steps)
    runtime["tiles_taken"].zero_()
    runtime.stream.wait_stream(torch.cuda.current_stream())
    runtime.inject_delays(slow_sm=settings.sm, slow_ns=slow_ns)
    greedy = [SamplingParams()] * settings.batch
    timing = measure(runtime, program, forced, greedy, settings.context, settings.steps, settings.warmup, SEED)
    runtime.inject_delays()
    taken = runtime["tiles_taken"].double() / steps
    logits = runtime["logits"][: settings.batch, : runtime.geometry.vocab].clone()
    tiles, mean = taken[settings.sm].item(), taken.mean().item()
    hashed = timing.schedule_hash
    return Run(schedule, slow_ns, timing.step_ms, timing.experts_by_layer, hashed, tiles, mean, logits)


def verdicts(runs: list[Run]) -> dict[str, bool]:
    """Of static, static slowed, stealing, stealing slowed."""
    static, slow_static, stealing, slow_stealing = runs
    pairs = (static, slow_static), (stealing, slow_stealing)
    lost = [slow.p50_ms - normal.p50_ms for normal, slow in pairs]
    bits = [run.logits for run in runs if run.logits is not None]
    return {
        **({"same_bits": all(same_bits(one, bits[0]) for one in bits)} if bits else {}),
        "fewer_tiles": slow_stealing.tiles < stealing.tiles and slow_stealing.tiles < slow_static.tiles,
        "loses_less": lost[1] < lost[0],
    }


def table(runs: list[Run], layers: int) -> str:
    """A line a run. Growth is against the same schedule at full speed, in microseconds a layer."""
    normal = {run.schedule: run.p50_ms for run in runs if not run.slow_ns}
    head = ("schedule", "slower, ns/tile", "p50 ms", "growth us/layer", "its tiles/step", "mean SM's")
    cells = [head] + [
        (
            run.schedule,
            f"{run.slow_ns}",
            f"{run.p50_ms:.4f}",
            f"{(run.p50_ms - normal[run.schedule]) * 1e3 / layers:.2f}",
            f"{run.tiles:.1f}",
            f"{run.mean_tiles:.1f}",
        )
        for run in runs
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
