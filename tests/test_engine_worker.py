"""The engine's thread: it sleeps, wakes, tells of failures, and ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import NoReturn

import pytest

from mk.batching.request import GenerationParams
from mk.batching.worker import QueueFull, Worker
from mk.errors import MkError
from mk.server.generation import Generation
from tests.engine_rig import Answer, core, prompt, scripted, successor


class Waiting(Answer):
    """An answer whose end can be waited for from another thread."""

    def __init__(self, *args: object, **params: object) -> None:
        super().__init__(*args, **params)  # type: ignore[arg-type]
        self.done = threading.Event()
        sink = self.request.sink

        def tell(delivery: object) -> None:
            sink(delivery)  # type: ignore[arg-type]
            if self.finish:
                self.done.set()

        self.request.sink = tell

    def wait(self) -> Waiting:
        assert self.done.wait(10)
        return self


def test_requests_from_several_threads_are_all_answered() -> None:
    worker = Worker(core(scripted()))
    worker.start()
    answers = [Waiting(prompt(50, seed), 20) for seed in range(12)]
    threads = [threading.Thread(target=worker.submit, args=(answer.request,)) for answer in answers]
    for thread in threads:
        thread.start()
    assert {answer.wait().finish for answer in answers} == {"length"}
    late = Waiting(prompt(5), 2)  # after it has gone to sleep
    worker.submit(late.request)
    late.wait()
    worker.stop()
    assert worker.snapshot.running == worker.snapshot.waiting == 0
    assert worker.snapshot.finished == {"length": 13} and worker.snapshot.generated_tokens == 242


def test_a_newcomer_interrupts_a_run_and_a_cancelled_request_ends_soon() -> None:
    """The run stands at its tenth token until the newcomer has come, then at its hundredth until it is cancelled."""
    entered, come, cancelled = threading.Event(), threading.Event(), threading.Event()
    long, short = Waiting(prompt(20), 200), Waiting(prompt(60, seed=1), 3)

    def held(history: Sequence[int]) -> Mapping[int, float]:
        if history[:20] == long.request.prompt and len(history) in (30, 120):
            entered.set()
            assert (come if len(history) == 30 else cancelled).wait(10)
        return successor(history)

    worker = Worker(core(scripted(held, ahead=1)))
    worker.start()
    worker.submit(long.request)
    assert entered.wait(10)
    worker.submit(short.request)
    come.set()
    assert short.wait().finish == "length" and len(short.tokens) == 3  # the run goes no further than it may
    worker.cancel(long.request)
    cancelled.set()
    assert long.wait().finish == "cancelled" and len(long.tokens) <= 102
    worker.stop()
    assert worker.snapshot.finished == {"length": 1, "cancelled": 1}


def test_a_refusal_of_the_engines_is_told_and_the_thread_goes_on() -> None:
    worker = Worker(core(scripted()))
    worker.start()
    wrong = Waiting([9999], 3)
    worker.submit(wrong.request)
    assert wrong.wait().finish == "error" and "outside" in (wrong.error or "")
    right = Waiting(prompt(9), 3)
    worker.submit(right.request)
    assert right.wait().finish == "length" and worker.failed is None
    worker.stop()


def test_so_many_may_wait_wherever_they_do_and_several_come_together_or_not_at_all() -> None:
    """In the core's queue, and before a thread that is busy has taken them in."""
    entered, go_on = threading.Event(), threading.Event()

    def held(history: Sequence[int]) -> Mapping[int, float]:
        if len(history) == 20:
            entered.set()
            assert go_on.wait(10)
        return successor(history)

    worker = Worker(core(scripted(held, rows=1)))
    queued, arriving, refused = (
        [Waiting(prompt(length, seed), 3) for seed in range(count)] for count, length in ((3, 20), (2, 10), (4, 10))
    )
    worker.submit(*(answer.request for answer in queued), max_waiting=3)
    worker.start()
    assert entered.wait(10)  # one of them has left the queue for the only slot
    worker.submit(arriving[0].request, max_waiting=4)
    for count, most in ((4, 6), (2, 4), (1, 3)):
        with pytest.raises(QueueFull, match=f"3 requests are waiting, and {most} may"):
            worker.submit(*(answer.request for answer in refused[:count]), max_waiting=most)
    worker.submit(arriving[1].request, max_waiting=4)
    go_on.set()
    assert {answer.wait().finish for answer in (*queued, *arriving)} == {"length"}
    worker.stop()
    assert worker.snapshot.finished == {"length": 5} and not any(answer.deliveries for answer in refused)


@pytest.mark.parametrize("defect", [False, True], ids=["a step given up", "a defect"])
def test_a_failing_step_ends_what_runs_and_a_defect_the_service(defect: bool) -> None:
    def breaks(history: Sequence[int]) -> Mapping[int, float]:
        if len(history) == 25:
            raise ZeroDivisionError("oops") if defect else MkError("SM 3 gave up")
        return successor(history)

    worker = Worker(core(scripted(breaks)))
    worker.start()
    answers = [Waiting(prompt(20, seed), 30) for seed in range(5)]  # three run, two wait
    worker.submit(*(answer.request for answer in answers))
    for answer in answers:
        assert answer.wait().finish == "error" and ("oops" if defect else "gave up") in (answer.error or "")
    if defect:
        assert worker.failed is not None and "ZeroDivisionError" in worker.failed
        with pytest.raises(MkError, match="out of order"):
            worker.submit(answers[0].request)
    else:
        good = Waiting(prompt(40), 4)
        worker.submit(good.request)
        assert good.wait().finish == "length"
    worker.stop()


