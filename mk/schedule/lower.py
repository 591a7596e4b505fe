"""Lowering: from a step's waves to two tracks of descriptors an SM, and counters with targets.

Waits are derived, not written: a wave waits for every wave that wrote what it reads, unless its track already knows
that wave to be complete. A track knows what it waited for and, with that, all that the waited-for wave's tracks knew
when they signalled. So a track polls a counter once a phase, and signals a phase once, with its last task of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mk.errors import MkError
from mk.graph import LAST_WAVES, StepShape, resolve
from mk.isa import ISA, LOCAL_BUFFERS, NONE, Access, Buffer, Flag, Op, Word, Words
from mk.schedule.identity import schedule_hash
from mk.schedule.orders import check_order
from mk.schedule.placement import Placement, SmIds, make_placement


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter's name, for messages, and what all SMs together add to it in a step."""

    name: str
    per_step: int


@dataclass(frozen=True)
class Cut:
    """Where a part of a step comes from (`mk/schedule/cut.py`).

    name: `3.attn`, or first and last wave as `3.qkv-3.rmsnorm`. kept: bool [n], the descriptors of `whole` that the
    part has, in their order. done: bool [n], those that ran before it: what they left in memory is there, what they
    left in their SM is not.
    """

    name: str
    whole: Program
    kept: npt.NDArray[np.bool_]
    done: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Program:
    """A lowered step: what the kernel, the interpreter and the verifier execute.

    words: all descriptors, int32 [n, 32], track after track: the main tracks of all SMs, then those aside.
    offsets: int32 [2 n_sm + 1], the first descriptor of each track.
    cut: what it is a part of, None for a whole step.
    """

    shape: StepShape
    words: Words
    offsets: npt.NDArray[np.int32]
    counters: tuple[Counter, ...]
    wave_order: tuple[str, ...]
    placement: str
    cut: Cut | None = None

    @property
    def tracks(self) -> int:
        """Track t < n_sm is the main one of SM t, track n_sm + t the one aside."""
        return 2 * self.shape.n_sm

    def track(self, track: int) -> Words:
        """Descriptors of one track in program order [m, 32], a view."""
        return self.words[self.offsets[track] : self.offsets[track + 1]]

    def name_of(self, track: int) -> str:
        """`SM 3`, or `SM 3 aside` for its second track."""
        aside, sm = divmod(track, self.shape.n_sm)
        return f"SM {sm} aside" if aside else f"SM {sm}"

    @property
    def track_of(self) -> npt.NDArray[np.int64]:
        """Track of every descriptor [n]."""
        return np.repeat(np.arange(self.tracks), np.diff(self.offsets))

    def offsets_of(self, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
        """Where the lists begin when of all descriptors only `kept` [n] are left."""
        return np.concatenate([[0], np.cumsum(kept)])[self.offsets].astype(np.int32)

    @property
    def sm_of(self) -> npt.NDArray[np.int64]:
        """SM of every descriptor [n]."""
        return self.track_of % self.shape.n_sm

    def tasks_by_operation(self) -> dict[str, int]:
        """How many descriptors each operation has."""
        opcodes, counts = np.unique(self.words[:, Word.OPCODE], return_counts=True)
        names = {op.opcode: op.name for op in ISA}
        return {names[opcode]: count for opcode, count in zip(opcodes.tolist(), counts.tolist(), strict=True)}

    @property
    def per_step(self) -> npt.NDArray[np.int64]:
        """What each counter gains in a step [counters]."""
        return np.array([counter.per_step for counter in self.counters], np.int64)

    @property
    def schedule_hash(self) -> str:
        """Hash of everything that is to be executed: descriptors, their tracks, counter increments."""
        return schedule_hash(self.words, self.offsets, self.per_step.astype(np.int32))


@dataclass(slots=True)
class _Wave:
    name: str
    layer: int
    op: Op
    tasks: Words
    tracks: SmIds


def lower(
    shape: StepShape,
    wave_order: tuple[str, ...] | list[str],
    placement: str,
    placer: Placement | None = None,
    barriers: bool = False,
) -> Program:
    """Build, place and lower one step; `placer` takes the place of the named placement.

    barriers: every wave waits until all tracks are done with the one before it, whatever it reads.

    Raises MkError for an unknown wave or placement, or one that does not fit.
    """
    order = check_order(wave_order)
    placer = placer or make_placement(placement, shape)
    waves: list[_Wave] = []
    ordinal = 0
    for name, layer, part, parts in step_waves(shape, order):
        op, tasks = shape.wave_tasks(name, layer, part, parts)
        if op is None:
            continue
        tasks[:, Word.TASK] = ordinal + np.arange(len(tasks))
        ordinal += len(tasks)
        tracks = placer.place(op, name, layer, tasks) + (shape.n_sm if op.aside else 0)
        by_track = np.argsort(tracks, kind="stable")
        waves.append(_Wave(name, layer, op, *_join(tasks[by_track], tracks[by_track], op)))
    _drop_unread(waves)
    counters = _synchronise(shape, waves, barriers)
    words = np.concatenate([wave.tasks for wave in waves])
    tracks = np.concatenate([wave.tracks for wave in waves])
    by_track = np.argsort(tracks, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(tracks, minlength=2 * shape.n_sm))]).astype(np.int32)
    return Program(shape, np.ascontiguousarray(words[by_track]), offsets, tuple(counters), order, placement)


