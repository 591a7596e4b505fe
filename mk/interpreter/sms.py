"""The virtual SMs: counters, waiting, signalling, and the choice of who runs next."""

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

Pick = Callable[[Sequence["VirtualSm"]], int]
"""Chooses among the SMs that can run: an index into the list."""


class Stalled(MkError):
    """No SM can run and the step is not finished. `blocked`: (SM, place in its list, counter) of every blocked SM."""

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
    """A descriptor ready to run."""

    run: Run
    waits: tuple[Wait, ...]
    signal: int
    value: int


@dataclass(slots=True)
class VirtualSm:
    """One SM's place in its list."""

    sm: int
    tasks: list[Compiled]
    at: int = 0
    step: int = 0  # index into the steps of this run
    running: Iterator[None] | None = field(default=None, repr=False)


def random_pick(seed: int) -> Pick:
    """Every runnable SM equally likely, each time."""
    draw = random.Random(seed).random
    return lambda runnable: int(draw() * len(runnable))


def eager_pick(seed: int) -> Pick:
    """One SM runs as far as it can, then the next in a seeded order: the last one is starved until all depend on it."""
    generator = random.Random(seed)
    rank: dict[int, float] = {}

    def pick(runnable: Sequence[VirtualSm]) -> int:
        return min(range(len(runnable)), key=lambda i: rank.setdefault(runnable[i].sm, generator.random()))

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
    """Runs every SM through its list once a step, `steps[i]` at epoch `epoch + i`.

    An SM goes on to its next step while others still finish theirs, as in the kernel: only counters hold it back. So a
    step is made by the first SM that enters it. Raises Stalled when nothing can run.
    """
    made: list[Step] = []
    sms = [VirtualSm(sm, tasks) for sm, tasks in enumerate(lists)]
    runnable: list[VirtualSm] = []
    waiters: list[list[VirtualSm]] = [[] for _ in program.counters]

    def settle(sm: VirtualSm) -> None:
        """Queue an SM whose next task is due: as runnable, or at the first counter that falls short."""
        if sm.at == len(sm.tasks):
            sm.at = 0
            sm.step += 1
        if sm.step == len(steps) or not sm.tasks:
            return
        for wait in sm.tasks[sm.at].waits:
            if counters.short_of(wait, epoch + sm.step):
                waiters[wait.counter].append(sm)
                return
        runnable.append(sm)

    for sm in sms:
        settle(sm)
    while runnable:
        chosen = pick(runnable)
        sm = runnable[chosen]
        task = sm.tasks[sm.at]
        if trace is not None:
            while len(trace) <= sm.step:
                trace.append([])
            trace[sm.step].append((sm.sm, sm.at))
        if sm.running is None:
            while len(made) <= sm.step:
                made.append(steps[len(made)]())
            sm.running = task.run(made[sm.step])
            if sm.running is not None:
                continue
        elif next(sm.running, _END) is not _END:
            continue
        sm.running = None
        runnable[chosen] = runnable[-1]
        runnable.pop()
        sm.at += 1
        settle(sm)
        if task.signal != NONE:
            counters.values[task.signal] = (counters.values[task.signal] + task.value) & _MASK
            woken, waiters[task.signal] = waiters[task.signal], []
            for waiting in woken:
                settle(waiting)
    if any(sm.step < len(steps) and sm.tasks for sm in sms):
        raise stalled(program, counters, sms, [s for s in sms if s.step < len(steps) and s.tasks], epoch, len(steps))
    return made


_END = object()


def stalled(
    program: Program, counters: Counters, sms: list[VirtualSm], blocked: list[VirtualSm], epoch: int, steps: int
) -> Stalled:
    """Who waits for which counter; first the counters that nobody is left to signal, for their signal is missing."""
    waiting: dict[tuple[bool, int], list[str]] = {}
    missing: dict[int, int] = {}
    places = []
    for sm in blocked:
        words = program.sm(sm.sm)[sm.at].tolist()
        wait = next(wait for wait in sm.tasks[sm.at].waits if counters.short_of(wait, epoch + sm.step))
        hopeful = any(_still_signals(other, wait.counter, steps) for other in sms)
        task = f"SM {sm.sm} task {sm.at} ({ISA.rows[words[Word.OPCODE]].name}.{words[Word.LAYER]})"
        waiting.setdefault((hopeful, wait.counter), []).append(task)
        missing[wait.counter] = ((epoch + sm.step) * wait.per_step + wait.count - counters.values[wait.counter]) & _MASK
        places.append((sm.sm, sm.at, wait.counter))
    clauses = []
    for (hopeful, counter), tasks in sorted(waiting.items()):
        who = ", ".join(tasks[:2]) + (f" and {len(tasks) - 2} more SMs" if len(tasks) > 2 else "")
        clause = f"{who} waits for counter {counter} ({program.counters[counter].name}), {missing[counter]} short"
        clauses.append(clause + ("" if hopeful else ", which no SM is left to signal"))
    return Stalled(f"no SM can run: {'; '.join(clauses)}", places)


def _still_signals(sm: VirtualSm, counter: int, steps: int) -> bool:
    """Whether any task that an SM has yet to finish signals a counter."""
    if sm.step >= steps:
        return False
    rest = sm.tasks if sm.step + 1 < steps else sm.tasks[sm.at :]
    return any(task.signal == counter for task in rest)
