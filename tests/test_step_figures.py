"""Intervals and claims: quantiles beside scipy's, and no claim of what is too small for one."""

from __future__ import annotations

import numpy as np
import pytest

from mk.step_figures import Ratio, block_ratio, half_interval


def test_intervals_have_students_quantiles() -> None:
    student = pytest.importorskip("scipy.stats").t
    for n in range(2, 40):
        values = np.arange(n, dtype=np.float64)
        quantile = half_interval(values) / (values.std(ddof=1) / np.sqrt(n))
        assert quantile == pytest.approx(student.ppf(0.975, n - 1), abs=6e-4 if n <= 31 else 0.08)


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
