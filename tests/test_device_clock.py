"""The clocks: the card's on a stand-in whose events tick a millisecond each, and the host's."""

from __future__ import annotations

import pytest
import torch

from experiments.device_clock import WARMUP, one_by_one, queued, stopwatch
from tests.device_rig import FakeEvent, FakeLibrary, fake_device

__all__ = ["fake_device"]


@pytest.mark.usefixtures("fake_device")
def test_launches_are_timed_from_event_to_event_in_order_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []

    def launch(number: int) -> None:
        said.append(number)
        FakeEvent.ticks += number  # this one takes longer

    times, wall_ms = queued(launch, 4, lambda: said.append("finished"))
    assert times == [1.0, 2.0, 3.0, 4.0] and wall_ms >= 0
    assert said == [0, 1, 2, 3, "finished"]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("synchronized"))
    assert len(queued(launch, 2)[0]) == 2 and said[-1] == "synchronized"


def test_events_go_to_the_stream_that_is_timed(fake_device: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[object] = []
    record = FakeEvent.record
    monkeypatch.setattr(FakeEvent, "record", lambda self, stream=None: (streams.append(stream), record(self)))
    stream = torch.cuda.Stream()
    queued(lambda number: None, 3, lambda: None, stream)
    assert streams == [stream] * 4


@pytest.mark.usefixtures("fake_device")
def test_on_a_card_launches_warm_up_and_a_block_lasts_from_event_to_event() -> None:
    calls: list[int] = []

    def launch() -> None:
        calls.append(1)
        FakeEvent.ticks += 2

    assert one_by_one(launch, 4, torch.device("cuda")) == [3.0] * 4 and len(calls) == 4 + WARMUP
    with stopwatch(torch.device("cuda")) as milliseconds:
        launch()
    assert milliseconds() == 3.0


def test_on_a_cpu_the_host_tells_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def launch() -> None:
        now[0] += 0.25

    assert one_by_one(launch, 3, torch.device("cpu")) == [250.0] * 3 and now == [0.75]
    with stopwatch(torch.device("cpu")) as milliseconds:
        launch()
        launch()
    now[0] += 9
    assert milliseconds() == 500.0
