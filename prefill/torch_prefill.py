"""Prefill in plain PyTorch on a CPU: a prompt's K and V into its pages, and the logits of its last token.

A token's bits do not depend on how the prompt is cut into chunks, nor on anything else that is prefilled. On a CPU a
matrix product may round a row differently when the number of rows changes, so every product here has the same shape
whatever the chunk: tokens are computed in tiles of 64 at absolute positions 64 i .. 64 i + 63, a token always in the
same row of its tile, rows without a token holding zeros. A tile that a chunk boundary cuts is computed twice, each time
for other rows. An expert sees the whole tile, not a gathered part of it, and its result is dropped by select.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from mk.errors import MkError
from mk.kv import KVCache, PageAllocator, first_visible
from mk.model.geometry import PAGE, ROWS, Geometry
from mk.model.packing import SUB_K, PackedWeights
from mk.model.reference import rope_table, rotate, top_k
from mk.threads import threads_for
from prefill.chunks import Prompt

TILE = PAGE
_CACHED = 1 << 30  # bytes of float32 weights that are kept unpacked
_HEAD_STRIPS = 1024  # strips of the head unpacked at a time


@dataclass(frozen=True, slots=True)
class _Tile:
    """Positions first .. first + 63; those in [lo, hi) are this chunk's tokens."""

    first: int
    lo: int
    hi: int

    @property
    def rows(self) -> slice:
        return slice(self.lo - self.first, self.hi - self.first)

    def holds(self) -> Tensor:
        """Which rows hold a token, bool [64, 1]."""
        position = torch.arange(self.first, self.first + TILE)[:, None]
        return (position >= self.lo) & (position < self.hi)


class _Normed(NamedTuple):
    """Activations [..., hidden] times the norm's weight, and the 1/rms [..., 1] that is still due."""

    x: Tensor
    rstd: Tensor

    def times(self, matrix: Tensor) -> Tensor:
        return (self.x @ matrix.T) * self.rstd


