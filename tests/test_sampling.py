"""The sampler: its noise against published vectors, its draws against their distribution, its cuts against a sort."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from mk.errors import MkError
from mk.noise import (
    LARGEST_NOISE,
    SMALLEST_NOISE,
    gumbel_noise,
    gumbel_of_words,
    ordered_keys,
    philox4x32,
    token_masses,
)
from mk.sampling import NO_TOKEN, SamplingParams, candidates, needed_mass, noisy_scores, sample_row

Floats = npt.NDArray[np.float32]

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result
KNOWN = [
    ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_words(counter: list[int], key: tuple[int, int], expected: list[int]) -> None:
    assert philox4x32(counter, key).tolist() == expected


def test_philox_is_vectorised_over_counters() -> None:
    counters = np.array([counter for counter, key, _ in KNOWN if key == (0, 0)] * 3)
    assert philox4x32(counters.reshape(3, 1, 4), (0, 0)).tolist() == [[KNOWN[0][2]]] * 3


def test_noise_depends_on_seed_position_and_token_only() -> None:
    noise = gumbel_noise(range(1000), seed=5, position=77)
    assert np.array_equal(noise[:10], gumbel_noise(range(10), 5, 77))  # the vocabulary's length does not enter
    for other in ((6, 77), (5, 78), (5 + 2**32, 77), (5, 77 + 2**32)):
        assert not (noise == gumbel_noise(range(1000), *other)).any()
    word = philox4x32([3, 77, 0, 0], (5, 0))[2]  # token 14
    assert noise[14] == pytest.approx(-math.log(-math.log1p(-(int(word) | 1) / 2**32)), rel=1e-6)


def test_noise_is_finite_and_standard_gumbel() -> None:
    noise = gumbel_noise(np.arange(50_000), 1, np.arange(10)[:, None]).reshape(-1).astype(np.float64)
    assert np.isfinite(noise).all()
    n = len(noise)
    deviation = math.pi / math.sqrt(6)
    assert abs(noise.mean() - 0.5772156649) < 4 * deviation / math.sqrt(n)
    assert abs(noise.std() - deviation) < 0.01
    assert noise.max() > 11  # the largest of n is about ln n = 13


def test_noise_is_the_logarithms() -> None:
    """Of the smallest and largest words, and of random ones: to a few units of float32's last place."""
    random = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    words = np.concatenate([np.arange(100_000, dtype=np.uint32), ~np.arange(100_000, dtype=np.uint32), random])
    exact = -np.log(-np.log1p(-(words | np.uint32(1)).astype(np.float64) / 2**32))
    noise = gumbel_of_words(words).astype(np.float64)
    assert (np.abs(noise - exact) <= 4e-7 * np.maximum(1, np.abs(exact))).all()
    assert SMALLEST_NOISE <= noise.min() < -3.09 and 22.18 < noise.max() <= LARGEST_NOISE


def test_masses_are_the_exponentials() -> None:
    logits = -np.linspace(0, 30, 100_001).astype(np.float32)
    for temperature in (0.1, 1.0, 3.0):
        mass = token_masses(logits, np.float32(0), temperature).astype(np.float64) / 2**31
        orders = logits.astype(np.float64) / np.float32(temperature)
        assert np.abs(mass - np.exp(orders)).max() < 3e-7
    assert token_masses(np.array([3, 2.5e38], np.float32), np.float32(3e38), 1e-37).tolist() == [0, 0]
    assert token_masses(np.full(1, 7, np.float32), np.float32(7), 1e-37).tolist() == [2**31]


def chi_square(counts: npt.NDArray[np.int64], p: npt.NDArray[np.float64]) -> float:
    expected = p * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_100_000_draws_follow_the_distribution() -> None:
    """Chi-square with 11 degrees of freedom: 31.3 is its 99.9 % quantile. One seed, positions 0 .. 99,999."""
    logits = np.linspace(-2, 2, 12).astype(np.float32)
    temperature = 0.8
    params = SamplingParams(temperature=temperature, seed=2024)
    draws = noisy_scores(logits, range(12), params, np.arange(100_000)[:, None]).argmax(axis=1)
    assert draws[:2000].tolist() == [sample_row(logits, params, position) for position in range(2000)]
    counts = np.bincount(draws, minlength=12)
    weights = np.exp(logits.astype(np.float64) / temperature)
    assert chi_square(counts, weights / weights.sum()) < 31.3
    shifted = np.exp(logits.astype(np.float64))  # at another temperature the same counts would not pass
    assert chi_square(counts, shifted / shifted.sum()) > 1000


def test_100_000_draws_of_equal_logits_are_uniform() -> None:
    """Far from 0, where float32 scores would tie: 19 degrees of freedom, 43.8 is the 99.9 % quantile."""
    logits = np.full(20, 1e6, np.float32)
    draws = noisy_scores(logits, range(20), SamplingParams(1.0, seed=5), np.arange(100_000)[:, None]).argmax(axis=1)
    assert chi_square(np.bincount(draws, minlength=20), np.full(20, 0.05)) < 43.8


