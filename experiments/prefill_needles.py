"""Needles in prefill: one key that all queries of a head point at, so that each token returns its value, or must not.

A needle's score is `SCORE`, which leaves it a weight of 1 to the last bit of float32. Every token of the prompt is a
test of it: those that see the key return its V bit for bit, all others do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.needles import SCORE
from experiments.prefill_layers import PrefillArm
from mk.kv import PAGE
from mk.model.geometry import Geometry
from mk.model.reference import rope_table, rotate

QUERY = 8.0  # a query's norm: other keys' scores then stay small beside the needle's


def positions(length: int, window: int) -> list[int]:
    """Keys to be needled in a prompt: both ends, both sides of page edges, and of the window's edge for the first and
    for the last token."""
    last = length - 1
    edges = (0, PAGE, window, last - window + 1, last // PAGE * PAGE, last)
    return sorted({at for edge in edges for at in (edge - 1, edge, edge + 1) if 0 <= at < length})


def find(arm: PrefillArm, layer: int, x: Tensor, seed: int) -> tuple[int, list[str]]:
    """How many needles were put into a prompt x bf16 [tokens, hidden], and what is wrong with those that were not found
    exactly where they are in sight. A pass has one for each KV head."""
    g, count, lost = arm.rig.geometry, 0, []
    wanted = positions(len(x), g.window_keys)
    projected = _projected(arm, layer, x)
    generator = torch.Generator().manual_seed(seed)
    for turn in range(-(-len(wanted) // g.kv_heads)):
        dealt = wanted[turn * g.kv_heads : (turn + 1) * g.kv_heads]
        directions = torch.nn.functional.normalize(torch.randn(g.kv_heads, g.head_dim, generator=generator), dim=-1)
        heads = [kv_head * g.group + turn % g.group for kv_head in range(len(dealt))]
        needled = projected.clone()
        for kv_head, (at, head) in enumerate(zip(dealt, heads, strict=True)):
            _put(g, layer, needled, directions[kv_head], at, head, kv_head)
        found = _attended(arm, layer, x, needled)
        token = torch.arange(len(x), device=x.device)
        for kv_head, (at, head) in enumerate(zip(dealt, heads, strict=True)):
            hit = (found[:, head] == needled[at, g.q_heads + g.kv_heads + kv_head]).all(-1)
            sees = (token >= at) & (token < at + (g.window_keys if g.layer_kinds[layer] == "sliding" else len(x)))
            wrong = (hit != sees).nonzero()[:, 0].tolist()
            count += 1
            if wrong:
                lost.append(f"head {head} key {at} of {len(x)}: {len(wrong)} tokens from {wrong[0]} on")
    return count, lost


def _projected(arm: PrefillArm, layer: int, x: Tensor) -> Tensor:
    """The layer's heads before rotation, q, k and v in this order, [tokens, heads, head_dim]."""
    launch, parts = arm.prefill.launch, []
    for rows, _ in arm.chunks(layer, x):
        launch.qkv(layer)
        parts.append(launch.acts.qkv[: rows.stop - rows.start].clone())
    return torch.cat(parts).unflatten(1, (-1, arm.rig.geometry.head_dim))


def _put(g: Geometry, layer: int, heads: Tensor, direction: Tensor, at: int, head: int, kv_head: int) -> None:
    """Turn all queries of `head` and the key of token `at` to a direction [head_dim]."""
    tokens, direction = torch.arange(len(heads)), direction.to(heads.device)
    heads[:, head] = _unrotated(g, layer, direction * QUERY, tokens).to(heads.dtype)
    key = direction * (SCORE * g.head_dim**0.5 / QUERY)
    heads[at, g.q_heads + kv_head] = _unrotated(g, layer, key, tokens[at, None])[0].to(heads.dtype)


def _attended(arm: PrefillArm, layer: int, x: Tensor, projected: Tensor) -> Tensor:
    """What each query head gives each token, [tokens, q_heads, head_dim]."""
    g, acts, parts = arm.rig.geometry, arm.prefill.launch.acts, []
    for rows, where in arm.chunks(layer, x):
        acts.qkv[: rows.stop - rows.start] = projected[rows].flatten(1)
        arm.prefill.attend(layer, where)
        parts.append(acts.heads[: rows.stop - rows.start, : g.q_width].clone())
    return torch.cat(parts).unflatten(1, (-1, g.head_dim))


def _unrotated(g: Geometry, layer: int, vector: Tensor, tokens: Tensor) -> Tensor:
    """What the layer turns into `vector` [head_dim] at each of the positions, [tokens, head_dim]."""
    same = vector.expand(1, len(tokens), -1)
    if not g.rope[layer]:
        return same[0]
    cos, sin = (t.to(vector.device) for t in rope_table(g, tokens))
    return rotate(same, cos, -sin)[0]
