"""Variants of one configuration in turn: on the card, block after block; without one, by the simulator.

A variant is what decode_throughput runs with the same overrides on the command line: same configuration and hash, same
checks. Variants may differ in the ablated axes alone, and two of them that would execute the same fail the run. On the
card every round runs all of them, forwards then backwards, and the first one twice: between it and itself no
difference may be found.
"""

from __future__ import annotations

from typing import Any

import torch

from experiments import decode_throughput, simulated_variants
from experiments.arms import require_apart, require_axes, table
from experiments.decode_rows import Timing
from experiments.decode_throughput import Bench, job_of
from mk.compose import expand_sweep, vary
from mk.config import Config
from mk.errors import MkError
from mk.rows import Row
from mk.runs import RunFolder
from mk.step_figures import block_ratio

AGAIN = " (again)"  # what the first variant's second arm is called


def main(cfg: Config) -> int:
    """Exit status 1 if a variant failed, or the first one differs from itself; the others run all the same."""
    jobs = variants(cfg)  # all composed before the first one starts
    if cfg.experiment.zero_wait or cfg.experiment.trace:
        raise MkError(
            "variants are timed without a bound or a trace", hint="experiment=decode_throughput, for one of them"
        )
    if not torch.cuda.is_available():
        return simulated_variants.run(cfg, jobs)
    for _, job in jobs:
        decode_throughput.check(job)
    with RunFolder.create(cfg) as run:
        found, failed = on_card(cfg, jobs, run)
        print(f"\n{table(found, cfg.experiment.batches)}")
        for label, message in failed.items():
            print(f"failed: {label}: {message}")
        print(f"run folder: {run.path}")
    return int(bool(failed))


def variants(cfg: Config) -> list[tuple[str, Config]]:
    """The label and the decode_throughput configuration of every variant. Raises MkError for one that cannot be."""
    if not cfg.experiment.variants:
        raise MkError("experiment.variants is empty", hint="experiment.variants=['wave_order=default,parted']")
    jobs = []
    for variant in cfg.experiment.variants:
        if not variant.split() or any(override.startswith("experiment=") for override in variant.split()):
            raise MkError(f"experiment.variants: {variant!r} is not some overrides of decode_throughput")
        for overrides in expand_sweep(variant.split()):
            jobs.append((" ".join(overrides), job_of(vary(cfg, overrides))))
    labels = [label for label, _ in jobs]
    for label in labels:
        if labels.count(label) > 1:
            raise MkError(f"experiment.variants names {label!r} twice")
    require_axes(cfg.experiment.axes, jobs)
    return jobs


def on_card(cfg: Config, jobs: list[tuple[str, Config]], run: RunFolder) -> tuple[dict[str, list[Row]], dict[str, str]]:
    """Rows by variant, and what failed by variant. Raises MkError where two variants execute the same."""
    settings = cfg.experiment
    found: dict[str, list[Row]] = {}
    failed: dict[str, str] = {}
    alone = settings.rounds == 1  # then each is closed before the next one opens: long contexts fill the card
    benches: dict[str, Bench] = {}
    for number, (label, job) in enumerate(jobs, 1):
        print(f"\n[{number}/{len(jobs)}] {label}", flush=True)
        try:
            bench = Bench.open(job)
            bench.check()
            if alone:
                found[label] = [
                    _told(bench.append(run, b, bench.measure(b), **_named(cfg, label))) for b in settings.batches
                ]
            else:
                benches[label] = bench
        except (MkError, torch.cuda.OutOfMemoryError) as error:
            failed[label] = str(error)
            print(f"failed: {error}", flush=True)
    for batch in settings.batches if benches else []:
        require_apart({label: bench.executed(batch) for label, bench in benches.items()}, batch)
    for batch in settings.batches if benches else []:
        blocks = in_turn(benches, batch, settings.rounds, failed)
        rows = append(cfg, run, benches, batch, blocks)
        for label, row in rows.items():
            found.setdefault(label, []).append(_told(row))
        again = next((row for label, row in rows.items() if label.endswith(AGAIN)), None)
        if again is not None and again.unstable:
            failed[f"batch {batch}"] = again.unstable
    return found, failed


def in_turn(benches: dict[str, Bench], batch: int, rounds: int, failed: dict[str, str]) -> dict[str, list[Timing]]:
    """`rounds` blocks of every arm, the first variant's second arm among them; one that fails is left out."""
    first = next(iter(benches))
    arms = {**benches, first + AGAIN: benches[first]}
    blocks: dict[str, list[Timing]] = {label: [] for label in arms}
    for number in range(rounds):
        order = list(blocks) if number % 2 == 0 else list(reversed(blocks))
        for label in order:
            try:
                blocks[label].append(arms[label].measure(batch, number, rounds))
            except MkError as error:
                if label == first:
                    raise
                failed[label] = f"batch {batch}: {error}"
                del blocks[label]
    return blocks


def append(
    cfg: Config, run: RunFolder, benches: dict[str, Bench], batch: int, blocks: dict[str, list[Timing]]
) -> dict[str, Row]:
    """Writes the arms' rows, each with its ratio to the first one's."""
    medians = {label: [timing.p50_ms for timing in timings] for label, timings in blocks.items()}
    first, *_ = blocks
    itself = block_ratio(medians[first + AGAIN], medians[first])
    drift = None
    if itself.detectable:
        drift = f"{first} differs from itself: ratio {itself.low:.4f} to {itself.high:.4f}"
    rows: dict[str, Row] = {}
    for label, timings in blocks.items():
        bench = benches[label.removesuffix(AGAIN)]
        raw: dict[str, Any] = {"block_ms": medians[label]}
        more = {**_named(cfg, label), "unstable": drift}
        if label != first:
            of = block_ratio(medians[label], medians[first])
            raw["base_block_ms"] = medians[first]
            more |= {"ratio": of.ratio, "ratio_low": of.low, "ratio_high": of.high, "ratio_to": rows[first].digest}
        rows[label] = bench.append(run, batch, Timing.join(timings), raw, **more)
    return rows


def _named(cfg: Config, label: str) -> dict[str, Any]:
    return {"experiment": cfg.experiment.name, "arm": label}


def _told(row: Row) -> Row:
    print(f"batch {row.batch}, {row.arm}: {row.p50_ms:.4f} ms", flush=True)
    return row
