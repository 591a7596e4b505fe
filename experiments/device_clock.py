"""Times of what runs on a device: by a card's own clock, of a CPU by the host's."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

import torch

WARMUP = 3  # launches, the first of which may compile


def queued(
    launch: Callable[[int], object],
    count: int,
    finish: Callable[[], object] | None = None,
    stream: torch.cuda.Stream | None = None,
) -> tuple[list[float], float]:
    """(milliseconds of each of `launch(0)` to `launch(count - 1)`, their mean by the host's clock).

    An event goes before the first and after each. stream: that they run in, None the current one; finish: waits for it,
    None waits for the card.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    started = time.perf_counter()
    events[0].record(stream)
    for number, event in enumerate(events[1:]):
        launch(number)
        event.record(stream)
    (finish or torch.cuda.synchronize)()
    wall_ms = (time.perf_counter() - started) * 1e3 / count
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)], wall_ms


def one_by_one(launch: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Milliseconds of each of `count` launches in a row. On a card, after some that are not counted; on a CPU they
    return when they are done."""
    if device.type == "cuda":
        for _ in range(WARMUP):
            launch()
        return queued(lambda number: launch(), count)[0]
    stamps = [time.perf_counter()]
    for _ in range(count):
        launch()
        stamps.append(time.perf_counter())
    return [(b - a) * 1e3 for a, b in itertools.pairwise(stamps)]


@contextlib.contextmanager
def stopwatch(device: torch.device) -> Iterator[Callable[[], float]]:
    """Gives what says the milliseconds of its block, once that is over on the device."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        yield lambda: begin.elapsed_time(end)
        end.record()
    else:
        stamps = [time.perf_counter()]
        yield lambda: (stamps[1] - stamps[0]) * 1e3
        stamps.append(time.perf_counter())
