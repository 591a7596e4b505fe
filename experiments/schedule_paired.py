"""Schedules run on the card in turn, round after round, and compared with the configured one in pairs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np

from experiments import decode_throughput
from experiments.schedule_figures import agreement
from mk.config import Config
from mk.errors import MkError
from mk.recompute import figures
from mk.rows import Row
from mk.runs import RunFolder

OF_ONE_ROUND = ("p10_ms", "p90_ms", "wall_ms", "steps", "tokens_per_s", "pct_nominal", "fixed_us_per_layer")


def compare(
    cfg: Config, run: RunFolder, schedules: Mapping[str, Config], simulated: Mapping[str, float], batch: int
) -> None:
    """`experiment.rounds` rounds of all schedules, fewer when the time is up; a row a schedule, and a table.

    Every run checks its program before it is timed. Raises MkError where the configured schedule itself fails; another
    one that does is left out, and said so.
    """
    settings = cfg.experiment
    rounds: list[dict[str, Row]] = []
    alive = dict(schedules)
    until = time.perf_counter() + settings.time_limit_s
    for number in range(settings.rounds):
        rounds.append({})
        for label, config in list(alive.items()):
            if time.perf_counter() > until:
                print("the time is up", flush=True)
                rounds.pop()
                return _report(run, rounds, alive, simulated, batch)
            try:
                job = run.under(decode_throughput.job_of(config, batches=[batch])).config
                rounds[-1][label] = decode_throughput.run(job)[0]
            except MkError as error:
                if label == "configured":
                    raise
                print(f"{label} left out from round {number} on: {error}", flush=True)
                del alive[label]
    return _report(run, rounds, alive, simulated, batch)


def _report(
    run: RunFolder,
    rounds: Sequence[Mapping[str, Row]],
    alive: Mapping[str, Config],
    simulated: Mapping[str, float],
    batch: int,
) -> None:
    if not rounds:
        return
    labels = list(alive)
    times = np.array([[of[label].p50_ms for label in labels] for of in rounds], np.float64)
    mean, model = times.mean(axis=0).tolist(), [simulated[label] for label in labels]
    found = agreement(model, mean)
    print(
        f"\nbatch {batch}, {len(rounds)} rounds on the card: rank correlation {found['rank_correlation']:.2f}, "
        f"mean error {found['mean_error']:.1%}"
    )
    base = times[:, labels.index("configured")]
    for column, label in enumerate(labels):
        raw = {
            "kind": "rounds",
            "round_ms": times[:, column].tolist(),
            "configured_ms": base.tolist(),
            "means_ms": mean,
            "simulated_ms": model,
            "index": column,
        }
        last = dataclasses.replace(
            rounds[-1][label], experiment=run.config.experiment.name, arm=label, **dict.fromkeys(OF_ONE_ROUND)
        )
        row = run.append_row(dataclasses.replace(last, **figures(last, raw)), raw)
        print(
            f"{label:14}{row.p50_ms:10.4f} ms{row.paired_ms:+10.4f} ± {row.paired_ci95_ms:.4f}   "
            f"simulated {row.simulated_ms:.4f}"
        )
