"""Runs of decode steps, whatever computes them: what a run may do, what it gives, and why it is parked.

A `DecodeLoop` owns decode. `resume` lets a batch go on; steps then follow one another without anybody's help, `read`
gives their tokens, and `grant` lets rows go further while they run. It parks when asked, and by itself before a step
that would take a row beyond its pages or its tokens, or once a row has ended. What was launched is always read: no
step is decoded twice. `mk/kernel/native_loop.py` has the one over the kernel, `TwinLoop` is over an engine in Python.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mk.errors import MkError
from mk.interpreter import StepOutputs
from mk.sampling import NO_TOKEN, SamplingParams

Ints = npt.NDArray[np.int64]


class CardLost(MkError):
    """The card does not answer: nothing more can run on it in this process."""


class Parked(IntEnum):
    """Why a loop is parked, in order of precedence, as csrc/decode_loop.cuh has it."""

    RUNNING = 0
    LOST = 1
    ABORTED = 2
    REFUSED = 3
    FAULT = 4
    END = 5
    ASKED = 6
    STEPS = 7
    BUDGET = 8
    ROOM = 9


@dataclass(frozen=True, slots=True)
class Run:
    """A batch, and how far it may go; one entry a row.

    tokens: what the first step decodes. keys: its context lengths with that token, 0 = inactive row. held: contexts
    that the row's pages cover. budgets: tokens that it may get. ends: tokens that end it. steps: at most, None = any.
    """

    tokens: Sequence[int]
    keys: Sequence[int]
    sampling: Sequence[SamplingParams]
    held: Sequence[int]
    budgets: Sequence[int]
    ends: Sequence[frozenset[int]]
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class LoopStep:
    """What a step sampled.

    tokens: int64 [rows], `NO_TOKEN` for a row that is inactive, has ended or got none. status: int64 [rows], `Status`.
    started_ns: when the step began by the clock of what computed it, from any point in time; -1 = unknown.
    """

    number: int
    tokens: Ints
    status: Ints
    started_ns: int


class DecodeLoop(Protocol):
    """For one thread. `ahead`: steps that may be under way beyond what has been looked at."""

    ahead: int
    parked: Parked  # the last run's end, once `read` has given all

    def resume(self, run: Run) -> None:
        """Begin a run; the loop must be parked. Raises MkError for rows that do not fit what they run on."""
        ...

    def grant(self, held: Sequence[int]) -> None:
        """The rows' page tables now cover contexts of `held` keys."""
        ...

    def park(self) -> None:
        """Ask for the run's end: steps under way are still read."""
        ...

    def read(self) -> list[LoopStep]:
        """The next steps, at least one; none = parked. Raises MkError for a step that failed; it is parked then."""
        ...

    def stop(self) -> None:
        """End the loop for good: it is lost then."""
        ...


def finish(loop: DecodeLoop) -> list[LoopStep]:
    """All that a run still gives."""
    steps: list[LoopStep] = []
    while found := loop.read():
        steps += found
    return steps


Compute = Callable[[Sequence[int], Sequence[int], Sequence[SamplingParams]], StepOutputs]


class TwinLoop:
    """The loop without a thread: `read` computes. It looks as late as it may, so a row's end is always noticed late."""

    def __init__(self, compute: Compute, ahead: int = 1) -> None:
        """compute(tokens, keys, sampling): one step of all rows."""
        self.ahead = ahead
        self.parked = Parked.ASKED
        self._compute = compute
        self._launched = 0  # in all
        self._flying: deque[LoopStep] = deque()

    def resume(self, run: Run) -> None:
        if self.parked is Parked.RUNNING:
            raise MkError("a run is under way", hint="DecodeLoop.park, and read it to its end")
        if self.parked is Parked.LOST:
            raise CardLost("the loop was stopped")
        self._run, self._held = run, list(run.held)
        self._live = [length > 0 for length in run.keys]
        self._tokens = list(run.tokens)
        self._done = 0  # launches of this run
        self._settled = Parked.RUNNING  # what ends it whatever comes
        self._failure: Exception | None = None
        self._asked = False
        self.parked = Parked.RUNNING

    def grant(self, held: Sequence[int]) -> None:
        self._held = list(held)

    def park(self) -> None:
        self._asked = True

    def read(self) -> list[LoopStep]:
        while self.parked is Parked.RUNNING:
            obstacle = self._obstacle()
            if obstacle is Parked.RUNNING and len(self._flying) < self.ahead:
                self._launch()
            elif self._flying:
                return [self._look_at(self._flying.popleft())]
            else:
                self.parked = obstacle
                if self._failure is not None:
                    raise self._forget_failure()
        return []

    def stop(self) -> None:
        self._flying.clear()
        self.parked = Parked.LOST

    def _forget_failure(self) -> Exception:
        """What ended the run. Kept, its traceback would keep all that was computing."""
        failure, self._failure = self._failure, None
        assert failure is not None
        return failure

    def _obstacle(self) -> Parked:
        """What keeps the next step from being launched."""
        run, live = self._run, [row for row, live in enumerate(self._live) if live]
        if self._settled is not Parked.RUNNING:
            return self._settled
        if self._asked:
            return Parked.ASKED
        if run.steps is not None and self._done >= run.steps:
            return Parked.STEPS
        if any(self._done >= run.budgets[row] for row in live):
            return Parked.BUDGET
        if any(run.keys[row] + self._done > self._held[row] for row in live):
            return Parked.ROOM
        return Parked.RUNNING

    def _launch(self) -> None:
        run, started = self._run, time.perf_counter_ns()
        keys = [length + self._done if length else 0 for length in run.keys]
        try:
            out = self._compute(self._tokens, keys, run.sampling)
        except Exception as error:  # told of after the steps before it
            self._settled, self._failure = Parked.ABORTED, error
            return
        self._tokens = np.maximum(out.tokens, 0).tolist()  # fed back whatever is made of them, as the kernel does it
        self._flying.append(LoopStep(self._launched, out.tokens, out.status, started))
        self._launched += 1
        self._done += 1

    def _look_at(self, step: LoopStep) -> LoopStep:
        live = np.array(self._live)
        status = np.where(live, step.status, 0)
        tokens = np.where(live & (status == 0), step.tokens, NO_TOKEN)
        for row in np.flatnonzero(live).tolist():
            fault, end = tokens[row] == NO_TOKEN, int(tokens[row]) in self._run.ends[row]
            if fault or end:
                self._live[row] = False
                why = Parked.FAULT if fault else Parked.END
                self._settled = why if self._settled is Parked.RUNNING else min(self._settled, why)
        return LoopStep(step.number, tokens, status, step.started_ns)
