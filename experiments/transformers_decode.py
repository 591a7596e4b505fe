"""Decode steps of the kernel beside transformers' own, captured as CUDA graphs: a baseline that needs no installation.

transformers runs first and leaves the card. Each of its configured expert implementations is timed for each batch and
routing, and the fastest is the baseline's row. Weights are the same, the ids of uniform routing too; K and V are
synthetic, as the kernel's. Without a card the kernel's steps are simulated, and transformers times none.
"""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass
from statistics import median

import torch

from experiments import decode_throughput, simulated_variants
from experiments.baseline_rows import append_beside, comparison
from experiments.baselines import transformers_steps as theirs
from experiments.decode_throughput import KV_STD
from experiments.device_clock import queued
from experiments.device_weights import open_weights
from experiments.forced_routing import distinct_experts, forced_ids
from experiments.unread import require_greedy
from mk.compose import vary
from mk.config import Config
from mk.device import card_state
from mk.errors import MkError
from mk.model.geometry import Geometry
from mk.results.runs import RunFolder

DEVICE = decode_throughput.DEVICE


@dataclass(frozen=True)
class Timed:
    """Steps of one batch by one implementation of the experts."""

    experts: str
    step_ms: list[float]
    experts_by_layer: list[float]


def main(cfg: Config) -> int:
    """Exit status 0, or 1 where transformers measured nothing of a batch; the kernel's rows are made all the same."""
    settings = cfg.experiment
    if cfg.weights.name != "random":
        raise MkError("transformers_decode measures random weights", hint="weights=random")
    require_greedy(cfg)
    jobs = {r: decode_throughput.job_of(vary(cfg, [f"routing={r}"])) for r in settings.routings}
    for job in jobs.values():
        decode_throughput.check_settings(job, cfg.experiment.name)
    if not torch.cuda.is_available():
        status = simulated_variants.run(cfg, [(f"routing={routing}", job) for routing, job in jobs.items()])
        print("transformers is not measured: torch sees no GPU here")
        return status
    for job in jobs.values():
        decode_throughput.check(job, cfg.experiment.name)
    notes: list[str] = []
    with RunFolder.create(cfg) as run:
        before = card_state()
        found = measure_all(cfg, jobs, notes)
        card = {"before": before, "after": card_state()}
        pairs = []
        for routing, job in jobs.items():
            for row in decode_throughput.run(job, within=run):
                timed = found.get((routing, row.batch))
                beside = timed and append_beside(
                    job,
                    run,
                    row,
                    timed.step_ms,
                    timed.experts_by_layer,
                    {"card": card},
                    engine="transformers",
                    version=_version(),
                    kv="synthetic",
                    same_weights=True,
                    attention_backend="sdpa",
                    moe_backend=timed.experts,
                    graph_mode="FULL",
                )
                pairs.append((row, beside))
        print("\n".join(["", comparison(pairs, "transformers"), *notes, f"run folder: {run.path}"]))
    return int(len(found) < len(pairs))


def measure_all(cfg: Config, jobs: dict[str, Config], notes: list[str]) -> dict[tuple[str, int], Timed]:
    """By routing and batch, the fastest implementation's steps; what cannot be measured is noted. Nothing of the model
    is left on the card."""
    settings = cfg.experiment
    source = open_weights(cfg, DEVICE)
    model = theirs.load(source, DEVICE)
    found: dict[tuple[str, int], Timed] = {}
    for (routing, job), batch, experts in itertools.product(jobs.items(), settings.batches, settings.experts):
        try:
            timed = measure(model, source.geometry, job, batch, experts)
        except (MkError, torch.cuda.OutOfMemoryError) as error:
            notes.append(f"transformers, routing {routing}, batch {batch}, {experts}: {str(error)[:300]}")
            continue
        print(f"transformers, routing {routing}, batch {batch}, {experts}: {median(timed.step_ms):.3f} ms", flush=True)
        best = found.get((routing, batch))
        if best is None or median(timed.step_ms) < median(best.step_ms):
            found[routing, batch] = timed
    del model, source
    gc.collect()
    torch.cuda.empty_cache()
    return found


def measure(model: object, g: Geometry, job: Config, batch: int, experts: str) -> Timed:
    """Steps around the configured context, as decode_throughput times the kernel's. Raises MkError where the step
    cannot be captured."""
    settings = job.experiment
    steps, warmup, seed = settings.steps, settings.warmup, job.weights.seed or 0
    keys = settings.context - (steps - 1) // 2 - warmup  # of the first step, its own among them
    total = warmup + steps
    bench = theirs.TransformersSteps(
        model, g, batch, keys + total, experts, forced_ids(job.routing, g, batch, total), total
    )
    bench.cache.fill(KV_STD, seed)
    tokens = torch.randint(g.vocab, (batch,), generator=torch.Generator().manual_seed(seed))
    bench.begin(tokens, keys - 1)
    bench.capture()
    bench.begin(tokens, keys - 1)
    for _ in range(warmup):
        bench.run()
    times = queued(lambda step: bench.run(), steps)[0]
    if not bool(torch.isfinite(bench.cache.keys[-1]).all()):
        raise MkError("transformers' keys are not finite")
    return Timed(experts, times, distinct_experts(bench.taken[warmup:], g))


def _version() -> str:
    import transformers

    return transformers.__version__
