"""What a schedule cannot beat, in the simulator's model of the card."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mk.model.geometry import SLOT_BYTES, Geometry
from mk.programs import Plan
from mk.roofline import step_bytes
from mk.schedule.costs import Costs
from mk.schedule.simulate import estimate
from mk.schedule.simulator.expand import Sample, expand
from mk.schedule.simulator.work import Ring, Task


@dataclass(frozen=True, slots=True)
class Bounds:
    """Microseconds of a step.

    dependencies: its critical path if memory took no time. zero_wait: nobody waits for another SM. busiest: one role of
    one SM, without a pause. bytes: what has to be read, at the card's measured bandwidth.
    """

    dependencies: float
    zero_wait: float
    busiest: float
    bytes: float


def bounds(
    plan: Plan, geometry: Geometry, sample: Sample, bucket: int, costs: Costs, ring: Ring, tb_s: float
) -> Bounds:
    """tb_s: the bandwidth that `bytes` is counted at. Raises MkError like `simulate`."""
    free = dataclasses.replace(costs, memory_tb_s=1e9, port_gb_s=1e9, latency=0.0, issue=0.0)
    distinct = sum(sample.experts.values()) / max(1, len(sample.experts))
    total = step_bytes(geometry, sample.keys, distinct).total
    tracks = expand(plan.lower(geometry, len(sample.keys), bucket), sample).tracks[: plan.n_sm]
    return Bounds(
        estimate(plan, geometry, sample, bucket, free, ring),
        estimate(plan, geometry, sample, bucket, costs, ring, zero_wait=True),
        max(busy(track, costs, ring, len(sample.keys)) for track in tracks),
        total / (tb_s * 1e6),
    )


def busy(track: Sequence[Task], costs: Costs, ring: Ring, rows: int) -> float:
    """Microseconds of the busiest role of an SM. Tiles that are claimed count nowhere: who takes them is open."""
    consumers = storer = producer = port = 0.0
    for task in track:
        op = costs.of(task.op)
        consumers += costs.next_entry + (op.open + task.slots * op.slot if task.tiles else 0.0)
        storer += costs.next_store + task.tiles * op.tile + op.close + op.row * rows
        producer += costs.next_stream + -(-task.slots // ring.lanes) * costs.issue
        port += task.slots * SLOT_BYTES / (costs.port_gb_s * 1e3)
    return max(consumers, storer, producer, port)
