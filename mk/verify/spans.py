"""Which units of which buffer every descriptor touches, from the operations' own access lists, all at once.

A *version* of a buffer is what one layer leaves in it: the layer of the descriptor plus `Access.ahead`. To compare all
versions in one pass, unit u of version v is given the address `(v + 1) * room + u`; buffers private to an SM get one
address space an SM, so a write there serves only reads of the same SM.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mk.graph import resolve
from mk.isa import ISA, LOCAL_BUFFERS, Access, Buffer, Op, Word, Words
from mk.schedule.lower import Program
from mk.verify.errors import Ints, Names, VerifyError, unit_count


@dataclass(frozen=True)
class Touches:
    """Accesses of one buffer: descriptor, version, and units [lo, hi), int64 [n] each."""

    op: Op
    tasks: Ints
    version: Ints
    lo: Ints
    hi: Ints


@dataclass(frozen=True)
class AddressSpace:
    """Addresses of a buffer's units over all its versions (and SMs, where it is private to them)."""

    buffer: Buffer
    room: int
    versions: int
    names: Names

    def base(self, tasks: Ints, version: Ints) -> Ints:
        """Address of unit 0 as `tasks` see it in `version` (-1: what the previous step left)."""
        if self.buffer in LOCAL_BUFFERS:
            version = self.names.track[tasks] * self.versions + version
        return (version + 1) * self.room

    def unit(self, address: int) -> int:
        return address % self.room


def writes_tokens(words: Words) -> list[int]:
    """The descriptors that produce the step's tokens."""
    ops = [op.opcode for op in ISA if any(access.buffer == Buffer.TOKENS for access in op.writes)]
    return np.flatnonzero(np.isin(words[:, Word.OPCODE], ops)).tolist()


def gather(program: Program, names: Names) -> tuple[dict[Buffer, list[Touches]], dict[Buffer, list[Touches]]]:
    """All reads and all writes by buffer. Raises VerifyError("word") for a region outside its buffer."""
    reads: dict[Buffer, list[Touches]] = {}
    writes: dict[Buffer, list[Touches]] = {}
    for opcode in np.unique(program.words[:, Word.OPCODE]).tolist():
        tasks = np.flatnonzero(program.words[:, Word.OPCODE] == opcode)
        op = ISA.rows[opcode]
        for accesses, into in ((op.reads, reads), (op.writes, writes)):
            for access in accesses:
                for buffer, touches in _spread(program, names, op, access, tasks):
                    into.setdefault(buffer, []).append(touches)
    return reads, writes


def _spread(program: Program, names: Names, op: Op, access: Access, tasks: Ints) -> list[tuple[Buffer, Touches]]:
    words = program.words[tasks]
    buffers = resolve(access, words)
    lo, hi = (bound.astype(np.int64) for bound in access.span(program.shape, words))
    layer = words[:, Word.LAYER].astype(np.int64)
    version = layer + access.ahead if access.ahead >= 0 else np.full_like(layer, -1)
    parts = []
    for number in np.unique(buffers).tolist():
        if number < 0:
            raise VerifyError("word", f"{names.task(tasks[buffers == number][0])} names a buffer that does not exist")
        buffer, of = Buffer(number), buffers == number
        room = unit_count(program.shape, buffer)
        for k in np.flatnonzero(of & ((lo < 0) | (hi > room) | (lo > hi)))[:1]:
            raise VerifyError(
                "word",
                f"{names.task(tasks[k])} touches {buffer.name} units {lo[k]}..{hi[k] - 1}, outside its {room} units",
            )
        parts.append((buffer, Touches(op, tasks[of], version[of], lo[of], hi[of])))
    return parts
