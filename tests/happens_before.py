"""An oracle for schedules that shares nothing with the verifier: exact order by brute force, three steps unrolled.

Order. Task a precedes task b in every interleaving exactly if b cannot start while a's SM is stopped just before a
ends. Waits are monotone, so one greedy run with that SM stopped says which tasks can start at all. This is done for
every task of every SM, with the descriptors' own targets `epoch * step + count` and no assumption that steps are
closed, that waits are on whole waves, or which signals a wait needs.

Races. Two tasks that touch the same unit of memory, at least one of them writing, must be ordered one way or the other;
only tiles and tickets that claimers of one queue draw are exempt from each other. What a task touches is written down
here once more, from what its operation does. A program without races and deadlocks is determinate: every interleaving
computes what any single one does, so one run of the interpreter then tells whether it is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from mk.graph import HEAD_PARTS, StepShape
from mk.isa import ISA, Buffer, Word
from mk.schedule.lower import Program

STEPS = 3

Unit = tuple[object, ...]
Touch = tuple[str, Unit, Unit | None]
"""("read" or "write", unit, the group of accesses it is exempt from racing with)."""


class Deadlock(Exception):
    """Some SM can never go on."""


class Order:
    """When every task can start: `stopped[m][i]` is, with SM m stopped before its i-th task ends (steps one after the
    other), the first task of each SM that cannot start."""

    def __init__(self, program: Program, steps: int = STEPS) -> None:
        self.tracks, self.steps = program.tracks, steps
        self.tasks = []
        for track in range(self.tracks):
            rows = []
            for w in program.track(track).tolist():
                waits = [w[at : at + 3] for at in (Word.WAIT0, Word.WAIT1) if w[at] != -1]
                rows.append((waits, w[Word.SIGNAL], w[Word.SIGNAL_VALUE]))
            self.tasks.append(rows)
        self.length = [len(rows) * steps for rows in self.tasks]
        self.n_counters = len(program.counters)
        self.stopped = [self._with_stopped(sm) for sm in range(self.tracks)]

    def _can_start(self, sm: int, at: int, values: list[int]) -> bool:
        step, index = divmod(at, len(self.tasks[sm]))
        return all(values[counter] >= step * gain + count for counter, count, gain in self.tasks[sm][index][0])

    def _finish(self, sm: int, at: int, values: list[int]) -> None:
        _, signal, value = self.tasks[sm][at % len(self.tasks[sm])]
        if signal != -1:
            values[signal] += value

    def _with_stopped(self, stopped: int) -> np.ndarray:
        at, values = [0] * self.tracks, [0] * self.n_counters
        others = [sm for sm in range(self.tracks) if sm != stopped]
        rows = []

        def run_others() -> None:
            moved = True
            while moved:
                moved = False
                for sm in others:
                    while at[sm] < self.length[sm] and self._can_start(sm, at[sm], values):
                        self._finish(sm, at[sm], values)
                        at[sm] += 1
                        moved = True

        for mine in range(self.length[stopped]):
            if mine == 0 or self.tasks[stopped][(mine - 1) % len(self.tasks[stopped])][1] != -1:
                run_others()
            rows.append(list(at))
            if not self._can_start(stopped, mine, values):
                raise Deadlock(f"SM {stopped} at {mine}")
            self._finish(stopped, mine, values)
            at[stopped] = mine + 1
        run_others()
        if at != self.length:
            raise Deadlock("the other SMs")
        return np.array(rows, np.int64).reshape(-1, self.tracks)


def find_race(program: Program, active: tuple[int, ...], steps: int = STEPS) -> str | None:
    """The first pair of unordered, conflicting accesses, or None. Raises Deadlock."""
    order = Order(program, steps)
    units: dict[Unit, int] = {}
    groups: dict[Unit | None, int] = {None: 0}
    rows: list[tuple[int, int, int, int, int]] = []
    for sm in range(program.tracks):
        tasks = [tuple(words) for words in program.track(sm).tolist()]
        for step in range(steps):
            for index, words in enumerate(tasks):
                for way, unit, group in touches(program.shape, words, sm, step, active):
                    rows.append(
                        (
                            units.setdefault(unit, len(units)),
                            sm,
                            step * len(tasks) + index,
                            way == "write",
                            groups.setdefault(group, len(groups)),
                        )
                    )
    table = np.array(rows)
    table = table[np.argsort(table[:, 0], kind="stable")]
    starts = np.searchsorted(table[:, 0], np.arange(len(units) + 1))
    writes = np.flatnonzero(table[:, 3])
    counts = np.diff(starts)[table[writes, 0]]
    a = np.repeat(writes, counts)
    b = np.arange(len(a)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts[table[writes, 0]], counts)
    apart = (table[a, 1] != table[b, 1]) & ((table[a, 4] != table[b, 4]) | (table[a, 4] == 0))
    a, b = a[apart], b[apart]
    first = np.cumsum([0, *order.length])
    stopped = np.concatenate(order.stopped)
    sm_a, at_a, sm_b, at_b = table[a, 1], table[a, 2], table[b, 1], table[b, 2]
    ordered = (stopped[first[sm_a] + at_a, sm_b] <= at_b) | (stopped[first[sm_b] + at_b, sm_a] <= at_a)
    for k in np.flatnonzero(~ordered)[:1]:
        unit = list(units)[table[a[k], 0]]
        return f"{unit}: SM {sm_a[k]} at {at_a[k]}, SM {sm_b[k]} at {at_b[k]}"
    return None


@lru_cache(maxsize=1 << 16)
def touches(shape: StepShape, words: tuple[int, ...], sm: int, step: int, active: tuple[int, ...]) -> tuple[Touch, ...]:
    """Every unit that a task touches in a step whose routers choose the `active` experts."""
    return tuple(_touches(shape, words, sm, step, active))


def _touches(s: StepShape, w: tuple[int, ...], sm: int, step: int, active: tuple[int, ...]) -> Iterator[Touch]:
    g, op, layer = s.geometry, ISA.rows[w[Word.OPCODE]].name, w[Word.LAYER]
    strips = range(w[Word.TILE], w[Word.TILE] + w[Word.TILES])
    up_strips, down_strips = g.expert_ffn // 8, g.hidden // 16
    q_strips, kv_strips = g.q_heads * 8, g.kv_heads * 8
    rank, ranks, queue = w[Word.RANK], w[Word.RANKS], w[Word.QUEUE]

    def read(*unit: object) -> Touch:
        return "read", unit, None

    def write(*unit: object) -> Touch:
        return "write", unit, None

    def x(at: int) -> list[Touch]:
        return [read("x", at % 2, strip) for strip in range(g.hidden // 16)]

    def out(buffer: int, strip: int) -> Unit:
        own = buffer in (Buffer.ACC_ATTN, Buffer.ACC_FFN)
        return "out", buffer, strip, sm if own else None

    def drawn() -> Touch:
        return "write", ("queue", queue, step % 2), ("draw", queue, step)

    def tiles(of: int) -> list[tuple[int, int]]:
        every = [(expert, strip) for expert in active for strip in range(of)]
        return every[len(every) * rank // ranks : len(every) * (rank + 1) // ranks]

    def attention(row: int, head: int, split: int, group: Unit | None) -> Iterator[Touch]:
        for strip in range(head * g.group * 8, (head + 1) * g.group * 8):
            yield read("qkv", strip)
        for strip in range(head * 8, (head + 1) * 8):
            for then in range(step + 1):  # keys of this step and of the earlier ones lie in pages
                yield read("page", layer, strip, then)
                yield read("page", layer, kv_strips + strip, then)
        yield "write", ("partial", row, head, split), group

    def sampling(op: str) -> Iterator[Touch]:
        now, idle = step % 2, (step + 1) % 2
        if op == "histogram":
            yield "write", ("bins", now), ("added", step)
            yield "write", ("bins", idle), ("cleared", step)  # each task another part
            if rank == 0:
                yield write("undecided", idle)
        elif op == "shortlist":
            yield read("bins", now)
            yield "write", ("undecided", now), ("listed", step)
            yield write("best", rank)
        else:
            for unit in [("bins", now), ("undecided", now), *(("best", i) for i in range(s.slices))]:
                if op == "draw":
                    yield read(*unit)
            yield write("tokens")

    if op == "embed":
        yield read("tokens")
        for strip in strips:
            yield write("x", w[Word.DST] - Buffer.X0, strip)
    elif op == "qkv":
        yield from x(layer)
        for strip in strips:
            yield write("qkv", strip)
            if strip >= q_strips:
                yield write("page", layer, strip - q_strips, step)
    elif op == "attention":
        yield from attention(w[Word.ROW], w[Word.HEAD], w[Word.SPLIT], None)
    elif op == "attn_drain":
        yield drawn()
        for row in range(s.rows):
            for head in range(g.kv_heads):
                for split in range(s.splits.most(s.bucket, s.window(layer))):
                    yield from attention(row, head, split, ("claimed", queue, step))
    elif op == "attn_combine":
        row, head = w[Word.ROW], w[Word.HEAD]
        for split in range(s.splits.most(s.bucket, s.window(layer))):
            yield read("partial", row, head // g.group, split)
        for part in range(w[Word.TILE], w[Word.TILE] + w[Word.TILES]):
            yield write("attn", row, head, part)
    elif op == "o_proj":
        for row in range(s.rows):
            for head, part in itertools.product(range(g.q_heads), range(HEAD_PARTS)):
                yield read("attn", row, head, part)
        for strip in strips:
            yield "write", out(w[Word.DST], strip), None
    elif op == "router":
        yield from x(layer)
        for strip in strips:
            yield write("router", strip, w[Word.K_SLOT])
    elif op == "topk":
        for strip in range(-(-g.experts // 16)):
            for k_slot in range(-(-g.hidden // 256)):
                yield read("router", strip, k_slot)
        yield write("route", sm)
    elif op == "route_setup":
        for head in range(queue, queue + w[Word.TILES]):
            yield write("queue", head, (step + 1) % 2)
    elif op in ("moe_up", "moe_up_drain"):
        yield from x(layer)
        yield read("route", sm)
        if op == "moe_up":
            for expert, strip in tiles(up_strips):
                yield write("hidden", expert, strip)
        else:
            yield drawn()
            for expert in active:
                for strip in range(up_strips):
                    yield "write", ("hidden", expert, strip), ("claimed", queue, step)
    elif op in ("moe_down", "moe_down_drain", "moe_down_owned"):
        yield read("route", sm)
        own = {expert for expert, _ in tiles(down_strips)} if op == "moe_down" else set(active)
        for expert in own:
            for strip in range(up_strips):
                yield read("hidden", expert, strip)
        if op == "moe_down":
            for expert, strip in tiles(down_strips):
                yield write("part", expert, strip)
        elif op == "moe_down_owned":
            for strip in strips:
                yield "write", out(w[Word.DST], strip), None
        else:
            yield drawn()
            for expert in active:
                for strip in range(down_strips):
                    yield "write", ("part", expert, strip), ("claimed", queue, step)
    elif op == "moe_combine":
        yield read("route", sm)
        for strip in strips:
            for expert in active:
                yield read("part", expert, strip)
            yield "write", out(w[Word.DST], strip), None
    elif op == "dense_up":
        yield from x(layer)
        for strip in strips:
            yield write("hidden", 0, strip)
    elif op == "dense_down":
        for strip in range(g.dense_ffn // 8):
            yield read("hidden", 0, strip)
        for strip in strips:
            yield "write", out(w[Word.DST], strip), None
    elif op == "residual":
        for strip in strips:
            yield read("x", layer % 2, strip)
            yield "read", out(w[Word.SRC], strip), None
            yield "read", out(Buffer.ACC_FFN if w[Word.SRC] == Buffer.ACC_ATTN else Buffer.FFN_OUT, strip), None
            yield write("x", w[Word.DST] - Buffer.X0, strip)
    elif op == "lm_head":
        yield from x(layer)
        for strip in strips:
            yield write("logits", strip)
    elif op in ("histogram", "shortlist", "sample", "draw"):
        for strip in range(-(-g.vocab // 16)):
            yield read("logits", strip)
        yield from sampling(op)
    elif op != "prefetch":  # that touches weights alone
        raise AssertionError(f"the oracle does not know {op}")
