"""Slow one SM down and time decode steps under static lists and under work stealing, which must give the same bits.

The SM is slower with every attention split and expert tile, the work that others could take from it. How much follows
from `slow_us`, the time by which its share of a layer is to take longer under static lists, and from how many tiles
such a share has, which is counted first. Under stealing it takes fewer tiles, and the step should lose less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.decode_rows import Timing
from experiments.decode_throughput import check_context, measure
from experiments.device_weights import open_weights, pack
from experiments.forced_routing import forced_ids
from experiments.kernel_checks import same_bits
from experiments.opening import make_runtime
from mk.build import build_for
from mk.config import Config
from mk.device import DeviceFacts
from mk.errors import MkError
from mk.kv import blocks_of
from mk.programs import Plan, Programs, bucket_for
from mk.runs import RunFolder
from mk.runtime import DELAYS, Runtime
from mk.sampling import SamplingParams
from mk.schedule.lower import Program
from mk.step_figures import raw_steps, step_figures

DEVICE = torch.device("cuda")
SEED = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One schedule at one speed. tiles: that the slow SM took in a step. mean_tiles: that an SM takes on average."""

    schedule: str
    slow_ns: int  # a tile
    timing: Timing
    tiles: float
    mean_tiles: float
    logits: Tensor  # of the last step, float32 [rows, vocab]


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when bits differ, or stealing does not help."""
    _check_settings(cfg)
    if not torch.cuda.is_available():
        raise MkError("slow_sm needs a GPU, and torch sees none here")
    DeviceFacts.read().require(cfg.gpu)
    settings, source = cfg.experiment, open_weights(cfg, DEVICE)
    g, static = source.geometry, replace(Plan.from_config(cfg), attention_claimers=0, moe_claimers=0)
    stealing = replace(static, attention_claimers=static.n_sm, moe_claimers=static.n_sm, claim_ahead=2)
    library = build_for(cfg, g, static.splits, DELAYS)
    longest = settings.context + settings.steps
    bucket = bucket_for(longest)
    programs = {
        name: Programs(g, settings.batch, plan).get(bucket)
        for name, plan in (("static", static), ("work_stealing", stealing))
    }
    blocks = blocks_of(longest)
    count = settings.batch * blocks + 1
    runtime = make_runtime(cfg, library, pack(source, DEVICE), {"full": count, "sliding": count}, blocks, longest)
    with RunFolder.create(cfg) as run:
        counted = _run(cfg, runtime, programs["static"], "static", 0)
        slow_ns = round(settings.slow_us * 1000 * g.layers / counted.tiles) if counted.tiles else 0
        runs = [counted] + [
            _run(cfg, runtime, programs[name], name, ns)
            for name, ns in (("static", slow_ns), ("work_stealing", 0), ("work_stealing", slow_ns))
        ]
        checks = verdicts(runs)
        for one in runs:
            context = [settings.context] * settings.batch
            raw = raw_steps(one.timing.step_ms, one.timing.experts_by_layer)
            row = run.row(
                engine="cuda",
                dtype="bfloat16",
                batch=settings.batch,
                context=context,
                checks={"schedule_verified": True, **checks},
                schedule=one.schedule,
                build_hash=library.build_hash,
                schedule_hash=one.timing.schedule_hash,
                slow_ns_per_tile=one.slow_ns,
                slow_sm_tiles=one.tiles,
                mean_sm_tiles=one.mean_tiles,
                **step_figures(g, cfg.gpu, context, raw),
            )
            run.append_row(row, raw)
        print(f"\n{table(runs, g.layers)}")
        print(", ".join(name if passed else f"{name} FAILED" for name, passed in checks.items()))
        print(f"run folder: {run.path}")
    return 0 if all(checks.values()) else 1


def _check_settings(cfg: Config) -> None:
    s = cfg.experiment
    if not 0 <= s.sm < cfg.gpu.sms:
        raise MkError(f"experiment.sm={s.sm} must lie in 0..{cfg.gpu.sms - 1}", hint="experiment.sm=0")
    check_context(cfg)


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
    return Run(schedule, slow_ns, timing, taken[settings.sm].item(), taken.mean().item(), logits)


def verdicts(runs: list[Run]) -> dict[str, bool]:
    """Of static, static slowed, stealing, stealing slowed."""
    static, slow_static, stealing, slow_stealing = runs
    pairs = (static, slow_static), (stealing, slow_stealing)
    lost = [slow.timing.p50_ms - normal.timing.p50_ms for normal, slow in pairs]
    return {
        "same_bits": all(same_bits(run.logits, static.logits) for run in runs),
        "fewer_tiles": slow_stealing.tiles < stealing.tiles and slow_stealing.tiles < slow_static.tiles,
        "loses_less": lost[1] < lost[0],
    }


def table(runs: list[Run], layers: int) -> str:
    """A line a run. Growth is against the same schedule at full speed, in microseconds a layer."""
    normal = {run.schedule: run.timing.p50_ms for run in runs if not run.slow_ns}
    head = ("schedule", "slower, ns/tile", "p50 ms", "growth us/layer", "its tiles/step", "mean SM's")
    cells = [head] + [
        (
            run.schedule,
            f"{run.slow_ns}",
            f"{run.timing.p50_ms:.4f}",
            f"{(run.timing.p50_ms - normal[run.schedule]) * 1e3 / layers:.2f}",
            f"{run.tiles:.1f}",
            f"{run.mean_tiles:.1f}",
        )
        for run in runs
    ]
    return "\n".join("  ".join(cell.rjust(len(name)) for cell, name in zip(row, head, strict=True)) for row in cells)
