"""How well the simulator ranks and times schedules that a card has run: measured rows beside their simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.console import progress
from experiments.unread import require_greedy
from mk.config import Config
from mk.errors import MkError
from mk.results.runs import RunFolder
from mk.schedule.measured import Measured, read_folder
from mk.schedule.simulate import costs_of


def main(cfg: Config) -> int:
    """Exit status 0; rows for each batch and for all, over all schedules and over parts of them."""
    require_greedy(cfg)
    settings, costs = cfg.experiment, costs_of(cfg.gpu)
    found: dict[tuple[str, int], Measured] = {}  # a configuration that several runs timed counts once
    for step in (step for folder in folders(settings.rows) for step in read_folder(folder, print)):
        if usable(cfg, step):
            found.setdefault((step.row.config_hash, step.row.batch), step)
    steps = list(found.values())
    if not steps:
        raise MkError(f"experiment.rows={settings.rows} has no measured step of {cfg.model.name} on {cfg.gpu.name}")
    steps.sort(key=lambda step: (step.row.batch, step.p50_ms))
    simulated = []
    with progress("simulating", len(steps)) as done:
        for number, step in enumerate(steps, 1):
            simulated.append(step.simulated_ms(costs))
            done(number)
    for step, ms in zip(steps, simulated, strict=True):
        mark = "fitted" if step.row.wave_order in settings.fitted else ""
        shown = f"{step.p50_ms:9.4f} ms   simulated {ms:9.4f}  {ms / step.p50_ms - 1:+7.1%}"
        print(f"batch {step.row.batch}  {step.label:96}{shown}  {mark}")
    with RunFolder.create(cfg) as run:
        print(f"\n{'schedules':44}{'number':>7}{'rank correlation':>18}{'mean error':>12}")
        for label, places in groups(steps, settings.fitted).items():
            raw = raw_of(steps, simulated, places)
            last = steps[places[-1]].row
            row = run.measured(
                raw,
                engine="simulator",
                dtype="bfloat16",
                clock="simulated",
                batch=last.batch,
                context=last.context,
                arm=label,
            )
            run.append_row(row, raw)
            print(f"{label:44}{row.schedules:7}{row.rank_correlation:18.3f}{row.mean_error:12.1%}")
        print(f"\nrun folder: {run.path}")
    return 0


def folders(patterns: Sequence[str]) -> list[Path]:
    """Of run or kept folders, each once. Raises MkError for a pattern that none fits."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        fitting = sorted(path for path in Path().glob(pattern) if path.is_dir()) if pattern[:1] != "/" else []
        fitting = fitting or ([Path(pattern)] if Path(pattern).is_dir() else [])
        if not fitting:
            raise MkError(
                f"experiment.rows: no folder is {pattern}",
                hint="experiment.rows=['results/h200/*-plan_ablation-*'], or folders of runs/",
            )
        found |= dict.fromkeys(fitting)
    return list(found)


def usable(cfg: Config, step: Measured) -> bool:
    """Whether the step is of the configured model, card and routing."""
    row = step.row
    return (row.model, row.gpu, row.routing) == (cfg.model.name, cfg.gpu.name, cfg.routing.name)


def groups(steps: Sequence[Measured], fitted: Sequence[str]) -> dict[str, list[int]]:
    """Places in `steps` by what they have in common: each batch, and all together.

    Of those with the batch's usual handover (see `Measured`), which most steps have: all that the constants were not
    fitted to, and of them the rows of owned strips, which alone were traced, and the others. Then the plans that ran
    with another handover too, with every one of theirs.
    """
    batches = sorted({step.row.batch for step in steps})
    of_batch = {batch: [step.handover for step in steps if step.row.batch == batch] for batch in batches}
    usual = {batch: max(of, key=of.count) for batch, of in of_batch.items()}
    same = [step.handover == usual[step.row.batch] for step in steps]
    varied = {_named(step) for step, as_usual in zip(steps, same, strict=True) if not as_usual}
    found: dict[str, list[int]] = {}
    for of in [[batch] for batch in batches] + [batches] * (len(batches) > 1):
        name = f"batch {' and '.join(map(str, of))}"
        mine = [place for place, step in enumerate(steps) if step.row.batch in of]
        plans = [place for place in mine if same[place]]
        if fitted:
            found[f"{name}, fitted"] = [place for place in plans if steps[place].row.wave_order in fitted]
            plans = [place for place in plans if steps[place].row.wave_order not in fitted]
        owned = [place for place in plans if steps[place].row.placement == "row_owner"]
        found[f"{name}: plans"] = plans
        found[f"{name}: row_owner"] = owned
        found[f"{name}: other placements"] = [place for place in plans if place not in owned]
        found[f"{name}: handover"] = [place for place in mine if _named(steps[place]) in varied]
    return {name: places for name, places in found.items() if places}


def _named(step: Measured) -> tuple[object, ...]:
    return step.row.schedule, step.row.wave_order, step.row.placement, tuple(step.row.context)


def raw_of(steps: Sequence[Measured], simulated: Sequence[float], places: Sequence[int]) -> dict[str, Any]:
    return {
        "kind": "simulated_ranks",
        "labels": [f"batch {steps[place].row.batch} {steps[place].label}" for place in places],
        "measured": [steps[place].row.raw_sha256 for place in places],  # the rows', by their raw data
        "p50_ms": [steps[place].p50_ms for place in places],
        "simulated_ms": [simulated[place] for place in places],
    }
