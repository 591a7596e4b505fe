"""A stand-in for the card: `Runtime` on CPU tensors, with a library whose step is a few lines of Python.

Served steps are launched by the real decode loop, compiled without CUDA: its thread calls back into Python.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mk.device import DeviceFacts
from mk.kernel.build import Library
from mk.kernel.launches import WaveLaunches
from mk.kernel.runtime import Runtime
from mk.kernel.step_params import HOST_STEPS, ROW_SAMPLING, StepParams
from mk.model.geometry import Geometry
from mk.sampling import NO_TOKEN, SamplingParams, sample_row
from mk.splits import SplitPolicy
from tests.loop_rig import IDLE, LAUNCH, STATE, python_card

H200 = DeviceFacts("NVIDIA H200", 132, 227 * 1024, (9, 0))


def next_logits(geometry: Geometry, token: int, keys: int) -> Tensor:
    """What the stand-in computes: noise float32 [vocab] that depends on the token and its position."""
    return torch.randn(geometry.vocab, generator=torch.Generator().manual_seed(token * 1000 + keys))


def next_ids(geometry: Geometry, token: int, keys: int, layer: int) -> Tensor:
    """Expert ids int32 [top_k] of its router."""
    return (torch.arange(geometry.top_k) + token + keys + layer).remainder(geometry.experts).int()


def unpacked(rt: Runtime, row: int) -> SamplingParams:
    """A row's parameters as the kernel finds them; a greedy program does not look."""
    if rt.program is None or not rt.program.shape.draws:
        return SamplingParams()
    packed = rt["sampling"].numpy().view(ROW_SAMPLING)[row, 0]
    return SamplingParams(
        float(packed["temperature"]), int(packed["top_k"]), float(packed["top_p"]) or 1.0, int(packed["seed"])
    )


def signal_all(rt: Runtime) -> None:
    """What a step of the loaded program adds to its counters, or to those of its parts."""
    assert rt.program is not None
    if isinstance(rt, WaveLaunches) and rt._parts is not None:
        every = [part.counters for part in rt._parts.addresses(rt._part_counters, rt.launch_trace)]
        launched = {part.counters for part in rt._addresses}
        steps = rt._parts.split("counters", rt._parts.per_step)
        held = rt._parts.split("counters", rt._part_counters[:, 0])
        for address, gained, counters in zip(every, steps, held, strict=True):
            if address in launched:
                counters[: len(gained)] += torch.from_numpy(np.asarray(gained)).int()
        return
    for number, counter in enumerate(rt.program.counters):
        rt["counters"][number, 0] += counter.per_step


