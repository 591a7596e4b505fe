"""Parts of a step: the descriptors between two waves, as a program that kernel and interpreter execute unchanged.

A part starts from the buffers that the waves before it left in memory. What it needs that lived only in an SM (the
routing, the sums of a strip's owner) is made again by the tasks that made it: their own inputs are still in memory,
since the part begins in the layer whose SM-local results it reads. So a part may start and end at any wave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mk.errors import MkError
from mk.graph import resolve
from mk.isa import ISA, LOCAL_BUFFERS, NONE, Access, Buffer, Flag, Word, Words
from mk.schedule.lower import Counter, Cut, Program, step_waves
from mk.validation import closest

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Place:
    """A wave's place in a step: its tasks are those with `first <= Word.TASK < end`, none where the plan has none."""

    layer: int
    wave: str
    part: int  # of `parts` that the wave order cuts the wave into
    parts: int
    first: int
    end: int

    @property
    def name(self) -> str:
        """`3.attn`; of a wave that stands several times, `3.moe_up.0` and so on."""
        return f"{self.layer}.{self.wave}" + (f".{self.part}" if self.parts > 1 else "")


def places(program: Program) -> list[Place]:
    """The waves of the step that `program` is, or was cut from, in list order, empty ones too."""
    found, first = [], 0
    for wave, layer, part, parts in step_waves(program.shape, program.wave_order):
        _, tasks = program.shape.wave_tasks(wave, layer, part, parts)
        found.append(Place(layer, wave, part, parts, first, first + len(tasks)))
        first += len(tasks)
    return found


def cut(program: Program, start_at: str | None = None, stop_after: str | None = None) -> Program:
    """The part of a step from the wave `start_at` up to and with `stop_after`, None = from its start, to its end.

    A wave is `<layer>.<wave>`, as `3.attn`; `0.embed` comes first, `<layers>.lm_head` and `<layers>.sample` last. Where
    the order names a wave several times, `3.moe_up.1` is its second place, and without a number a part starts at the
    first one and stops after the last. Raises MkError naming the wave that is wrong.

    Waits for what ran before are gone, counters gain what the part signals. Beside the waves asked for there are tasks
    of the same SMs that make SM-local results again, and those that clear the ticket queues that the part draws from.
    """
    begin, last = _ends(start_at, stop_after, places(program))
    return _cut(program, begin, last, _LocalUses.of(program))


def _cut(program: Program, begin: Place, last: Place, uses: _LocalUses) -> Program:
    if program.cut is not None:
        raise MkError("a part of a step cannot be cut again", hint="cut the whole step")
    name = begin.name if begin == last else f"{begin.name}-{last.name}"
    if begin.first == last.end:
        raise MkError(
            f"start_at={begin.name} stop_after={last.name}: this plan has no task there",
            hint="take in a wave before or after",
        )
    task = program.words[:, Word.TASK]
    earlier = task < begin.first
    kept = ~earlier & (task < last.end)
    _remake(uses, kept, earlier)
    _clear_queues(program, kept)
    words, counters = _rewire(program.words[kept].copy(), program.counters)
    words[words[:, Word.OPCODE] == ISA.named("residual").opcode, Word.FLAGS] |= Flag.PART
    origin = Cut(name, program, kept, earlier & ~kept)
    return replace(program, words=words, offsets=program.offsets_of(kept), counters=counters, cut=origin)


def waves_of(program: Program, start_at: str | None = None, stop_after: str | None = None) -> list[Program]:
    """The part that `cut` makes, as parts of one wave each, in list order; the head and what samples stay together."""
    steps = places(program)
    begin, last = _ends(start_at, stop_after, steps)
    wanted = [place for place in steps[steps.index(begin) : steps.index(last) + 1] if place.end > place.first]
    uses = _LocalUses.of(program)
    parts = [_cut(program, place, place, uses) for place in wanted if place.layer < steps[-1].layer]
    tail = [place for place in wanted if place.layer == steps[-1].layer]
    return [*parts, _cut(program, tail[0], tail[-1], uses)] if tail else parts


def launches_of(program: Program) -> list[Program]:
    """The parts that a step may be launched as, one after the other: `waves_of`, without those that leave nothing in
    memory.

    What a wave leaves in its SMs is gone with its launch, and made again by every later one that reads it.
    """
    local = list(LOCAL_BUFFERS)

    def lasts(part: Program) -> bool:
        opcodes = part.words[:, Word.OPCODE]
        written = (resolve(access, part.words[opcodes == op.opcode]) for op in ISA for access in op.writes)
        return any((~np.isin(buffers, local)).any() for buffers in written)

    return [part for part in waves_of(program) if lasts(part)]


def before(program: Program, start_at: str | None) -> Program | None:
    """The part of the step that ends where one that starts at `start_at` begins; None where nothing stands before."""
    steps = places(program)
    begin = _ends(start_at, None, steps)[0]
    earlier = [place.name for place in steps[: steps.index(begin)] if place.end > place.first]
    return cut(program, None, earlier[-1]) if earlier else None


