"""Counters: does what all SMs add in a step equal what the waiting tasks were told?"""

from __future__ import annotations

import numpy as np

from mk.isa import NONE, Word
from mk.schedule.lower import Program
from mk.verify.errors import Names, VerifyError

WAITS = (Word.WAIT0, Word.WAIT1)
LARGEST_STEP = 2**30
"""A counter may gain less than this a step: `(int32)(value - target)` is right while the two differ by under 2^31."""


def check_arrivals(program: Program, names: Names) -> None:
    """Every counter's arrivals, the increment in its record and the one in its waiters' words are the same number.

    Raises VerifyError("arrivals"). Afterwards every wait that can be reached at all can be reached in every step: the
    target of step e is `e * per_step + count` with 0 <= count <= per_step.
    """
    words, counters = program.words, program.counters
    per_step = np.array([counter.per_step for counter in counters], np.int64)
    arrivals = np.zeros(len(counters), np.int64)

    signalling = np.flatnonzero(words[:, Word.SIGNAL] != NONE)
    target, value = words[signalling, Word.SIGNAL], words[signalling, Word.SIGNAL_VALUE].astype(np.int64)
    _known_counters(program, names, signalling, target, "signals")
    for task in signalling[value < 1][:1]:
        raise VerifyError(
            "arrivals",
            f"{names.task(task)} signals {names.counter(words[task, Word.SIGNAL])} with value "
            f"{words[task, Word.SIGNAL_VALUE]}: counters only grow",
        )
    np.add.at(arrivals, target, value)

    for counter in np.flatnonzero(arrivals != per_step)[:1]:
        waiter = np.flatnonzero((words[:, Word.WAIT0] == counter) | (words[:, Word.WAIT1] == counter))
        last = signalling[target == counter][-1:]
        where = f", last by {names.task(last[0])}" if len(last) else ""
        who = f"{names.task(waiter[0])} and {len(waiter) - 1} more wait" if len(waiter) else "nobody waits"
        raise VerifyError(
            "arrivals",
            f"{names.counter(counter)}: a step signals {arrivals[counter]}{where}, "
            f"but the counter is declared to gain {per_step[counter]} ({who} for it)",
        )
    for counter in np.flatnonzero(per_step >= LARGEST_STEP)[:1]:
        raise VerifyError(
            "arrivals",
            f"{names.counter(counter)} gains {per_step[counter]} a step, from {LARGEST_STEP} on "
            "the comparison with its target wraps",
        )

    for wait in WAITS:
        waiting = np.flatnonzero(words[:, wait] != NONE)
        counter, count, step = (words[waiting, wait + offset] for offset in range(3))
        _known_counters(program, names, waiting, counter, "waits for")
        for k in np.flatnonzero(step != per_step[counter])[:1]:
            raise VerifyError(
                "arrivals",
                f"{names.task(waiting[k])} expects {names.counter(counter[k])} to gain {step[k]} a step, "
                f"but its arrivals are {per_step[counter[k]]}",
            )
        for k in np.flatnonzero((count < 0) | (count > step))[:1]:
            raise VerifyError(
                "arrivals",
                f"{names.task(waiting[k])} waits for {count[k]} arrivals on {names.counter(counter[k])}, "
                f"but a step has {step[k]}: the target is out of reach",
            )


def _known_counters(program: Program, names: Names, tasks: np.ndarray, counter: np.ndarray, verb: str) -> None:
    for k in np.flatnonzero((counter < 0) | (counter >= len(program.counters)))[:1]:
        raise VerifyError(
            "arrivals",
            f"{names.task(tasks[k])} {verb} counter {counter[k]}, but the program has {len(program.counters)} counters",
        )
