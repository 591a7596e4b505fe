"""Executors of the sparse FFN: router, top-k, and the up and down projections of the experts that were chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from mk.errors import MkError
from mk.interpreter.claims import claimed
from mk.interpreter.memory import Route
from mk.interpreter.numerics import Floats, gated, ordered_sum, padded, rows_of, sigmoid, strip_product
from mk.interpreter.projections import normed
from mk.interpreter.registry import Bench, Run, Task, executes
from mk.interpreter.step import Ints, Status, Step
from mk.isa import Buffer, Flag, Word
from mk.model.geometry import SLOT_K
from mk.phases import expert_tile, share

Tile = Callable[[Step, int, int, int], None]
"""(step, expert, first strip, strips): one or more neighbouring tiles of one expert."""


@executes("router")
def router(bench: Bench, task: Task) -> Run:
    """Logits of some strips over one k slot, 1/rms applied: the norm must be known before the slots are added."""
    read, weights = normed(bench, task.layer), task.strips(bench.weights)
    k_slots = slice(task[Word.K_SLOT], task[Word.K_SLOT] + task[Word.K_SLOTS])
    columns = slice(k_slots.start * SLOT_K, k_slots.stop * SLOT_K)
    part = bench.memory.router_part[task[Word.K_SLOT], task[Word.TILE] : task[Word.TILE] + task[Word.TILES]]

    def run(step: Step) -> None:
        activations, rstd = read(step)
        y = strip_product(weights(), np.ascontiguousarray(activations[:, columns]))
        part[:, step.rows] = y * rstd[None, :, None]

    return run


def choose(logits: Floats, top_k: int) -> Ints:
    """The top_k experts of each row by raw logit, ties to the lower id, NaN as -inf; ids [n, top_k] by rank."""
    clean = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    ids: Ints = np.argsort(-clean, axis=1, kind="stable")[:, :top_k]
    return ids


@executes("topk")
def topk(bench: Bench, task: Task) -> Run:
    """Every SM for itself: adds the partial logits in k order, picks the experts, lists who goes to which of them.

    A row's weight for an expert is the sigmoid of the raw logit, not renormalised, whoever chose the expert.
    """
    memory, g, private, layer = bench.memory, bench.shape.geometry, task.private, task.layer
    publishes = task.has(Flag.PUBLISH)

    def run(step: Step) -> None:
        logits = rows_of(ordered_sum(memory.router_part[:, :, step.rows]))[:, : g.experts]
        if bench.router is None:
            ids = choose(logits, g.top_k)
        else:
            ids = _replaced(bench, step, layer, logits)
        picked = np.take_along_axis(logits, ids, axis=1)
        weights = sigmoid(np.where(np.isnan(picked), np.float32(-np.inf), picked))
        private.route = _route(ids, weights)
        nan = np.isnan(logits).any(axis=1)
        if nan.any():
            step.outputs.status[step.active[nan]] |= Status.ROUTER_NAN
        if publishes:
            published = step.outputs.expert_ids[layer] = np.full((bench.shape.rows, g.top_k), -1, np.int64)
            published[step.rows] = ids

    return run


def _replaced(bench: Bench, step: Step, layer: int, logits: Floats) -> Ints:
    """Ids of the active rows [n, top_k] as the routing mode wants them."""
    assert bench.router is not None
    g = bench.shape.geometry
    every = np.full((bench.shape.rows, g.experts), np.nan, np.float32)
    every[step.rows] = logits
    ids = np.asarray(bench.router(layer, step.number, every), np.int64)
    if ids.shape != (bench.shape.rows, g.top_k):
        raise MkError(f"the routing mode gave ids {list(ids.shape)}, not {[bench.shape.rows, g.top_k]}")
    chosen = np.sort(ids[step.rows], axis=1)
    if (chosen < 0).any() or (chosen >= g.experts).any() or (chosen[:, 1:] == chosen[:, :-1]).any():
        raise MkError(f"layer {layer}: the routing mode must give each active row {g.top_k} different experts")
    return ids[step.rows]


def _route(ids: Ints, weights: Floats) -> Route:
    members: dict[int, list[int]] = {}
    shares: dict[int, list[float]] = {}
    for place, (chosen, row_weights) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, weight in zip(chosen, row_weights, strict=True):
            members.setdefault(expert, []).append(place)
            shares.setdefault(expert, []).append(weight)
    return Route(
        sorted(members),
        {expert: np.array(places) for expert, places in members.items()},
        {expert: np.array(values, np.float32)[:, None] for expert, values in shares.items()},
    )


def _routed(task: Task) -> Route:
    if task.private.route is None:
        raise MkError(f"SM {task.sm} runs an expert of layer {task.layer} before any top-k")
    return task.private.route


@executes("route_setup")
def route_setup(bench: Bench, task: Task) -> Run:
    """Clears this layer's heads of the set that the next step draws from."""
    queues, first, count = bench.memory.queues, task[Word.QUEUE], task[Word.TILES]

    def run(step: Step) -> None:
        queues[(step.epoch + 1) % 2][first : first + count] = [0] * count

    return run


