"""From a lowered program, and a sample of what a step finds at run time, to the work that the simulator executes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mk.config import RoutingConfig
from mk.errors import MkError
from mk.graph import StepShape
from mk.isa import ISA, NONE, Buffer, Word
from mk.model.geometry import PAGE, SLOT_BYTES, Geometry
from mk.phases import AttentionQueue, share
from mk.routing import make_router
from mk.schedule.lower import Program
from mk.schedule.simulator.work import Queue, Task, Work

WEIGHTS = frozenset({"qkv", "router", "o_proj", "dense_up", "dense_down", "lm_head"})  # stream what their words say


@dataclass(frozen=True, slots=True)
class Sample:
    """keys: context length of each row, this step's token included, 0 = inactive; experts: distinct ones by layer."""

    keys: tuple[int, ...]
    experts: Mapping[int, int]

    @classmethod
    def draw(cls, geometry: Geometry, routing: RoutingConfig, keys: Sequence[int], step: int = 0) -> Sample:
        """The experts that a routing mode chooses in a step. Raises MkError for `checkpoint`: it takes logits."""
        if not geometry.sparse_layers:
            return cls(tuple(keys), {})
        router = make_router(routing, geometry, len(keys))
        if router is None:
            raise MkError("a simulated step has no logits to route by", hint="routing=uniform, or another mode")
        active = np.array(keys) > 0
        logits = np.where(active[:, None], np.zeros((len(keys), geometry.experts), np.float32), np.float32(np.nan))
        chosen = {layer: router(layer, step, logits)[active] for layer in geometry.sparse_layers}
        return cls(tuple(keys), {layer: len(np.unique(ids)) for layer, ids in chosen.items()})

    def levelled(self, geometry: Geometry) -> Sample:
        """The mean number of experts in every sparse layer of `geometry`, rounded so that their sum stays."""
        if not self.experts:
            return self
        mean = sum(self.experts.values()) / len(self.experts)
        ends = np.round(np.arange(len(geometry.sparse_layers) + 1) * mean).astype(int)
        counts = np.diff(ends).tolist()
        return Sample(self.keys, dict(zip(geometry.sparse_layers, counts, strict=True)))


def expand(program: Program, sample: Sample) -> Work:
    """Every descriptor with its sizes. Raises MkError where the sample does not fit the program.

    A prefetch to L2 is passed over: the model has no L2.
    """
    shape = program.shape
    if len(sample.keys) != shape.rows or max(sample.keys) > shape.bucket:
        raise MkError(
            f"contexts {list(sample.keys)} do not fit a program of {shape.rows} rows with at most {shape.bucket} keys"
        )
    names = {op.opcode: op.name for op in ISA}
    routed = {op.name for op in ISA if any(access.buffer == Buffer.ROUTE for access in op.reads)}
    queues: dict[int, Queue] = {}
    tasks = []
    for words in program.words.tolist():
        op, layer, queue = names[words[Word.OPCODE]], words[Word.LAYER], words[Word.QUEUE]
        claims = op.endswith("_drain")
        if claims and queue not in queues:
            queues[queue] = _queue(shape, sample, op, words)
        slots, tiles = (0, 0) if claims else _sizes(shape, sample, op, words)
        # a wait for no signal of this step is one for the step before
        waits = [words[at] for at in (Word.WAIT0, Word.WAIT1) if words[at] != NONE and words[at + 1]]
        tasks.append(
            Task(
                op,
                slots,
                tiles,
                tuple(waits),
                words[Word.SIGNAL],
                layer,
                words[Word.TASK],
                routes=op == "topk",
                routed=op in routed,
                queue=queue if claims else NONE,
                claim_ahead=words[Word.CLAIM_AHEAD],
                parts=max(1, words[Word.TILES]),
            )
        )
    offsets = program.offsets.tolist()
    tracks = [tasks[begin:end] for begin, end in itertools.pairwise(offsets)]
    return Work(shape.n_sm, shape.rows, tracks, program.per_step.tolist(), queues)


def _sizes(shape: StepShape, sample: Sample, op: str, words: list[int]) -> tuple[int, int]:
    """(ring slots, tiles) of a descriptor."""
    tiles, k_slots = words[Word.TILES], words[Word.K_SLOTS]
    if op in WEIGHTS:
        return tiles * k_slots, tiles
    if op in ("moe_up", "moe_down"):
        lo, hi = share(sample.experts[words[Word.LAYER]] * tiles, words[Word.RANK], words[Word.RANKS])
        return (hi - lo) * k_slots, hi - lo
    if op == "moe_down_owned":
        return tiles * k_slots * sample.experts[words[Word.LAYER]], tiles
    if op == "attention":
        return _pages(shape, sample, words[Word.LAYER], words[Word.ROW], words[Word.SPLIT]), 1
    return 0, 0


def _pages(shape: StepShape, sample: Sample, layer: int, row: int, split: int) -> int:
    """Ring slots of a split's K and V pages."""
    keys, window = sample.keys[row], shape.window(layer)
    if split >= shape.splits.count(keys, window):
        return 0
    lo, hi = shape.splits.bounds(keys, window)[split]
    per_page = 2 * PAGE * shape.geometry.head_dim * 2 // SLOT_BYTES
    return (-(-hi // PAGE) - lo // PAGE) * per_page


def _queue(shape: StepShape, sample: Sample, op: str, words: list[int]) -> Queue:
    layer = words[Word.LAYER]
    if op == "attn_drain":
        items = AttentionQueue(shape.splits, shape.window(layer), shape.geometry.kv_heads, sample.keys)
        item: Callable[[int], tuple[int, int, int]] = items.item
        slots = [_pages(shape, sample, layer, row, split) for row, _, split in map(item, range(items.total))]
        return Queue("attention", slots)
    return Queue(op.removesuffix("_drain"), [words[Word.K_SLOTS]] * (sample.experts[layer] * words[Word.TILES]))
