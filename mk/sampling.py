"""The sampler, by its definition: what every engine's own must equal, and what draws where there is no other.

A draw is Gumbel-max over counter-based noise keyed by (seed, position, token id), so a row's token depends on its
logits, its parameters and its position only: never on the batch row, the batch, or the order of a reduction. Top-k and
top-p keep tokens by falling logit, equal ones by rising id. What is compared or summed are integers, or numbers that
are rounded in one way everywhere (`mk/noise.py`): given the same logits, the kernel draws the same ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mk.errors import MkError
from mk.noise import Floats, Masses, Uints, gumbel_noise, ordered_keys, token_masses

Scores = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NO_TOKEN = -1  # what a row without a valid distribution samples

_COLDEST = float(np.finfo(np.float32).tiny)  # below it a temperature is no normal float32: greedy
_HOTTEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 = greedy; top_k 0 and top_p 1 = off. top_p counts mass of what top_k leaves. seed: 64 bits."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= _HOTTEST):
            raise MkError(
                f"sampling.temperature={self.temperature} must be a finite float32 of at least 0", hint="0 is greedy"
            )
        if not 0 <= self.top_k < 2**31:
            raise MkError(f"sampling.top_k={self.top_k} must lie in 0..{2**31 - 1}", hint="0 is off")
        if not 0 < self.top_p <= 1:
            raise MkError(f"sampling.top_p={self.top_p} must lie in (0, 1]", hint="1 is off")
        if not 0 <= self.seed < 2**64:
            raise MkError(f"sampling.seed={self.seed} must be an unsigned 64-bit number", hint="sampling.seed=0")

    @property
    def greedy(self) -> bool:
        return self.temperature < _COLDEST

    def cuts(self, vocab: int) -> bool:
        """Whether any of `vocab` tokens may be kept from being drawn."""
        return not self.greedy and (0 < self.top_k < vocab or self.top_p < 1)


def noisy_scores(logits: Floats, ids: npt.ArrayLike, params: SamplingParams, position: npt.ArrayLike) -> Scores:
    """What the drawn token has the most of: logit + temperature x noise, float64.

    The product of two float32 is exact in float64, so the sum is rounded once, fused or not; and no temperature is so
    hot or so cold that it overflows or loses the likeliest token.
    """
    noise = gumbel_noise(ids, params.seed, position)
    return logits.astype(np.float64) + float(np.float32(params.temperature)) * noise.astype(np.float64)


def needed_mass(total: int, top_p: float) -> int:
    """What the kept tokens' masses must add up to. `total` is below 2^53, so the product is rounded once."""
    return max(1, math.ceil(top_p * float(total)))


def _keep_at_least(keys: Uints, mass: Masses, need: int) -> Mask:
    """The fewest tokens, by descending key and then ascending id, whose mass adds up to at least `need`.

    Few of a vocabulary hold almost all of its mass, so only as many of the likeliest are sorted as hold enough.
    """
    ids = np.arange(len(keys))
    for count in (1 << 10, 1 << 14):
        if count < len(keys):
            likeliest = np.flatnonzero(keys >= np.partition(keys, len(keys) - count)[len(keys) - count])
            if int(mass[likeliest].sum()) >= need:
                ids = likeliest
                break
    order = ids[np.argsort(~keys[ids], kind="stable")]
    before = np.cumsum(mass[order]) - mass[order]
    keep = np.zeros(len(keys), bool)
    keep[order[before < np.uint64(need)]] = True
    return keep


def candidates(logits: Floats, params: SamplingParams) -> Mask:
    """Tokens that may be drawn, bool [vocab]: those inside top_k, then those inside top_p of what is left."""
    keys = ordered_keys(logits)
    keep = np.ones(len(logits), bool)
    if 0 < params.top_k < len(logits):
        keep = _keep_at_least(keys, np.ones(len(logits), np.uint64), params.top_k)
    if params.top_p < 1:
        mass = np.where(keep, token_masses(logits, logits.max(), params.temperature), np.uint64(0))
        keep &= _keep_at_least(keys, mass, needed_mass(int(mass.sum()), params.top_p))
    return keep


def sample_row(
    logits: Floats, params: SamplingParams, position: int, allowed: Mask | None = None, min_p: float = 0.0
) -> int:
    """The token at `position` of one sequence, given its logits float32 [vocab]; ties go to the lower id.

    position: index of the new token, that is the context length before it. allowed: bool [vocab], tokens that may be
    drawn at all; None = every one. min_p: of what the cuts leave, tokens at least that likely compared with the
    likeliest; 0 = off. Returns `NO_TOKEN` when any logit is NaN or infinite, or nothing is allowed: the caller reports
    the row's status.
    """
    if not np.isfinite(logits).all() or (allowed is not None and not allowed.any()):
        return NO_TOKEN
    ids = np.arange(len(logits)) if allowed is None else np.flatnonzero(allowed)
    logits = logits if allowed is None else logits[ids]
    if params.greedy:
        return int(ids[np.argmax(logits)])
    keep = candidates(logits, params) if params.cuts(len(logits)) else np.ones(len(logits), bool)
    if min_p > 0:
        keep &= logits.astype(np.float64) >= float(logits.max()) + params.temperature * math.log(min_p)
    ids, logits = ids[keep], logits[keep]
    return int(ids[np.argmax(noisy_scores(logits, ids, params, position))])
