"""Addresses inside the KV pools: `[page][layer of the kind][kv head][K, V]` blocks of 64 keys x 128 dims.

A K block is `[keys/16][d/32][16][32]`, a V block, transposed, `[d/16][keys/32][16][32]`: the layout that the decode
step streams (mk/csrc/ops/qkv.cuh).
"""

from __future__ import annotations

import triton
import triton.language as tl

PAGE: tl.constexpr = tl.constexpr(64)
DIM: tl.constexpr = tl.constexpr(128)
BLOCK: tl.constexpr = tl.constexpr(64 * 128)


@triton.jit
def page_block(page, layer, head, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr):
    """Element offset, int64, of a page's K block; its V block follows."""
    return ((page.to(tl.int64) * LAYERS + layer) * KV_HEADS + head) * (2 * BLOCK)


@triton.jit
def key_offset(key, d):
    """Of dim d of a key in its page's K block; runs of 32 dims lie together."""
    key = key % PAGE
    return (key // 16 * 4 + d // 32) * 512 + key % 16 * 32 + d % 32


@triton.jit
def value_offset(key, d):
    """Of dim d of a key in its page's V block; runs of 32 keys lie together."""
    key = key % PAGE
    return (d // 16 * 2 + key // 32) * 512 + d % 16 * 32 + key % 32
