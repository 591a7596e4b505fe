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
    generator = torch.Generator().manual_seed(seed)
    for turn in range(-(-len(wanted) // g.kv_heads)):
        dealt = wanted[turn * g.kv_heads : (turn + 1) * g.kv_heads]
        directions = torch.nn.functional.normalize(torch.randn(g.kv_heads, g.head_dim, generator=generator), dim=-1)
        heads = [kv_head * g.group + turn % g.group for kv_head in range(len(dealt))]
        found, values = _attend(arm, layer, x, dealt, heads, directions.to(x.device))
        token = torch.arange(len(x), device=x.device)
        for kv_head, at in enumerate(dealt):
            hit = (found[:, kv_head] == values[kv_head]).all(-1)
            sees = (token >= at) & (token < at + (g.window_keys if g.layer_kinds[layer] == "sliding" else len(x)))
            wrong = (hit != sees).nonzero()[:, 0].tolist()
            count += 1
            if wrong:
                lost.append(f"head {heads[kv_head]} key {at} of {len(x)}: {len(wrong)} tokens from {wrong[0]} on")
    return count, lost


def _attend(
    arm: PrefillArm, layer: int, x: Tensor, needles: list[int], heads: list[int], directions: Tensor
) -> tuple[Tensor, Tensor]:
    """What the heads give each token, [tokens, needles, head_dim], and the needles' values [needles, head_dim]."""
    g, acts = arm.rig.geometry, arm.prefill.launch.acts
    values = torch.full((len(needles), g.head_dim), torch.nan, dtype=acts.qkv.dtype, device=x.device)
    found = []
    for rows, where in arm.chunks(layer, x):
        arm.prefill.launch.qkv(layer)
        own = acts.qkv[: rows.stop - rows.start].unflatten(1, (-1, g.head_dim))  # q heads, k heads, v heads
        tokens = torch.arange(rows.start, rows.stop)
        for kv_head, (at, head) in enumerate(zip(needles, heads, strict=True)):
            own[:, head] = _unrotated(g, layer, directions[kv_head] * QUERY, tokens).to(own.dtype)
            if rows.start <= at < rows.stop:
                key = _unrotated(g, layer, directions[kv_head] * (SCORE * g.head_dim**0.5 / QUERY), torch.tensor([at]))
                own[at - rows.start, g.q_heads + kv_head] = key[0].to(own.dtype)
                values[kv_head] = own[at - rows.start, g.q_heads + g.kv_heads + kv_head]
        arm.prefill.attend(layer, where)
        found.append(acts.heads[: len(own), : g.q_width].unflatten(1, (-1, g.head_dim))[:, heads])
    return torch.cat(found), values


def _unrotated(g: Geometry, layer: int, vector: Tensor, tokens: Tensor) -> Tensor:
    """What the layer turns into `vector` [head_dim] at each of the positions, [tokens, head_dim]."""
    same = vector.expand(1, len(tokens), -1)
    if not g.rope[layer]:
        return same[0]
    cos, sin = (t.to(vector.device) for t in rope_table(g, tokens))
    return rotate(same, cos, -sin)[0]
