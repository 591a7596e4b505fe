"""Who is known to have finished before a task starts: one greedy run of the counters, and vector clocks along it.

Waits are monotone: counters only grow, so a wait that is reached stays reached, and running one track further never
stops another. Hence the order in which tracks are run does not matter: if the greedy run below completes, every fair
interleaving does, and if it stalls, every interleaving stalls at the same tasks.

`known[t][m]` is the highest place in track m that must be complete before task t starts. A wait orders after a
signal only if its target cannot be reached without it: with the signals of one counter summing to `total` a step,
signal i is *necessary* for a count when `total - (i and what its track signals later on the counter) < count`. A wait
joins the clocks of its necessary signals; the others may or may not have happened.

Clocks change only at waits, so they are stored per *segment*: the tasks of a track from one that waits up to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mk.graph import resolve
from mk.isa import ISA, NONE, Buffer, Word
from mk.schedule.lower import Program
from mk.verify.counters import WAITS
from mk.verify.errors import Ints, Names, VerifyError
from mk.verify.spans import writes_tokens


@dataclass(frozen=True)
class Clocks:
    """Happens-before of one step.

    known: int32 [segments, tracks]; the own track's column is meaningless (program order says more).
    closed: bool [segments], the previous step is known to be complete.
    segment: int64 [n], the row of each descriptor.
    """

    known: npt.NDArray[np.int32]
    closed: npt.NDArray[np.bool_]
    segment: Ints
    names: Names

    def before(self, tasks: Ints) -> npt.NDArray[np.int32]:
        """For each task, the highest place of every track that is complete before it starts: int32 [n, tracks]."""
        have = self.known[self.segment[tasks]]
        have[np.arange(len(tasks)), self.names.track[tasks]] = self.names.index[tasks] - 1
        return have


def run_greedily(program: Program, names: Names) -> Clocks:
    """Run one step over the counters as far as it goes; raises VerifyError("deadlock") where it stalls."""
    return _Run(program, names).finish()


class _Run:
    """The state of the greedy run. Only tasks that wait or signal are visited."""

    def __init__(self, program: Program, names: Names) -> None:
        self.program, self.names = program, names
        words, tracks = program.words, program.tracks
        waits = words[:, WAITS] != NONE
        signals = words[:, Word.SIGNAL] != NONE
        self.tasks = np.flatnonzero(waits.any(axis=1) | signals)
        bounds = np.searchsorted(self.tasks, program.offsets)
        self.cursor, self.end = bounds[:-1].tolist(), bounds[1:].tolist()
        self.value = [0] * len(program.counters)
        # row `track` is the segment before that track's first wait; column tracks is "the previous step is complete"
        self.known = np.full((tracks + int(waits.any(axis=1).sum()), tracks + 1), -1, np.int32)
        self.starts: list[int] = program.offsets[:-1].tolist()
        self.row = list(range(tracks))
        self.row_at_signal = np.full(len(words), -1, np.int64)
        self.joined: dict[tuple[int, int], npt.NDArray[np.int32]] = {}
        self._prepare_signals()

    def _prepare_signals(self) -> None:
        """Signals sorted by counter, then track, then place, each with what its track adds from it on."""
        words, track = self.program.words, self.names.track
        tasks = np.flatnonzero(words[:, Word.SIGNAL] != NONE)
        tasks = tasks[np.argsort(words[tasks, Word.SIGNAL], kind="stable")]
        counter, value = words[tasks, Word.SIGNAL], words[tasks, Word.SIGNAL_VALUE].astype(np.int64)
        total = np.cumsum(value[::-1])[::-1]  # of this signal and all behind it
        last = np.ones(len(tasks), bool)
        last[:-1] = (counter[1:] != counter[:-1]) | (track[tasks][1:] != track[tasks][:-1])
        ends = np.flatnonzero(last)
        behind = np.append(total, 0)[ends + 1]
        self.signals, self.from_here = tasks, total - np.repeat(behind, np.diff(ends, prepend=-1))
        self.first_signal = np.searchsorted(counter, np.arange(len(self.program.counters) + 1))

    def finish(self) -> Clocks:
        words, tasks = self.program.words, self.tasks
        final = writes_tokens(words)
        closing = {int(words[task, Word.SIGNAL]) for task in final} - {NONE}
        first, count0 = words[tasks, Word.WAIT0].tolist(), words[tasks, Word.WAIT0_COUNT].tolist()
        second, count1 = words[tasks, Word.WAIT1].tolist(), words[tasks, Word.WAIT1_COUNT].tolist()
        signal, gain = words[tasks, Word.SIGNAL].tolist(), words[tasks, Word.SIGNAL_VALUE].tolist()
        task_of, value, known, row = tasks.tolist(), self.value, self.known, self.row
        tracks = self.program.tracks
        known[self.names.track[final], tracks] = 1  # the tokens' own track has done its previous step
        waiting: list[list[int]] = [[] for _ in self.program.counters]
        least = [0] * len(waiting)  # the smallest count that anyone in `waiting` needs
        ready = list(range(tracks))
        while ready:
            track = ready.pop()
            at, end = self.cursor[track], self.end[track]
            while at < end:
                blocked = NONE
                for counter, count in ((first[at], count0[at]), (second[at], count1[at])):
                    if counter != NONE and value[counter] < count:
                        blocked, needed = counter, count
                if blocked != NONE:
                    queue = waiting[blocked]
                    least[blocked] = min(least[blocked], needed) if queue else needed
                    queue.append(track)
                    break
                if first[at] != NONE or second[at] != NONE:
                    clock = known[len(self.starts)]
                    clock[:] = known[row[track]]
                    for counter, count in ((first[at], count0[at]), (second[at], count1[at])):
                        if counter != NONE and count > 0:
                            np.maximum(clock, self._join(counter, count), out=clock)
                        elif counter in closing:
                            clock[tracks] = 1
                    row[track] = len(self.starts)
                    self.starts.append(task_of[at])
                counter = signal[at]
                if counter != NONE:
                    self.row_at_signal[task_of[at]] = row[track]
                    value[counter] += gain[at]
                    if waiting[counter] and value[counter] >= least[counter]:
                        ready += waiting[counter]
                        waiting[counter] = []
                at += 1
            self.cursor[track] = at
        if self.cursor != self.end:
            raise self._deadlock()
        return self._clocks()

    def _join(self, counter: int, count: int) -> npt.NDArray[np.int32]:
        """What a reached wait implies: the join of the clocks at its necessary signals, themselves included."""
        joined = self.joined.get((counter, count))
        if joined is None:
            of = slice(self.first_signal[counter], self.first_signal[counter + 1])
            necessary = self.program.counters[counter].per_step - self.from_here[of] < count
            tasks = self.signals[of][necessary]
            clocks = self.known[self.row_at_signal[tasks]]
            clocks[np.arange(len(tasks)), self.names.track[tasks]] = self.names.index[tasks]
            joined = self.joined[counter, count] = clocks.max(axis=0, initial=-1)
        return joined

    def _clocks(self) -> Clocks:
        tracks, starts = self.program.tracks, np.array(self.starts)
        by_start = np.argsort(starts, kind="stable")  # a track's own first row stands before a wait in its first task
        segment = by_start[np.searchsorted(starts[by_start], np.arange(len(self.program.words)), "right") - 1]
        known = self.known[: len(starts)]
        return Clocks(known[:, :tracks], known[:, tracks] > 0, segment, self.names)

    def _deadlock(self) -> VerifyError:
        """Walk from a stuck track to the one that holds the signal it misses, until a track comes up twice."""
        words, names = self.program.words, self.names
        track = next(track for track, at in enumerate(self.cursor) if at < self.end[track])
        seen: list[int] = []
        steps: list[str] = []
        while track not in seen:
            seen.append(track)
            task = int(self.tasks[self.cursor[track]])
            missing = [
                (int(words[task, wait]), int(words[task, wait + 1]))
                for wait in WAITS
                if words[task, wait] != NONE and self.value[words[task, wait]] < words[task, wait + 1]
            ]
            counter, count = missing[0]
            steps.append(
                f"{names.task(task)} waits for {names.counter(counter)} ({self.value[counter]} of {count} arrived)"
            )
            signals = self.signals[self.first_signal[counter] : self.first_signal[counter + 1]]
            holder = int(signals[self.row_at_signal[signals] < 0][0])
            steps[-1] += f", {names.task(holder)} would signal it"
            track = int(names.track[holder])
        stuck = sum(at < end for at, end in zip(self.cursor, self.end, strict=True))
        where = f"; and so back to {self.program.name_of(track)}"
        buffers = _reads(self.program, int(self.tasks[self.cursor[seen[0]]]))
        hint = "a wave stands before one that it reads from, or a wait follows a signal that needs it first"
        return VerifyError(
            "deadlock", f"deadlock of {stuck} tracks before {buffers}: " + "; ".join(steps) + where, hint
        )


def _reads(program: Program, task: int) -> str:
    """What a stuck task was going to read, by buffer names."""
    word = program.words[task : task + 1]
    op = ISA.rows[int(word[0, Word.OPCODE])]
    names = {Buffer(int(resolve(access, word)[0])).name for access in op.reads}
    return f"{', '.join(sorted(names))} can be read" if names else "it can start"
