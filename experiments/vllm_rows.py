"""vLLM's decode steps in rows beside the kernel's: cases of one context and batch each, measured by one start of it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from experiments.baseline_rows import append_beside, comparison
from experiments.baselines import vllm_process as vllm
from experiments.decode_throughput import KV_STD
from mk.config import Config
from mk.errors import MkError
from mk.model.opening import geometry_of
from mk.results.rows import Row
from mk.results.runs import RunFolder

TPOT_APART = 0.05  # relative: a p50 that the difference of two lengths contradicts by more is unstable
SPREAD = 1.2  # p90 / p10 of a stable row
NO_CARD = "vLLM is not measured: torch sees no GPU here"


def measure(job: Config, cases: Sequence[tuple[int, int]], run: RunFolder) -> vllm.Measured:
    """vLLM's steps of each (context, batch), by the fastest of the configured MoE backends, a start each.

    Raises MkError where none gets there.
    """
    config, settings, weights = job.baseline.vllm, job.experiment, job.weights
    assert config is not None
    spec = vllm.Spec(
        geometry=geometry_of(job.model),
        routing=job.routing.name,
        cases=list(cases),
        steps=settings.steps,
        warmup=settings.warmup,
        seed=weights.seed or 0,
        qk_scale=weights.qk_scale or 1.0,
        kv_std=KV_STD,
    )
    found, failed = [], []
    for backend in config.moe_backends:
        try:
            found.append(vllm.measure(config, spec, run.path / f"vllm-{job.routing.name}-{backend}", backend))
        except MkError as error:
            failed.append(f"{backend}: {error}")
    if not found:
        raise MkError("; ".join(failed))
    best = min(found, key=lambda one: (-len(one.cases), sum(median(case.step_ms) for case in one.cases)))
    best.errors += failed
    return best


def append(job: Config, run: RunFolder, measured: vllm.Measured, kernel: Row, **more: Any) -> Row | None:
    """Writes vLLM's row of the kernel row's context and batch; None where it did not measure that. more: fields."""
    config = job.baseline.vllm
    key = kernel.context[0], kernel.batch
    case = next((case for case in measured.cases if (case.context, case.batch) == key), None)
    if config is None or case is None:
        return None
    return append_beside(
        job,
        run,
        kernel,
        case.step_ms,
        case.experts_by_layer,
        {"tpot_ms": case.tpot_ms, "log": measured.lines, "card": measured.card},
        engine="vllm",
        version=measured.version,
        kv=config.kv,
        same_weights=measured.same_weights,
        tpot_ms=case.tpot_ms,
        unstable=unstable(case.step_ms, case.tpot_ms),
        **measured.resolved,
        **more,
    )


def unstable(step_ms: Sequence[float], tpot_ms: float) -> str | None:
    """Why a row is not to be relied on; None where nothing says so."""
    p10, p50, p90 = np.percentile(step_ms, (10, 50, 90))
    apart, spread = tpot_ms / p50 - 1, p90 / p10
    reasons = [f"TPOT by difference is {apart:+.0%} off p50"] * bool(abs(apart) > TPOT_APART)
    reasons += [f"p90 is {spread:.2f} x p10"] * bool(spread > SPREAD)
    return "; ".join(reasons) or None


def said(pairs: Sequence[tuple[Row, Row | None]]) -> str:
    """The table, and what vLLM settled on."""
    lines = [comparison(pairs, "vLLM")]
    resolved = next((other for _, other in pairs if other), None)
    if resolved:
        names = ("version", "attention_backend", "moe_backend", "moe_table", "graph_mode", "compile_mode", "kv")
        settled = ", ".join(f"{name} {getattr(resolved, name) or 'not said'}" for name in names)
        lines.append(f"vLLM: {settled}; weights {'the same' if resolved.same_weights else 'alike'}")
    return "\n".join(lines)