def test_draws_of_a_cut_distribution() -> None:
    """top_k 5, then top_p 0.7 of what is left: only the candidates are drawn, in proportion."""
    logits = np.array([0.1, 1.2, 0.7, 1.1, -1, 0.9, 1.0, 0.2], np.float32)
    params = SamplingParams(temperature=1.0, top_k=5, top_p=0.7, seed=9)
    keep = candidates(logits, params)
    assert np.flatnonzero(keep).tolist() == [1, 3, 5, 6]  # 1.2, 1.1, 1.0 hold 0.66 of the five, 0.9 makes it 0.85
    counts = np.bincount([sample_row(logits, params, position) for position in range(5_000)], minlength=8)
    assert not counts[~keep].any()
    weights = np.where(keep, np.exp(logits.astype(np.float64)), 0)
    assert chi_square(counts[keep], (weights / weights.sum())[keep]) < 16.3  # 3 degrees of freedom, 99.9 %


def shapes() -> Iterator[tuple[str, Floats]]:
    generator = np.random.default_rng(3)
    normal = generator.standard_normal(257).astype(np.float32) * 3
    yield "normal", normal
    yield "ties", np.round(normal)
    yield "flat", np.full(100, -3.25, np.float32)
    yield "spike", np.where(np.arange(300) == 123, 50, 0).astype(np.float32)
    yield "two values", np.where(np.arange(64) % 3 == 0, 1, 0.5).astype(np.float32)
    yield "zeros of both signs", np.array([0.0, -0.0] * 20, np.float32)
    yield "single", np.array([2.5], np.float32)
    yield "huge", normal * np.float32(1e37)


def sorted_cut(logits: Floats, params: SamplingParams) -> npt.NDArray[np.bool_]:
    """The definition: walk the tokens by falling logit, equal ones by rising id."""
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        mass = [int(m) for m in token_masses(logits, logits.max(), params.temperature)]
        total, seen, kept = sum(mass[token] for token in order), 0, []
        for token in order:
            if seen >= max(1, math.ceil(params.top_p * total)):
                break
            kept.append(token)
            seen += mass[token]
        order = kept
    keep = np.zeros(len(logits), bool)
    keep[order] = True
    return keep


@pytest.mark.parametrize(("name", "logits"), list(shapes()), ids=[name for name, _ in shapes()])
def test_cuts_equal_a_sorts(name: str, logits: Floats) -> None:
    for temperature in (0.3, 1.0, 2.0):
        for top_k in (0, 1, 2, 7, 50, len(logits), len(logits) + 5):
            for top_p in (1.0, 0.999, 0.9, 0.5, 0.1, 1e-9):
                params = SamplingParams(temperature, top_k, top_p, seed=1)
                keep = candidates(logits, params)
                assert np.array_equal(keep, sorted_cut(logits, params)), params
                assert keep[sample_row(logits, params, position=3)]


def test_top_p_keeps_the_least_that_reaches_the_mass() -> None:
    """Against float64 probabilities, away from the fixed point's resolution of 2^-31."""
    logits = np.random.default_rng(5).standard_normal(500).astype(np.float32) * 2
    p = np.exp(logits.astype(np.float64) / 0.7)
    p /= p.sum()
    for top_p in (0.05, 0.3, 0.77, 0.95):
        keep = candidates(logits, SamplingParams(temperature=0.7, top_p=top_p))
        assert p[keep].sum() >= top_p - 1e-6
        assert p[keep].sum() - p[keep].min() < top_p + 1e-6
        assert p[keep].min() >= p[~keep].max()


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = np.array([0, 3, 1, 3, 3], np.float32)
    assert sample_row(logits, SamplingParams(), 0) == 1
    assert sample_row(logits, SamplingParams(temperature=1e-45), 0) == 1
    assert sample_row(logits, SamplingParams(temperature=1.0, top_k=1, seed=7), 0) == 1
    assert sample_row(np.array([-0.0, 0.0], np.float32), SamplingParams(), 0) == 0


def test_a_cold_temperature_does_not_overflow() -> None:
    logits = np.array([1e30, 2e38, 1.9e38], np.float32)
    assert sample_row(logits, SamplingParams(temperature=1e-37, seed=3), 5) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_draws_nothing(bad: float) -> None:
    logits = np.zeros(10, np.float32)
    logits[7] = bad
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_k=3, top_p=0.5)):
        assert sample_row(logits, params, 0) == NO_TOKEN


def test_keys_order_like_the_floats() -> None:
    values = np.array([-3e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, 3e38], np.float32)
    keys = ordered_keys(values).astype(np.int64)
    assert (np.diff(keys) > 0).tolist() == [True, True, True, False, True, True, True]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e39),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_parameters_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(MkError, match=f"^sampling.{field}=") as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.hint


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("cut", [{"top_p": 0.3}, {"top_p": 0.95}, {"top_p": 0.9999}, {"top_k": 5}, {"top_k": 3000}])
def test_a_large_vocabulary_is_cut_as_by_sorting_all_of_it(cut: dict[str, float], rounded: bool) -> None:
    for scale in (0.5, 3.0, 12.0):
        logits = np.random.default_rng(7).standard_normal(40_000).astype(np.float32) * np.float32(scale)
        if rounded:
            logits = np.round(logits)
        params = SamplingParams(temperature=1.0, **cut)  # type: ignore[arg-type]
        order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
        if params.top_k:
            expected = order[: params.top_k]
        else:
            mass = token_masses(logits, logits.max(), 1.0)
            need, held, expected = needed_mass(int(mass.sum()), params.top_p), 0, []
            for token in order:
                if held >= need:
                    break
                expected.append(token)
                held += int(mass[token])
        assert np.flatnonzero(candidates(logits, params)).tolist() == sorted(expected)
