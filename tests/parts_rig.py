"""Workers for parts of steps on a CPU: the interpreter, and a stand-in for the kernel that interprets its buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mk.graph import StepShape
from mk.interpreter import Machine, StepInputs
from mk.interpreter.memory import Memory
from mk.isa import Word
from mk.kernel.runtime import Runtime
from mk.kernel.step_params import MAX_ROWS
from mk.kv import KINDS, KVCache
from mk.model.geometry import Geometry
from mk.parts import InterpreterWorker, KernelWorker, StepInput, synthetic_pages
from mk.parts.device import download, download_pages, upload, upload_pages
from tests.device_rig import FakeLibrary, fake_build
from tests.interpreter_rig import GEOMETRY, MAX_BLOCKS, weights


class InterpretingLibrary(FakeLibrary):
    """A kernel whose launch reads the device's buffers, interprets the loaded program, and writes them back."""

    def mk_launch(self, params: Any, stream: Any) -> int:
        rt = self.runtime
        assert rt is not None and rt.program is not None
        part, g = rt.program, rt.geometry
        memory, kv = Memory(part.shape), KVCache(g, *(len(rt[f"pool_{kind}"]) for kind in KINDS))
        layer = int(part.words[:, Word.LAYER].max())
        dense = layer < g.layers and g.mlp_kinds[layer] == "dense"
        download(rt, memory, dense)
        download_pages(rt, kv)
        machine = Machine(weights(g), kv, "kernel", seed=5)
        machine.load(part, memory=memory)
        rows = part.shape.rows
        table = {kind: rt[f"table_{kind}"][:rows].numpy() for kind in KINDS}
        if rt.params.forced_ids:
            machine.router = lambda layer, step, logits: rt["forced_ids"][layer, :rows].numpy().astype(np.int64)
            machine.load(part, memory=memory)
        out = machine.step(StepInputs(rt["tokens"][:rows].tolist(), rt["keys"][:rows].numpy(), table))
        upload(rt, memory)
        upload_pages(rt, kv)
        rt["tokens"][:rows] = torch.tensor(memory.tokens)
        for number, gained in enumerate(machine.counters.values):
            rt["counters"][number, 0] += gained
        for layer, ids in out.expert_ids.items():
            rt["route_ids"][layer, :rows] = torch.from_numpy(ids).int()
        self.launches += 1
        return 0


def cache(rows: int, geometry: Geometry = GEOMETRY) -> KVCache:
    return KVCache(geometry, rows * MAX_BLOCKS, rows * MAX_BLOCKS)


def step_input(kv: KVCache, keys: list[int], seed: int = 0, std: float = 0.3) -> StepInput:
    """Noise behind every context, in permuted pages."""
    pages = kv.allocator(len(keys), MAX_BLOCKS, seed=seed)
    synthetic_pages(kv, pages, keys, seed, std)
    return StepInput(keys, [7 + row for row in range(len(keys))], pages.table)


def interpreter(shape: StepShape, seed: int = 0, numerics: str = "kernel") -> InterpreterWorker:
    machine = Machine(weights(shape.geometry), cache(shape.rows, shape.geometry), numerics, seed)
    return InterpreterWorker(machine, shape)


def kernel(shape: StepShape, library: FakeLibrary) -> KernelWorker:
    """Needs the `fake_device` fixture with an `InterpretingLibrary`."""
    kv = cache(shape.rows, shape.geometry)
    built = fake_build(shape.geometry, shape.splits)
    runtime = Runtime(built, weights(shape.geometry), kv.pages, MAX_BLOCKS, MAX_BLOCKS * 64)
    library.runtime = runtime
    assert shape.rows <= MAX_ROWS
    return KernelWorker(runtime, shape, kv)
