"""Where one sequence's attention is cut into splits.

The cut depends on the sequence's own length and on the layer kind, never on the batch, the bucket, the SM count or
the schedule: that is what makes a row's attention bit-equal whatever runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mk.errors import MkError
from mk.model.geometry import PAGE


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """Splits of `split_keys` keys, doubled until a head has at most `max_splits` of them.

    Boundaries lie at absolute multiples of the split size, so a sliding window moves over them page by page. Raises
    MkError for a size that is no multiple of the page, and for no splits at all.
    """

    split_keys: int = 128
    max_splits: int = 64

    def __post_init__(self) -> None:
        if self.split_keys % PAGE or self.split_keys <= 0:
            raise MkError(
                f"engine.attention.split_keys={self.split_keys} is not a positive multiple of the page, {PAGE} tokens",
                hint=f"engine.attention.split_keys={max(1, round(self.split_keys / PAGE)) * PAGE}",
            )
        if self.max_splits < 1:
            raise MkError(
                f"engine.attention.max_splits={self.max_splits} must be at least 1",
                hint="engine.attention.max_splits=64",
            )

    def size(self, visible: int) -> int:
        """Keys of one split when `visible` keys are seen. A window unaligned to the split touches one split more."""
        size = self.split_keys
        while -(-visible // size) > self.max_splits:
            size *= 2
        return size

    def bounds(self, keys: int, window: int | None) -> list[tuple[int, int]]:
        """Key ranges [lo, hi) of each split of a sequence of `keys` keys, itself included; window None = full."""
        first = 0 if window is None else max(0, keys - window)
        # a full layer's split size follows its length; a window's never changes, so neither do its boundaries
        size = self.size(keys if window is None else window)
        starts = range(first // size * size, keys, size)
        return [(max(first, start), min(keys, start + size)) for start in starts]

    def count(self, keys: int, window: int | None) -> int:
        """Number of splits of `bounds`, 0 for an empty sequence."""
        if keys <= 0:
            return 0
        first = 0 if window is None else max(0, keys - window)
        size = self.size(keys if window is None else window)
        return (keys - 1) // size - first // size + 1

    def most(self, bucket: int, window: int | None) -> int:
        """The largest `count` of any sequence of at most `bucket` keys: what a static list must hold."""
        if window is None:
            return min(-(-bucket // self.split_keys), self.max_splits)
        size = self.size(window)
        return min(-(-bucket // size), -(-(window - 1) // size) + 1)
