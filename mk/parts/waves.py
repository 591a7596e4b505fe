"""Wave after wave: each starts on both machines from what the expected one has left, so that no error is inherited."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mk.interpreter.memory import Memory
from mk.interpreter.numerics import round_bf16
from mk.isa import ISA, Buffer, Word
from mk.kv import KINDS, KVCache, PageAllocator
from mk.parts.compare import Difference, Tolerances, compare, compare_pages
from mk.parts.fields import Mask, fields, written
from mk.parts.workers import StepInput, Worker
from mk.schedule.lower import Program

Look = Callable[[Program, Memory, dict[Buffer, Mask]], None]
"""Told of a part, the memory that the tested machine left, and the units that the part may have written."""


@dataclass(frozen=True, slots=True)
class WaveResult:
    """A part's name, and how far the two machines are apart in each field that it wrote."""

    name: str
    differences: list[Difference]
    executed: str  # hash of the schedule that the tested one ran

    @property
    def passed(self) -> bool:
        return all(difference.passed for difference in self.differences)


def compare_waves(
    parts: Iterable[Program],
    expected: Worker,
    tested: Worker,
    inputs: StepInput,
    allowed: Tolerances,
    look: Look | None = None,
) -> Iterator[WaveResult]:
    """Run parts that follow each other, from what `expected.memory` and `expected.kv` hold, on both machines.

    Before each, the tested one gets the other's memory and pages, and both get NaN where the part may write, so that
    they must also write the same elements.
    """
    active = np.flatnonzero(inputs.keys)
    for part in parts:
        assert part.cut is not None
        units = written(part)
        for buffer, mask in units.items():
            for field in fields(expected.memory, buffer):
                field.values[field.mask(mask, np.arange(part.shape.rows))] = np.nan
        tested.memory.copy_from(expected.memory)
        for kind in KINDS:
            tested.kv.pools[kind][...] = expected.kv.pools[kind]
        ids = expected.run(part, inputs), tested.run(part, inputs)
        found = compare(expected.memory, tested.memory, units, active, allowed)
        for layer in _layers_of(part, "qkv"):
            found += compare_pages(expected.kv, tested.kv, inputs.table, layer, inputs.keys, allowed)
        for layer in ids[0]:
            found.append(_same("ROUTE", "expert ids", *(side[layer][active] for side in ids)))
        if Buffer.TOKENS in units:
            tokens = (np.array(worker.memory.tokens)[active] for worker in (expected, tested))
            found.append(_same("TOKENS", "tokens", *tokens))
        if look is not None:
            look(part, tested.memory, units)
        yield WaveResult(part.cut.name, found, tested.executed_hash())


def _layers_of(part: Program, op: str) -> list[int]:
    return np.unique(part.words[part.words[:, Word.OPCODE] == ISA.named(op).opcode, Word.LAYER]).tolist()


def _same(buffer: str, field: str, expected: np.ndarray, found: np.ndarray) -> Difference:
    """Integers: none may differ."""
    unequal = int((expected != found).sum())
    return Difference(buffer, field, expected.size, unequal, unequal, float(unequal > 0), float(unequal > 0), 0.0)


def synthetic_pages(kv: KVCache, pages: PageAllocator, keys: Sequence[int], seed: int, std: float = 1.0) -> None:
    """Reserve pages for contexts of `keys`, this step's token included, and fill all before it with bf16 noise.

    What no query of the step sees stays NaN.
    """
    g, rng = kv.geometry, np.random.default_rng(seed)
    for row, length in enumerate(keys):
        if not length:
            continue
        pages.reserve(row, length)
        for layer in range(g.layers):
            k, v = (rng.normal(0, std, (length - 1, g.kv_heads, g.head_dim)).astype(np.float32) for _ in range(2))
            kv.write(pages.table, row, layer, 0, round_bf16(k), round_bf16(v))