def breaks(*_: object) -> NoReturn:
    raise TypeError("oops")


def wrong_input(worker: Worker, victim: Waiting) -> None:
    victim.request.prompt = ["no token"]  # type: ignore[list-item]
    worker.submit(Waiting(prompt(9), 3).request, victim.request, Waiting(prompt(9), 3).request)


def refused_sink(worker: Worker, victim: Waiting) -> None:
    victim.request.prompt, victim.request.sink = [9999], breaks
    worker.submit(victim.request)


def cancelled_sink(worker: Worker, victim: Waiting) -> None:
    worker.submit(victim.request)
    victim.request.sink = breaks
    worker.cancel(victim.request)


def running_sink(worker: Worker, victim: Waiting) -> None:
    worker.core.running[1].sink = breaks


def memory(worker: Worker, victim: Waiting) -> None:
    worker.core.engine.free = breaks  # type: ignore[method-assign]
    worker.cancel(worker.core.running[1])


def cache(worker: Worker, victim: Waiting) -> None:
    assert worker.core.cache, "a block is full"
    worker.core.cache.touch = worker.core.cache.clear = breaks  # type: ignore[method-assign]
    worker.cancel(worker.core.running[1])


def gauges(worker: Worker, victim: Waiting) -> None:
    worker.core.pages_in_use = breaks


DEFECTS = (wrong_input, refused_sink, cancelled_sink, running_sink, memory, cache, gauges)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
@pytest.mark.parametrize("stops", [False, True], ids=["", "while it stops"])
def test_wherever_a_defect_shows_everybody_hears_of_it(defect: Callable[[Worker, Waiting], None], stops: bool) -> None:
    """Those that run, that wait and that come behind it; and the thread ends when it is told to."""
    entered, go_on = threading.Event(), threading.Event()

    def held(history: Sequence[int]) -> Mapping[int, float]:
        if len(history) == 75:
            entered.set()
            assert go_on.wait(10)
        return successor(history)

    worker = Worker(core(scripted(held, ahead=1)))
    answers = [Waiting(prompt(70, seed), 30) for seed in range(5)]  # three run, two wait
    worker.submit(*(answer.request for answer in answers))
    worker.start()
    assert entered.wait(10)
    deaf = worker.core.running[1] if defect is running_sink else None
    defect(worker, Waiting(prompt(9), 3))
    late = [Waiting(prompt(9), 3) for _ in range(2)]
    for answer in late:
        worker.submit(answer.request)
    worker._stopping = stops  # as `stop`, which waits for the thread
    go_on.set()
    for answer in (*answers, *late):
        if answer.request is not deaf:
            assert answer.wait().finish in ("error", "cancelled"), answer.request.id
            assert answer.finish == "cancelled" or answer.error
    worker.stop()
    assert worker.failed == "the engine is out of order: TypeError: oops" or defect is wrong_input
    assert worker.failed is not None and "TypeError" in worker.failed
    assert not worker._thread.is_alive() and not worker._inbox and worker._arriving == 0
    with pytest.raises(MkError, match="out of order"):
        worker.submit(Waiting(prompt(9), 3).request)


def test_who_stops_listening_at_that_moment_is_no_defect_of_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(core(scripted()))
    service = SimpleNamespace(worker=worker, metrics=SimpleNamespace(clock=lambda: None), max_waiting=4)

    async def ask() -> Generation:
        return Generation(service, [prompt(9)], [GenerationParams(3)])  # type: ignore[arg-type]

    asked = asyncio.run(ask())
    monkeypatch.setattr(asked._loop, "is_closed", lambda: False)  # it was not, a moment before
    with pytest.raises(RuntimeError, match="closed"):
        asked._loop.call_soon_threadsafe(print)
    other = Waiting(prompt(9, 1), 3)
    worker.submit(other.request)
    worker.start()
    assert other.wait().finish == "length"
    worker.stop()
    assert worker.failed is None and worker.snapshot.finished == {"length": 2}


def test_stopping_ends_requests_with_an_error() -> None:
    """One that runs, which stands in a step until the end has been asked for, and one that waits."""
    entered, stopping = threading.Event(), threading.Event()

    def held(history: Sequence[int]) -> Mapping[int, float]:
        if len(history) == 30:
            entered.set()
            assert stopping.wait(10)
        return successor(history)

    worker = Worker(core(scripted(held, rows=1)))
    answers = [Waiting(prompt(20, seed), 250) for seed in range(2)]
    worker.submit(*(answer.request for answer in answers))
    worker.start()
    assert entered.wait(10)
    ending = threading.Thread(target=worker.stop)
    ending.start()
    while not worker.stopping:
        time.sleep(0.001)
    stopping.set()
    ending.join(10)
    for answer in answers:
        assert answer.wait().finish == "error" and answer.error == "the server is shutting down"
    with pytest.raises(MkError, match="shutting down"):
        worker.submit(answers[0].request)
