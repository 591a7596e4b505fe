"""Attention: the fused projection, the splits and their merge, the projection back."""

from __future__ import annotations

import math

import numpy as np

from mk.graph.shape import HEAD_PARTS, HEAD_STRIPS, StepShape, blank
from mk.graph.tiles import X, claimers, own_queue, own_strips, strip_tasks, whole
from mk.isa import ISA, Access, Buffer, Flag, Op, Span, Word, Words


def _qkv(s: StepShape, layer: int) -> Words:
    matrix = s.layout.entry("qkv", layer)
    tasks = strip_tasks(matrix.strips, matrix, Buffer.QKV)
    tasks[:, Word.FLAGS] = Flag.ROPE if s.geometry.rope[layer] else 0
    return tasks


ISA.add(
    Op(
        2,
        "qkv",
        "qkv",
        _qkv,
        reads=(X,),
        writes=(Access(Buffer.QKV, own_strips),),
        doc="q, k, v of the normed x; RoPE; k and v are appended to their page",
    )
)


def _attention_flags(s: StepShape, layer: int) -> int:
    return Flag.SLIDING if s.window(layer) is not None else 0


def _attn(s: StepShape, layer: int) -> Words:
    if s.attention_claimers:
        return blank(0)
    g = s.geometry
    splits = s.splits.most(s.bucket, s.window(layer))
    tasks = blank(splits * s.rows * g.kv_heads)
    # split-major: the first splits exist in every context, so they spread evenly over the SMs
    split, row, head = np.unravel_index(np.arange(len(tasks)), (splits, s.rows, g.kv_heads))
    tasks[:, Word.SPLIT], tasks[:, Word.ROW], tasks[:, Word.HEAD] = split, row, head
    tasks[:, Word.FLAGS] = _attention_flags(s, layer)
    return tasks


def _heads(first_strip: int, heads: int) -> Span:
    """Strips of `heads` heads for each task's KV head, from `first_strip` of the fused projection."""

    def span(s: StepShape, d: Words) -> tuple[Words, Words]:
        lo = first_strip + d[:, Word.HEAD] * heads * HEAD_STRIPS
        return lo, lo + heads * HEAD_STRIPS

    return span


def _q_span(s: StepShape, d: Words) -> tuple[Words, Words]:
    return _heads(0, s.geometry.group)(s, d)


def _k_span(s: StepShape, d: Words) -> tuple[Words, Words]:
    return _heads(s.geometry.q_width // 16, 1)(s, d)


def _v_span(s: StepShape, d: Words) -> tuple[Words, Words]:
    return _heads((s.geometry.q_width + s.geometry.kv_width) // 16, 1)(s, d)


def _partial_unit(s: StepShape, row: Words, kv_head: Words) -> Words:
    return (row * s.geometry.kv_heads + kv_head) * s.split_stride


def _own_partial(s: StepShape, d: Words) -> tuple[Words, Words]:
    lo = _partial_unit(s, d[:, Word.ROW], d[:, Word.HEAD]) + d[:, Word.SPLIT]
    return lo, lo + 1


ISA.add(
    Op(
        3,
        "attention",
        "attn",
        _attn,
        reads=(Access(Buffer.QKV, _q_span), Access(Buffer.QKV, _k_span), Access(Buffer.QKV, _v_span)),
        writes=(Access(Buffer.PARTIAL, _own_partial),),
        doc="one split of one (row, KV head): max, sum and unnormalised O of its query heads",
    )
)


def _attn_drain(s: StepShape, layer: int) -> Words:
    tasks = claimers(s, s.attention_claimers, layer, "attn")
    tasks[:, Word.FLAGS] = _attention_flags(s, layer)
    return tasks


def _all_qkv(s: StepShape, d: Words) -> tuple[Words, Words]:
    return whole(-(-s.geometry.qkv_rows // 16))(s, d)


def _all_partial(s: StepShape, d: Words) -> tuple[Words, Words]:
    return whole(s.rows * s.geometry.kv_heads * s.split_stride)(s, d)


ISA.add(
    Op(
        18,
        "attn_drain",
        "attn",
        _attn_drain,
        reads=(Access(Buffer.QKV, _all_qkv), Access(Buffer.QUEUES, own_queue)),
        writes=(Access(Buffer.PARTIAL, _all_partial),),
        phase=True,
        doc="claims attention splits by ticket",
    )
)


def _attn_combine(s: StepShape, layer: int) -> Words:
    heads = (s.rows, s.geometry.q_heads, HEAD_PARTS)
    tasks = blank(math.prod(heads))
    tasks[:, Word.ROW], tasks[:, Word.HEAD], tasks[:, Word.TILE] = np.unravel_index(np.arange(len(tasks)), heads)
    tasks[:, Word.TILES] = 1
    tasks[:, Word.FLAGS] = _attention_flags(s, layer)
    return tasks


def _head_partials(s: StepShape, d: Words) -> tuple[Words, Words]:
    lo = _partial_unit(s, d[:, Word.ROW], d[:, Word.HEAD] // s.geometry.group)
    layers = d[:, Word.LAYER]
    counts = np.array([s.splits.most(s.bucket, s.window(layer)) for layer in range(s.geometry.layers)], np.int32)
    return lo, lo + counts[layers]


def _own_part(s: StepShape, d: Words) -> tuple[Words, Words]:
    lo = (d[:, Word.ROW] * s.geometry.q_heads + d[:, Word.HEAD]) * HEAD_PARTS + d[:, Word.TILE]
    return lo, lo + d[:, Word.TILES]


ISA.add(
    Op(
        4,
        "attn_combine",
        "attn_combine",
        _attn_combine,
        reads=(Access(Buffer.PARTIAL, _head_partials),),
        writes=(Access(Buffer.ATTN_OUT, _own_part),),
        aside=True,
        doc="merges the splits of 32 dims of one (row, query head), in an order that depends on the splits alone",
    )
)


def _oproj(s: StepShape, layer: int) -> Words:
    return strip_tasks(s.strips, s.layout.entry("o", layer), Buffer.ACC_ATTN if s.own_rows else Buffer.OPROJ_OUT)


def _oproj_prefetch(s: StepShape, layer: int) -> Words:
    return strip_tasks(s.strips, s.layout.entry("o", layer))


ISA.add(
    Op(
        24,
        "prefetch",
        "oproj_prefetch",
        _oproj_prefetch,
        doc="brings o_proj's weights to L2 while the SM waits for addresses; computes nothing",
    )
)


def _all_heads(s: StepShape, d: Words) -> tuple[Words, Words]:
    return whole(s.rows * s.geometry.q_heads * HEAD_PARTS)(s, d)


ISA.add(
    Op(
        5,
        "o_proj",
        "oproj",
        _oproj,
        reads=(Access(Buffer.ATTN_OUT, _all_heads),),
        writes=(Access("dst", own_strips),),
        doc="attention's contribution to the residual, fp32",
    )
)
