"""How an SM draws tickets: one at a time, a few ahead of the tile it works on, until its first failed one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from mk.interpreter.registry import Bench, Task
from mk.interpreter.step import Step
from mk.isa import Word


def claimed(bench: Bench, task: Task, step: Step, total: int, item: Callable[[int], None]) -> Iterator[None]:
    """Runs `item` for the tickets this SM gets of `total`: one claim and at most one item each time it is advanced."""
    heads, queue, ahead = bench.memory.queues[step.parity], task[Word.QUEUE], task[Word.CLAIM_AHEAD]
    held: deque[int] = deque()
    drawing = True
    while drawing or held:
        if drawing:
            ticket = heads[queue]
            heads[queue] += 1
            drawing = ticket < total
            if drawing:
                held.append(ticket)
        if held and (not drawing or len(held) > ahead):
            item(held.popleft())
        yield
