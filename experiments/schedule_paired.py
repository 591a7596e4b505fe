"""Schedules run on the card in turn, block after block, each compared with the configured one, and the simulator with
all of them."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.arms import table
from experiments.decode_throughput import Bench, job_of
from experiments.decode_variants import FAILS, append, in_turn, opened
from mk.config import Config
from mk.results.rows import Row
from mk.results.runs import RunFolder

CONFIGURED = "configured"


def compare(
    cfg: Config, run: RunFolder, schedules: Mapping[str, Config], simulated: Mapping[str, float], batch: int
) -> list[str]:
    """`experiment.rounds` blocks of every schedule, checked before; returns what failed.

    Writes a row a schedule, with the ratio of its blocks to the configured one's, and one of how well `simulated` (ms)
    ranks them. A schedule that fails is left out, and so is one that executes what an earlier one does. Raises MkError
    where the configured one fails.
    """
    benches: dict[str, Bench] = {}
    executed: dict[str, str] = {}
    failed: list[str] = []
    for label in sorted(schedules, key=lambda label: label != CONFIGURED):  # the first one is compared with
        try:
            bench = opened(job_of(schedules[label], batches=[batch]))
        except FAILS as error:
            if label == CONFIGURED:
                raise
            failed.append(f"batch {batch}, {label}: {error}")
            continue
        what = bench.executed(batch)
        if what in executed:
            print(f"{label} executes what {executed[what]} does", flush=True)
            continue
        executed[what], benches[label] = label, bench
    blocks = in_turn(benches, batch, cfg.experiment.rounds, failed)
    rows = append(cfg, run, benches, batch, blocks, failed)
    print(f"\nbatch {batch} on the card\n{table({label: [row] for label, row in rows.items()}, [batch])}", flush=True)
    judge(run, {label: row for label, row in rows.items() if label in simulated}, simulated)
    return failed


def judge(run: RunFolder, rows: Mapping[str, Row], simulated: Mapping[str, float]) -> None:
    """Writes and prints how well the simulator ranks measured schedules of one batch."""
    if not rows:
        return
    some = next(iter(rows.values()))
    raw = {
        "kind": "simulated_ranks",
        "labels": list(rows),
        "measured": [row.raw_sha256 for row in rows.values()],  # the rows', by their raw data
        "p50_ms": [row.p50_ms for row in rows.values()],
        "simulated_ms": [simulated[label] for label in rows],
    }
    # no `clock`: what was measured is a half of it
    row = run.measured(raw, engine="simulator", dtype="bfloat16", batch=some.batch, context=some.context, arm="ladder")
    found = run.append_row(row, raw)
    print(f"simulated: rank correlation {found.rank_correlation:.2f}, mean error {found.mean_error:.1%}", flush=True)
