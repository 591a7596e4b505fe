"""Executors of everything that is one matrix or one residual: embed, qkv, o_proj, dense FFN, residual, lm_head.

The norm never is a task: its weight multiplies x as it is loaded, and 1/rms, summed from the strips' partial squares in
strip order, multiplies the products.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mk.errors import MkError
from mk.graph import HEAD_STRIPS, x_buffer
from mk.interpreter.numerics import Floats, gated, ordered_sum, padded, rows_of, strip_product
from mk.interpreter.registry import Bench, Run, Task, executes
from mk.interpreter.step import Step
from mk.isa import Buffer, Flag, Word
from mk.model.geometry import ROWS, SLOT_K

Normed = Callable[[Step], tuple[Floats, Floats]]


def normed(bench: Bench, layer: int) -> Normed:
    """x of a layer times its norm weight [n, padded hidden], and 1/rms [n]; `layer` = layers is the final norm."""
    memory, g = bench.memory, bench.shape.geometry
    which = x_buffer(layer) - Buffer.X0
    x, squares, weight, store = memory.x[which], memory.x_squares[which], bench.weights.norms[layer], bench.store
    eps, hidden = np.float32(g.rms_eps), np.float32(g.hidden)

    def read(step: Step) -> tuple[Floats, Floats]:
        mean = ordered_sum(squares[:, step.rows]) / hidden
        return store(x[step.rows] * weight), np.float32(1.0) / np.sqrt(mean + eps)

    return read


def _write_x(bench: Bench, task: Task) -> Callable[[Step, Floats], None]:
    """Stores the task's columns of x [n, 16 tiles] and each strip's partial sum of squares; an owner keeps them too."""
    which = task[Word.DST] - Buffer.X0
    x, squares, columns, store = bench.memory.x[which], bench.memory.x_squares[which], task.columns, bench.store
    strips = slice(task[Word.TILE], task[Word.TILE] + task[Word.TILES])
    kept = task.private.x[:, : columns.stop - columns.start]

    def write(step: Step, values: Floats) -> None:
        values = store(values)
        x[step.rows, columns] = values
        kept[step.rows] = values
        terms = (values * values).reshape(len(values), -1, ROWS).transpose(2, 1, 0)
        squares[strips, step.rows] = ordered_sum(terms)

    return write


@executes("embed")
def embed(bench: Bench, task: Task) -> Run:
    """x = the token's row of the head, whose strips are rows of the vocabulary."""
    head, tokens, vocab = bench.weights, bench.memory.tokens, bench.shape.geometry.vocab
    first, pitch, columns = task[Word.WEIGHT], task[Word.STRIP_PITCH], task.columns
    write = _write_x(bench, task)

    def run(step: Step) -> None:
        values = np.empty((len(step.active), columns.stop - columns.start), np.float32)
        for place, row in enumerate(step.active.tolist()):
            token = tokens[row]
            if token is None or not 0 <= token < vocab:
                raise MkError(f"row {row}: token {token} is not in 0..{vocab - 1}", hint="check the last step's status")
            strip, line = divmod(token, ROWS)
            values[place] = head.strips(first + strip * pitch, 1, pitch, 0, pitch)[0, :, line].reshape(-1)[columns]
        write(step, values)

    return run


@executes("qkv")
def qkv(bench: Bench, task: Task) -> Run:
    """q, k, v of the normed x. q and k strips hold even dims, then the odd ones; both leave in the model's order.

    q goes to QKV. This token's K and V go there too and to their page.
    """
    g, memory, store = bench.shape.geometry, bench.memory, bench.store
    read, weights = normed(bench, task.layer), task.strips(bench.weights)
    strips = np.arange(task[Word.TILE], task[Word.TILE] + task[Word.TILES])
    first_k, first_v = g.q_width // ROWS, (g.q_width + g.kv_width) // ROWS
    paired = int((strips < first_v).sum())  # q and k strips, then v strips
    place = strips[:paired] % HEAD_STRIPS
    rope = task.has(Flag.ROPE)

    # K and V strips: KV head, 0 for K and 1 for V, and 16-dim piece of the head
    cached = strips[strips >= first_k]
    is_v = (cached >= first_v).astype(np.int64)
    head, piece = np.divmod(cached - np.where(is_v, first_v, first_k), HEAD_STRIPS)
    kind, index = g.layer_kinds[task.layer], bench.kv.index[task.layer]
    pool = bench.kv.pools[kind]
    pieces = pool.reshape(*pool.shape[:-1], HEAD_STRIPS, ROWS)

    def run(step: Step) -> None:
        activations, rstd = read(step)
        y = strip_product(weights(), activations) * rstd[None, :, None]
        even, odd = y[:paired, :, :8], y[:paired, :, 8:]
        pairs = np.empty((*even.shape, 2), np.float32)
        if rope:
            cos, sin = step.cos[place], step.sin[place]
            pairs[..., 0] = even * cos - odd * sin
            pairs[..., 1] = odd * cos + even * sin
        else:
            pairs[..., 0], pairs[..., 1] = even, odd
        y[:paired] = pairs.reshape(paired, len(step.active), ROWS)
        values = store(y.transpose(1, 0, 2))  # [n, strips, 16]
        memory.qkv[step.rows, strips[0] : strips[-1] + 1] = values
        if len(cached):
            page, slot = step.page[kind][:, None], step.slot_in_page[:, None]
            pieces[page, index, head, is_v, slot, piece] = values[:, len(strips) - len(cached) :]

    return run


