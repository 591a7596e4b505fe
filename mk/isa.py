"""The descriptor format: what one task looks like to the verifier, the interpreter and the CUDA kernel.

A decode step is a list of *descriptors* for each SM. A descriptor is 32 int32 words, and this file is the only place
that says what each word means; the C header the kernel is built with is generated from it (`c_header`).

Rules that every executor keeps:

* An SM runs two *tracks*, lists of descriptors: its main one, and one *aside* for operations that need neither the
  weight ring nor buffers private to the SM (`Op.aside`). Each is run strictly in order; between the two, as between
  SMs, only counters order anything. Weights may be streamed ahead of the tasks that use them; nothing else may.
* A task first waits (up to two counters), then reads, then writes, then signals (at most one counter). Its signal
  releases everything this track wrote before it, not only this task's own writes.
* Counters only grow. A wait is reached when `(int32)(value - target) >= 0` with
  `target = epoch * WAIT*_STEP + WAIT*_COUNT`, where `epoch` counts steps since the counters were cleared and
  `WAIT*_STEP` is what the counter gains in a step. So nothing is zeroed between steps and wrap-around is harmless.
* A *phase* descriptor stands for tiles known only at run time (which experts are active, how long a context is). It
  signals once, after its last tile, with a constant value, also when it had no tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mk.graph import StepShape

Words = npt.NDArray[np.int32]

DESCRIPTOR_WORDS = 32
NONE = -1  # "no counter", "no queue"


class Word(IntEnum):
    """Word offsets in a descriptor. Unused words are 0, unused counters and queues are `NONE`."""

    OPCODE = 0
    LAYER = 1
    WAVE = 2  # index of the named wave, for traces and messages
    ROWS = 3  # built batch size: rows of every activation buffer
    TILE = 4  # first 16-row strip
    TILES = 5  # consecutive strips
    K_SLOT = 6  # first 256-wide k slot inside each strip
    K_SLOTS = 7  # k slots taken from each strip
    WEIGHT = 8  # weight slot (8 KB units) of strip 0, k slot 0; of expert 0 for a phase
    STRIP_PITCH = 9  # slots from one strip to the next
    EXPERT_PITCH = 10  # slots from one expert's matrix to the next
    ROW = 11  # batch row
    HEAD = 12  # KV head (attention) or query head (combine)
    SPLIT = 13  # attention split
    SRC = 14  # buffer read (second operand, where an operation has a choice)
    DST = 15  # buffer written
    WAIT0 = 16
    WAIT0_COUNT = 17
    WAIT0_STEP = 18
    WAIT1 = 19
    WAIT1_COUNT = 20
    WAIT1_STEP = 21
    SIGNAL = 22
    SIGNAL_VALUE = 23
    FLAGS = 24
    RANK = 25  # this SM's place among the RANKS that share a phase
    RANKS = 26
    QUEUE = 27  # ticket queue of a claimer
    CLAIM_AHEAD = 28  # tickets a claimer may hold before the consumers need them, 1 to ENTRIES
    TASK = 29  # ordinal in the flattened step, before placement
    RESERVED0 = 30
    RESERVED1 = 31


class Flag(IntFlag):
    """Bits of `Word.FLAGS`."""

    SLIDING = 1  # attention: this layer sees a window
    ROPE = 2  # qkv: this layer rotates q and k
    PUBLISH = 4  # top-k: this SM writes the ids to the trace the host reads
    PART = 16  # residual in a part of a step: x comes from memory, and the sums that it adds are left in memory too


class Buffer(IntEnum):
    """What tasks read and write. Each buffer is an array of *units*; regions are unit ranges (see `mk/graph/`).

    `ACC_*` and `ROUTE` are private to an SM: they never pass between SMs.
    """

    X0 = 0  # residual of even layers, bf16 [rows, hidden], and its partial sums of squares; unit = strip
    X1 = 1  # the same for odd layers
    QKV = 2  # q and this token's k and v after RoPE; unit = strip of the fused projection
    PARTIAL = 3  # attention split results (max, sum, O); unit = (row, kv head, split)
    ATTN_OUT = 4  # merged heads, bf16 [rows, q_width]; unit = (row, query head, 32 dims)
    ROUTER_PART = 5  # partial router logits; unit = (k slot, strip)
    ROUTE = 6  # ids, weights and expert mask of this layer; one unit, private to the SM
    HIDDEN = 7  # silu(gate)*up, bf16 [experts, rows, ffn]; unit = (expert, strip)
    OPROJ_OUT = 8  # attention's contribution, fp32 [rows, hidden]; unit = strip
    FFN_PART = 9  # an expert's contribution, fp32 [experts, rows, hidden]; unit = (expert, strip)
    FFN_OUT = 10  # the FFN's contribution, fp32 [rows, hidden]; unit = strip
    ACC_ATTN = 11  # OPROJ_OUT kept by the strip's owner; unit = strip
    ACC_FFN = 12  # FFN_OUT kept by the strip's owner; unit = strip
    LOGITS = 13  # fp32 [rows, vocab] and each task's best candidate; unit = strip of the head
    TOKENS = 14  # the step's tokens, read by the next step's embedding; one unit
    QUEUES = 15  # ticket heads, two sets by step parity; unit = queue
    HISTOGRAM = 16  # sampling: tokens and mass of each bin of a row's logits; unit = what a vocabulary slice adds
    SHORTLIST = 17  # sampling: what a slice of the vocabulary offers to be drawn; unit = slice


LOCAL_BUFFERS = frozenset({Buffer.ROUTE, Buffer.ACC_ATTN, Buffer.ACC_FFN})

Span = Callable[["StepShape", Words], tuple[Words, Words]]
"""Vectorised over descriptors [n, 32]: the first and one-past-last unit each of them touches."""


@dataclass(frozen=True)
class Access:
    """One region an operation touches.

    buffer: the buffer, or a function of the descriptors' layer-dependent choice (`"x"`: X0/X1 by layer parity;
        `"src"`/`"dst"`: taken from the descriptor word).
    span: unit ranges, vectorised over descriptors. For a phase it is the *widest* range; what a given routing really
        touches is in `mk/verify/routing.py`.
    ahead: version the access belongs to, counted in layers from the descriptor's own (a residual task writes the next
        layer's x: 1). `None` for tokens: an embedding reads what the previous step sampled.
    """

    buffer: Buffer | str
    span: Span
    ahead: int = 0


@dataclass(frozen=True)
class Op:
    """One row of the instruction set.

    wave: the named wave its tasks belong to.
    tiles: for one layer, the tasks as descriptors [n, 32] with everything but waits, signal and placement filled in.
    reads, writes: the regions of a task.
    phase: tiles are found at run time.
    everywhere: task i belongs to SM i (a phase shared by all SMs, or work each SM repeats for itself).
    aside: its tasks stand in the track beside the SM's main one, so that their waits hold up nothing else there.
    """

    opcode: int
    name: str
    wave: str
    tiles: Callable[[StepShape, int], Words]
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    phase: bool = False
    everywhere: bool = False
    aside: bool = False
    doc: str = ""


@dataclass
class InstructionSet:
    """The registry of operations: opcode -> row."""

    rows: dict[int, Op] = field(default_factory=dict)

    def add(self, op: Op) -> Op:
        """Register a row; opcode and name must be new."""
        if op.opcode in self.rows or any(op.name == other.name for other in self.rows.values()):
            raise ValueError(f"opcode {op.opcode} or operation name {op.name!r} is already taken")
        if op.aside and any(access.buffer in LOCAL_BUFFERS for access in (*op.reads, *op.writes)):
            raise ValueError(f"operation {op.name!r} is aside and touches a buffer that only the main track sees")
        self.rows[op.opcode] = op
        return op

    def remove(self, op: Op) -> None:
        del self.rows[op.opcode]

    def named(self, name: str) -> Op:
        for op in self.rows.values():
            if op.name == name:
                return op
        raise KeyError(name)

    def of_wave(self, wave: str) -> list[Op]:
        return [op for op in self.rows.values() if op.wave == wave]

    def __iter__(self) -> Iterator[Op]:
        return iter(sorted(self.rows.values(), key=lambda op: op.opcode))


ISA = InstructionSet()


def c_header(isa: InstructionSet = ISA) -> str:
    """The C++ header of opcodes, word offsets, flags and buffer ids that the kernel includes."""

    def enum(title: str, prefix: str, items: Iterable[tuple[str, int]]) -> str:
        body = "\n".join(f"  {prefix}{name.upper()} = {value}," for name, value in items)
        return f"enum {title} : int {{\n{body}\n}};\n"

    parts = [
        "// Generated from mk/isa.py by mk.isa.c_header(); do not edit.",
        "#pragma once\n",
        f"constexpr int DESCRIPTOR_WORDS = {DESCRIPTOR_WORDS};",
        f"constexpr int NONE = {NONE};\n",
        enum("Opcode", "OP_", [("nop", 0), *((op.name, op.opcode) for op in isa)]),
        enum("Word", "W_", [(word.name, int(word)) for word in Word]),
        enum("Flag", "FLAG_", [(str(flag.name), int(flag)) for flag in Flag]),
        enum("Buffer", "BUF_", [(buffer.name, int(buffer)) for buffer in Buffer]),
    ]
    return "\n".join(parts)
