"""What an evaluation is about to cost, said before it starts, and refused where that is more than was allowed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from evals.benchmarks.base import Benchmark, Problem
from evals.completion import Engine, Request
from mk.errors import MkError
from mk.sampling import SamplingParams

PROBE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Estimate:
    """probed: requests that the probe took. tok_s: of the probe, all together. hours: if every answer took `cap`."""

    requests: int
    cap: int
    probed: int
    tok_s: float
    hours: float


def estimate(
    benchmark: Benchmark,
    problems: Sequence[Problem],
    runs: int,
    engine: Engine,
    sampling: SamplingParams,
    context: int | None = None,
) -> Estimate:
    """Time a few tokens of as many first prompts as the engine takes at a time.

    context: tokens that the engine has for prompt and answer, None = unknown. An answer takes no more than that.
    """
    asked = benchmark.config.max_tokens
    assert asked is not None
    cap = asked if context is None else min(asked, context)
    prompts = [next(benchmark.conversation(problem)) for problem in problems[: engine.parallel]]
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.submit(index, Request(prompt, min(cap, PROBE_TOKENS), dataclasses.replace(sampling, seed=0), False))
    tokens, outstanding = 0, len(prompts)
    while outstanding:
        for _, completion in engine.collect():
            tokens += completion.completion_tokens
            outstanding -= 1
    rate = tokens / (time.perf_counter() - started)
    requests = runs * sum(benchmark.asks(problem) for problem in problems)
    return Estimate(requests, cap, len(prompts), rate, requests * cap / max(rate, 1e-9) / 3600)


def require_affordable(found: Estimate, max_hours: float) -> None:
    if found.hours > max_hours:
        raise MkError(
            f"up to {found.requests} answers of {found.cap} tokens at {found.tok_s:.0f} tokens/s may take "
            f"{found.hours:.1f} hours, experiment.max_hours is {max_hours:g}",
            hint="experiment.limit=<problems>, experiment.base_url=<a faster engine>, another model=, or "
            "experiment.max_hours=<more>",
        )
