"""Needles: one key aligned with a query, so that its head must return exactly that key's V, or must not.

In each pass a KV head of a row has one needle: a key along the query of one head of its group, whose score is `SCORE`.
With scores of history of a standard deviation of 3.5 the needle's weight is 1 up to e^-30 or so, and the head's output
is its V to the last bit of bfloat16. The row's own key cannot be chosen: it is needled by turning all of history away
from a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.layer_arms import History
from mk.kv import PAGE
from mk.model.geometry import Geometry
from mk.splits import SplitPolicy

SCORE = 60.0
FAR = 0.5  # relative distance that an output has at least from a V that it must not return


@dataclass(frozen=True, slots=True)
class Needle:
    """A key of a query head, and whether the row's token sees it."""

    head: int
    position: int
    visible: bool


def positions(g: Geometry, splits: SplitPolicy, layer: int, keys: int) -> list[int]:
    """Where keys are needled behind a context of `keys` tokens: both ends, both sides of the window's edge, of page
    edges and of split edges. The row's own position is left out."""
    own, window = keys - 1, g.window_keys
    sliding = window if g.layer_kinds[layer] == "sliding" else None
    bounds = splits.bounds(keys, sliding)
    edges = [bounds[0][0], bounds[len(bounds) // 2][0], bounds[-1][0], own // PAGE * PAGE]
    wanted = [0, own - window, own - window + 1, own - 1, *edges, *(edge - 1 for edge in edges)]
    return sorted({position for position in wanted if 0 <= position < own})


def passes(g: Geometry, splits: SplitPolicy, layer: int, contexts: Sequence[int]) -> int:
    """Passes that it takes until every position of every row was needled."""
    return max(-(-len(positions(g, splits, layer, keys)) // g.kv_heads) for keys in contexts if keys)


def place(g: Geometry, splits: SplitPolicy, layer: int, keys: int, turn: int) -> list[Needle]:
    """The needles of pass `turn` of a context: the next `kv_heads` positions, one a KV head, its queries in turn."""
    first = 0 if g.layer_kinds[layer] == "full" else max(0, keys - g.window_keys)
    dealt = positions(g, splits, layer, keys)[turn * g.kv_heads : (turn + 1) * g.kv_heads]
    return [Needle(kv_head * g.group + turn % g.group, n, n >= first) for kv_head, n in enumerate(dealt)]


def with_needles(history: History, queries: Tensor, needles: Sequence[Needle]) -> History:
    """A copy of `history` with the needles' keys. queries: float32 [q_heads, head_dim], as the layer rotates them."""
    keys = history.keys.clone()
    group, dim = len(queries) // len(keys), queries.shape[1]
    for needle in needles:
        q = queries[needle.head]
        keys[needle.head // group, needle.position] = (q * (SCORE * dim**0.5 / q.square().sum())).to(keys.dtype)
    return History(keys, history.values)


def turned_away(history: History, queries: Tensor, turn: int) -> tuple[History, list[int]]:
    """History whose keys all point away from one query of each KV head, and those query heads."""
    group, dim = len(queries) // len(history.keys), queries.shape[1]
    heads = [kv_head * group + turn % group for kv_head in range(len(history.keys))]
    q = queries[heads]
    away = -q * (SCORE * dim**0.5 / q.square().sum(-1, keepdim=True))
    keys = away.to(history.keys.dtype)[:, None].expand_as(history.keys).contiguous()
    return History(keys, history.values), heads


def returned(heads: Tensor, history: History, needles: Sequence[Needle]) -> list[Needle]:
    """The needles that were not found, or found where they are out of sight. heads: one row's [q_heads, head_dim]."""
    group = len(heads) // len(history.values)
    wrong = []
    for needle in needles:
        value = history.values[needle.head // group, needle.position].float()
        found = heads[needle.head]
        if needle.visible:
            passed = torch.equal(found, value)
        else:
            passed = bool((found - value).norm() > FAR * value.norm())
        if not passed:
            wrong.append(needle)
    return wrong
