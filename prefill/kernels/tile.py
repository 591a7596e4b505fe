"""What the matrix kernels share: addresses inside the weight packing, and the product of one tile.

A tile multiplies rows of activations [rows, k] with rows of a packed matrix `[rows/16, k/32, 16, 32]`. In the packing
32 neighbouring k of a row lie together (64 bytes), so loads are 16-byte copies whichever rows a tile asks for, in
whatever order: undoing the packing's row orders is free.

An output element is a sum over k in rising steps of 16 in float32, whatever the tile's size and whichever row of the
tile it is: that, and the same for every other kernel here, makes a token's bits independent of what it is packed with.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def packed_rows(w, row, PAD_K: tl.constexpr):
    """Pointers to k = 0 of packed rows."""
    return w + (row // 16) * (PAD_K * 16) + row % 16 * 32


@triton.jit
def packed_k(k):
    """Element offset of k from k = 0 of the same row."""
    return k // 32 * 512 + k % 32


@triton.jit
def qkv_row(n, ROTATED: tl.constexpr):
    """Packed row of a logical row of the fused projection: of a strip's 16 the even dims come first, up to V."""
    paired = n // 16 * 16 + n % 2 * 8 + n % 16 // 2
    return tl.where(n < ROTATED, paired, n)


@triton.jit
def gate_up_row(n):
    """Packed row of gate n/2 (even n) or up n/2 (odd n): a strip holds 8 gate rows and their 8 up rows."""
    pair = n // 2
    return pair // 8 * 16 + n % 2 * 8 + pair % 8


@triton.jit
def tile_product(
    x_rows,
    w_rows,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    """float32 [BLOCK_M, BLOCK_N] from pointers to the rows' first elements; K is padded as the packing pads it.

    FLOAT32 multiplies in float32: the interpreter's bf16 product is wrong.
    """
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_rows[:, None] + k[None, :]
    w_ptrs = w_rows[None, :] + packed_k(k)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in tl.range(0, K // BLOCK_K, num_stages=STAGES):
        x = tl.load(x_ptrs)
        w = tl.load(w_ptrs)
        if FLOAT32:
            acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc)
        else:
            acc = tl.dot(x, w, acc)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * 16
    return acc


@triton.jit
def grouped_tile(pid, tiles_m, TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(m, n) of a program: GROUP_M row tiles go over all columns together, so that both operands stay in the L2."""
    first = pid // (GROUP_M * TILES_N) * GROUP_M
    size = tl.minimum(tiles_m - first, GROUP_M)
    return first + pid % (GROUP_M * TILES_N) % size, pid % (GROUP_M * TILES_N) // size
