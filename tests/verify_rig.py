"""Lowered steps to spoil, and what the verifier says of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mk.graph import LAYER_WAVES, StepShape
from mk.isa import ISA, NONE, Word
from mk.model.geometry import Geometry
from mk.schedule.lower import Program, lower
from mk.verify import VerifyError, verify
from tests.tiny_model import tiny_geometry

ORDER = LAYER_WAVES
BUCKET = 300


def shape(
    n_sm: int = 4, rows: int = 2, own_rows: bool = False, claimers: int = 0, geometry: Geometry | None = None
) -> StepShape:
    return StepShape(
        geometry or tiny_geometry(),
        rows,
        BUCKET,
        n_sm,
        own_rows=own_rows,
        attention_claimers=claimers,
        moe_claimers=claimers,
    )


def lowered(placement: str = "round_robin", claimers: int = 0, n_sm: int = 4, **geometry: object) -> Program:
    plan = shape(n_sm, own_rows=placement == "row_owner", claimers=claimers, geometry=tiny_geometry(**geometry))
    return lower(plan, ORDER, placement)


def find(program: Program, op: str, layer: int, word: Word | None = None) -> int:
    """The first descriptor of an operation and layer; `word`: the first in which that counter is used."""
    words = program.words
    wanted = (words[:, Word.OPCODE] == ISA.named(op).opcode) & (words[:, Word.LAYER] == layer)
    if word is not None:
        wanted &= words[:, word] != NONE
    return int(np.flatnonzero(wanted)[0])


def edited(program: Program, at: int, **words: int) -> Program:
    changed = program.words.copy()
    for name, value in words.items():
        changed[at, Word[name]] = value
    return dataclasses.replace(program, words=changed)


def refusal(program: Program, kind: str) -> str:
    with pytest.raises(VerifyError) as refused:
        verify(program)
    assert refused.value.kind == kind, str(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def place(program: Program, at: int) -> str:
    """`SM 3 task 17` or `SM 3 aside task 1`, computed from the offsets alone."""
    track, n_sm = int(np.searchsorted(program.offsets, at, "right")) - 1, program.shape.n_sm
    name = f"SM {track} task" if track < n_sm else f"SM {track - n_sm} aside task"
    return f"{name} {at - program.offsets[track]}"
