"""From what a given-up step left behind to one line that names the signal that never came."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mk.isa import ISA, Word
from mk.schedule.lower import Program
from mk.verify.spans import writes_tokens

ROLES = ("consumer", "controller", "producer", "storer", "warp aside")
SHOWN = 3  # stalled SMs told of

Ints = npt.NDArray[np.int32]


def describe_stall(program: Program, counters: Ints, stalls: Ints, blamed: int) -> str:
    """counters [n]: their values. stalls [SMs, 8]: `StallRecord`s (csrc/params.cuh). blamed: SM that gave up first.

    Of the stalled SMs those that wait for the earliest counter come first: the others wait for what these would do.
    """
    places = _order(program).argsort()
    waiting = []
    for sm, record in enumerate(stalls.tolist()):
        counter = record[5]
        known = 0 <= counter < len(program.counters)
        if record[0]:
            rank = int(places[counter]) if known else len(places)
            waiting.append((rank, sm != blamed, sm, _place(program, sm, record)))
    told = [place for *_, place in sorted(waiting)[:SHOWN]]
    return "the step was given up: " + "; ".join([_missing_signal(program, counters), *told])


def _order(program: Program) -> Ints:
    """Counters in the order in which a step completes what they depend on.

    They are numbered as the step first waits for them, so one that needs another has a higher number; but the first
    that anybody waits for, with a count of 0, is the end of the previous step.
    """
    words = program.words
    closing = {int(words[task, Word.SIGNAL]) for task in writes_tokens(words)}
    order = range(len(program.counters))
    return np.array(sorted(order, key=lambda counter: (counter in closing, counter)), np.int32)


def _missing_signal(program: Program, counters: Ints) -> str:
    """The counter that all others wait for: of those that have gained least, the first."""
    if not program.counters:
        return "it has no counters"
    per_step = np.array([counter.per_step for counter in program.counters], np.int64)
    values = counters[: len(per_step)].view(np.uint32).astype(np.int64)
    order = _order(program)
    first = int(order[np.argmin((values // per_step)[order])])
    came, count = int(values[first] % per_step[first]), int(per_step[first])
    return f"counter {program.counters[first].name} got {came} of {count} signals"


def _place(program: Program, sm: int, record: list[int]) -> str:
    _, role, opcode, layer, task, counter, target, seen = record
    names = {op.opcode: op.name for op in ISA}
    what = f"{names[opcode]}.{layer} (task {task})" if opcode in names else "the end of its list"
    on = "a barrier"
    if 0 <= counter < len(program.counters):
        on = f"{program.counters[counter].name}: wants {target & 0xFFFFFFFF}, has {seen & 0xFFFFFFFF}"
    return f"SM {sm} {ROLES[role]} at {what} waits for {on}"