class FakeLibrary:
    """The C interface. `runtime` is set once there is one, or the next; `fault(runtime, step)` may break a step."""

    def __init__(self) -> None:
        self.runtimes: list[Runtime] = []
        self.launches = 0
        self.fault: Any = None
        self.refuses = 0  # the error that launches end with
        self.graphs: dict[int, list[Callable[[], int]]] = {}  # that exist
        self.dependent: list[int] = []  # of every step of many launches, in order
        self._capturing: list[Callable[[], int]] | None = None
        self.state = IDLE  # of the stream, as a loop sees it where a step has sampled nothing
        loop = python_card()
        self._callbacks = LAUNCH(self._launch_of_loop), STATE(lambda: self.state)
        loop.play(*self._callbacks)
        for name in ("start", "resume", "park", "grant", "read", "state", "stop"):
            setattr(self, f"mk_loop_{name}", getattr(loop, f"mk_loop_{name}"))

    @property
    def runtime(self) -> Runtime | None:
        return self.runtimes[-1] if self.runtimes else None

    @runtime.setter
    def runtime(self, made: Runtime) -> None:
        self.runtimes.append(made)

    def mk_params_bytes(self) -> int:
        return ctypes.sizeof(StepParams)

    def mk_ring_slots(self) -> int:
        return 22

    def mk_prepare(self) -> int:
        return 1

    def mk_error(self, code: int) -> bytes:
        return f"error {code}".encode()

    def mk_launch(self, params: Any, stream: Any) -> int:
        rt = next(made for made in self.runtimes if made.params is params._obj)
        return self._launch(rt, rt.params.launched)

    def mk_launch_parts(self, params: Any, parts: Any, count: int, dependent: int, stream: Any) -> int:
        rt = next(made for made in self.runtimes if made.params is params._obj)
        assert len(parts) == count and all(part.words and part.offsets and part.counters for part in parts)
        self.dependent.append(dependent)
        number, held = rt.params.launched, {name: rt._buffers.get(name) for name in ("forced_ids", "route_ids")}

        def step() -> int:
            """With the arguments of the time at which it was asked for."""
            now = rt.params.forced_ids, dict(rt._buffers)
            rt.params.forced_ids = None if held["forced_ids"] is None else held["forced_ids"].data_ptr()
            rt._buffers |= {name: buffer for name, buffer in held.items() if buffer is not None}
            code = self._launch(rt, number)
            rt.params.forced_ids, rt._buffers = now
            return code

        if self._capturing is None:
            return step()
        self._capturing.append(step)
        return 0

    def mk_capture_begin(self, stream: Any) -> int:
        self._capturing = []
        return 0

    def mk_capture_end(self, stream: Any, graph: Any) -> int:
        assert self._capturing is not None
        graph._obj.value = self._graph = getattr(self, "_graph", 0) + 1
        self.graphs[self._graph], self._capturing = self._capturing, None
        return 0

    def mk_graph_launch(self, graph: Any, stream: Any) -> int:
        return max(step() for step in self.graphs[graph.value])

    def mk_graph_destroy(self, graph: Any) -> int:
        del self.graphs[graph.value]
        return 0

    def _launch_of_loop(self, params: int, number: int) -> int:
        return self._launch(next(made for made in self.runtimes if ctypes.addressof(made.params) == params), number)

    def _launch(self, rt: Runtime, number: int) -> int:
        if self.refuses:
            return self.refuses
        g = rt.geometry
        record = rt.ring.records[number % HOST_STEPS]
        record["tokens"], record["status"] = NO_TOKEN, 0
        for row, keys in enumerate(rt["keys"].tolist()[: rt.params.rows]):
            if not keys:
                continue
            token = int(rt["tokens"][row])
            rt["logits"][row, : g.vocab] = next_logits(g, token, keys)
            for layer in g.sparse_layers:
                own = next_ids(g, token, keys, layer)
                rt["route_ids"][layer, row] = rt["forced_ids"][layer, row] if rt.params.forced_ids else own
            rt["tokens"][row] = drawn = sample_row(rt.logits(row).numpy(), unpacked(rt, row), keys)
            rt["keys"][row] += rt.params.advance
            record["tokens"][row] = drawn
        signal_all(rt)
        if self.fault is not None:
            self.fault(rt, self.launches)
        record["status"] = rt["status"].numpy()
        if not int(rt["abort_word"][0]):
            record["step"] = number + 1
        self.launches += 1
        return 0


class FakeStream:
    cuda_stream = 0

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class FakeEvent:
    """A clock that ticks a millisecond at each record."""

    ticks = 0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = -1

    def record(self, stream: Any = None) -> None:
        FakeEvent.ticks += 1
        self.at = FakeEvent.ticks

    def elapsed_time(self, other: FakeEvent) -> float:
        return float(other.at - self.at)


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """Everything of torch.cuda that the runtime and the experiment touch, without a card; gives the library."""
    library = FakeLibrary()
    monkeypatch.setattr(DeviceFacts, "read", classmethod(lambda cls: H200))
    monkeypatch.setattr(Library, "open", lambda self: library)
    for name, fake in (
        ("is_available", lambda: True),
        ("Stream", FakeStream),
        ("Event", FakeEvent),
        ("stream", lambda stream: contextlib.nullcontext()),
        ("current_stream", lambda: None),
        ("synchronize", lambda: None),
        ("empty_cache", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    return library


def fake_build(
    geometry: Geometry, splits: SplitPolicy = SplitPolicy(), cache: Path | None = None, defines: tuple[str, ...] = ()
) -> Library:
    return Library(Path("libmk.so"), "0123456789abcdef", geometry, splits, 168, 0, 0, defines)
