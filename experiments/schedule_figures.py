"""What is said of schedules that were simulated: for the run, and for who verifies its rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from mk.results.recompute import steps
from mk.results.rows import Row

BOUNDS = ("dependencies_ms", "zero_wait_ms", "busiest_ms", "bytes_ms")


def simulated(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Of one simulated step, raw data as of mk/results/step_figures.py; bounds_ms: of its schedule; rivals_ms: of all
    schedules for the same routing."""
    found = steps(row, raw) | {name: raw["bounds_ms"][name] for name in BOUNDS if "bounds_ms" in raw}
    if "rivals_ms" in raw:
        found["regret"] = found["p50_ms"] / min(raw["rivals_ms"]) - 1
    return {**found, "checks": {"schedule_verified": True}}  # one that is refused stops the run


def ranks(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """p50_ms: measured of each schedule; simulated_ms: the simulator's."""
    model, took = np.array(raw["simulated_ms"]), np.array(raw["p50_ms"])
    error = float(np.mean(np.abs(model / took - 1)))
    return {"schedules": len(took), "rank_correlation": spearman(model, took), "mean_error": error}


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation, equal values sharing their mean rank; 1 where there is but one pair, 0 where all values of
    either side are equal: nothing is ranked then."""
    if len(a) < 2:
        return 1.0
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(np.corrcoef(mean_ranks(a), mean_ranks(b))[0, 1])


def mean_ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]
