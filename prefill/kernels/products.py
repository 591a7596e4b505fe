"""The product with a packed matrix: plain or gated (gate/up with SiLU), of one matrix or of sorted experts' rows.

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
def _tile(
    x,
    w,
    out,
    token_of,
    first,
    end,
    n,
    OUT_STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    GATHERED: tl.constexpr,
    ROTATED: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    """Rows first .. end - 1, at most BLOCK_M of them, by the columns of tile n."""
    row = first + tl.arange(0, BLOCK_M)
    source = tl.minimum(row, end - 1)
    if GATHERED:
        source = tl.load(token_of + source)
    w_row = tl.minimum(n * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    if GATED:
        w_row = gate_up_row(w_row)
    elif ROTATED:
        w_row = qkv_row(w_row, ROTATED)
    acc = tile_product(
        x + source.to(tl.int64) * K, packed_rows(w, w_row, K), K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FLOAT32
    )
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
        acc = gate / (1.0 + tl.exp(-gate)) * up
    elif SCALE != 1.0:
        acc *= SCALE
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    COLUMNS: tl.constexpr = N // 2 if GATED else N
    column = n * WIDTH + tl.arange(0, WIDTH)
    keep = row[:, None] < end
    if COLUMNS % WIDTH != 0:
        keep = keep & (column[None, :] < COLUMNS)
    out_ptrs = out + row.to(tl.int64)[:, None] * OUT_STRIDE + column[None, :]
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x,
    w,
    out,
    tiles,
    n_tiles,
    token_of,
    rows,
    OUT_STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    GATHERED: tl.constexpr,
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
    """out [rows, OUT_STRIDE >= N] = x [rows, K] times the (expert's) packed matrix [N, K], transposed, times SCALE.

    GATED: out [rows, OUT_STRIDE >= N / 2] = silu(x gate^T) * (x up^T) instead, of a matrix that packs N / 2 rows of
    each. A tile's columns alternate between gate and up, so that a pair stays in one thread. GATHERED: row r of x is
    token_of[r]. ROTATED: so many rows of the matrix, from the first, are packed as heads that rotate.
    """
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = tl.load(n_tiles) if EXPERTS else tl.cdiv(rows, BLOCK_M)
    pid = tl.program_id(0)
    if pid >= tiles_m * TILES_N:
        return
    m, n = grouped_tile(pid, tiles_m, TILES_N, GROUP_M)
    if EXPERTS:
        expert = tl.load(tiles + m * 4)
        first = tl.load(tiles + m * 4 + 1)
        end = tl.load(tiles + m * 4 + 2)
        w += expert.to(tl.int64) * EXPERT_STRIDE
    else:
        first = m * BLOCK_M
        end = tl.minimum(rows, first + BLOCK_M)
    if TAIL and end - first <= TAIL:
        _tile(
            x, w, out, token_of, first, end, n,
            OUT_STRIDE, N, K, GATED, GATHERED, ROTATED, SCALE, TAIL, BLOCK_N, BLOCK_K, STAGES, FLOAT32,
        )  # fmt: skip
    else:
        _tile(
            x, w, out, token_of, first, end, n,
            OUT_STRIDE, N, K, GATED, GATHERED, ROTATED, SCALE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FLOAT32,
        )  # fmt: skip


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
