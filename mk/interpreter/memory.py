"""What the virtual SMs read and write: global buffers, each SM's private ones, and the weights as float32 slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mk.graph import QUEUE_KINDS, StepShape
from mk.isa import Buffer
from mk.model.geometry import ROWS, SLOT_K
from mk.model.packing import SUB_K, PackedWeights
from mk.shortlist import BINS

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

RESIDENT_BYTES = 1 << 30  # weights that are at most this large in float32 are converted once


@dataclass(slots=True)
class Route:
    """One layer's routing as an SM found it in its own top-k.

    active: experts that some active row chose, ascending. members[e]: those rows, as places among the active rows.
    weights[e]: their weights [n, 1].
    """

    active: list[int]
    members: dict[int, Ints]
    weights: dict[int, Floats]


@dataclass(slots=True)
class Private:
    """Buffers that never leave their SM.

    x, acc_attn, acc_ffn: [rows, hidden], an owner's strips from column 0 on, each at its place in the task at hand, as
    the kernel keeps them: nothing there tells their numbers.
    """

    x: Floats
    acc_attn: Floats
    acc_ffn: Floats
    route: Route | None = None


@dataclass
class Memory:
    """Global buffers of one built batch size, and every SM's private ones.

    Columns of x and attn_out beyond the matrix's real k stay 0 (their weights are 0 too); all else starts as NaN.
    hidden's columns are one dense row or an expert's, whichever is wider: its readers cut them at their own width.
    """

    shape: StepShape
    private: list[Private] = field(init=False)

    def __post_init__(self) -> None:
        s, g = self.shape, self.shape.geometry
        tiles = s.layout.tiles.matrices
        experts = max(1, g.experts)
        hidden_k = max(tiles[name].padded_k for name in ("down", "dense_down") if name in tiles)
        self.x = np.zeros((2, s.rows, tiles["qkv"].padded_k), np.float32)
        self.x_squares = np.zeros((2, s.strips, s.rows), np.float32)
        self.qkv = np.zeros((s.rows, tiles["qkv"].strips, ROWS), np.float32)
        heads = (s.rows, g.kv_heads, g.group, s.split_stride)
        self.split_max = np.zeros(heads, np.float32)
        self.split_sum = np.zeros(heads, np.float32)
        self.split_out = np.zeros((*heads, g.head_dim), np.float32)
        self.attn_out = np.zeros((s.rows, tiles["o"].padded_k), np.float32)
        router = tiles["router"] if g.sparse_layers else tiles["qkv"]
        self.router_part = np.zeros((router.k_slots, router.strips, s.rows, ROWS), np.float32)
        self.hidden = np.zeros((experts, s.rows, hidden_k), np.float32)
        self.oproj_out = np.zeros((s.rows, g.hidden), np.float32)
        self.ffn_part = np.zeros((experts, s.rows, g.hidden), np.float32)
        self.ffn_out = np.zeros((s.rows, g.hidden), np.float32)
        self.logits = np.zeros((s.rows, tiles["head"].padded_rows), np.float32)
        self.tokens: list[int | None] = [None] * s.rows
        # ticket heads: two sets by step parity
        self.queues = [[0] * (g.layers * len(QUEUE_KINDS)) for _ in range(2)]
        # sampling: by step parity too, what is added to; and each slice's best sure token
        bins = (2, s.rows, BINS) if s.draws else (0,) * 3
        self.bin_counts, self.bin_masses = np.zeros(bins, np.int64), np.zeros(bins, np.uint64)
        self.undecided: list[list[list[int]]] = [[[] for _ in range(s.rows)] for _ in range(2)]
        self.best_score, self.best_id = np.zeros((s.slices, s.rows)), np.zeros((s.slices, s.rows), np.int64)
        own = (3, s.rows, g.hidden)
        self.private = [Private(*np.zeros(own, np.float32)) for _ in range(s.n_sm)]
        self.poison()

    def poison(self) -> None:
        """Overwrite what no task has written yet with NaN, so that reading it early shows.

        Tokens stay, and what a step clears for the next: queues, bins, shortlists.
        """
        g = self.shape.geometry
        whole = (self.x_squares, self.qkv, self.split_max, self.split_sum, self.split_out, self.router_part)
        for array in (*whole, self.hidden, self.oproj_out, self.ffn_part, self.ffn_out, self.logits):
            array.fill(np.nan)
        self.best_score.fill(np.nan)
        self.x[..., : g.hidden] = np.nan
        self.attn_out[:, : g.q_width] = np.nan
        self.forget()

    def forget(self) -> None:
        """Overwrite what is private to an SM."""
        for own in self.private:
            own.x.fill(np.nan)
            own.acc_attn.fill(np.nan)
            own.acc_ffn.fill(np.nan)
            own.route = None

    def between_programs(self) -> None:
        """What does not outlive a program: an SM's own memory, the ticket heads, and what sampling adds to.

        Of the two sets by step parity a step clears the next one's alone, so a program begins with both clear.
        """
        self.forget()
        for heads in self.queues:
            heads[:] = [0] * len(heads)
        self.bin_counts.fill(0)
        self.bin_masses.fill(0)
        for rows in self.undecided:
            for tokens in rows:
                tokens.clear()

    def copy_from(self, other: Memory) -> None:
        """Take over what another memory of the same shape holds, all but what is private to its SMs."""
        for name, array in vars(other).items():
            if isinstance(array, np.ndarray):
                getattr(self, name)[...] = array
        self.tokens[:] = other.tokens

    def contribution(self, buffer: Buffer, sm: int, columns: slice) -> Floats:
        """Those columns [rows, n] of the sums of attention or FFN that a descriptor names: global, or an owner's."""
        if buffer in (Buffer.ACC_ATTN, Buffer.ACC_FFN):
            own = self.private[sm]
            kept = own.acc_attn if buffer == Buffer.ACC_ATTN else own.acc_ffn
            return kept[:, : columns.stop - columns.start]
        return {Buffer.OPROJ_OUT: self.oproj_out, Buffer.FFN_OUT: self.ffn_out}[buffer][:, columns]


