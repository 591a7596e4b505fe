"""Rates of a prefill and of its kernels from times of single launches: for the run, and for who verifies its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mk.model.geometry import Geometry
from mk.recompute import geometry_of_row
from mk.roofline import prefill_flop, visible_pairs
from mk.rows import Row

MATRIX = 8192  # rows, columns and k of torch's product


def calls(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Of whole prompts. call_ms: device times of calls; host_ms: until the first tokens were on the host; matrix_ms: of
    torch's product."""
    flop = prefill_flop(geometry_of_row(row), row.context)
    found = _rates(raw["call_ms"], flop, raw["matrix_ms"])
    tokens = sum(row.context)
    found |= {"prompt_tokens": tokens, "prefill_tok_s": tokens / found["p50_ms"] * 1e3, "steps": len(raw["call_ms"])}
    return found | {"ttft_ms": float(np.median(raw["host_ms"]))}


def launches(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Of one kernel over one prompt. launch_ms: device times of launches; matrix_ms: of torch's product."""
    (tokens,) = row.context
    assert row.kernel is not None
    flop = kernel_flop(geometry_of_row(row), row.kernel, tokens)
    return {"prompt_tokens": tokens, **_rates(raw["launch_ms"], flop, raw["matrix_ms"])}


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


def matrix_tflop_s(matrix_ms: Sequence[float]) -> float:
    """Of torch's bf16 product of two square matrices, at the median."""
    return 2.0 * MATRIX**3 / (float(np.median(matrix_ms)) * 1e9)


def _rates(times: Sequence[float], flop: float, matrix_ms: Sequence[float]) -> dict[str, Any]:
    p10, p50, p90 = (float(np.percentile(times, p)) for p in (10, 50, 90))
    rate, matrix = flop / (p50 * 1e9), matrix_tflop_s(matrix_ms)
    found = {"p10_ms": p10, "p50_ms": p50, "p90_ms": p90, "tflop_s": rate}
    return found | {"matrix_tflop_s": matrix, "pct_matrix": 100 * rate / matrix}
