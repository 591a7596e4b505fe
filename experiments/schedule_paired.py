"""Schedules run on the card in turn, round after round, and compared with the configured one in pairs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np

from experiments import decode_throughput
from mk.config import Config
from mk.errors import MkError
from mk.rows import Row
from mk.runs import RunFolder
from mk.step_figures import half_interval


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
                rounds[-1][label] = decode_throughput.run(decode_throughput.job_of(config, batches=[batch]))[0]
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
    mean, model = times.mean(axis=0), np.array([simulated[label] for label in labels])
    correlation, error = spearman(model, mean), float(np.mean(np.abs(model / mean - 1)))
    print(
        f"\nbatch {batch}, {len(rounds)} rounds on the card: rank correlation {correlation:.2f}, mean error {error:.1%}"
    )
    base = times[:, labels.index("configured")]
    for column, label in enumerate(labels):
        beyond, half = paired(times[:, column], base)
        print(f"{label:14}{mean[column]:10.4f} ms{beyond:+10.4f} ± {half:.4f}   simulated {model[column]:.4f}")
        last = rounds[-1][label]
        row = dataclasses.replace(
            last,
            experiment=run.config.experiment.name,
            p50_ms=float(mean[column]),
            simulated_ms=float(model[column]),
            paired_ms=beyond,
            paired_ci95_ms=half,
            rank_correlation=correlation,
            mean_error=error,
        )
        run.append_row(row, {"kind": "rounds", "round_ms": times[:, column].tolist(), "configured_ms": base.tolist()})


def paired(times: np.ndarray, base: np.ndarray) -> tuple[float, float]:
    """(mean of the differences, half of its 95 % interval); of one round the interval is 0: nothing is known of it."""
    differences = times - base
    return float(differences.mean()), half_interval(differences) if len(differences) > 1 else 0.0


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation; 1 where there is but one pair."""
    if len(a) < 2:
        return 1.0
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])
