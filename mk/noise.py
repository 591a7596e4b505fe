"""The sampler's arithmetic: counter-based noise and probabilities whose bits every engine agrees on.

`exp` and `log` of two libraries differ in their last bits, and a bit may change a drawn token. So both are polynomials
here, written as single float32 operations (add, subtract, multiply, conversion), which IEEE 754 rounds in one way
everywhere as long as no two of them are fused. `csrc/sampling.cuh` has the same operations in the same order;
`tests/test_sampling_kernel.py` compares the two bit by bit.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Uints = npt.NDArray[np.uint32]
Masses = npt.NDArray[np.uint64]

MASS_BITS = 31  # fixed point of a probability relative to the largest one
LARGEST_NOISE, SMALLEST_NOISE = 22.1808, -3.0994  # 32 ln 2 and -ln(32 ln 2), rounded away from 0

_PHILOX_M = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_PHILOX_W = (0x9E3779B9, 0xBB67AE85)
_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_LN2 = np.float32(0.6931472)
_SQRT_HALF = 0xB504F334 / 2**32  # a mantissa below it is doubled, so that all lie around 1

# Least maximum error, by interpolation at Chebyshev points and then rounded; coefficients from the constant term up.
# ln(1 + x) / x for x from sqrt(1/2) - 1 to sqrt(2) - 1: relative error of the logarithm below 1.7e-7
_LOG = [
    np.float32(c)
    for c in (
        1.0,
        -0.49999988079071045,
        0.3333418369293213,
        -0.2500215470790863,
        0.19956977665424347,
        -0.16560696065425873,
        0.14949095249176025,
        -0.14377330243587494,
        0.08743945509195328,
    )
]
# (2^-x - 1) / x for x from 0 to 1: relative error of the power below 1.9e-7, none at 0 and 1
_POWER = [
    np.float32(c)
    for c in (
        -0.6931471824645996,
        0.24022610485553741,
        -0.055499278008937836,
        0.009597169235348701,
        -0.0012917894637212157,
        0.00011498086678329855,
    )
]


def _polynomial(coefficients: list[np.float32], x: Floats) -> Floats:
    value: Floats = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient  # numpy rounds the product, then the sum
    return value


@lru_cache(maxsize=64)
def _round_keys(k0: int, k1: int, rounds: int) -> npt.NDArray[np.uint64]:
    """The key of each round, uint64 [rounds, 2]."""
    steps = np.arange(rounds, dtype=np.uint64)[:, None] * np.array(_PHILOX_W, np.uint64)
    return (np.array([k0, k1], np.uint64) + steps) & _WORD


def philox4x32(counter: npt.ArrayLike, key: tuple[int, int], rounds: int = 10) -> Uints:
    """Philox4x32: four random words for each counter. counter uint32 [..., 4], result alike.

    Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    words = np.moveaxis(np.asarray(counter, np.uint64), -1, 0)
    left, right = words[::2], words[1::2]  # words 0 and 2 are multiplied, 1 and 3 are mixed in
    multiplier = _PHILOX_M.reshape(2, *[1] * (words.ndim - 1))
    for round_key in _round_keys(*key, rounds).reshape(rounds, *multiplier.shape):
        product = multiplier * left
        left, right = (product >> _HALF)[::-1] ^ right ^ round_key, (product & _WORD)[::-1]
    return np.stack([left[0], right[0], left[1], right[1]], axis=-1).astype(np.uint32)


def gumbel_noise(ids: npt.ArrayLike, seed: int, position: npt.ArrayLike) -> Floats:
    """Standard Gumbel noise of token ids at positions, float32 in the shape that the two broadcast to.

    Id t takes word t % 4 of counter (t / 4, position low, position high, 0) under key `seed`.
    """
    ids, position = np.broadcast_arrays(np.asarray(ids, np.uint64), np.asarray(position, np.uint64))
    counter = np.stack([ids >> np.uint64(2), position & _WORD, position >> _HALF, np.zeros_like(ids)], axis=-1)
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    which = (ids & np.uint64(3)).astype(np.int64)[..., None]
    return gumbel_of_words(np.take_along_axis(words, which, axis=-1)[..., 0])


def gumbel_of_words(words: Uints) -> Floats:
    """-ln(-ln(1 - u)) with u = (word | 1) / 2^32, float32.

    The words near 0 make the large values, which win a draw: there 1 - u is 1 minus a few units of 2^-32, too fine for
    float32. So 1 - u = m / 2^n is taken apart in integers (here: float64, exact for them), and m - 1 is rounded.
    """
    m, n = np.frexp(2.0**32 - (words | np.uint32(1)))
    low = m < _SQRT_HALF
    x = np.where(low, 2 * m - 1, m - 1).astype(np.float32)
    halvings = (32 - n + low).astype(np.float32)
    exponential = halvings * _LN2 - x * _polynomial(_LOG, x)
    return -_log(exponential)


def _log(value: Floats) -> Floats:
    """Natural logarithm of positive normal numbers."""
    bits = value.view(np.int32) - np.int32(0x3F3504F3)  # sqrt(1/2)
    exponent = (bits >> 23).astype(np.float32)
    x = ((bits & np.int32(0x7FFFFF)) + np.int32(0x3F3504F3)).view(np.float32) - np.float32(1.0)
    result: Floats = exponent * _LN2 + x * _polynomial(_LOG, x)
    return result


def power_rate(temperature: float) -> np.float32:
    """log2(e) / temperature: binary orders of magnitude that a probability falls by for a unit of logit."""
    return np.float32(1.4426950408889634 / float(np.float32(temperature)))


def token_masses(logits: Floats, top: np.float32, temperature: float) -> Masses:
    """exp((logit - top) / temperature) in units of 2^-31, rounded down; `top` is the largest logit."""
    with np.errstate(over="ignore"):
        orders = np.minimum((top - logits) * power_rate(temperature), np.float32(64.0))
    whole = np.floor(orders)
    x = orders - whole
    fraction = np.float32(1.0) + x * _polynomial(_POWER, x)
    return (fraction * np.float32(2.0**MASS_BITS)).astype(np.uint64) >> whole.astype(np.uint64)


def ordered_keys(logits: Floats) -> Uints:
    """Unsigned keys in the order of finite float32 values; -0 and +0 get one key."""
    bits = (logits + np.float32(0.0)).view(np.uint32)  # -0 + 0 = +0
    keys: Uints = np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(0x80000000))
    return keys
