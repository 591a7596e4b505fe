"""What a schedule would take on a card, without one: step time, timeline, causes and critical path of a lowered step.

The constants are in configs/gpu (`costs`), fitted from traces by `mk/schedule/fit.py`. A simulated time ranks
schedules; it is no measurement, and every row that holds one says `clock: simulated`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mk.config import GpuConfig
from mk.engine_config import RingConfig
from mk.errors import MkError
from mk.isa import ISA
from mk.kernel.trace import ASIDE, TALLIES, TIMES, StepTrace
from mk.model.geometry import Geometry
from mk.programs import Plan
from mk.ring import window_for
from mk.schedule.costs import Costs
from mk.schedule.lower import Program
from mk.schedule.simulator.engine import CLAIMABLE, Engine
from mk.schedule.simulator.expand import Sample, expand
from mk.schedule.simulator.path import CriticalPath
from mk.schedule.simulator.work import Ring
from mk.schedule.sm_map import SmMap


@dataclass(frozen=True)
class Simulated:
    """step_us: from the start of a step to the start of the next."""

    step_us: float
    engine: Engine

    def trace(self) -> StepTrace:
        """The timeline, in the form of a measured one: `causes()` and `perfetto()` work on both."""
        codes = {op.name: op.opcode for op in ISA}
        sms = self.engine.sms
        columns: dict[str, list[float]] = {name: [] for name in (*TIMES, *TALLIES)}
        for s in sms:
            for name, column in columns.items():
                column += getattr(s, name)
        tasks = [task for s in sms for task in s.tasks]
        return StepTrace(
            np.repeat(np.arange(len(sms)), [len(s.tasks) for s in sms]),
            np.array([codes.get(task.op, 0) for task in tasks], np.int64),
            np.array([task.layer for task in tasks], np.int64),
            np.array([task.ordinal for task in tasks], np.int64),
            {name: np.array(column) for name, column in columns.items()},
            self._aside(),
        )

    def _aside(self) -> dict[str, npt.NDArray[np.float64]]:
        engine, codes = self.engine, {op.name: op.opcode for op in ISA}
        found = [
            (sm, codes.get(task.op, 0), task.layer, task.ordinal, begins, ends)
            for sm, passed in enumerate(engine.aside)
            for task, (_, begins, ends) in zip(engine.work.tracks[engine.work.n_sm + sm], passed, strict=True)
        ]
        columns = np.array(found, np.float64).reshape(-1, len(ASIDE))
        return dict(zip(ASIDE, columns.T, strict=True))

    def tiles_taken(self) -> list[int]:
        """By SM, tiles that a claimer could have taken elsewhere."""
        return [sum(task.tiles for task in s.tasks if task.op in CLAIMABLE) for s in self.engine.sms]

    def critical_path(self) -> CriticalPath:
        return CriticalPath(self.engine)


def costs_of(gpu: GpuConfig) -> Costs:
    """Raises MkError for a card that nothing was fitted for."""
    if gpu.costs is None:
        raise MkError(f"gpu={gpu.name} has no costs to simulate with", hint="gpu=h200")
    return gpu.costs


def ring_of(ring: RingConfig, rows: int) -> Ring:
    """As a step of so many rows has it."""
    return Ring(slots=ring.slots, window=window_for(ring.windows, rows), run_ahead=ring.run_ahead)


def simulate(
    program: Program,
    sample: Sample,
    costs: Costs,
    ring: Ring,
    zero_wait: bool = False,
    sm_map: SmMap | None = None,
    slow: tuple[int, float] | None = None,
) -> Simulated:
    """One step; zero_wait: without the waits for other SMs; sm_map: hand-offs as long as it says, around their mean.

    slow: an SM, and microseconds that it takes longer with each tile that a claimer could have taken elsewhere.

    Raises MkError where the sample does not fit the program, or the step stands still.
    """
    work = expand(program, sample)
    beyond_us = None if sm_map is None else sm_map.beyond_us()
    engine = Engine(work.without_waits() if zero_wait else work, costs, ring, beyond_us)
    if slow is not None:
        engine.sms[slow[0]].slow_us = slow[1]
    return Simulated(engine.run() + costs.launch, engine)


def estimate(
    plan: Plan, geometry: Geometry, sample: Sample, bucket: int, costs: Costs, ring: Ring, zero_wait: bool = False
) -> float:
    """Microseconds of a step, from its first layers: where a model repeats itself, so does its timeline.

    Simulates the layers before the first repeat with one period and with two of them, every layer with the sample's
    mean number of experts; each period more adds what the second one did. Within 1 % of the whole step, for a fraction
    of the work.
    """
    before, period = layer_period(geometry)
    few, many = before + period, before + 2 * period
    if geometry.layers <= many:
        program = plan.lower(geometry, len(sample.keys), bucket)
        return simulate(program, sample, costs, ring, zero_wait, plan.sm_map).step_us
    times = []
    for layers in (few, many):
        g = first_layers(geometry, layers)
        program = plan.lower(g, len(sample.keys), bucket)
        times.append(simulate(program, sample.levelled(g), costs, ring, zero_wait, plan.sm_map).step_us)
    return times[1] + (times[1] - times[0]) * (geometry.layers - many) / period


def first_layers(geometry: Geometry, layers: int) -> Geometry:
    """The model without its later layers."""
    g, kept = geometry, slice(layers)
    return dataclasses.replace(
        g, layers=layers, layer_kinds=g.layer_kinds[kept], mlp_kinds=g.mlp_kinds[kept], rope=g.rope[kept]
    )


def layer_period(geometry: Geometry) -> tuple[int, int]:
    """(before, period): after its first `before` layers the model repeats itself every `period` layers."""
    g = geometry
    kinds = list(zip(g.layer_kinds, g.mlp_kinds, strict=True))
    for span in range(1, g.layers):
        for before in range(span):
            period = span - before
            if all(kinds[i] == kinds[i + period] for i in range(before, g.layers - period)):
                return before, period
    return 0, g.layers
