"""How prompts are cut and packed: pieces of sequences into chunks, and the tiles of neighbouring tokens of a chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens for the positions start.. of a slot, which holds the `start` tokens before them."""

    slot: int
    tokens: Sequence[int]
    start: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens lo .. hi - 1 (positions) of one prompt, neighbouring rows of a chunk."""

    prompt: int  # index among the prompts
    slot: int
    lo: int
    hi: int
    last: bool  # whether the prompt ends with it


def cut(prompts: Sequence[Prompt], chunk: int) -> Iterator[list[Piece]]:
    """The chunks, of `chunk` tokens but for the last one: prompts in their order, one after the other."""
    pieces: list[Piece] = []
    room = chunk
    for index, prompt in enumerate(prompts):
        lo = prompt.start
        while lo < prompt.end:
            hi = min(prompt.end, lo + room)
            pieces.append(Piece(index, prompt.slot, lo, hi, hi == prompt.end))
            room -= hi - lo
            lo = hi
            if room == 0:
                yield pieces
                pieces, room = [], chunk
    if pieces:
        yield pieces


def token_tiles(pieces: Sequence[Piece], tokens: int) -> Ints:
    """int32 [tiles, 4]: (row in the chunk, tokens, slot, first position), cut at positions that `tokens` divides.

    So a tile lies in one page, and in one key block of attention. The tiles that see the most keys come first: what is
    left to the end is short.
    """
    tiles: list[tuple[int, int, int, int]] = []
    row = 0
    for piece in pieces:
        at = piece.lo
        while at < piece.hi:
            end = min(piece.hi, at // tokens * tokens + tokens)
            tiles.append((row + at - piece.lo, end - at, piece.slot, at))
            at = end
        row += piece.hi - piece.lo
    tiles.sort(key=lambda tile: -tile[3])
    return np.array(tiles, np.int32)
