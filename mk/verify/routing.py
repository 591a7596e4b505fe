"""Families of run-time data, and what phase descriptors touch under each of them.

Which experts are active and how long the contexts are is known only at run time, so everything that depends on it is
checked for a family of cases that span the extremes. Shares and tiles come from `mk/phases.py`, as on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mk.graph import StepShape
from mk.isa import Buffer, Word, Words
from mk.phases import AttentionQueue, expert_tile, share
from mk.splits import SplitPolicy
from mk.verify.errors import Ints, VerifyError


@dataclass(frozen=True)
class Family:
    """One case of run-time data: the active experts in ascending id, and the context length of every row (0: none)."""

    name: str
    experts: Callable[[StepShape], Sequence[int]]
    keys: Callable[[StepShape], tuple[int, ...]]


def _disjoint(s: StepShape, rows: Sequence[int]) -> list[int]:
    """Row r takes the experts r*k .. r*k + k-1, wrapped where there are not enough."""
    k, experts = s.geometry.top_k, s.geometry.experts
    return sorted({(row * k + i) % experts for row in rows for i in range(k)})


def _only(s: StepShape, rows: Sequence[int]) -> tuple[int, ...]:
    return tuple(s.bucket if row in rows else 0 for row in range(s.rows))


DEFAULT_FAMILIES = (
    Family("one row active", lambda s: _disjoint(s, [0]), lambda s: _only(s, [0])),
    Family(
        "all rows on the same experts",
        lambda s: range(s.geometry.experts - s.geometry.top_k, s.geometry.experts),
        lambda s: (s.bucket,) * s.rows,
    ),
    Family(
        "disjoint experts",
        lambda s: _disjoint(s, range(s.rows)),
        lambda s: tuple(max(1, s.bucket >> row) for row in range(s.rows)),
    ),
    Family("all experts active", lambda s: range(s.geometry.experts), lambda s: (s.bucket,) * s.rows),
    Family(
        "odd rows inactive",
        lambda s: _disjoint(s, range(0, s.rows, 2)),
        lambda s: _only(s, range(0, s.rows, 2)),
    ),
    Family("no row active", lambda s: (), lambda s: (0,) * s.rows),
)


# ---- tiles of a mask --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pieces:
    """Regions as unions of unit intervals: `member` [n], the region of each descriptor; `owner`, `lo`, `hi` [m], the
    intervals and the region each belongs to."""

    member: Ints
    owner: Ints
    lo: Ints
    hi: Ints


Expand = Callable[[StepShape, Words, tuple[int, ...]], Pieces]


@lru_cache(maxsize=64)
def _share_runs(active: tuple[int, ...], strips: int, ranks: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Runs of strips within one expert that each rank computes: first run of every rank [ranks + 1]; expert, lo, hi."""
    starts, runs = [0], []
    for rank in range(ranks):
        flat, end = share(len(active) * strips, rank, ranks)
        while flat < end:
            expert, strip = expert_tile(flat, active, strips)
            length = min(end - flat, strips - strip)
            runs.append((expert, strip, strip + length))
            flat += length
        starts.append(len(runs))
    table = np.array(runs, np.int64).reshape(-1, 3)
    return np.array(starts), table[:, 0], table[:, 1], table[:, 2]


def _own_runs(words: Words, active: tuple[int, ...], strips: int) -> tuple[Ints, Ints, Ints, Ints]:
    """The runs of every descriptor's share: descriptor, expert, strips lo..hi of each."""
    ranks = int(words[0, Word.RANKS])
    starts, expert, lo, hi = _share_runs(active, strips, ranks)
    rank = words[:, Word.RANK]
    counts = np.diff(starts)[rank]
    owner = np.repeat(np.arange(len(words)), counts)
    run = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + starts[rank][owner]
    return owner, expert[run], lo[run], hi[run]


def _strips(shape: StepShape, matrix: str) -> int:
    return shape.layout.entry(matrix, shape.geometry.sparse_layers[0]).strips


def _pitch(shape: StepShape, buffer: Buffer) -> int:
    return shape.hidden_strips if buffer == Buffer.HIDDEN else shape.strips


def _share_tiles(matrix: str, buffer: Buffer) -> Expand:
    """The (expert, strip) tiles of a static share."""

    def expand(s: StepShape, words: Words, active: tuple[int, ...]) -> Pieces:
        owner, expert, lo, hi = _own_runs(words, active, _strips(s, matrix))
        base = expert * _pitch(s, buffer)
        return Pieces(np.arange(len(words)), owner, base + lo, base + hi)

    return expand


