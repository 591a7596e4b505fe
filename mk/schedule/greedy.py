"""Cost-aware list scheduling: the order of a layer's waves, and tasks on the SM that would be done with them first.

The resource that waves compete for is memory: all SMs stream a wave together, at the bandwidth they share. A wave's
upward rank is what it takes from its start to the layer's end, along the longest chain of waves that wait for it. Waves
are taken one after the other: the one for which the stream stalls least, of equal ones that of the highest rank.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from mk.graph import LAYER_WAVES, StepShape, resolve
from mk.isa import Access, Buffer, Op, Word, Words
from mk.model.geometry import SLOT_BYTES
from mk.ring import RING_SLOTS
from mk.schedule.costs import Costs
from mk.schedule.placement import PHASES, RowOwner, SmIds
from mk.schedule.sm_map import SmMap

_EQUAL = 0.05  # microseconds: stalls that differ by less count as equal


@dataclass(frozen=True, slots=True)
class _Wave:
    """Microseconds. stream: of all SMs streaming together; work: of an SM's consumers; tail: from their end to the
    moment at which other SMs go on."""

    op: Op | None = None
    stream: float = 0.0
    work: float = 0.0
    tail: float = 0.0
    after: frozenset[str] = frozenset()


def slots_of(shape: StepShape, op: Op, tasks: Words, experts: float) -> float:
    """Ring slots that a wave's tasks stream together, with `experts` active ones; a split counts as full."""
    tiles = float(np.sum(tasks[:, Word.TILES].astype(np.float64) * tasks[:, Word.K_SLOTS]))
    if op.name in ("attention", "attn_drain"):
        window = shape.window(int(tasks[0, Word.LAYER]))
        keys = shape.bucket if window is None else min(shape.bucket, window)
        g = shape.geometry
        return shape.rows * g.kv_heads * keys * 2 * g.head_dim * 2 / SLOT_BYTES
    if tasks[0, Word.EXPERT_PITCH]:
        return experts * tiles / max(1, int(tasks[0, Word.RANKS]))
    return tiles if tasks[0, Word.STRIP_PITCH] else 0.0


