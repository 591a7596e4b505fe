"""The verifier: refuses, on the CPU and before a launch, a schedule that could deadlock or read the wrong data.

It looks at the lowered descriptors alone, never at how they were made:

* `words`: coordinates and weights fit the model, every tile is computed once;
* `owners`: what an SM keeps of its residual strips is for the same strips in every layer;
* `counters`: what arrives on a counter is what its waiters count on;
* `clocks`: one greedy run proves that no fair interleaving deadlocks, and yields who must be done before whom;
* `steps`: nothing of a step can overtake the previous one; the weight ring and the ticket queues;
* `regions`: every read after its write, every rewrite after the last read, for families of expert masks (`routing`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mk.isa import NONE, Buffer, Word
from mk.schedule.lower import Program
from mk.verify.clocks import run_greedily
from mk.verify.counters import check_arrivals
from mk.verify.errors import Names, VerifyError
from mk.verify.owners import check_owners
from mk.verify.regions import RegionCheck
from mk.verify.routing import DEFAULT_FAMILIES, Family, check_contexts
from mk.verify.spans import gather
from mk.verify.steps import check_closed, check_queues, check_ring
from mk.verify.words import check_lists, check_part, check_words

__all__ = ["DEFAULT_FAMILIES", "Family", "Report", "VerifyError", "verify"]


@dataclass(frozen=True, slots=True)
class Report:
    """What was verified: sizes of the program, names of the families, and the seconds it took."""

    tasks: int
    waits: int
    signals: int
    counters: int
    families: tuple[str, ...]
    seconds: float


def verify(program: Program, families: Sequence[Family] = DEFAULT_FAMILIES) -> Report:
    """Check a lowered step; raises VerifyError naming task (SM, place, operation, layer), counter and buffer.

    A program that passes runs to its end in every fair interleaving of its SMs, in every step, and every interleaving
    reads the same data, for each of the `families` of expert masks and contexts. A part of a step (`program.cut`) is
    checked against its whole, which is taken as verified: it is run once at a time, so it need not be closed.
    """
    start = time.perf_counter()
    check_lists(program)
    words, names = program.words, Names(program)
    if program.cut is None:
        check_words(program, names)
        check_owners(program, names)
    else:
        check_part(program, program.cut, names)
    check_contexts(program.shape, families)
    check_arrivals(program, names)
    check_ring(program, names)
    clocks = run_greedily(program, names)
    if program.cut is None:
        check_closed(program, clocks)
    reads, writes = gather(program, names)
    check_queues(program, names, reads.pop(Buffer.QUEUES, []), writes.pop(Buffer.QUEUES, []))
    check = RegionCheck(program, clocks, reads, writes)
    masks: dict[tuple[int, ...], Family] = {}  # families differ in more than the mask
    for family in families if program.shape.geometry.sparse_layers else ():
        masks.setdefault(tuple(family.experts(program.shape)), family)
    for buffer in sorted({*reads, *writes}):
        check.check_reuse(buffer)
        for case in masks.values() if check.routed(buffer) else (None,):
            check.check_buffer(buffer, case)
    waits = int((words[:, [Word.WAIT0, Word.WAIT1]] != NONE).sum())
    signals = int(np.count_nonzero(words[:, Word.SIGNAL] != NONE))
    taken = time.perf_counter() - start
    return Report(len(words), waits, signals, len(program.counters), tuple(f.name for f in families), taken)
