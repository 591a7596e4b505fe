"""Variants of one configuration in turn: on the card, block after block; without one, by the simulator.

A variant is what decode_throughput runs with the same overrides on the command line: same configuration and hash, same
checks. Variants may differ in the ablated axes alone, and two of them that would execute the same fail the run. On the
card every round runs all of them, forwards then backwards, and the first one twice: between it and itself no
difference may be found. What was measured is written, whatever fails after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments import decode_throughput, simulated_variants
from experiments.arms import require_apart, require_axes, require_read, table
from experiments.decode_rows import Timing
from experiments.decode_throughput import Bench, job_of
from experiments.forced_routing import RECORDED
from mk.compose import expand_sweep, vary
from mk.config import Config
from mk.errors import MkError
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.results.step_figures import block_ratio

AGAIN = " (again)"  # what the first variant's second arm is called
FAILS = (MkError, torch.cuda.OutOfMemoryError)  # what ends an arm, and no other one


def main(cfg: Config) -> int:
    """Exit status 1 if a variant failed, or the first one differs from itself; the others run all the same."""
    jobs = timed_variants(cfg)
    if not torch.cuda.is_available():
        return simulated_variants.run(cfg, jobs)
    for _, job in jobs:
        decode_throughput.check(job, cfg.experiment.name)
    with RunFolder.create(cfg) as run:
        found, failed = on_card(cfg, jobs, run)
        print(f"\n{table(found, cfg.experiment.batches)}")
        for message in failed:
            print(f"failed: {message}")
        print(f"run folder: {run.path}")
    return int(bool(failed))


def plain(cfg: Config) -> Config:
    """As decode_throughput takes it, without a bound beside it."""
    return job_of(cfg, zero_wait=False)


def timed_variants(cfg: Config) -> list[tuple[str, Config]]:
    """`variants`, all of which can be timed. Raises MkError for what cannot, before the first one starts."""
    jobs = variants(cfg)
    for label, job in jobs:
        try:
            decode_throughput.check_settings(job, cfg.experiment.name)
        except MkError as error:
            own = [override for override in label.split() if override in str(error)]
            if not own:
                raise
            raise MkError(str(error), hint=f"experiment.variants without {own[0]}; {error.hint}") from error
    return jobs


def variants(cfg: Config, job: Callable[[Config], Config] = plain) -> list[tuple[str, Config]]:
    """The label and the configuration of every variant. job: what it is made of; by default decode_throughput's.

    Raises MkError for one that cannot be.
    """
    if not cfg.experiment.variants:
        raise MkError("experiment.variants is empty", hint="experiment.variants=['wave_order=default,parted']")
    jobs = []
    for variant in cfg.experiment.variants:
        if not variant.split() or any(override.startswith("experiment=") for override in variant.split()):
            raise MkError(f"experiment.variants: {variant!r} is not some overrides of decode_throughput")
        for overrides in expand_sweep(variant.split()):
            for override in overrides:
                require_read(override)
            jobs.append((" ".join(overrides), job(vary(cfg, overrides))))
    labels = [label for label, _ in jobs]
    for label in labels:
        if labels.count(label) > 1:
            raise MkError(f"experiment.variants names {label!r} twice")
    require_axes(cfg.experiment.axes, jobs)
    return jobs


def on_card(
    cfg: Config,
    jobs: list[tuple[str, Config]],
    run: RunFolder,
    to_previous: bool = False,
    written: Callable[[Row], None] = lambda row: None,
) -> tuple[dict[str, list[Row]], list[str]]:
    """Rows by variant, and what failed. to_previous: ratios are to the variant before, else all to the first; written:
    is told of each row.

    Raises MkError where two variants that take turns execute the same; of those one after the other the later fails.
    """
    settings = cfg.experiment
    found: dict[str, list[Row]] = {}
    failed: list[str] = []
    alone = settings.rounds == 1  # then each is closed before the next one opens: long contexts fill the card
    benches: dict[str, Bench] = {}
    traces: dict[int, Path] = {}  # by batch, of a variant that was closed: what its router chose
    executed: dict[int, dict[str, str]] = {batch: {} for batch in settings.batches}
    for number, (label, job) in enumerate(jobs, 1):
        print(f"\n[{number}/{len(jobs)}] {label}", flush=True)
        try:
            if alone:
                found[label] = []
                job = _recorded(job, traces.get)
                traces |= _by_itself(cfg, run, label, job, executed, found[label], written)
            else:
                benches[label] = opened(_recorded(job, partial(_asked, benches, run)))
        except FAILS as error:
            failed.append(f"{label}: {error}")
            print(f"failed: {error}", flush=True)
    for batch in settings.batches if benches else []:
        require_apart({label: bench.executed(batch) for label, bench in benches.items()}, batch)
    for batch in settings.batches if benches else []:
        blocks = in_turn(benches, batch, settings.rounds, failed)
        for label, row in append(cfg, run, benches, batch, blocks, failed, to_previous).items():
            found.setdefault(label, []).append(_told(row))
            written(row)
    return found, failed


def opened(job: Config) -> Bench:
    """On the card, and checked: raises one of `FAILS` where that fails."""
    bench = Bench.open(job)
    bench.check()
    return bench


def _recorded(job: Config, chosen: Callable[[int], Path | None]) -> Config:
    """`job`, with a file of the run where it is to replay what the router chose. chosen: that file, by batch; None
    without one.

    Raises MkError where no variant before it has routing=checkpoint, and for more batches than one.
    """
    if job.routing.path != RECORDED:
        return job
    batch, *others = job.experiment.batches
    path = None if others else chosen(batch)
    if path is None:
        raise MkError(
            f"routing.path={RECORDED} is what a variant before it with routing=checkpoint chose, of one batch",
            hint="'experiment.variants=[routing=checkpoint,routing=replay routing.path=recorded]'",
        )
    return dataclasses.replace(job, routing=dataclasses.replace(job.routing, path=str(path)))


def _asked(benches: dict[str, Bench], run: RunFolder, batch: int) -> Path | None:
    """What the last variant that leaves it to the router chooses, which is asked now."""
    routers = [bench for bench in benches.values() if bench.cfg.routing.name == "checkpoint"]
    if not routers:
        return None
    return decode_throughput.record(routers[-1].runtime.geometry, routers[-1].measure(batch), batch, run)


def _by_itself(
    cfg: Config,
    run: RunFolder,
    label: str,
    job: Config,
    executed: dict[int, dict[str, str]],
    rows: list[Row],
    written: Callable[[Row], None],
) -> dict[int, Path]:
    """Fills rows, a batch each; nothing of the bench outlives the call. executed: by batch, what ran before. Returns
    the files of what the router chose, by batch, where it did."""
    bench, traces = opened(job), {}
    for batch in cfg.experiment.batches:
        executed[batch][label] = bench.executed(batch)
        require_apart(executed[batch], batch)
    for batch in cfg.experiment.batches:
        timing = bench.measure(batch)
        rows.append(_told(bench.append(run, batch, timing, **_named(cfg, label))))
        written(rows[-1])
        if job.routing.name == "checkpoint":
            traces[batch] = decode_throughput.record(bench.runtime.geometry, timing, batch, run)
    return traces


def in_turn(benches: dict[str, Bench], batch: int, rounds: int, failed: list[str]) -> dict[str, list[Timing]]:
    """`rounds` blocks of every arm, the first variant's second arm among them; of one that fails, those before."""
    first = next(iter(benches))
    arms = {**benches, first + AGAIN: benches[first]}
    blocks: dict[str, list[Timing]] = {label: [] for label in arms}
    going = list(arms)
    for number in range(rounds):
        for label in list(going) if number % 2 == 0 else list(reversed(going)):
            try:
                blocks[label].append(arms[label].measure(batch, number, rounds))
            except FAILS as error:
                failed.append(f"{label}: batch {batch}, block {number + 1} of {rounds}: {error}")
                going.remove(label)
    return blocks