def step_waves(shape: StepShape, order: tuple[str, ...]) -> Iterator[tuple[str, int, int, int]]:
    """(wave, layer, part, parts) in list order, empty ones too."""
    layers = shape.geometry.layers
    yield "embed", 0, 0, 1
    for layer in range(layers):
        names = shape.layer_waves(layer, order)
        for place, name in enumerate(names):
            yield name, layer, names[:place].count(name), names.count(name)
    for name in LAST_WAVES:
        yield name, layers, 0, 1


def _join(tasks: Words, tracks: SmIds, op: Op) -> tuple[Words, SmIds]:
    """Join neighbouring strips that one SM runs in a row into one descriptor; the SM streams them in one go."""
    whole_k = (tasks[:, Word.K_SLOTS] == 0) | (tasks[:, Word.K_SLOTS] == tasks[:, Word.STRIP_PITCH])
    joinable = (tasks[:, Word.TILES] == 1) & whole_k  # parts of strips would leave holes between them
    if op.everywhere or (op.phase and not joinable.all()) or len(tasks) < 2:
        return tasks, tracks
    same = tasks.copy()
    same[:, [Word.TILE, Word.TASK]] = 0
    follows = np.zeros(len(tasks), bool)
    follows[1:] = (
        (same[1:] == same[:-1]).all(axis=1)
        & (tracks[1:] == tracks[:-1])
        & joinable[1:]
        & (tasks[1:, Word.TILE] == tasks[:-1, Word.TILE] + 1)
    )
    heads = np.flatnonzero(~follows)
    joined = tasks[heads].copy()
    joined[:, Word.TILES] = np.where(joinable[heads], np.diff(np.append(heads, len(tasks))), joined[:, Word.TILES])
    return joined, tracks[heads]


def _drop_unread(waves: list[_Wave]) -> None:
    """Drop copies of per-SM work from SMs that use none of it: a top-k where no task of the layer reads ROUTE.

    Nothing would follow such a task, so no counter could tell when it has read its input.
    """
    readers: dict[tuple[object, int], set[int]] = {}
    for wave in waves:
        for access in wave.op.reads:
            if access.buffer in LOCAL_BUFFERS:
                readers.setdefault((access.buffer, wave.layer + access.ahead), set()).update(wave.tracks.tolist())
    for wave in waves:
        if wave.op.everywhere and all(access.buffer in LOCAL_BUFFERS for access in wave.op.writes):
            used = set().union(*(readers.get((a.buffer, wave.layer + a.ahead), set()) for a in wave.op.writes))
            keep = np.isin(wave.tracks, list(used))
            published = bool((wave.tasks[:, Word.FLAGS] & Flag.PUBLISH).any())
            wave.tasks, wave.tracks = wave.tasks[keep], wave.tracks[keep]
            if published and not (wave.tasks[:, Word.FLAGS] & Flag.PUBLISH).any():
                wave.tasks[:1, Word.FLAGS] |= Flag.PUBLISH