def layer_waves(shape: StepShape, layer: int, costs: Costs, experts: float) -> dict[str, _Wave]:
    """Every wave of a sparse layer with its costs, and which others of the layer it waits for."""
    slot = SLOT_BYTES / (costs.memory_tb_s * 1e6)  # microseconds, of all SMs together
    waves: dict[str, _Wave] = {}
    writers: dict[int, list[str]] = {}
    reads: dict[str, set[int]] = {}
    for place, name in enumerate(LAYER_WAVES):
        op, tasks = shape.wave_tasks(name, layer)
        if op is None:
            # nothing to run: it stands behind the wave that it follows by default
            waves[name] = _Wave(after=frozenset(LAYER_WAVES[place - 1 : place]))
            continue
        own, slots = costs.of(op.name), slots_of(shape, op, tasks, experts)
        an_sm = -(-len(tasks) // shape.n_sm) if op.aside else 1  # others close as they go, the last one after its tile
        work = own.open + slots / shape.n_sm * own.slot if slots else 0.0
        closing = own.tile + an_sm * (own.close + own.row * shape.rows) + (0.0 if slots else own.open)
        waves[name] = _Wave(op, slot * slots, work, closing + costs.handoff)
        reads[name] = {_buffer(a, tasks) for a in op.reads if a.ahead == 0 and a.buffer != "x"}
        if name == "rmsnorm":
            reads[name] |= {Buffer.ACC_FFN, Buffer.FFN_OUT}  # whichever the plan has
        for access in op.writes:
            if access.ahead == 0:
                writers.setdefault(_buffer(access, tasks), []).append(name)
    for name, buffers in reads.items():
        after = frozenset(w for buffer in buffers for w in writers.get(buffer, ()) if w != name)
        waves[name] = dataclasses.replace(waves[name], after=after)
    return waves


def _buffer(access: Access, tasks: Words) -> int:
    return int(resolve(access, tasks)[0])


def upward_ranks(waves: dict[str, _Wave]) -> dict[str, float]:
    """Microseconds from each wave's start to the layer's end."""
    ranks: dict[str, float] = {}

    def rank(name: str) -> float:
        if name not in ranks:
            later = [rank(other) for other, wave in waves.items() if name in wave.after]
            own = max(waves[name].stream, waves[name].work) + waves[name].tail
            ranks[name] = own + max(later, default=0.0)
        return ranks[name]

    for name in waves:
        rank(name)
    return ranks


def greedy_order(shape: StepShape, costs: Costs, experts: float) -> tuple[str, ...]:
    """The order of a layer's waves. Of a model without experts, the default one."""
    sparse = shape.geometry.sparse_layers
    if not sparse:
        return LAYER_WAVES
    waves = layer_waves(shape, sparse[len(sparse) // 2], costs, experts)
    ranks = upward_ranks(waves)
    ahead = RING_SLOTS * shape.n_sm * SLOT_BYTES / (costs.memory_tb_s * 1e6)  # that the rings hold, as time
    order: list[str] = []
    done: dict[str, float] = {}  # when those who wait for a wave go on
    streamed = consumed = 0.0  # when the producers, and the consumers, are through with the waves so far

    def ends(name: str) -> tuple[float, float]:
        """The same with this wave next. Entries open in list order: one that the storer alone runs holds up all."""
        wave = waves[name]
        if wave.op is None or wave.op.aside:
            return streamed, consumed
        ready = max((done[other] for other in wave.after), default=0.0)
        known = max((done[other] for other in wave.after if _routes(waves[other].op)), default=0.0)
        begin = max(consumed, ready)
        stream = max(streamed, known) + wave.stream if wave.stream else streamed
        stream = max(stream, begin + wave.stream - ahead)
        return stream, max(begin + wave.work, stream if wave.stream else 0.0)

    def wasted(name: str) -> float:
        """Of the consumers' time and of memory's, whichever is the scarcer for this wave."""
        return ends(name)[1] - consumed - max(waves[name].stream, waves[name].work)

    while len(order) < len(waves):
        free = [name for name in waves if name not in done and waves[name].after <= done.keys()]
        least = min(map(wasted, free))
        chosen = max((name for name in free if wasted(name) <= least + _EQUAL), key=ranks.__getitem__)
        streamed, consumed = ends(chosen)
        ready = max((done[other] for other in waves[chosen].after), default=0.0)
        done[chosen] = max(consumed, ready) + waves[chosen].tail
        order.append(chosen)
    return tuple(order)


def _routes(op: Op | None) -> bool:
    return op is not None and any(access.buffer == Buffer.ROUTE for access in op.writes)


class Earliest(RowOwner):
    """Row ownership; every other task goes to the SM that would be done with it first.

    An SM's load since the last hand-off counts what its roles spend on a task, in microseconds: its share of memory's
    time or its consumers', whichever is longer, and the closing of an entry that begins there. With a map of the card
    a task also ends later where the others learn of it later.
    """

    def __init__(self, shape: StepShape, costs: Costs, sm_map: SmMap | None = None) -> None:
        super().__init__(shape, None if sm_map is None else sm_map.ranked())
        self.shape, self.costs = shape, costs
        self.busy = np.zeros(self.n_sm)
        means = np.zeros(self.n_sm) if sm_map is None else sm_map.mean_ns() / 1e3
        self.handoff = means - means.mean()  # microseconds beyond the mean

    def place(self, op: Op, wave: str, layer: int, tasks: Words) -> SmIds:
        if wave in self.OWNED or op.everywhere or (self.ranked is not None and len(tasks) < self.n_sm):
            return super().place(op, wave, layer, tasks)
        phase = (PHASES.get(wave, wave), layer)
        if phase != self.phase:
            self.phase, self.busy = phase, np.zeros(self.n_sm)
        own = self.costs.of(op.name)
        slots = slots_of(self.shape, op, tasks, 0.0) / len(tasks)
        share = SLOT_BYTES * self.n_sm / (self.costs.memory_tb_s * 1e6)
        each = max(slots * max(share, own.slot) + own.tile, 1e-3)
        entry = self.costs.next_entry + own.open + own.close
        order = (self.start + np.arange(self.n_sm)) % self.n_sm
        counts = np.zeros(self.n_sm, np.int64)
        for _ in range(len(tasks)):
            ends = self.busy[order] + (counts[order] + 1) * each + entry + self.handoff[order]
            counts[order[int(np.argmin(np.round(ends, 6)))]] += 1
        self.busy += counts * each + (counts > 0) * entry
        self.start = int(self.start + len(tasks)) % self.n_sm
        if op.name == "attention":  # neighbours in the list are alike, and late splits may be empty: deal them out
            turns = [sm for turn in range(int(counts.max())) for sm in order if counts[sm] > turn]
            return np.array(turns, np.int64)
        return np.repeat(order, counts[order])
