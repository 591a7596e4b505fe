"""Intervals and claims: quantiles beside scipy's, and no claim of what is too small for one."""

from __future__ import annotations

import itertools
import random
import statistics

import numpy as np
import pytest
from scipy.stats import t as student

from mk.results.step_figures import Ratio, block_ratio, half_interval, median_ratio


def test_intervals_have_students_quantiles() -> None:
    """From a table to three digits while values are few, then to all digits; one never under that of more values."""
    found = {}
    for n in (*range(2, 70), 100, 1000, 100_000):
        values = np.arange(n, dtype=np.float64)
        found[n] = half_interval(values) / (values.std(ddof=1) / np.sqrt(n))
        assert found[n] == pytest.approx(student.ppf(0.975, n - 1), abs=6e-4 if n <= 31 else 1e-9)
    assert all(many < few for few, many in itertools.pairwise(found.values()))
    assert found[32] == pytest.approx(2.0395, abs=1e-4) and found[100_000] == pytest.approx(1.96, abs=1e-4)


def test_a_ratio_of_medians_has_the_interval_of_a_block_bootstrap() -> None:
    """Beside one that is written out: runs of 16 neighbours that begin anywhere, until there are as many as before."""
    rng = random.Random(3)
    over, under = ([base + rng.gauss(0, 0.05) for _ in range(64)] for base in (2.2, 2.0))

    def resampled(times: list[float]) -> float:
        drawn: list[float] = []
        while len(drawn) < len(times):
            start = rng.randrange(len(times) - 16 + 1)
            drawn += times[start : start + 16]
        return statistics.median(drawn[: len(times)])

    ratios = sorted(resampled(over) / resampled(under) for _ in range(4000))
    found = median_ratio(over, under)
    width = found.high - found.low
    assert found.ratio == pytest.approx(statistics.median(over) / statistics.median(under), rel=1e-12)
    assert [found.low, found.high] == pytest.approx([ratios[100], ratios[3899]], abs=0.1 * width)
    of = block_ratio([2.0, 2.2, 2.1], [1.0, 1.0, 1.0])  # exp(m +- 4.303 s / sqrt(3)) of their logarithms
    assert [of.ratio, of.low, of.high] == pytest.approx([2.0984, 1.8641, 2.3622], rel=1e-4)


def test_no_claim_is_made_of_a_small_effect() -> None:
    assert not Ratio(1.0029, 1.002, 1.004).detectable and not Ratio(0.9971, 0.996, 0.998).detectable
    assert Ratio(1.0031, 1.002, 1.004).detectable and Ratio(0.9969, 0.996, 0.998).detectable
    assert not Ratio(1.1, 0.99, 1.2).detectable


def test_an_arm_seldom_differs_from_itself() -> None:
    """Blocks of equal times with a card's noise, 0.1 % each: the interval alone would fail one run in twenty."""
    rng = np.random.default_rng(0)
    ratios = [block_ratio(*(1 + 0.001 * rng.standard_normal((2, 8)))) for _ in range(1000)]
    assert 20 < sum(not of.low <= 1 <= of.high for of in ratios) < 90
    assert not any(of.detectable for of in ratios)
