"""Every operation of a decode step alone by simulated times, where there is no card; every row says `clock: simulated`.

An operation is its parts of the step, a launch each, as on a card. It is simulated in every layer up to where the model
repeats itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.op_figures import COLUMNS, line, told
from experiments.op_parts import first_period, operations_of
from experiments.simulated_variants import ALONE, able
from mk.config import Config
from mk.model.opening import geometry_of
from mk.programs import Plan, bucket_for
from mk.results.runs import RunFolder
from mk.schedule.cut import waves_of
from mk.schedule.simulate import costs_of, ring_of, simulate
from mk.schedule.simulator.expand import Sample


def run(cfg: Config, names: Sequence[str]) -> int:
    """Exit status 0. names: of `chosen`.

    Raises MkError for what the simulator does not know, and a card that nothing was fitted for.
    """
    settings, whole, plan, costs = cfg.experiment, geometry_of(cfg.model), Plan.from_config(cfg), costs_of(cfg.gpu)
    able(cfg, [(ALONE, cfg)])
    g, bucket = first_period(whole), bucket_for(settings.context + settings.steps)
    print(f"simulated for {cfg.gpu.name}: torch sees no GPU here, and times nothing either", flush=True)
    with RunFolder.create(cfg) as folder:
        print(line(*COLUMNS), flush=True)
        for batch in settings.batches:
            keys, ring = [settings.context] * batch, ring_of(cfg.engine.ring, batch)
            program = plan.lower(g, batch, bucket)
            executed = plan.lower(whole, batch, bucket)
            parts, operations = waves_of(program), operations_of(program)
            sample = Sample.draw(whole, cfg.routing, keys)
            experts = sum(sample.experts.values()) / max(1, len(sample.experts))
            levelled = sample.levelled(g)
            for name in names:
                numbers = [number for layer in operations[name] for number in layer]
                us = sum(simulate(parts[n], levelled, costs, ring, sm_map=plan.sm_map).step_us for n in numbers)
                raw = {
                    "kind": "operation",
                    "sweep_ms": [us / 1e3],
                    "runs": len(operations[name]),
                    "experts": experts,
                }
                row = folder.measured(
                    raw,
                    engine="simulator",
                    dtype="bfloat16",
                    clock="simulated",
                    batch=batch,
                    context=keys,
                    kernel=name,
                    build_hash=None,
                    schedule_hash=executed.schedule_hash,
                )
                print(told(folder.append_row(row, raw), "simulator"), flush=True)
        print(f"run folder: {folder.path}")
    return 0
