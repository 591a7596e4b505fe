"""Pools in the decode kernel's layout, on any device, and what lies in them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from mk.kv import KINDS, PAGE, PageAllocator, blocks_of, first_visible, kv_layers
from mk.model.geometry import Geometry
from mk.model.packing import PackedWeights
from mk.runtime import unpack_keys, unpack_values
from mk.step_params import KV_BLOCK
from prefill.activations import Activations
from prefill.kernels import interpreted
from prefill.tiles import Tiles
from prefill.triton_prefill import TritonPrefill

needs_interpreter = pytest.mark.skipif(
    not interpreted(), reason="Triton is set to compile for the GPU here; TRITON_INTERPRET=1 runs its interpreter"
)
needs_compiler = pytest.mark.skipif(interpreted(), reason="Triton is set to interpret here")


def make_pools(
    geometry: Geometry, pages: Mapping[str, int], dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Tensor]:
    """Pages full of NaN."""
    return {
        kind: torch.full(
            (pages[kind], max(1, len(kv_layers(geometry, kind))), geometry.kv_heads, 2, KV_BLOCK),
            torch.nan,
            dtype=dtype,
            device=device,
        )
        for kind in KINDS
    }


def poison(acts: Activations, g: Geometry) -> None:
    """NaN everywhere but in padding: what a kernel reads it must have been given."""
    for buffer, width in (
        (acts.x, g.hidden),
        (acts.normed, g.hidden),
        (acts.qkv, g.qkv_rows),
        (acts.heads, g.q_width),
        (acts.attention, g.hidden),
        (acts.dense_hidden, g.dense_ffn),
        (acts.expert_hidden, g.expert_ffn),
        (acts.ffn, g.hidden),
        (acts.expert_weights, g.top_k),
        (acts.weight_of, g.top_k),
    ):
        buffer[:, :width] = torch.nan


class Rig:
    """A prefill with its pools and an allocator that hands out pages in a random order."""

    def __init__(
        self,
        weights: PackedWeights,
        pages: int | Mapping[str, int],
        positions: int,
        slots: int = 1,
        chunk: int = 512,
        dtype: torch.dtype = torch.float32,
        page_seed: int = 0,
        products: str = "packed",
        tiles: Tiles | None = None,
    ) -> None:
        self.geometry = weights.geometry
        counts = dict.fromkeys(KINDS, pages) if isinstance(pages, int) else pages
        self.pools = make_pools(self.geometry, counts, dtype, str(weights.slots.device))
        self.pages = PageAllocator(self.geometry, counts, slots, blocks_of(positions), page_seed)
        self.prefill = TritonPrefill(weights, self.pools, positions, chunk, products, tiles)

    def visible(self, slot: int, keys: int) -> list[tuple[Tensor, Tensor]]:
        """K and V [kv_heads, n, d] of every layer, of the keys that the token after `keys` of them sees."""
        found = []
        for layer, kind in enumerate(self.geometry.layer_kinds):
            lo = first_visible(keys + 1, self.geometry.window_keys if kind == "sliding" else None)
            first = lo // PAGE
            table = self.pages.table[kind][slot, first : blocks_of(keys)]
            assert (table >= 0).all()
            index = kv_layers(self.geometry, kind).index(layer)
            packed = self.pools[kind][torch.from_numpy(table).long(), index].transpose(0, 1)  # [heads, pages, 2, block]
            rows = slice(lo - first * PAGE, keys - first * PAGE)
            found.append(
                (
                    unpack_keys(packed[:, :, 0]).flatten(1, 2)[:, rows],
                    unpack_values(packed[:, :, 1]).flatten(1, 2)[:, rows],
                )
            )
        return found
