"""The thread that runs the core: it computes while there is something to compute, else sleeps on a condition."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mk.decode_loop import CardLost
from mk.engine.core import Core
from mk.engine.request import Request
from mk.errors import MkError
from mk.kv import KINDS

log = logging.getLogger("mk.engine")
REFRESH_S = 0.05  # of the snapshot while a run goes on: counting what the cache holds takes longer than a step may wait


class QueueFull(MkError):
    """As many requests wait as may."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Gauges and totals between two steps."""

    running: int
    waiting: int
    pages_in_use: dict[str, int]
    pages: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    steps: dict[int, int]  # by batch size
    preemptions: int
    finished: dict[str, int]


class Worker:
    """Runs a core on a thread of its own. All methods may be called from any thread."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.failed: str | None = None  # why the engine is out of order
        self._inbox: list[Callable[[], None]] = []
        self._arriving = 0  # requests that the core has not taken in yet: while a step lasts, it takes in nothing
        self._wake = threading.Condition()
        self._stopping = False
        self._seen = 0.0  # when the snapshot was taken
        core.attend = self._attend
        self._thread = threading.Thread(target=self._run, name="mk-engine", daemon=True)
        self.snapshot = self._snapshot()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End every request, the thread after the steps under way, and the engine's loop."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self.core.engine.loop.stop()

    @property
    def stopping(self) -> bool:
        """Whether every request ends or has ended because the worker does."""
        return self._stopping

    def submit(self, *requests: Request, max_waiting: int | None = None) -> None:
        """Queue requests, all or none, neighbours in order of arrival. One that cannot be served is told so through its
        sink.

        max_waiting: of requests in the queue, these included; None = any number.

        Raises QueueFull beyond that, MkError when the engine is out of order or shutting down.
        """
        with self._wake:
            if self.failed or self._stopping:
                raise MkError(self.failed or "the server is shutting down")
            waiting = self.core.queued + self._arriving
            if max_waiting is not None and waiting + len(requests) > max_waiting:
                raise QueueFull(f"{waiting} requests are waiting, and {max_waiting} may")
            self._arriving += len(requests)
            self._inbox.append(lambda: self._take_in(requests))
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        """End a request after the step it is in; its sink hears of it, unless it has finished meanwhile."""
        with self._wake:
            self._inbox.append(lambda: self.core.cancel(request))
            self._wake.notify()

    def _take_in(self, requests: Sequence[Request]) -> None:
        for request in requests:
            with self._wake:  # whoever submits meanwhile counts it once, on one side or the other
                self._arriving -= 1
                try:
                    self.core.submit(request)
                except MkError as error:
                    self.core.refuse(request, str(error))

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._stopping or self.core.busy):
                    self._wake.wait()
            if self._attend():
                self.core.fail_all("the server is shutting down")
                self.snapshot = self._snapshot()
                return
            try:
                self.core.tick()
            except Exception as error:  # whatever it is, requests must hear of it
                log.exception("the engine failed")
                self._fail(error)
            self.snapshot = self._snapshot()

    def _attend(self) -> bool:
        """Take in what has come, also between two steps; whether the thread is to end."""
        with self._wake:
            inbox, self._inbox = self._inbox, []
            stopping = self._stopping
        stale = bool(inbox) or time.monotonic() > self._seen + REFRESH_S
        while inbox:  # nothing here refers to a request any more when the thread sleeps
            inbox.pop(0)()
        if stale and self.core.busy:  # else the tick is about to end: idle is what has let go of all requests
            self.snapshot = self._snapshot()
        return stopping

    def _fail(self, error: Exception) -> None:
        """Requests in flight end with an error. A step that the engine gave up leaves it usable, a defect does not."""
        self.core.fail_all(f"the engine failed: {error}")
        if not isinstance(error, MkError) or isinstance(error, CardLost):
            with self._wake:
                self.failed = f"the engine is out of order: {type(error).__name__}: {error}"

    def _snapshot(self) -> Snapshot:
        core, totals = self.core, self.core.totals
        self._seen = time.monotonic()
        return Snapshot(
            len(core.running),
            len(core.waiting),
            {kind: core.pages_in_use(kind) for kind in KINDS},
            dict(core.pages.pages),
            totals.prompt_tokens,
            totals.cached_tokens,
            totals.generated_tokens,
            dict(totals.steps),
            totals.preemptions,
            dict(Counter(totals.finished)),
        )