class TorchPrefill:
    """Prefills sequences into one KV cache.

    numerics: "float32", or "kernel" for values rounded to bf16 where the decode step rounds them. chunk: tokens a pass
    over the weights; it bounds memory, never bits.
    """

    def __init__(self, weights: PackedWeights, kv: KVCache, numerics: str = "float32", chunk: int = 512) -> None:
        if chunk < 1:
            raise MkError(f"prefill.chunk={chunk} must be at least 1")
        self.geometry: Geometry = weights.geometry
        self.kv = kv
        self.chunk = chunk
        self.round: Callable[[Tensor], Tensor] = _to_bf16 if numerics == "kernel" else _exact
        self._weights = _Unpacked(weights)

    @torch.no_grad()
    def run(
        self, pages: PageAllocator, slot: int, tokens: Sequence[int], start: int = 0, every: bool = False
    ) -> npt.NDArray[np.float32]:
        """Prefill `tokens` at positions start.. of a slot that holds the `start` tokens before them.

        Pages are reserved chunk by chunk, and given back as they leave the window, so a long prompt never needs more
        than its window and a chunk of sliding pages. Returns the logits after the last token, float32 [vocab], or
        after `every` token, [tokens, vocab].
        Raises MkError for no tokens, a token outside the vocabulary, positions past the model's, or too few pages.
        """
        end = start + len(tokens)
        self._check(tokens, end)
        found = []
        with threads_for(self._weights.nbytes):
            for lo in range(start, end, self.chunk):
                hi = min(end, lo + self.chunk)
                pages.reserve(slot, hi)
                x = self._chunk(pages, slot, tokens[lo - start : hi - start], lo)
                pages.release_window(slot, hi)
                if every:
                    found += [self._logits(row) for row in x]
            return np.stack(found) if every else self._logits(x[-1])

    def together(self, pages: PageAllocator, prompts: Sequence[Prompt]) -> list[npt.NDArray[np.float32]]:
        """As `run`, one after the other."""
        return [self.run(pages, prompt.slot, prompt.tokens, prompt.start) for prompt in prompts]

    def _check(self, tokens: Sequence[int], end: int) -> None:
        g = self.geometry
        if not len(tokens):
            raise MkError("prefill: the prompt has no tokens")
        if min(tokens) < 0 or max(tokens) >= g.vocab:
            raise MkError(f"prefill: a token of the prompt is outside 0..{g.vocab - 1}")
        if end > g.max_positions:
            raise MkError(f"prefill: the prompt needs {end} positions, the model has max_positions={g.max_positions}")

    def _chunk(self, pages: PageAllocator, slot: int, tokens: Sequence[int], start: int) -> Tensor:
        """Run all layers over one chunk; returns its tokens' residuals [tokens, hidden]."""
        end = start + len(tokens)
        tiles = [_Tile(at, max(at, start), min(at + TILE, end)) for at in range(start // TILE * TILE, end, TILE)]
        x = [torch.zeros(TILE, self.geometry.hidden) for _ in tiles]
        embedded = self._weights.head_rows(tokens)
        for tile, residual in zip(tiles, x, strict=True):
            residual[tile.rows] = embedded[tile.lo - start : tile.hi - start]
        for layer in range(self.geometry.layers):
            norm = self._weights.norm(layer)
            h = [self._normed(residual, norm) for residual in x]
            attention = self._attention(layer, h, tiles, pages, slot)
            dense = self.geometry.mlp_kinds[layer] == "dense"
            ffn = self._dense(layer, h) if dense else self._experts(layer, h, tiles)
            x = [self.round(r + (a + f)) for r, a, f in zip(x, attention, ffn, strict=True)]
        return torch.cat([residual[tile.rows] for tile, residual in zip(tiles, x, strict=True)])

    def _normed(self, x: Tensor, weight: Tensor) -> _Normed:
        """RMSNorm as the kernel splits it: the weight now, 1/rms after the products."""
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.geometry.rms_eps)
        return _Normed(self.round(x * weight), rstd)

    def _attention(
        self, layer: int, h: list[_Normed], tiles: list[_Tile], pages: PageAllocator, slot: int
    ) -> list[Tensor]:
        """The layer's attention after o_proj, [64, hidden] a tile; the chunk's K and V go to their pages."""
        g = self.geometry
        window = g.window_keys if g.layer_kinds[layer] == "sliding" else None
        start, end = tiles[0].lo, tiles[-1].hi
        qkv, o = self._weights.matrix("qkv", layer), self._weights.matrix("o", layer)
        first = self._first_key(tiles[0], window)
        keys = torch.zeros(2, g.kv_heads, tiles[-1].first + TILE - first, g.head_dim)
        self._read_history(keys, pages, slot, layer, first, start, window)
        outputs = []
        for tile, hidden in zip(tiles, h, strict=True):
            q, k, v = self._project(layer, hidden, qkv, tile)
            fresh = slice(tile.lo - first, tile.hi - first)
            keys[0, :, fresh], keys[1, :, fresh] = k[:, tile.rows], v[:, tile.rows]
            near = keys[:, :, self._first_key(tile, window) - first : tile.first + TILE - first]
            outputs.append(self._attend(q, near, tile.first, window) @ o.T)
        new = keys[:, :, start - first : end - first].transpose(1, 2).numpy()
        self.kv.write(pages.table, slot, layer, start, new[0], new[1])
        return outputs

    def _first_key(self, tile: _Tile, window: int | None) -> int:
        """First key of the first block that any row of the tile sees: a function of the tile, not of the chunk."""
        return first_visible(tile.first + 1, window) // PAGE * PAGE

    def _read_history(
        self, keys: Tensor, pages: PageAllocator, slot: int, layer: int, first: int, start: int, window: int | None
    ) -> None:
        """Fill in the K and V of earlier chunks that the token at `start` sees; what none sees stays zero."""
        lo = max(first, first_visible(start + 1, window))
        if lo >= start:
            return
        blocks = pages.table[self.geometry.layer_kinds[layer]][slot]
        for head in range(self.geometry.kv_heads):
            for half, rows in enumerate(self.kv.read(blocks, layer, head, lo, start)):
                keys[half, head, lo - first : start - first] = torch.from_numpy(rows)

    def _project(self, layer: int, h: _Normed, qkv: Tensor, tile: _Tile) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of a tile, [heads, 64, head_dim] each, q and k rotated where the layer rotates."""
        g = self.geometry
        heads = h.times(qkv).view(TILE, -1, g.head_dim).transpose(0, 1)
        q, k, v = heads.split([g.q_heads, g.kv_heads, g.kv_heads])
        if g.rope[layer]:
            cos, sin = map(self.round, rope_table(g, torch.arange(tile.first, tile.first + TILE)))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.round(q), self.round(k), self.round(v)

    def _dense(self, layer: int, h: list[_Normed]) -> list[Tensor]:
        up, down = self._weights.matrix("dense_up", layer), self._weights.matrix("dense_down", layer)
        return [self._swiglu(hidden, up, down) for hidden in h]

    def _experts(self, layer: int, h: list[_Normed], tiles: list[_Tile]) -> list[Tensor]:
        """The weighted experts of every tile, added in rising id; an expert is unpacked once for all tiles."""
        g = self.geometry
        router = self._weights.matrix("router", layer)
        weight_of = []  # [64, experts], 0 where not chosen
        for tile, hidden in zip(tiles, h, strict=True):
            logits = hidden.times(router)
            ids = top_k(logits, g.top_k)
            weight = torch.zeros(TILE, g.experts).scatter_(1, ids, logits.sigmoid().gather(1, ids))
            weight_of.append(torch.where(tile.holds(), weight, 0.0))
        total = [torch.zeros(TILE, g.hidden) for _ in tiles]
        for expert in range(g.experts):
            users = [i for i, weight in enumerate(weight_of) if weight[:, expert].any()]
            if not users:
                continue
            up, down = self._weights.matrix("up", layer, expert), self._weights.matrix("down", layer, expert)
            for i in users:
                weight = weight_of[i][:, expert, None]
                total[i] = torch.where(weight > 0, total[i] + weight * self._swiglu(h[i], up, down), total[i])
        return total

    def _swiglu(self, h: _Normed, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = h.times(gate_up).chunk(2, dim=-1)
        return self.round(F.silu(gate) * up) @ down.T

    def _attend(self, q: Tensor, keys: Tensor, first_query: int, window: int | None) -> Tensor:
        """Causal attention of one tile, [64, q_width], over keys [2, kv_heads, n, d] that end with the tile's own.

        Keys that no row may see are zeros or belong to this chunk, never unused memory: their weight is exactly 0.
        """
        q_heads, _, d = q.shape
        kv_heads, n = keys.shape[1:3]
        position = torch.arange(first_query, first_query + TILE)[:, None]
        key = torch.arange(first_query + TILE - n, first_query + TILE)[None, :]
        visible = key <= position if window is None else (key <= position) & (key > position - window)
        scores = q.reshape(kv_heads, -1, d) @ keys[0].transpose(-1, -2) * d**-0.5
        scores = scores.view(kv_heads, -1, TILE, n).masked_fill(~visible, -torch.inf)
        p = self.round(torch.exp(scores - scores.amax(-1, keepdim=True)).view(kv_heads, -1, n))
        heads = (p @ keys[1]) / p.sum(-1, keepdim=True)
        return self.round(heads.view(q_heads, TILE, d).transpose(0, 1).reshape(TILE, q_heads * d))

    def _logits(self, x: Tensor) -> npt.NDArray[np.float32]:
        h = self._normed(x, self._weights.norm(self.geometry.layers))
        logits: npt.NDArray[np.float32] = (self._weights.head_product(h.x) * h.rstd * self.geometry.logit_scale).numpy()
        return logits


class _Unpacked:
    """float32 matrices of packed weights, [rows, k]: a small model's are all kept, a large one's made for each use."""

    def __init__(self, packed: PackedWeights) -> None:
        self.packed = packed
        self.nbytes = 2 * packed.layout.nbytes
        self._kept: dict[tuple[str, int | None, int], Tensor] = {}

    def matrix(self, name: str, layer: int | None, expert: int = 0) -> Tensor:
        key = (name, layer, expert)
        if key in self._kept:
            return self._kept[key]
        matrix = self.packed.matrix(name, layer, expert).float()
        if self.nbytes <= _CACHED:
            self._kept[key] = matrix
        return matrix

    def norm(self, layer: int) -> Tensor:
        return self.packed.norms[layer].float()

    def head_rows(self, tokens: Sequence[int]) -> Tensor:
        """Rows of the tied head, [tokens, hidden], without unpacking the rest of it."""
        entry = self.packed.layout.entry("head")
        slots = self.packed.slots[entry.first_slot : entry.first_slot + entry.slots]
        strip, row = torch.tensor(tokens) // ROWS, torch.tensor(tokens) % ROWS
        rows = slots.view(entry.strips, -1, ROWS, SUB_K)[strip, :, row].flatten(1)
        return rows[:, : self.packed.geometry.hidden].float()

    def head_product(self, h: Tensor) -> Tensor:
        """h [hidden] times the head, [vocab], some strips at a time."""
        entry, geometry = self.packed.layout.entry("head"), self.packed.geometry
        parts = []
        for strip in range(0, entry.strips, _HEAD_STRIPS):
            strips = min(_HEAD_STRIPS, entry.strips - strip)
            rows = self.packed.strip_rows(entry.first_slot + strip * entry.k_slots, strips, entry.k_slots)
            parts.append(torch.from_numpy(rows)[:, : geometry.hidden] @ h)
        return torch.cat(parts)[: geometry.vocab]


def _to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _exact(x: Tensor) -> Tensor:
    return x
