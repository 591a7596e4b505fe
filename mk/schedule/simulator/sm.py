"""Where the four roles of a simulated SM stand in its list, and when they passed each entry."""

from __future__ import annotations

from dataclasses import dataclass, field

from mk.schedule.simulator.work import Ring, Task


@dataclass(slots=True)
class SmState:
    """Microseconds. A list by entry grows as its role passes the entry: its length is where the role stands."""

    ring: Ring
    todo: list[Task]  # descriptors that were not published yet, last first
    slow_us: float = 0.0  # that this SM takes longer with each tile that a claimer could have taken elsewhere
    tasks: list[Task] = field(default_factory=list)  # published entries: descriptors, and tiles that were claimed

    # by entry
    published: list[float] = field(default_factory=list)
    go: list[float] = field(default_factory=list)
    stream: list[float] = field(default_factory=list)
    streamed: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    opened: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    storing: list[float] = field(default_factory=list)
    signalled: list[float] = field(default_factory=list)
    ring_full: list[float] = field(default_factory=list)
    window: list[float] = field(default_factory=list)
    ring_empty: list[float] = field(default_factory=list)
    tile_full: list[float] = field(default_factory=list)
    full_until: list[float] = field(default_factory=list)  # end of the producer's last wait for a free slot, 0 = none
    starved_until: list[float] = field(default_factory=list)  # end of the consumers' last wait for a slot, 0 = none

    # controller
    publisher_free: float = 0.0
    routed_at: float | None = None  # when the last top-k published was stored; None while that is unknown
    asked: bool = False  # a ticket is on its way
    claimed_from: int = -1  # entry of the phase's first tile; -1 = not claiming
    awaited: int = -1  # entry whose counters are known to wake this SM

    # producer
    producer_free: float = 0.0
    scheduled: bool = False  # an event will wake it
    left: int = -1  # slots of its entry still to be issued; -1 = not begun
    lane: int = 0  # slots of the current batch that were issued
    group: int = 0  # slots that will be issued together
    issued: int = 0  # slots of the step that were issued
    last_landed: float = 0.0
    landed: list[float] = field(default_factory=list)  # by ring slot
    freed: list[float | None] = field(default_factory=list)

    # consumers
    consumer_free: float = 0.0
    slots_done: int = 0  # of their entry
    tiles_done: int = 0
    read: int = 0  # slots of the step
    puts: int = 0  # tiles of the step
    put_times: list[float] = field(default_factory=list)  # by place in the tile ring

    # storer
    storer_free: float = 0.0
    tiles_stored: int = 0  # of its entry
    takes: int = 0  # tiles of the step
    take_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.landed = [0.0] * self.ring.slots
        self.freed = [0.0] * self.ring.slots
        self.put_times = [0.0] * self.ring.tiles
        self.take_times = [0.0] * self.ring.tiles

    @property
    def finished(self) -> bool:
        return not self.todo and len(self.signalled) == len(self.tasks)
