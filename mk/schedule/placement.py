"""Placements: which SM runs a task.

A placement sees one wave at a time, in list order, and returns an SM for each of its tasks. Waves that belong to every
SM (`Op.everywhere`) are rotated so that their shares start at another SM in each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mk.errors import MkError
from mk.graph import StepShape, resolve
from mk.isa import LOCAL_BUFFERS, Buffer, Op, Word, Words
from mk.schedule.sm_map import SmMap

SmIds = npt.NDArray[np.int64]

# waves whose bytes are balanced together: they run between the same two hand-offs
PHASES = {
    "qkv": "project",
    "router": "project",
    "moe_up": "up",
    "dense_up": "up",
    "moe_down": "close",
    "dense_down": "close",
    "oproj": "close",
}


class Placement(Protocol):
    """Assigns SMs wave by wave; one object places one step."""

    def place(self, op: Op, wave: str, layer: int, tasks: Words) -> SmIds:
        """SM of each task [n]."""
        ...


class RoundRobin:
    """Task k goes to SM k mod n, the cursor carried across waves."""

    def __init__(self, shape: StepShape) -> None:
        self.n_sm = shape.n_sm
        self.cursor = 0

    def place(self, op: Op, wave: str, layer: int, tasks: Words) -> SmIds:
        sms = (self.cursor + np.arange(len(tasks))) % self.n_sm
        if not op.everywhere:  # its tasks stand where the last such wave's do: some keep state in the SM
            self.cursor = int(self.cursor + len(tasks)) % self.n_sm
        return sms


class DependencyAffinity:
    """A task goes where most of its input was written, unless that SM already has its share of the wave.

    Inputs that every SM wrote a part of (a matrix product's activations) favour nobody; such tasks go to the SM with
    the least work so far in the wave.
    """

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.writer: dict[Buffer, npt.NDArray[np.int64]] = {}

    def place(self, op: Op, wave: str, layer: int, tasks: Words) -> SmIds:
        n = self.shape.n_sm
        cap = -(-len(tasks) // n)
        score = self._scores(op, layer, tasks)
        start = layer % n  # ties: rotate with the layer
        sms = (start + np.arange(len(tasks))) % n
        if score.any():
            # one key to rank SMs by: input written there, then the lighter load, then the rotation
            key = score * (cap + 1) * n
            penalty = (np.arange(n) - start) % n
            load = [0] * n
            for k in range(len(tasks)):
                sm = int(np.argmax(key[k] - penalty))
                sms[k] = sm
                load[sm] += 1
                penalty[sm] += n if load[sm] < cap else 1 << 60
        self._remember(op, layer, tasks, sms)
        return sms

    def _scores(self, op: Op, layer: int, tasks: Words) -> npt.NDArray[np.int64]:
        """Input units each SM wrote, [tasks, SMs]; all-to-all inputs are left out."""
        n = self.shape.n_sm
        score = np.zeros((len(tasks), n), np.int64)
        for access in op.reads:
            if access.ahead < 0:
                continue
            buffer = Buffer(int(resolve(access, tasks[:1])[0]))
            writer = self.writer.get(buffer)
            if writer is None or buffer in LOCAL_BUFFERS:
                continue
            lo, hi = access.span(self.shape, tasks)
            if len(tasks) > 1 and (lo == lo[0]).all() and (hi == hi[0]).all():
                continue
            regions, member = np.unique(np.stack([lo, hi], axis=1), axis=0, return_inverse=True)
            counts = np.zeros((len(regions), n), np.int64)
            for k, (first, last) in enumerate(regions.tolist()):
                owners = writer[first:last]
                counts[k] = np.bincount(owners[owners >= 0], minlength=n)
            score += counts[member.reshape(-1)]
        return score

    def _remember(self, op: Op, layer: int, tasks: Words, sms: SmIds) -> None:
        for access in op.writes:
            buffer = Buffer(int(resolve(access, tasks[:1])[0]))
            lo, hi = access.span(self.shape, tasks)
            if op.phase or not len(tasks):
                continue  # who writes a phase's tile is known only at run time
            writer = self.writer.setdefault(buffer, np.full(int(hi.max()), -1, np.int64))
            if len(writer) < hi.max():
                writer = self.writer[buffer] = np.concatenate([writer, np.full(hi.max() - len(writer), -1, np.int64)])
            for k in range(len(tasks)):
                writer[lo[k] : hi[k]] = sms[k]


class RowOwner:
    """Each residual strip has one owner for the whole step; everything else is balanced by bytes.

    The owner of a strip runs its embedding, O-proj, down projection and residual, so the two contributions to a strip
    never leave the SM. An SM owns strips side by side, which join in one task: the kernel keeps them by their place
    there. Other waves are dealt in contiguous runs so that the bytes between two hand-offs are even.

    ranked: with a map of the card, its SMs, the shortest hand-off first. Strips are then owned by the first of them,
    and so run waves of fewer tasks than SMs, which all others wait for.
    """

    OWNED = frozenset({"embed", "oproj_prefetch", "oproj", "moe_down", "dense_down", "rmsnorm"})

    def __init__(self, shape: StepShape, ranked: SmIds | None = None) -> None:
        self.n_sm = shape.n_sm
        self.ranked = ranked
        self.owner = np.repeat(np.arange(self.n_sm) if ranked is None else ranked, _even(shape.strips, self.n_sm))
        self.load = np.zeros(self.n_sm, np.int64)
        self.phase = ("", -1)
        self.start = 0

    def place(self, op: Op, wave: str, layer: int, tasks: Words) -> SmIds:
        if wave in self.OWNED:
            return self.owner[tasks[:, Word.TILE]]
        if self.ranked is not None and not op.everywhere and len(tasks) < self.n_sm:
            return self.ranked[: len(tasks)]
        phase = (PHASES.get(wave, wave), layer)
        if phase != self.phase:
            self.phase, self.load = phase, np.zeros(self.n_sm, np.int64)
        if op.everywhere:
            return (self.start + np.arange(len(tasks))) % self.n_sm
        weight = max(1, int(tasks[0, Word.TILES] * tasks[0, Word.K_SLOTS]))
        counts = _level(len(tasks), weight, self.load, self.start)
        self.load += counts * weight
        order = (self.start + np.arange(self.n_sm)) % self.n_sm
        sms = np.repeat(order, counts[order])
        if wave == "attn":
            # deal splits one by one: neighbours in the list are alike, and late splits may be empty
            sms = (self.start + np.arange(len(tasks))) % self.n_sm
        self.start = int(self.start + len(tasks)) % self.n_sm
        return sms


def _even(items: int, n: int) -> npt.NDArray[np.int64]:
    """`items` dealt to n SMs, the first ones getting the remainder."""
    return np.full(n, items // n, np.int64) + (np.arange(n) < items % n)


def _level(items: int, weight: int, load: npt.NDArray[np.int64], start: int) -> npt.NDArray[np.int64]:
    """How many of `items` tasks of `weight` each SM takes so that load + taken is as even as possible."""
    n = len(load)
    rounds = -(-items // n) + -(-int(load.max() - load.min()) // weight) + 1
    # level reached by an SM after its j-th task; the lowest `items` levels win, ties rotate from `start`
    levels = load[:, None] + weight * np.arange(1, rounds + 1)[None, :]
    rotated = (np.arange(n) - start) % n
    order = np.lexsort((np.broadcast_to(rotated[:, None], levels.shape).ravel(), levels.ravel()))[:items]
    return np.bincount(order // rounds, minlength=n)


OWNING = frozenset({"row_owner", "sm_map"})  # placements of plans with `own_rows`: they keep to mk/verify/owners.py
PLACEMENTS: dict[str, Callable[[StepShape], Placement]] = {  # those that need no map of the card
    "round_robin": RoundRobin,
    "dependency_affinity": DependencyAffinity,
    "row_owner": RowOwner,
}


def make_placement(name: str, shape: StepShape, sm_map: SmMap | None = None) -> Placement:
    """The named placement for a shape; those of `OWNING` need a plan with `own_rows`, the others one without.

    Raises MkError where it is none, does not fit, or lacks its map.
    """
    if name not in (*PLACEMENTS, "sm_map"):
        raise MkError(f"unknown placement {name!r}", hint=f"one of {', '.join(PLACEMENTS)}, sm_map")
    if (name in OWNING) != shape.own_rows:
        raise MkError(f"placement {name} does not fit a plan with own_rows={shape.own_rows}")
    if name != "sm_map":
        return PLACEMENTS[name](shape)
    if sm_map is None or len(sm_map.handoff_ns) != shape.n_sm:
        raise MkError(f"placement sm_map needs a map of {shape.n_sm} SMs", hint="placement.path=<a map's file>")
    return RowOwner(shape, sm_map.ranked())
