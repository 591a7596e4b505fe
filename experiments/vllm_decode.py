"""Decode steps of the kernel beside vLLM's, batch by batch at one context, for each routing, and their ratio.

vLLM runs first, in its own process, so that the card is free for each. A ratio stands only between rows that touched
equally many experts, within 2 %. Where no vLLM is configured the kernel's rows are made all the same, and the table
says what is missing and how to install it; one that is configured and not there is an error before anything is loaded.
"""

from __future__ import annotations

from statistics import median

import torch

from experiments import decode_throughput
from experiments.baselines import vllm_process as vllm
from experiments.decode_throughput import KV_STD
from experiments.device_weights import open_weights
from mk.compose import vary
from mk.config import Config, VllmConfig
from mk.errors import MkError
from mk.model.geometry import Geometry
from mk.rows import Row
from mk.runs import RunFolder
from mk.step_figures import experts_agree, median_ratio, raw_steps, step_figures

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
        print("\n".join(["", comparison(table), *notes, f"run folder: {run.path}"]))
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


def geometry_of(job: Config) -> Geometry:
    return open_weights(job, torch.device("cpu")).geometry


def append(job: Config, run: RunFolder, measured: vllm.Measured, case: vllm.Case, kernel: Row) -> Row:
    """Writes vLLM's row of a batch, with the ratio to the kernel's where both touched as many experts."""
    run = run.under(job)
    context = [case.context] * case.batch
    g = geometry_of(job)
    by_layer = case.experts_by_layer
    if len(by_layer) != len(g.sparse_layers):
        by_layer = []  # not counted, or not in every layer
    raw = raw_steps(case.step_ms, by_layer)
    figures = step_figures(g, job.gpu, context, raw)
    ratio = {}
    if experts_agree(figures.get("distinct_experts"), kernel.distinct_experts):
        raw |= {"kernel_step_ms": run.raw_of(kernel)["step_ms"]}
        of = median_ratio(raw["step_ms"], raw["kernel_step_ms"])
        ratio = {"ratio": of.ratio, "ratio_low": of.low, "ratio_high": of.high, "ratio_to": kernel.digest}
    row = run.row(
        engine="vllm",
        dtype="bfloat16",
        batch=case.batch,
        context=context,
        checks={"experts_counted": bool(by_layer)},
        schedule="vllm",
        wave_order="vllm",
        placement="vllm",
        version=measured.version,
        kv=job.baseline.vllm.kv,
        same_weights=measured.same_weights,
        tpot_ms=case.tpot_ms,
        unstable=unstable(figures, case.tpot_ms),
        **measured.resolved,
        **figures,
        **ratio,
    )
    return run.append_row(row, {**raw, "tpot_ms": case.tpot_ms, "log": measured.lines, "card": measured.card})


def unstable(figures: dict[str, float], tpot_ms: float) -> str | None:
    """Why a row is not to be relied on; None where nothing says so."""
    apart, spread = tpot_ms / figures["p50_ms"] - 1, figures["p90_ms"] / figures["p10_ms"]
    reasons = [f"TPOT by difference is {apart:+.0%} off p50"] * (abs(apart) > TPOT_APART)
    reasons += [f"p90 is {spread:.2f} x p10"] * (spread > SPREAD)
    return "; ".join(reasons) or None


def comparison(pairs: list[tuple[Row, Row | None]]) -> str:
    """A line a routing and batch; no ratio where the experts do not agree, and why."""
    head = (
        f"{'routing':12}{'batch':>6}{'kernel ms':>11}{'experts':>9}{'vLLM ms':>10}{'experts':>9}  vLLM / kernel [95 %]"
    )
    lines = [head]
    for kernel, other in pairs:
        line = f"{kernel.routing:12}{kernel.batch:6}{kernel.p50_ms:11.4f}{kernel.distinct_experts:9.2f}"
        if other is None:
            lines.append(f"{line}{'missing':>10}")
            continue
        counted = "-" if other.distinct_experts is None else f"{other.distinct_experts:.2f}"
        line += f"{other.p50_ms:10.4f}{counted:>9}  "
        if other.ratio is None:
            line += "no ratio: experts differ" if other.distinct_experts else "no ratio: experts not counted"
        else:
            line += f"{other.ratio:.3f} [{other.ratio_low:.3f}, {other.ratio_high:.3f}]"
        lines.append(line + (f"  unstable: {other.unstable}" if other.unstable else ""))
    resolved = next((other for _, other in pairs if other), None)
    if resolved:
        names = ("version", "attention_backend", "moe_backend", "moe_table", "graph_mode", "compile_mode", "kv")
        said = ", ".join(f"{name} {getattr(resolved, name) or 'not said'}" for name in names)
        lines.append(f"vLLM: {said}; weights {'the same' if resolved.same_weights else 'alike'}")
    return "\n".join(lines)
