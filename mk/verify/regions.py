"""Regions: every read finds its version written before it, and nothing is overwritten before its last use.

Within one step (`mk/verify/steps.py` reduces several steps to one):

* coverage: each unit that is read was written in the same version;
* order: by each task whose tile overlaps the read, in program order or over a counter path;
* one writer: two tasks never write the same unit of the same version. The claimers of one queue count as one writer
  of everything they may draw, for a ticket is drawn once; a read of it needs all of them;
* reuse: every access of a version of a buffer happens before every writer of the buffer's next version. This looks at
  whole buffers, so it may ask for more than the units at stake: never for less.

A part of a step also reads what the tasks before it left in memory (`Earlier`): that counts as written, and as long
done. What they left in their SM is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mk.isa import LOCAL_BUFFERS, NONE, Buffer, Word
from mk.schedule.lower import Program
from mk.verify.clocks import Clocks
from mk.verify.errors import Ints, Names, VerifyError, unit_count
from mk.verify.routing import ROUTED, Family, Pieces
from mk.verify.spans import AddressSpace, Touches, gather

CHUNK = 1 << 15  # readers compared at a time: 264 clock entries each on 132 SMs


@dataclass(frozen=True)
class Regions:
    """Sets of addresses that tasks touch: `tasks` and the `region` of each [n]; `owner`, `lo`, `hi` [m], intervals and
    the region each is part of."""

    tasks: Ints
    region: Ints
    owner: Ints
    lo: Ints
    hi: Ints

    @property
    def count(self) -> int:
        return int(self.region.max(initial=-1)) + 1

    @classmethod
    def join(cls, parts: list[Regions]) -> Regions:
        shift = np.cumsum([0, *(part.count for part in parts)])[:-1]
        return cls(
            np.concatenate([part.tasks for part in parts]),
            np.concatenate([part.region + s for part, s in zip(parts, shift, strict=True)]),
            np.concatenate([part.owner + s for part, s in zip(parts, shift, strict=True)]),
            np.concatenate([part.lo for part in parts]),
            np.concatenate([part.hi for part in parts]),
        )


def address_space(program: Program, names: Names, buffer: Buffer) -> AddressSpace:
    return AddressSpace(buffer, unit_count(program.shape, buffer), program.shape.geometry.layers + 2, names)


def regions_of(program: Program, space: AddressSpace, touches: Touches, way: str, family: Family | None) -> Regions:
    """What descriptors of `program` read or write ("read", "write") of a buffer; `family`: the active experts."""
    tasks, base = touches.tasks, space.base(touches.tasks, touches.version)
    words = program.words[tasks]
    expand = ROUTED.get((touches.op.name, way, space.buffer))
    if expand is not None and family is not None:
        pieces: Pieces = expand(program.shape, words, tuple(family.experts(program.shape)))
        base_of = np.zeros(int(pieces.member.max()) + 1, np.int64)
        base_of[pieces.member] = base
        start = base_of[pieces.owner]
        return Regions(tasks, pieces.member, pieces.owner, start + pieces.lo, start + pieces.hi)
    lo, hi = base + touches.lo, base + touches.hi
    if way == "read" or (words[:, Word.QUEUE] != NONE).all():
        # equal regions are one: many readers of a matrix product's input, all claimers of a queue
        key, member = np.unique(lo << 32 | hi, return_inverse=True)
        lo, hi = key >> 32, key & (1 << 32) - 1
    else:
        member = np.arange(len(tasks))
    owner = np.flatnonzero(hi > lo)
    return Regions(tasks, member, owner, lo[owner], hi[owner])


class Earlier:
    """What the tasks before a part of a step left in memory."""

    def __init__(self, part: Program) -> None:
        assert part.cut is not None
        whole, done = part.cut.whole, part.cut.done
        self.program = replace(whole, words=whole.words[done], offsets=whole.offsets_of(done))
        self.names = Names(self.program)
        self.writes = gather(self.program, self.names)[1]

    def written(self, buffer: Buffer, family: Family | None) -> tuple[Ints, Ints]:
        """Addresses [lo, hi) of a buffer's units, of all versions."""
        space = address_space(self.program, self.names, buffer)
        found = [] if buffer in LOCAL_BUFFERS else self.writes.get(buffer, [])
        parts = [regions_of(self.program, space, touches, "write", family) for touches in found]
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *(p.lo for p in parts)]), np.concatenate([none, *(p.hi for p in parts)])


