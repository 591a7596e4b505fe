"""Causal attention over the paged cache, a tile of neighbouring tokens of one sequence and one KV head at a time.

All query heads of the KV head are rows of the tile, so that a page is read once for them. Keys come in blocks at
absolute positions, the softmax runs over them in that order, and a block that a row does not see leaves the row as it
is: so a token's bits depend neither on its tile nor on how its prompt was cut. Multiply-adds are spelled out, lest two
loops round differently.

Page tables are int16: Triton's pipeline leaves loads of less than four bytes alone, and copies pages some blocks ahead.
A wider entry would itself be copied asynchronously, and every block would wait for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefill.kernels.pages import BLOCK, DIM, PAGE, key_offset, page_block, value_offset
from prefill.kernels.rope import rotate

_SCALE: tl.constexpr = tl.constexpr(128**-0.5 * 1.4426950408889634)  # and log2(e): exponents are powers of two


@triton.jit
def _pages(blocks, start, first, end, KEYS: tl.constexpr):
    """Page of the key block at `start`, one for each key if it has several; 0 where a page holds none of the keys."""
    if KEYS == PAGE:
        page = tl.load(blocks + start // PAGE)
    else:
        number = start // PAGE + tl.arange(0, KEYS) // PAGE
        seen = (number * PAGE + PAGE > first) & (number * PAGE < end)
        page = tl.max_constancy(tl.load(blocks + number, mask=seen, other=0), PAGE)
    return tl.maximum(page.to(tl.int32), 0)


@triton.jit
def _blocks(
    acc,
    total,
    most,
    query,
    position,
    pool,
    blocks,
    layer,
    head,
    lo,
    hi,
    first,
    end,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    """Key blocks lo, lo + KEYS, .. below hi; (acc, total, most) are a row's sum of P V, of P, and its largest score.

    MASKED: rows see different parts of the blocks. Keys outside [first, end), whose memory may be unused, free or
    another sequence's, are dropped by select.
    """
    key = tl.arange(0, KEYS)
    d = tl.arange(0, DIM)
    k_at = key_offset(key[None, :], d[:, None])
    v_at = BLOCK + value_offset(key[:, None], d[None, :])
    for start in tl.range(lo, hi, KEYS, num_stages=1 if MASKED else STAGES):
        page = _pages(blocks, start, first, end, KEYS)
        block = pool + page_block(page, layer, head, LAYERS, KV_HEADS)
        if KEYS == PAGE:
            k = tl.load(block + k_at)
            v = tl.load(block + v_at)
        else:
            k = tl.load(block[None, :] + k_at)
            v = tl.load(block[:, None] + v_at)
        if MASKED:
            inside = (start + key >= first) & (start + key < end)
            v = tl.where(inside[:, None], v, 0.0)
        if FLOAT32:
            score = tl.dot(query.to(tl.float32), k.to(tl.float32))
        else:
            score = tl.dot(query, k)
        if MASKED:
            visible = (start + key)[None, :] <= position[:, None]
            if WINDOW:
                visible = visible & ((start + key)[None, :] > position[:, None] - WINDOW)
            score = tl.where(visible, score, float("-inf"))
        new = tl.maximum(most, tl.max(score, 1) * _SCALE)
        base = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
        p = tl.exp2(tl.fma(score, _SCALE, -base[:, None]))
        shrink = tl.exp2(most - base)
        total = tl.fma(total, shrink, tl.sum(p, 1))
        acc = acc * shrink[:, None]
        if FLOAT32:
            acc = tl.dot(p.to(query.dtype).to(tl.float32), v.to(tl.float32), acc)
        else:
            acc = tl.dot(p.to(query.dtype), v, acc)
        most = new
    return acc, total, most


@triton.jit(do_not_specialize=["layer", "table_stride"])
def attention_kernel(
    qkv,
    out,
    cos,
    sin,
    pool,
    table,
    tiles,
    layer,
    table_stride,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    QKV_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    """out [tokens, OUT_STRIDE] from the query heads of qkv [tokens, QKV_STRIDE], rotated here where the layer rotates.

    tiles int32 [tiles, 4]: (first token, tokens <= TOKENS, slot, first position); the K and V of all their tokens are
    in their pages. table int16 [slots, table_stride]. layer: index among the LAYERS of the kind. WINDOW: keys a row
    sees with its own, 0 = all. GROUP: query heads a KV head, GROUP_PAD: that as a power of two.
    """
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 4
    row0, count, slot, start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    lane = tl.arange(0, TOKENS * GROUP_PAD)
    token = lane // GROUP_PAD
    keep = (token < count) & (lane % GROUP_PAD < GROUP)
    position = start + token
    q_head = head * GROUP + lane % GROUP_PAD
    row = (row0 + token).to(tl.int64)
    d = tl.arange(0, DIM)
    query = tl.load(qkv + (row * QKV_STRIDE + q_head * DIM)[:, None] + d[None, :], mask=keep[:, None], other=0.0)
    if ROPE:
        query = rotate(query, cos, sin, position, keep, TOKENS * GROUP_PAD)

    end = start + count  # of the keys that the last token sees
    hi = tl.cdiv(end, KEYS) * KEYS
    first, all_see = 0, 0  # the first key that the first, the last token sees
    if WINDOW:
        first = tl.maximum(start - WINDOW + 1, 0)
        all_see = tl.maximum(end - WINDOW, 0)
    lo = first // KEYS * KEYS
    inner_lo = tl.minimum(tl.cdiv(all_see, KEYS) * KEYS, hi)  # blocks from here to inner_hi are seen whole, by all rows
    inner_hi = tl.maximum((start + 1) // KEYS * KEYS, inner_lo)
    blocks = table + slot * table_stride
    acc = tl.zeros([TOKENS * GROUP_PAD, DIM], tl.float32)
    total = tl.zeros([TOKENS * GROUP_PAD], tl.float32)
    most = tl.full([TOKENS * GROUP_PAD], float("-inf"), tl.float32)
    if WINDOW:
        acc, total, most = _blocks(
            acc, total, most, query, position, pool, blocks, layer, head, lo, inner_lo, first, end,
            True, WINDOW, LAYERS, KV_HEADS, KEYS, STAGES, FLOAT32,
        )  # fmt: skip
    acc, total, most = _blocks(
        acc, total, most, query, position, pool, blocks, layer, head, inner_lo, inner_hi, first, end,
        False, WINDOW, LAYERS, KV_HEADS, KEYS, STAGES, FLOAT32,
    )  # fmt: skip
    acc, total, most = _blocks(
        acc, total, most, query, position, pool, blocks, layer, head, inner_hi, hi, first, end,
        True, WINDOW, LAYERS, KV_HEADS, KEYS, STAGES, FLOAT32,
    )  # fmt: skip
    result = acc / tl.where(keep, total, 1.0)[:, None]
    out_at = (row * OUT_STRIDE + q_head * DIM)[:, None] + d[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=keep[:, None])
