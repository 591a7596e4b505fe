"""Decode steps of the kernel beside vLLM's, batch by batch at one context, for each routing, and their ratio.

vLLM runs first, in its own process, so that the card is free for each. A ratio stands only between rows that touched
equally many experts, within 2 %. Where no vLLM is configured the kernel's rows are made all the same, and the table
says what is missing and how to install it; one that is configured and not there is an error before anything is loaded.
"""

from __future__ import annotations

import torch

from experiments import decode_throughput, simulated_variants, vllm_rows
from experiments.baselines import vllm_process
from experiments.unread import require_greedy
from mk.compose import vary
from mk.config import Config
from mk.errors import MkError
from mk.results.runs import RunFolder


def main(cfg: Config) -> int:
    """Exit status 0, also where no vLLM is configured; 1 where it failed."""
    config = cfg.baseline.vllm
    if config is None:
        raise MkError("vllm_decode compares with vLLM", hint="baseline=vllm")
    if cfg.weights.name != "random":
        raise MkError("vllm_decode measures random weights", hint="weights=random")
    require_greedy(cfg)
    jobs = {r: decode_throughput.job_of(vary(cfg, [f"routing={r}"])) for r in cfg.experiment.routings}
    for job in jobs.values():
        decode_throughput.check_settings(job, cfg.experiment.name)
    missing = vllm_process.missing(config)
    if not torch.cuda.is_available():
        status = simulated_variants.run(cfg, [(f"routing={routing}", job) for routing, job in jobs.items()])
        print(missing or vllm_rows.NO_CARD)
        return status
    for job in jobs.values():
        decode_throughput.check(job, cfg.experiment.name)
    notes, failed = [missing] if missing else [], []
    pairs = []
    with RunFolder.create(cfg) as run:
        measured = {}
        for routing, job in ({} if missing else jobs).items():
            print(f"vLLM, routing {routing}: started", flush=True)
            cases = [(job.experiment.context, batch) for batch in job.experiment.batches]
            try:
                found = measured[routing] = vllm_rows.measure(job, cases, run)
            except MkError as error:
                failed.append(f"vLLM, routing {routing}: {error}")
                continue
            failed += [f"vLLM, routing {routing}: {error}" for error in found.errors]
            notes += [f"vLLM is missing, routing {routing}, {case}" for case in found.absent]
        for routing, job in jobs.items():
            for row in decode_throughput.run(job, within=run):
                beside = vllm_rows.append(job, run, measured[routing], row) if routing in measured else None
                pairs.append((row, beside))
        print("\n".join(["", vllm_rows.said(pairs), *failed, *notes, f"run folder: {run.path}"]))
    return int(bool(failed))