def _up(bench: Bench, task: Task) -> Callable[[Step], Tile]:
    read, memory, store = normed(bench, task.layer), bench.memory, bench.store

    def begin(step: Step) -> Tile:
        activations, rstd = read(step)
        route = _routed(task)

        def tile(step: Step, expert: int, strip: int, strips: int) -> None:
            members = route.members[expert]
            pairs = strip_product(task.expert_strips(bench.weights, expert, strip, strips), activations[members])
            values = store(rows_of(gated(pairs * rstd[None, members, None])))
            memory.hidden[expert, step.active[members], strip * 8 : (strip + strips) * 8] = values

        return tile

    return begin


def _down(bench: Bench, task: Task) -> Callable[[Step], Tile]:
    """An expert's contribution before its weight: fp32, rows that are not routed to it left alone."""

    def begin(step: Step) -> Tile:
        route = _routed(task)

        def tile(step: Step, expert: int, strip: int, strips: int) -> None:
            rows = step.active[route.members[expert]]
            y = _down_product(bench, task, expert, rows, strip, strips)
            bench.memory.ffn_part[expert, rows, strip * 16 : (strip + strips) * 16] = y

        return tile

    return begin


def _down_product(bench: Bench, task: Task, expert: int, rows: Ints, strip: int, strips: int) -> Floats:
    width, k = bench.shape.geometry.expert_ffn, task[Word.K_SLOTS] * SLOT_K
    weights = task.expert_strips(bench.weights, expert, strip, strips)
    return rows_of(strip_product(weights, padded(bench.memory.hidden[expert, rows], width, k)))


def _phase(begin: Callable[[Step], Tile], task: Task) -> Run:
    """This SM's static share of the active experts' tiles; tiles of one expert go together."""
    rank, ranks, strips = task[Word.RANK], task[Word.RANKS], task[Word.TILES]

    def run(step: Step) -> Iterator[None]:
        tile, active = begin(step), _routed(task).active
        flat, end = share(len(active) * strips, rank, ranks)
        while flat < end:
            expert, strip = expert_tile(flat, active, strips)
            count = min(strips - strip, end - flat)
            tile(step, expert, strip, count)
            flat += count
            yield

    return run


def _drain(bench: Bench, begin: Callable[[Step], Tile], task: Task) -> Run:
    strips = task[Word.TILES]

    def run(step: Step) -> Iterator[None]:
        tile, active = begin(step), _routed(task).active

        def item(ticket: int) -> None:
            expert, strip = expert_tile(ticket, active, strips)
            tile(step, expert, strip, 1)

        return claimed(bench, task, step, len(active) * strips, item)

    return run


@executes("moe_up")
def moe_up(bench: Bench, task: Task) -> Run:
    return _phase(_up(bench, task), task)


@executes("moe_up_drain")
def moe_up_drain(bench: Bench, task: Task) -> Run:
    return _drain(bench, _up(bench, task), task)


@executes("moe_down")
def moe_down(bench: Bench, task: Task) -> Run:
    return _phase(_down(bench, task), task)


@executes("moe_down_drain")
def moe_down_drain(bench: Bench, task: Task) -> Run:
    return _drain(bench, _down(bench, task), task)


@executes("moe_down_owned")
def moe_down_owned(bench: Bench, task: Task) -> Run:
    """The weighted sum of `moe_combine`, added up where the products are made: same numbers, same order."""
    out = bench.memory.contribution(Buffer(task[Word.DST]), task.sm, task.columns)

    def run(step: Step) -> Iterator[None]:
        route = _routed(task)
        out[step.rows] = 0
        for expert in route.active:
            members = route.members[expert]
            rows = step.active[members]
            y = _down_product(bench, task, expert, rows, task[Word.TILE], task[Word.TILES])
            out[rows] += route.weights[expert] * y
            yield

    return run


@executes("moe_combine")
def moe_combine(bench: Bench, task: Task) -> Run:
    """Weighted sum of the experts' contributions in ascending id."""
    part, columns = bench.memory.ffn_part, task.columns
    out = bench.memory.contribution(Buffer(task[Word.DST]), task.sm, columns)

    def run(step: Step) -> None:
        route = _routed(task)
        out[step.rows] = 0
        for expert in route.active:
            rows = step.active[route.members[expert]]
            out[rows] += route.weights[expert] * part[expert, rows, columns]

    return run
