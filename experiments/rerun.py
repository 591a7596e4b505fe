"""Repeat a stored run with its own configuration (run=ID), and hold each row's figures to the interval that they had.

The sources must be those of the run, and nothing but where the new run goes can be chosen. A figure is compared where
its row has an interval for it: a ratio's, the tenth to ninetieth percentile around a measured p50, the runs of a score.
What a simulator or a count gave must come out the same, and so must every verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mk.compose import experiment_main, load_config, stored_config
from mk.config import Config, config_hash, resolved
from mk.errors import MkError
from mk.results.kept import read_configs
from mk.results.rows import Row, read_rows
from mk.results.sources import ROOT, source_hash
from mk.validation import closest

# what makes a row the other's repetition; rows that agree in all of it come in the same order
AXES = ("engine", "arm", "clock", "bound", "batch", "context", "routing", "schedule", "wave_order", "placement",
        "sampling", "kernel", "method", "tile", "event", "prefill_policy", "workload")  # fmt: skip
GIVEN = ("run_dir", "logger", "debug", "experiment")  # what a rerun takes from its own command line
COUNTS = ("new_tokens", "equal_tokens", "waves", "needles")
SIMULATED = ("p50_ms", "distinct_experts", "bytes_per_step", "rank_correlation", "mean_error", "regret")
SAME = 1e-9  # relative


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of a row and of its repetition, and the interval that it must lie in."""

    figure: str
    stored: float
    again: float | None
    low: float
    high: float

    @property
    def within(self) -> bool:
        return self.again is not None and self.low <= self.again <= self.high


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 where the run did not end with 0, a row is missing or a figure lies outside."""
    _refuse_axes(cfg)
    folder, *others = find(cfg.experiment.run, Path(cfg.run_dir), ROOT / "results")
    stored = [row for part in (folder, *others) for row in read_rows(part / "rows.jsonl")]
    require_sources(folder, stored)
    config = _config(cfg, folder)
    print(f"repeating {folder}, {len(stored)} rows: {stored[0].command or config.experiment.name}", flush=True)
    places = Path(cfg.run_dir), f"*-{config.experiment.name}-{config_hash(config)[:8]}*"
    before = set(places[0].glob(places[1]))
    status = experiment_main(config.experiment.name)(config) or 0
    new = set(places[0].glob(places[1])) - before
    if len(new) != 1:
        raise MkError(f"{len(new)} runs of this configuration came up in {cfg.run_dir}", hint="run_dir=<an own folder>")
    (made,) = new
    problems = list(report(stored, read_rows(made / "rows.jsonl")))
    print(f"\n{folder.name} and again {made.name}: " + ("; ".join(problems) or "all as it was"))
    return int(bool(problems) or status != 0)


def find(run: str, run_dir: Path, results: Path) -> list[Path]:
    """The folder of a run, or those of its parts where what it simulated is kept apart. Raises MkError where there is
    none, with the nearest name."""
    broken: list[Path] = []
    for places in ([Path(run)], [run_dir / run], sorted(results.glob(f"*/{run}"))):
        if found := [place for place in places if not _missing(place)]:
            return found
        broken += [place for place in places if place.is_dir()]
    if broken:
        raise MkError(f"run={run}: {broken[0]} has no {' and no '.join(_missing(broken[0]))}")
    known = [path.parent.name for path in (*run_dir.glob("*/rows.jsonl"), *results.glob("*/*/rows.jsonl"))]
    near = closest(run, known)
    raise MkError(
        f"run={run}: there is no such run in {run_dir}/ or results/<card>/",
        hint=f"did you mean run={near}?" if near else "a run's name is that of its folder",
    )


def _missing(folder: Path) -> list[str]:
    """What a run is repeated from, and is not there."""
    return [name for name in ("rows.jsonl", "config.yaml") if not (folder / name).is_file()]


def require_sources(folder: Path, rows: list[Row]) -> None:
    """Raises MkError for a run without rows, or whose rows came from other sources than these."""
    if not rows:
        raise MkError(f"{folder / 'rows.jsonl'} has no rows")
    here = source_hash()
    for row in rows:
        if row.source_hash != here:
            commit = row.commit.removesuffix("-dirty")
            raise MkError(
                f"{folder.name} came from the sources {row.source_hash} of commit {row.commit}, and these are {here}",
                hint="rows of schema 1 do not say from which" if row.schema < 2 else f"git checkout {commit}",
            )


def _refuse_axes(cfg: Config) -> None:
    plain = load_config(["experiment=rerun", "run=any"])
    for name, value in resolved(cfg).items():
        if name not in GIVEN and value != resolved(plain)[name]:
            raise MkError(f"a rerun has the {name} of its run", hint="give run, run_dir and logger alone")


def _config(cfg: Config, folder: Path) -> Config:
    """The run's own, with the place and the logger of this one."""
    config = stored_config(next(iter(read_configs(folder).values())))
    return dataclasses.replace(config, run_dir=cfg.run_dir, logger=cfg.logger, debug=cfg.debug)


def report(stored: list[Row], again: list[Row]) -> Iterator[str]:
    """Prints a line a comparison; gives what is wrong."""
    left = list(again)
    for number, row in enumerate(stored, start=1):
        twin = next((other for other in left if same_axes(row, other)), None)
        if twin is None:
            yield f"row {number} did not come again"
            continue
        left.remove(twin)
        name = f"row {number}, {row.arm or row.engine}, batch {row.batch}"
        for verdict, passed in row.checks.items():
            if twin.checks.get(verdict) != passed:
                yield f"{name}: {verdict} was {passed} and is {twin.checks.get(verdict)}"
        found = list(comparisons(row, twin))
        for of in found:
            shown = "-" if of.again is None else f"{of.again:.5g}"
            verdict = "within" if of.within else "OUTSIDE"
            print(f"{name}: {of.figure} {of.stored:.5g} [{of.low:.5g}, {of.high:.5g}], again {shown}: {verdict}")
            if not of.within:
                yield f"{name}: {of.figure} {shown} lies outside of {of.low:.5g} to {of.high:.5g}"
        if not found:
            print(f"{name}: {len(row.checks)} verdicts, and no figure with an interval")
    if left:
        yield f"{len(left)} rows came that were not there"


def same_axes(row: Row, other: Row) -> bool:
    """Whether they are of the same thing."""
    return all(getattr(row, axis) == getattr(other, axis) for axis in AXES)


def comparisons(row: Row, again: Row) -> Iterator[Comparison]:
    """Of the figures that the stored row has an interval for."""

    def of(figure: str, low: float, high: float) -> Comparison:
        return Comparison(figure, getattr(row, figure), getattr(again, figure), low, high)

    for figure in (*COUNTS, *(SIMULATED if row.clock == "simulated" else ())):
        value = getattr(row, figure)
        if value is not None:
            yield of(figure, value - SAME * abs(value), value + SAME * abs(value))
    if row.clock == "simulated":
        return
    if row.p50_ms is not None and row.p10_ms is not None and row.p90_ms is not None:
        yield of("p50_ms", row.p10_ms, row.p90_ms)
    if row.ratio is not None and row.ratio_low is not None and row.ratio_high is not None:
        yield of("ratio", row.ratio_low, row.ratio_high)
    if row.scores is not None:
        yield of("score", min(row.scores), max(row.scores))
