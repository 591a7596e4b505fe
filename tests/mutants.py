"""Mutants of a lowered step: one thing wrong each, by kind."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np

from mk.isa import ISA, NONE, Buffer, Word
from mk.schedule.lower import Counter, Program

Words = np.ndarray
Mutate = Callable[[Program, random.Random], Program | None]
KINDS: dict[str, Mutate] = {}

_KEEPING = ("embed", "o_proj", "moe_down_owned", "dense_down", "residual")  # what they leave stays with a strip's owner
_WRITERS = ("embed", "o_proj", "moe_combine", "moe_down_owned", "dense_down")  # those whose DST is a choice
_OTHER = {
    Buffer.X0: Buffer.X1,
    Buffer.X1: Buffer.X0,
    Buffer.OPROJ_OUT: Buffer.FFN_OUT,
    Buffer.FFN_OUT: Buffer.OPROJ_OUT,
    Buffer.ACC_ATTN: Buffer.ACC_FFN,
    Buffer.ACC_FFN: Buffer.ACC_ATTN,
}


def kind(name: str) -> Callable[[Mutate], Mutate]:
    def register(mutate: Mutate) -> Mutate:
        KINDS[name] = mutate
        return mutate

    return register


def _edited(program: Program, words: Words, counters: list[Counter] | None = None) -> Program:
    return dataclasses.replace(program, words=words, counters=tuple(counters or program.counters))


def _pick(rng: random.Random, holds: np.ndarray) -> int | None:
    places = np.flatnonzero(holds)
    return int(rng.choice(places)) if len(places) else None


def _of(words: Words, *ops: str) -> np.ndarray:
    return np.isin(words[:, Word.OPCODE], [ISA.named(op).opcode for op in ops])


def _a_wait(program: Program, rng: random.Random) -> tuple[int, Word] | None:
    words = program.words
    waits = [(int(task), slot) for slot in (Word.WAIT0, Word.WAIT1) for task in np.flatnonzero(words[:, slot] != NONE)]
    return rng.choice(waits) if waits else None


def _a_signal(program: Program, rng: random.Random) -> int:
    task = _pick(rng, program.words[:, Word.SIGNAL] != NONE)
    assert task is not None
    return task


def _regain(program: Program, words: Words, counter: int, gain: int) -> list[Counter]:
    """Declare another increment of a counter everywhere, so that the books balance; full waits stay full."""
    counters = list(program.counters)
    old = counters[counter].per_step
    counters[counter] = Counter(counters[counter].name, gain)
    for slot in (Word.WAIT0, Word.WAIT1):
        waiting = words[:, slot] == counter
        words[waiting & (words[:, slot + 1] == old), slot + 1] = gain
        words[waiting, slot + 2] = gain
    return counters


@kind("wait dropped")
def _(program: Program, rng: random.Random) -> Program:
    task, slot = _a_wait(program, rng) or (0, Word.WAIT0)
    words = program.words.copy()
    words[task, slot : slot + 3] = NONE, 0, 0
    return _edited(program, words)


@kind("wait on another counter")
def _(program: Program, rng: random.Random) -> Program:
    task, slot = _a_wait(program, rng) or (0, Word.WAIT0)
    words = program.words.copy()
    near = max(0, min(len(program.counters) - 1, int(words[task, slot]) + rng.choice([-2, -1, 1, 2])))
    gain = program.counters[near].per_step
    words[task, slot : slot + 3] = near, gain if words[task, slot + 1] else 0, gain
    return _edited(program, words)


def _count(change: int) -> Mutate:
    def mutate(program: Program, rng: random.Random) -> Program:
        task, slot = _a_wait(program, rng) or (0, Word.WAIT0)
        words = program.words.copy()
        words[task, slot + 1] += change
        return _edited(program, words)

    return mutate


KINDS["count one less"] = _count(-1)
KINDS["count one more"] = _count(+1)


@kind("increment off by one")
def _(program: Program, rng: random.Random) -> Program:
    task, slot = _a_wait(program, rng) or (0, Word.WAIT0)
    words = program.words.copy()
    words[task, slot + 2] += rng.choice([-1, 1])
    return _edited(program, words)


@kind("neighbours swapped")
def _(program: Program, rng: random.Random) -> Program | None:
    words, track_of = program.words.copy(), program.track_of
    # two tasks of one wave that neither wait nor signal are the same work in another order: leave most of those out
    apart = (words[1:, Word.OPCODE] != words[:-1, Word.OPCODE]) | (words[:-1, Word.WAIT0] != NONE)
    apart |= words[1:, Word.SIGNAL] != NONE
    task = _pick(rng, (track_of[1:] == track_of[:-1]) & apart)
    if task is None:
        return None
    words[[task, task + 1]] = words[[task + 1, task]]
    return _edited(program, words)


@kind("task moved up")
def _(program: Program, rng: random.Random) -> Program:
    words = program.words.copy()
    sm = rng.choice([sm for sm in range(program.tracks) if np.diff(program.offsets)[sm] > 8])
    start, end = int(program.offsets[sm]), int(program.offsets[sm + 1])
    source = rng.randrange(start + 7, end)
    target = source - rng.randrange(2, 8)
    words[target : source + 1] = np.roll(words[target : source + 1], 1, axis=0)
    return _edited(program, words)


@kind("task on another SM")
def _(program: Program, rng: random.Random) -> Program:
    lists = [program.track(track).copy() for track in range(program.tracks)]
    one, other = rng.sample(range(len(lists)), 2)
    at = rng.randrange(len(lists[one]))
    to = min(len(lists[other]), at + rng.randrange(-1, 2)) if at else 0
    lists[other] = np.insert(lists[other], to, lists[one][at], axis=0)
    lists[one] = np.delete(lists[one], at, axis=0)
    offsets = np.cumsum([0, *(len(tasks) for tasks in lists)]).astype(np.int32)
    return dataclasses.replace(program, words=np.concatenate(lists), offsets=offsets)


@kind("owner moved in one layer")
def _(program: Program, rng: random.Random) -> Program | None:
    """Two SMs own each other's strips there; or one alone embeds them."""
    words, sms = program.words.copy(), program.sm_of
    keeping = _of(words, *_KEEPING)
    if not program.shape.own_rows:
        return None
    one, other = rng.sample(sorted(set(sms[keeping].tolist())), 2)
    layer = rng.randrange(program.shape.geometry.layers)
    here = _of(words, *_KEEPING[1:]) & (words[:, Word.LAYER] == layer) if rng.random() < 0.8 else _of(words, "embed")
    strips = [Word.TILE, Word.TILES]
    mine, theirs = (words[keeping & (sms == sm)][0, strips] for sm in (one, other))
    words[np.ix_(here & (sms == one), strips)] = theirs
    words[np.ix_(here & (sms == other), strips)] = mine
    return _edited(program, words)


