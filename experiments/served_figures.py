"""Figures of a served run from its raw data: what interrupts decode costs, and the time between a request's tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from mk.results.rows import Row


def interruption(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """gap_us: from each last step of a run to the next run's first one, beyond the time of a step, and of prompts
    computed in between; park_us: from each call of `park` to the loop's rest, empty where nobody called."""
    gaps = raw["gap_us"]
    found: dict[str, Any] = {"interruptions": len(gaps), "idle_us": float(np.median(gaps))}
    return found | ({"park_us": float(np.median(raw["park_us"]))} if raw["park_us"] else {})


def between_tokens(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """gap_ms: between tokens of running requests while a prompt enters; first_ms: until its own first token; last_ms:
    until the last one of each of them."""
    gaps, first = raw["gap_ms"], float(raw["first_ms"])
    p50, p99 = (float(np.percentile(gaps, p)) for p in (50, 99))
    return {
        "itl_p50_ms": p50,
        "itl_p99_ms": p99,
        "itl_most_ms": float(max(gaps)),
        "ttft_ms": first,
        "checks": {"ran_throughout": all(last > first for last in raw["last_ms"])},
    }
