"""What a task costs on a card, for the simulator: a schema whose values stand in configs/gpu, fitted from traces.

All times are microseconds. `mk/schedule/fit.py` says how they were fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mk.errors import MkError
from mk.validation import require_at_least


@dataclass(slots=True)
class OpCosts:
    """Of one operation. Consumers: `open` and `slot`; storer: `tile` and `close`."""

    open: float = 0.0  # loading the activations, once the counters are reached
    slot: float = 0.0  # computing on a ring slot that has landed
    tile: float = 0.0  # taking a tile from the consumers and storing it
    close: float = 0.0  # what follows the last tile, the signal's release included
    row: float = 0.0  # the same again for every row of the batch


@dataclass(slots=True)
class Costs:
    """Of everything that tasks share. `ops` are keyed by operation; one that is not listed costs nothing itself."""

    memory_tb_s: float  # what HBM delivers to all SMs together
    latency: float  # from issuing a copy to its landing, memory idle
    port_gb_s: float  # what one SM can take
    issue: float  # the producer's, for a batch of copies
    next_stream: float  # from one entry to the next: of the producer,
    next_entry: float  # the consumers,
    next_store: float  # the storer,
    publish: float  # and the controller
    handoff: float  # from the last signal to the waiting controller's word, memory idle
    queued: float  # share of the queue at memory that hand-offs and loads of activations wait behind
    claim: float  # a ticket's way to memory and back
    launch: float  # from one step's end to the next one's first task
    ops: dict[str, OpCosts] = field(default_factory=dict)
    in_flight_kb: list[int] = field(default_factory=list)  # of each SM, ascending: with so much outstanding
    in_flight_share: list[float] = field(default_factory=list)  # .. this share of memory_tb_s is reached

    def __post_init__(self) -> None:
        for name in ("memory_tb_s", "port_gb_s"):
            if not getattr(self, name) > 0:
                raise MkError(
                    f"gpu.costs.{name}={getattr(self, name)} must be positive",
                    hint="gpu.costs of configs/gpu/h200.yaml",
                )
        kb, shares = self.in_flight_kb, self.in_flight_share
        if len(kb) != len(shares) or sorted(set(kb)) != kb or not all(0 < share <= 1 for share in shares):
            given = f"gpu.costs.in_flight_kb={kb} in_flight_share={shares}"
            raise MkError(f"{given} must be ascending sizes, with a share in (0, 1] each")
        for name in (
            "latency",
            "issue",
            "next_stream",
            "next_entry",
            "next_store",
            "publish",
            "handoff",
            "queued",
            "claim",
        ):
            require_at_least(f"gpu.costs.{name}", getattr(self, name), 0)

    def memory_at(self, kb: float) -> float:
        """TB/s with so many KB in flight an SM, along a line between two of `in_flight_kb`; without any, all of it."""
        if not self.in_flight_kb:
            return self.memory_tb_s
        return self.memory_tb_s * float(np.interp(kb, self.in_flight_kb, self.in_flight_share))

    def of(self, op: str) -> OpCosts:
        return self.ops.get(op, OpCosts())