@kind("strips of an owner parted")
def _(program: Program, rng: random.Random) -> Program | None:
    """A task for several strips becomes two: each begins at the SM's first place."""
    several = _of(program.words, *_KEEPING) & (program.words[:, Word.TILES] > 1)
    task = _pick(rng, several) if program.shape.own_rows else None
    if task is None:
        return None
    words = np.insert(program.words, task, program.words[task], axis=0)
    first, second = words[task], words[task + 1]
    first[Word.TILES] = rng.randrange(1, int(second[Word.TILES]))
    second[[Word.TILE, Word.TILES]] += np.array([1, -1]) * first[Word.TILES]
    first[[Word.SIGNAL, Word.SIGNAL_VALUE]] = NONE, 0
    second[[Word.WAIT0, Word.WAIT1]] = NONE
    offsets = program.offsets.copy()
    offsets[program.track_of[task] + 1 :] += 1
    return dataclasses.replace(program, words=words, offsets=offsets)


@kind("idle copy")
def _(program: Program, rng: random.Random) -> Program | None:
    """A top-k on an SM that uses no route of the layer: nothing tells when it has read the router's logits."""
    layer = rng.choice(program.shape.geometry.sparse_layers)
    here = _of(program.words, "topk") & (program.words[:, Word.LAYER] == layer)
    idle = sorted(set(range(program.shape.n_sm)) - set(program.sm_of[here].tolist()))
    source = _pick(rng, here)
    if source is None or not idle:
        return None
    sm = rng.choice(idle)
    later = np.flatnonzero(program.track(sm)[:, Word.LAYER] > layer)
    to = int(program.offsets[sm]) + int(later[0]) + rng.randrange(3)
    copy = program.words[source].copy()
    copy[Word.FLAGS] = 0
    offsets = program.offsets.copy()
    offsets[sm + 1 :] += 1
    return dataclasses.replace(program, words=np.insert(program.words, to, copy, axis=0), offsets=offsets)


@kind("step left open")
def _(program: Program, rng: random.Random) -> Program | None:
    """The first or last wait of a step dropped: the previous step's tokens, or the last product's counter."""
    words = program.words.copy()
    ends = (words[:, Word.WAIT0] != NONE) & (
        (words[:, Word.WAIT0_COUNT] == 0) | (words[:, Word.LAYER] == program.shape.geometry.layers)
    )
    task = _pick(rng, ends)
    if task is None:
        return None
    words[task, Word.WAIT0 : Word.WAIT0 + 3] = NONE, 0, 0
    return _edited(program, words)


@kind("task missing")
def _(program: Program, rng: random.Random) -> Program | None:
    task = _pick(rng, (program.words[:, Word.SIGNAL] == NONE) & (program.words[:, Word.WAIT0] == NONE))
    if task is None:
        return None
    offsets = program.offsets.copy()
    offsets[program.track_of[task] + 1 :] -= 1
    return dataclasses.replace(program, words=np.delete(program.words, task, axis=0), offsets=offsets)


