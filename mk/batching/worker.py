"""The thread that runs the core: it computes while there is something to compute, else sleeps on a condition."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mk.batching.core import Core
from mk.batching.request import Request
from mk.decode_loop import CardLost
from mk.errors import MkError
from mk.kv import KINDS

log = logging.getLogger("mk.batching")
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
        self._inbox: deque[Callable[[], None]] = deque()
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
            self._inbox.extend(partial(self._take_in, request) for request in requests)
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        """End a request after the step it is in; its sink hears of it, unless it has finished meanwhile."""
        with self._wake:
            self._inbox.append(partial(self.core.cancel, request))
            self._wake.notify()

    def _take_in(self, request: Request) -> None:
        with self._wake:  # whoever submits meanwhile counts it once, on one side or the other
            self._arriving -= 1
            try:
                if self.failed:  # since it was submitted
                    raise MkError(self.failed)
                self.core.submit(request)
            except Exception as error:  # whatever it is, the request must hear of it
                self.core.refuse(request, str(error))
                if not isinstance(error, MkError):
                    raise

    @property
    def _busy(self) -> bool:
        """Whether there is something to compute, and an engine to compute it."""
        return self.failed is None and self.core.busy

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._stopping or self._busy):
                    self._wake.wait()
            try:
                if self._attend():
                    break
                if self._busy:
                    self.core.tick()
                self.snapshot = self._snapshot()
            except Exception as error:  # wherever it comes from, requests must hear of it
                log.exception("the engine failed")
                self._fail(error)
        self._end_all("the server is shutting down")

    def _attend(self) -> bool:
        """Take in what has come, also between two steps; whether the thread is to end."""
        with self._wake:
            come, stopping = len(self._inbox), self._stopping
        stale = bool(come) or time.monotonic() > self._seen + REFRESH_S
        for _ in range(come):  # nothing here refers to a request any more when the thread sleeps
            self._inbox.popleft()()  # one at a time: where one fails, the others are still to come
        if stale and self._busy:  # else the tick is about to end: idle is what has let go of all requests
            self.snapshot = self._snapshot()
        return stopping

    def _fail(self, error: Exception) -> None:
        """Requests in flight end with an error. A step that the engine gave up leaves it usable, a defect does not."""
        if not isinstance(error, MkError) or isinstance(error, CardLost):
            self._give_up(error)  # before requests are told, so that none comes in between
        self._end_all(f"the engine failed: {error}")

    def _give_up(self, error: Exception) -> None:
        with self._wake:
            self.failed = self.failed or f"the engine is out of order: {type(error).__name__}: {error}"

    def _end_all(self, message: str) -> None:
        try:
            self.core.fail_all(message)
            self.snapshot = self._snapshot()
        except Exception as error:  # of a request's end: what it held is not given back
            log.exception("the engine could not end its requests")
            self._give_up(error)

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