class RegionCheck:
    """The checks of one program, buffer by buffer."""

    def __init__(
        self, program: Program, clocks: Clocks, reads: dict[Buffer, list[Touches]], writes: dict[Buffer, list[Touches]]
    ) -> None:
        self.program, self.clocks, self.names = program, clocks, clocks.names
        self.reads, self.writes = reads, writes
        self.earlier = None if program.cut is None else Earlier(program)
        self.tracks = program.tracks

    def routed(self, buffer: Buffer) -> bool:
        """Whether what is touched depends on the expert mask."""
        return any(
            (touches.op.name, way, buffer) in ROUTED
            for way, of in (("read", self.reads), ("write", self.writes))
            for touches in of.get(buffer, [])
        )

    # ---- coverage, order, one writer ----------------------------------------------------------------------------

    def check_buffer(self, buffer: Buffer, family: Family | None = None) -> None:
        """Every read of `buffer` against the writes of its version; `family` says which experts are active."""
        space = address_space(self.program, self.names, buffer)
        reads = [regions_of(self.program, space, t, "read", family) for t in self.reads.get(buffer, [])]
        writes = [regions_of(self.program, space, t, "write", family) for t in self.writes.get(buffer, [])]
        if not reads and not writes:
            return
        empty = Regions(*(np.zeros(0, np.int64),) * 5)
        readers, writers = Regions.join([empty, *reads]), Regions.join([empty, *writes])
        when = f" ({family.name})" if family else ""
        by_lo = np.argsort(writers.lo, kind="stable")
        writers = Regions(writers.tasks, writers.region, writers.owner[by_lo], writers.lo[by_lo], writers.hi[by_lo])
        self._one_writer(space, writers, when)
        current = readers.lo >= space.room  # version -1 was left by the previous step
        written = writers.lo, writers.hi
        if self.earlier is not None:
            lo, hi = (np.concatenate(both) for both in zip(written, self.earlier.written(buffer, family), strict=True))
            by_lo = np.argsort(lo, kind="stable")
            written = lo[by_lo], hi[by_lo]
        self._covered(space, readers, *written, current, when)
        first = np.searchsorted(writers.hi, readers.lo, "right")
        last = np.searchsorted(writers.lo, readers.hi, "left")
        self._ordered(space, readers, writers, first, np.where(current, last, first), when)

    def _one_writer(self, space: AddressSpace, writers: Regions, when: str) -> None:
        """Neighbours in address order that overlap are two writers of a unit."""
        reach = np.maximum.accumulate(writers.hi)
        for k in np.flatnonzero(writers.lo[1:] < reach[:-1])[:1] + 1:
            other = int(np.argmax(writers.hi[:k]))
            one, two = (int(writers.tasks[writers.region == writers.owner[i]][0]) for i in (other, k))
            lo, hi = int(writers.lo[k]), int(min(writers.hi[k], reach[k - 1]))
            raise VerifyError(
                "overlap",
                f"{self._region(space, lo, hi)} has two writers: {self.names.task(one)} and {self.names.task(two)}"
                f" ({self.names.announced(one)}, {self.names.announced(two)}){when}",
            )

    def _covered(
        self, space: AddressSpace, readers: Regions, lo: Ints, hi: Ints, current: npt.NDArray[np.bool_], when: str
    ) -> None:
        """Lengths of the overlapping writes [lo, hi) add up to the read, since writes do not overlap each other."""
        if self.earlier is None and not current.all() and not len(lo):
            self._unwritten(space, readers, int(np.flatnonzero(~current)[0]), lo, hi, when)
        first, last = np.searchsorted(hi, readers.lo, "right"), np.searchsorted(lo, readers.hi, "left")
        length = np.concatenate([[0], np.cumsum(hi - lo)])
        some = last > first
        head = np.where(some, np.maximum(readers.lo - np.append(lo, 0)[first], 0), 0)
        tail = np.where(some, np.maximum(np.append(hi, 0)[last - 1] - readers.hi, 0), 0)
        covered = np.where(some, length[last] - length[first] - head - tail, 0)
        for k in np.flatnonzero(current & (covered < readers.hi - readers.lo))[:1]:
            self._unwritten(space, readers, int(k), lo, hi, when)

    def _unwritten(self, space: AddressSpace, readers: Regions, k: int, written: Ints, end: Ints, when: str) -> None:
        """Name the first reader of an interval and its first unit that nobody writes; writes are [written, end)."""
        lo, hi = int(readers.lo[k]), int(readers.hi[k])
        for first, last in zip(written.tolist(), end.tolist(), strict=True):
            if first <= lo < last:
                lo = last
        after = written[(written > lo) & (written < hi)]
        hi = int(after.min()) if len(after) else hi
        task = int(readers.tasks[readers.region == readers.owner[k]][0])
        who = "no task before it on this SM writes" if space.buffer in LOCAL_BUFFERS else "no task writes"
        raise VerifyError(
            "read",
            f"{self.names.task(task)} reads {self._region(space, lo, hi)}, which {who} for this layer; "
            f"it waits for {self.names.waits(task)}{when}",
        )

    def _ordered(
        self, space: AddressSpace, readers: Regions, writers: Regions, first: Ints, last: Ints, when: str
    ) -> None:
        """Each reader's clock reaches every task that writes part of its region."""
        reading, writing = _pairs(first, last)
        pair = np.unique(readers.owner[reading] * max(writers.count, 1) + writers.owner[writing])
        reading, writing = np.divmod(pair, max(writers.count, 1))
        by_region = np.argsort(writers.region, kind="stable")
        starts = np.searchsorted(writers.region[by_region], np.arange(writers.count + 1))
        which, member = _pairs(starts[writing], starts[writing + 1])
        tasks = writers.tasks[by_region[member]]
        need = np.full((readers.count, self.tracks), -1, np.int32)
        np.maximum.at(need, (reading[which], self.names.track[tasks]), self.names.index[tasks].astype(np.int32))

        # within a segment the clock is the same, and the first reader of a region stands for the later ones
        segments = len(self.clocks.known)
        by_task = np.argsort(readers.tasks, kind="stable")
        key = readers.region[by_task] * segments + self.clocks.segment[readers.tasks[by_task]]
        once = by_task[np.unique(key, return_index=True)[1]]
        for start in range(0, len(once), CHUNK):
            k = once[start : start + CHUNK]
            late = need[readers.region[k]] > self.clocks.before(readers.tasks[k])
            if late.any():
                at, track = np.argwhere(late)[0]
                reader = int(readers.tasks[k[at]])
                writer = self.names.at(int(track), int(need[readers.region[k[at]], track]))
                written = writers.owner == writers.region[writers.tasks == writer][0]
                lo, hi = int(writers.lo[written].min()), int(writers.hi[written].max())
                raise VerifyError(
                    "read",
                    f"{self.names.task(reader)} may read {self._region(space, lo, hi)} before {self.names.task(writer)}"
                    f" has written it: {self.names.announced(writer)} tells of it, the reader knows of "
                    f"{self.names.waits(reader)}{when}",
                )

    # ---- reuse --------------------------------------------------------------------------------------------------

    def check_reuse(self, buffer: Buffer) -> None:
        """Every access of a version before every writer of the buffer's next version."""
        writes = self.writes.get(buffer, [])
        touched = [*writes, *self.reads.get(buffer, [])]
        if not writes:
            return
        tasks, version = (np.concatenate([getattr(t, name) for t in touched]) for name in ("tasks", "version"))
        versions, rank = np.unique(version, return_inverse=True)
        last = np.full((len(versions), self.tracks), -1, np.int32)
        np.maximum.at(last, (rank, self.names.track[tasks]), self.names.index[tasks].astype(np.int32))
        writing = sum(len(t.tasks) for t in writes)
        tasks, rank = tasks[:writing], rank[:writing]
        tasks, rank = tasks[rank > 0], rank[rank > 0]
        key = rank * len(self.clocks.known) + self.clocks.segment[tasks]
        by_task = np.argsort(tasks, kind="stable")
        once = by_task[np.unique(key[by_task], return_index=True)[1]]
        for start in range(0, len(once), CHUNK):
            k = once[start : start + CHUNK]
            late = last[rank[k] - 1] > self.clocks.before(tasks[k])
            if buffer in LOCAL_BUFFERS:
                own = np.zeros_like(late)
                own[np.arange(len(k)), self.names.track[tasks[k]]] = True
                late &= own
            if late.any():
                at, track = np.argwhere(late)[0]
                writer, before = int(tasks[k[at]]), int(rank[k[at]]) - 1
                user = self.names.at(int(track), int(last[before, track]))
                raise VerifyError(
                    "overwrite",
                    f"{self.names.task(writer)} may overwrite {buffer.name} before {self.names.task(user)} is done "
                    f"with what layer {versions[before]} left there: {self.names.announced(user)} tells of it, "
                    f"the writer knows of {self.names.waits(writer)}",
                )

    def _region(self, space: AddressSpace, lo: int, hi: int) -> str:
        first = space.unit(lo)
        return self.names.region(space.buffer, first, min(first + hi - lo, space.room))


def _pairs(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """All (k, j) with first[k] <= j < last[k]."""
    counts = np.maximum(last - first, 0)
    k = np.repeat(np.arange(len(counts)), counts)
    return k, np.arange(len(k)) - np.repeat(np.cumsum(counts) - counts, counts) + first[k]
