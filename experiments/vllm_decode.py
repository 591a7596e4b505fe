"""Decode steps of the kernel beside vLLM's, batch by batch at one context, for each routing, and their ratio.

vLLM runs first, in its own process, so that the card is free for each. A ratio stands only between rows that touched
equally many experts, within 2 %. Where no vLLM is configured the kernel's rows are made all the same, and the table
says what is missing and how to install it; one that is configured and not there is an error before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from experiments import decode_throughput
from experiments.baseline_rows import append_beside, comparison, geometry_of
from experiments.baselines import vllm_process as vllm
from experiments.decode_throughput import KV_STD
from mk.compose import vary
from mk.config import Config, VllmConfig
from mk.errors import MkError
from mk.rows import Row
from mk.runs import RunFolder

TPOT_APART = 0.05  # relative: a p50 that the difference of two lengths contradicts by more is unstable
SPREAD = 1.2  # p90 / p10 of a stable row


def main(cfg: Config) -> int:
    """Exit status 0, also where no vLLM is configured; 1 where it failed."""
    config = cfg.baseline.vllm
    if config is None:
        raise MkError("vllm_decode compares with vLLM", hint="baseline=vllm")
    if cfg.weights.name != "random":
        raise MkError("vllm_decode measures random weights", hint="weights=random")
    jobs = {r: decode_throughput.job_of(vary(cfg, [f"routing={r}"])) for r in cfg.experiment.routings}
    for job in jobs.values():
        decode_throughput.check(job)
    notes: list[str] = []
    missing = False
    try:
        vllm.find(config)
    except vllm.Missing as error:
        notes.append(f"vLLM is missing: {error}; to install it: {error.hint}")
        missing = True
    table = []
    with RunFolder.create(cfg) as run:
        measured = {}
        for routing, job in ({} if missing else jobs).items():
            print(f"vLLM, routing {routing}: started", flush=True)
            try:
                measured[routing] = measure(job, config, run, routing)
                notes += [f"vLLM, routing {routing}: {error}" for error in measured[routing].errors]
            except MkError as error:
                notes.append(f"vLLM, routing {routing}: {error}")
        for routing, job in jobs.items():
            cases = {case.batch: case for case in measured[routing].cases} if routing in measured else {}
            for row in decode_throughput.run(job, within=run):
                case = cases.get(row.batch)
                table.append((row, case and append(job, run, measured[routing], case, row)))
        print("\n".join(["", said(table), *notes, f"run folder: {run.path}"]))
    return int(bool(notes) and not missing)


def measure(job: Config, config: VllmConfig, run: RunFolder, routing: str) -> vllm.Measured:
    """vLLM's steps, by the fastest of the configured MoE backends. Raises MkError where none gets there."""
    settings, weights = job.experiment, job.weights
    spec = vllm.Spec(
        geometry=geometry_of(job),
        routing=routing,
        batches=list(settings.batches),
        contexts=[settings.context],
        steps=settings.steps,
        warmup=settings.warmup,
        seed=weights.seed or 0,
        qk_scale=weights.qk_scale or 1.0,
        kv_std=KV_STD,
    )
    found, failed = [], []
    for backend in config.moe_backends:
        try:
            found.append(vllm.measure(config, spec, run.path / f"vllm-{routing}-{backend}", backend))
        except MkError as error:
            failed.append(f"{backend}: {error}")
    if not found:
        raise MkError("; ".join(failed))
    best = min(found, key=lambda one: (-len(one.cases), sum(median(case.step_ms) for case in one.cases)))
    best.errors += failed
    return best


def append(job: Config, run: RunFolder, measured: vllm.Measured, case: vllm.Case, kernel: Row) -> Row:
    """Writes vLLM's row of a batch, beside the kernel's."""
    config = job.baseline.vllm
    assert config is not None
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
