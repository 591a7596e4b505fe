"""Rotation of neighbouring dims, and the append of new keys (rotated) and values to their pages."""

from __future__ import annotations

import triton
import triton.language as tl

from prefill.kernels.pages import BLOCK, DIM, PAGE, key_offset, page_block, value_offset


@triton.jit
def rotate(x, cos, sin, position, keep, ROWS: tl.constexpr):
    """x [ROWS, 128] with its pairs (2i, 2i + 1) turned by their angle at the row's position, in x's dtype.

    cos, sin [positions, 64]; rows that are not kept are left out of the reading.
    """
    at = position[:, None] * (DIM // 2) + tl.arange(0, DIM // 2)[None, :]
    c = tl.load(cos + at, mask=keep[:, None], other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=keep[:, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [ROWS, DIM // 2, 2]))
    turned = tl.join(tl.fma(even, c, -(odd * s)), tl.fma(odd, c, even * s))
    return tl.reshape(turned, [ROWS, DIM]).to(x.dtype)


@triton.jit(do_not_specialize=["layer", "table_stride"])
def append_kernel(
    qkv,
    cos,
    sin,
    pool,
    table,
    tiles,
    layer,
    table_stride,
    ROPE: tl.constexpr,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    QKV_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The key and value heads of qkv [tokens, QKV_STRIDE] to the pages of a tile's tokens, which share one page.

    tiles and table as attention's. Tokens whose block has no page are dropped.
    """
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 4
    row0, count, slot, start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    page = tl.load(table + slot * table_stride + start // PAGE).to(tl.int32)
    if page < 0:
        return
    block = pool + page_block(page, layer, head, LAYERS, KV_HEADS)
    token = tl.arange(0, TOKENS)
    keep = token < count
    position = start + token
    d = tl.arange(0, DIM)
    source = qkv + (row0 + token).to(tl.int64)[:, None] * QKV_STRIDE + (Q_WIDTH + head * DIM + d)[None, :]
    k = tl.load(source, mask=keep[:, None], other=0.0)
    v = tl.load(source + KV_HEADS * DIM, mask=keep[:, None], other=0.0)
    if ROPE:
        k = rotate(k, cos, sin, position, keep, TOKENS)
    tl.store(block + key_offset(position[:, None], d[None, :]), k, mask=keep[:, None])
    # transposed, so that neighbouring threads store neighbouring keys
    tl.store(block + BLOCK + value_offset(position[None, :], d[:, None]), tl.trans(v), mask=keep[None, :])
