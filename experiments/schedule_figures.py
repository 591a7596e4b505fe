"""What is said of schedules that were simulated, or ran in turn: for the run, and for who verifies its rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from mk.recompute import steps
from mk.rows import Row
from mk.step_figures import half_interval

BOUNDS = ("dependencies_ms", "zero_wait_ms", "busiest_ms", "bytes_ms")


def simulated(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Of one simulated step, mk/step_figures.py's raw data; bounds_ms: of its schedule; rivals_ms: of all schedules
    for the same routing."""
    found = steps(row, raw) | {name: raw["bounds_ms"][name] for name in BOUNDS if "bounds_ms" in raw}
    if "rivals_ms" in raw:
        found["regret"] = found["p50_ms"] / min(raw["rivals_ms"]) - 1
    return {**found, "checks": {"schedule_verified": True}}  # one that is refused stops the run


def rounds(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """round_ms: p50 of a schedule by round; configured_ms: of the configured one. means_ms, simulated_ms: of all
    schedules of the run; index: this one's place among them."""
    times, base = np.array(raw["round_ms"]), np.array(raw["configured_ms"])
    beyond, half = paired(times, base)
    simulated_ms = raw["simulated_ms"]
    found = {"p50_ms": float(times.mean()), "simulated_ms": simulated_ms[raw["index"]]}
    return found | {"paired_ms": beyond, "paired_ci95_ms": half, **agreement(simulated_ms, raw["means_ms"])}


def ranks(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """p50_ms: measured of each schedule; simulated_ms: the simulator's."""
    return {"schedules": len(raw["p50_ms"]), **agreement(raw["simulated_ms"], raw["p50_ms"])}


def agreement(simulated_ms: list[float], measured_ms: list[float]) -> dict[str, float]:
    """Of the simulator with a card."""
    model, took = np.array(simulated_ms), np.array(measured_ms)
    return {"rank_correlation": spearman(model, took), "mean_error": float(np.mean(np.abs(model / took - 1)))}


def paired(times: np.ndarray, base: np.ndarray) -> tuple[float, float]:
    """(mean of the differences, half of its 95 % interval); of one round the interval is 0: nothing is known of it."""
    differences = times - base
    return float(differences.mean()), half_interval(differences) if len(differences) > 1 else 0.0


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation, equal values sharing their mean rank; 1 where there is but one pair."""
    if len(a) < 2:
        return 1.0
    return float(np.corrcoef(mean_ranks(a), mean_ranks(b))[0, 1])


def mean_ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]
