"""What a chunk's kernels write and read, on one device; rows past its tokens may hold anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import triton
from torch import Tensor

from mk.model.geometry import Geometry, tile_rules
from prefill.tiles import Tiles


@dataclass(frozen=True, slots=True)
class Activations:
    """Buffers for up to `chunk` tokens, pairs being chunk * top_k (token, choice) pairs.

    A width that a product reads is padded as the weight packing pads that product's k. Padding is zero from the start,
    and nothing writes there.
    """

    x: Tensor  # residual [chunk, hidden padded]
    normed: Tensor  # [chunk, hidden padded]
    qkv: Tensor  # [chunk, qkv_rows] in logical order, before rotation
    heads: Tensor  # attention before o_proj [chunk, q_width padded]
    attention: Tensor  # after it [chunk, hidden]
    dense_hidden: Tensor  # [chunk, dense_ffn padded]
    expert_hidden: Tensor  # [pairs, expert_ffn padded], sorted by expert
    ffn: Tensor  # [max(chunk, pairs), hidden]: of tokens on a dense layer, of sorted pairs on a sparse one
    expert_ids: Tensor  # int32 [chunk, top_k] by falling logit
    expert_weights: Tensor  # float32 [chunk, top_k]
    counts: Tensor  # int32 [blocks of tokens, experts up to a power of two]
    token_of: Tensor  # int32 [pairs]: token of a sorted row
    slot_of: Tensor  # int32 [chunk, top_k]: a token's sorted rows by rising expert id
    weight_of: Tensor  # float32 [chunk, top_k] in that order
    row_tiles: Tensor  # int32 [most tiles, 4]: expert, first row, end row, 0
    n_tiles: Tensor  # int32 [1]

    @classmethod
    def allocate(cls, geometry: Geometry, chunk: int, dtype: torch.dtype, device: torch.device, tiles: Tiles) -> Self:
        """With room for the row tiles of any of `tiles`."""
        g, shapes = geometry, tile_rules(geometry).matrices
        top_k = g.top_k if g.sparse_layers else 1
        pairs = chunk * top_k if g.sparse_layers else 1

        def padded_k(name: str) -> int:
            return shapes[name].padded_k if name in shapes else 0

        def buffer(rows: int, width: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(rows, width, dtype=kind, device=device)

        i32, f32 = torch.int32, torch.float32
        return cls(
            x=buffer(chunk, padded_k("qkv")),
            normed=buffer(chunk, padded_k("qkv")),
            qkv=buffer(chunk, g.qkv_rows),
            heads=buffer(chunk, padded_k("o")),
            attention=buffer(chunk, g.hidden),
            dense_hidden=buffer(chunk, padded_k("dense_down")),
            expert_hidden=buffer(pairs, padded_k("down")),
            ffn=buffer(max(chunk, pairs), g.hidden),
            expert_ids=buffer(chunk, top_k, i32),
            expert_weights=buffer(chunk, top_k, f32),
            counts=buffer(triton.cdiv(chunk, tiles.route.m), triton.next_power_of_2(max(16, g.experts)), i32),
            token_of=torch.zeros(pairs, dtype=i32, device=device),
            slot_of=buffer(chunk, top_k, i32),
            weight_of=buffer(chunk, top_k, f32),
            row_tiles=buffer(triton.cdiv(pairs, min(tiles.up.m, tiles.up_small.m)) + g.experts, 4, i32),
            n_tiles=torch.zeros(1, dtype=i32, device=device),
        )
