"""The tracks of virtual SMs: counters, waiting, signalling, and the choice of who runs next."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mk.errors import MkError
from mk.interpreter.registry import Run
from mk.interpreter.step import Step
from mk.isa import ISA, NONE, Word
from mk.schedule.lower import Program

_MASK = 0xFFFFFFFF
_HALF = 0x80000000

Pick = Callable[[Sequence["VirtualTrack"]], int]
"""Chooses among the tracks that can run: an index into the list."""


class Stalled(MkError):
    """Nothing can run and the step is not finished. `blocked`: (track, place in it, counter) of every blocked track."""

    def __init__(self, message: str, blocked: list[tuple[int, int, int]]) -> None:
        super().__init__(message)
        self.blocked = blocked


@dataclass(slots=True)
class Wait:
    counter: int
    count: int
    per_step: int


@dataclass(slots=True)
class Compiled:
    """A descriptor ready to run. words: as it was read."""

    run: Run
    waits: tuple[Wait, ...]
    signal: int
    value: int
    words: list[int]


@dataclass(slots=True)
class VirtualTrack:
    """How far an SM has come in one of its two tracks."""

    track: int
    tasks: list[Compiled]
    at: int = 0
    step: int = 0  # index into the steps of this run
    running: Iterator[None] | None = field(default=None, repr=False)


def random_pick(seed: int) -> Pick:
    """Every runnable track equally likely, each time."""
    draw = random.Random(seed).random
    return lambda runnable: int(draw() * len(runnable))


def eager_pick(seed: int) -> Pick:
    """One track runs as far as it can, then the next in a seeded order: the last is starved until all depend on it."""
    generator = random.Random(seed)
    rank: dict[int, float] = {}

    def pick(runnable: Sequence[VirtualTrack]) -> int:
        return min(range(len(runnable)), key=lambda i: rank.setdefault(runnable[i].track, generator.random()))

    return pick


INTERLEAVINGS: dict[str, Callable[[int], Pick]] = {"random": random_pick, "eager": eager_pick}


def waits_of(words: list[int]) -> tuple[Wait, ...]:
    slots = (Word.WAIT0, Word.WAIT1)
    return tuple(Wait(words[slot], words[slot + 1], words[slot + 2]) for slot in slots if words[slot] != NONE)


class Counters:
    """int32 counters, kept as unsigned 32-bit values so that they wrap as the kernel's do."""

    def __init__(self, program: Program, epoch: int) -> None:
        self.values = [epoch * counter.per_step & _MASK for counter in program.counters]

    def short_of(self, wait: Wait, epoch: int) -> bool:
        """Whether `(int32)(value - target) < 0`."""
        target = epoch * wait.per_step + wait.count
        return (self.values[wait.counter] - target) & _MASK >= _HALF


def execute(
    program: Program,
    lists: list[list[Compiled]],
    counters: Counters,
    steps: Sequence[Callable[[], Step]],
    epoch: int,
    pick: Pick,
    trace: list[list[tuple[int, int]]] | None = None,
) -> list[Step]:
    """Runs every track through its list once a step, `steps[i]` at epoch `epoch + i`.

    A track goes on to its next step while others still finish theirs, as in the kernel: only counters hold it back.
    So a step is made by the first track that enters it. Raises Stalled when nothing can run.
    """
    made: list[Step] = []
    tracks = [VirtualTrack(track, tasks) for track, tasks in enumerate(lists)]
    runnable: list[VirtualTrack] = []
    waiters: list[list[VirtualTrack]] = [[] for _ in program.counters]

    def settle(track: VirtualTrack) -> None:
        """Queue a track whose next task is due: as runnable, or at the first counter that falls short."""
        if track.at == len(track.tasks):
            track.at = 0
            track.step += 1
        if track.step == len(steps) or not track.tasks:
            return
        for wait in track.tasks[track.at].waits:
            if counters.short_of(wait, epoch + track.step):
                waiters[wait.counter].append(track)
                return
        runnable.append(track)

    for track in tracks:
        settle(track)
    while runnable:
        chosen = pick(runnable)
        track = runnable[chosen]
        task = track.tasks[track.at]
        if trace is not None:
            while len(trace) <= track.step:
                trace.append([])
            trace[track.step].append((track.track, track.at))
        if track.running is None:
            while len(made) <= track.step:
                made.append(steps[len(made)]())
            track.running = task.run(made[track.step])
            if track.running is not None:
                continue
        elif next(track.running, _END) is not _END:
            continue
        track.running = None
        runnable[chosen] = runnable[-1]
        runnable.pop()
        track.at += 1
        settle(track)
        if task.signal != NONE:
            counters.values[task.signal] = (counters.values[task.signal] + task.value) & _MASK
            woken, waiters[task.signal] = waiters[task.signal], []
            for waiting in woken:
                settle(waiting)
    if any(track.step < len(steps) and track.tasks for track in tracks):
        raise stalled(
            program, counters, tracks, [t for t in tracks if t.step < len(steps) and t.tasks], epoch, len(steps)
        )
    return made


_END = object()


def stalled(
    program: Program,
    counters: Counters,
    tracks: list[VirtualTrack],
    blocked: list[VirtualTrack],
    epoch: int,
    steps: int,
) -> Stalled:
    """Who waits for which counter; first the counters that nobody is left to signal, for their signal is missing."""
    waiting: dict[tuple[bool, int], list[str]] = {}
    missing: dict[int, int] = {}
    places = []
    for track in blocked:
        words = program.track(track.track)[track.at].tolist()
        wait = next(wait for wait in track.tasks[track.at].waits if counters.short_of(wait, epoch + track.step))
        hopeful = any(_still_signals(other, wait.counter, steps) for other in tracks)
        task = (
            f"{program.name_of(track.track)} task {track.at} ({ISA.rows[words[Word.OPCODE]].name}.{words[Word.LAYER]})"
        )
        waiting.setdefault((hopeful, wait.counter), []).append(task)
        missing[wait.counter] = (
            (epoch + track.step) * wait.per_step + wait.count - counters.values[wait.counter]
        ) & _MASK
        places.append((track.track, track.at, wait.counter))
    clauses = []
    for (hopeful, counter), tasks in sorted(waiting.items()):
        who = ", ".join(tasks[:2]) + (f" and {len(tasks) - 2} more" if len(tasks) > 2 else "")
        clause = f"{who} waits for counter {counter} ({program.counters[counter].name}), {missing[counter]} short"
        clauses.append(clause + ("" if hopeful else ", which nobody is left to signal"))
    return Stalled(f"nothing can run: {'; '.join(clauses)}", places)


def _still_signals(track: VirtualTrack, counter: int, steps: int) -> bool:
    """Whether any task that a track has yet to finish signals a counter."""
    if track.step >= steps:
        return False
    rest = track.tasks if track.step + 1 < steps else track.tasks[track.at :]
    return any(task.signal == counter for task in rest)
