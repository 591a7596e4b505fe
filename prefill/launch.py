"""The steps of a layer on a chunk's activations: one method each, which launches the kernels that compute it."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from mk.kv import kv_layers
from mk.model.packing import PackedWeights
from prefill.activations import Activations
from prefill.kernels.attention import attention_kernel
from prefill.kernels.products import product_kernel, unpack_kernel
from prefill.kernels.residual import embed_kernel, residual_kernel
from prefill.kernels.rope import append_kernel
from prefill.kernels.route import route_kernel, sort_kernel
from prefill.tiles import ProductTile, Tiles

Rope = tuple[Tensor, Tensor]  # cos, sin [positions, 64]
SCRATCH_BYTES = 64 * 2**20  # of a matrix that is unpacked for torch's product
# Multiply-adds that are not spelled out stay two roundings, whatever this or that compiler would fuse.
FIXED: dict[str, Any] = {"enable_fp_fusion": False}


class Launcher:
    """Kernels of one model on activations of up to `chunk` tokens; `embed` says how many there are."""

    def __init__(self, weights: PackedWeights, chunk: int, dtype: torch.dtype, tiles: Tiles, products: str) -> None:
        self.geometry = weights.geometry
        self.tiles, self.products = tiles, products
        self.device = weights.slots.device
        self.tokens = 0
        self.acts = Activations.allocate(self.geometry, chunk, dtype, self.device, tiles)
        self._float32 = dtype == torch.float32 or self.device.type == "cpu"
        self._norms = weights.norms
        self._shapes = weights.layout.tiles.matrices
        self._matrices = {
            key: weights.slots[entry.first_slot : entry.first_slot + entry.slots].view(-1)
            for key, entry in weights.layout.entries().items()
        }
        scratch = SCRATCH_BYTES // dtype.itemsize if products == "torch" else 0
        self._scratch = torch.empty(scratch, dtype=dtype, device=self.device)

    # ---- the residual stream ----

    def embed(self, ids: Tensor) -> None:
        """Residual of the chunk's tokens, ids int32 [tokens], and its norm."""
        a, self.tokens = self.acts, len(ids)
        embed_kernel[(triton.cdiv(self.tokens, self.tiles.rows),)](
            ids, self._matrices["head", None], self._norms[0], a.x, a.normed, self.tokens, **self._rows()
        )

    def enter(self, layer: int, x: Tensor) -> None:
        """A residual [tokens, hidden] from outside, as the layer finds it; its norm is the one that is computed in a
        prefill."""
        a, self.tokens = self.acts, len(x)
        a.x[: self.tokens, : self.geometry.hidden] = x
        nothing = torch.zeros(self.tokens, self.geometry.hidden, dtype=a.x.dtype, device=self.device)
        self._add(a.x, nothing, nothing, a.normed, layer, choices=0)

    def residual(self, layer: int) -> None:
        """The layer's end: the residual, and its norm for the next layer or the head."""
        a = self.acts
        self._add(a.x, a.attention, a.ffn, a.normed, layer + 1, self._choices(layer))

    def ffn_sum(self, layer: int) -> Tensor:
        """What the FFN adds to the residual, float32 [tokens, hidden]. To look at: `residual` adds it unrounded."""
        a, g = self.acts, self.geometry
        x = torch.zeros(self.tokens, a.x.shape[1], device=self.device)
        nothing = torch.zeros(self.tokens, g.hidden, dtype=a.x.dtype, device=self.device)
        self._add(x, nothing, a.ffn, torch.empty_like(x), layer + 1, self._choices(layer))
        return x[:, : g.hidden]

    def _choices(self, layer: int) -> int:
        """Experts a token, 0 of a dense layer."""
        return 0 if self.geometry.mlp_kinds[layer] == "dense" else self.geometry.top_k

    def _add(self, x: Tensor, attention: Tensor, ffn: Tensor, normed: Tensor, norm: int, choices: int) -> None:
        a = self.acts
        residual_kernel[(triton.cdiv(self.tokens, self.tiles.rows),)](
            x, attention, ffn, a.slot_of, a.weight_of, self._norms[norm], normed, self.tokens,
            CHOICES=choices, **self._rows(),
        )  # fmt: skip

    def head(self, rows: Tensor) -> Tensor:
        """Logits float32 [rows, vocab] of the chunk's rows int64 [rows]."""
        g = self.geometry
        x = self.acts.normed.index_select(0, rows)
        logits = torch.empty(len(rows), g.vocab, dtype=torch.float32, device=self.device)
        self._packed_product("head", None, x, logits, len(rows), scale=g.logit_scale)
        return logits

    # ---- attention ----

    def qkv(self, layer: int) -> None:
        g = self.geometry
        self._product("qkv", layer, self.acts.normed, self.acts.qkv, rotated=g.q_width + g.kv_width)

    def append(self, layer: int, rope: Rope, pool: Tensor, table: Tensor, tiles: Tensor) -> None:
        """The new keys and values to their pages."""
        g = self.geometry
        same = kv_layers(g, g.layer_kinds[layer])
        append_kernel[(g.kv_heads, len(tiles))](
            self.acts.qkv, *rope, pool, table, tiles, same.index(layer), table.shape[1],
            ROPE=g.rope[layer], LAYERS=len(same), KV_HEADS=g.kv_heads, Q_WIDTH=g.q_width, QKV_STRIDE=g.qkv_rows,
            TOKENS=self.tiles.attention.tokens, num_warps=4, **FIXED,
        )  # fmt: skip

    def attention(self, layer: int, rope: Rope, pool: Tensor, table: Tensor, tiles: Tensor) -> None:
        """Of all tokens, whose keys and values are in their pages."""
        a, g, tile = self.acts, self.geometry, self.tiles.attention
        same = kv_layers(g, g.layer_kinds[layer])
        attention_kernel[(g.kv_heads, len(tiles))](
            a.qkv, a.heads, *rope, pool, table, tiles, same.index(layer), table.shape[1],
            ROPE=g.rope[layer], WINDOW=g.window_keys if g.layer_kinds[layer] == "sliding" else 0,
            LAYERS=len(same), KV_HEADS=g.kv_heads, GROUP=g.group, GROUP_PAD=triton.next_power_of_2(g.group),
            QKV_STRIDE=g.qkv_rows, OUT_STRIDE=a.heads.shape[1], TOKENS=tile.tokens, KEYS=tile.keys,
            STAGES=tile.stages, FLOAT32=self._float32, num_warps=tile.warps, **FIXED,
        )  # fmt: skip

    def o(self, layer: int) -> None:
        self._product("o", layer, self.acts.heads, self.acts.attention)

    # ---- FFN ----

    def dense(self, layer: int) -> None:
        a, tile = self.acts, self.tiles.product(self.tokens, self._shapes["dense_up"].rows)
        tiles_m = triton.cdiv(self.tokens, tile.m)
        self._multiply("dense_up", layer, a.normed, a.dense_hidden, tile, tiles_m, GATED=True)
        self._product("dense_down", layer, a.dense_hidden, a.ffn)

    def route(self, layer: int, forced: Tensor | None) -> Tensor:
        """Choose experts and sort the choices by them; the ids int32 [tokens, top_k], by falling logit."""
        a, g, tile = self.acts, self.geometry, self.tiles.route
        blocks, lanes = triton.cdiv(self.tokens, tile.m), a.counts.shape[1]
        route_kernel[(blocks,)](
            a.normed, self._matrices["router", layer], a.expert_ids if forced is None else forced,
            a.expert_ids, a.expert_weights, a.counts, self.tokens,
            N=g.experts, LANES=lanes, TOP_K=g.top_k, K=a.normed.shape[1], FORCED=forced is not None, TOKENS=tile.m,
            BLOCK_K=tile.k, STAGES=tile.stages, FLOAT32=self._float32, num_warps=tile.warps, **FIXED,
        )  # fmt: skip
        sort_kernel[(blocks,)](
            a.expert_ids, a.expert_weights, a.counts, a.token_of, a.slot_of, a.weight_of, a.row_tiles, a.n_tiles,
            self.tokens, blocks, self._most_tiles(),
            LANES=lanes, TOP_K=g.top_k, TOKENS=tile.m, BLOCKS=32, ENTRIES=32, BLOCK_M=self._expert_tiles()[0].m,
            num_warps=8, **FIXED,
        )  # fmt: skip
        return a.expert_ids[: self.tokens]

    def up(self, layer: int) -> None:
        """Up/gate of the sorted rows."""
        a, experts = self.acts, self.geometry.experts
        tile, tiles_m = self._expert_tiles()[0], self._most_tiles()
        self._multiply(
            "up", layer, a.normed, a.expert_hidden, tile, tiles_m, EXPERTS=experts, GATED=True, GATHERED=True
        )

    def down(self, layer: int) -> None:
        """Down of the sorted rows; `residual` adds a token's rows up."""
        a, experts = self.acts, self.geometry.experts
        tile, tiles_m = self._expert_tiles()[1], self._most_tiles()
        self._multiply("down", layer, a.expert_hidden, a.ffn, tile, tiles_m, EXPERTS=experts)

    # ---- products ----

    def _product(self, name: str, layer: int, x: Tensor, out: Tensor, rotated: int = 0) -> None:
        """out [chunk, rows] = x times the matrix; torch's product where it is wanted and the scratch suffices."""
        rows, k, n = self._shapes[name].rows, self._shapes[name].padded_k, self.tokens
        if self.products == "packed" or rows * k > self._scratch.numel():
            self._packed_product(name, layer, x, out, n, rotated)
            return
        matrix = self._scratch[: rows * k].view(rows, k)
        unpack_kernel[(triton.cdiv(rows, 16), k // 256)](
            self._matrices[name, layer], matrix, N=rows, K=k, ROTATED=rotated, ROWS=16, BLOCK_K=256, **FIXED
        )
        torch.matmul(x[:n], matrix.T, out=out[:n])

    def _packed_product(
        self, name: str, layer: int | None, x: Tensor, out: Tensor, rows: int, rotated: int = 0, scale: float = 1.0
    ) -> None:
        tile = self.tiles.product(rows, self._shapes[name].rows)
        tiles_m = triton.cdiv(rows, tile.m)
        self._multiply(name, layer, x, out, tile, tiles_m, rows, ROTATED=rotated, SCALE=scale)

    def _multiply(
        self,
        name: str,
        layer: int | None,
        x: Tensor,
        out: Tensor,
        tile: ProductTile,
        tiles_m: int,
        rows: int | None = None,
        **how: int | float,
    ) -> None:
        """tiles_m: row tiles, at most. rows: of x, by default the chunk's tokens. how: constants of the kernel that are
        not those of a plain product."""
        a, shape = self.acts, self._shapes[name]
        plain = {"EXPERTS": 0, "GATED": False, "GATHERED": False, "ROTATED": 0, "SCALE": 1.0}
        product_kernel[(tiles_m * triton.cdiv(shape.rows, tile.n),)](
            x, self._matrices[name, layer], out, a.row_tiles, a.n_tiles, a.token_of, rows or self.tokens,
            OUT_STRIDE=out.shape[1], EXPERT_STRIDE=shape.padded_rows * shape.padded_k, N=shape.rows, K=shape.padded_k,
            FLOAT32=self._float32, **{**plain, **how}, **tile.launch(), **FIXED,
        )  # fmt: skip

    def _rows(self) -> dict[str, Any]:
        """Of kernels that own whole rows of the residual."""
        width = self.acts.x.shape[1]
        return {
            "HIDDEN": self.geometry.hidden,
            "WIDTH": width,
            "COLUMNS": triton.next_power_of_2(width),
            "EPS": self.geometry.rms_eps,
            "TOKENS": self.tiles.rows,
            "num_warps": 8,
            **FIXED,
        }

    def _expert_tiles(self) -> tuple[ProductTile, ProductTile]:
        """(up, down) for this many tokens."""
        return self.tiles.experts(self.tokens * self.geometry.top_k, self.geometry.experts)

    def _most_tiles(self) -> int:
        """Row tiles that the experts can have at most: each expert's last one may be cut short."""
        g, pairs = self.geometry, self.tokens * self.geometry.top_k
        return min(pairs, triton.cdiv(pairs, self._expert_tiles()[0].m) + g.experts)
