"""Runs decode_throughput under many variants of one configuration, with the weights packed once.

A variant's rows are those that decode_throughput writes when the same overrides stand on the command line: same
configuration, same hash, same checks.
"""

from __future__ import annotations

import torch

from experiments import decode_throughput
from mk.compose import expand_sweep, vary
from mk.config import Config
from mk.errors import MkError
from mk.rows import Row


def main(cfg: Config) -> int:
    """Exit status 1 if a variant was refused or failed; the others run all the same."""
    jobs = variants(cfg)  # all composed before the first one starts
    decode_throughput.check(jobs[0][1])
    found: dict[str, list[Row]] = {}
    failed: dict[str, str] = {}
    for number, (label, job) in enumerate(jobs, 1):
        print(f"\n[{number}/{len(jobs)}] {label}", flush=True)
        try:
            found[label] = decode_throughput.run(job)
        except (MkError, torch.cuda.OutOfMemoryError) as error:
            failed[label] = str(error)
            print(f"failed: {error}", flush=True)
    print(f"\n{table(found, cfg.experiment.batches)}")
    for label, message in failed.items():
        print(f"failed: {label}: {message}")
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
            varied = vary(cfg, overrides)
            jobs.append((" ".join(overrides), decode_throughput.job_of(varied)))
    return jobs


def table(found: dict[str, list[Row]], batches: list[int]) -> str:
    """p50 in ms and per cent of the nominal bandwidth, a line a variant."""
    width = max(map(len, found), default=0)
    lines = [" ".join(["variant".ljust(width), *(f"{f'batch {batch}, ms':>14} {'%':>5}" for batch in batches)])]
    for label, rows in found.items():
        cells = (f"{row.p50_ms:14.4f} {row.pct_nominal:5.1f}" for row in rows)
        lines.append(" ".join([label.ljust(width), *cells]))
    return "\n".join(lines)
