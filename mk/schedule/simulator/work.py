"""What the simulator executes: for each track, tasks with their slots, tiles and counters, all sizes known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Task:
    """One descriptor, or one tile that a claimer took.

    slots: 8 KB ring slots that it streams; tiles: what its consumers hand to the storer, each an equal share of them.
    A task without tiles is the storer's alone. waits: counters. signal: counter, -1 = none.
    """

    op: str
    slots: int = 0
    tiles: int = 0
    waits: tuple[int, ...] = ()
    signal: int = -1
    layer: int = 0
    ordinal: int = 0  # in the flattened step
    routes: bool = False  # top-k: the SM knows its experts when this is stored
    routed: bool = False  # is published only when the SM knows its experts
    queue: int = -1  # a claimer: takes tickets of this queue, one tile each, until there is none
    claim_ahead: int = 0
    parts: int = 1  # of the track aside: how often its `close` is paid
    closes: bool = True  # a claimed tile does not: it signals nothing


@dataclass(slots=True)
class Queue:
    """Tickets of a claimed phase: the slots that each tile streams, in ticket order. A tile costs what `op` costs."""

    op: str
    slots: list[int]
    taken: int = 0


@dataclass(slots=True)
class Work:
    """A step. Track t < n_sm is SM t's main one, track n_sm + t the one aside.

    signals: how many signals complete each counter in a step.
    """

    n_sm: int
    rows: int
    tracks: list[list[Task]]
    signals: list[int]
    queues: dict[int, Queue] = field(default_factory=dict)

    def without_waits(self) -> Work:
        """The same step where nobody waits for another SM: what no schedule of these tasks can beat."""
        tracks = [[replace(task, waits=()) for task in track] for track in self.tracks]
        return replace(self, tracks=tracks)


@dataclass(frozen=True, slots=True)
class Ring:
    """Sizes of the kernel's rings (csrc/shared.cuh): weight slots, how many may be outstanding, and the small ones."""

    slots: int = 22
    window: int = 8
    lanes: int = 4  # slots that the producer issues at once
    entries: int = 16  # task ring
    tiles: int = 4  # partial tiles between consumers and storer
    run_ahead: bool = True  # the producer streams for entries that are not open yet
