"""What an evaluation is about to cost, said before it starts, and refused where that is more than was allowed."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from evals.benchmarks.base import Benchmark, Problem
from evals.completion import Engine, Request
from mk.errors import MkError
from mk.sampling import SamplingParams

PROBE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Estimate:
    """tok_s: of the probe, all requests together. hours: if every answer went to the cap."""

    requests: int
    cap: int
    tok_s: float
    hours: float


def estimate(
    benchmark: Benchmark, problems: list[Problem], runs: int, engine: Engine, sampling: SamplingParams
) -> Estimate:
    """Time a few tokens of as many first prompts as the engine takes at a time."""
    cap = benchmark.config.max_tokens
    assert cap is not None
    prompts = [next(benchmark.conversation(problem)) for problem in problems[: engine.parallel]]
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        probe = dataclasses.replace(sampling, seed=0)
        engine.submit(index, Request(prompt, min(cap, PROBE_TOKENS), probe))
    tokens, outstanding = 0, len(prompts)
    while outstanding:
        for _, completion in engine.collect():
            tokens += completion.completion_tokens
            outstanding -= 1
    rate = tokens / (time.perf_counter() - started)
    steps = sum(len(problem.fields.get("sub_steps", [0])) for problem in problems)
    return Estimate(steps * runs, cap, rate, steps * runs * cap / rate / 3600)


def require_affordable(found: Estimate, max_hours: float) -> None:
    if found.hours > max_hours:
        raise MkError(
            f"up to {found.requests} answers of {found.cap} tokens at {found.tok_s:.0f} tokens/s may take "
            f"{found.hours:.1f} hours, experiment.max_hours is {max_hours:g}",
            hint="experiment.limit=<problems>, experiment.base_url=<a faster engine>, another model=, or "
            "experiment.max_hours=<more>",
        )
