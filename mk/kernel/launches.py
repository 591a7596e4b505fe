"""Steps of many launches, one a part of a step: what a step of one launch is compared with.

The kernel, the tiles and the buffers are `Runtime`'s; a launch has the descriptors of one wave. Only a whole step is
launched so: a program that is itself a part is one launch here too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mk.errors import MkError
from mk.isa import Word
from mk.kernel.runtime import Runtime
from mk.kernel.stalls import missing_signals
from mk.kernel.step_params import HOST_STEPS, counters_at
from mk.schedule.cut import launches_of, waves_of
from mk.schedule.identity import executed_hash
from mk.schedule.lower import Program


class StepPart(ctypes.Structure):
    """The same of csrc/launches.cuh."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("trace", ctypes.c_void_p),
    )


class _Parts:
    """The parts of a program on the device, their lists one after the other in one buffer each."""

    def __init__(self, whole: Program, parts: Sequence[Program], device: torch.device) -> None:
        self.whole = whole  # kept, as long as these are known by its id
        # without what they were cut from, a mask of the whole step each
        self.programs = [dataclasses.replace(part, cut=None) for part in parts]
        self.words = torch.from_numpy(np.concatenate([part.words for part in self.programs])).to(device)
        self.offsets = torch.from_numpy(np.concatenate([part.offsets for part in self.programs])).to(device)
        self.per_step = np.concatenate([part.per_step for part in self.programs])
        self.ends = {
            "words": np.cumsum([len(part.words) for part in self.programs]),
            "offsets": np.cumsum([len(part.offsets) for part in self.programs]),
            "counters": np.cumsum([len(part.counters) for part in self.programs]),
        }

    def split(self, name: str, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """An array of all parts, part by part."""
        return np.split(array, self.ends[name][:-1])

    def addresses(self, counters: torch.Tensor, trace: torch.Tensor | None) -> ctypes.Array[StepPart]:
        """Where each part's lists begin, its counters among those of all parts, and its records."""
        made = (StepPart * len(self.programs))()
        for name, buffer in (("words", self.words), ("offsets", self.offsets), ("counters", counters)):
            begins = np.concatenate([[0], self.ends[name][:-1]]) * buffer[:1].nbytes + buffer.data_ptr()
            for part, begin in zip(made, begins.tolist(), strict=True):
                setattr(part, name, begin)
        for part, records in zip(made, () if trace is None else trace, strict=trace is not None):
            part.trace = records.data_ptr()
        return made


class WaveLaunches(Runtime):
    """A runtime whose steps are a launch for every wave."""

    dependent = False  # whether a launch may begin before the one before it has ended
    parts_of = staticmethod(launches_of)  # what a step is launched as
    launch_trace: torch.Tensor | None = None
    """Of a trace build: int32 [launches, blocks, records, 16], as of trace.py. The last launch has the head and may
    find too few records."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `Runtime`."""
        self._known: dict[int, _Parts] = {}  # of the programs loaded so far
        self._parts: _Parts | None = None  # of the loaded program, None for one that is a part itself
        super().__init__(*args, **kwargs)

    def load(self, program: Program, epoch: int = 0) -> None:
        super().load(program, epoch)
        self._parts = None
        if program.cut is not None:
            return
        if id(program) not in self._known:
            self._known[id(program)] = _Parts(program, self.parts_of(program), self.device)
        parts = self._parts = self._known[id(program)]
        counters = counters_at(parts.per_step, epoch)
        self._counted = epoch, counters[: len(parts.per_step), 0].view(np.uint32).copy()
        with torch.cuda.stream(self.stream):
            self._part_counters = torch.from_numpy(counters).to(self.device)
            if records := self.params.trace_records:
                shape = len(parts.programs), program.shape.n_sm, records, 16
                self.launch_trace = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self._addresses = parts.addresses(self._part_counters, self.launch_trace)

    def _queue_step(self) -> int:
        if self._parts is None:
            return super()._queue_step()
        step, stream = ctypes.byref(self.params), ctypes.c_void_p(self.stream.cuda_stream)
        count = len(self._addresses)
        return int(self.library.mk_launch_parts(step, self._addresses, count, int(self.dependent), stream))

    def _given_up(self, stalls: npt.NDArray[np.int32]) -> tuple[Program, npt.NDArray[np.int32]]:
        """The first of the parts that have most of the tasks at which SMs stand: several make a routing again."""
        if self._parts is None:
            return super()._given_up(stalls)
        parts, at = self._parts, stalls[stalls[:, 0] != 0, 4]
        counters = self._part_counters.cpu().numpy()[:, 0]
        missing = parts.split("counters", missing_signals(parts.per_step, self.epoch, counters))

        def standing(number: int) -> int:
            return int(np.isin(at, parts.programs[number].words[:, Word.TASK]).sum())

        number = max(range(len(parts.programs)), key=standing)
        return parts.programs[number], missing[number]

    def executed_hash(self) -> str:
        """Of the hashes of all launches' parts."""
        if self._parts is None:
            return super().executed_hash()
        self.finish()
        parts, (epoch, before) = self._parts, self._counted
        words, offsets = parts.words.cpu().numpy(), parts.offsets.cpu().numpy()
        after = self._part_counters.cpu().numpy().view(np.uint32)[: len(before), 0]
        found = hashlib.sha256()
        held = (parts.split("words", words), parts.split("offsets", offsets))
        counted = (parts.split("counters", before), parts.split("counters", after))
        for part, own, at, was, now in zip(parts.programs, *held, *counted, strict=True):
            found.update(executed_hash(part, own, at, was, now, self.epoch - epoch).encode())
        return found.hexdigest()[:16]


class GraphedLaunches(WaveLaunches):
    """A runtime whose steps are a CUDA graph each, of a launch for every wave.

    A graph holds its launches' arguments, which change from step to step. One that is made counts as launched; those
    that are never run end with the run that they were made for, and count no more.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._made: deque[tuple[ctypes.c_void_p, int]] = deque()  # graphs of the next steps, and their numbers
        self._running: list[ctypes.c_void_p] = []  # graphs that were handed to the stream
        super().__init__(*args, **kwargs)

    def load(self, program: Program, epoch: int = 0) -> None:
        self._drop()
        super().load(program, epoch)

    def launch(self) -> int:
        if self._parts is None:
            return super().launch()
        self._capture()
        return self._run()

    def launcher(self, tell: Callable[[int], None], steps: int) -> Callable[[int], int]:
        """All graphs are made here: making one takes the host longer than running it takes the card."""
        if self._parts is None:
            return super().launcher(tell, steps)
        if steps > HOST_STEPS:
            raise MkError(f"{steps} steps as graphs, and the host ring holds the tokens of {HOST_STEPS}")
        self._drop()
        try:
            for step in range(steps):
                tell(step)
                self._capture()
        except BaseException:
            self._drop(failed=True)
            raise
        return lambda step: self._run()

    def finish(self) -> None:
        try:
            super().finish()
        except BaseException:
            self._destroy(self._running, failed=True)
            raise
        self._destroy(self._running)

    def _given_up(self, stalls: npt.NDArray[np.int32]) -> tuple[Program, npt.NDArray[np.int32]]:
        self._drop(failed=True)  # signals of steps that have not begun are not missing
        return super()._given_up(stalls)

    def _capture(self) -> None:
        """Makes the next step's graph."""
        graph, stream, before = ctypes.c_void_p(), ctypes.c_void_p(self.stream.cuda_stream), self.launched
        self.require_success(self.library.mk_capture_begin(stream))
        try:
            try:
                number = super().launch()
            finally:
                code = self.library.mk_capture_end(stream, ctypes.byref(graph))
            self.require_success(code)
        except BaseException:
            self._uncount(self.launched - before)
            self._destroy([graph] if graph else [], failed=True)
            raise
        self._made.append((graph, number))

    def _run(self) -> int:
        """Hands the first graph to the stream; its step's number."""
        graph, number = self._made[0]
        self.require_success(self.library.mk_graph_launch(graph, ctypes.c_void_p(self.stream.cuda_stream)))
        self._made.popleft()
        self._running.append(graph)
        return number

    def _drop(self, failed: bool = False) -> None:
        """Ends graphs that have not been run: the card's counters are where they were before their steps."""
        graphs = [graph for graph, _ in self._made]
        self._made.clear()
        self._uncount(len(graphs))
        self._destroy(graphs, failed)

    def _uncount(self, steps: int) -> None:
        self.count_launches(-steps)
        if self._room is not None:
            self._room += steps

    def _destroy(self, graphs: list[ctypes.c_void_p], failed: bool = False) -> None:
        """failed: something is told already, and a card in that state refuses this too."""
        while graphs:
            code = self.library.mk_graph_destroy(graphs.pop())
            if not failed:
                self.require_success(code)


class DependentLaunches(GraphedLaunches):
    """The same, each launch programmatically dependent on the one before. Needs a library with DEPENDENT_LAUNCH."""

    dependent = True


class OperationLaunches(GraphedLaunches):
    """A runtime whose steps are graphs of some waves alone, for timing: of the whole step until `choose`.

    What other waves leave in memory must be there: a whole step has run before.
    """

    parts_of = staticmethod(waves_of)

    def choose(self, parts: Sequence[int]) -> None:
        """Steps are these parts from now on, by their places in `waves_of`, until the next `load`."""
        assert self._parts is not None
        self._drop()
        with torch.cuda.stream(self.stream):  # those of parts that did not run have not grown with the epoch
            self._part_counters.copy_(torch.from_numpy(counters_at(self._parts.per_step, self.epoch)))
        every = self._parts.addresses(self._part_counters, self.launch_trace)
        self._addresses = (StepPart * len(parts))(*(every[part] for part in parts))


RUNTIMES: dict[str, type[Runtime]] = {
    "step": Runtime,
    "waves": WaveLaunches,
    "graph": GraphedLaunches,
    "dependent": DependentLaunches,
    "operations": OperationLaunches,
}
"""How a step reaches the card: by `experiment.launches`, but for the last."""
