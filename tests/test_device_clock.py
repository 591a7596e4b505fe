"""The card's clock, on a stand-in whose events tick a millisecond each."""

from __future__ import annotations

import pytest
import torch

from experiments.device_clock import queued
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