def _ends(start_at: str | None, stop_after: str | None, steps: Sequence[Place]) -> tuple[Place, Place]:
    begin = steps[0] if start_at is None else _find("start_at", start_at, steps)[0]
    last = steps[-1] if stop_after is None else _find("stop_after", stop_after, steps)[-1]
    head = next(place for place in steps if place.layer == steps[-1].layer)
    if steps.index(begin) > steps.index(head):
        raise MkError(
            f"start_at={begin.name}: what {head.wave} gives the sampler lies with the SMs that made it",
            hint=f"start_at={head.name}",
        )
    if steps.index(last) < steps.index(begin):
        ends = f"start_at={begin.name} stop_after={last.name}"
        raise MkError(f"{ends}: the step runs {last.name} first", hint=f"start_at={last.name} stop_after={begin.name}")
    return begin, last


def _find(key: str, name: str, steps: Sequence[Place]) -> list[Place]:
    """The places of one wave, or the single one that the name's third part picks."""
    layer, _, wave = name.partition(".")
    wave, _, part = wave.partition(".")
    found = [place for place in steps if (str(place.layer), place.wave) == (layer, wave)]
    if found and not part:
        return found
    if part.isdigit() and int(part) < len(found):
        return [found[int(part)]]
    near = closest(name, [place.name for place in steps])
    here = ", ".join(dict.fromkeys(place.wave for place in steps if str(place.layer) == layer))
    what = f"layer {layer} has {here}" if here else f"layers are 0..{steps[-1].layer}"
    raise MkError(f"{key}={name}: no such wave, {what}", hint=f"{key}={near}" if near else f"{key}=<layer>.<wave>")


@dataclass(frozen=True, slots=True)
class _LocalUses:
    """Accesses of SM-local buffers: descriptors, and for each a key that is equal for the same (SM, layer, buffer)."""

    makers: Ints
    made: Ints
    readers: Ints
    read: Ints

    @classmethod
    def of(cls, program: Program) -> _LocalUses:
        return cls(*_local_uses(program, "writes"), *_local_uses(program, "reads"))


def _local_uses(program: Program, kind: str) -> tuple[Ints, Ints]:
    words, sm = program.words, program.sm_of
    tasks, keys = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for op in ISA:
        of = np.flatnonzero(words[:, Word.OPCODE] == op.opcode)
        accesses: tuple[Access, ...] = getattr(op, kind)
        for access in accesses:
            buffers = resolve(access, words[of])
            local = np.isin(buffers, list(LOCAL_BUFFERS))
            layer = words[of, Word.LAYER].astype(np.int64) + access.ahead
            keys.append(((sm[of] * (program.shape.geometry.layers + 1) + layer) * len(Buffer) + buffers)[local])
            tasks.append(of[local])
    return np.concatenate(tasks), np.concatenate(keys)


def _remake(uses: _LocalUses, kept: Mask, earlier: Mask) -> None:
    """Adds to `kept` the tasks whose SM-local results it reads, and theirs in turn."""
    while True:
        more = uses.makers[np.isin(uses.made, uses.read[kept[uses.readers]])]
        more = more[earlier[more] & ~kept[more]]
        if not len(more):
            return
        kept[more] = True


def _clear_queues(program: Program, kept: Mask) -> None:
    """Adds the tasks that clear the queues of the claimers in `kept`, wherever they stand: they read nothing."""
    words = program.words
    clears = [op.opcode for op in ISA if any(access.buffer == Buffer.QUEUES for access in op.writes)]
    draws = [op.opcode for op in ISA if any(access.buffer == Buffer.QUEUES for access in op.reads)]
    layers = words[kept & np.isin(words[:, Word.OPCODE], draws), Word.LAYER]
    kept |= np.isin(words[:, Word.OPCODE], clears) & np.isin(words[:, Word.LAYER], layers)


def _rewire(words: Words, counters: tuple[Counter, ...]) -> tuple[Words, tuple[Counter, ...]]:
    """Drops waits that nothing here signals and signals that nothing here awaits; counts what is left."""
    signalling = words[:, Word.SIGNAL] != NONE
    gains = np.bincount(
        words[signalling, Word.SIGNAL], words[signalling, Word.SIGNAL_VALUE], minlength=len(counters)
    ).astype(np.int32)
    awaited = np.isin(np.arange(len(counters)), words[:, [Word.WAIT0, Word.WAIT1]])
    live = awaited & (gains > 0)
    number = np.where(live, np.cumsum(live) - 1, NONE).astype(np.int32)
    for slot in (Word.WAIT0, Word.WAIT1):
        waiting = np.flatnonzero(words[:, slot] != NONE)
        counter, count = words[waiting, slot], words[waiting, slot + 1]
        if ((count != 0) & (count != words[waiting, slot + 2])).any():
            raise MkError("only a step whose tasks wait for whole waves can be cut")
        target = np.where(count > 0, gains[counter], 0) * live[counter]
        words[waiting, slot], words[waiting, slot + 1] = number[counter], target
        words[waiting, slot + 2] = gains[counter] * live[counter]
    words[signalling, Word.SIGNAL] = number[words[signalling, Word.SIGNAL]]
    words[words[:, Word.SIGNAL] == NONE, Word.SIGNAL_VALUE] = 0
    kept = tuple(Counter(counters[old].name, int(gains[old])) for old in np.flatnonzero(live))
    return words, kept
