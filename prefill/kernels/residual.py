"""The residual stream [tokens, WIDTH]: embedding, the end of a layer, and the norm that the next layer reads.

Columns past HIDDEN up to WIDTH, k's padding in the weight packing, stay zero. A program owns TOKENS whole rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefill.kernels.tile import packed_k, packed_rows


@triton.jit
def _store_normed(x, norm, out, at, column, keep, HIDDEN: tl.constexpr, EPS: tl.constexpr):
    """RMSNorm of the float32 rows x, whose columns past HIDDEN are zero."""
    rstd = tl.rsqrt(tl.sum(x * x, 1) / HIDDEN + EPS)
    weight = tl.load(norm + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out + at, (x * rstd[:, None] * weight[None, :]).to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["tokens"])
def embed_kernel(
    ids,
    head,
    norm,
    x,
    normed,
    tokens,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Residual and its norm from token ids int32 [tokens] and the packed head."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    keep = (token < tokens)[:, None] & (column < WIDTH)[None, :]
    row = tl.load(ids + token, mask=token < tokens, other=0).to(tl.int64)
    source = packed_rows(head, row, WIDTH)[:, None] + packed_k(column)[None, :]
    value = tl.load(source, mask=keep, other=0.0).to(tl.float32)
    at = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty), mask=keep)
    _store_normed(value, norm, normed, at, column, keep, HIDDEN, EPS)


@triton.jit(do_not_specialize=["tokens"])
def residual_kernel(
    x,
    attention,
    ffn,
    slot_of,
    weight_of,
    norm,
    normed,
    tokens,
    CHOICES: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """x += attention + ffn, and the norm of the sum; attention [tokens, HIDDEN].

    CHOICES experts a token: the weighted sum of rows slot_of[token, i] of ffn [sorted rows, HIDDEN], in the order i;
    0 = ffn [tokens, HIDDEN].
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    exists = token < tokens
    keep = exists[:, None] & (column < HIDDEN)[None, :]
    at = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    narrow = token.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    if CHOICES == 0:
        added = tl.load(ffn + narrow, mask=keep, other=0.0).to(tl.float32)
    else:
        added = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for i in tl.static_range(CHOICES):
            slot = tl.load(slot_of + token * CHOICES + i, mask=exists, other=0).to(tl.int64)
            weight = tl.load(weight_of + token * CHOICES + i, mask=exists, other=0.0)
            part = tl.load(ffn + slot[:, None] * HIDDEN + column[None, :], mask=keep, other=0.0).to(tl.float32)
            added = tl.fma(part, weight[:, None], added)
    added = tl.load(attention + narrow, mask=keep, other=0.0).to(tl.float32) + added
    # the norm reads the residual as it is kept
    value = (tl.load(x + at, mask=keep, other=0.0).to(tl.float32) + added).to(x.dtype.element_ty)
    tl.store(x + at, value, mask=keep)
    _store_normed(value.to(tl.float32), norm, normed, at, column, keep, HIDDEN, EPS)
