"""The decode loop over the kernel: a thread in the library (csrc/decode_loop.cuh) that launches steps by itself.

It never needs Python, and Python waits for it without the GIL. Page tables go up between steps while it runs.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from mk.decode_loop import CardLost, LoopStep, Parked, Run
from mk.errors import MkError
from mk.kernel.host_ring import HostRing
from mk.kernel.runtime import Runtime
from mk.kernel.step_params import HOST_STEPS, MAX_ROWS
from mk.kv import PageTable
from mk.schedule.lower import Program

log = logging.getLogger("mk.kernel")

QUEUE = 256  # steps that the reader may be behind
GRACE_S = 5.0  # beyond the loop's own limit, after which its thread counts as dead

RECORD = np.dtype([("number", "u8"), ("started_ns", "i8"), ("tokens", "i4", MAX_ROWS), ("status", "i4", MAX_ROWS)])
"""`StepRecord` of decode_loop.cuh."""


class LoopRun(ctypes.Structure):
    """The same of decode_loop.cuh."""

    _fields_ = (
        ("first", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),
        ("rows", ctypes.c_int32),
        ("keys", ctypes.c_int32 * MAX_ROWS),
        ("held", ctypes.c_int32 * MAX_ROWS),
        ("budget", ctypes.c_int32 * MAX_ROWS),
        ("ends_at", ctypes.c_int32 * (MAX_ROWS + 1)),
        ("ends", ctypes.POINTER(ctypes.c_int32)),
    )


class LoopState(ctypes.Structure):
    """The same of decode_loop.cuh."""

    _fields_ = (("launches", ctypes.c_uint64), ("parked", ctypes.c_int32), ("code", ctypes.c_int32))


class NativeLoop:
    """A `DecodeLoop` (`mk/decode_loop.py`) over a runtime, whose steps nobody else launches while a run goes on.

    For one thread, but for `stop`. The library deletes its loop then or at the interpreter's exit, whichever thread is
    inside it at that time: so every call holds `_use`, and none is made after the deletion.
    """

    def __init__(self, runtime: Runtime, tables: PageTable, choose: Callable[[Run], Program], ahead: int) -> None:
        """tables: the rows' pages, which a run and a grant send up. choose: the program of a run.

        Raises MkError for an `ahead` that the ring has no room for.
        """
        most = min(HOST_STEPS, QUEUE)  # the library would not go further ahead
        if not 1 <= ahead <= most:
            raise MkError(f"engine.run_ahead={ahead} must lie in 1..{most}")
        self.ahead = ahead
        self.parked = Parked.ASKED
        self._runtime, self._tables, self._choose = runtime, tables, choose
        self._limit_ns = 2 * runtime.params.time_limit_ns  # a step gives itself up after half of that
        self._patience_ns = self._limit_ns + int(GRACE_S * 1e9)
        self._records = np.zeros(QUEUE, RECORD)
        self._library = library = runtime.library
        library.mk_loop_start.restype = ctypes.c_void_p
        device, stream = runtime.device.index or 0, runtime.stream.cuda_stream
        self._loop = ctypes.c_void_p(
            library.mk_loop_start(
                ctypes.c_int(device),
                ctypes.c_void_p(stream),
                ctypes.c_void_p(runtime.ring.address),
                ctypes.c_int(ahead),
                ctypes.c_int(QUEUE),
                ctypes.c_int64(self._limit_ns),
            )
        )
        self._use = threading.Lock()
        self._stop = weakref.finalize(self, _stop, library, self._loop, self._use, runtime.ring, self._patience_ns)

    @contextmanager
    def _alive(self) -> Iterator[ctypes.c_void_p]:
        """The library's loop, which stays meanwhile. Raises CardLost where it is gone."""
        with self._use:
            if not self._stop.alive:
                self.parked = Parked.LOST
                raise CardLost("the loop was stopped")
            yield self._loop

    def resume(self, run: Run) -> None:
        if self.parked is Parked.RUNNING:
            raise MkError("a run is under way", hint="DecodeLoop.park, and read it to its end")
        if self.parked is Parked.LOST:
            raise CardLost("the card has been lost, or the loop was stopped")
        runtime, rows = self._runtime, len(run.keys)
        program = self._choose(run)
        if program is not runtime.program:
            runtime.load(program)
        self._held = [min(held, runtime.longest) if keys else 0 for held, keys in zip(run.held, run.keys, strict=True)]
        runtime.set_tables(self._tables.table)
        runtime.set_sequences(run.keys, run.tokens, sampling=run.sampling, held=self._held)
        ends = [sorted(row) for row in run.ends]
        flat = (ctypes.c_int32 * max(1, sum(map(len, ends))))(*(token for row in ends for token in row))
        given = LoopRun(
            first=runtime.launched, steps=2**64 - 1 if run.steps is None else run.steps, rows=rows, ends=flat
        )
        given.keys[:rows], given.held[:rows], given.budget[:rows] = run.keys, self._held, run.budgets
        given.ends_at[: rows + 1] = [sum(map(len, ends[:row])) for row in range(rows + 1)]
        with self._alive() as loop:
            if not self._library.mk_loop_resume(loop, ctypes.byref(runtime.params), ctypes.byref(given)):
                raise RuntimeError("the loop was not parked")
        self.parked = Parked.RUNNING

    def grant(self, held: Sequence[int]) -> None:
        runtime = self._runtime
        runtime.set_tables(self._tables.table)  # in the stream before the steps that the grant allows
        for row, (before, now) in enumerate(zip(self._held, held, strict=True)):
            now = min(now, runtime.longest)
            if before and now > before:
                runtime.require_pages(row, before + 1, now)
                self._held[row] = now
                with self._alive() as loop:
                    self._library.mk_loop_grant(loop, ctypes.c_int(row), ctypes.c_int(now))

    def park(self) -> None:
        with self._use:
            if self._stop.alive:
                self._library.mk_loop_park(self._loop)

    def read(self) -> list[LoopStep]:
        """Raises `StepAborted` naming the missing signal for a step that the kernel gave up, `CardLost`, MkError."""
        if self.parked is not Parked.RUNNING:
            return []
        patience = ctypes.c_int64(self._patience_ns)
        address = ctypes.c_void_p(self._records.ctypes.data)
        state = LoopState()
        with self._alive() as loop:
            count = self._library.mk_loop_read(loop, address, ctypes.c_int(QUEUE), patience)
            if count == 0:
                self._library.mk_loop_state(loop, ctypes.byref(state))
        if count < 0:
            self.parked = Parked.LOST
            raise CardLost("the decode thread gives no sign of life")
        if count == 0:
            self._end(state)
        return [self._step(record) for record in self._records[:count]]

    def stop(self) -> None:
        self._stop()
        self.parked = Parked.LOST

    def _step(self, record: np.void) -> LoopStep:
        assert self._runtime.program is not None
        rows = self._runtime.program.shape.rows
        tokens, status = (record[name][:rows].astype(np.int64) for name in ("tokens", "status"))
        return LoopStep(int(record["number"]), tokens, status, int(record["started_ns"]))

    def _end(self, state: LoopState) -> None:
        """The run is over: the runtime's count of launches goes on where the loop's has come to."""
        runtime = self._runtime
        self.parked = Parked(state.parked)
        runtime.count_launches(state.launches)
        error = runtime.library.mk_error(state.code).decode() if state.code else None
        if self.parked is Parked.REFUSED:
            raise MkError(f"launch failed: {error}")
        if self.parked is Parked.ABORTED:
            runtime.finish()
            raise MkError(f"a step ended without a token in the ring, {runtime.launched} launches have been made")
        if self.parked is Parked.LOST:
            seconds = f"no token and no end of a step in {self._limit_ns / 1e9:g} s"
            raise CardLost(f"the card does not answer: {error or seconds}")


_lost: list[HostRing] = []  # of loops whose threads never came back: the card may write to them yet


def _stop(library: ctypes.CDLL, loop: ctypes.c_void_p, use: threading.Lock, ring: HostRing, patience_ns: int) -> None:
    """Park, so that who reads gets an answer; then delete. ring: what a run that nobody read to its end writes to."""
    library.mk_loop_park(loop)
    with use:
        if library.mk_loop_stop(loop, ctypes.c_int64(patience_ns)) == 0:
            _lost.append(ring)
            log.error("the decode thread gives no sign of life: it is left behind in a call to the card")
