"""The expert layer: routing, the experts' two products as phases, and the weighted sum."""

from __future__ import annotations

import numpy as np

from mk.graph.shape import QUEUE_KINDS, StepShape, blank, queue_id
from mk.graph.tiles import ONE, X, claimers, is_sparse, own_queue, own_strips, strip_tasks, whole
from mk.isa import ISA, Access, Buffer, Flag, Op, Word, Words
from mk.model.geometry import ROWS

_ROUTE = Access(Buffer.ROUTE, ONE)


def _router(s: StepShape, layer: int) -> Words:
    if not is_sparse(s, layer):
        return blank(0)
    matrix = s.layout.entry("router", layer)
    # one task a (strip, k slot): the partial logits are added in k order by every SM's top-k
    tasks = np.repeat(strip_tasks(matrix.strips, matrix, Buffer.ROUTER_PART), matrix.k_slots, axis=0)
    tasks[:, Word.K_SLOT] = np.tile(np.arange(matrix.k_slots), matrix.strips)
    tasks[:, Word.K_SLOTS] = 1
    return tasks


def _own_router(s: StepShape, d: Words) -> tuple[Words, Words]:
    # k slot after k slot, so that joined strips (of one k slot each) are neighbours
    lo = d[:, Word.K_SLOT] * -(-s.geometry.experts // ROWS) + d[:, Word.TILE]
    return lo, lo + d[:, Word.TILES]


ISA.add(
    Op(
        6,
        "router",
        "router",
        _router,
        reads=(X,),
        writes=(Access(Buffer.ROUTER_PART, _own_router),),
        doc="partial expert logits of one k slot",
    )
)


def _topk(s: StepShape, layer: int) -> Words:
    if not is_sparse(s, layer):
        return blank(0)
    tasks = blank(s.n_sm)
    tasks[:, Word.K_SLOTS] = s.layout.entry("router", layer).k_slots
    tasks[:, Word.TILES] = s.layout.entry("router", layer).strips
    tasks[0, Word.FLAGS] = Flag.PUBLISH
    return tasks


def _all_router(s: StepShape, d: Words) -> tuple[Words, Words]:
    return np.zeros(len(d), np.int32), d[:, Word.TILES] * d[:, Word.K_SLOTS]


ISA.add(
    Op(
        7,
        "topk",
        "topk",
        _topk,
        reads=(Access(Buffer.ROUTER_PART, _all_router),),
        writes=(_ROUTE,),
        everywhere=True,
        doc="adds the partial logits, picks top-k, builds the expert mask: each SM for itself",
    )
)


def _route_setup(s: StepShape, layer: int) -> Words:
    """Clears the idle set of this layer's ticket heads; nothing to clear in a static plan."""
    if not (s.attention_claimers or (s.moe_claimers and is_sparse(s, layer))):
        return blank(0)
    tasks = blank(1)
    tasks[:, [Word.QUEUE, Word.TILES]] = queue_id(layer, QUEUE_KINDS[0]), len(QUEUE_KINDS)
    return tasks


def _layer_queues(s: StepShape, d: Words) -> tuple[Words, Words]:
    return d[:, Word.QUEUE], d[:, Word.QUEUE] + d[:, Word.TILES]


ISA.add(
    Op(
        8,
        "route_setup",
        "route_setup",
        _route_setup,
        writes=(Access(Buffer.QUEUES, _layer_queues, ahead=1),),
        doc="clears the ticket heads that the next step will use",
    )
)


def _expert_tiles(s: StepShape, layer: int, tasks: Words, name: str, dst: Buffer) -> Words:
    """Phases or claimers over the strips of every active expert's `name` matrix."""
    matrix = s.layout.entry(name, layer)
    tasks[:, Word.K_SLOTS] = matrix.k_slots
    tasks[:, Word.STRIP_PITCH] = matrix.k_slots
    tasks[:, Word.WEIGHT] = matrix.first_slot
    tasks[:, Word.EXPERT_PITCH] = matrix.expert_stride
    tasks[:, Word.TILES] = matrix.strips
    tasks[:, Word.DST] = dst
    return tasks


def _phase(s: StepShape) -> Words:
    tasks = blank(s.n_sm)
    tasks[:, Word.RANK] = np.arange(s.n_sm)
    tasks[:, Word.RANKS] = s.n_sm
    return tasks


def _moe_up(s: StepShape, layer: int) -> Words:
    if s.moe_claimers or not is_sparse(s, layer):
        return blank(0)
    return _expert_tiles(s, layer, _phase(s), "up", Buffer.HIDDEN)


def _all_hidden(s: StepShape, d: Words) -> tuple[Words, Words]:
    return whole(s.geometry.experts * s.hidden_strips)(s, d)


ISA.add(
    Op(
        9,
        "moe_up",
        "moe_up",
        _moe_up,
        reads=(X, _ROUTE),
        writes=(Access(Buffer.HIDDEN, _all_hidden),),
        phase=True,
        everywhere=True,
        doc="silu(gate)*up of this SM's share of the active experts' strips",
    )
)


def _moe_up_drain(s: StepShape, layer: int) -> Words:
    if not (s.moe_claimers and is_sparse(s, layer)):
        return blank(0)
    return _expert_tiles(s, layer, claimers(s, s.moe_claimers, layer, "moe_up"), "up", Buffer.HIDDEN)


ISA.add(
    Op(
        19,
        "moe_up_drain",
        "moe_up",
        _moe_up_drain,
        reads=(X, _ROUTE, Access(Buffer.QUEUES, own_queue)),
        writes=(Access(Buffer.HIDDEN, _all_hidden),),
        phase=True,
        doc="claims up/gate tiles by ticket",
    )
)


def _moe_down(s: StepShape, layer: int) -> Words:
    if s.own_rows or s.moe_claimers or not is_sparse(s, layer):
        return blank(0)
    return _expert_tiles(s, layer, _phase(s), "down", Buffer.FFN_PART)


def _all_ffn_part(s: StepShape, d: Words) -> tuple[Words, Words]:
    return whole(s.geometry.experts * s.strips)(s, d)


ISA.add(
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
    )
)


