"""What is said of several runs: mean, standard deviation, and the interval of the difference between two engines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mk.errors import MkError


@dataclass(frozen=True, slots=True)
class Difference:
    """Ours minus theirs, and the central 95 % of its bootstrap distribution. Shares, 0..1."""

    mean: float
    low: float
    high: float


def share(correct: Sequence[float]) -> float:
    """Of a run's units that are right; 0 of none."""
    return statistics.fmean(correct) if correct else 0.0


def mean_and_sd(scores: Sequence[float]) -> tuple[float, float | None]:
    """Mean over runs and their sample standard deviation, None of a single run."""
    return statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else None


def bootstrap_difference(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], draws: int = 10_000, seed: int = 0
) -> Difference:
    """The difference of two engines' mean scores [runs][units] over the same units.

    A draw takes units with replacement, the same for both engines because hard ones are hard for both, and of each
    engine runs with replacement. Raises MkError for units that differ in number.
    """
    a, b = (np.array(scores, np.float64) for scores in (ours, theirs))
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or not a.size:
        raise MkError(f"scores of {a.shape} and {b.shape} (runs, units) cannot be compared")
    rng = np.random.default_rng(seed)
    differences = np.empty(draws)
    for draw in range(draws):
        units = rng.integers(a.shape[1], size=a.shape[1])
        runs = [rng.integers(len(scores), size=len(scores)) for scores in (a, b)]
        differences[draw] = a[runs[0]][:, units].mean() - b[runs[1]][:, units].mean()
    low, high = np.quantile(differences, [0.025, 0.975])
    return Difference(float(a.mean() - b.mean()), float(low), float(high))
