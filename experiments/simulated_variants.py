"""Variants of a configuration by simulated step times, where there is no card; every row says `clock: simulated`."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.arms import require_apart, table
from experiments.console import progress
from experiments.forced_routing import RECORDED, forced_ids
from experiments.settings.decode import Variants
from mk.config import Config
from mk.errors import MkError
from mk.kernel.build import NO_RUN_AHEAD, defines_of
from mk.model.geometry import Geometry
from mk.model.opening import geometry_of
from mk.programs import Plan, bucket_for
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.results.step_figures import block_ratio, raw_steps, simulated_figures
from mk.schedule.lower import Program
from mk.schedule.simulate import costs_of, estimate, ring_of
from mk.schedule.simulator.expand import Sample

BOUND = "no waits"  # what the arm of a bound is called
ALONE = "as configured"  # the one of a configuration that is compared with nothing


def run(cfg: Config, jobs: Sequence[tuple[str, Config]], to_previous: bool = False, zero_wait: bool = False) -> int:
    """A simulated row a variant and batch, and their table. A variant without a simulation is named. to_previous:
    ratios are to the variant before, else all to the first. zero_wait: then also a row of the last one's bound.

    Exit status 0. Raises MkError as `able` does, before anything is written, and where two execute the same.
    """
    settings = cfg.experiment
    found: dict[str, list[Row]] = {}
    jobs, left = able(cfg, jobs)
    print("simulated: torch sees no GPU here", flush=True)
    with RunFolder.create(cfg) as folder:
        for batch in settings.batches:
            executed: dict[str, str] = {}
            last: tuple[Config, Geometry, Sample] | None = None  # that was simulated
            with progress(f"batch {batch}", len(jobs)) as done:
                for number, (label, job) in enumerate(jobs, 1):
                    geometry = geometry_of(job.model)
                    sample = Sample.draw(geometry, job.routing, [job.experiment.context] * batch)
                    first = None  # one round: no ratios, as on a card
                    if isinstance(settings, Variants) and settings.rounds > 1:
                        others = [rows[-1] for rows in found.values() if rows[-1].batch == batch]
                        first = others[-1 if to_previous else 0] if others else None
                    row, program = simulated(cfg, label, job, folder, geometry, sample, first)
                    ids = forced_ids(job.routing, geometry, batch, 1)
                    executes = (
                        program.schedule_hash,
                        ring_of(job.engine.ring, batch),
                        sample.keys,
                        ids is None or ids.tolist(),
                    )
                    executed[label], last = repr(executes), (job, geometry, sample)
                    found.setdefault(label, []).append(row)
                    done(number)
            require_apart(executed, batch)
            if zero_wait and last is not None:
                job, geometry, sample = last
                bound = simulated(cfg, BOUND, job, folder, geometry, sample, None, zero_wait=True)[0]
                found.setdefault(BOUND, []).append(bound)
        flags = f"gpu={cfg.gpu.name} engine=cuda"
        what = f"{cfg.model.name} on {cfg.gpu.name}"
        print(f"\nsimulated step times, {what}; measured by the same command where there is a card: {flags}")
        print(table(found, settings.batches, "the one before" if to_previous else "the first"))
        for label, message in left.items():
            print(f"not simulated: {label}: {message}")
        print(f"run folder: {folder.path}")
    return 0


def able(cfg: Config, jobs: Sequence[tuple[str, Config]]) -> tuple[list[tuple[str, Config]], dict[str, str]]:
    """(variants that can be simulated, why each other one cannot).

    Raises MkError where none can, and for a card that nothing was fitted for.
    """
    left: dict[str, str] = {}
    wrong: MkError | None = None  # which it would be on a card as well
    for label, job in jobs:
        costs_of(job.gpu)
        if why := unknown_to_simulator(job):
            left[label] = why
            continue
        try:
            for batch in cfg.experiment.batches:
                Sample.draw(geometry_of(job.model), job.routing, [job.experiment.context] * batch)
        except MkError as error:
            left[label], wrong = str(error), error
    if len(left) < len(jobs):
        return [(label, job) for label, job in jobs if label not in left], left
    if wrong is not None:
        raise wrong
    of_each = "; ".join(f"{label}: {why}" for label, why in left.items())
    raise MkError(f"{cfg.experiment.name} needs a GPU, and torch sees none here. Not simulated: {of_each}")


def unknown_to_simulator(job: Config) -> str | None:
    """What of a configuration cannot be simulated; None where everything can."""
    if set(defines_of(job)) - {NO_RUN_AHEAD}:
        return "another build of the kernel, of which the simulator knows nothing"
    if getattr(job.experiment, "launches", "step") != "step":  # op_bench launches parts, which can be
        return "a step of many launches, of which the simulator knows nothing"
    if job.sampling.temperature > 0:
        return "the waves that draw tokens, which were never traced for the simulator"
    if job.routing.path == RECORDED:
        return "what a router chose, which chooses on a card alone"
    if job.routing.name == "checkpoint":
        return "the router's own choice, for which a simulated step has no logits"
    return None


def simulated(
    cfg: Config,
    label: str,
    job: Config,
    run: RunFolder,
    geometry: Geometry,
    sample: Sample,
    first: Row | None,
    zero_wait: bool = False,
) -> tuple[Row, Program]:
    """Writes the row of a variant, with its ratio to the first one's, and returns it with what it would execute.
    zero_wait: the row is a bound, without the waits for other SMs."""
    settings, gpu, keys = job.experiment, job.gpu, list(sample.keys)
    plan = Plan.from_config(job)
    bucket = bucket_for(settings.context + settings.steps)
    program = plan.lower(geometry, len(keys), bucket)
    ms = estimate(plan, geometry, sample, bucket, costs_of(gpu), ring_of(job.engine.ring, len(keys)), zero_wait) / 1e3
    raw = {**raw_steps([ms], list(sample.experts.values())), "block_ms": [ms]}
    figures = simulated_figures(geometry, gpu, keys, raw)
    if first is not None:
        raw["base_block_ms"] = run.raw_of(first)["block_ms"]
        figures |= {"ratio": block_ratio([ms], raw["base_block_ms"]).ratio, "ratio_to": first.digest}
    row = run.under(job).row(
        experiment=cfg.experiment.name,
        engine="simulator",
        dtype="bfloat16",
        clock="simulated",
        arm=label,
        bound="zero_wait" if zero_wait else None,
        batch=len(keys),
        context=keys,
        checks={},
        schedule_hash=program.schedule_hash,
        tasks=program.tasks_by_operation(),
        **figures,
    )
    return run.append_row(row, raw), program
