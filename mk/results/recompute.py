"""A row's figures from its raw data: by one function a kind of raw data, for the run and for whoever verifies it.

A kind's function lies beside the arithmetic of its experiment. It takes the row, of which only the axes may be read,
and the raw data as JSON gives it, and returns fields of `Row`. `checks` among them are all of the row's verdicts.
What a run read off rather than computed, such as a time by the host's clock, stands in the raw data as it is: `TOLD`.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mk.compose import load_config
from mk.config import GpuConfig, group_options
from mk.errors import MkError
from mk.model.geometry import Geometry
from mk.model.opening import geometry_of
from mk.results.rows import FIGURES, Row
from mk.results.step_figures import block_ratio, median_ratio, simulated_figures, step_figures

Figures = Callable[[Row, dict[str, Any]], dict[str, Any]]
KINDS = {  # raw["kind"]: where its function is
    "steps": "mk.results.recompute:steps",  # of a decode: mk/results/step_figures.py
    "decoded": "experiments.quickstart_report:figures",  # a batch to its end
    "simulated_schedule": "experiments.schedule_figures:simulated",
    "simulated_ranks": "experiments.schedule_figures:ranks",
    "prefill_calls": "experiments.prefill_rates:calls",
    "kernel_launches": "experiments.prefill_rates:launches",
    "occupancy": "experiments.wave_occupancy:figures",
    "operation": "experiments.op_figures:figures",  # of a decode step, alone
    "prefill_layers": "experiments.prefill_figures:figures",  # distances from float32 of a prompt
    "kernel_layer": "experiments.kernel_figures:figures",  # the same of one layer of a decode step
    "bits": "experiments.kernel_bits:figures",
    "waves": "experiments.partial_step:figures",
    "logits": "experiments.parity_checks:figures",
    "findings": "experiments.sanitize:figures",
    "cached_answers": "experiments.serving_figures:cached_answers",
    "options": "experiments.serving_figures:options",
    "handoffs": "experiments.sm_map:figures",
    "interruption": "experiments.served_figures:interruption",
    "between_tokens": "experiments.served_figures:between_tokens",
    "draining": "experiments.batch_switching:figures",  # of requests that end one after the other
    "answers": "evals.report:figures",
    "load": "experiments.load_figures:figures",  # of a server, by its client's clock
    "agent_task": "experiments.agents.figures:figures",  # of a coding agent, and the server that it used
}


TOLD = "told"  # key of raw data: figures of the row that nothing else in it gives, by their names
WITHOUT_RAW: dict[tuple[str, str], tuple[str, ...]] = {
    # kind and experiment, or any: figures that rows of schema 2 had beside their raw data
    ("steps", ""): ("wall_ms", "logits_error", "logits_error_bf16"),
    ("prefill_calls", ""): ("logits_error", "logits_error_bf16"),
    ("steps", "slow_sm"): ("slow_sm_tiles", "mean_sm_tiles"),
    ("decoded", ""): ("prefill_s", "distinct_experts"),
}
BROKEN = (MkError, LookupError, TypeError, ValueError, ArithmeticError, AssertionError)


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Row`. Raises MkError for raw data of no known kind, and whatever broken raw data raises."""
    found = function_of(raw.get("kind"))(row, raw)
    told = raw.get(TOLD, {})
    if wrong := sorted(set(told) - set(FIGURES) | set(told) & set(found)):
        raise MkError(f"its raw data tells {', '.join(wrong)}, which other data gives, or which is no figure")
    return {**told, **found}


def with_told(row: Row, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The raw data, and under `TOLD` the figures of the row that it does not give. Data that gives none at all stays as
    it is: whoever verifies the row says so."""
    given = dict(raw)
    try:
        found = figures(row, json.loads(json.dumps(given)))
    except BROKEN:
        return given
    told = {name: value for name in FIGURES if name not in found and (value := getattr(row, name)) is not None}
    return {**given, TOLD: {**given.get(TOLD, {}), **told}} if told else given


def function_of(kind: Any) -> Figures:
    """Raises MkError for one that is not in `KINDS`."""
    if kind not in KINDS:
        raise MkError(f"raw data of kind {kind!r}", hint=f"mk/results/recompute.py knows {', '.join(KINDS)}")
    module, name = KINDS[kind].split(":")
    found: Figures = getattr(importlib.import_module(module), name)
    return found


def different(row: Row, raw: dict[str, Any]) -> Iterator[str]:
    """A line for each figure of the row that its raw data does not give."""
    try:
        again = figures(row, raw)
    except BROKEN as error:
        yield f"its figures cannot be computed: {error}"
        return
    for name, value in again.items():
        stands = getattr(row, name)
        if not _same(stands, value):
            yield f"{name} is {stands}, its raw data gives {value}"
    older = _without_raw(row, raw["kind"]) if row.schema < 3 else ()
    for name in FIGURES:
        if name not in again and name not in older and getattr(row, name) is not None:
            yield f"{name} is {getattr(row, name)}, its raw data gives none"


def _without_raw(row: Row, kind: str) -> tuple[str, ...]:
    """Of a row of schema 2. Nobody but the kernel's own run timed a loop or checked logits."""
    if row.engine not in ("cuda", "interpreter") or row.clock is not None:
        return ()
    return WITHOUT_RAW.get((kind, ""), ()) + WITHOUT_RAW.get((kind, row.experiment), ())


def _same(stands: Any, value: Any) -> bool:
    """To the last digits of a sum that another machine adds up."""
    if isinstance(stands, float) or isinstance(value, float):
        return stands is not None and value is not None and math.isclose(stands, value, rel_tol=1e-9, abs_tol=1e-12)
    return bool(stands == value)


def steps(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Of a decode's single steps, alone or beside those of another row."""
    figures_of = simulated_figures if row.clock == "simulated" else step_figures
    found = figures_of(geometry_of_row(row), card(row.gpu), row.context, raw)
    if row.clock == "simulated":
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


@functools.cache
def card(name: str) -> GpuConfig:
    return load_config([f"gpu={name}"]).gpu


def geometry_of_row(row: Row) -> Geometry:
    """Of the model that a row names, in its reading. Raises MkError for one that is not of this repository."""
    if row.model not in group_options("model"):
        raise MkError(f"model {row.model} is no geometry of this repository")
    return _geometry(row.model, row.model_window or "hf")


@functools.cache
def _geometry(name: str, window: str) -> Geometry:
    return geometry_of(load_config([f"model={name}", f"model.window={window}", "weights=random"]).model)
