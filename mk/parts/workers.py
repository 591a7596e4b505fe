"""Who runs a part of a step: the interpreter, or the kernel on a card. Both start from memory that the caller wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from mk.errors import MkError
from mk.graph import StepShape
from mk.interpreter import Machine, StepInputs
from mk.interpreter.memory import Memory
from mk.isa import ISA, Word
from mk.kernel.runtime import Runtime
from mk.kernel.step_params import MAX_ROWS
from mk.kv import KVCache, PageTable
from mk.parts.device import download, download_pages, upload, upload_pages
from mk.schedule.lower import Program

Ids = Mapping[int, npt.NDArray[np.int64]]


@dataclass(frozen=True)
class StepInput:
    """What a step gets from the host. keys: context lengths with this step's token, 0 = inactive row. ids: layer ->
    expert ids [rows, top_k] that replace the routers' choice; None leaves it to them."""

    keys: list[int]
    tokens: list[int]
    table: PageTable
    ids: Ids | None = None


class Worker(Protocol):
    """Runs parts of steps of one shape. `memory` and `kv`: what the last part left, and what the next starts from."""

    name: str
    memory: Memory
    kv: KVCache

    def run(self, part: Program, inputs: StepInput) -> Ids:
        """Run a part from `memory` and `kv`, which it updates; gives the expert ids of the layers whose top-k ran.

        Raises MkError for a status flag.
        """
        ...

    def executed_hash(self) -> str:
        """Of the part that ran last, read back from the machine."""
        ...


class _Fixed:
    """A routing mode that answers with given ids."""

    def __init__(self, ids: Ids) -> None:
        self.ids = ids

    def __call__(self, layer: int, step: int, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        return self.ids[layer]


class InterpreterWorker:
    name = "interpreter"

    def __init__(self, machine: Machine, shape: StepShape) -> None:
        self.machine, self.kv = machine, machine.kv
        self.memory = Memory(shape)

    def run(self, part: Program, inputs: StepInput) -> Ids:
        self.machine.router = None if inputs.ids is None else _Fixed(inputs.ids)
        self.machine.load(part, memory=self.memory)
        out = self.machine.step(StepInputs(inputs.tokens, inputs.keys, inputs.table))
        for row, flags in enumerate(out.status.tolist()):
            if flags:
                name = "the step" if part.cut is None else part.cut.name
                raise MkError(f"{name}: row {row} has status {flags}", hint="the flags are in mk/interpreter/step.py")
        return out.expert_ids

    def executed_hash(self) -> str:
        return self.machine.executed_hash()


class KernelWorker:
    """The kernel behind the interpreter's view of memory. Pools must have the pages that `kv` has."""

    name = "cuda"

    def __init__(self, runtime: Runtime, shape: StepShape, kv: KVCache) -> None:
        self.runtime, self.kv = runtime, kv
        self.memory = Memory(shape)

    def run(self, part: Program, inputs: StepInput) -> Ids:
        runtime, g = self.runtime, self.runtime.geometry
        upload(runtime, self.memory)
        upload_pages(runtime, self.kv)
        forced = torch.zeros(g.layers, MAX_ROWS, max(1, g.top_k), dtype=torch.int32)
        for layer, ids in (inputs.ids or {}).items():
            forced[layer, : len(ids)] = torch.from_numpy(ids)
        runtime.load(part)
        runtime.set_tables(inputs.table.table)
        runtime.set_sequences(inputs.keys, inputs.tokens)
        runtime.force_routing(None if inputs.ids is None else forced.to(runtime.device))
        if torch.cuda.is_available():
            runtime.stream.wait_stream(torch.cuda.current_stream())
        runtime.launch()
        runtime.finish()
        runtime.require_healthy(part.cut.name if part.cut else "the step")
        last = int(part.words[:, Word.LAYER].max())
        download(runtime, self.memory, last < g.layers and g.mlp_kinds[last] == "dense")
        download_pages(runtime, self.kv)
        rows = len(inputs.keys)
        self.memory.tokens[:] = runtime["tokens"][:rows].tolist()
        ids = runtime["route_ids"][:, :rows].cpu().numpy().astype(np.int64)
        topks = part.words[part.words[:, Word.OPCODE] == ISA.named("topk").opcode, Word.LAYER]
        idle = np.array(inputs.keys)[:, None] == 0
        return {layer: np.where(idle, -1, ids[layer]) for layer in np.unique(topks).tolist()}

    def executed_hash(self) -> str:
        return self.runtime.executed_hash()
