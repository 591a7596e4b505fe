"""What times of an operation alone make of a row, for the run and for who verifies it; and its line of the table."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.arms import effect
from mk.results.recompute import card, geometry_of_row
from mk.results.rows import Row
from mk.results.step_figures import MEASURED_ONLY, median_ratio
from mk.roofline import operation_bytes


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """sweep_ms: device times of sweeps of `runs` runs, a layer each; experts: distinct ones that a run touches, mean;
    base_sweep_ms: of sweeps of as many runs by the kernel."""
    assert row.kernel is not None
    nominal = card(row.gpu).nominal_tb_s
    assert nominal is not None
    times = np.array(raw["sweep_ms"]) / raw["runs"]
    p10, p50, p90 = (float(np.percentile(times, p)) for p in (10, 50, 90))
    size = operation_bytes(geometry_of_row(row), row.kernel, row.context, raw["experts"])
    found: dict[str, Any] = {"p10_ms": p10, "p50_ms": p50, "p90_ms": p90, "steps": len(times)}
    if row.clock == "simulated":
        found = {name: value for name, value in found.items() if name not in MEASURED_ONLY}
    if size:
        found |= {"kernel_bytes": size, "gb_s": size / p50 / 1e6, "pct_nominal": size / p50 / 1e6 / nominal / 10}
    if "base_sweep_ms" in raw:
        of = median_ratio(raw["sweep_ms"], raw["base_sweep_ms"])
        found |= {"ratio": of.ratio, "ratio_low": of.low, "ratio_high": of.high}
    return found


COLUMNS = ("operation", "by", "batch", "us", "MB", "GB/s", "% nominal", "to the kernel [95 %]")


def told(row: Row, by: str) -> str:
    """A row's line. by: what did the operation."""
    size = ("-", "-", "-")
    if row.kernel_bytes is not None:
        size = (f"{row.kernel_bytes / 1e6:.1f}", f"{row.gb_s:.0f}", f"{row.pct_nominal:.1f}")
    return line(row.kernel or "", by, f"{row.batch}", f"{(row.p50_ms or 0) * 1e3:.2f}", *size, effect(row))


def line(name: str, by: str, *figures: str) -> str:
    return f"{name:19}{by:19}" + "".join(figure.rjust(10) for figure in figures[:-1]) + f"  {figures[-1]}"
