"""Prefill in Triton: prompts into the paged KV pools that the decode kernel reads, and the logits of their last tokens.

Prompts are packed into chunks; a chunk goes through all layers, some nine launches each. Every kernel computes a token
by itself, in an order that its own position gives, so its bits do not depend on chunks, on other prompts, or on pages.
The option products=torch gives that up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mk.errors import MkError
from mk.kv import KINDS, PageAllocator, kv_layers
from mk.model.geometry import Geometry
from mk.model.packing import PackedWeights
from mk.model.reference import rope_table
from prefill.chunks import Piece, Prompt, cut, token_tiles
from prefill.kernels import interpreted
from prefill.launch import Launcher
from prefill.tiles import HOPPER, INTERPRETED, Tiles

MAX_PAGES = 2**15  # page tables are int16 on the device


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk's tokens lie, on the device."""

    tiles: Tensor  # of `token_tiles`
    tables: Mapping[str, Tensor]  # kind -> int16 [slots, blocks]


class TritonPrefill:
    """One model's prefill into the pools of one KV cache.

    Pools are `[pages, layers of the kind, kv_heads, 2, 64 * 128]` in the layout of `mk.page_layout.pack_keys` and
    `pack_values`; their dtype is that of all activations, and float32 (under the interpreter) rounds nothing.
    """

    def __init__(
        self,
        weights: PackedWeights,
        pools: Mapping[str, Tensor],
        positions: int,
        chunk: int,
        products: str = "packed",
        tiles: Tiles | None = None,
    ) -> None:
        """positions: of the longest sequence. chunk: tokens a pass over the weights. products: packed, or torch.

        Raises MkError for pools of more pages than the kernels can name.
        """
        self.geometry: Geometry = weights.geometry
        self.pools = {kind: pools[kind] for kind in KINDS if kv_layers(self.geometry, kind)}
        for kind, pool in self.pools.items():
            if len(pool) > MAX_PAGES:
                raise MkError(
                    f"prefill=triton: {len(pool)} {kind} pages, it can name {MAX_PAGES}",
                    hint="a smaller KV cache, or prefill=torch",
                )
        self.device, self.chunk, self.positions = weights.slots.device, chunk, positions
        self._dtype = next(iter(self.pools.values())).dtype
        chosen = tiles or (INTERPRETED if interpreted() else HOPPER)
        self.launch = Launcher(weights, chunk, self._dtype, chosen, products)
        cos, sin = (t.to(self._dtype).to(self.device) for t in rope_table(self.geometry, torch.arange(positions)))
        self.rope = (cos.contiguous(), sin.contiguous())

    @property
    def bits_are_a_tokens_own(self) -> bool:
        """Whether none depends on what it is packed with."""
        return self.launch.products == "packed"

    def run(
        self, pages: PageAllocator, slot: int, tokens: Sequence[int], start: int = 0, every: bool = False
    ) -> np.ndarray:
        """One prompt; float32 [vocab], the logits after its last token, or [tokens, vocab] after `every` one."""
        logits = self.forward(pages, [Prompt(slot, tokens, start)], every=every).cpu().numpy()
        return logits if every else logits[0]

    def together(self, pages: PageAllocator, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Prompts of different slots, packed; float32 [vocab] each, the logits after its last token."""
        return list(self.forward(pages, prompts).cpu().numpy())

    @torch.no_grad()
    def forward(
        self,
        pages: PageAllocator,
        prompts: Sequence[Prompt],
        expert_ids: Tensor | None = None,
        taken: Tensor | None = None,
        every: bool = False,
    ) -> Tensor:
        """Prefill prompts of different slots; the logits after the last token of each, float32 [prompts, vocab].

        every: after each token instead, float32 [tokens of all prompts, vocab].

        Pages are reserved chunk by chunk and given back as they leave the window. Launches are queued on the current
        stream, nothing waits for them. expert_ids int32 [layers, tokens of all prompts, top_k] replaces the router's
        choice; `taken`, of that shape, gains it. Raises MkError for no tokens, a token outside the vocabulary,
        positions past the model's, two prompts of one slot, or too few pages.
        """
        self._check(prompts)
        wanted = sum(len(prompt.tokens) for prompt in prompts) if every else len(prompts)
        logits = torch.empty(wanted, self.geometry.vocab, dtype=torch.float32, device=self.device)
        done = 0
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            for pieces in cut(prompts, self.chunk):
                for piece in pieces:
                    pages.reserve(piece.slot, piece.hi, since=piece.lo)
                rows = slice(done, done + sum(piece.hi - piece.lo for piece in pieces))
                forced = None if expert_ids is None else expert_ids[:, rows].contiguous()
                self._chunk(pages, prompts, pieces, forced, None if taken is None else taken[:, rows])
                if every:
                    logits[rows] = self.launch.head(torch.arange(rows.stop - done, device=self.device))
                else:
                    self._close(pieces, logits)
                for piece in pieces:
                    pages.release_window(piece.slot, piece.hi)
                done = rows.stop
        return logits

    def _check(self, prompts: Sequence[Prompt]) -> None:
        g = self.geometry
        most = min(self.positions, g.max_positions)
        if len({prompt.slot for prompt in prompts}) != len(prompts):
            raise MkError("prefill: two prompts are for the same slot")
        for prompt in prompts:
            if not len(prompt.tokens):
                raise MkError("prefill: the prompt has no tokens")
            if min(prompt.tokens) < 0 or max(prompt.tokens) >= g.vocab:
                raise MkError(f"prefill: a token of the prompt is outside 0..{g.vocab - 1}")
            if prompt.end > most:
                raise MkError(f"prefill: the prompt needs {prompt.end} positions, there is room for {most}")

    def _chunk(
        self,
        pages: PageAllocator,
        prompts: Sequence[Prompt],
        pieces: list[Piece],
        forced: Tensor | None,
        taken: Tensor | None,
    ) -> None:
        """All layers over one chunk, whose pages are there."""
        parts = [
            prompts[p.prompt].tokens[p.lo - prompts[p.prompt].start : p.hi - prompts[p.prompt].start] for p in pieces
        ]
        ids = self._put(np.concatenate([np.asarray(part, np.int32) for part in parts]))
        where = self.place(pages, pieces)
        self.launch.embed(ids)
        for layer in range(self.geometry.layers):
            self.attention(layer, where)
            chosen = self.ffn(layer, None if forced is None else forced[layer])
            if taken is not None and chosen is not None:
                taken[layer] = chosen
            self.launch.residual(layer)

    # ---- one layer of a chunk: `launch.embed` or `launch.enter` before, `launch.residual` after ----

    def place(self, pages: PageAllocator, pieces: Sequence[Piece]) -> Place:
        """Where the chunk's tokens lie; their pages are reserved."""
        tiles = self._put(token_tiles(pieces, self.launch.tiles.attention.tokens))
        return Place(tiles, {kind: self._put(pages.table[kind].astype(np.int16)) for kind in self.pools})

    def attention(self, layer: int, where: Place) -> None:
        """Up to `launch.acts.attention`; the tokens' K and V go to their pages."""
        self.launch.qkv(layer)
        self.attend(layer, where)
        self.launch.o(layer)

    def attend(self, layer: int, where: Place) -> None:
        """From `launch.acts.qkv` through the pages to `launch.acts.heads`."""
        kind = self.geometry.layer_kinds[layer]
        pool, table = self.pools[kind], where.tables[kind]
        self.launch.append(layer, self.rope, pool, table, where.tiles)
        self.launch.attention(layer, self.rope, pool, table, where.tiles)

    def ffn(self, layer: int, forced: Tensor | None) -> Tensor | None:
        """Up to `launch.acts.ffn`; the expert ids int32 [tokens, top_k] of a sparse layer, `forced` or the router's."""
        if self.geometry.mlp_kinds[layer] == "dense":
            self.launch.dense(layer)
            return None
        chosen = self.launch.route(layer, forced)
        self.launch.up(layer)
        self.launch.down(layer)
        return chosen

    def _close(self, pieces: list[Piece], logits: Tensor) -> None:
        """The logits of the prompts that end in the chunk."""
        ends = np.cumsum([piece.hi - piece.lo for piece in pieces]) - 1
        closing = [i for i, piece in enumerate(pieces) if piece.last]
        if closing:
            rows = self._put(ends[closing].astype(np.int64))
            logits[[pieces[i].prompt for i in closing]] = self.launch.head(rows)

    def _put(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)
