"""How the K and V of a page lie on the card: as the ring streams them, in the packing of the weights."""

from __future__ import annotations

import torch


def pack_keys(k: torch.Tensor) -> torch.Tensor:
    """K of whole pages [..., 64, 128] in the layout the ring streams: [..., keys/16, d/32, 16, 32], flat."""
    return k.unflatten(-1, (4, 32)).unflatten(-3, (4, 16)).transpose(-3, -2).flatten(-4)


def pack_values(v: torch.Tensor) -> torch.Tensor:
    """V of whole pages [..., 64, 128], transposed in the same packing: [..., d/16, keys/32, 16, 32], flat."""
    return v.transpose(-1, -2).unflatten(-1, (2, 32)).unflatten(-3, (8, 16)).transpose(-3, -2).flatten(-4)


def unpack_keys(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_keys`: [..., 8192] to [..., 64, 128]."""
    return packed.unflatten(-1, (4, 4, 16, 32)).transpose(-3, -2).flatten(-2).flatten(-3, -2)


def unpack_values(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_values`: [..., 8192] to [..., 64, 128]."""
    return packed.unflatten(-1, (8, 2, 16, 32)).transpose(-3, -2).flatten(-2).flatten(-3, -2).transpose(-1, -2)
