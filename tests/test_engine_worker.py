"""The engine's thread: it sleeps, wakes, tells of failures, and ends."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import pytest

from mk.engine.worker import QueueFull, Worker
from mk.errors import MkError
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
    entered, go_on = threading.Event(), threading.Event()

    def held(history: Sequence[int]) -> Mapping[int, float]:
        if len(history) == 30:
            entered.set()
            assert go_on.wait(10)
        return successor(history)

    worker = Worker(core(scripted(held, ahead=1)))
    worker.start()
    long, short = Waiting(prompt(20), 200), Waiting(prompt(60), 3)
    worker.submit(long.request)
    assert entered.wait(10)
    worker.submit(short.request)
    go_on.set()
    short.wait()
    assert long.finish is None or len(long.tokens) > len(short.tokens)
    worker.cancel(long.request)
    assert long.wait().finish in ("cancelled", "length")
    worker.stop()


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


def test_stopping_ends_requests_with_an_error() -> None:
    worker = Worker(core(scripted()))
    answer = Waiting(prompt(20), 250)
    worker.submit(answer.request)
    worker.start()
    worker.stop()
    assert answer.wait().finish in ("error", "length")
    with pytest.raises(MkError, match="shutting down"):
        worker.submit(answer.request)
