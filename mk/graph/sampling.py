"""From logits to tokens: a greedy step's one task, or the waves that cut and draw (`mk/shortlist.py`)."""

from __future__ import annotations

import numpy as np

from mk.graph.shape import StepShape, blank
from mk.graph.tiles import ONE
from mk.isa import ISA, Access, Buffer, Op, Word, Words
from mk.phases import share


def _all_logits(s: StepShape, d: Words) -> tuple[Words, Words]:
    strips = np.full(len(d), s.layout.entry("head").strips, np.int32)
    return np.zeros_like(strips), strips


def _all_slices(s: StepShape, d: Words) -> tuple[Words, Words]:
    return np.zeros(len(d), np.int32), np.full(len(d), s.slices, np.int32)


def _own_slice(s: StepShape, d: Words) -> tuple[Words, Words]:
    return d[:, Word.RANK], d[:, Word.RANK] + 1


_LOGITS = Access(Buffer.LOGITS, _all_logits)  # all of them: the largest is any SM's
_HISTOGRAM = Access(Buffer.HISTOGRAM, _all_slices)


def _slices(s: StepShape, dst: Buffer) -> Words:
    """One task a slice of the vocabulary; a greedy step has none."""
    tasks = blank(s.slices if s.draws else 0)
    strips = s.layout.entry("head").strips
    bounds = np.array([share(strips, rank, s.slices) for rank in range(len(tasks))], np.int32).reshape(-1, 2)
    tasks[:, Word.TILE], tasks[:, Word.TILES] = bounds[:, 0], bounds[:, 1] - bounds[:, 0]
    tasks[:, Word.RANK], tasks[:, Word.RANKS] = np.arange(len(tasks)), len(tasks)
    tasks[:, Word.DST] = dst
    return tasks


def _final(s: StepShape) -> Words:
    tasks = blank(1)
    tasks[:, Word.TILES] = s.layout.entry("head").strips
    tasks[:, Word.DST] = Buffer.TOKENS
    return tasks


ISA.add(
    Op(
        21,
        "histogram",
        "histogram",
        lambda s, layer: _slices(s, Buffer.HISTOGRAM),
        reads=(_LOGITS,),
        writes=(Access(Buffer.HISTOGRAM, _own_slice),),
        everywhere=True,
        doc="counts and masses of a slice's logits by bin; clears its share of the next step's",
    )
)

ISA.add(
    Op(
        22,
        "shortlist",
        "shortlist",
        lambda s, layer: _slices(s, Buffer.SHORTLIST),
        reads=(_LOGITS, _HISTOGRAM),
        writes=(Access(Buffer.SHORTLIST, _own_slice),),
        everywhere=True,
        doc="a slice's best token of those that are sure to be kept, and those that may be",
    )
)

ISA.add(
    Op(
        23,
        "draw",
        "sample",
        lambda s, layer: _final(s) if s.draws else blank(0),
        reads=(_LOGITS, _HISTOGRAM, Access(Buffer.SHORTLIST, _all_slices)),
        writes=(Access(Buffer.TOKENS, ONE),),
        doc="each row's next token, drawn or the likeliest; feeds it back and hands it to the host",
    )
)

ISA.add(
    Op(
        17,
        "sample",
        "sample",
        lambda s, layer: _final(s),
        reads=(_LOGITS,),
        writes=(Access(Buffer.TOKENS, ONE),),
        doc="each row's likeliest token; feeds it back and hands it to the host",
    )
)
