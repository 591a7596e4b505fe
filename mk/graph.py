"""The decode step as waves of tasks: tiles, and the regions each task reads and writes.

One step is `embed`, then the waves of each layer in the configured order, then `lm_head` and `sample`. A *wave* is one
operation of one layer; a *task* is one tile of it, already in descriptor form (`mk/isa.py`). Everything here is
vectorised over descriptors, so a full-size step of 90,000 tasks is built in well under a second.

Tile sizes: matrix operations work on 16-row strips of the weight (`mk/model/packing.py`), attention on (row, KV head,
split). Waits are not written here: `mk/schedule/lower.py` derives them from the regions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mk.isa import DESCRIPTOR_WORDS, ISA, NONE, Access, Buffer, Flag, Op, Span, Word, Words
from mk.model.geometry import ROWS, Geometry
from mk.model.packing import MatrixSlots, WeightLayout
from mk.splits import SplitPolicy

LAYER_WAVES = (
    "qkv",
    "router",
    "topk",
    "route_setup",
    "moe_gather",
    "attn",
    "attn_combine",
    "moe_up",
    "moe_down",
    "moe_combine",
    "oproj",
    "rmsnorm",
)
"""Names of the waves of a layer. A plan may leave some empty (`moe_gather` always: activations are read in place)."""

PARTED_WAVES = ("moe_up",)
"""Waves that a wave order may name several times, to fill more than one hand-off with their weight stream."""

DENSE_WAVES = {"moe_up": "dense_up", "moe_down": "dense_down"}  # what stands there in a dense layer
WAVE_NAMES = ("embed", *LAYER_WAVES, *DENSE_WAVES.values(), "lm_head", "sample")

HEAD_STRIPS = 8  # strips of one 128-wide head
QUEUE_KINDS = ("attn", "moe_up", "moe_down")  # ticket queues of a layer


@dataclass(frozen=True)
class StepShape:
    """Everything that fixes the task list of a step, the schedule's order and placement apart.

    rows: built batch size. bucket: the longest context (tokens, the new one included) the list has room for; it sizes
    lists, never arithmetic. own_rows: each residual strip has one owner that keeps its sums (`placement=row_owner`).
    attention_claimers, moe_claimers: SMs that steal those tiles, 0 = static.
    """

    geometry: Geometry
    rows: int
    bucket: int
    n_sm: int
    own_rows: bool = False
    attention_claimers: int = 0
    moe_claimers: int = 0
    claim_ahead: int = 2
    splits: SplitPolicy = SplitPolicy()
    layout: WeightLayout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("rows", "bucket", "n_sm"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("attention_claimers", "moe_claimers"):
            if not 0 <= getattr(self, name) <= self.n_sm:
                raise ValueError(f"{name} must lie in 0..{self.n_sm} (one claimer an SM), not {getattr(self, name)}")
        object.__setattr__(self, "layout", WeightLayout(self.geometry))

    @property
    def strips(self) -> int:
        """Strips of the residual."""
        return self.geometry.hidden // 16

    @property
    def hidden_strips(self) -> int:
        """Strips of an expert's gate/up matrix or of the dense layer's, the larger: units of HIDDEN an expert."""
        g = self.geometry
        dense = g.dense_ffn if "dense" in g.mlp_kinds else 0
        sparse = g.expert_ffn if "sparse" in g.mlp_kinds else 0
        return -(-2 * max(dense, sparse) // 16)

    @property
    def split_stride(self) -> int:
        """Units of PARTIAL a (row, KV head): room for every split of either layer kind."""
        return self.splits.max_splits + 1

    def window(self, layer: int) -> int | None:
        """Keys visible on this layer, itself included; None on a full-attention layer."""
        return self.geometry.window_keys if self.geometry.layer_kinds[layer] == "sliding" else None

    def layer_waves(self, layer: int, order: tuple[str, ...]) -> list[str]:
        """The waves of one layer in the given order, with the dense layer's names where it is dense."""
        if self.geometry.mlp_kinds[layer] == "sparse":
            return list(order)
        sparse_only = {"router", "topk", "moe_gather", "moe_combine"}
        return [DENSE_WAVES.get(wave, wave) for wave in order if wave not in sparse_only]

    def wave_tasks(self, wave: str, layer: int, part: int = 0, parts: int = 1) -> tuple[Op | None, Words]:
        """The tasks of one wave, or of its `part`-th of `parts` equal parts: its operation and descriptors [n, 32].

        (None, empty) when the plan leaves it empty.
        """
        for op in ISA.of_wave(wave):
            tasks = _part(op, op.tiles(self, layer), part, parts)
            if len(tasks):
                tasks[:, Word.OPCODE] = op.opcode
                tasks[:, Word.LAYER] = layer
                tasks[:, Word.WAVE] = WAVE_NAMES.index(wave) if wave in WAVE_NAMES else len(WAVE_NAMES)
                tasks[:, Word.ROWS] = self.rows
                return op, tasks
        return None, _blank(0)


