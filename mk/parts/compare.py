"""What two machines wrote in the same part of a step, from the same inputs: the same elements, equal up to noise.

Noise is of two kinds. A float32 sum of n products in another order, by the tensor core in chunks of 16 with its own
truncation, is off by at most about one unit in the last place of the running sum a chunk: `(n / 16 + 16) * 2^-23` of
the largest output of the row. A value that is stored in bf16 after that may fall to the other side of a rounding
boundary, which moves it by one unit in its last place, at most 2^-7 of itself; but only where it was as close to the
boundary as the noise is wide, so it must be rare. The probabilities of attention are such values, so a split's sum and
output inherit their 2^-8, half a unit, at most once for all the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mk.interpreter.memory import Floats, Memory
from mk.isa import Buffer
from mk.kv import KVCache, PageTable
from mk.model.geometry import SLOT_K, Geometry
from mk.parts.fields import Field, Mask, Rows, fields

BF16_STEP = 2.0**-7  # between neighbours, of the smaller one's value at most
MOST_FLIPS = 0.05  # elements of a field that may round the other way
FP32_STEP = 2.0**-23


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one field of one buffer. worst: the largest difference, in units of what is allowed there."""

    buffer: str
    field: str
    elements: int  # that the expected side wrote
    unmatched: int  # that only one side wrote
    unequal: int
    largest: float  # absolute
    worst: float
    flips: float  # share of unequal elements, where that is limited; else 0

    @property
    def passed(self) -> bool:
        return not self.unmatched and self.worst <= 1 and self.flips <= MOST_FLIPS


@dataclass(frozen=True, slots=True)
class Tolerances:
    """What is allowed in each field. exact: nothing is."""

    geometry: Geometry
    exact: bool = False

    def of(self, field: str) -> tuple[float, float, bool]:
        """(of the value itself, of the row's largest value, whether the field is stored in bf16)."""
        if self.exact:
            return 0.0, 0.0, False
        g = self.geometry
        ffn = max(g.expert_ffn if g.sparse_layers else 0, g.dense_ffn if g.dense_layers else 0)
        products = {"logits of a k slot": SLOT_K, "an expert's": ffn, "the FFN's": ffn * max(1, g.top_k)}
        products |= {"attention's": g.q_width, "max": g.head_dim, "heads": SLOT_K}
        sums = (products.get(field, max(g.hidden, g.q_width)) / 16 + 16) * FP32_STEP
        stored = field in ("x", "q, k, v", "heads", "hidden", "K", "V")
        own = {"sum of squares": 2 * BF16_STEP, "sum": BF16_STEP / 2}.get(field, BF16_STEP if stored else 0.0)
        # O is a sum over keys of either sign: the change of one of them is compared with the row's largest output
        return own, BF16_STEP if field == "o" else sums, stored


def compare(
    expected: Memory, found: Memory, units: dict[Buffer, Mask], active: Rows, allowed: Tolerances
) -> list[Difference]:
    """Both memories where `units` may have been written, NaN standing for what was not. Rows that are not active may
    hold anything."""
    differences = []
    for buffer, mask in units.items():
        for ours, theirs in zip(fields(expected, buffer), fields(found, buffer), strict=True):
            differences.append(_difference(buffer.name, ours, theirs.values, ours.mask(mask, active), allowed))
    return differences


def compare_pages(
    expected: KVCache, found: KVCache, table: PageTable, layer: int, keys: list[int], allowed: Tolerances
) -> list[Difference]:
    """K and V of the newest token of each active row, in one layer."""
    kind = expected.geometry.layer_kinds[layer]
    sides = []
    for cache in (expected, found):
        newest = [
            [cache.read(table[kind][row], layer, head, length - 1, length) for head in range(cache.geometry.kv_heads)]
            for row, length in enumerate(keys)
            if length
        ]
        sides.append(np.array(newest, np.float32))  # [rows, heads, K and V, 1, dim]
    differences = []
    for half, name in enumerate(("K", "V")):
        ours, theirs = (side[:, :, half] for side in sides)
        field = Field(name, ours, 1, 0)
        differences.append(_difference("KV page", field, theirs, np.ones(ours.shape, bool), allowed))
    return differences


def _difference(buffer: str, field: Field, found: Floats, mask: Mask, allowed: Tolerances) -> Difference:
    """Compare where `mask` says; `field` is the expected side."""
    own, of_row, stored = allowed.of(field.name)
    expected = np.where(mask, field.values, np.float32(np.nan)).astype(np.float64)
    theirs = np.where(mask, found, np.float32(np.nan)).astype(np.float64)
    both = ~np.isnan(expected) & ~np.isnan(theirs)
    peak = np.max(np.abs(expected), axis=tuple(a for a in range(expected.ndim) if a != field.rows), keepdims=True,
                  where=both, initial=0.0)  # fmt: skip
    distance = np.where(both, np.abs(theirs - expected), 0.0)
    distance[both & (theirs == expected)] = 0.0  # infinities of one sign
    bound = np.where(both, own * np.abs(expected) + of_row * peak, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(distance > 0, distance / bound, 0.0)
    elements, unequal = int((mask & ~np.isnan(field.values)).sum()), int((distance > 0).sum())
    unmatched = int((mask & (np.isnan(field.values) != np.isnan(found))).sum())
    flips = unequal / max(1, elements) if stored else 0.0
    return Difference(
        buffer, field.name, elements, unmatched, unequal, float(distance.max()), float(ratio.max()), flips
    )
