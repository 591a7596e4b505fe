"""Between steps, and the two things a step leaves for run time: the weight ring and the ticket queues.

Steps are *closed* when

(a) the task that writes the tokens (`sample`) starts after every other task of the step, on every track, and
(b) every task starts after the previous step's tokens: its track wrote them, or has waited for their counter with a
    count of 0, whose target in step e is `e * per_step`, or has waited for a task of which one of these is true.

Then all of step e happens before all of step e+1: consider the first moment at which any task of step e+1 starts. By
(b), and because nothing of step e+1 has been signalled yet, it follows the tokens of step e, and by (a) every task of
step e was over. So every hazard across steps reduces to order inside one step: the activations that the last layers
still use while the first ones write again, and KV pages, for a page read as history in step e+1 was appended to in step
e or before. And no counter receives a signal of the next step while somebody still waits in this one, so a target
counts signals of its own step alone. What an SM streams ahead of its tasks must respect this too: weights never change,
but the pages of step e+1 may be fetched only once (b) holds on the SM. Before the first step the host's stream-ordered
clear takes the place of (b).

A ticket queue is drawn from in set `e % 2` and cleared by a task in set `(e+1) % 2`: closed steps put the clear after
the last draw of step e-1 and before the first of step e+1. So it is enough that each step clears every queue it draws.
"""

from __future__ import annotations

import numpy as np

from mk.graph import QUEUE_KINDS
from mk.isa import ISA, NONE, Buffer, Word
from mk.schedule.lower import Program
from mk.verify.clocks import Clocks
from mk.verify.errors import Names, VerifyError
from mk.verify.spans import Touches, writes_tokens


def check_ring(program: Program, names: Names) -> None:
    """The weight ring is filled in list order, so expert ids must come from an earlier task of the same track.

    Raises VerifyError("ring") for a phase that would block it: the ids its addresses follow never come, and the
    weights of the task that makes them are queued behind.
    """
    words = program.words
    makes = [op.opcode for op in ISA if any(access.buffer == Buffer.ROUTE for access in op.writes)]
    follows = [op.opcode for op in ISA if op.phase and any(access.buffer == Buffer.ROUTE for access in op.reads)]
    made = np.full((program.tracks, program.shape.geometry.layers + 1), len(words), np.int64)
    makers = np.flatnonzero(np.isin(words[:, Word.OPCODE], makes))
    np.minimum.at(made, (names.track[makers], words[makers, Word.LAYER]), makers)
    phases = np.flatnonzero(np.isin(words[:, Word.OPCODE], follows))
    blocked = phases[made[names.track[phases], words[phases, Word.LAYER]] > phases]
    for task in blocked[:1]:
        layer = int(words[task, Word.LAYER])
        raise VerifyError(
            "ring",
            f"{names.task(task)} blocks the weight ring of {program.name_of(int(names.track[task]))}: its addresses "
            f"follow ROUTE, and no earlier task of this track picks the experts of layer {layer} "
            f"(it waits for {names.waits(task)})",
            hint="every wave that follows the routing must stand after topk",
        )


def check_closed(program: Program, clocks: Clocks) -> None:
    """Conditions (a) and (b) of the module's docstring. Raises VerifyError("step")."""
    names = clocks.names
    final = writes_tokens(program.words)
    if len(final) != 1:
        raise VerifyError("step", f"{len(final)} tasks write TOKENS in a step, there must be one that ends it")
    sample = final[0]
    ends = np.diff(program.offsets) - 1
    have = clocks.before(np.array(final))[0]
    have[names.track[sample]] = names.index[sample]
    for track in np.flatnonzero(have < ends)[:1]:
        task = names.at(int(track), int(ends[track]))
        raise VerifyError(
            "step",
            f"{names.task(sample)} may write TOKENS before {names.task(task)} is done, so the next step may overtake "
            f"this one: {names.announced(task)} tells of that task, sampling knows of {names.waits(sample)}",
        )
    for task in np.flatnonzero(~clocks.closed[clocks.segment])[:1]:
        counter = int(program.words[sample, Word.SIGNAL])
        said = names.counter(counter) if counter != NONE else "no counter"
        raise VerifyError(
            "step",
            f"{names.task(task)} may start before the previous step has written TOKENS: it knows of "
            f"{names.waits(task)}, and nothing there has waited for {said} (with count 0)",
        )


def check_queues(program: Program, names: Names, reads: list[Touches], writes: list[Touches]) -> None:
    """Every queue that is drawn from belongs to one phase of one layer and is cleared by one task a step.

    Raises VerifyError("queue").
    """
    cleared = np.full(program.shape.geometry.layers * len(QUEUE_KINDS), NONE, np.int64)
    for touches in writes:
        for task, lo, hi in zip(touches.tasks.tolist(), touches.lo.tolist(), touches.hi.tolist(), strict=True):
            for queue in range(lo, hi):
                if cleared[queue] != NONE:
                    first, region = names.task(int(cleared[queue])), names.region(Buffer.QUEUES, queue, queue + 1)
                    raise VerifyError(
                        "queue",
                        f"{region} is cleared twice: {first}, {names.task(task)}",
                    )
                cleared[queue] = task
    owner: dict[int, tuple[int, int]] = {}
    for touches in reads:
        for task, queue in zip(touches.tasks.tolist(), touches.lo.tolist(), strict=True):
            phase = (touches.op.opcode, int(program.words[task, Word.LAYER]))
            if owner.setdefault(queue, phase) != phase:
                raise VerifyError(
                    "queue", f"{names.task(task)} draws from queue {queue}, which belongs to layer {owner[queue][1]}"
                )
            if cleared[queue] == NONE:
                raise VerifyError(
                    "queue",
                    f"{names.task(task)} draws from {names.region(Buffer.QUEUES, queue, queue + 1)}, "
                    f"which no task of the step clears",
                )
