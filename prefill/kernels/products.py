"""Products with packed matrices: a plain one, the pair gate/up with SiLU, and both again over sorted experts' rows.

Experts: `tiles` int32 [tiles, 4] lists (expert, first row, end row, 0) of tiles of BLOCK_M sorted rows, each expert's
last one cut short, and `n_tiles` says how many there are; a grid may be larger. Without experts, row tiles follow each
other up to `rows`. A tile of at most TAIL rows (0 = off) is multiplied as one of that height. Rows at or past a tile's
end are no one's: their loads repeat its last row, and nothing is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefill.kernels.tile import gate_up_row, grouped_tile, packed_k, packed_rows, qkv_row, tile_product


@triton.jit
def _row_tile(m, tiles, rows, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first row, end) of a row tile."""
    if EXPERTS:
        expert = tl.load(tiles + m * 4)
        first = tl.load(tiles + m * 4 + 1)
        end = tl.load(tiles + m * 4 + 2)
    else:
        expert = 0
        first = m * BLOCK_M
        end = tl.minimum(rows, first + BLOCK_M)
    return expert, first, end


@triton.jit
def _product_tile(
    x,
    w,
    out,
    first,
    end,
    n,
    OUT_STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROTATED: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    row = first + tl.arange(0, BLOCK_M)
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + tl.minimum(row, end - 1).to(tl.int64) * K
    w_row = tl.minimum(column, N - 1)
    if ROTATED:
        w_row = qkv_row(w_row, ROTATED)
    acc = tile_product(x_rows, packed_rows(w, w_row, K), K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FLOAT32)
    if SCALE != 1.0:
        acc *= SCALE
    out_ptrs = out + row.to(tl.int64)[:, None] * OUT_STRIDE + column[None, :]
    keep = row[:, None] < end
    if N % BLOCK_N != 0:
        keep = keep & (column[None, :] < N)
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x,
    w,
    out,
    tiles,
    n_tiles,
    rows,
    OUT_STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROTATED: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TAIL: tl.constexpr,
    STAGES: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    """out [rows, OUT_STRIDE >= N] = x [rows, K] times the (expert's) packed matrix, transposed, times SCALE.

    ROTATED: so many rows of the matrix, from the first, are packed as heads that rotate.
    """
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = tl.load(n_tiles) if EXPERTS else tl.cdiv(rows, BLOCK_M)
    pid = tl.program_id(0)
    if pid >= tiles_m * TILES_N:
        return
    m, n = grouped_tile(pid, tiles_m, TILES_N, GROUP_M)
    expert, first, end = _row_tile(m, tiles, rows, EXPERTS, BLOCK_M)
    if EXPERTS:
        w += expert.to(tl.int64) * EXPERT_STRIDE
    if TAIL and end - first <= TAIL:
        _product_tile(
            x, w, out, first, end, n, OUT_STRIDE, N, K, ROTATED, SCALE, TAIL, BLOCK_N, BLOCK_K, STAGES, FLOAT32
        )
    else:
        _product_tile(
            x, w, out, first, end, n, OUT_STRIDE, N, K, ROTATED, SCALE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FLOAT32
        )


@triton.jit
def _up_tile(
    x,
    w,
    out,
    token_of,
    first,
    end,
    n,
    EXPERTS: tl.constexpr,
    FFN: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    row = first + tl.arange(0, BLOCK_M)
    token = tl.minimum(row, end - 1)
    if EXPERTS:
        token = tl.load(token_of + token)
    column = tl.minimum(n * BLOCK_N + tl.arange(0, BLOCK_N), 2 * FFN - 1)
    x_rows = x + token.to(tl.int64) * K
    w_rows = packed_rows(w, gate_up_row(column), K)
    acc = tile_product(x_rows, w_rows, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FLOAT32)
    gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    feature = n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    keep = row[:, None] < end
    if 2 * FFN % BLOCK_N != 0:
        keep = keep & (feature[None, :] < FFN)
    out_ptrs = out + row.to(tl.int64)[:, None] * OUT_STRIDE + feature[None, :]
    tl.store(out_ptrs, hidden.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["rows"])
def up_kernel(
    x,
    w,
    out,
    tiles,
    n_tiles,
    token_of,
    rows,
    EXPERTS: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    FFN: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TAIL: tl.constexpr,
    STAGES: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    """out [rows, OUT_STRIDE >= FFN] = silu(x gate^T) * (x up^T); x [tokens, K] is read through `token_of`.

    A tile's columns alternate between gate and up, so that a pair stays in one thread.
    """
    TILES_N: tl.constexpr = (2 * FFN + BLOCK_N - 1) // BLOCK_N
    tiles_m = tl.load(n_tiles) if EXPERTS else tl.cdiv(rows, BLOCK_M)
    pid = tl.program_id(0)
    if pid >= tiles_m * TILES_N:
        return
    m, n = grouped_tile(pid, tiles_m, TILES_N, GROUP_M)
    expert, first, end = _row_tile(m, tiles, rows, EXPERTS, BLOCK_M)
    if EXPERTS:
        w += expert.to(tl.int64) * EXPERT_STRIDE
    if TAIL and end - first <= TAIL:
        _up_tile(
            x, w, out, token_of, first, end, n, EXPERTS, FFN, OUT_STRIDE, K, TAIL, BLOCK_N, BLOCK_K, STAGES, FLOAT32
        )
    else:
        _up_tile(
            x, w, out, token_of, first, end, n, EXPERTS, FFN, OUT_STRIDE, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FLOAT32
        )


@triton.jit
def unpack_kernel(
    w,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    ROTATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [N, K] = a packed matrix in its source's row order, for a product by another library."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = qkv_row(n, ROTATED) if ROTATED else n
    keep = (n < N)[:, None]
    value = tl.load(packed_rows(w, row, K)[:, None] + packed_k(k)[None, :], mask=keep)
    tl.store(out + n[:, None] * K + k[None, :], value, mask=keep)
