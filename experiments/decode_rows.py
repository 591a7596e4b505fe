"""Rows of timed decode steps: what was timed, what it makes of a row, and the table of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.kernel_checks import Outcome
from mk.config import Config
from mk.errors import MkError
from mk.kernel.build import Library
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.results.step_figures import experts_agree, raw_steps, step_figures
from mk.roofline import uniform_experts
from mk.schedule.lower import Program


@dataclass(frozen=True, slots=True)
class Timing:
    """Of the timed steps of one batch."""

    step_ms: list[float]
    wall_ms: float  # by the host's clock, a step
    experts_by_layer: list[float]  # distinct ones that each sparse layer touched in a step, mean over the steps
    drawn_as_twin: bool  # the last step's tokens
    schedule_hash: str  # of what the device executed
    ids: Tensor  # that top-k published in all steps, the warm-up too; int16 [steps, layers, rows, top_k] on the CPU
    logits_hash: str  # of the last step's logits, bit by bit
    window_kb: int  # that an SM might have outstanding, as the steps were launched

    @classmethod
    def join(cls, blocks: Sequence[Timing]) -> Timing:
        """Blocks of equally many steps as one."""
        experts = np.mean([block.experts_by_layer for block in blocks], axis=0).tolist()
        return cls(
            [ms for block in blocks for ms in block.step_ms],
            float(np.mean([block.wall_ms for block in blocks])),
            experts,
            all(block.drawn_as_twin for block in blocks),
            _one({block.schedule_hash for block in blocks}),
            torch.cat([block.ids for block in blocks]),
            hashlib.sha256("".join(block.logits_hash for block in blocks).encode()).hexdigest()[:16],
            blocks[0].window_kb,
        )

    @property
    def routing_hash(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()[:16]

    @property
    def p50_ms(self) -> float:
        return float(np.median(self.step_ms))


def _one(hashes: set[str]) -> str:
    """Raises MkError where blocks of one batch executed several schedules."""
    if len(hashes) != 1:
        raise MkError(f"blocks of one batch executed {len(hashes)} schedules: {', '.join(sorted(hashes))}")
    return hashes.pop()


def append_row(
    cfg: Config,
    run: RunFolder,
    library: Library,
    program: Program,
    timing: Timing,
    outcome: Outcome | None,
    bound: str | None = None,
    more_raw: Mapping[str, Any] = MappingProxyType({}),
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Row:
    """Writes the batch's row; of a bound nothing but the schedule was checked. Raises MkError for wrong figures."""
    g, batch, context = program.shape.geometry, program.shape.rows, [cfg.experiment.context] * program.shape.rows
    raw = raw_steps(timing.step_ms, timing.experts_by_layer)
    figures = step_figures(g, cfg.gpu, context, raw)
    if outcome and not timing.drawn_as_twin:
        raise MkError(f"batch {batch}: the last step's tokens are not what mk/sampling.py draws from its logits")
    expected, distinct = uniform_experts(g, batch), figures["distinct_experts"]
    if cfg.routing.name in ("uniform", "oracle") and not experts_agree(distinct, expected):
        raise MkError(f"batch {batch}: {distinct:.2f} distinct experts, uniform routing has {expected:.2f}")
    checks = {**outcome.checks, "drawn_as_twin": timing.drawn_as_twin} if outcome else {}
    fields = {
        "engine": "cuda",
        "dtype": "bfloat16",
        "batch": batch,
        "context": context,
        "checks": {"schedule_verified": True, **checks},
        "bound": bound,
        "build_hash": library.build_hash,
        "schedule_hash": timing.schedule_hash,
        "routing_hash": timing.routing_hash,
        "logits_hash": timing.logits_hash,
        "window_kb": timing.window_kb,
        "tasks": program.tasks_by_operation(),
        "wall_ms": timing.wall_ms,
        "logits_error": outcome.error[0] if outcome else None,
        "logits_error_bf16": outcome.error_bf16[0] if outcome else None,
    }
    return run.append_row(run.row(**fields, **figures | dict(more)), {**raw, **more_raw})


COLUMNS = ("batch", "p50 ms", "p10", "p90", "loop", "tok/s", "experts", "GB/step", "% nominal", "us/layer")


def line(row: Row) -> str:
    fixed = "-" if row.fixed_us_per_layer is None else f"{row.fixed_us_per_layer:.2f}"
    cells = (
        f"{row.batch}",
        *(f"{ms:.4f}" for ms in (row.p50_ms, row.p10_ms, row.p90_ms, row.wall_ms)),
        f"{row.tokens_per_s:.1f}",
        f"{row.distinct_experts:.2f}",
        f"{(row.bytes_per_step or 0) / 1e9:.3f}",
        f"{row.pct_nominal:.1f}",
        fixed,
    )
    return "  ".join(cell.rjust(max(8, len(name))) for cell, name in zip(cells, COLUMNS, strict=True))


def table(cfg: Config, rows: list[Row]) -> str:
    title = f"{cfg.model.name}, weights {cfg.weights.name}, {cfg.gpu.name}, context {cfg.experiment.context}, "
    axes = (cfg.sampling.name, cfg.schedule.name, cfg.wave_order.name, cfg.placement.name)
    title += f"routing {cfg.routing.name}, {', '.join(axes)}"
    head = "  ".join(name.rjust(max(8, len(name))) for name in COLUMNS)
    return "\n".join([title, head, *map(line, rows)])
