"""The buffers of a step as arrays of units, in the interpreter's memory, and which units a program writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mk.graph import HEAD_PARTS
from mk.interpreter.memory import Floats, Memory
from mk.isa import LOCAL_BUFFERS, Buffer
from mk.model.geometry import ROWS
from mk.schedule.lower import Program
from mk.verify.errors import Names, unit_count
from mk.verify.spans import gather

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

HIDDEN_COLUMNS = ROWS // 2  # of a gate/up strip


@dataclass(frozen=True, slots=True)
class Field:
    """One kind of number in a buffer. values: a view of the memory whose first `units` axes are a unit's coordinates,
    in the order in which units are counted. rows: the axis of the batch rows."""

    name: str
    values: Floats
    units: int
    rows: int

    def mask(self, units: Mask, active: Rows) -> Mask:
        """Elements of `units` [n] that belong to rows `active`: bool, shaped as `values`."""
        shape = self.values.shape
        chosen = units.reshape(shape[: self.units]).reshape(*shape[: self.units], *[1] * (len(shape) - self.units))
        row = np.isin(np.arange(shape[self.rows]), active)
        row = row.reshape([-1 if axis == self.rows else 1 for axis in range(len(shape))])
        return np.broadcast_to(chosen & row, shape)


def fields(memory: Memory, buffer: Buffer) -> list[Field]:
    """What a buffer that SMs share holds. Its padding, and buffers private to an SM, have no fields."""
    s, g = memory.shape, memory.shape.geometry

    def strips(array: Floats, width: int = ROWS) -> Floats:
        """[..., rows, strips * width] as [..., strips, rows, width]."""
        return np.moveaxis(array.reshape(*array.shape[:-1], -1, width), -2, -3)

    if buffer in (Buffer.X0, Buffer.X1):
        which = buffer - Buffer.X0
        x = Field("x", strips(memory.x[which, :, : g.hidden]), 1, 1)
        return [x, Field("sum of squares", memory.x_squares[which], 1, 1)]
    if buffer == Buffer.QKV:
        return [Field("q, k, v", memory.qkv.transpose(1, 0, 2), 1, 1)]
    if buffer == Buffer.PARTIAL:
        tops, sums, outs = memory.split_max, memory.split_sum, memory.split_out
        moved = [Field(n, np.moveaxis(a, 3, 2), 3, 0) for n, a in (("max", tops), ("sum", sums), ("o", outs))]
        return moved
    if buffer == Buffer.ATTN_OUT:
        heads = memory.attn_out[:, : g.q_width].reshape(s.rows, g.q_heads, HEAD_PARTS, -1)
        return [Field("heads", heads, 3, 0)]
    if buffer == Buffer.ROUTER_PART:
        return [Field("logits of a k slot", memory.router_part, 2, 2)]
    if buffer == Buffer.HIDDEN:
        return [Field("hidden", strips(memory.hidden[..., : s.hidden_strips * HIDDEN_COLUMNS], HIDDEN_COLUMNS), 2, 2)]
    if buffer == Buffer.FFN_PART:
        return [Field("an expert's", strips(memory.ffn_part), 2, 2)]
    if buffer == Buffer.OPROJ_OUT:
        return [Field("attention's", strips(memory.oproj_out), 1, 1)]
    if buffer == Buffer.FFN_OUT:
        return [Field("the FFN's", strips(memory.ffn_out), 1, 1)]
    if buffer == Buffer.LOGITS:
        return [Field("logits", strips(memory.logits), 1, 1)]
    return []


def written(program: Program) -> dict[Buffer, Mask]:
    """Units that the tasks of a program may write, bool [units] a buffer, of buffers that SMs share.

    A phase counts with all it could touch; which experts it did touch is for the memory to show.
    """
    found: dict[Buffer, Mask] = {}
    for buffer, writes in gather(program, Names(program))[1].items():
        if buffer in LOCAL_BUFFERS:
            continue
        units = np.zeros(unit_count(program.shape, buffer) + 1, np.int64)
        for touches in writes:
            np.add.at(units, touches.lo, 1)
            np.add.at(units, touches.hi, -1)
        found[buffer] = np.cumsum(units)[:-1] > 0
    return found
