"""The bytes that a decode step cannot do without, and what they make of a measured time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mk.model.geometry import Geometry, MatrixTile, tile_rules

BF16 = 2


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes read in one step, by what they are. Weights count unpadded, KV counts the keys that are visible."""

    attention: float  # qkv and o of all layers
    router: float
    dense: float
    experts: float  # of those that were touched
    head: float
    kv: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def step_bytes(geometry: Geometry, contexts: Sequence[float], distinct_experts: float) -> StepBytes:
    """contexts: keys of each active row. distinct_experts: that a sparse layer touches, mean over layers and steps."""
    g, tiles = geometry, tile_rules(geometry).matrices

    def weights(*names: str) -> int:
        chosen: list[MatrixTile] = [tiles[name] for name in names if name in tiles]
        return sum(tile.rows * tile.k * BF16 for tile in chosen)

    sparse = len(g.sparse_layers)
    seen = sum(
        len(g.full_layers) * keys + len(g.sliding_layers) * min(keys, g.window_keys) for keys in contexts
    )  # keys, all layers together
    return StepBytes(
        attention=g.layers * weights("qkv", "o"),
        router=sparse * weights("router"),
        dense=len(g.dense_layers) * weights("dense_up", "dense_down"),
        experts=sparse * distinct_experts * weights("up", "down"),
        head=weights("head"),
        kv=seen * 2 * g.kv_width * BF16,
    )


def uniform_experts(geometry: Geometry, rows: int) -> float:
    """Distinct experts that `rows` rows touch in a layer on average when each draws its top_k uniformly."""
    g = geometry
    return g.experts * (1 - (1 - g.top_k / g.experts) ** rows)