def _moe_down_owned(s: StepShape, layer: int) -> Words:
    """Row ownership: the owner of a strip adds every active expert's down projection to it, in ascending id."""
    if not (s.own_rows and is_sparse(s, layer)):
        return blank(0)
    matrix = s.layout.entry("down", layer)
    tasks = strip_tasks(s.strips, matrix, Buffer.ACC_FFN)
    tasks[:, Word.EXPERT_PITCH] = matrix.expert_stride
    return tasks


ISA.add(
    Op(
        11,
        "moe_down_owned",
        "moe_down",
        _moe_down_owned,
        reads=(Access(Buffer.HIDDEN, _all_hidden), _ROUTE),
        writes=(Access(Buffer.ACC_FFN, own_strips),),
        phase=True,
        doc="all active experts' weighted contributions to the owned strips, ascending id",
    )
)


def _moe_down_drain(s: StepShape, layer: int) -> Words:
    if s.own_rows or not (s.moe_claimers and is_sparse(s, layer)):
        return blank(0)
    return _expert_tiles(s, layer, claimers(s, s.moe_claimers, layer, "moe_down"), "down", Buffer.FFN_PART)


ISA.add(
    Op(
        20,
        "moe_down_drain",
        "moe_down",
        _moe_down_drain,
        reads=(Access(Buffer.HIDDEN, _all_hidden), _ROUTE, Access(Buffer.QUEUES, own_queue)),
        writes=(Access(Buffer.FFN_PART, _all_ffn_part),),
        phase=True,
        doc="claims down tiles by ticket",
    )
)


def _moe_combine(s: StepShape, layer: int) -> Words:
    if s.own_rows or not is_sparse(s, layer):
        return blank(0)
    return strip_tasks(s.strips, dst=Buffer.FFN_OUT)


ISA.add(
    Op(
        12,
        "moe_combine",
        "moe_combine",
        _moe_combine,
        reads=(Access(Buffer.FFN_PART, _all_ffn_part), _ROUTE),
        writes=(Access(Buffer.FFN_OUT, own_strips),),
        doc="weighted sum of the experts' contributions, ascending id",
    )
)
