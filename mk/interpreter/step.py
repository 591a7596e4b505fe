"""One decode step's inputs, outputs, and what the tasks of that step look up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag

import numpy as np
import numpy.typing as npt
import torch

from mk.errors import MkError
from mk.graph import HEAD_STRIPS, StepShape
from mk.interpreter.numerics import Floats, Round
from mk.kv import ABSENT, KINDS, PageTable, kv_layers
from mk.model.geometry import PAGE
from mk.model.reference import rope_table
from mk.phases import AttentionQueue
from mk.sampling import NO_TOKEN, SamplingParams

Ints = npt.NDArray[np.int64]


class Status(IntFlag):
    """What went wrong in a row, as flags; 0 = nothing."""

    LOGITS = 1  # a logit was NaN or infinite: no token was drawn
    ROUTER_NAN = 2  # a router logit was NaN and counted as -inf
    EXPERT_ID = 4  # the kernel was handed an expert id that does not exist; the interpreter refuses such ids


@dataclass
class StepInputs:
    """What the host hands to a step.

    tokens: int [rows], the token to decode in each row; None = what the previous step sampled.
    keys: int32 [rows], context length including this step's token; 0 = inactive row.
    table: a `PageTable` of `rows` slots, or its `table` dict: kind -> int32 [rows, blocks].
    sampling: one a row; None = greedy.
    """

    tokens: npt.ArrayLike | None
    keys: npt.ArrayLike
    table: PageTable | Mapping[str, npt.NDArray[np.int32]]
    sampling: list[SamplingParams] | None = None


@dataclass
class StepOutputs:
    """What a step leaves for the host.

    tokens: int64 [rows], `NO_TOKEN` (-1) for an inactive row or one whose logits were not finite. status: int64 [rows],
    `Status` flags. logits: float32 [rows, vocab], NaN in inactive rows. expert_ids: layer -> int64 [rows, top_k], -1 in
    inactive rows. trace: (SM, place in its list) of every scheduling step, if asked for.
    """

    tokens: Ints
    status: Ints
    logits: Floats
    expert_ids: dict[int, Ints] = field(default_factory=dict)
    trace: list[tuple[int, int]] | None = None

    @classmethod
    def blank(cls, rows: int, vocab: int) -> StepOutputs:
        """Of `rows` inactive rows, for a step to fill in."""
        logits = np.full((rows, vocab), np.nan, np.float32)
        return cls(np.full(rows, NO_TOKEN, np.int64), np.zeros(rows, np.int64), logits)

    @property
    def distinct_experts(self) -> float:
        """Experts that a sparse layer touched, averaged over the layers; 0 for a model without any."""
        touched = [len(np.unique(ids[ids >= 0])) for ids in self.expert_ids.values()]
        return float(np.mean(touched)) if touched else 0.0


class Step:
    """A step in flight. Arrays over rows hold the active rows only, in ascending row.

    active: active rows [n]. rows: the same as an index into row-sized arrays; a slice, hence a view, where all are
    active. cos, sin: [8 strips of a head, n, 8 pairs].
    """

    def __init__(self, shape: StepShape, inputs: StepInputs, epoch: int, number: int, store: Round) -> None:
        g = shape.geometry
        self.shape = shape
        self.epoch = epoch
        self.number = number
        self.keys = np.asarray(inputs.keys, np.int64)
        self._check(inputs)
        self.active: Ints = np.flatnonzero(self.keys)
        everyone = len(self.active) == shape.rows
        self.rows: slice | Ints = slice(None) if everyone else self.active
        self.table = {kind: np.asarray(inputs.table[kind]) for kind in KINDS}
        self.sampling = inputs.sampling or [SamplingParams()] * shape.rows
        tables = rope_table(g, torch.from_numpy(self.keys[self.active] - 1))
        by_strip = (table.view(len(self.active), HEAD_STRIPS, -1).transpose(0, 1).contiguous() for table in tables)
        self.cos, self.sin = (store(table.numpy()) for table in by_strip)
        self.page: dict[str, Ints] = {kind: self._new_pages(kind) for kind in KINDS if kv_layers(g, kind)}
        self.slot_in_page: Ints = (self.keys[self.active] - 1) % PAGE
        lengths = tuple(self.keys.tolist())
        self.queue = {
            kind: AttentionQueue(shape.splits, g.window_keys if kind == "sliding" else None, g.kv_heads, lengths)
            for kind in KINDS
        }
        self.attention_items = {kind: queue.total for kind, queue in self.queue.items()}
        self.outputs = StepOutputs.blank(shape.rows, g.vocab)

    def _check(self, inputs: StepInputs) -> None:
        rows, g = self.shape.rows, self.shape.geometry
        if self.keys.shape != (rows,):
            raise MkError(f"keys has shape {self.keys.shape}, the program was built for {rows} rows")
        if inputs.sampling is not None and len(inputs.sampling) != rows:
            raise MkError(f"{len(inputs.sampling)} sampling parameters for {rows} rows")
        limit = min(self.shape.bucket, g.max_positions)
        for row, keys in enumerate(self.keys.tolist()):
            if not 0 <= keys <= limit:
                raise MkError(
                    f"row {row}: a context of {keys} keys does not fit 0..{limit}",
                    hint="lower a program for a larger bucket" if limit == self.shape.bucket else None,
                )

    def _new_pages(self, kind: str) -> Ints:
        """Page that takes each active row's new K and V."""
        table, blocks = self.table[kind], (self.keys[self.active] - 1) // PAGE
        if table.shape[0] != self.shape.rows:
            raise MkError(f"the {kind} page table has {table.shape[0]} rows, the program {self.shape.rows}")
        pages = np.full(len(blocks), ABSENT, np.int64)
        inside = blocks < table.shape[1]
        pages[inside] = table[self.active[inside], blocks[inside]]
        if (pages == ABSENT).any():
            row = int(self.active[np.argmax(pages == ABSENT)])
            raise MkError(
                f"row {row}: the {kind} layers have no page for token {int(self.keys[row]) - 1}",
                hint="PageAllocator.reserve before the step",
            )
        return pages

    @property
    def parity(self) -> int:
        """Which set of ticket heads this step draws from; the other one is cleared for the next."""
        return self.epoch % 2