@kind("signal dropped")
def _(program: Program, rng: random.Random) -> Program:
    words = program.words.copy()
    words[_a_signal(program, rng), Word.SIGNAL] = NONE
    return _edited(program, words)


@kind("signal dropped, books balanced")
def _(program: Program, rng: random.Random) -> Program | None:
    words, task = program.words.copy(), _a_signal(program, rng)
    counter = int(words[task, Word.SIGNAL])
    if program.counters[counter].per_step < 2:
        return None
    words[task, [Word.SIGNAL, Word.SIGNAL_VALUE]] = NONE, 0
    return _edited(program, words, _regain(program, words, counter, program.counters[counter].per_step - 1))


@kind("signal value changed")
def _(program: Program, rng: random.Random) -> Program:
    words = program.words.copy()
    words[_a_signal(program, rng), Word.SIGNAL_VALUE] += rng.choice([-1, 1, 2])
    return _edited(program, words)


@kind("signal worth two, counts kept")
def _(program: Program, rng: random.Random) -> Program:
    words, task = program.words.copy(), _a_signal(program, rng)
    counter = int(words[task, Word.SIGNAL])
    gain = program.counters[counter].per_step
    waits = [(slot, np.flatnonzero(words[:, slot] == counter)) for slot in (Word.WAIT0, Word.WAIT1)]
    kept = [(slot, rows, words[rows, slot + 1].copy()) for slot, rows in waits]
    words[task, Word.SIGNAL_VALUE] += 1
    counters = _regain(program, words, counter, gain + 1)
    for slot, rows, counts in kept:
        words[rows, slot + 1] = counts
    return _edited(program, words, counters)


@kind("signal to another counter")
def _(program: Program, rng: random.Random) -> Program | None:
    words, task = program.words.copy(), _a_signal(program, rng)
    others = [c for c in range(len(program.counters)) if c != words[task, Word.SIGNAL]]
    words[task, Word.SIGNAL] = rng.choice(others)
    return _edited(program, words)


@kind("signal early")
def _(program: Program, rng: random.Random) -> Program | None:
    words, task = program.words.copy(), _a_signal(program, rng)
    start = int(program.offsets[program.track_of[task]])
    free = [t for t in range(max(start, task - 6), task) if words[t, Word.SIGNAL] == NONE]
    if not free:
        return None
    pair = [Word.SIGNAL, Word.SIGNAL_VALUE]
    words[rng.choice(free), pair] = words[task, pair]
    words[task, pair] = NONE, 0
    return _edited(program, words)


@kind("buffer reused early")
def _(program: Program, rng: random.Random) -> Program | None:
    """Written to, or read from, the buffer that another layer or wave still uses."""
    words = program.words.copy()
    word = rng.choice([Word.DST, Word.SRC])
    task = _pick(rng, _of(words, "residual", *(_WRITERS if word == Word.DST else ())))
    if task is None:
        return None
    words[task, word] = _OTHER[Buffer(int(words[task, word]))]
    return _edited(program, words)


@kind("another layer's version")
def _(program: Program, rng: random.Random) -> Program:
    words = program.words.copy()
    task = rng.randrange(len(words))
    words[task, Word.LAYER] += rng.choice([-2, -1, 1, 2])
    return _edited(program, words)


@kind("wrong tile")
def _(program: Program, rng: random.Random) -> Program | None:
    words = program.words.copy()
    word = rng.choice([Word.TILE, Word.TILES, Word.WEIGHT, Word.K_SLOTS])
    task = _pick(rng, words[:, Word.WEIGHT] > 0)
    if task is None:
        return None
    step = int(words[task, Word.STRIP_PITCH]) if word == Word.WEIGHT else 1
    words[task, word] += rng.choice([-step, step])
    return _edited(program, words)


@kind("wrong row, head or split")
def _(program: Program, rng: random.Random) -> Program | None:
    words = program.words.copy()
    task = _pick(rng, _of(words, "attention", "attn_combine"))
    if task is None:
        return None
    word = rng.choice([Word.ROW, Word.HEAD, *([Word.SPLIT] if _of(words, "attention")[task] else [])])
    words[task, word] += rng.choice([-1, 1])
    return _edited(program, words)


@kind("wrong rank or queue")
def _(program: Program, rng: random.Random) -> Program | None:
    words = program.words.copy()
    task = _pick(rng, (words[:, Word.RANKS] > 0) | (words[:, Word.QUEUE] != NONE))
    if task is None:
        return None
    words[task, Word.QUEUE if words[task, Word.QUEUE] != NONE else Word.RANK] += rng.choice([-1, 1])
    return _edited(program, words)
