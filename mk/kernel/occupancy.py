"""When the SMs of a step are at work, and how long they are not, wave by wave of one layer.

An SM is at work while its consumers are at an entry that they were let into (the wait for its bytes is memory's time,
not idleness), while its storer or its track aside is at one, and while its producer streams for a later one; not while
that waits for room in the ring. Between launches nobody is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mk.errors import MkError
from mk.isa import ISA, LOCAL_BUFFERS
from mk.kernel.trace import StepTrace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
RESIDUAL = "rmsnorm"  # the wave that ends a layer
PRIVATE = [op.opcode for op in ISA if op.writes and all(access.buffer in LOCAL_BUFFERS for access in op.writes)]


@dataclass(frozen=True)
class Spans:
    """Stretches of work, [n]: SM, opcode, layer, task of the step, and moments in microseconds. stores: of a role that
    ends its task."""

    sm: Ints
    opcode: Ints
    layer: Ints
    task: Ints
    begin: Floats
    end: Floats
    stores: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, trace: StepTrace) -> Spans:
        """All of a step."""
        us, beside = trace.us, trace.aside
        opened = np.where(np.isnan(us["opened"]), us["taken"], us["opened"])
        beside_at = {name: beside[name].astype(np.int64) for name in ("sm", "opcode", "layer", "task")}
        places = {"sm": trace.sm, "opcode": trace.opcode, "layer": trace.layer, "task": trace.task}
        at = {name: np.concatenate([place, place, place, beside_at[name]]) for name, place in places.items()}
        begin = np.concatenate([opened, us["stream"], us["storing"], beside["begun"]])
        end = np.concatenate([us["done"], us["streamed"] - us["ring_full"], us["signalled"], beside["ended"]])
        stores = np.arange(len(begin)) >= 2 * len(opened)
        spans = cls(at["sm"], at["opcode"], at["layer"], at["task"], begin, end, stores)
        return spans.where(end > begin)  # which is also not so where a role never came

    def where(self, kept: npt.NDArray[np.bool_]) -> Spans:
        """Some of them."""
        return Spans(**{field.name: getattr(self, field.name)[kept] for field in dataclasses.fields(self)})

    def waves(self) -> npt.NDArray[np.str_]:
        """The wave of each, [n]."""
        names = {op.opcode: op.wave for op in ISA}
        return np.array([names.get(code, "other") for code in self.opcode.tolist()], dtype=np.str_)

    def within(self, begin: float, end: float) -> Spans:
        """Those that reach into a window, cut to it, with moments since its begin."""
        inside = self.where((self.begin < end) & (self.end > begin))
        low, high = (np.clip(moments, begin, end) - begin for moments in (inside.begin, inside.end))
        return dataclasses.replace(inside, begin=low, end=high)


def ends_of_layer(spans: Spans, layer: int) -> tuple[float, dict[str, float]]:
    """The moment at which the layer before is complete, and those at which each wave of the layer is.

    Launches make what is private to an SM again: the first time counts. Raises MkError for a layer that the trace
    lacks, or has nothing before.
    """
    waves, stored = spans.waves(), spans.stores
    before = (spans.layer == layer - 1) & (waves == RESIDUAL) & stored
    inside = (spans.layer == layer) & stored
    if not before.any() or not (inside & (waves == RESIDUAL)).any():
        raise MkError(f"the trace has no layer {layer} with one before it")
    again = np.isin(spans.opcode, PRIVATE)
    order = np.argsort(spans.end, kind="stable")
    _, earliest = np.unique(spans.task[order], return_index=True)
    first = np.zeros(len(order), bool)
    first[order[earliest]] = True
    counts = inside & (first | ~again)
    ends = {str(wave): float(spans.end[counts & (waves == wave)].max()) for wave in np.unique(waves[counts])}
    return float(spans.end[before].max()), ends


def busy(spans: Spans, sms: Sequence[int]) -> list[list[list[float]]]:
    """Of each SM the stretches [begin, end] in which it is at work, whatever at, in order and apart."""
    found: list[list[list[float]]] = []
    for sm in sms:
        own = np.flatnonzero(spans.sm == sm)
        joined: list[list[float]] = []
        for place in own[np.argsort(spans.begin[own], kind="stable")].tolist():
            begin, end = float(spans.begin[place]), float(spans.end[place])
            if joined and begin <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([begin, end])
        found.append(joined)
    return found


def idle_by_wave(at_work: Sequence[Sequence[Sequence[float]]], wave_ends: Mapping[str, float]) -> dict[str, float]:
    """Microseconds that an SM idles, mean over SMs, until each wave is complete, since the one completed before it.

    at_work: as `busy` gives it, from the layer's begin at 0. wave_ends: when each wave is complete; the last ends the
    layer.
    """
    found, since = {}, 0.0
    for wave, end in sorted(wave_ends.items(), key=lambda item: item[1]):
        end = max(end, since)
        worked = sum(max(0.0, min(b, end) - max(a, since)) for sm in at_work for a, b in sm)
        found[wave] = max(0.0, end - since - worked / len(at_work))  # sums may be off in the last digit
        since = end
    return found