@executes("o_proj")
def o_proj(bench: Bench, task: Task) -> Run:
    weights, source = task.strips(bench.weights), bench.memory.attn_out
    out = bench.memory.contribution(Buffer(task[Word.DST]), task.sm, task.columns)

    def run(step: Step) -> None:
        out[step.rows] = rows_of(strip_product(weights(), source[step.rows]))

    return run


@executes("prefetch")
def prefetch(bench: Bench, task: Task) -> Run:
    """Nothing: the weights of a CPU's interpreter are where they are."""
    return lambda step: None


@executes("dense_up")
def dense_up(bench: Bench, task: Task) -> Run:
    """silu(gate) * up of some strips of the dense layer, kept where expert 0's would be."""
    read, weights, store = normed(bench, task.layer), task.strips(bench.weights), bench.store
    hidden = bench.memory.hidden[0]
    columns = slice(task.columns.start // 2, task.columns.stop // 2)

    def run(step: Step) -> None:
        activations, rstd = read(step)
        pairs = strip_product(weights(), activations) * rstd[None, :, None]
        hidden[step.rows, columns] = store(rows_of(gated(pairs)))

    return run


@executes("dense_down")
def dense_down(bench: Bench, task: Task) -> Run:
    weights = task.strips(bench.weights)
    hidden, width, k = bench.memory.hidden[0], bench.shape.geometry.dense_ffn, task[Word.K_SLOTS] * SLOT_K
    out = bench.memory.contribution(Buffer(task[Word.DST]), task.sm, task.columns)

    def run(step: Step) -> None:
        out[step.rows] = rows_of(strip_product(weights(), padded(hidden[step.rows], width, k)))

    return run


@executes("residual")
def residual(bench: Bench, task: Task) -> Run:
    """x' = x + (attention + ffn), stored as bf16 by the kernel, and the squares that the next norm needs.

    An owner takes x from what it keeps. In a part of a step no earlier task has left it there: x comes from memory, and
    the two sums go there, for whoever looks at them.
    """
    memory, columns, write = bench.memory, task.columns, _write_x(bench, task)
    owned = task[Word.SRC] == Buffer.ACC_ATTN
    part = task.has(Flag.PART)
    attention = memory.contribution(Buffer(task[Word.SRC]), task.sm, columns)
    ffn = memory.contribution(Buffer.ACC_FFN if owned else Buffer.FFN_OUT, task.sm, columns)
    x = memory.x[x_buffer(task.layer) - Buffer.X0][:, columns]
    if owned and not part:
        x = task.private.x[:, : columns.stop - columns.start]

    def run(step: Step) -> None:
        rows = step.rows
        write(step, x[rows] + (attention[rows] + ffn[rows]))
        if owned and part:
            memory.oproj_out[rows, columns] = attention[rows]
            memory.ffn_out[rows, columns] = ffn[rows]

    return run


@executes("lm_head")
def lm_head(bench: Bench, task: Task) -> Run:
    read, weights, columns = normed(bench, task.layer), task.strips(bench.weights), task.columns
    logits = bench.memory.logits
    scale = np.float32(bench.shape.geometry.logit_scale)

    def run(step: Step) -> None:
        activations, rstd = read(step)
        logits[step.rows, columns] = rows_of(strip_product(weights(), activations) * rstd[None, :, None]) * scale

    return run
