"""Cutting prompts into chunks and chunks into tiles: every token once, in order, and no tile across a page."""

from __future__ import annotations

import numpy as np
import pytest

from mk.kv import PAGE
from prefill.chunks import Piece, Prompt, cut, token_tiles

PROMPTS = [Prompt(3, range(100)), Prompt(0, range(1), start=7), Prompt(5, range(333), start=4095), Prompt(1, range(64))]


@pytest.mark.parametrize("chunk", [1, 64, 100, 101, 5000])
def test_every_token_is_in_one_chunk_and_chunks_are_full(chunk: int) -> None:
    chunks = list(cut(PROMPTS, chunk))
    sizes = [sum(piece.hi - piece.lo for piece in pieces) for pieces in chunks]
    assert all(size == chunk for size in sizes[:-1]) and 0 < sizes[-1] <= chunk
    for index, prompt in enumerate(PROMPTS):
        mine = [piece for pieces in chunks for piece in pieces if piece.prompt == index]
        covered = [position for piece in mine for position in range(piece.lo, piece.hi)]
        assert covered == list(range(prompt.start, prompt.end))
        assert [piece.last for piece in mine] == [False] * (len(mine) - 1) + [True]
        assert {piece.slot for piece in mine} == {prompt.slot}
    for pieces in chunks:
        assert len({piece.slot for piece in pieces}) == len(pieces)


@pytest.mark.parametrize("tokens", [8, 16, 64])
def test_tiles_cover_a_chunk_and_end_where_positions_are_multiples(tokens: int) -> None:
    pieces = [Piece(0, 2, 0, 5, True), Piece(1, 0, 61, 200, False), Piece(2, 1, 64, 65, True)]
    tiles = token_tiles(pieces, tokens)
    place = {}  # row in the chunk -> (slot, position)
    for row, count, slot, first in tiles.tolist():
        assert 1 <= count <= tokens and first // tokens == (first + count - 1) // tokens
        assert first // PAGE == (first + count - 1) // PAGE
        for i in range(count):
            assert row + i not in place
            place[row + i] = (slot, first + i)
    expected = [(piece.slot, at) for piece in pieces for at in range(piece.lo, piece.hi)]
    assert [place[row] for row in range(len(expected))] == expected and len(place) == len(expected)
    assert (np.diff(tiles[:, 3]) <= 0).all()  # the longest first
