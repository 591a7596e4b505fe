"""Time contexts of 1K to 256K keys at batch 1, 4 and 8: rows of decode_throughput, with vLLM's beside them.

vLLM is started once, before the kernel fills the card, and measures every batch at the contexts that are asked for; its
K and V are made up. A case that it has no room for is missing, by name, and fails nothing. Where no vLLM is configured
the kernel's rows are made all the same; one that is configured and not there is an error before anything is loaded.
"""

from __future__ import annotations

import torch

from experiments import decode_throughput, simulated_variants, vllm_rows
from experiments.arms import table
from experiments.baselines import vllm_process
from experiments.baselines.vllm_process import STRATEGIES, Measured
from experiments.decode_variants import on_card, timed_variants
from experiments.unread import require_greedy
from mk.config import Config
from mk.errors import MkError
from mk.results.rows import Row
from mk.results.runs import RunFolder


def main(cfg: Config) -> int:
    """Exit status 1 if a context failed, or vLLM did; the others run all the same."""
    jobs = timed_variants(cfg)
    cases = beside(cfg, jobs)
    missing = vllm_process.missing(cfg.baseline.vllm) if cases and cfg.baseline.vllm else None
    if not torch.cuda.is_available():
        status = simulated_variants.run(cfg, jobs)
        print("\n".join([missing or vllm_rows.NO_CARD] * bool(cases)))
        return status
    for _, job in jobs:
        decode_throughput.check(job, cfg.experiment.name)
    notes, failed = [missing] if missing else [], []
    by_label = dict(jobs)
    pairs: list[tuple[Row, Row | None]] = []
    with RunFolder.create(cfg) as run:
        measured: Measured | None = None
        if cases and not missing:
            print(f"vLLM, {len(cases)} cases: started", flush=True)
            try:
                measured = vllm_rows.measure(jobs[0][1], cases, run)
                failed += [f"vLLM: {error}" for error in measured.errors]
                notes += [f"vLLM is missing, {case}" for case in measured.absent]
            except MkError as error:
                failed.append(f"vLLM: {error}")

        def written(row: Row) -> None:
            """vLLM's row follows the kernel's at once: a run that is aborted keeps both."""
            if (row.context[0], row.batch) not in cases or row.arm not in by_label:
                return
            named, other = {"experiment": row.experiment, "arm": row.arm}, None
            try:
                other = measured and vllm_rows.append(by_label[row.arm], run, measured, row, **named)
            except MkError as error:  # figures that cannot be: the kernel's go on
                failed.append(f"vLLM, {row.arm}: {error}")
            pairs.append((row, other))

        found, wrong = on_card(cfg, jobs, run, written=written)
        failed += wrong
        print(f"\n{table(found, cfg.experiment.batches)}")
        if pairs:
            print(f"\n{vllm_rows.said(pairs)}")
        print("\n".join([*(f"failed: {message}" for message in failed), *notes, f"run folder: {run.path}"]))
    return int(bool(failed))


def beside(cfg: Config, jobs: list[tuple[str, Config]]) -> list[tuple[int, int]]:
    """(context, batch) of what vLLM is to measure, that which needs the least room first; none with baseline=none.

    Raises MkError for what a configured one cannot stand beside.
    """
    settings = cfg.experiment
    if cfg.baseline.vllm is None or not settings.baseline_contexts:
        return []
    if cfg.baseline.vllm.python or cfg.baseline.vllm.site:
        swept = [job.experiment.context for _, job in jobs]
        for context in settings.baseline_contexts:
            if context not in swept:
                raise MkError(
                    f"experiment.baseline_contexts={settings.baseline_contexts}: {context} is none of the variants' "
                    f"contexts {swept}",
                    hint=f"experiment.baseline_contexts=[{swept[0]}], or baseline=none",
                )
        if settings.axes != ["experiment.context"]:
            raise MkError(f"vLLM stands beside contexts, not experiment.axes={settings.axes}", hint="baseline=none")
        require_greedy(cfg)
        if cfg.weights.name != "random" or cfg.routing.name not in STRATEGIES:
            raise MkError(
                f"vLLM measures random weights and routing={' or '.join(STRATEGIES)}, "
                f"not weights={cfg.weights.name} routing={cfg.routing.name}",
                hint="baseline=none",
            )
    return sorted(
        ((context, batch) for context in settings.baseline_contexts for batch in settings.batches),
        key=lambda case: case[0] * case[1],
    )
