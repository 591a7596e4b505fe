"""What top-k and top-p keep, found by every SM on its own slice of the vocabulary and without a sort.

Three waves after the head share the work, in the kernel as in the interpreter:

* `histogram`: how many tokens, and how much mass, each of `BINS` bins of a row's logits holds. Integers, so the order
  in which the slices are added does not matter.
* `shortlist`: the bins tell where the cuts lie, but for the one or two bins that hold them. Each slice gives its best
  token among those that are sure to be kept, and names those in between.
* `draw`: takes the cuts through the shortlist, equal logits by rising id, and then the best of all that is kept.

Bins are finer the closer a row's logits lie together, so a shortlist is some hundred tokens long; where equal logits
make it as long as the vocabulary it takes longer, and gives the same. Bins decide what has to be looked at again, never
what is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mk.noise import Floats, Masses, ordered_keys, token_masses
from mk.sampling import SamplingParams, needed_mass

Ints = npt.NDArray[np.int64]

BINS = 2048
REACH = 25.5
"""Temperatures below the largest logit from where on a token cannot be drawn: more than the noise spans (25.28), and
its mass rounds to 0."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row's parameters, and the largest and smallest of its `vocab` logits."""

    params: SamplingParams
    vocab: int
    top: np.float32
    low: np.float32

    @property
    def limit(self) -> int | None:
        """What top-k keeps, None where it keeps all."""
        return self.params.top_k if 0 < self.params.top_k < self.vocab else None

    def bins(self, logits: Floats) -> Ints:
        """Bin of each logit, 0 for the largest; -1 where it is out of reach."""
        with np.errstate(all="ignore"):
            below = self.top - logits
            reach = np.float32(REACH) * np.float32(self.params.temperature)
            width = min(reach, self.top - self.low)
            scaled = below * (np.float32(BINS) / width if width > 0 else np.float32(0.0))
        found = np.where(scaled < BINS, scaled, np.float32(BINS - 1)).astype(np.int64)  # NaN: the width is infinite
        return np.where(below <= reach, found, -1)

    def masses(self, logits: Floats) -> Masses:
        return token_masses(logits, self.top, self.params.temperature)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bins below `first` are kept; `first` .. `last`, and `at_limit` of top-k's last token (or -1), are undecided."""

    first: int
    last: int
    at_limit: int

    def sure(self, bins: Ints) -> npt.NDArray[np.bool_]:
        return (bins >= 0) & (bins < self.first)

    def undecided(self, bins: Ints) -> npt.NDArray[np.bool_]:
        return (bins >= self.first) & (bins <= self.last) | (bins >= 0) & (bins == self.at_limit)


class Histogram:
    """A row's bins, cumulated: `counts[b]` tokens of mass `masses[b]` lie in bins 0 .. b - 1."""

    def __init__(self, row: Row, counts: Ints, masses: Masses) -> None:
        self.row = row
        self.counts = np.concatenate([[0], np.cumsum(counts)])
        self.masses = np.concatenate([[0], np.cumsum(masses.astype(np.int64))])

    @property
    def at_limit(self) -> int:
        """Bin of the last token that top-k keeps; -1 where it keeps all that are in reach."""
        limit = self.row.limit
        if limit is None or self.counts[-1] < limit:
            return -1
        return int(np.searchsorted(self.counts, limit)) - 1

    def nucleus(self, total: int) -> int:
        """Bin in which the masses reach what top-p needs of `total`."""
        return int(np.searchsorted(self.masses, needed_mass(total, self.row.params.top_p))) - 1

    def bounds(self) -> Bounds:
        limit = self.at_limit
        if self.row.params.top_p == 1:
            return Bounds(limit, limit, limit) if limit >= 0 else Bounds(BINS, BINS, -1)
        least, most = (self.masses[limit], self.masses[limit + 1]) if limit >= 0 else (self.masses[-1],) * 2
        return Bounds(self.nucleus(int(least)), self.nucleus(int(most)), limit)

    def kept(self, logits: Floats, ids: Ints) -> Ints:
        """Of the undecided tokens, those that both cuts keep. They come in any order, and so do the results."""
        order = np.lexsort((ids, ~ordered_keys(logits)))
        logits, ids = logits[order], ids[order]
        bins, masses = self.row.bins(logits), self.row.masses(logits).astype(np.int64)
        limit, total = self.at_limit, int(self.masses[-1])
        inside = np.ones(len(ids), bool)
        if limit >= 0:
            assert self.row.limit is not None
            inside = bins < limit
            inside |= (bins == limit) & (np.cumsum(bins == limit) <= self.row.limit - self.counts[limit])
            total = int(self.masses[limit] + masses[inside & (bins == limit)].sum())
        if self.row.params.top_p < 1:
            at = self.nucleus(total)
            here = bins == at
            before = np.cumsum(masses * here) - masses * here
            enough = needed_mass(total, self.row.params.top_p) - self.masses[at]
            inside &= (bins < at) | here & (before < enough)
        return ids[inside]
