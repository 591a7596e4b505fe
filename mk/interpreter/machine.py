"""The machine: loads a lowered program and decodes with it, descriptor by descriptor, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mk.errors import MkError
from mk.interpreter import attention, moe, projections, sampling  # noqa: F401  (they register their executors)
from mk.interpreter.memory import Memory, WeightSlots
from mk.interpreter.numerics import rounding
from mk.interpreter.registry import EXECUTORS, Bench, Task
from mk.interpreter.sms import INTERLEAVINGS, Compiled, Counters, execute, waits_of
from mk.interpreter.step import Step, StepInputs, StepOutputs
from mk.isa import ISA, NONE, Word
from mk.kv import KVCache
from mk.model.packing import PackedWeights
from mk.routing import Router
from mk.schedule.identity import executed_hash
from mk.schedule.lower import Program
from mk.threads import threads_for


class Machine:
    """N virtual SMs, their memory, and the program they run.

    numerics: "float32", or "kernel" = bf16 at the kernel's rounding points. seed and interleaving ("random" or "eager",
    see `mk/interpreter/sms.py`): in which order SMs that can run do run; no legal order changes a bit. router: replaces
    the routers' choice of experts. trace: record who ran when in `StepOutputs.trace`.
    """

    def __init__(
        self,
        weights: PackedWeights,
        kv: KVCache,
        numerics: str = "float32",
        seed: int = 0,
        router: Router | None = None,
        interleaving: str = "random",
        trace: bool = False,
    ) -> None:
        if interleaving not in INTERLEAVINGS:
            raise MkError(f"interleaving={interleaving} is not one of {', '.join(INTERLEAVINGS)}")
        self.geometry = weights.geometry
        self.weights = WeightSlots(weights)
        self.kv = kv
        self.numerics = numerics
        self.store = rounding(numerics)
        self.router = router
        self.trace = trace
        self.pick = INTERLEAVINGS[interleaving](seed)
        self.steps_done = 0
        self.epoch = 0
        self.program: Program | None = None
        self.memory: Memory

    def load(self, program: Program, epoch: int = 0, memory: Memory | None = None) -> None:
        """Compile a program's descriptors and clear the counters, as if `epoch` steps had been run since.

        memory: what it starts from. By default that is fresh; but tokens that were fed back stay when the batch size
        does, so a bucket may grow between two steps, and a part of a step goes on from the memory that a program of
        the same shape has left. What is private to an SM is lost in any case.
        """
        if program.shape.geometry != self.geometry:
            raise MkError("the program was lowered for another geometry than the weights'")
        before = None if self.program is None else self.memory
        if memory is None and before is not None and program.cut is not None and before.shape == program.shape:
            memory = before
        if memory is not None:
            memory.between_programs()
        else:
            memory = Memory(program.shape)
            if before is not None and before.shape.rows == program.shape.rows:
                memory.tokens = before.tokens
        self.program, self.memory = program, memory
        bench = Bench(program.shape, memory, self.weights, self.kv, self.store, self.router)
        self.lists: list[list[Compiled]] = []
        for track in range(program.tracks):
            sm = track % program.shape.n_sm
            self.lists.append([self._compile(bench, words, sm) for words in program.track(track).tolist()])
        self.epoch = epoch
        self.counters = Counters(program, epoch)
        self._loaded = epoch, list(self.counters.values)

    def _compile(self, bench: Bench, words: list[int], sm: int) -> Compiled:
        op = ISA.rows.get(words[Word.OPCODE])
        if op is None or op.name not in EXECUTORS:
            name = f"opcode {words[Word.OPCODE]}" if op is None else f"operation {op.name}"
            raise MkError(f"{name} has no executor", hint="see mk/ADDING_AN_OP.md")
        run = EXECUTORS[op.name](bench, Task(words, sm, bench.memory.private[sm]))
        value = words[Word.SIGNAL_VALUE] if words[Word.SIGNAL] != NONE else 0
        return Compiled(run, waits_of(words), words[Word.SIGNAL], value, words)

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Decode one token in every active row. See `run`."""
        return self.run(inputs, 1)[0]

    def run(self, inputs: StepInputs, steps: int) -> list[StepOutputs]:
        """Decode `steps` tokens in every active row, each fed back; contexts grow by one a step.

        Steps overlap as far as the counters allow, as they do in a launch of several steps. Pages for all of them must
        be reserved. Raises MkError naming the row for inputs that do not fit, Stalled when the program can not go on;
        after either the program must be loaded again.
        """
        if self.program is None:
            raise MkError("no program is loaded", hint="Machine.load first")
        if steps > 1 and self.program.cut is not None:
            raise MkError(f"{self.program.cut.name} is a part of a step: it is run once, not {steps} times")
        shape = self.program.shape
        keys = np.asarray(inputs.keys, np.int64)
        if inputs.tokens is not None:
            tokens = np.asarray(inputs.tokens, np.int64)
            if tokens.shape != (shape.rows,):
                raise MkError(f"tokens has shape {tokens.shape}, the program was built for {shape.rows} rows")
            self.memory.tokens[:] = tokens.tolist()

        def make(index: int) -> Callable[[], Step]:
            grown = replace(inputs, keys=np.where(keys == 0, 0, keys + index))
            return lambda: Step(shape, grown, self.epoch + index, self.steps_done + index, self.store)

        trace: list[list[tuple[int, int]]] | None = [] if self.trace else None
        # inf and NaN are data here: an unused row may hold anything, and status flags report what matters
        # torch makes a step's RoPE tables and converts weights that do not stay resident
        with np.errstate(all="ignore"), threads_for(2 * self.weights.weights.layout.nbytes):
            plan = [make(index) for index in range(steps)]
            made = execute(self.program, self.lists, self.counters, plan, self.epoch, self.pick, trace)
        self.epoch += steps
        self.steps_done += steps
        outputs = [step.outputs for step in made]
        for out, events in zip(outputs, trace or (), strict=False):
            out.trace = events
        return outputs

    def executed_hash(self) -> str:
        """Of the descriptors that ran, the lists that they stood in, and what they added to the counters. Raises
        MkError before the first step since `load`, and where it is not the program's hash."""
        if self.program is None:
            raise MkError("no program is loaded", hint="Machine.load first")
        words = np.array([task.words for track in self.lists for task in track], np.int32)
        offsets = np.cumsum([0, *map(len, self.lists)]).astype(np.int32)
        epoch, before = self._loaded
        start, end = (np.array(values, np.uint32) for values in (before, self.counters.values))
        return executed_hash(self.program, words, offsets, start, end, self.epoch - epoch)

    def poison(self) -> None:
        """Fill every buffer with NaN between steps: whatever a task reads must have been written in its own step."""
        self.memory.poison()
