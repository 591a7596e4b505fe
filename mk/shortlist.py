"""What top-k and top-p keep, found by every SM on its own slice of the vocabulary and without a sort.

Three waves after the head share the work, in the kernel as in the interpreter:

* `histogram`: how many tokens, and how much mass, each of `BINS` bins of a row's logits holds. Integers, so the order
  in which the slices are added does not matter.
* `shortlist`: the bins tell where the cuts lie, but for the bins that hold them. Each slice gives its best token among
  those that are sure to be kept, and names those that may be.
* `draw`: takes the cuts through the shortlist, equal logits by rising id, and then the best of all that is kept.

A small top-k needs no bins. Each SM's largest logit is known from the head; where k of these lie above a floor, so do
the k largest of all, and few others do: all from the floor on is shortlisted.

Bins are finer the closer a row's logits lie together, so a shortlist is some hundred tokens long; where equal logits
make it as long as the vocabulary it takes longer, and gives the same. Floor and bins decide what has to be looked at
again, never what is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mk.noise import Floats, Masses, ordered_keys, token_masses
from mk.sampling import SamplingParams, needed_mass

Ints = npt.NDArray[np.int64]

BINS = 1024
REACH = 25.5
"""Temperatures below the largest logit from where on a token cannot be drawn: more than the noise spans (25.28), and
its mass rounds to 0."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row's parameters, the largest of its `vocab` logits, and the floor: nothing below it is kept."""

    params: SamplingParams
    vocab: int
    top: np.float32
    floor: np.float32
    listed: bool = False
    """Whether all from the floor on is shortlisted, without bins."""

    @classmethod
    def of(cls, params: SamplingParams, logits: Floats, maxima: Floats) -> Row:
        """maxima: the largest logits of some disjoint parts, all of them together or not."""
        listed = 0 < params.top_k <= len(maxima) and params.top_k < len(logits)
        floor = np.sort(maxima)[-params.top_k] if listed else logits.min()
        return cls(params, len(logits), logits.max(), floor, listed)

    @property
    def limit(self) -> int | None:
        """What top-k keeps, None where it keeps all."""
        return self.params.top_k if 0 < self.params.top_k < self.vocab else None

    def bins(self, logits: Floats) -> Ints:
        """Bin of each logit, 0 for the largest; -1 where it is out of reach or below the floor."""
        with np.errstate(all="ignore"):
            below = self.top - logits
            reach = np.float32(REACH) * np.float32(self.params.temperature)
            width = min(reach, self.top - self.floor)
            scaled = below * (np.float32(BINS) / width if width > 0 else np.float32(0.0))
        found = np.where(scaled < BINS, scaled, np.float32(BINS - 1)).astype(np.int64)  # NaN: the width is infinite
        return np.where((below <= reach) & (logits >= self.floor), found, -1)

    def masses(self, logits: Floats) -> Masses:
        return token_masses(logits, self.top, self.params.temperature)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bins below `first` are kept, `first` .. `last` are undecided."""

    first: int
    last: int

    def sure(self, bins: Ints) -> npt.NDArray[np.bool_]:
        return (bins >= 0) & (bins < self.first)

    def undecided(self, bins: Ints) -> npt.NDArray[np.bool_]:
        return (bins >= self.first) & (bins <= self.last)


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
        if self.row.listed:
            return Bounds(0, BINS - 1)
        limit = self.at_limit
        if self.row.params.top_p == 1:
            return Bounds(limit, limit) if limit >= 0 else Bounds(BINS, BINS)
        if limit >= 0:  # of the last bin that top-k reaches into, as little as none may count
            return Bounds(self.nucleus(int(self.masses[limit])), limit)
        nucleus = self.nucleus(int(self.masses[-1]))
        return Bounds(nucleus, nucleus)

    def kept(self, logits: Floats, ids: Ints) -> Ints:
        """Of the undecided tokens, those that both cuts keep. They come in any order, and so do the results."""
        order = np.lexsort((ids, ~ordered_keys(logits)))
        ids, masses = ids[order], self.row.masses(logits[order]).astype(np.int64)
        bounds, listed = self.bounds(), self.row.listed
        cut_by_count = listed or self.at_limit >= 0
        keep = len(ids)
        if cut_by_count:
            assert self.row.limit is not None
            keep = min(keep, self.row.limit - (0 if listed else int(self.counts[bounds.first])))
        if self.row.params.top_p < 1:
            before = 0 if listed else int(self.masses[bounds.first])
            after = 0 if cut_by_count else int(self.masses[-1] - self.masses[bounds.last + 1])
            sums = np.concatenate([[0], np.cumsum(masses)])
            need = needed_mass(before + int(sums[keep]) + after, self.row.params.top_p) - before
            keep = min(keep, int((sums[:-1] < need).sum()))
        return ids[:keep]
