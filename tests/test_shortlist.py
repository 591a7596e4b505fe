"""Cuts without a sort: bins, bounds and shortlist against the definition, on logits that make each of them hard."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from mk.noise import LARGEST_NOISE, SMALLEST_NOISE, ordered_keys
from mk.sampling import SamplingParams, candidates, sample_row
from mk.shortlist import BINS, REACH, Histogram, Row

Floats = npt.NDArray[np.float32]


def adversarial(vocab: int) -> Iterator[tuple[str, Floats]]:
    """Float32 logits [vocab] by what is hard about them."""
    ids = np.arange(vocab)
    normal = np.random.default_rng(3).standard_normal(vocab).astype(np.float32) * 3
    yield "normal", normal
    yield "rising", np.sort(normal)
    yield "ties", np.round(normal)
    yield "flat", np.full(vocab, -3.25, np.float32)
    yield "one spike", np.where(ids == 123, 50, 0).astype(np.float32)
    yield "low spike", np.where(ids == 123, 12, 0).astype(np.float32)
    yield "two values", np.where(ids % 3 == 0, 1, 0.5).astype(np.float32)
    yield "zeros of both signs", np.where(ids % 2, -0.0, 0.0).astype(np.float32)
    yield "neighbours in float32", np.float32(7) + (ids % 5).astype(np.float32) * np.float32(2.0**-21)
    yield "an outlier below", np.where(ids == 7, -1e4, normal).astype(np.float32)
    yield "huge", normal * np.float32(1e37)
    yield "wider than float32", np.array([3e38, -3e38, 0.0, 2.9e38], np.float32)[ids % 4]
    yield "tiny", normal * np.float32(1e-42)


LOGITS = dict(adversarial(1500))
PARAMS = [
    SamplingParams(temperature, top_k, top_p, seed=7)
    for temperature in (1e-37, 0.3, 1.0, 5.0, 3e38)
    for top_k in (0, 1, 7, 500)
    for top_p in (1.0, 0.95, 0.5, 0.02)
]


def row_of(logits: Floats, params: SamplingParams, sms: int = 132) -> Row:
    return Row.of(params, logits, np.array([part.max() for part in np.array_split(logits, sms)]))


def shortlisted(logits: Floats, params: SamplingParams, sms: int = 132) -> tuple[npt.NDArray[np.bool_], int]:
    """What is kept, found as the waves find it, and how many tokens were undecided."""
    row = row_of(logits, params, sms)
    bins = row.bins(logits)
    near = bins >= 0
    counts = np.bincount(bins[near], minlength=BINS)
    masses = np.zeros(BINS, np.uint64)
    np.add.at(masses, bins[near], row.masses(logits)[near])
    histogram = Histogram(row, counts, masses)
    bounds = histogram.bounds()
    undecided = np.flatnonzero(bounds.undecided(bins))
    kept = bounds.sure(bins)
    kept[histogram.kept(logits[undecided[::-1]], undecided[::-1])] = True  # in whatever order they come
    return kept, len(undecided)


@pytest.mark.parametrize("sms", [1, 5, 132])  # with 5, a top-k of 7 needs bins
@pytest.mark.parametrize("name", LOGITS)
def test_what_is_kept_is_what_the_definition_keeps(name: str, sms: int) -> None:
    logits = LOGITS[name]
    for params in PARAMS:
        kept, _ = shortlisted(logits, params, sms)
        below = logits.max().astype(np.float64) - logits
        near = Row(params, len(logits), logits.max(), logits.min()).bins(logits) >= 0
        assert (near | (below > 25.49 * params.temperature)).all()
        assert np.array_equal(kept, candidates(logits, params) & near), params
        assert kept[sample_row(logits, params, position=11)], params  # nothing out of reach is ever drawn


def test_out_of_reach_means_that_no_noise_makes_up_for_it() -> None:
    assert REACH - 0.2 > LARGEST_NOISE - SMALLEST_NOISE


def test_bins_fall_with_the_logits() -> None:
    for name, logits in LOGITS.items():
        for params in PARAMS:
            bins = row_of(logits, params).bins(logits)
            near = bins >= 0
            by_key = bins[np.argsort(~ordered_keys(logits), kind="stable")]
            assert (np.diff(by_key[by_key >= 0]) >= 0).all(), (name, params)
            assert bins.max() < BINS and near[logits.argmax()]


@pytest.mark.parametrize("spread", [0.1, 0.9, 3.0])
def test_shortlists_of_a_full_vocabulary_are_short(spread: float) -> None:
    """Of normal logits, as random weights give them: at most 1 in 250 tokens, so that one warp is done soon."""
    logits = np.random.default_rng(1).standard_normal(262_144).astype(np.float32) * np.float32(spread)
    for params in (SamplingParams(1.0, top_p=0.95), SamplingParams(0.7, 50, 0.9), SamplingParams(2.0, top_p=0.5)):
        assert shortlisted(logits, params)[1] < len(logits) / 250
