"""The activations of a chunk, and one method for each step of a layer: it launches the kernels that compute it."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from mk.kv import kv_layers
from mk.model.packing import PackedWeights
from prefill.kernels.attention import attention_kernel
from prefill.kernels.products import product_kernel, unpack_kernel, up_kernel
from prefill.kernels.residual import embed_kernel, residual_kernel
from prefill.kernels.rope import append_kernel
from prefill.kernels.route import route_kernel, sort_kernel
from prefill.tiles import ProductTile, Tiles

Rope = tuple[Tensor, Tensor]  # cos, sin [positions, 64]
SCRATCH_BYTES = 64 * 2**20  # of a matrix that is unpacked for torch's product
_COUNT_BLOCKS = 32  # blocks of counts that the sort reads at a time


class Launcher:
    """Kernels of one model on buffers for up to `chunk` tokens; `embed` says how many there are."""

    def __init__(self, weights: PackedWeights, chunk: int, dtype: torch.dtype, tiles: Tiles, products: str) -> None:
        self.geometry = g = weights.geometry
        self.tiles, self.products = tiles, products
        self.device = weights.slots.device
        self._float32 = dtype == torch.float32 or self.device.type == "cpu"
        self._matrices = {
            key: weights.slots[entry.first_slot : entry.first_slot + entry.slots].view(-1)
            for key, entry in weights.layout.entries().items()
        }
        self._norms = weights.norms
        self._shape = weights.layout.tiles.matrices
        self._tokens = 0

        def buffer(rows: int, width: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(rows, width, dtype=kind, device=self.device)

        # columns past a matrix's k, which the packing pads with zeros, are zero too: nothing ever writes there
        self.width = self._shape["qkv"].padded_k
        self._x = buffer(chunk, self.width)
        self._normed = buffer(chunk, self.width)
        self._qkv = buffer(chunk, g.qkv_rows)
        self._heads = buffer(chunk, self._shape["o"].padded_k)
        self._attention = buffer(chunk, g.hidden)
        self._lanes = triton.next_power_of_2(max(16, g.experts))
        pairs = chunk * g.top_k if g.sparse_layers else 0
        dense = self._shape["dense_down"].padded_k if g.dense_layers else 0
        expert = self._shape["down"].padded_k if g.sparse_layers else 0
        self._dense_hidden = buffer(chunk, dense)
        self._hidden = buffer(pairs, expert)
        self._ffn = buffer(max(chunk, pairs), g.hidden)
        i32 = torch.int32
        self._route_blocks = triton.cdiv(chunk, tiles.route.m)
        self._ids, self._slot_of = (buffer(chunk, max(1, g.top_k), i32) for _ in range(2))
        self._weights, self._weight_of = (buffer(chunk, max(1, g.top_k), torch.float32) for _ in range(2))
        self._counts = buffer(self._route_blocks, self._lanes, i32)
        self._token_of = torch.zeros(max(1, pairs), dtype=i32, device=self.device)
        least = min(tiles.up.m, tiles.up_small.m)
        self._row_tiles = buffer(triton.cdiv(pairs, least) + g.experts, 4, i32)
        self._n_tiles = torch.zeros(1, dtype=i32, device=self.device)
        self._scratch = torch.empty(SCRATCH_BYTES // 2 if products == "torch" else 0, dtype=dtype, device=self.device)

    # ---- the steps of a layer ----

    def embed(self, ids: Tensor) -> None:
        """Residual of the chunk's tokens, ids int32 [tokens]."""
        g = self.geometry
        self._tokens = len(ids)
        embed_kernel[(triton.cdiv(len(ids), self.tiles.rows),)](
            ids, self._matrices["head", None], self._norms[0], self._x, self._normed, len(ids),
            g.hidden, self.width, **self._row_options(),
        )  # fmt: skip

    def qkv(self, layer: int) -> None:
        g = self.geometry
        self._product("qkv", layer, self._normed, self._qkv, rotated=g.q_width + g.kv_width)

    def append(self, layer: int, rope: Rope, pool: Tensor, table: Tensor, tiles: Tensor) -> None:
        """The new keys and values to their pages."""
        g = self.geometry
        same = kv_layers(g, g.layer_kinds[layer])
        append_kernel[(g.kv_heads, len(tiles))](
            self._qkv, *rope, pool, table, tiles, same.index(layer), table.shape[1],
            g.rope[layer], len(same), g.kv_heads, g.q_width, g.qkv_rows, self.tiles.attention.tokens,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

    def attention(self, layer: int, rope: Rope, pool: Tensor, table: Tensor, tiles: Tensor) -> None:
        """Of all tokens, whose keys and values are in their pages."""
        g, tile = self.geometry, self.tiles.attention
        same, window = kv_layers(g, g.layer_kinds[layer]), g.window_keys if g.layer_kinds[layer] == "sliding" else 0
        attention_kernel[(g.kv_heads, len(tiles))](
            self._qkv, self._heads, *rope, pool, table, tiles, same.index(layer), table.shape[1],
            g.rope[layer], window, len(same), g.kv_heads, g.group, triton.next_power_of_2(g.group), g.qkv_rows,
            self._heads.shape[1], tile.tokens, tile.keys, tile.stages, self._float32,
            num_warps=tile.warps, enable_fp_fusion=False,
        )  # fmt: skip

    def o(self, layer: int) -> None:
        self._product("o", layer, self._heads, self._attention)

    def dense(self, layer: int) -> None:
        tile = self.tiles.product(self._tokens, self._shape["dense_up"].rows)
        self._up("dense_up", layer, self._dense_hidden, tile, triton.cdiv(self._tokens, tile.m), 0)
        self._product("dense_down", layer, self._dense_hidden, self._ffn)

    def route(self, layer: int, forced: Tensor | None) -> Tensor:
        """Choose experts and sort the choices by them; the ids int32 [tokens, top_k], by falling logit."""
        g, tile, n = self.geometry, self.tiles.route, self._tokens
        blocks = triton.cdiv(n, tile.m)
        route_kernel[(blocks,)](
            self._normed, self._matrices["router", layer], self._ids if forced is None else forced,
            self._ids, self._weights, self._counts, n,
            g.experts, self._lanes, g.top_k, self.width, forced is not None, tile.m, tile.k, tile.stages,
            self._float32, num_warps=tile.warps, enable_fp_fusion=False,
        )  # fmt: skip
        sort_kernel[(blocks,)](
            self._ids, self._weights, self._counts, self._token_of, self._slot_of, self._weight_of,
            self._row_tiles, self._n_tiles, n, blocks, self._most_tiles(),
            self._lanes, g.top_k, tile.m, _COUNT_BLOCKS, 32, self._expert_tiles()[0].m, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
        return self._ids[:n]

    def up(self, layer: int) -> None:
        """Up/gate of the sorted rows."""
        self._up("up", layer, self._hidden, self._expert_tiles()[0], self._most_tiles(), self.geometry.experts)

    def down(self, layer: int) -> None:
        """Down of the sorted rows; `residual` adds a token's rows up."""
        g, shape, tile = self.geometry, self._shape["down"], self._expert_tiles()[1]
        product_kernel[(self._most_tiles() * triton.cdiv(g.hidden, tile.n),)](
            self._hidden, self._matrices["down", layer], self._ffn, self._row_tiles, self._n_tiles, 0,
            g.hidden, g.experts, shape.padded_rows * shape.padded_k, g.hidden, shape.padded_k, 0, 1.0,
            **self._product_options(tile),
        )  # fmt: skip

    def residual(self, layer: int) -> None:
        """The layer's end: the residual, and its norm for the next layer or the head."""
        g = self.geometry
        choices = 0 if g.mlp_kinds[layer] == "dense" else g.top_k
        residual_kernel[(triton.cdiv(self._tokens, self.tiles.rows),)](
            self._x, self._attention, self._ffn, self._slot_of, self._weight_of, self._norms[layer + 1], self._normed,
            self._tokens, choices, g.hidden, self.width, **self._row_options(),
        )  # fmt: skip

    def head(self, rows: Tensor) -> Tensor:
        """Logits float32 [rows, vocab] of the chunk's rows int64 [rows]."""
        g = self.geometry
        x = self._normed.index_select(0, rows)
        logits = torch.empty(len(rows), g.vocab, dtype=torch.float32, device=self.device)
        self._packed_product("head", None, x, logits, len(rows), g.vocab, scale=g.logit_scale)
        return logits

    # ---- products ----

    def _product(self, name: str, layer: int, x: Tensor, out: Tensor, rotated: int = 0) -> None:
        """out [chunk, rows] = x times the matrix; torch's product where it is wanted and the scratch suffices."""
        shape, n = self._shape[name], self._tokens
        if self.products == "torch" and shape.rows * shape.padded_k <= self._scratch.numel():
            scratch = self._scratch[: shape.rows * shape.padded_k].view(shape.rows, shape.padded_k)
            unpack_kernel[(triton.cdiv(shape.rows, 16), shape.padded_k // 256)](
                self._matrices[name, layer],
                scratch,
                shape.rows,
                shape.padded_k,
                rotated,
                16,
                256,
                enable_fp_fusion=False,
            )
            torch.matmul(x[:n], scratch.T, out=out[:n])
        else:
            self._packed_product(name, layer, x, out, n, shape.rows, rotated)

    def _packed_product(
        self, name: str, layer: int | None, x: Tensor, out: Tensor, rows: int, columns: int, rotated: int = 0,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        tile = self.tiles.product(rows, columns)
        grid = (triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n),)
        product_kernel[grid](
            x, self._matrices[name, layer], out, self._row_tiles, self._n_tiles, rows,
            out.shape[1], 0, 0, columns, x.shape[1], rotated, scale, **self._product_options(tile),
        )  # fmt: skip

    def _up(self, name: str, layer: int, out: Tensor, tile: ProductTile, tiles_m: int, experts: int) -> None:
        shape = self._shape[name]
        up_kernel[(tiles_m * triton.cdiv(shape.rows, tile.n),)](
            self._normed, self._matrices[name, layer], out, self._row_tiles, self._n_tiles, self._token_of,
            self._tokens, experts, shape.padded_rows * shape.padded_k, shape.rows // 2, out.shape[1], self.width,
            **self._product_options(tile),
        )  # fmt: skip

    def _product_options(self, tile: ProductTile) -> dict[str, Any]:
        return {**tile.launch(), "FLOAT32": self._float32, "enable_fp_fusion": False}

    def _row_options(self) -> dict[str, Any]:
        return {
            "COLUMNS": triton.next_power_of_2(self.width),
            "EPS": self.geometry.rms_eps,
            "TOKENS": self.tiles.rows,
            "num_warps": 8,
            "enable_fp_fusion": False,
        }

    def _expert_tiles(self) -> tuple[ProductTile, ProductTile]:
        g = self.geometry
        return self.tiles.experts(self._tokens * g.top_k, g.experts)

    def _most_tiles(self) -> int:
        """Row tiles that the experts can have at most: each expert's last one may be cut short."""
        g, pairs = self.geometry, self._tokens * self.geometry.top_k
        return min(pairs, triton.cdiv(pairs, self._expert_tiles()[0].m) + g.experts)
