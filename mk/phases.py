"""How phase descriptors become concrete tiles at run time.

The kernel's controller warp, the interpreter and the verifier all expand phases by these rules. A tile is named by its
flat number, so a share (static) and a ticket (work stealing) name the same tiles and do the same arithmetic on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mk.splits import SplitPolicy


def share(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """Flat tiles [lo, hi) of `rank` among `ranks` SMs: contiguous, sizes differ by at most one."""
    return total * rank // ranks, total * (rank + 1) // ranks


def expert_tile(flat: int, active: Sequence[int], strips: int) -> tuple[int, int]:
    """(expert id, strip) of a flat tile number; `active` are the routed experts in ascending id."""
    rank, strip = divmod(flat, strips)
    return active[rank], strip


@dataclass(frozen=True, slots=True)
class AttentionQueue:
    """The non-empty (row, KV head, split) items of one layer in ticket order.

    keys: context length of each row, the step's own token included; 0 for an inactive row.
    """

    policy: SplitPolicy
    window: int | None
    kv_heads: int
    keys: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.policy.count(keys, self.window) for keys in self.keys) * self.kv_heads

    def item(self, ticket: int) -> tuple[int, int, int]:
        """(row, KV head, split) of a ticket below `total`: row-major, then head, then split."""
        for row, keys in enumerate(self.keys):
            splits = self.policy.count(keys, self.window)
            if ticket < splits * self.kv_heads:
                return row, *divmod(ticket, splits)
            ticket -= splits * self.kv_heads
        raise IndexError("ticket past the queue's end")
