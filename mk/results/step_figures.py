"""From the times of single steps to the figures of a row: written once, for what measures and for what verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mk.config import GpuConfig
from mk.errors import MkError
from mk.model.geometry import Geometry
from mk.roofline import step_bytes

# two-sided 95 % quantiles of Student's t by degrees of freedom from 1, as kept rows were computed with; then scipy's
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
       2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip
SMALLEST_EFFECT = 0.003  # relative: one ratio in twenty of equal times has an interval without 1, but it is near 1
EXPERTS_AGREE = 0.02  # relative: rows whose distinct experts differ by more did not read the same bytes
MEASURED_ONLY = ("p10_ms", "p90_ms", "steps")  # fields that a simulated step, of which there is one, does not have
BLOCK = 16  # steps drawn together by the bootstrap: neighbours share clocks and neighbours' noise
RESAMPLES = 2000
MS_DIGITS = 5  # of a raw step time: 10 ns, finer than any clock used here
EXPERT_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two times, with its 95 % interval."""

    ratio: float
    low: float
    high: float

    @property
    def detectable(self) -> bool:
        """Whether the times differ beyond the interval, and by an effect that is worth a claim."""
        return not self.low <= 1 <= self.high and abs(self.ratio - 1) >= SMALLEST_EFFECT


def raw_steps(step_ms: Sequence[float], experts_by_layer: Sequence[float]) -> dict[str, Any]:
    """What a row's figures are computed from: milliseconds of each step, mean distinct experts of each sparse layer."""
    return {
        "kind": "steps",
        "step_ms": [round(float(ms), MS_DIGITS) for ms in step_ms],
        "experts_by_layer": [round(float(count), EXPERT_DIGITS) for count in experts_by_layer],
    }


def step_figures(geometry: Geometry, gpu: GpuConfig, contexts: Sequence[int], raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Row` that follow from `raw_steps` of a batch whose rows hold `contexts` keys.

    Without a count of experts there are no bytes, nor anything that is computed from them. Raises MkError where the
    median is under what the bytes take at the card's nominal bandwidth.
    """
    times = np.array(raw["step_ms"], np.float64)
    p10, p50, p90 = (float(np.percentile(times, p)) for p in (10, 50, 90))
    batch = len(contexts)
    found = {"p50_ms": p50, "p10_ms": p10, "p90_ms": p90, "steps": len(times), "tokens_per_s": batch / p50 * 1e3}
    experts = raw["experts_by_layer"]
    if not experts and geometry.sparse_layers:
        return found
    distinct = float(np.mean(experts)) if experts else 0.0
    total = step_bytes(geometry, contexts, distinct).total
    assert gpu.nominal_tb_s is not None  # GpuConfig wants it of every card
    floor = total / (gpu.nominal_tb_s * 1e9)
    if p50 < floor:
        raise MkError(f"batch {batch}: p50 {p50:.4f} ms is under the {floor:.4f} ms that {total:.3e} bytes take")
    found |= {"distinct_experts": distinct, "bytes_per_step": total, "pct_nominal": 100 * floor / p50}
    if gpu.measured_tb_s is not None:
        found["fixed_us_per_layer"] = (p50 - total / (gpu.measured_tb_s * 1e9)) * 1e3 / geometry.layers
    return found


def simulated_figures(
    geometry: Geometry, gpu: GpuConfig, contexts: Sequence[int], raw: dict[str, Any]
) -> dict[str, Any]:
    """As `step_figures`, of one step by the simulator."""
    found = step_figures(geometry, gpu, contexts, raw)
    return {name: value for name, value in found.items() if name not in MEASURED_ONLY}


def median_ratio(over: Sequence[float], under: Sequence[float], seed: int = 0) -> Ratio:
    """Median of `over` by median of `under`; the interval resamples blocks of `BLOCK` consecutive steps of each."""
    rng = np.random.default_rng(seed)
    resampled = [_block_medians(np.array(times, np.float64), rng) for times in (over, under)]
    low, high = np.percentile(resampled[0] / resampled[1], (2.5, 97.5))
    return Ratio(float(np.median(over) / np.median(under)), float(low), float(high))


def block_ratio(block_ms: Sequence[float], base_block_ms: Sequence[float]) -> Ratio:
    """Mean ratio of blocks that ran in turn with the base's, pair by pair, with Student's interval of its logarithm.

    One pair says nothing of the interval: it is then everything.
    """
    logs = np.log(np.array(block_ms) / np.array(base_block_ms))
    mean, half = float(logs.mean()), half_interval(logs)
    return Ratio(float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half)))


def half_interval(values: np.ndarray) -> float:
    """Half of the 95 % interval of the mean; of one value, more than any figure here differs by."""
    n = len(values)
    if n < 2:
        return 10.0
    return float(student95(n - 1) * values.std(ddof=1) / np.sqrt(n))


def student95(df: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    if df <= len(T95):
        return T95[df - 1]
    from scipy.special import stdtrit  # takes a moment to import, and few intervals are of so many values

    return float(stdtrit(df, 0.975))


def _block_medians(times: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Medians [RESAMPLES] of series made of blocks that start anywhere."""
    n, block = len(times), min(BLOCK, len(times))
    starts = rng.integers(0, n - block + 1, size=(RESAMPLES, -(-n // block)))
    picked = (starts[..., None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :n]
    return np.asarray(np.median(times[picked], axis=1))


def experts_agree(a: float | None, b: float | None) -> bool:
    """Whether two rows touched as many experts, so that their times may be divided. Uncounted ones do not agree."""
    return a is not None and b is not None and abs(a / b - 1) <= EXPERTS_AGREE
