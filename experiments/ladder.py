"""Why one kernel a step: the same tiles from one launch a wave to the megakernel, each arm one thing further.

A launch for every wave of every layer; those as a CUDA graph; with programmatic dependent launch; one kernel with a
barrier between waves; with counters, which wait for what is read alone; in a smaller window, so that the next arm has
one difference; with weights streamed past the waits; in the full window; with an owner for each strip of the residual.
Ratios are to the arm before. All arms of a placement must leave the same logits behind, bit by bit.

What favours the launches: a wave that leaves nothing in memory (top-k) has none of its own. What does not: later waves
that need its outcome run it again, as they lie in other launches. With programmatic dependent launch a launch begins as
soon as an SM is free, but reads nothing before those ahead of it have ended. Left out is the arm that streams its
weights before that: the SM that it would run on holds the launch before it to the end, for want of shared memory, so
it could only fill the ring while other SMs are still at work, and it would need a second way into the kernel.
Barriers are counters too, which the SMs that have tasks in a wave signal.
"""

from __future__ import annotations

import torch

from experiments import decode_throughput, simulated_variants
from experiments.arms import table
from experiments.decode_throughput import Bench
from experiments.decode_variants import FAILS, on_card, variants
from experiments.simulated_variants import BOUND
from mk.config import Config
from mk.results.rows import Row
from mk.results.runs import RunFolder


def main(cfg: Config) -> int:
    """Exit status 1 if an arm failed, or left other bits than its neighbours; the others run all the same."""
    jobs = variants(cfg)
    for _, job in jobs:
        decode_throughput.check_settings(job, cfg.experiment.name)
    if not torch.cuda.is_available():
        return simulated_variants.run(cfg, jobs, to_previous=True, zero_wait=cfg.experiment.zero_wait)
    for _, job in jobs:
        decode_throughput.check(job, cfg.experiment.name)
    with RunFolder.create(cfg) as run:
        found, failed = on_card(cfg, jobs, run, to_previous=True)
        failed += apart(found)
        if cfg.experiment.zero_wait:
            try:
                found[BOUND] = decode_throughput.bounds(Bench.open(jobs[-1][1]), run, experiment="ladder", arm=BOUND)
            except FAILS as error:
                failed.append(f"{BOUND}: {error}")
        print(f"\n{table(found, cfg.experiment.batches, 'the one before')}")
        for message in failed:
            print(f"failed: {message}")
        print(f"run folder: {run.path}")
    return int(bool(failed))


def apart(found: dict[str, list[Row]]) -> list[str]:
    """The arms whose logits differ from those of another arm with the same batch, placement and number of blocks."""
    first: dict[tuple[int, str, int | None], tuple[str, Row]] = {}
    messages = []
    for label, rows in found.items():
        for row in rows:
            other, same = first.setdefault((row.batch, row.placement, row.steps), (label, row))
            if row.logits_hash != same.logits_hash:
                messages.append(f"batch {row.batch}: {label!r} leaves other logits than {other!r}")
    return messages
