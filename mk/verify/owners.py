"""Owners: what an SM keeps of its residual strips, it finds again.

With `own_rows` a strip's x and its two contributions stay in shared memory (`x`, `acc_attn`, `acc_ffn` of
csrc/shared.cuh), x for the whole step. They lie there by the strip's place in the descriptor at hand, not by its
number. So all descriptors of an SM that touch them, in every layer, must be for the very strips of its embedding; as a
strip is computed once a layer (`words`), an owner then has one descriptor of each operation there. That they stand in
the right order follows from the regions of X and ACC, which know strips by number. How many strips there is room for
is the kernel's to say (`Runtime.load`): the interpreter has room for all.
"""

from __future__ import annotations

import numpy as np

from mk.isa import ISA, NONE, Word
from mk.schedule.lower import Program
from mk.verify.errors import Names, VerifyError

KEEPING = ("embed", "o_proj", "moe_down_owned", "dense_down", "residual")
"""Operations that write or read what an owner keeps."""


def check_owners(program: Program, names: Names) -> None:
    """Raises VerifyError("owner") naming the task, its strips, and those that its SM keeps."""
    if not program.shape.own_rows:
        return
    words = program.words
    tasks = np.flatnonzero(np.isin(words[:, Word.OPCODE], [ISA.named(op).opcode for op in KEEPING]))
    track, strips = names.track[tasks], words[tasks][:, [Word.TILE, Word.TILES]]
    embeds = words[tasks, Word.OPCODE] == ISA.named("embed").opcode
    kept = np.full((program.tracks, 2), NONE)
    owners, first = np.unique(track[embeds], return_index=True)
    kept[owners] = strips[embeds][first]
    for at in np.flatnonzero((strips != kept[track]).any(axis=1))[:1]:
        sm = program.name_of(int(track[at]))
        raise VerifyError(
            "owner",
            f"{names.task(int(tasks[at]))} is for {_run(*strips[at].tolist())}, and {sm} keeps "
            f"{_run(*kept[track[at]].tolist())} of the residual, from its embedding on",
            hint="an SM owns strips side by side, and the same ones in every layer",
        )


def _run(strip: int, strips: int) -> str:
    if strips < 1:
        return "no strip"
    return f"strip {strip}" if strips == 1 else f"strips {strip}..{strip + strips - 1}"
