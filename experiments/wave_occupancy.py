"""How long SMs idle in one layer of a step, wave by wave: a kernel an operation, and the megakernel; with a picture.

Arms are variants of this configuration, in trace builds, which are some percent slower; what is read is the last step's
trace. mk/kernel/occupancy.py says what idle is. The layer begins when the one before is complete, so that what the
megakernel has streamed by then shows as the shorter layer, and idle time counts for the wave that ends next. Without a
card, arms of one launch are simulated.
"""

from __future__ import annotations

from typing import Any

import torch

from experiments import decode_throughput, simulated_variants
from experiments.decode_throughput import configured_sampling, measure, noting, open_runtime, plans
from experiments.decode_variants import variants
from experiments.device_weights import hold_weights
from mk.config import Config
from mk.errors import MkError
from mk.kernel.build import DEPENDENT_LAUNCH, build_for
from mk.kernel.launches import WaveLaunches
from mk.kernel.occupancy import Spans, busy, ends_of_layer, idle_by_wave
from mk.kernel.trace import StepTrace, records_of, records_of_launches
from mk.model.opening import geometry_of
from mk.programs import Plan, bucket_for
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.schedule.simulate import costs_of, first_layers, ring_of, simulate
from mk.schedule.simulator.expand import Sample


def main(cfg: Config) -> int:
    """Exit status 0; whatever is wrong is an MkError."""
    jobs, layer = variants(cfg, lambda varied: varied), cfg.experiment.layer
    for _, job in jobs:
        decode_throughput.check_steps(job)
        if job.engine.trace != "none":
            raise MkError(f"wave_occupancy traces by itself, not by engine.trace={job.engine.trace}")
        g = geometry_of(job.model)
        if layer not in g.sparse_layers or layer == 0:
            others = [other for other in g.sparse_layers if other]
            hint = f"experiment.layer={others[len(others) // 2]}" if others else "another model="
            raise MkError(f"experiment.layer={layer} has no experts, or no layer before it", hint=hint)
    measured = torch.cuda.is_available()
    if measured:
        for _, job in jobs:
            decode_throughput.require_card(job)
    else:
        jobs, left = simulated_variants.able(cfg, jobs)
        print("simulated: torch sees no GPU here", flush=True)
        print("".join(f"not simulated: {label}: {why}\n" for label, why in left.items()), end="", flush=True)
    with RunFolder.create(cfg) as run:
        for batch in cfg.experiment.batches:
            panels: dict[str, Spans] = {}
            for label, job in jobs:
                spans, more = traced(job, batch) if measured else simulated(job, batch, layer)
                row, panels[label] = _append(cfg, run, job, label, batch, spans, more)
                print(_told(row), flush=True)
            _draw(cfg, run, batch, panels, measured)
        print(f"run folder: {run.path}")
    return 0


def traced(job: Config, batch: int) -> tuple[Spans, dict[str, Any]]:
    """Of the last of some steps on the card, and fields of its row."""
    held = hold_weights(job, decode_throughput.DEVICE)
    settings, g = job.experiment, held.source.geometry
    programs, routes = plans(job, g)
    program = programs[batch]
    more = (DEPENDENT_LAUNCH,) if settings.launches == "dependent" else ()
    library = build_for(noting(job, "waits"), g, program.shape.splits, *more)
    records = records_of(program) if settings.launches == "step" else records_of_launches(program)
    runtime = open_runtime(job, library, held.packed, records)
    lengths = settings.context, settings.steps, settings.warmup
    timing = measure(runtime, program, routes[batch], configured_sampling(job, batch), *lengths)
    if isinstance(runtime, WaveLaunches):
        assert runtime.launch_trace is not None
        trace = StepTrace.of_launches(runtime.launch_trace[:-1])
    else:
        trace = StepTrace.read(runtime["trace"])
    fields = {"build_hash": library.build_hash, "schedule_hash": timing.schedule_hash, "p50_ms": timing.p50_ms}
    return Spans.of(trace), {**fields, "engine": "cuda", "checks": {"schedule_verified": True}}


def simulated(job: Config, batch: int, layer: int) -> tuple[Spans, dict[str, Any]]:
    """Of the step's first layers by the simulator, and fields of the row."""
    settings, whole = job.experiment, geometry_of(job.model)
    g = first_layers(whole, min(whole.layers, layer + 2))
    bucket = bucket_for(settings.context + settings.steps)
    program = Plan.from_config(job).lower(g, batch, bucket)
    sample = Sample.draw(whole, job.routing, [settings.context] * batch).levelled(g)
    trace = simulate(program, sample, costs_of(job.gpu), ring_of(job.engine.ring, batch)).trace()
    fields = {"build_hash": None, "clock": "simulated", "engine": "simulator", "checks": {}}
    return Spans.of(trace), fields


def _append(
    cfg: Config, run: RunFolder, job: Config, label: str, batch: int, spans: Spans, more: dict[str, Any]
) -> tuple[Row, Spans]:
    """Writes an arm's row; with the layer's spans."""
    layer = cfg.experiment.layer
    begin, ends = ends_of_layer(spans, layer)
    inside = spans.within(begin, max(ends.values()))
    at_work = busy(inside, sorted(set(spans.sm.tolist())))
    raw = {
        "kind": "occupancy",
        "busy_us": [[[round(moment, 3) for moment in stretch] for stretch in sm] for sm in at_work],
        "wave_ends_us": {wave: round(end - begin, 3) for wave, end in ends.items()},
    }
    axes = {"batch": batch, "context": [job.experiment.context] * batch, "dtype": "bfloat16", "layer": layer}
    row = run.under(job).measured(raw, experiment=cfg.experiment.name, arm=label, **axes, **more)
    return run.append_row(row, raw), inside


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Row` from the stretches in which each SM was at work, and the moments at which waves were complete."""
    ends = raw["wave_ends_us"]
    idle, length = idle_by_wave(raw["busy_us"], ends), max(ends.values())
    return {"layer_us": length, "idle_pct": 100 * sum(idle.values()) / length, "idle_us_by_wave": idle}


def _told(row: Row) -> str:
    waves = ", ".join(f"{wave} {us:.2f}" for wave, us in (row.idle_us_by_wave or {}).items())
    kind = "simulated, " if row.clock else ""
    return f"batch {row.batch}, {row.arm}: {kind}{row.layer_us:.1f} us a layer, {row.idle_pct:.1f} % idle: {waves}"


def _draw(cfg: Config, run: RunFolder, batch: int, panels: dict[str, Spans], measured: bool) -> None:
    from mk.schedule.timeline import draw_timelines  # matplotlib takes a second to import

    how = f"measured on {cfg.gpu.name}" if measured else f"simulated for {cfg.gpu.name}"
    layer = cfg.experiment.layer
    title = f"{cfg.model.name}, batch {batch}, {cfg.experiment.context} keys: layer {layer}, {how}"
    draw_timelines(panels, layer, run.path / f"layer{layer}_batch{batch}.png", title)
