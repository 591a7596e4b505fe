"""A prefill in Triton with pages of its own, on any device, made so that what it must not read shows: everything is NaN
before, and pages are handed out in a random order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from mk.config import Config
from mk.device import DeviceFacts
from mk.errors import MkError
from mk.kernel.step_params import KV_BLOCK
from mk.kv import KINDS, PAGE, PageAllocator, blocks_of, first_visible, kv_layers, pages_for_contexts
from mk.model.geometry import Geometry
from mk.model.opening import geometry_of
from mk.model.packing import PackedWeights
from mk.model.tensors import parameter_count
from mk.page_layout import unpack_keys, unpack_values
from prefill.activations import Activations
from prefill.interpreted import require_interpreter
from prefill.tiles import Tiles
from prefill.triton_prefill import TritonPrefill

MOST_INTERPRETED = 50e6  # parameters of a model whose prefill Triton's interpreter ends in minutes


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


def device_of(cfg: Config) -> torch.device:
    """Where prefill runs that is timed: on the card that `gpu` names, or of gpu=cpu in Triton's interpreter.

    Raises MkError for a card that is not here, or is another one, and for a model that is too much for the interpreter.
    """
    hint = "gpu=cpu model=nano weights=checkpoint, and small sizes, for Triton's interpreter"
    if cfg.gpu.kind == "cpu":
        require_interpreter()
        size = parameter_count(geometry_of(cfg.model))
        if size > MOST_INTERPRETED:
            what = f"{cfg.experiment.name} on gpu=cpu: model={cfg.model.name} has {size / 1e6:,.0f} M parameters"
            raise MkError(f"{what}, in Triton's interpreter a day's work", hint=hint)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MkError(f"{cfg.experiment.name} on gpu={cfg.gpu.name} needs a GPU, and torch sees none here", hint=hint)
    DeviceFacts.read().require(cfg.gpu)
    return torch.device("cuda")


def engine_on(device: torch.device) -> str:
    """A row's `engine`."""
    return "cuda" if device.type == "cuda" else "interpreter"


class Rig:
    """A prefill with its pools and the allocator of their pages."""

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
        pools: Mapping[str, Tensor] | None = None,
    ) -> None:
        """pages: of each pool. positions: of the longest sequence. dtype: of pages and activations. pools: someone
        else's, of as many pages."""
        self.geometry = weights.geometry
        counts = dict.fromkeys(KINDS, pages) if isinstance(pages, int) else pages
        self.pools = pools or make_pools(self.geometry, counts, dtype, str(weights.slots.device))
        self.pages = PageAllocator(self.geometry, counts, slots, blocks_of(positions), page_seed)
        self.prefill = TritonPrefill(weights, self.pools, positions, chunk, products, tiles)

    @classmethod
    def for_prompts(
        cls,
        weights: PackedWeights,
        slots: int,
        positions: int,
        chunk: int,
        page_seed: int = 0,
        products: str = "packed",
        tiles: Tiles | None = None,
    ) -> Self:
        """bfloat16, with as many pages as prompts of `positions` tokens need in such chunks."""
        chunk = min(chunk, slots * positions)
        counts = pages_for_contexts(weights.geometry, slots, positions, chunk, paged_chunk=True)
        return cls(weights, counts, positions, slots, chunk, torch.bfloat16, page_seed, products, tiles)

    def visible(self, slot: int, keys: int) -> list[tuple[Tensor, Tensor]]:
        """K and V [kv_heads, n, d] of every layer, of the keys that the token after `keys` of them sees."""
        found = []
        for layer, kind in enumerate(self.geometry.layer_kinds):
            first = first_visible(keys + 1, self.geometry.window_keys if kind == "sliding" else None)
            found.append(self.held(slot, layer, first, keys))
        return found

    def held(self, slot: int, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """K and V [kv_heads, n, d] of one layer, of the keys first .. end - 1, which have pages."""
        kind, block = self.geometry.layer_kinds[layer], first // PAGE
        table = self.pages.table[kind][slot, block : blocks_of(end)]
        assert (table >= 0).all()
        pool = self.prefill.pools[kind]
        index = kv_layers(self.geometry, kind).index(layer)
        numbers = torch.from_numpy(table).long().to(pool.device)
        packed = pool[numbers, index].transpose(0, 1)  # [heads, pages, 2, block]
        rows = slice(first - block * PAGE, end - block * PAGE)
        k, v = unpack_keys(packed[:, :, 0]), unpack_values(packed[:, :, 1])
        return k.flatten(1, 2)[:, rows], v.flatten(1, 2)[:, rows]

    def clear_pages(self) -> None:
        """NaN in every page, as at first."""
        for pool in self.prefill.pools.values():
            pool.fill_(torch.nan)


def same_pages(a: Sequence[tuple[Tensor, Tensor]], b: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """The same bits in every K and V of two bfloat16 `Rig.visible`."""
    pairs = ((x.contiguous(), y.contiguous()) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in pairs)
