"""The ends of a step and what joins its layers: embedding, dense FFN, residual and head."""

from __future__ import annotations

from mk.graph.shape import StepShape, x_buffer
from mk.graph.tiles import ONE, X, own_strips, strip_tasks, whole
from mk.isa import ISA, Access, Buffer, Flag, Op, Word, Words


def _embed(s: StepShape, layer: int) -> Words:
    tasks = strip_tasks(s.strips, dst=Buffer.X0)
    head = s.layout.entry("head")
    tasks[:, [Word.WEIGHT, Word.STRIP_PITCH]] = head.first_slot, head.k_slots
    return tasks


ISA.add(
    Op(
        1,
        "embed",
        "embed",
        _embed,
        reads=(Access(Buffer.TOKENS, ONE, ahead=-1),),
        writes=(Access("x", own_strips),),
        doc="x = the token's row of the tied head",
    )
)


def _dense_up(s: StepShape, layer: int) -> Words:
    matrix = s.layout.entry("dense_up", layer)
    return strip_tasks(matrix.strips, matrix, Buffer.HIDDEN)


ISA.add(
    Op(
        13,
        "dense_up",
        "dense_up",
        _dense_up,
        reads=(X,),
        writes=(Access(Buffer.HIDDEN, own_strips),),
        doc="silu(gate)*up of a dense layer",
    )
)


def _ffn_out(s: StepShape) -> Buffer:
    return Buffer.ACC_FFN if s.own_rows else Buffer.FFN_OUT


def _dense_down(s: StepShape, layer: int) -> Words:
    return strip_tasks(s.strips, s.layout.entry("dense_down", layer), _ffn_out(s))


def _dense_hidden(s: StepShape, d: Words) -> tuple[Words, Words]:
    return whole(-(-2 * s.geometry.dense_ffn // 16))(s, d)


ISA.add(
    Op(
        14,
        "dense_down",
        "dense_down",
        _dense_down,
        reads=(Access(Buffer.HIDDEN, _dense_hidden),),
        writes=(Access("dst", own_strips),),
        doc="the dense FFN's contribution to the residual, fp32",
    )
)


def _residual(s: StepShape, layer: int) -> Words:
    tasks = strip_tasks(s.strips, dst=x_buffer(layer + 1))
    tasks[:, Word.SRC] = Buffer.ACC_ATTN if s.own_rows else Buffer.OPROJ_OUT
    # the FFN's sum lies beside attention's: same owner or same global placement
    return tasks


def _left_sums(s: StepShape, d: Words) -> tuple[Words, Words]:
    """In a part of a step an owner also writes its two sums where other placements have them."""
    leaves = (d[:, Word.FLAGS] & Flag.PART != 0) & (d[:, Word.SRC] == Buffer.ACC_ATTN)
    return d[:, Word.TILE], d[:, Word.TILE] + d[:, Word.TILES] * leaves


ISA.add(
    Op(
        15,
        "residual",
        "rmsnorm",
        _residual,
        reads=(Access("x", own_strips), Access("src", own_strips), Access("ffn", own_strips)),
        writes=(
            Access("x", own_strips, ahead=1),
            Access(Buffer.OPROJ_OUT, _left_sums),
            Access(Buffer.FFN_OUT, _left_sums),
        ),
        doc="x' = bf16(x + (attention + ffn)) and the strip's part of the sum of squares for the next norm",
    )
)


def _lm_head(s: StepShape, layer: int) -> Words:
    matrix = s.layout.entry("head")
    return strip_tasks(matrix.strips, matrix, Buffer.LOGITS)


ISA.add(
    Op(
        16,
        "lm_head",
        "lm_head",
        _lm_head,
        reads=(X,),
        writes=(Access(Buffer.LOGITS, own_strips),),
        doc="logits of some strips of the vocabulary",
    )
)
