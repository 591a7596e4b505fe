"""The bytes that a decode step, and the operations that a prefill, cannot do without."""

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


def operation_bytes(geometry: Geometry, operation: str, contexts: Sequence[float], distinct_experts: float) -> float:
    """Bytes that one run of an operation reads in one layer, counted as `step_bytes` does: 0 for one without weights.

    operation: a wave, attn_full or attn_sliding, or waves together as experiments/op_parts.py names them.
    """
    g, tiles = geometry, tile_rules(geometry).matrices
    names = {"oproj": "o", "moe_up": "up", "moe_down": "down", "moe_output": "down", "lm_head": "head"}
    names |= {"routing": "router"}
    if operation in ("attn_full", "attn_sliding", "attention_full", "attention_sliding"):
        seen = sum(keys if operation.endswith("full") else min(keys, g.window_keys) for keys in contexts)
        return seen * 2 * g.kv_width * BF16
    tile = tiles.get(names.get(operation, operation))
    times = distinct_experts if operation in ("moe_up", "moe_down", "moe_output") else 1
    return 0.0 if tile is None else float(times * tile.rows * tile.k * BF16)


def uniform_experts(geometry: Geometry, rows: int) -> float:
    """Distinct experts that `rows` rows touch in a layer on average when each draws its top_k uniformly."""
    g = geometry
    return g.experts * (1 - (1 - g.top_k / g.experts) ** rows)


def active_parameters(geometry: Geometry) -> int:
    """Weights that one token is multiplied with in the layers, without the head."""
    g, tiles = geometry, tile_rules(geometry).matrices

    def size(*names: str) -> int:
        return sum(tiles[name].rows * tiles[name].k for name in names if name in tiles)

    sparse = len(g.sparse_layers) * (size("router") + g.top_k * size("up", "down"))
    return g.layers * size("qkv", "o") + len(g.dense_layers) * size("dense_up", "dense_down") + sparse


def visible_pairs(keys: int, window: int | None) -> int:
    """(query, key) pairs of causal attention over `keys` tokens; window: keys a query sees, its own too."""
    if window is None or window >= keys:
        return keys * (keys + 1) // 2
    return window * (window + 1) // 2 + (keys - window) * window


def prefill_flop(geometry: Geometry, prompts: Sequence[int]) -> float:
    """Operations of prefilling prompts of these lengths: 2 a weight and token, 4 a pair and dim; one head each."""
    g = geometry
    pairs = sum(
        len(g.full_layers) * visible_pairs(n, None) + len(g.sliding_layers) * visible_pairs(n, g.window_keys)
        for n in prompts
    )
    head = len(prompts) * g.vocab * g.hidden
    return 2.0 * (active_parameters(g) * sum(prompts) + head) + 4.0 * g.q_width * pairs
