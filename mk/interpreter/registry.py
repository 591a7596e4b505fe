"""Executors: for each operation, the function that turns a descriptor into something to run.

An executor is called once a descriptor when a program is loaded, and returns a closure over everything the descriptor
fixes (weights, columns, buffers). The closure takes the `Step` and either does the whole task, or returns an iterator
that does a part each time it is advanced: a phase, whose tiles other SMs' work falls between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mk.graph import StepShape
from mk.interpreter.memory import Memory, Private, WeightSlots
from mk.interpreter.numerics import Floats, Round
from mk.interpreter.step import Step
from mk.isa import Flag, Word
from mk.kv import KVCache
from mk.model.geometry import ROWS
from mk.routing import Router

Run = Callable[[Step], Iterator[None] | None]


@dataclass(slots=True)
class Bench:
    """What executors compile against: the loaded program's shape, memory, weights and numerics.

    store: applied to every value the kernel keeps as bf16. router: replaces the routers' choice, called by every SM.
    """

    shape: StepShape
    memory: Memory
    weights: WeightSlots
    kv: KVCache
    store: Round
    router: Router | None


class Task:
    """A descriptor with named words, as executors read it."""

    __slots__ = ("layer", "private", "sm", "words")

    def __init__(self, words: list[int], sm: int, private: Private) -> None:
        self.words = words
        self.sm = sm
        self.layer = words[Word.LAYER]
        self.private = private

    def __getitem__(self, word: Word) -> int:
        return self.words[word]

    def has(self, flag: Flag) -> bool:
        return bool(self.words[Word.FLAGS] & flag)

    @property
    def columns(self) -> slice:
        """Outputs of the task's strips: 16 a strip."""
        return slice(self.words[Word.TILE] * ROWS, (self.words[Word.TILE] + self.words[Word.TILES]) * ROWS)

    def strips(self, weights: WeightSlots) -> Callable[[], Floats]:
        """The weights of a task that knows its matrix when it is built: [tiles, k_slots, 16, 256]."""
        first = self[Word.WEIGHT] + self[Word.TILE] * self[Word.STRIP_PITCH]
        return weights.bind(first, self[Word.TILES], self[Word.STRIP_PITCH], self[Word.K_SLOT], self[Word.K_SLOTS])

    def expert_strips(self, weights: WeightSlots, expert: int, tile: int, tiles: int) -> Floats:
        """Strips of one expert's matrix, of a task whose experts are known at run time."""
        pitch = self[Word.STRIP_PITCH]
        first = self[Word.WEIGHT] + expert * self[Word.EXPERT_PITCH] + tile * pitch
        return weights.strips(first, tiles, pitch, self[Word.K_SLOT], self[Word.K_SLOTS])


Executor = Callable[[Bench, Task], Run]
EXECUTORS: dict[str, Executor] = {}


def executes(op: str) -> Callable[[Executor], Executor]:
    """Register the executor of an operation, by its name in `mk/graph/`."""

    def register(executor: Executor) -> Executor:
        if op in EXECUTORS:
            raise ValueError(f"operation {op!r} already has an executor")
        EXECUTORS[op] = executor
        return executor

    return register
