"""From what a given-up step left behind to one line that names the signal that never came."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mk.isa import ISA, Word
from mk.kernel.step_params import counters_at
from mk.schedule.lower import Program
from mk.verify.spans import writes_tokens

ROLES = ("consumer", "controller", "producer", "storer", "warp aside")
SHOWN = 3  # stalled SMs told of

Ints = npt.NDArray[np.int32]


def missing_signals(per_step: npt.NDArray[np.int64], epoch: int, counters: Ints) -> Ints:
    """[n]: what each counter would have gained more, had all steps up to `epoch` run. counters [n]: as they wrap."""
    expected = counters_at(per_step, epoch)[: len(per_step), 0]
    with np.errstate(over="ignore"):
        return expected - counters[: len(per_step)]


def describe_stall(program: Program, missing: Ints, stalls: Ints, blamed: int) -> str:
    """missing [n]: of `missing_signals`. stalls [SMs, 8]: `StallRecord`s (csrc/params.cuh). blamed: SM that gave up
    first.

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
    return "the step was given up: " + "; ".join([_missing_signal(program, missing), *told])


def _order(program: Program) -> Ints:
    """Counters in the order in which a step completes what they depend on.

    They are numbered as the step first waits for them, so one that needs another has a higher number; but the first
    that anybody waits for, with a count of 0, is the end of the previous step.
    """
    words = program.words
    closing = {int(words[task, Word.SIGNAL]) for task in writes_tokens(words)}
    order = range(len(program.counters))
    return np.array(sorted(order, key=lambda counter: (counter in closing, counter)), np.int32)


def _missing_signal(program: Program, missing: Ints) -> str:
    """The counter that all others wait for: of those that lack most steps, the first."""
    if not program.counters:
        return "it has no counters"
    per_step = program.per_step
    steps = -(-missing // per_step)
    order = _order(program)
    first = int(order[np.argmax(steps[order])])
    count = int(per_step[first])
    came = int(steps[first]) * count - int(missing[first])
    return f"counter {program.counters[first].name} got {came} of {count} signals"


def _place(program: Program, sm: int, record: list[int]) -> str:
    _, role, opcode, layer, task, counter, target, seen = record
    names = {op.opcode: op.name for op in ISA}
    what = f"{names[opcode]}.{layer} (task {task})" if opcode in names else "the end of its list"
    on = "a barrier"
    if 0 <= counter < len(program.counters):
        on = f"{program.counters[counter].name}: wants {target & 0xFFFFFFFF}, has {seen & 0xFFFFFFFF}"
    return f"SM {sm} {ROLES[role]} at {what} waits for {on}"
