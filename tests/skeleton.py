"""A skeleton of the decode step that was measured on an H200, as work for the simulator.

It has the dependency shape and the bytes of MoE layers, and no numbers that mean anything: norm -> {QKV -> attention ->
combine -> O} and {router -> top-k -> up/gate -> down} -> next norm, on 132 SMs, 128 of which own 16 rows of the
residual. Strips are 64 KB, attention comes in blocks of 16 KB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mk.schedule.costs import Costs, OpCosts
from mk.schedule.simulator.engine import Engine
from mk.schedule.simulator.work import Ring, Task, Work

N_SM, OWNERS, ROUTERS, COMBINERS = 132, 128, 32, 32
QKV_STRIPS, ATTENTION_BLOCKS, O_BLOCKS = 320, 640, 8
STRIP, BLOCK = 8, 2  # ring slots


# one set of constants for all rows, microseconds; memory is what the probe read at most
FIT = {
    "memory": 4.70,
    "latency": 0.65,
    "issue": 0.05,
    "load": 0.6,
    "slot": 0.03,
    "tile": 0.15,
    "release": 0.5,
    "handoff": 0.9,
    "queued": 1.0,
    "pollers": 1.7,  # times the queue that a hand-off waits behind, with a poller in every warp
    "combine": 0.8,
}


@dataclass(frozen=True, slots=True)
class Row:
    """A measured line of the probe: window in KB, block size in KB, and what was turned on."""

    window: int
    block: int
    one_poller: bool
    one_arrival: bool
    attention_first: bool
    us_a_layer: float
    experts: int = 8
    rows: int = 1


ROWS = (
    Row(192, 16, False, False, False, 37.6),
    Row(64, 16, False, False, False, 35.5),
    Row(32, 16, False, False, False, 30.7),
    Row(32, 16, True, False, False, 29.7),
    Row(48, 16, True, True, False, 29.6),
    Row(40, 8, True, True, False, 29.2),
    Row(40, 8, True, True, True, 28.5),
    Row(64, 8, True, True, False, 32.0),
    Row(96, 8, True, True, False, 32.9),
    Row(192, 8, True, True, False, 33.0),
    Row(40, 8, True, True, True, 47.4, experts=16, rows=2),
    Row(64, 16, True, True, False, 81.5, experts=30, rows=4),
    Row(64, 16, True, True, False, 139.3, experts=52, rows=8),
)


def work(row: Row, layers: int) -> Work:
    """`layers` layers of the skeleton."""
    signals: list[int] = []
    tracks: list[list[Task]] = [[] for _ in range(2 * N_SM)]

    def counter() -> int:
        signals.append(0)
        return len(signals) - 1

    def add(
        track: int, op: str, slots: int, waits: tuple[int, ...], signal: int = -1, tiles: int = 1, **more: Any
    ) -> None:
        tracks[track].append(Task(op, slots, tiles, waits, signal, **more))
        if signal >= 0:
            signals[signal] += 1

    def strips(sm: int, op: str, first: int, count: int, waits: tuple[int, ...], signal: int, **more: bool) -> None:
        """A phase's strips of an SM, dealt in turn from SM `first` on: one arrival in all, or one each."""
        mine = len(range((sm - first) % N_SM, count, N_SM))
        if row.one_arrival and mine:
            add(sm, op, mine * STRIP, waits, signal, mine, **more)
        for strip in range(0 if row.one_arrival else mine):
            add(sm, op, STRIP, waits if strip == 0 else (), signal, **more)

    up = 96 * row.experts
    attention = ATTENTION_BLOCKS * row.rows
    normed: tuple[int, ...] = ()
    for _ in range(layers):
        routed, projected, attended, merged, activated, closed = (counter() for _ in range(6))
        for sm in range(N_SM):
            if sm >= N_SM - ROUTERS:
                add(sm, "router", BLOCK, normed, routed)
            strips(sm, "qkv", 0, QKV_STRIPS, normed, projected)
            add(sm, "topk", 0, (routed,), tiles=0, routes=True)
            blocks = len(range((sm - QKV_STRIPS - up) % N_SM, attention, N_SM))
            if row.attention_first:
                add(sm, "attention", blocks * BLOCK, (projected,), attended)
            strips(sm, "up", QKV_STRIPS, up, (), activated, routed=True)
            if not row.attention_first:
                add(sm, "attention", blocks * BLOCK, (projected,), attended)
            if sm >= N_SM - COMBINERS:
                add(N_SM + sm, "combine", 0, (attended,), merged, tiles=0)
            if sm < OWNERS:
                add(sm, "down", row.experts * 3, (activated,))
                add(sm, "o", O_BLOCKS * BLOCK, (merged,), closed)
        normed = (closed,)
    return Work(N_SM, row.rows, tracks, signals)


def costs(row: Row, fit: dict[str, float]) -> Costs:
    """An arrival a strip costs its storer a release each."""
    release = fit["release"]
    tile = fit["tile"] + (0 if row.one_arrival else release)
    product = OpCosts(fit["load"], fit["slot"], tile, release)
    return Costs(
        memory_tb_s=fit["memory"],
        latency=fit["latency"],
        port_gb_s=100.0,
        issue=fit["issue"],
        next_stream=0.0,
        next_entry=0.0,
        next_store=0.0,
        publish=0.0,
        handoff=fit["handoff"],
        queued=fit["queued"] * (1.0 if row.one_poller else fit["pollers"]),
        claim=0.0,
        launch=0.0,
        ops={
            **dict.fromkeys(("router", "attention", "down", "o"), product),
            "qkv": product,
            "up": OpCosts(0.0, product.slot, product.tile, product.close),
            "combine": OpCosts(open=fit["load"], close=fit["combine"]),
        },
    )


def us_a_layer(row: Row, fit: dict[str, float], few: int = 2, many: int = 4) -> float:
    """Microseconds that a layer adds to a step."""
    ring = Ring(slots=24, window=row.window // 8, lanes=row.block // 8, entries=64)
    ends = [Engine(work(row, layers), costs(row, fit), ring).run() for layers in (few, many)]
    return (ends[1] - ends[0]) / (many - few)
