"""Executors of attention: one split of one (row, KV head), claimed or dealt, and the merge of a head's splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from mk.graph import HEAD_PARTS
from mk.interpreter.claims import claimed
from mk.interpreter.numerics import ordered_sum
from mk.interpreter.registry import Bench, Run, Task, executes
from mk.interpreter.step import Step
from mk.isa import Flag, Word

KEYS_CHUNK = 128  # keys whose scores exist at a time, at absolute multiples


def _kind(task: Task) -> str:
    return "sliding" if task.has(Flag.SLIDING) else "full"


def _attend(bench: Bench, task: Task) -> Callable[[Step, int, int, int], None]:
    """Max, sum of exponentials and unnormalised O of one split, for the query heads of one KV head.

    Keys outside the split's own range (past the context, or out of the window) are left out, never multiplied away.
    A split is walked `KEYS_CHUNK` keys at a time under a running maximum; the sum is that of the exponentials before
    they are rounded for P V.
    """
    memory, kv, g, store = bench.memory, bench.kv, bench.shape.geometry, bench.store
    kind, layer, splits = _kind(task), task.layer, bench.shape.splits
    window = bench.shape.window(layer)
    q = memory.qkv[:, : g.q_width // 16].reshape(bench.shape.rows, g.kv_heads, g.group, g.head_dim)
    scale = np.float32(g.head_dim**-0.5)

    def attend(step: Step, row: int, head: int, split: int) -> None:
        lo, hi = splits.bounds(int(step.keys[row]), window)[split]
        k, v = kv.read(step.table[kind][row], layer, head, lo, hi)
        queries = q[row, head]
        top = np.full(g.group, -np.inf, np.float32)
        total, out = np.zeros(g.group, np.float32), np.zeros((g.group, g.head_dim), np.float32)
        for first in range(lo // KEYS_CHUNK * KEYS_CHUNK, hi, KEYS_CHUNK):
            chunk = slice(max(lo, first) - lo, min(hi, first + KEYS_CHUNK) - lo)
            scores = np.matmul(queries, k[chunk].T) * scale  # [group, keys]
            best = np.maximum(top, scores.max(axis=1))
            alpha, p = np.exp(top - best), np.exp(scores - best[:, None])
            p = store(p)  # numerator and denominator take the same P, as in the kernel
            total = total * alpha + p.sum(axis=1)
            out = out * alpha[:, None] + np.matmul(p, v[chunk])
            top = best
        memory.split_max[row, head, :, split] = top
        memory.split_sum[row, head, :, split] = total
        memory.split_out[row, head, :, split] = out

    return attend


@executes("attention")
def attention(bench: Bench, task: Task) -> Run:
    """One dealt split; it does nothing where the row's own length has fewer splits, or the row is inactive."""
    attend, window, splits = _attend(bench, task), bench.shape.window(task.layer), bench.shape.splits
    row, head, split = task[Word.ROW], task[Word.HEAD], task[Word.SPLIT]

    def run(step: Step) -> None:
        if split < splits.count(int(step.keys[row]), window):
            attend(step, row, head, split)

    return run


@executes("attn_drain")
def attn_drain(bench: Bench, task: Task) -> Run:
    attend, kind = _attend(bench, task), _kind(task)

    def run(step: Step) -> Iterator[None]:
        queue = step.queue[kind]

        def item(ticket: int) -> None:
            attend(step, *queue.item(ticket))

        return claimed(bench, task, step, step.attention_items[kind], item)

    return run


@executes("attn_combine")
def attn_combine(bench: Bench, task: Task) -> Run:
    """Merges the splits of some dims of one (row, query head) in split order; zeros for an inactive row."""
    memory, g, store = bench.memory, bench.shape.geometry, bench.store
    window, splits = bench.shape.window(task.layer), bench.shape.splits
    row = task[Word.ROW]
    head, query = divmod(task[Word.HEAD], g.group)
    width = g.head_dim // HEAD_PARTS
    dims = slice(task[Word.TILE] * width, (task[Word.TILE] + task[Word.TILES]) * width)
    tops, sums = memory.split_max[row, head, query], memory.split_sum[row, head, query]
    outs = memory.split_out[row, head, query, :, dims]
    out = memory.attn_out[row, task[Word.HEAD] * g.head_dim :][dims]

    def run(step: Step) -> None:
        count = splits.count(int(step.keys[row]), window)
        if not count:
            out[:] = 0
            return
        weight = np.exp(tops[:count] - tops[:count].max())
        out[:] = store(ordered_sum(weight[:, None] * outs[:count]) / ordered_sum(weight * sums[:count]))

    return run
