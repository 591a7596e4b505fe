"""How the K and V of a page lie on the card, in the packing of the weights, and their way to the interpreter's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mk.kv import KVCache, PageAllocator


def pack_keys(k: Tensor) -> Tensor:
    """K of whole pages [..., 64, 128] in the layout the ring streams: [..., keys/16, d/32, 16, 32], flat."""
    return k.unflatten(-1, (4, 32)).unflatten(-3, (4, 16)).transpose(-3, -2).flatten(-4)


def pack_values(v: Tensor) -> Tensor:
    """V of whole pages [..., 64, 128], transposed in the same packing: [..., d/16, keys/32, 16, 32], flat."""
    return v.transpose(-1, -2).unflatten(-1, (2, 32)).unflatten(-3, (8, 16)).transpose(-3, -2).flatten(-4)


def unpack_keys(packed: Tensor) -> Tensor:
    """The inverse of `pack_keys`: [..., 8192] to [..., 64, 128]."""
    return packed.unflatten(-1, (4, 4, 16, 32)).transpose(-3, -2).flatten(-2).flatten(-3, -2)


def unpack_values(packed: Tensor) -> Tensor:
    """The inverse of `pack_values`: [..., 8192] to [..., 64, 128]."""
    return packed.unflatten(-1, (8, 2, 16, 32)).transpose(-3, -2).flatten(-2).flatten(-3, -2).transpose(-1, -2)


def hand_over(pools: Mapping[str, Tensor], kv: KVCache, pages: PageAllocator, slot: int) -> None:
    """Copy a slot's pages, by kind [pages, layers, kv_heads, 2, block] as the kernel reads them and on any device, to
    the same pages of the interpreter's cache."""
    for kind, pool in pools.items():
        held = pages.table[kind][slot]
        held = held[held >= 0]
        packed = pool[torch.from_numpy(held).long()].float().cpu()
        kv.pools[kind][held, :, :, 0] = unpack_keys(packed[:, :, :, 0]).numpy()
        kv.pools[kind][held, :, :, 1] = unpack_values(packed[:, :, :, 1]).numpy()
