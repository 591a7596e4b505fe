"""Tiles and regions that several operations share: strips of a weight, claimers, whole buffers."""

from __future__ import annotations

import numpy as np

from mk.graph.shape import StepShape, blank, queue_id
from mk.isa import Access, Buffer, Span, Word, Words
from mk.model.packing import MatrixSlots


def strip_tasks(strips: int, matrix: MatrixSlots | None = None, dst: Buffer | None = None) -> Words:
    """One task a strip; `lower` joins neighbours that land on the same SM."""
    tasks = blank(strips)
    tasks[:, Word.TILE] = np.arange(strips)
    tasks[:, Word.TILES] = 1
    if matrix is not None:
        tasks[:, Word.K_SLOTS] = matrix.k_slots
        tasks[:, Word.STRIP_PITCH] = matrix.k_slots
        tasks[:, Word.WEIGHT] = matrix.first_slot
    if dst is not None:
        tasks[:, Word.DST] = dst
    return tasks


def is_sparse(s: StepShape, layer: int) -> bool:
    return s.geometry.mlp_kinds[layer] == "sparse"


def claimers(s: StepShape, count: int, layer: int, kind: str) -> Words:
    tasks = blank(count)
    tasks[:, Word.QUEUE] = queue_id(layer, kind)
    tasks[:, Word.CLAIM_AHEAD] = s.claim_ahead
    tasks[:, Word.RANKS] = count
    tasks[:, Word.RANK] = np.arange(count)
    return tasks


def whole(units: int) -> Span:
    return lambda s, d: (np.zeros(len(d), np.int32), np.full(len(d), units, np.int32))


def own_strips(s: StepShape, d: Words) -> tuple[Words, Words]:
    return d[:, Word.TILE], d[:, Word.TILE] + d[:, Word.TILES]


def all_strips(s: StepShape, d: Words) -> tuple[Words, Words]:
    return whole(s.strips)(s, d)


def own_queue(s: StepShape, d: Words) -> tuple[Words, Words]:
    return d[:, Word.QUEUE], d[:, Word.QUEUE] + 1


ONE = whole(1)
X = Access("x", all_strips)
