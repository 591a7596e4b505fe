"""Times of what is queued on a card back to back, by the card's clock."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch


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
