"""A searched schedule: the best of N random candidates, then local search around it. The simulator is the judge.

A candidate is wave order, placement, splits, claimers and window. Orders are only built such that no wave stands before
one it waits for; what the verifier refuses, or no SM could hold, counts as endless.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mk.errors import MkError
from mk.graph import LAYER_WAVES
from mk.model.geometry import Geometry
from mk.programs import Plan
from mk.ring import MIN_WINDOW, RING_SLOTS, UNSAFE_SLOTS
from mk.schedule.costs import Costs
from mk.schedule.placement import PLACEMENTS
from mk.schedule.simulate import estimate, first_layers, layer_period
from mk.schedule.simulator.engine import StandsStill
from mk.schedule.simulator.expand import Sample
from mk.schedule.simulator.work import Ring
from mk.schedule.sm_map import SmMap
from mk.schedule.stored import StoredSchedule
from mk.splits import SplitPolicy
from mk.verify import verify

AFTER = {  # what a wave of a layer may not precede
    "topk": ("router",),
    "attn": ("qkv",),
    "attn_combine": ("attn",),
    "moe_up": ("topk",),
    "moe_down": ("moe_up",),
    "moe_combine": ("moe_down",),
    "oproj": ("attn_combine",),
    "rmsnorm": ("oproj", "moe_down", "moe_combine"),
}
SPLITS = ((128, 16), (128, 33), (128, 64), (256, 33))  # (split_keys, max_splits)
CLAIMERS = (0, 0, 0, 1, 2, 4)  # the share of all SMs, in quarters; most candidates are static


def possible(waves: tuple[str, ...]) -> bool:
    """Whether no wave stands before one it waits for, nor a part of one behind a wave that waits for all parts."""
    last = {wave: place for place, wave in enumerate(waves)}
    return all(waves.index(wave) > last[other] for wave, others in AFTER.items() for other in others)


@dataclass(frozen=True, slots=True)
class Judge:
    """What candidates are ranked for."""

    geometry: Geometry
    sample: Sample
    bucket: int
    n_sm: int
    costs: Costs
    slots: int  # of the ring
    sm_map: SmMap | None = None  # of a configured placement=sm_map; random candidates have none

    def plan(self, candidate: StoredSchedule) -> Plan:
        c = candidate
        splits = SplitPolicy(c.split_keys, c.max_splits)
        claimers = (c.attention_claimers, c.moe_claimers, c.claim_ahead)
        sm_map = self.sm_map if c.placement == "sm_map" else None
        return Plan(self.n_sm, c.waves, c.placement, *claimers, splits, sm_map=sm_map)

    def __call__(self, candidate: StoredSchedule) -> float:
        """Simulated microseconds of a step; infinity for one that cannot be lowered, is refused or stands still.

        What else the simulator refuses is no candidate's fault, and is raised.
        """
        try:
            self.verify(candidate, few=True)
        except MkError:
            return math.inf
        ring = Ring(slots=self.slots, window=candidate.window)
        try:
            return estimate(self.plan(candidate), self.geometry, self.sample, self.bucket, self.costs, ring)
        except StandsStill:
            return math.inf

    def verify(self, candidate: StoredSchedule, few: bool = False) -> None:
        """Raises MkError where the candidate's program cannot run; `few`: that of the model's first layers."""
        before, period = layer_period(self.geometry)
        g = first_layers(self.geometry, min(self.geometry.layers, before + period)) if few else self.geometry
        verify(self.plan(candidate).lower(g, len(self.sample.keys), self.bucket))


@dataclass(frozen=True, slots=True)
class Found:
    """The best candidate, its simulated microseconds, and how many were simulated."""

    schedule: StoredSchedule
    us: float
    simulated: int


def search(
    start: StoredSchedule,
    judge: Callable[[StoredSchedule], float],
    n_sm: int,
    candidates: int,
    steps: int,
    seed: int,
    progress: Callable[[int, float], None] = lambda simulated, best: None,
) -> Found:
    """`candidates` random ones beside `start`, then `steps` changes of the best: each that helps is kept.

    Same seed, same judge: same result. progress: is told (simulated so far, the best microseconds). Raises MkError
    where none of them can run: there is nothing to store then.
    """
    rng = random.Random(seed)
    seen: dict[StoredSchedule, float] = {}
    best, best_us = start, math.inf

    def proposals() -> Iterator[StoredSchedule]:
        yield start
        for _ in range(candidates):
            yield random_candidate(rng, start, n_sm)
        for _ in range(steps):
            yield change(rng, best, n_sm)

    for candidate in proposals():
        if candidate in seen:
            continue
        us = seen[candidate] = judge(candidate)
        if us < best_us:
            best, best_us = candidate, us
        progress(len(seen), best_us)
    if not math.isfinite(best_us):
        raise MkError(
            f"none of {len(seen)} schedules can run, the configured one among them",
            hint="run.py with the configured plan says why",
        )
    return Found(best, best_us, len(seen))


def random_candidate(rng: random.Random, like: StoredSchedule, n_sm: int) -> StoredSchedule:
    """Any value on every axis; an order is drawn wave by wave among those whose predecessors stand."""
    waves: list[str] = []
    while len(waves) < len(LAYER_WAVES):
        waves.append(rng.choice([w for w in LAYER_WAVES if w not in waves and set(AFTER.get(w, ())) <= set(waves)]))
    candidate = dataclasses.replace(like, waves=tuple(waves))
    for axis in ("placement", "splits", "claimers", "window"):
        candidate = _redraw(rng, candidate, n_sm, axis)
    return candidate


def change(rng: random.Random, schedule: StoredSchedule, n_sm: int) -> StoredSchedule:
    """One change: mostly of the order."""
    axis = rng.choice(("order", "order", "order", "parts", "placement", "splits", "claimers", "window", "window"))
    if axis not in ("order", "parts"):
        return _redraw(rng, schedule, n_sm, axis)
    for _ in range(100):
        waves = list(schedule.waves)
        if axis == "parts" and waves.count("moe_up") > 1:
            waves.remove("moe_up")
        elif axis == "parts":
            waves.insert(rng.randrange(len(waves) + 1), "moe_up")
        else:
            waves.insert(rng.randrange(len(waves)), waves.pop(rng.randrange(len(waves))))
        if tuple(waves) != schedule.waves and possible(tuple(waves)):
            return dataclasses.replace(schedule, waves=tuple(waves))
    return schedule


def _redraw(rng: random.Random, schedule: StoredSchedule, n_sm: int, axis: str) -> StoredSchedule:
    if axis == "placement":
        return dataclasses.replace(schedule, placement=rng.choice(("row_owner", "row_owner", *PLACEMENTS)))
    if axis == "splits":
        keys, most = rng.choice(SPLITS)
        return dataclasses.replace(schedule, split_keys=keys, max_splits=most)
    if axis == "window":
        return dataclasses.replace(schedule, window=rng.randint(MIN_WINDOW, RING_SLOTS - UNSAFE_SLOTS))
    attention, moe = (n_sm * rng.choice(CLAIMERS) // 4 for _ in range(2))
    return dataclasses.replace(schedule, attention_claimers=attention, moe_claimers=moe)