def _synchronise(shape: StepShape, waves: list[_Wave], barriers: bool) -> list[Counter]:
    """Fill waits and signals in place; returns the counters.

    Steps are closed: a track's first task knows the previous step to be over, and the last wave knows every track's
    last task to be done, so hazards across steps need no waits of their own.

    Every wave that anyone reads has one counter, signalled once by each track that takes part. `known[track]` is a bit
    set of waves whose completion this track may rely on; `implied[w]` what the completion of wave w implies.
    """
    counters: list[Counter] = []
    counter_of: dict[int, int] = {}
    writers: dict[tuple[Buffer, int], list[int]] = {}
    known = [0] * (2 * shape.n_sm)
    implied = [0] * len(waves)
    for index, wave in enumerate(waves):
        for access in wave.op.writes:
            lo, hi = access.span(shape, wave.tasks)
            if (hi > lo).any():
                writers.setdefault((_buffer(access, wave), wave.layer + access.ahead), []).append(index)
    members = [sum(1 << track for track in set(wave.tracks.tolist())) for wave in waves]
    previous = len(waves)  # stands for "the previous step is over", known through the counter of the step's last wave
    implied.append(0)
    for index, wave in enumerate(waves):
        # a track signals in list order: this wave's completion is that of every earlier one run by no other tracks
        implied[index] = sum(1 << other for other in range(index) if not members[other] & ~members[index])
        needs = [index - 1] * (index > 0) if barriers else _needs(wave, writers)
        first = np.flatnonzero(np.diff(wave.tracks, prepend=-1))
        alike: dict[int, list[int]] = {}  # tracks that know the same wait for the same
        for start in first.tolist():
            alike.setdefault(known[wave.tracks[start]], []).append(start)
        for state, starts in alike.items():
            waits = _minimal([need for need in needs if not state >> need & 1], implied)
            if not any(bits >> previous & 1 for bits in (state, *(implied[need] for need in waits))):
                waits = [*waits, previous]
            if len(waits) > 2:
                raise MkError(f"wave {wave.name} of layer {wave.layer} needs {len(waits)} waits, a task has two")
            for slot, need in zip((Word.WAIT0, Word.WAIT1), waits, strict=False):
                counter = counter_of.setdefault(min(need, len(waves) - 1), len(counter_of))
                # count and increment are filled in below, once the signallers are known
                wave.tasks[starts, slot : slot + 3] = counter, int(need != previous), 1
                state |= implied[need] | 1 << need
            implied[index] |= state
            for start in starts:
                known[wave.tracks[start]] = state
    for need, _ in sorted(counter_of.items(), key=lambda item: item[1]):
        wave = waves[need]
        last = np.flatnonzero(np.diff(wave.tracks, append=-1))
        wave.tasks[last, Word.SIGNAL] = counter_of[need]
        wave.tasks[last, Word.SIGNAL_VALUE] = 1
        counters.append(Counter(f"{wave.name}.{wave.layer}", len(last)))
    _announce_tails(waves, counters)
    per_step = np.array([counter.per_step for counter in counters], np.int32)
    for wave in waves:
        for slot in (Word.WAIT0, Word.WAIT1):
            waiting = wave.tasks[:, slot] != NONE
            increments = per_step[wave.tasks[waiting, slot]]
            wave.tasks[waiting, slot + 1] *= increments
            wave.tasks[waiting, slot + 2] = increments
    return counters


def _announce_tails(waves: list[_Wave], counters: list[Counter]) -> None:
    """Let the step's last wave wait for every track: one whose last task signals nothing signals what that wave awaits.

    Only tracks that take no part in the last product (a vocabulary of few strips) have such a task.
    """
    awaited = int(waves[-1].tasks[0, Word.WAIT0])
    seen: set[int] = set(waves[-1].tracks.tolist())
    silent = 0
    for wave in reversed(waves[:-1]):
        for last in np.flatnonzero(np.diff(wave.tracks, append=-1)):
            if int(wave.tracks[last]) not in seen and wave.tasks[last, Word.SIGNAL] == NONE:
                wave.tasks[last, [Word.SIGNAL, Word.SIGNAL_VALUE]] = awaited, 1
                silent += 1
        seen.update(wave.tracks.tolist())
    counters[awaited] = Counter(counters[awaited].name, counters[awaited].per_step + silent)


def _buffer(access: Access, wave: _Wave) -> Buffer:
    return Buffer(int(resolve(access, wave.tasks[:1])[0]))


def _needs(wave: _Wave, writers: dict[tuple[Buffer, int], list[int]]) -> list[int]:
    """Waves (indices) of this step that this wave reads from across tracks."""
    needs: set[int] = set()
    for access in wave.op.reads:
        if access.ahead < 0:
            continue  # what the previous step left: every track waits for that step's end before its first task
        buffer = _buffer(access, wave)
        if buffer in LOCAL_BUFFERS or buffer == Buffer.QUEUES:
            continue  # program order carries the first; the second was cleared a step ago
        needs.update(writers.get((buffer, wave.layer), ()))
    return sorted(needs)


def _minimal(needs: list[int], implied: list[int]) -> list[int]:
    """Drop a need that another one's completion implies."""
    return [need for need in needs if not any(other != need and implied[other] >> need & 1 for other in needs)]