def _share_inputs(matrix: str, buffer: Buffer, width: str) -> Expand:
    """All strips (`width`: of that matrix) of the experts in a static share of `matrix`."""

    def expand(s: StepShape, words: Words, active: tuple[int, ...]) -> Pieces:
        owner, expert, _, _ = _own_runs(words, active, _strips(s, matrix))
        lo = expert * _pitch(s, buffer)
        return Pieces(np.arange(len(words)), owner, lo, lo + _strips(s, width))

    return expand


def _active(buffer: Buffer, width: str) -> Expand:
    """All strips of every active expert: one region a layer, shared by its descriptors."""

    def expand(s: StepShape, words: Words, active: tuple[int, ...]) -> Pieces:
        layers, member = np.unique(words[:, Word.LAYER], return_inverse=True)
        lo = np.tile(np.array(active, np.int64) * _pitch(s, buffer), len(layers))
        owner = np.repeat(np.arange(len(layers)), len(active))
        return Pieces(member, owner, lo, lo + _strips(s, width))

    return expand


ROUTED: dict[tuple[str, str, Buffer], Expand] = {
    ("moe_up", "write", Buffer.HIDDEN): _share_tiles("up", Buffer.HIDDEN),
    ("moe_down", "read", Buffer.HIDDEN): _share_inputs("down", Buffer.HIDDEN, "up"),
    ("moe_down", "write", Buffer.FFN_PART): _share_tiles("down", Buffer.FFN_PART),
    ("moe_down_owned", "read", Buffer.HIDDEN): _active(Buffer.HIDDEN, "up"),
    ("moe_combine", "read", Buffer.FFN_PART): _active(Buffer.FFN_PART, "down"),
    ("moe_up_drain", "write", Buffer.HIDDEN): _active(Buffer.HIDDEN, "up"),
    ("moe_down_drain", "read", Buffer.HIDDEN): _active(Buffer.HIDDEN, "up"),
    ("moe_down_drain", "write", Buffer.FFN_PART): _active(Buffer.FFN_PART, "down"),
}
"""Accesses that follow the expert mask: (operation, "read" or "write", buffer). A claimer may draw any tile, so each
stands for all of them. An operation without an entry touches what its access list says."""


# ---- attention splits of a context ------------------------------------------------------------------------------


def check_contexts(shape: StepShape, families: Sequence[Family]) -> None:
    """A list holds every split that a context within the bucket can have, and tickets name each split once.

    Raises VerifyError("word") naming the context. The critical lengths are those where the split size doubles, every
    alignment of the window to the split, and the bucket itself.
    """
    policy, kinds = shape.splits, {shape.window(layer) for layer in range(shape.geometry.layers)}
    for window in kinds:
        held = policy.most(shape.bucket, window)
        if held > shape.split_stride:
            raise VerifyError("word", f"PARTIAL has room for {shape.split_stride} splits of a head, not for {held}")
        for keys in _critical(policy, shape.bucket, window):
            if policy.count(keys, window) > held:
                raise VerifyError(
                    "word",
                    f"a context of {keys} keys (window {window}) has {policy.count(keys, window)} splits, "
                    f"but the list for bucket {shape.bucket} holds {held}: PARTIAL would be incomplete",
                )
        if shape.attention_claimers:
            for keys_of_rows in {family.keys(shape) for family in families}:
                _check_tickets(policy, window, shape.geometry.kv_heads, keys_of_rows)


def _critical(policy: SplitPolicy, bucket: int, window: int | None) -> list[int]:
    if window is None:
        doublings = [policy.split_keys * policy.max_splits << n for n in range(32)]
        lengths = [1, *doublings, *(length + 1 for length in doublings)]
    else:
        lengths = [1, *range(window - 1, window + policy.size(window) + 1)]
    return [*(keys for keys in lengths if 0 < keys <= bucket), bucket]


@lru_cache(maxsize=64)
def _check_tickets(policy: SplitPolicy, window: int | None, kv_heads: int, keys: tuple[int, ...]) -> None:
    queue = AttentionQueue(policy, window, kv_heads, keys)
    drawn = sorted(queue.item(ticket) for ticket in range(queue.total))
    needed = [
        (row, head, split)
        for row, length in enumerate(keys)
        for head in range(kv_heads)
        for split in range(len(policy.bounds(length, window)) if length else 0)
    ]
    if drawn != needed:
        raise VerifyError("queue", f"attention tickets of contexts {keys} (window {window}) miss or repeat a split")
