"""Descriptor words against the model: each task computes the tile it claims to, and each tile is computed once.

Regions say that the units that are read have been written. This says that they were written from the right weights,
by descriptors whose coordinates exist, and that no tile, row, head or rank is missing or doubled. Operations that are
not in the tables below (ones added to the instruction set) get the general checks only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mk.graph import HEAD_PARTS, QUEUE_KINDS, StepShape, queue_id, x_buffer
from mk.isa import DESCRIPTOR_WORDS, ISA, NONE, Buffer, Flag, Op, Word, Words
from mk.model.packing import MatrixSlots
from mk.ring import ENTRIES
from mk.schedule.lower import Cut, Program
from mk.verify.errors import Ints, Names, VerifyError

MATRIX = {
    "qkv": "qkv",
    "o_proj": "o",
    "prefetch": "o",
    "router": "router",
    "moe_up": "up",
    "moe_up_drain": "up",
    "moe_down": "down",
    "moe_down_owned": "down",
    "moe_down_drain": "down",
    "dense_up": "dense_up",
    "dense_down": "dense_down",
    "lm_head": "head",
}
"""Whose weights an operation streams."""

STRIPWISE = frozenset({"embed", "moe_combine", "residual"})  # one task a residual strip, no weights of their own
QUEUED = {"attn_drain": "attn", "moe_up_drain": "moe_up", "moe_down_drain": "moe_down"}
SPARSE = frozenset({"router", "topk", "moe_combine", *(op for op, m in MATRIX.items() if m in ("up", "down"))})
DENSE = frozenset({"dense_up", "dense_down"})
SLICEWISE = frozenset({"histogram", "shortlist"})  # one task a slice of the vocabulary
LAST = frozenset({"lm_head", "sample", "draw", *SLICEWISE})  # their layer is the number of layers


def _owned(owned: Buffer, shared: Buffer) -> Callable[[StepShape, Ints], Ints]:
    return lambda s, layers: np.full(len(layers), owned if s.own_rows else shared)


def _always(buffer: Buffer) -> Callable[[StepShape, Ints], Ints]:
    return lambda s, layers: np.full(len(layers), buffer)


DESTINATION: dict[str, Callable[[StepShape, Ints], Ints]] = {
    "embed": _always(Buffer.X0),
    "qkv": _always(Buffer.QKV),
    "o_proj": _owned(Buffer.ACC_ATTN, Buffer.OPROJ_OUT),
    "router": _always(Buffer.ROUTER_PART),
    "moe_up": _always(Buffer.HIDDEN),
    "moe_up_drain": _always(Buffer.HIDDEN),
    "moe_down": _always(Buffer.FFN_PART),
    "moe_down_drain": _always(Buffer.FFN_PART),
    "moe_down_owned": _always(Buffer.ACC_FFN),
    "moe_combine": _always(Buffer.FFN_OUT),
    "dense_up": _always(Buffer.HIDDEN),
    "dense_down": _owned(Buffer.ACC_FFN, Buffer.FFN_OUT),
    "residual": lambda s, layers: np.where(layers % 2, int(x_buffer(0)), int(x_buffer(1))),
    "lm_head": _always(Buffer.LOGITS),
    "histogram": _always(Buffer.HISTOGRAM),
    "shortlist": _always(Buffer.SHORTLIST),
    "sample": _always(Buffer.TOKENS),
    "draw": _always(Buffer.TOKENS),
}
"""What DST must say; executors write there."""

SOURCE = {"residual": _owned(Buffer.ACC_ATTN, Buffer.OPROJ_OUT)}
"""What SRC must say: attention's sum, and beside it lies the FFN's."""


def check_lists(program: Program) -> None:
    """The tracks of the SMs are the descriptors, one after the other. Raises VerifyError("word")."""
    words, offsets, tracks = program.words, program.offsets, program.tracks
    if words.ndim != 2 or words.shape[1] != DESCRIPTOR_WORDS:
        raise VerifyError("word", f"descriptors have shape {words.shape}, not [n, {DESCRIPTOR_WORDS}]")
    whole = len(offsets) == tracks + 1 and offsets[0] == 0 and offsets[-1] == len(words)
    if not whole or (np.diff(offsets) < 0).any():
        raise VerifyError("word", f"the offsets do not cut {len(words)} descriptors into {tracks} tracks, two an SM")


SYNCHRONISATION = [*range(Word.WAIT0, Word.SIGNAL_VALUE + 1)]
"""Words that a part of a step has of its own."""


def check_part(program: Program, cut: Cut, names: Names) -> None:
    """A part's descriptors are its whole's, waits and signals apart. Raises VerifyError("word")."""
    expected = cut.whole.words[cut.kept]
    if (program.offsets != cut.whole.offsets_of(cut.kept)).any() or (cut.kept & cut.done).any():
        raise VerifyError("word", f"the lists of {cut.name} are not those of the step it is a part of")
    expected[expected[:, Word.OPCODE] == ISA.named("residual").opcode, Word.FLAGS] |= Flag.PART
    expected[:, SYNCHRONISATION] = program.words[:, SYNCHRONISATION]
    for task, word in np.argwhere(program.words != expected)[:1]:
        raise VerifyError(
            "word",
            f"{names.task(task)}: word {Word(word).name} is {program.words[task, word]}, not {expected[task, word]}",
        )


def check_words(program: Program, names: Names) -> None:
    """All checks of this module. Raises VerifyError("word") naming task, word and what it should be."""
    words, shape = program.words, program.shape
    layers = shape.geometry.layers
    everything = _Group(program, names, "", np.arange(len(words)))
    everything.require(np.isin(words[:, Word.OPCODE], list(ISA.rows)), Word.OPCODE, "in the instruction set")
    everything.require(words[:, Word.ROWS] == shape.rows, Word.ROWS, f"{shape.rows}")
    everything.within(Word.LAYER, 0, layers + 1)
    everything.within(Word.ROW, 0, shape.rows)
    everything.within(Word.QUEUE, NONE, layers * len(QUEUE_KINDS))
    streams = words[:, Word.K_SLOTS] > 0
    everything.require(
        ~streams | (words[:, Word.WEIGHT] >= 0) & (words[:, Word.WEIGHT] < shape.layout.total_slots),
        Word.WEIGHT,
        f"below the {shape.layout.total_slots} weight slots",
    )
    _check_slices(program, names)
    for op in ISA:
        tasks = np.flatnonzero(words[:, Word.OPCODE] == op.opcode)
        if len(tasks):
            _check_track(program, names, op, tasks)
            _check_op(_Group(program, names, op.name, tasks))


def _check_slices(program: Program, names: Names) -> None:
    """What an SM finds in its slice's histogram stays with it until the slice's shortlist: both stand in one track."""
    words = program.words
    tracks: dict[str, dict[int, int]] = {}
    for op in sorted(SLICEWISE):
        tasks = np.flatnonzero(words[:, Word.OPCODE] == ISA.named(op).opcode)
        tracks[op] = dict(zip(words[tasks, Word.RANK].tolist(), tasks.tolist(), strict=True))
    for rank, task in tracks["shortlist"].items():
        first = tracks["histogram"].get(rank)
        if first is not None and names.track[first] != names.track[task]:
            raise VerifyError(
                "word", f"{names.task(task)} does not stand where its slice's histogram does, {names.task(first)}"
            )


def _check_track(program: Program, names: Names, op: Op, tasks: Ints) -> None:
    """An operation aside stands in the tracks beside the main ones, and no other does."""
    for task in tasks[(names.track[tasks] >= program.shape.n_sm) != op.aside][:1]:
        where = "its SM's second track" if op.aside else "its SM's main track"
        raise VerifyError("word", f"{names.task(task)} does not stand in {where}")


class _Group:
    """The descriptors of one operation, in all layers."""

    def __init__(self, program: Program, names: Names, op: str, tasks: Ints) -> None:
        self.program, self.shape, self.names, self.op, self.tasks = program, program.shape, names, op, tasks
        self.words: Words = program.words[tasks]
        self.layer = self.words[:, Word.LAYER].astype(np.int64)

    def take(self, mask: npt.NDArray[np.bool_]) -> _Group:
        """The part of the group that `mask` selects."""
        return _Group(self.program, self.names, self.op, self.tasks[mask])

    def require(self, holds: npt.NDArray[np.bool_], word: Word, what: object) -> None:
        for k in np.flatnonzero(~holds)[:1]:
            show = _buffer_name if word in (Word.SRC, Word.DST) else str
            found = show(int(self.words[k, word]))
            should = show(int(what[k])) if isinstance(what, np.ndarray) else what
            raise VerifyError("word", f"{self.names.task(self.tasks[k])}: word {word.name} is {found}, not {should}")

    def equal(self, word: Word, value: Ints | int) -> None:
        expected = np.broadcast_to(np.asarray(value), len(self.words))
        self.require(self.words[:, word] == expected, word, expected)

    def within(self, word: Word, lo: int, hi: int) -> None:
        self.require((self.words[:, word] >= lo) & (self.words[:, word] < hi), word, f"in {lo}..{hi - 1}")

    def partition(self, lo: Ints, hi: Ints, total: int, what: str, layers: tuple[int, ...]) -> None:
        """In each of `layers`, the ranges [lo, hi) are disjoint and together make [0, total)."""
        order = np.lexsort((lo, self.layer))
        layer, lo, hi = self.layer[order], lo[order], hi[order]
        fresh = np.append(True, layer[1:] != layer[:-1])
        expected = np.where(fresh, 0, np.append(0, hi[:-1]))
        for k in np.flatnonzero(lo != expected)[:1]:
            wrong = "computed twice" if lo[k] < expected[k] else "never computed"
            raise VerifyError(
                "word",
                f"{what} {min(lo[k], expected[k])} of layer {layer[k]} is {wrong}, "
                f"next comes {self.names.task(self.tasks[order[k]])}",
            )
        ends = np.append(fresh[1:], True)
        for k in np.flatnonzero(ends & (hi != total))[:1]:
            raise VerifyError(
                "word",
                f"{what} {hi[k]} of layer {layer[k]} is never computed: {self.names.task(self.tasks[order[k]])} "
                f"is the last of {total}",
            )
        missing = sorted(set(layers) - set(layer.tolist()))
        if missing:
            raise VerifyError("word", f"layer {missing[0]} has no {self.op} task")


def _buffer_name(number: int) -> str:
    return Buffer(number).name if 0 <= number < len(Buffer) else f"buffer {number}"


def _check_op(group: _Group) -> None:
    s, g, op, words = group.shape, group.shape.geometry, group.op, group.words
    allowed: tuple[int, ...] = tuple(range(g.layers))
    if op in SPARSE or op in DENSE:
        allowed = g.sparse_layers if op in SPARSE else g.dense_layers
    if op in LAST or op == "embed":
        allowed = (g.layers,) if op in LAST else (0,)
    known = op in MATRIX or op in DESTINATION or op in QUEUED or op in ("topk", "attention", "attn_combine")
    if not known:
        return
    group.require(np.isin(group.layer, allowed), Word.LAYER, f"a layer that has {op}")
    group.equal(Word.DST, DESTINATION[op](s, group.layer) if op in DESTINATION else 0)
    group.equal(Word.SRC, SOURCE[op](s, group.layer) if op in SOURCE else 0)
    if op in MATRIX:
        _check_matrix(group, MATRIX[op], allowed)
    if op in STRIPWISE:
        lo = words[:, Word.TILE].astype(np.int64)
        group.partition(lo, lo + words[:, Word.TILES], s.strips, f"{op} strip", allowed)
    if op == "embed":
        head = s.layout.entry("head")
        group.equal(Word.WEIGHT, head.first_slot)
        group.equal(Word.STRIP_PITCH, head.k_slots)
    if op in QUEUED:
        group.equal(Word.QUEUE, np.array([queue_id(layer, QUEUED[op]) for layer in group.layer.tolist()]))
        group.within(Word.CLAIM_AHEAD, 1, ENTRIES + 1)
    if op in SLICEWISE:
        lo = words[:, Word.TILE].astype(np.int64)
        group.partition(lo, lo + words[:, Word.TILES], s.layout.entry("head").strips, f"{op} strip", allowed)
    if op in QUEUED or op in SLICEWISE or op in ("moe_up", "moe_down"):
        ranks = np.bincount(group.layer, minlength=g.layers)[group.layer]
        group.equal(Word.RANKS, ranks)
        lo = words[:, Word.RANK].astype(np.int64)
        for layer in np.unique(group.layer).tolist():
            of = group.layer == layer
            group.take(of).partition(lo[of], lo[of] + 1, int(of.sum()), f"{op} rank", (layer,))
    _check_attention(group, allowed)
    if op == "topk":
        router = s.layout.entry("router", allowed[0])
        group.equal(Word.TILES, router.strips)
        group.equal(Word.K_SLOTS, router.k_slots)
        published = np.bincount(group.layer[words[:, Word.FLAGS] == Flag.PUBLISH], minlength=g.layers)
        for layer in [layer for layer in allowed if published[layer] != 1][:1]:
            raise VerifyError("word", f"{published[layer]} topk tasks of layer {layer} publish ROUTE, the host reads 1")
    if op in ("sample", "draw"):
        group.equal(Word.TILES, s.layout.entry("head").strips)


def _check_matrix(group: _Group, matrix: str, layers: tuple[int, ...]) -> None:
    """Weights lie inside the matrix and every (strip, k slot) of it is taken once a step; phases take all by rank."""
    s, op, words = group.shape, group.op, group.words
    entries: list[MatrixSlots] = [s.layout.entry(matrix, None if op in LAST else layer) for layer in layers]
    entry = entries[0]
    first = dict(zip(layers, (e.first_slot for e in entries), strict=True))
    group.equal(Word.WEIGHT, np.array([first[layer] for layer in group.layer.tolist()]))
    group.equal(Word.STRIP_PITCH, entry.k_slots)
    experts = matrix in ("up", "down")
    group.equal(Word.EXPERT_PITCH, entry.expert_stride if experts else 0)
    if op != "router":
        group.equal(Word.K_SLOT, 0)
        group.equal(Word.K_SLOTS, entry.k_slots)
    if experts and op != "moe_down_owned":
        group.equal(Word.TILE, 0)
        group.equal(Word.TILES, entry.strips)
        return
    tiles, k_slots = words[:, Word.TILES].astype(np.int64), words[:, Word.K_SLOTS].astype(np.int64)
    group.within(Word.TILES, 1, entry.strips + 1)
    group.within(Word.K_SLOTS, 1, entry.k_slots + 1)
    group.require(
        (words[:, Word.K_SLOT] >= 0) & (words[:, Word.K_SLOT] + k_slots <= entry.k_slots),
        Word.K_SLOT,
        f"inside the {entry.k_slots} k slots of {matrix}",
    )
    group.require((tiles == 1) | (k_slots == entry.k_slots), Word.TILES, "1: joined strips must take their whole k")
    lo = words[:, Word.TILE].astype(np.int64) * entry.k_slots + words[:, Word.K_SLOT]
    group.partition(lo, lo + tiles * k_slots, entry.strips * entry.k_slots, f"{matrix} slot", layers)


def _check_attention(group: _Group, layers: tuple[int, ...]) -> None:
    s, g, op, words = group.shape, group.shape.geometry, group.op, group.words
    row, head = words[:, Word.ROW].astype(np.int64), words[:, Word.HEAD].astype(np.int64)
    if op in ("attention", "attn_drain", "attn_combine"):
        sliding = np.array([s.window(layer) is not None for layer in range(g.layers)])[group.layer]
        group.equal(Word.FLAGS, np.where(sliding, int(Flag.SLIDING), 0))
    elif op == "qkv":
        group.equal(Word.FLAGS, np.where(np.array(g.rope)[group.layer], int(Flag.ROPE), 0))
    elif op != "topk":
        group.equal(Word.FLAGS, 0)
    if op == "attn_combine":
        group.within(Word.HEAD, 0, g.q_heads)
        group.within(Word.TILE, 0, HEAD_PARTS)
        group.within(Word.TILES, 1, HEAD_PARTS + 1)
        lo = (row * g.q_heads + head) * HEAD_PARTS + words[:, Word.TILE]
        group.partition(lo, lo + words[:, Word.TILES], s.rows * g.q_heads * HEAD_PARTS, "merged head part", layers)
    if op == "attention":
        most = np.array([s.splits.most(s.bucket, s.window(layer)) for layer in range(g.layers)])
        group.within(Word.HEAD, 0, g.kv_heads)
        split = words[:, Word.SPLIT].astype(np.int64)
        group.require((split >= 0) & (split < most[group.layer]), Word.SPLIT, "a split of the bucket")
        for window in {s.window(layer) for layer in layers}:
            kind = tuple(layer for layer in layers if s.window(layer) == window)
            of = np.isin(group.layer, kind)
            lo = (row * g.kv_heads + head) * most[kind[0]] + split
            total = s.rows * g.kv_heads * int(most[kind[0]])
            group.take(of).partition(lo[of], lo[of] + 1, total, "attention split", kind)
