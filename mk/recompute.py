"""A row's figures from its raw data again, by the kinds of raw data that there are."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mk.compose import load_config
from mk.config import GpuConfig
from mk.errors import MkError
from mk.model.geometry import PRESETS, Geometry
from mk.model.opening import NANO
from mk.rows import Row
from mk.step_figures import MEASURED_ONLY, block_ratio, median_ratio, step_figures


def different(row: Row, raw: dict[str, Any]) -> Iterator[str]:
    """A line for each figure of the row that its raw data does not give."""
    try:
        again = figures(row, raw)
    except (MkError, LookupError, TypeError, ValueError, ArithmeticError, AssertionError) as error:
        yield f"its figures cannot be computed: {error}"
        return
    if not again:
        yield f"its raw data ({', '.join(raw)}) gives no figure"
    for name, value in again.items():
        stands = getattr(row, name)
        if stands is None or value is None or not math.isclose(stands, value, rel_tol=1e-9, abs_tol=1e-12):
            yield f"{name} is {stands}, its raw data gives {value}"


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Row`, by what the raw data holds.

    step_ms: of a decode, with its experts by layer, and with the kernel's steps that a baseline is compared to;
    call_ms: of a prefill; round_ms: p50 of a schedule round by round; new_tokens: of a batch decoded to its end.
    """
    if "step_ms" in raw:
        found = step_figures(geometry_of(row.model), card(row.gpu), row.context, raw)
        if row.clock == "simulated":
            found = {name: value for name, value in found.items() if name not in MEASURED_ONLY}
            if "base_block_ms" in raw:
                found["ratio"] = block_ratio(raw["block_ms"], raw["base_block_ms"]).ratio
            return found
        if "tpot_ms" in raw:
            found["tpot_ms"] = raw["tpot_ms"]
        if "base_block_ms" in raw:
            of = block_ratio(raw["block_ms"], raw["base_block_ms"])
            found |= {"ratio": of.ratio, "ratio_low": of.low, "ratio_high": of.high}
        if "kernel_step_ms" in raw:
            of = median_ratio(raw["step_ms"], raw["kernel_step_ms"])
            found |= {"ratio": of.ratio, "ratio_low": of.low, "ratio_high": of.high}
        return found
    if "call_ms" in raw:
        p10, p50, p90 = (float(np.percentile(raw["call_ms"], p)) for p in (10, 50, 90))
        rate = (row.prompt_tokens or 0) / p50 * 1e3
        found = {"p10_ms": p10, "p50_ms": p50, "p90_ms": p90, "steps": len(raw["call_ms"]), "prefill_tok_s": rate}
        return found | {"ttft_ms": float(np.median(raw["host_ms"]))}
    if "round_ms" in raw:
        times, base = np.array(raw["round_ms"]), np.array(raw["configured_ms"])
        return {"p50_ms": float(times.mean()), "paired_ms": float((times - base).mean())}
    if "new_tokens" in raw:
        tokens, stepped = raw["new_tokens"], sum(raw["new_tokens"]) - len(raw["new_tokens"])
        found = {"new_tokens": max(tokens), "decode_s": raw["decode_s"]}
        return found | ({"tok_s": stepped / raw["decode_s"]} if stepped else {})
    return {}


@functools.cache
def card(name: str) -> GpuConfig:
    return load_config([f"gpu={name}"]).gpu


@functools.cache
def geometry_of(model: str) -> Geometry:
    """Raises MkError for a model that is not one of the repository's."""
    if model == "nano":
        return Geometry.from_hf_config(NANO)
    if model not in PRESETS:
        raise MkError(f"model {model} is no geometry of this repository")
    return PRESETS[model]
