"""The router, its top-k, and the stable order of (token, choice) pairs by expert. No atomics: everything is counted.

A block of TOKENS tokens counts its choices of each expert; then every block finds where its pairs go from the counts of
the blocks before it. An expert's rows stand in the order of their tokens, the experts in the order of their ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefill.kernels.tile import packed_rows, tile_product

_TAKEN: tl.constexpr = tl.constexpr(-(2**31))  # below the key of every number


@triton.jit
def _ordered(logit):
    """int32 keys in the order of the floats; NaN below everything else."""
    bits = logit.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(logit == logit, key, _TAKEN + 1)


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    normed,
    w,
    forced,
    ids,
    weights,
    counts,
    tokens,
    N: tl.constexpr,
    LANES: tl.constexpr,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    FORCED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    """ids int32 and weights float32 [tokens, TOP_K], by falling logit, of equal ones the lower id first.

    weights: sigmoid of the chosen logits, not renormalised. counts int32 [blocks, LANES]: choices of each expert in a
    block. FORCED: `forced` int32 [tokens, TOP_K], distinct in a row, takes the place of the choice.
    """
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    exists = token < tokens
    expert = tl.arange(0, LANES)
    x_rows = normed + tl.minimum(token, tokens - 1).to(tl.int64) * K
    logit = tile_product(
        x_rows, packed_rows(w, tl.minimum(expert, N - 1), K), K, TOKENS, LANES, BLOCK_K, STAGES, FLOAT32
    )
    key = _ordered(logit)
    key = tl.where((expert < N)[None, :], key, _TAKEN)
    chosen = tl.zeros([TOKENS, LANES], tl.int32)
    for i in tl.static_range(TOP_K):
        if FORCED:
            best = tl.load(forced + token * TOP_K + i, mask=exists, other=0)
        else:
            best = tl.min(tl.where(key == tl.max(key, 1)[:, None], expert[None, :], LANES), 1)
        here = expert[None, :] == best[:, None]
        weight = 1.0 / (1.0 + tl.exp(-tl.sum(tl.where(here, logit, 0.0), 1)))
        key = tl.where(here, _TAKEN, key)
        chosen = tl.where(here, 1, chosen)
        tl.store(ids + token * TOP_K + i, best, mask=exists)
        tl.store(weights + token * TOP_K + i, weight, mask=exists)
    count = tl.sum(tl.where(exists[:, None], chosen, 0), 0)
    tl.store(counts + block * LANES + expert, count)


@triton.jit
def _list_tiles(
    tiles, n_tiles, total, start, most_tiles, LANES: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_M: tl.constexpr
):
    """This program's share of the row tiles of experts with `total` rows from `start` on, each [LANES]."""
    expert = tl.arange(0, LANES)
    count = (total + BLOCK_M - 1) // BLOCK_M
    tile_end = tl.cumsum(count, 0)
    if tl.program_id(0) == 0:
        tl.store(n_tiles, tl.sum(count, 0))
    for first in tl.range(tl.program_id(0) * ENTRIES, most_tiles, tl.num_programs(0) * ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        owner = tl.sum((tile_end[None, :] <= entry[:, None]).to(tl.int32), 1)  # LANES past the last tile
        here = expert[None, :] == owner[:, None]
        row = tl.sum(tl.where(here, (start - (tile_end - count) * BLOCK_M)[None, :], 0), 1) + entry * BLOCK_M
        end = tl.sum(tl.where(here, (start + total)[None, :], 0), 1)
        at = tiles + entry * 4
        tl.store(at, owner, mask=owner < LANES)
        tl.store(at + 1, row, mask=owner < LANES)
        tl.store(at + 2, tl.minimum(end, row + BLOCK_M), mask=owner < LANES)


@triton.jit(do_not_specialize=["tokens", "blocks", "most_tiles"])
def sort_kernel(
    ids,
    weights,
    counts,
    token_of,
    slot_of,
    weight_of,
    tiles,
    n_tiles,
    tokens,
    blocks,
    most_tiles,
    LANES: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Where every pair goes, and the row tiles of the products over experts.

    token_of int32 [tokens * TOP_K]: token of a sorted row. slot_of int32, weight_of float32 [tokens, TOP_K]: a token's
    rows and weights by rising expert id. tiles int32 [most_tiles, 4]: (expert, first row, end row, 0) of tiles of
    BLOCK_M rows, n_tiles int32 [1] of them. Of `counts`, BLOCKS blocks are read at a time.
    """
    block = tl.program_id(0)
    expert = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.int32)
    before = tl.zeros([LANES], tl.int32)  # of each expert, in earlier blocks
    for first in tl.range(0, blocks, BLOCKS):
        other = first + tl.arange(0, BLOCKS)
        count = tl.load(counts + other[:, None] * LANES + expert[None, :], mask=(other < blocks)[:, None], other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((other < block)[:, None], count, 0), 0)
    start = tl.cumsum(total, 0) - total

    token = block * TOKENS + tl.arange(0, TOKENS)
    exists = token < tokens
    chosen = tl.zeros([TOKENS, LANES], tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.load(ids + token * TOP_K + i, mask=exists, other=-1)
        chosen = tl.where(expert[None, :] == best[:, None], 1, chosen)
    # where a pair goes: its sorted row, and below that its rank among its token's experts
    place = ((start + before)[None, :] + tl.cumsum(chosen, 0) - chosen) * 16 + tl.cumsum(chosen, 1) - chosen
    for i in tl.static_range(TOP_K):
        best = tl.load(ids + token * TOP_K + i, mask=exists, other=-1)
        found = tl.sum(tl.where(expert[None, :] == best[:, None], place, 0), 1)
        at = token * TOP_K + found % 16
        tl.store(token_of + found // 16, token, mask=exists)
        tl.store(slot_of + at, found // 16, mask=exists)
        tl.store(weight_of + at, tl.load(weights + token * TOP_K + i, mask=exists, other=0.0), mask=exists)
    _list_tiles(tiles, n_tiles, total, start, most_tiles, LANES, ENTRIES, BLOCK_M)