def _part(op: Op, tasks: Words, part: int, parts: int) -> Words:
    """One of `parts` parts of a wave: of a phase's shares, or of its tasks. Claimers take it all in the first part."""
    if parts == 1 or not len(tasks):
        return tasks
    if not op.phase:
        return tasks[len(tasks) * part // parts : len(tasks) * (part + 1) // parts]
    if tasks[0, Word.QUEUE] != NONE:
        return tasks if part == 0 else tasks[:0]
    tasks[:, Word.RANK] = tasks[:, Word.RANK] * parts + part
    tasks[:, Word.RANKS] *= parts
    return tasks


def queue_id(layer: int, kind: str) -> int:
    return layer * len(QUEUE_KINDS) + QUEUE_KINDS.index(kind)


def x_buffer(layer: int) -> Buffer:
    """The residual entering `layer` (of `layers`: the model's output) lies in one of two buffers by parity."""
    return Buffer.X1 if layer % 2 else Buffer.X0


# ---- tiles ------------------------------------------------------------------------------------------------------


def _blank(n: int) -> Words:
    tasks = np.zeros((n, DESCRIPTOR_WORDS), np.int32)
    tasks[:, [Word.WAIT0, Word.WAIT1, Word.SIGNAL, Word.QUEUE]] = NONE
    return tasks


def strip_tasks(strips: int, matrix: MatrixSlots | None = None, dst: Buffer | None = None) -> Words:
    """One task a strip; `lower` joins neighbours that land on the same SM."""
    tasks = _blank(strips)
    tasks[:, Word.TILE] = np.arange(strips)
    tasks[:, Word.TILES] = 1
    if matrix is not None:
        tasks[:, Word.K_SLOTS] = matrix.k_slots
        tasks[:, Word.STRIP_PITCH] = matrix.k_slots
        tasks[:, Word.WEIGHT] = matrix.first_slot
    if dst is not None:
        tasks[:, Word.DST] = dst
    return tasks


def _sparse(s: StepShape, layer: int) -> bool:
    return s.geometry.mlp_kinds[layer] == "sparse"


def _embed(s: StepShape, layer: int) -> Words:
    tasks = strip_tasks(s.strips, dst=Buffer.X0)
    head = s.layout.entry("head")
    tasks[:, [Word.WEIGHT, Word.STRIP_PITCH]] = head.first_slot, head.k_slots
    return tasks


def _qkv(s: StepShape, layer: int) -> Words:
    matrix = s.layout.entry("qkv", layer)
    tasks = strip_tasks(matrix.strips, matrix, Buffer.QKV)
    tasks[:, Word.FLAGS] = Flag.ROPE if s.geometry.rope[layer] else 0
    return tasks


def _router(s: StepShape, layer: int) -> Words:
    if not _sparse(s, layer):
        return _blank(0)
    matrix = s.layout.entry("router", layer)
    # one task a (strip, k slot): the partial logits are added in k order by every SM's top-k
    tasks = np.repeat(strip_tasks(matrix.strips, matrix, Buffer.ROUTER_PART), matrix.k_slots, axis=0)
    tasks[:, Word.K_SLOT] = np.tile(np.arange(matrix.k_slots), matrix.strips)
    tasks[:, Word.K_SLOTS] = 1
    return tasks


def _topk(s: StepShape, layer: int) -> Words:
    if not _sparse(s, layer):
        return _blank(0)
    tasks = _blank(s.n_sm)
    tasks[:, Word.K_SLOTS] = s.layout.entry("router", layer).k_slots
    tasks[:, Word.TILES] = s.layout.entry("router", layer).strips
    tasks[0, Word.FLAGS] = Flag.PUBLISH
    return tasks


def _route_setup(s: StepShape, layer: int) -> Words:
    """Clears the idle set of this layer's ticket heads; nothing to clear in a static plan."""
    if not (s.attention_claimers or (s.moe_claimers and _sparse(s, layer))):
        return _blank(0)
    tasks = _blank(1)
    tasks[:, [Word.QUEUE, Word.TILES]] = queue_id(layer, QUEUE_KINDS[0]), len(QUEUE_KINDS)
    return tasks


def _attention_flags(s: StepShape, layer: int) -> int:
    return Flag.SLIDING if s.window(layer) is not None else 0


def _attn(s: StepShape, layer: int) -> Words:
    if s.attention_claimers:
        return _blank(0)
    g = s.geometry
    splits = s.splits.most(s.bucket, s.window(layer))
    tasks = _blank(splits * s.rows * g.kv_heads)
    # split-major: the first splits exist in every context, so they spread evenly over the SMs
    split, row, head = np.unravel_index(np.arange(len(tasks)), (splits, s.rows, g.kv_heads))
    tasks[:, Word.SPLIT], tasks[:, Word.ROW], tasks[:, Word.HEAD] = split, row, head
    tasks[:, Word.FLAGS] = _attention_flags(s, layer)
    return tasks


def _claimers(s: StepShape, count: int, layer: int, kind: str) -> Words:
    tasks = _blank(count)
    tasks[:, Word.QUEUE] = queue_id(layer, kind)
    tasks[:, Word.CLAIM_AHEAD] = s.claim_ahead
    tasks[:, Word.RANKS] = count
    tasks[:, Word.RANK] = np.arange(count)
    return tasks


def _attn_drain(s: StepShape, layer: int) -> Words:
    tasks = _claimers(s, s.attention_claimers, layer, "attn")
    tasks[:, Word.FLAGS] = _attention_flags(s, layer)
    return tasks


def _attn_combine(s: StepShape, layer: int) -> Words:
    tasks = _blank(s.rows * s.geometry.q_heads)
    tasks[:, Word.ROW], tasks[:, Word.HEAD] = np.divmod(np.arange(len(tasks)), s.geometry.q_heads)
    tasks[:, Word.FLAGS] = _attention_flags(s, layer)
    return tasks


def _oproj(s: StepShape, layer: int) -> Words:
    return strip_tasks(s.strips, s.layout.entry("o", layer), Buffer.ACC_ATTN if s.own_rows else Buffer.OPROJ_OUT)


def _expert_words(tasks: Words, matrix: MatrixSlots, strips: int) -> Words:
    tasks[:, Word.K_SLOTS] = matrix.k_slots
    tasks[:, Word.STRIP_PITCH] = matrix.k_slots
    tasks[:, Word.WEIGHT] = matrix.first_slot
    tasks[:, Word.EXPERT_PITCH] = matrix.expert_stride
    tasks[:, Word.TILES] = strips
    return tasks


def _phase(s: StepShape) -> Words:
    tasks = _blank(s.n_sm)
    tasks[:, Word.RANK] = np.arange(s.n_sm)
    tasks[:, Word.RANKS] = s.n_sm
    return tasks


def _moe_up(s: StepShape, layer: int) -> Words:
    if s.moe_claimers or not _sparse(s, layer):
        return _blank(0)
    matrix = s.layout.entry("up", layer)
    tasks = _expert_words(_phase(s), matrix, matrix.strips)
    tasks[:, Word.DST] = Buffer.HIDDEN
    return tasks


def _moe_up_drain(s: StepShape, layer: int) -> Words:
    if not (s.moe_claimers and _sparse(s, layer)):
        return _blank(0)
    matrix = s.layout.entry("up", layer)
    tasks = _expert_words(_claimers(s, s.moe_claimers, layer, "moe_up"), matrix, matrix.strips)
    tasks[:, Word.DST] = Buffer.HIDDEN
    return tasks


def _moe_down_owned(s: StepShape, layer: int) -> Words:
    """Row ownership: the owner of a strip adds every active expert's down projection to it, in ascending id."""
    if not (s.own_rows and _sparse(s, layer)):
        return _blank(0)
    matrix = s.layout.entry("down", layer)
    tasks = strip_tasks(s.strips, matrix, Buffer.ACC_FFN)
    tasks[:, Word.EXPERT_PITCH] = matrix.expert_stride
    return tasks


def _moe_down(s: StepShape, layer: int) -> Words:
    if s.own_rows or s.moe_claimers or not _sparse(s, layer):
        return _blank(0)
    matrix = s.layout.entry("down", layer)
    tasks = _expert_words(_phase(s), matrix, matrix.strips)
    tasks[:, Word.DST] = Buffer.FFN_PART
    return tasks


def _moe_down_drain(s: StepShape, layer: int) -> Words:
    if s.own_rows or not (s.moe_claimers and _sparse(s, layer)):
        return _blank(0)
    matrix = s.layout.entry("down", layer)
    tasks = _expert_words(_claimers(s, s.moe_claimers, layer, "moe_down"), matrix, matrix.strips)
    tasks[:, Word.DST] = Buffer.FFN_PART
    return tasks


def _moe_combine(s: StepShape, layer: int) -> Words:
    if s.own_rows or not _sparse(s, layer):
        return _blank(0)
    return strip_tasks(s.strips, dst=Buffer.FFN_OUT)


def _dense_up(s: StepShape, layer: int) -> Words:
    matrix = s.layout.entry("dense_up", layer)
    return strip_tasks(matrix.strips, matrix, Buffer.HIDDEN)


def _dense_down(s: StepShape, layer: int) -> Words:
    return strip_tasks(s.strips, s.layout.entry("dense_down", layer), _ffn_out(s))


def _ffn_out(s: StepShape) -> Buffer:
    return Buffer.ACC_FFN if s.own_rows else Buffer.FFN_OUT


def _residual(s: StepShape, layer: int) -> Words:
    tasks = strip_tasks(s.strips, dst=x_buffer(layer + 1))
    tasks[:, Word.SRC] = Buffer.ACC_ATTN if s.own_rows else Buffer.OPROJ_OUT
    # the FFN's sum lies beside attention's: same owner or same global placement
    return tasks


def _lm_head(s: StepShape, layer: int) -> Words:
    matrix = s.layout.entry("head")
    tasks = strip_tasks(matrix.strips, matrix, Buffer.LOGITS)
    tasks[:, Word.FLAGS] = Flag.FINAL
    return tasks


def _sample(s: StepShape, layer: int) -> Words:
    tasks = _blank(1)
    tasks[:, Word.TILES] = s.layout.entry("head").strips
    tasks[:, Word.DST] = Buffer.TOKENS
    return tasks


# ---- regions ----------------------------------------------------------------------------------------------------


def _whole(units: int) -> Span:
    return lambda s, d: (np.zeros(len(d), np.int32), np.full(len(d), units, np.int32))


def own_strips(s: StepShape, d: Words) -> tuple[Words, Words]:
    return d[:, Word.TILE], d[:, Word.TILE] + d[:, Word.TILES]


def _all_strips(s: StepShape, d: Words) -> tuple[Words, Words]:
    return _whole(s.strips)(s, d)


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


def _all_qkv(s: StepShape, d: Words) -> tuple[Words, Words]:
    return _whole(-(-s.geometry.qkv_rows // 16))(s, d)


def _partial_unit(s: StepShape, row: Words, kv_head: Words) -> Words:
    return (row * s.geometry.kv_heads + kv_head) * s.split_stride


def _own_partial(s: StepShape, d: Words) -> tuple[Words, Words]:
    lo = _partial_unit(s, d[:, Word.ROW], d[:, Word.HEAD]) + d[:, Word.SPLIT]
    return lo, lo + 1


def _all_partial(s: StepShape, d: Words) -> tuple[Words, Words]:
    return _whole(s.rows * s.geometry.kv_heads * s.split_stride)(s, d)


def _head_partials(s: StepShape, d: Words) -> tuple[Words, Words]:
    lo = _partial_unit(s, d[:, Word.ROW], d[:, Word.HEAD] // s.geometry.group)
    layers = d[:, Word.LAYER]
    counts = np.array([s.splits.most(s.bucket, s.window(layer)) for layer in range(s.geometry.layers)], np.int32)
    return lo, lo + counts[layers]


def _own_head(s: StepShape, d: Words) -> tuple[Words, Words]:
    lo = d[:, Word.ROW] * s.geometry.q_heads + d[:, Word.HEAD]
    return lo, lo + 1


def _all_heads(s: StepShape, d: Words) -> tuple[Words, Words]:
    return _whole(s.rows * s.geometry.q_heads)(s, d)


def _own_router(s: StepShape, d: Words) -> tuple[Words, Words]:
    # k slot after k slot, so that joined strips (of one k slot each) are neighbours
    lo = d[:, Word.K_SLOT] * -(-s.geometry.experts // ROWS) + d[:, Word.TILE]
    return lo, lo + d[:, Word.TILES]


def _all_router(s: StepShape, d: Words) -> tuple[Words, Words]:
    return np.zeros(len(d), np.int32), d[:, Word.TILES] * d[:, Word.K_SLOTS]


def _all_hidden(s: StepShape, d: Words) -> tuple[Words, Words]:
    return _whole(s.geometry.experts * s.hidden_strips)(s, d)


def _dense_hidden(s: StepShape, d: Words) -> tuple[Words, Words]:
    return _whole(-(-2 * s.geometry.dense_ffn // 16))(s, d)


def _all_ffn_part(s: StepShape, d: Words) -> tuple[Words, Words]:
    return _whole(s.geometry.experts * s.strips)(s, d)


def _all_logits(s: StepShape, d: Words) -> tuple[Words, Words]:
    return np.zeros(len(d), np.int32), d[:, Word.TILES]


def _own_queue(s: StepShape, d: Words) -> tuple[Words, Words]:
    return d[:, Word.QUEUE], d[:, Word.QUEUE] + 1


def _layer_queues(s: StepShape, d: Words) -> tuple[Words, Words]:
    return d[:, Word.QUEUE], d[:, Word.QUEUE] + d[:, Word.TILES]


_ONE = _whole(1)
_X = Access("x", _all_strips)
_ROUTE = Access(Buffer.ROUTE, _ONE)
_QKV_READS = (Access(Buffer.QKV, _q_span), Access(Buffer.QKV, _k_span), Access(Buffer.QKV, _v_span))


# ---- the instruction set ----------------------------------------------------------------------------------------

for _row in (
    Op(
        1,
        "embed",
        "embed",
        _embed,
        reads=(Access(Buffer.TOKENS, _ONE, ahead=-1),),
        writes=(Access("x", own_strips),),
        doc="x = the token's row of the tied head",
    ),
    Op(
        2,
        "qkv",
        "qkv",
        _qkv,
        reads=(_X,),
        writes=(Access(Buffer.QKV, own_strips),),
        doc="q, k, v of the normed x; RoPE; k and v are appended to their page",
    ),
    Op(
        3,
        "attention",
        "attn",
        _attn,
        reads=_QKV_READS,
        writes=(Access(Buffer.PARTIAL, _own_partial),),
        doc="one split of one (row, KV head): max, sum and unnormalised O of its query heads",
    ),
    Op(
        4,
        "attn_combine",
        "attn_combine",
        _attn_combine,
        reads=(Access(Buffer.PARTIAL, _head_partials),),
        writes=(Access(Buffer.ATTN_OUT, _own_head),),
        doc="merges the splits of one (row, query head) in split order",
    ),
    Op(
        5,
        "o_proj",
        "oproj",
        _oproj,
        reads=(Access(Buffer.ATTN_OUT, _all_heads),),
        writes=(Access("dst", own_strips),),
        doc="attention's contribution to the residual, fp32",
    ),
    Op(
        6,
        "router",
        "router",
        _router,
        reads=(_X,),
        writes=(Access(Buffer.ROUTER_PART, _own_router),),
        doc="partial expert logits of one k slot",
    ),
    Op(
        7,
        "topk",
        "topk",
        _topk,
        reads=(Access(Buffer.ROUTER_PART, _all_router),),
        writes=(_ROUTE,),
        everywhere=True,
        doc="adds the partial logits, picks top-k, builds the expert mask: each SM for itself",
    ),
    Op(
        8,
        "route_setup",
        "route_setup",
        _route_setup,
        writes=(Access(Buffer.QUEUES, _layer_queues, ahead=1),),
        doc="clears the ticket heads that the next step will use",
    ),
    Op(
        9,
        "moe_up",
        "moe_up",
        _moe_up,
        reads=(_X, _ROUTE),
        writes=(Access(Buffer.HIDDEN, _all_hidden),),
        phase=True,
        everywhere=True,
        doc="silu(gate)*up of this SM's share of the active experts' strips",
    ),
    Op(
        10,
        "moe_down",
        "moe_down",
        _moe_down,
        reads=(Access(Buffer.HIDDEN, _all_hidden), _ROUTE),
        writes=(Access(Buffer.FFN_PART, _all_ffn_part),),
        phase=True,
        everywhere=True,
        doc="an expert's contribution before its weight, fp32",
    ),
    Op(
        11,
        "moe_down_owned",
        "moe_down",
        _moe_down_owned,
        reads=(Access(Buffer.HIDDEN, _all_hidden), _ROUTE),
        writes=(Access(Buffer.ACC_FFN, own_strips),),
        phase=True,
        doc="all active experts' weighted contributions to the owned strips, ascending id",
    ),
    Op(
        12,
        "moe_combine",
        "moe_combine",
        _moe_combine,
        reads=(Access(Buffer.FFN_PART, _all_ffn_part), _ROUTE),
        writes=(Access(Buffer.FFN_OUT, own_strips),),
        doc="weighted sum of the experts' contributions, ascending id",
    ),
    Op(
        13,
        "dense_up",
        "dense_up",
        _dense_up,
        reads=(_X,),
        writes=(Access(Buffer.HIDDEN, own_strips),),
        doc="silu(gate)*up of a dense layer",
    ),
    Op(
        14,
        "dense_down",
        "dense_down",
        _dense_down,
        reads=(Access(Buffer.HIDDEN, _dense_hidden),),
        writes=(Access("dst", own_strips),),
        doc="the dense FFN's contribution to the residual, fp32",
    ),
    Op(
        15,
        "residual",
        "rmsnorm",
        _residual,
        reads=(Access("x", own_strips), Access("src", own_strips), Access("ffn", own_strips)),
        writes=(Access("x", own_strips, ahead=1),),
        doc="x' = bf16(x + (attention + ffn)) and the strip's part of the sum of squares for the next norm",
    ),
    Op(
        16,
        "lm_head",
        "lm_head",
        _lm_head,
        reads=(_X,),
        writes=(Access(Buffer.LOGITS, own_strips),),
        doc="logits of some strips of the vocabulary",
    ),
    Op(
        17,
        "sample",
        "sample",
        _sample,
        reads=(Access(Buffer.LOGITS, _all_logits),),
        writes=(Access(Buffer.TOKENS, _ONE),),
        doc="draws each row's next token and feeds it back",
    ),
    Op(
        18,
        "attn_drain",
        "attn",
        _attn_drain,
        reads=(Access(Buffer.QKV, _all_qkv), Access(Buffer.QUEUES, _own_queue)),
        writes=(Access(Buffer.PARTIAL, _all_partial),),
        phase=True,
        doc="claims attention splits by ticket",
    ),
    Op(
        19,
        "moe_up_drain",
        "moe_up",
        _moe_up_drain,
        reads=(_X, _ROUTE, Access(Buffer.QUEUES, _own_queue)),
        writes=(Access(Buffer.HIDDEN, _all_hidden),),
        phase=True,
        doc="claims up/gate tiles by ticket",
    ),
    Op(
        20,
        "moe_down_drain",
        "moe_down",
        _moe_down_drain,
        reads=(Access(Buffer.HIDDEN, _all_hidden), _ROUTE, Access(Buffer.QUEUES, _own_queue)),
        writes=(Access(Buffer.FFN_PART, _all_ffn_part),),
        phase=True,
        doc="claims down tiles by ticket",
    ),
):
    ISA.add(_row)


def resolve(access: Access, layer: int, shape: StepShape, task: Words) -> Buffer:
    """The physical buffer of an access of `task` (a descriptor of `layer`)."""
    if isinstance(access.buffer, Buffer):
        return access.buffer
    if access.buffer == "x":
        return x_buffer(layer + access.ahead)
    if access.buffer == "dst":
        return Buffer(int(task[Word.DST]))
    if access.buffer == "src":
        return Buffer(int(task[Word.SRC]))
    if access.buffer == "ffn":
        return Buffer.ACC_FFN if task[Word.SRC] == Buffer.ACC_ATTN else Buffer.FFN_OUT
    raise ValueError(f"unknown buffer {access.buffer!r}")