def append(
    cfg: Config,
    run: RunFolder,
    benches: dict[str, Bench],
    batch: int,
    blocks: dict[str, list[Timing]],
    failed: list[str],
    to_previous: bool = False,
) -> dict[str, Row]:
    """Writes the arms' rows, each with its ratio to the first one's, or to that of the one before, over the blocks that
    both have."""
    medians = {label: [timing.p50_ms for timing in timings] for label, timings in blocks.items()}
    first, rounds = next(iter(blocks)), cfg.experiment.rounds
    drift = _drift(first, medians, rounds)
    if drift:
        failed.append(f"batch {batch}: {drift}")
    rows: dict[str, Row] = {}
    base = first
    for label, timings in blocks.items():
        if not timings:
            continue
        raw: dict[str, Any] = {"block_ms": medians[label]}
        cut = f"{len(timings)} of {rounds} blocks" if len(timings) < rounds else None
        more = {**_named(cfg, label), "unstable": "; ".join(filter(None, (cut, drift))) or None}
        base = first if label.endswith(AGAIN) else base
        pairs = min(len(timings), len(medians[base]))
        if label != base and base in rows:
            raw = {"block_ms": medians[label][:pairs], "base_block_ms": medians[base][:pairs]}
            of = block_ratio(raw["block_ms"], raw["base_block_ms"])
            more |= {"ratio": of.ratio, "ratio_low": of.low, "ratio_high": of.high, "ratio_to": rows[base].digest}
        try:
            bench = benches[label.removesuffix(AGAIN)]
            rows[label] = bench.append(run, batch, Timing.join(timings), raw, **more)
        except MkError as error:  # figures that cannot be
            failed.append(f"{label}: {error}")
        if to_previous:
            base = label
    return rows


def _drift(first: str, medians: dict[str, list[float]], rounds: int) -> str | None:
    """Why no ratio of a batch is to be relied on; None where the first variant equals itself in all rounds."""
    base, again = medians[first], medians[first + AGAIN]
    if min(len(base), len(again)) < rounds:
        return f"{first} was not compared with itself"
    itself = block_ratio(again, base)
    return f"{first} differs from itself: ratio {itself.low:.4f} to {itself.high:.4f}" if itself.detectable else None


def _named(cfg: Config, label: str) -> dict[str, Any]:
    return {"experiment": cfg.experiment.name, "arm": label}


def _told(row: Row) -> Row:
    print(f"batch {row.batch}, {row.arm}: {row.p50_ms:.4f} ms", flush=True)
    return row