class WeightSlots:
    """Packed weights as float32 strips, converted once where they fit in memory, otherwise whenever a task asks."""

    def __init__(self, weights: PackedWeights) -> None:
        self.weights = weights
        fits = weights.layout.nbytes * 2 <= RESIDENT_BYTES
        self.resident = self._convert(0, weights.layout.total_slots) if fits else None
        norms = weights.norms.float().cpu().numpy()
        padded = weights.layout.tiles.matrices["qkv"].padded_k
        self.norms = np.zeros((len(norms), padded), np.float32)  # [layers + 1, padded hidden]
        self.norms[:, : norms.shape[1]] = norms

    def strips(self, slot: int, strips: int, pitch: int, k_slot: int, k_slots: int) -> Floats:
        """Strips `pitch` slots apart, the first at `slot`; of each, `k_slots` slots from `k_slot`.

        Returns [strips, k_slots, 16, 256].
        """
        if self.resident is not None:
            blocks = self.resident[slot : slot + strips * pitch]
        else:
            blocks = self._convert(slot, strips * pitch)
        return blocks.reshape(strips, pitch, ROWS, SLOT_K)[:, k_slot : k_slot + k_slots]

    def bind(self, slot: int, strips: int, pitch: int, k_slot: int, k_slots: int) -> Callable[[], Floats]:
        """`strips` with its arguments fixed: a view where the weights are resident."""
        if self.resident is None:
            return lambda: self.strips(slot, strips, pitch, k_slot, k_slots)
        view = self.strips(slot, strips, pitch, k_slot, k_slots)
        return lambda: view

    def _convert(self, slot: int, slots: int) -> Floats:
        packed = self.weights.slots[slot : slot + slots].cpu().view(slots, SLOT_K // SUB_K, ROWS, SUB_K)
        blocks: Floats = packed.transpose(1, 2).float().contiguous().view(slots, ROWS, SLOT_K).numpy()
        return blocks
