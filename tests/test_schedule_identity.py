"""The hash of what was executed: the program's where it was, and an error where something else lies in the machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from mk.errors import MkError
from mk.interpreter import Machine, StepInputs
from mk.isa import Word
from mk.kernel.runtime import Runtime
from mk.schedule.cut import cut
from mk.schedule.identity import schedule_hash
from mk.schedule.lower import Counter, Program
from tests.device_rig import FakeLibrary, fake_build, fake_device
from tests.interpreter_rig import GEOMETRY, MAX_BLOCKS, program, weights
from tests.parts_rig import cache

__all__ = ["fake_device"]

LATE = 2**32 - 1  # an epoch behind which every counter wraps


@pytest.fixture
def runtime(fake_device: FakeLibrary) -> Runtime:
    whole = program(2)
    made = Runtime(fake_build(GEOMETRY, whole.shape.splits), weights(), cache(2).pages, MAX_BLOCKS, MAX_BLOCKS * 64)
    fake_device.runtime = made
    return made


def steps(runtime: Runtime, loaded: Program, count: int, epoch: int = 0) -> None:
    runtime.load(loaded, epoch)
    for _ in range(count):
        runtime.set_sequences([0, 0])
        runtime.launch()


@pytest.mark.parametrize("epoch", [0, LATE])
def test_the_device_gives_the_programs_hash_after_any_number_of_steps(runtime: Runtime, epoch: int) -> None:
    whole = program(2)
    for count in (1, 3):
        steps(runtime, whole, count, epoch)
        assert runtime.executed_hash() == whole.schedule_hash
    part = cut(whole, "1.qkv", "1.attn")
    steps(runtime, part, 1)
    assert runtime.executed_hash() == part.schedule_hash != whole.schedule_hash


def word(runtime: Runtime) -> None:
    words = runtime["words"].clone()  # on a CPU they are the program's own
    words[7, Word.TILES] += 1
    runtime._own("words", words)


def moved(runtime: Runtime) -> None:
    """A descriptor in another track's list."""
    offsets = runtime["offsets"].clone()
    offsets[1] += 1
    runtime._own("offsets", offsets)


def signal(runtime: Runtime) -> None:
    runtime["counters"][2, 0] -= 1


def every_step(runtime: Runtime) -> None:
    runtime["counters"][2, 0] += 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (word, "executed schedule [0-9a-f]{16}, and [0-9a-f]{16} was verified and loaded"),
        (moved, "executed schedule"),
        (signal, "gained [0-9]+ in 2 steps, which is no whole number each"),
        (every_step, "executed schedule"),
    ],
)
def test_what_was_written_over_or_lost_is_an_error(
    runtime: Runtime, change: Callable[[Runtime], None], message: str
) -> None:
    steps(runtime, program(2), 2)
    change(runtime)
    with pytest.raises(MkError, match=message):
        runtime.executed_hash()


def test_before_the_first_step_nothing_was_executed(runtime: Runtime) -> None:
    with pytest.raises(MkError, match="no program is loaded"):
        runtime.executed_hash()
    runtime.load(program(2))
    with pytest.raises(MkError, match="no step of the loaded program has run"):
        runtime.executed_hash()


@pytest.mark.parametrize("epoch", [0, LATE])
def test_the_interpreter_gives_the_hash_of_what_it_ran(epoch: int) -> None:
    whole, kv = program(2), cache(2)
    machine = Machine(weights(), kv)
    with pytest.raises(MkError, match="no program is loaded"):
        machine.executed_hash()
    machine.load(whole, epoch)
    pages = kv.allocator(2, MAX_BLOCKS)
    pages.reserve(0, 3)
    machine.run(StepInputs([5, 0], [1, 0], pages.table), 3)
    assert machine.executed_hash() == whole.schedule_hash
    del machine.lists[0][-1]
    with pytest.raises(MkError, match="executed schedule"):
        machine.executed_hash()


def test_the_hash_is_of_descriptors_lists_and_targets() -> None:
    whole = program(2)
    words, offsets = whole.words.copy(), whole.offsets.copy()
    words[3, Word.FLAGS] ^= 1
    offsets[2] += 1
    (first, *others) = whole.counters
    counters = (Counter(first.name, first.per_step + 1), *others)
    changed = ({"words": words}, {"offsets": offsets}, {"counters": counters})
    hashes = {dataclasses.replace(whole, **change).schedule_hash for change in changed}
    assert len(hashes | {whole.schedule_hash}) == 4
    per_step = np.array([counter.per_step for counter in whole.counters], np.int32)
    assert schedule_hash(np.asfortranarray(whole.words), whole.offsets, per_step) == whole.schedule_hash
