"""What fixes the task list of a step, and the names that everything about it goes by."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mk.errors import MkError
from mk.isa import DESCRIPTOR_WORDS, ISA, NONE, Access, Buffer, Op, Word, Words
from mk.model.geometry import Geometry
from mk.model.packing import WeightLayout
from mk.splits import SplitPolicy

LAYER_WAVES = (
    "qkv",
    "router",
    "topk",
    "route_setup",
    "moe_gather",
    "attn",
    "attn_combine",
    "moe_up",
    "moe_down",
    "moe_combine",
    "oproj",
    "rmsnorm",
)
"""Names of the waves of a layer. A plan may leave some empty (`moe_gather` always: activations are read in place)."""

PARTED_WAVES = ("moe_up",)
"""Waves that a wave order may name several times, to fill more than one hand-off with their weight stream."""

OPTIONAL_WAVES = ("oproj_prefetch",)
"""Waves that a wave order may leave out: they only move bytes to an earlier, idle moment."""

DENSE_WAVES = {"moe_up": "dense_up", "moe_down": "dense_down"}  # what stands there in a dense layer
LAST_WAVES = ("lm_head", "histogram", "shortlist", "sample")
"""Waves behind the last layer; those between head and sample are empty in a greedy step."""

WAVE_NAMES = ("embed", *LAYER_WAVES, *OPTIONAL_WAVES, *DENSE_WAVES.values(), *LAST_WAVES)

HEAD_STRIPS = 8  # strips of one 128-wide head
HEAD_PARTS = 4  # tasks that merge the splits of a head: 32 dims each, one a lane
QUEUE_KINDS = ("attn", "moe_up", "moe_down")  # ticket queues of a layer


@dataclass(frozen=True)
class StepShape:
    """Everything that fixes the task list of a step, the schedule's order and placement apart.

    rows: built batch size. bucket: the longest context (tokens, the new one included) the list has room for; it sizes
    lists, never arithmetic. own_rows: each residual strip has one owner, for the whole step, that keeps x and its sums
    (`OWNING` placements). attention_claimers, moe_claimers: SMs that steal those tiles, 0 = static. draws: rows may be
    sampled; without, all are greedy.

    Raises MkError naming a count that cannot be.
    """

    geometry: Geometry
    rows: int
    bucket: int
    n_sm: int
    own_rows: bool = False
    attention_claimers: int = 0
    moe_claimers: int = 0
    claim_ahead: int = 2
    splits: SplitPolicy = SplitPolicy()
    draws: bool = False
    layout: WeightLayout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("rows", "bucket", "n_sm"):
            if getattr(self, name) < 1:
                raise MkError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("attention_claimers", "moe_claimers"):
            if not 0 <= getattr(self, name) <= self.n_sm:
                raise MkError(
                    f"schedule.{name}={getattr(self, name)} must lie in 0..{self.n_sm}",
                    hint=f"schedule.{name}={self.n_sm}: an SM is one claimer, and gpu.sms={self.n_sm}",
                )
        object.__setattr__(self, "layout", WeightLayout(self.geometry))

    @property
    def strips(self) -> int:
        """Strips of the residual."""
        return self.geometry.hidden // 16

    @property
    def slices(self) -> int:
        """Parts of the vocabulary that SMs sample from on their own."""
        return min(self.n_sm, self.layout.entry("head").strips)

    @property
    def hidden_strips(self) -> int:
        """Strips of an expert's gate/up matrix or of the dense layer's, the larger: units of HIDDEN an expert."""
        g = self.geometry
        dense = g.dense_ffn if "dense" in g.mlp_kinds else 0
        sparse = g.expert_ffn if "sparse" in g.mlp_kinds else 0
        return -(-2 * max(dense, sparse) // 16)

    @property
    def split_stride(self) -> int:
        """Units of PARTIAL a (row, KV head): room for every split of either layer kind."""
        return self.splits.max_splits + 1

    def window(self, layer: int) -> int | None:
        """Keys visible on this layer, itself included; None on a full-attention layer."""
        return self.geometry.window_keys if self.geometry.layer_kinds[layer] == "sliding" else None

    def layer_waves(self, layer: int, order: tuple[str, ...]) -> list[str]:
        """The waves of one layer in the given order, with the dense layer's names where it is dense."""
        if self.geometry.mlp_kinds[layer] == "sparse":
            return list(order)
        sparse_only = {"router", "topk", "moe_gather", "moe_combine"}
        return [DENSE_WAVES.get(wave, wave) for wave in order if wave not in sparse_only]

    def wave_tasks(self, wave: str, layer: int, part: int = 0, parts: int = 1) -> tuple[Op | None, Words]:
        """The tasks of one wave, or of its `part`-th of `parts` equal parts: its operation and descriptors [n, 32].

        (None, empty) when the plan leaves it empty.
        """
        for op in ISA.of_wave(wave):
            tasks = _part(op, op.tiles(self, layer), part, parts)
            if len(tasks):
                tasks[:, Word.OPCODE] = op.opcode
                tasks[:, Word.LAYER] = layer
                tasks[:, Word.WAVE] = WAVE_NAMES.index(wave) if wave in WAVE_NAMES else len(WAVE_NAMES)
                tasks[:, Word.ROWS] = self.rows
                return op, tasks
        return None, blank(0)


def _part(op: Op, tasks: Words, part: int, parts: int) -> Words:
    """One of `parts` parts of a wave: of a phase's shares, or of its tasks. Claimers take it all in the first part."""
    if parts == 1 or not len(tasks):
        return tasks
    if not op.phase:
        return tasks[len(tasks) * part // parts : len(tasks) * (part + 1) // parts]
    if tasks[0, Word.QUEUE] != NONE:
        return tasks if part == 0 else tasks[:0]
    tasks[:, Word.RANK] = tasks[:, Word.RANK] * parts + part
    tasks[:, Word.RANKS] *= parts
    return tasks


def queue_id(layer: int, kind: str) -> int:
    return layer * len(QUEUE_KINDS) + QUEUE_KINDS.index(kind)


def x_buffer(layer: int) -> Buffer:
    """The residual entering `layer` (of `layers`: the model's output) lies in one of two buffers by parity."""
    return Buffer.X1 if layer % 2 else Buffer.X0


def resolve(access: Access, words: Words) -> npt.NDArray[np.int64]:
    """The physical buffer of an access, descriptor by descriptor [n]; -1 where the words name none."""
    if isinstance(access.buffer, Buffer):
        return np.full(len(words), int(access.buffer))
    if access.buffer == "x":
        return np.where((words[:, Word.LAYER] + access.ahead) % 2, int(Buffer.X1), int(Buffer.X0))
    if access.buffer == "ffn":  # beside attention's sum
        return np.where(words[:, Word.SRC] == Buffer.ACC_ATTN, int(Buffer.ACC_FFN), int(Buffer.FFN_OUT))
    if access.buffer not in ("src", "dst"):
        raise ValueError(f"unknown buffer {access.buffer!r}")
    named = words[:, Word.DST if access.buffer == "dst" else Word.SRC].astype(np.int64)
    return np.where((named >= 0) & (named < len(Buffer)), named, -1)


def blank(n: int) -> Words:
    tasks = np.zeros((n, DESCRIPTOR_WORDS), np.int32)
    tasks[:, [Word.WAIT0, Word.WAIT1, Word.SIGNAL, Word.QUEUE]] = NONE
    return tasks
