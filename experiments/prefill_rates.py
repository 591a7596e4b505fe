"""Rates of a prefill and of its kernels from times of single launches: for the run, and for who verifies its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from experiments.device_clock import one_by_one
from mk.model.geometry import Geometry
from mk.results.recompute import geometry_of_row
from mk.results.rows import Row
from mk.roofline import prefill_flop, visible_pairs

MATRIX = 8192  # rows, columns and k of torch's product on a card,
MATRIX_CPU = 1024  # and on a CPU


@dataclass(frozen=True, slots=True)
class Matrix:
    """torch's bf16 product of two square matrices of noise, beside which rates stand: milliseconds of some."""

    size: int
    ms: list[float]

    @classmethod
    def measure(cls, device: torch.device) -> Self:
        size = MATRIX if device.type == "cuda" else MATRIX_CPU
        a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        return cls(size, one_by_one(lambda: a @ b, 20, device))

    @property
    def raw(self) -> dict[str, Any]:
        """Of the raw data of every row in the same run."""
        return {"matrix_ms": self.ms, "matrix": self.size}

    @property
    def told(self) -> str:
        return f"torch's bf16 product of {self.size} cubed: {matrix_tflop_s(self.ms, self.size):.3g} TFLOP/s"


def calls(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Of whole prompts. call_ms: device times of calls; host_ms: until the first tokens were on the host; matrix_ms: of
    torch's product of matrices of size `matrix`, which on a card may be left out."""
    found = _rates(raw["call_ms"], prefill_flop(geometry_of_row(row), row.context), raw)
    tokens = sum(row.context)
    found |= {"prompt_tokens": tokens, "prefill_tok_s": tokens / found["p50_ms"] * 1e3, "steps": len(raw["call_ms"])}
    return found | {"ttft_ms": float(np.median(raw["host_ms"]))}


def launches(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Of one kernel over one prompt. launch_ms: device times of launches; matrix_ms, matrix: as of `calls`."""
    (tokens,) = row.context
    assert row.kernel is not None
    flop = kernel_flop(geometry_of_row(row), row.kernel, tokens)
    return {"prompt_tokens": tokens, **_rates(raw["launch_ms"], flop, raw)}


def kernel_flop(g: Geometry, kernel: str, tokens: int) -> float:
    """Operations of one of a layer's kernels over a prompt: 2 a weight and token, 4 a pair and dim of attention."""
    sparse = tokens * g.top_k
    weights = {
        "qkv": tokens * g.qkv_rows * g.hidden,
        "o": tokens * g.hidden * g.q_width,
        "up": sparse * 2 * g.expert_ffn * g.hidden,
        "down": sparse * g.hidden * g.expert_ffn,
    }
    if kernel in weights:
        return 2.0 * weights[kernel]
    window = {"attention_full": None, "attention_sliding": g.window_keys}[kernel]
    return 4.0 * g.q_width * visible_pairs(tokens, window)


def matrix_tflop_s(matrix_ms: Sequence[float], size: int) -> float:
    """Of torch's bf16 product of two square matrices, at the median."""
    return 2.0 * size**3 / (float(np.median(matrix_ms)) * 1e9)


def _rates(times: Sequence[float], flop: float, raw: dict[str, Any]) -> dict[str, Any]:
    p10, p50, p90 = (float(np.percentile(times, p)) for p in (10, 50, 90))
    rate, matrix = flop / (p50 * 1e9), matrix_tflop_s(raw["matrix_ms"], raw.get("matrix", MATRIX))
    found = {"p10_ms": p10, "p50_ms": p50, "p90_ms": p90, "tflop_s": rate}
    return found | {"matrix_tflop_s": matrix, "pct_matrix": 100 * rate / matrix}
