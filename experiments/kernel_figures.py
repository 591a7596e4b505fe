"""From the distances of one layer of a decode step to its row: for the run that measured, and for who verifies it.

Raw data: distances from float32 of the active rows' contributions, [kernel, bfloat16] each, the smallest standard
deviation of scores of a row with enough keys in sight, how many needles were looked for, and how many were lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.distances import LEAST_STD, figure, largest, number, read, worst_ratio
from mk.results.rows import DISTANCE_BAR, Row

Errors = Sequence[tuple[float, float]]


def raw_layer(attention: Errors, ffn: Errors, logit_std: float | None, needles: int, lost: int) -> dict[str, Any]:
    """logit_std: None where no row has enough keys in sight."""
    return {
        "kind": "kernel_layer",
        "attention": [[number(error) for error in pair] for pair in attention],
        "ffn": [[number(error) for error in pair] for pair in ffn],
        "logit_std": None if logit_std is None else number(logit_std),
        "needles": needles,
        "lost": lost,
    }


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Row`."""
    found: dict[str, Any] = {"logit_std": raw["logit_std"], "needles": raw["needles"]}
    checks = {"schedule_verified": True}  # one that is refused is never loaded
    for part in ("attention", "ffn"):
        errors = [(read(tested), read(rounded)) for tested, rounded in raw[part]]
        ratio = worst_ratio(errors)
        found |= {
            f"{part}_error": figure(largest([tested for tested, _ in errors])),
            f"{part}_error_bf16": figure(largest([rounded for _, rounded in errors])),
            f"{part}_ratio": figure(ratio),
        }
        checks[f"{part}_within_bar"] = ratio <= DISTANCE_BAR
    checks["needles_returned"] = raw["lost"] == 0
    if raw["logit_std"] is not None:
        checks["scores_are_sharp"] = raw["logit_std"] >= LEAST_STD
    return {**found, "checks": checks}
