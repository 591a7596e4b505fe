"""What the verifier says: one line that names the task, the counter and the buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mk.errors import MkError
from mk.graph import HEAD_PARTS, QUEUE_KINDS
from mk.isa import ISA, NONE, Buffer, Word

if TYPE_CHECKING:
    from mk.graph import StepShape
    from mk.schedule.lower import Program

Ints = npt.NDArray[np.int64]


class VerifyError(MkError):
    """A schedule that must not run. `kind` is the check that refused it, one of `KINDS`."""

    KINDS = ("word", "owner", "arrivals", "ring", "deadlock", "step", "read", "overwrite", "overlap", "queue")

    def __init__(self, kind: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.kind = kind


class Names:
    """How messages call the parts of a program, and where a descriptor stands in its track.

    track, index: int64 [n], the track of each descriptor and its place in it.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.track: Ints = program.track_of.astype(np.int64)
        self.index: Ints = np.arange(len(program.words)) - program.offsets[self.track]

    def task(self, task: int) -> str:
        """`SM 3 task 17 (moe_down.5)`: the SM (`SM 3 aside`), the place in its track, the operation and the layer."""
        word = self.program.words[task]
        op = ISA.rows.get(int(word[Word.OPCODE]))
        name = op.name if op else f"opcode {int(word[Word.OPCODE])}"
        return f"{self.program.name_of(int(self.track[task]))} task {self.index[task]} ({name}.{int(word[Word.LAYER])})"

    def at(self, track: int, index: int) -> int:
        """The descriptor at place `index` of a track."""
        return int(self.program.offsets[track]) + index

    def counter(self, counter: int) -> str:
        return f"counter {self.program.counters[counter].name}"

    def announced(self, task: int) -> str:
        """The counter that tells others that `task` is done: the next one its track signals."""
        end = self.program.offsets[self.track[task] + 1]
        signals = self.program.words[task:end, Word.SIGNAL]
        later = signals[signals != NONE]
        return self.counter(int(later[0])) if len(later) else "no counter"

    def waits(self, task: int) -> str:
        """The counters that `task`, or the last task before it on its track that waits, waits for."""
        start = self.program.offsets[self.track[task]]
        waits = self.program.words[start : task + 1][:, [Word.WAIT0, Word.WAIT1]]
        waiting = np.flatnonzero((waits != NONE).any(axis=1))
        if not len(waiting):
            return "no counter"
        return " and ".join(self.counter(int(c)) for c in waits[waiting[-1]] if c != NONE)

    def region(self, buffer: Buffer, lo: int, hi: int) -> str:
        """Units [lo, hi) of a buffer in the words of the buffer's own coordinates."""
        return f"{buffer.name} {describe(self.program.shape, buffer, lo, hi)}".rstrip()


def unit_count(shape: StepShape, buffer: Buffer) -> int:
    """Units a buffer has room for: the end of every legal region."""
    g = shape.geometry
    experts = max(g.experts, 1)
    router = shape.layout.entry("router", g.sparse_layers[0]) if g.sparse_layers else None
    return {
        Buffer.QKV: -(-g.qkv_rows // 16),
        Buffer.PARTIAL: shape.rows * g.kv_heads * shape.split_stride,
        Buffer.ATTN_OUT: shape.rows * g.q_heads * HEAD_PARTS,
        Buffer.ROUTER_PART: router.slots if router else 0,
        Buffer.ROUTE: 1,
        Buffer.HIDDEN: experts * shape.hidden_strips,
        Buffer.FFN_PART: experts * shape.strips,
        Buffer.LOGITS: shape.layout.entry("head").strips,
        Buffer.TOKENS: 1,
        Buffer.HISTOGRAM: shape.slices,
        Buffer.SHORTLIST: shape.slices,
        Buffer.QUEUES: g.layers * len(QUEUE_KINDS),
    }.get(buffer, shape.strips)


def describe(shape: StepShape, buffer: Buffer, lo: int, hi: int) -> str:
    """Units [lo, hi) in the coordinates of `Buffer`'s comments; a range over several rows or experts is cut to one."""

    def span(noun: str, first: int, end: int) -> str:
        return f"{noun} {first}" if end - first == 1 else f"{noun}s {first}..{end - 1}"

    if buffer in (Buffer.ROUTE, Buffer.TOKENS):
        return ""
    if buffer == Buffer.PARTIAL:
        head, split = divmod(lo, shape.split_stride)
        row, kv_head = divmod(head, shape.geometry.kv_heads)
        return f"row {row} KV head {kv_head} {span('split', split, min(split + hi - lo, shape.split_stride))}"
    if buffer == Buffer.ATTN_OUT:
        unit, part = divmod(lo, HEAD_PARTS)
        row, head = divmod(unit, shape.geometry.q_heads)
        return f"row {row} head {head} {span('part', part, min(part + hi - lo, HEAD_PARTS))}"
    if buffer in (Buffer.HIDDEN, Buffer.FFN_PART):
        pitch = shape.hidden_strips if buffer == Buffer.HIDDEN else shape.strips
        expert, strip = divmod(lo, pitch)
        return f"expert {expert} {span('strip', strip, min(strip + hi - lo, pitch))}"
    nouns = {Buffer.ROUTER_PART: "slot", Buffer.QUEUES: "queue", Buffer.HISTOGRAM: "slice", Buffer.SHORTLIST: "slice"}
    return span(nouns.get(buffer, "strip"), lo, hi)
