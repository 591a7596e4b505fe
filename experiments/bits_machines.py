"""What `experiment=kernel_bits` asks of a machine: one step of given sequences, again and again over the same pages.

A step appends each row's key and value where the last one of the same sequence left them, so it may be repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from experiments.kernel_checks import fill, poison_activations
from mk.interpreter import Machine
from mk.interpreter.step import StepInputs
from mk.kernel.runtime import Runtime
from mk.kv import Blocks, KVCache
from mk.model.packing import PackedWeights
from mk.schedule.lower import Program

PAGE_STD = 0.5  # of the noise that stands for keys and values


class BitsMachine(Protocol):
    """name: as a row's `engine` says it. step_ms: of the last step by the card's clock, None without one."""

    name: str
    step_ms: float | None

    def load(self, program: Program, epoch: int = 0) -> None: ...

    def step(self, keys: Sequence[int], tokens: Sequence[int], tables: Mapping[str, Blocks], row: int) -> str:
        """One step of the loaded program: a digest of the bits of `row`'s logits."""
        ...

    def poison(self) -> None:
        """NaN in every activation that a step must write before it reads."""
        ...

    def disturb(self, seed: int) -> None:
        """Another interleaving of the SMs from here on; 0 = none of its own."""
        ...

    def executed_hash(self) -> str: ...


class KernelBits:
    """The kernel on a card. `delays_ns`: of a library built with delays, the longest that `disturb` puts anywhere."""

    name = "cuda"
    step_ms: float | None

    def __init__(self, runtime: Runtime, seed: int, delays_ns: int = 0) -> None:
        self.runtime, self.delays_ns, self.step_ms = runtime, delays_ns, None
        fill(runtime, PAGE_STD, seed)

    def load(self, program: Program, epoch: int = 0) -> None:
        self.runtime.load(program, epoch)

    def step(self, keys: Sequence[int], tokens: Sequence[int], tables: Mapping[str, Blocks], row: int) -> str:
        runtime = self.runtime
        runtime.set_tables(tables)
        runtime.set_sequences(keys, tokens)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record(runtime.stream)
        runtime.launch()
        ended.record(runtime.stream)
        runtime.finish()
        self.step_ms = begun.elapsed_time(ended)
        runtime.require_healthy(f"contexts {list(keys)}")
        return digest(runtime.logits(row).cpu().numpy())

    def poison(self) -> None:
        poison_activations(self.runtime)

    def disturb(self, seed: int) -> None:
        if self.delays_ns:
            self.runtime.inject_delays(seed=seed, most_ns=self.delays_ns if seed else 0)

    def executed_hash(self) -> str:
        return self.runtime.executed_hash()


class InterpreterBits:
    """The interpreter on a CPU, with the kernel's rounding."""

    name = "interpreter"
    step_ms: float | None = None

    def __init__(self, weights: PackedWeights, kv: KVCache, seed: int) -> None:
        self.weights, self.kv = weights, kv
        generator = np.random.default_rng(seed)
        for pool in kv.pools.values():
            pool[:] = generator.normal(0, PAGE_STD, pool.shape)
        self.machine = Machine(weights, kv, "kernel")

    def load(self, program: Program, epoch: int = 0) -> None:
        self.machine.load(program, epoch)

    def step(self, keys: Sequence[int], tokens: Sequence[int], tables: Mapping[str, Blocks], row: int) -> str:
        return digest(self.machine.step(StepInputs(list(tokens), list(keys), tables)).logits[row])

    def poison(self) -> None:
        self.machine.memory.poison()

    def disturb(self, seed: int) -> None:
        loaded = self.machine.program
        self.machine = Machine(self.weights, self.kv, "kernel", seed)
        if loaded is not None:
            self.machine.load(loaded)

    def executed_hash(self) -> str:
        return self.machine.executed_hash()


def digest(logits: npt.NDArray[np.float32]) -> str:
    """Of the bits of float32 logits, which must be finite: equal garbage would agree too."""
    if not np.isfinite(logits).all():
        return "not finite"
    return hashlib.sha256(np.ascontiguousarray(logits, np.float32).tobytes()).hexdigest()[:16]
