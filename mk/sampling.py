"""The sampler. The kernel draws greedily; this draws for it otherwise, and is what its own sampler will have to equal.

Every draw is Gumbel-max over counter-based noise keyed by (seed, position, token id), so a row's token depends on its
logits, its parameters and its position only: never on the batch row, the batch, or the order of the reduction. Top-k
and top-p cut at a value found by bisection over the logits' order-preserving integer keys, as a kernel can do
without a sort; equal values at the cut are kept in ascending id. Masses are integers, so their sums have no order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mk.errors import MkError

Floats = npt.NDArray[np.float32]
Uints = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]

NO_TOKEN = -1  # what a row without a valid distribution samples
MASS_BITS = 32  # fixed point of a probability relative to the largest one

_PHILOX_M = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_PHILOX_W = (0x9E3779B9, 0xBB67AE85)
_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_COLDEST = float(np.finfo(np.float32).tiny)  # below it a temperature is no normal float32: greedy


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 = greedy; top_k 0 and top_p 1 = off. top_p counts mass of what top_k leaves. seed: 64 bits."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise MkError(
                f"sampling.temperature={self.temperature} must be a finite number of at least 0", hint="0 is greedy"
            )
        if self.top_k < 0:
            raise MkError(f"sampling.top_k={self.top_k} must be at least 0", hint="0 is off")
        if not 0 < self.top_p <= 1:
            raise MkError(f"sampling.top_p={self.top_p} must lie in (0, 1]", hint="1 is off")
        if not 0 <= self.seed < 2**64:
            raise MkError(f"sampling.seed={self.seed} must be an unsigned 64-bit number", hint="sampling.seed=0")


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


def gumbel_noise(tokens: int, seed: int, position: int) -> Floats:
    """Standard Gumbel noise of token ids 0 .. tokens - 1, float32 [tokens].

    Id t takes word t % 4 of counter (t / 4, position low, position high, 0) under key `seed`. The exponential variate
    is -log1p(-u) with u = (word + 1/2) / 2^32: it is fine-grained near 0, which is the tail that wins a draw.
    """
    counter = np.zeros((-(-tokens // 4), 4), np.uint64)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1:3] = position & 0xFFFFFFFF, position >> 32
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:tokens]
    u = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    u = np.minimum(u, np.float32(1 - 2.0**-24))  # the largest words round to 1, whose logarithm is infinite
    noise: Floats = -np.log(-np.log1p(-u))
    return noise


def ordered_keys(logits: Floats) -> Uints:
    """Unsigned keys in the order of finite float32 values; -0 and +0 get one key."""
    bits = (logits + np.float32(0.0)).view(np.uint32)  # -0 + 0 = +0
    keys: Uints = np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(0x80000000))
    return keys


def _keep_at_least(keys: Uints, mass: npt.NDArray[np.uint64], need: int) -> Mask:
    """The fewest tokens, by descending key and then ascending id, whose mass adds up to at least `need`."""
    low, high = 0, 1 << 32  # invariant: tokens with key >= low are enough, those with key >= high are not
    while high - low > 1:
        middle = (low + high) >> 1
        if int(mass[keys >= np.uint32(middle)].sum()) >= need:
            low = middle
        else:
            high = middle
    keep = keys > np.uint32(low)
    missing = need - int(mass[keep].sum())
    ties = np.flatnonzero(keys == np.uint32(low))
    before = np.cumsum(mass[ties]) - mass[ties]
    keep[ties[before < np.uint64(missing)]] = True
    return keep


def candidates(logits: Floats, params: SamplingParams) -> Mask:
    """Tokens that may be drawn, bool [vocab]: those inside top_k, then those inside top_p of what is left."""
    keys = ordered_keys(logits)
    keep = np.ones(len(logits), bool)
    if 0 < params.top_k < len(logits):
        keep = _keep_at_least(keys, np.ones(len(logits), np.uint64), params.top_k)
    if params.top_p < 1:
        mass = np.where(keep, token_masses(logits, params.temperature), np.uint64(0))
        need = max(1, math.ceil(params.top_p * int(mass.sum())))
        keep &= _keep_at_least(keys, mass, need)
    return keep


def token_masses(logits: Floats, temperature: float) -> npt.NDArray[np.uint64]:
    """Probability of each token relative to the likeliest, in units of 2^-32."""
    relative = np.exp(_scaled(logits, temperature)).astype(np.float64)
    return np.floor(relative * 2.0**MASS_BITS).astype(np.uint64)


def _scaled(logits: Floats, temperature: float) -> Floats:
    """Logits over temperature, relative to the largest: a cold temperature then loses tokens, not the likeliest one."""
    with np.errstate(over="ignore"):
        scaled: Floats = (logits - logits.max()) / np.float32(temperature)
    return scaled


def sample_row(logits: Floats, params: SamplingParams, position: int) -> int:
    """The token at `position` of one sequence, given its logits float32 [vocab]; ties go to the lower id.

    position: index of the new token, that is the context length before it. Returns `NO_TOKEN` when any logit is NaN or
    infinite: the caller reports the row's status.
    """
    if not np.isfinite(logits).all():
        return NO_TOKEN
    if params.temperature < _COLDEST:
        return int(np.argmax(logits))
    score = _scaled(logits, params.temperature) + gumbel_noise(len(logits), params.seed, position)
    if params.top_k or params.top_p < 1:
        score = np.where(candidates(logits, params), score, np.float32(-np.inf))
    return int(np.argmax(score))
