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
WARM_TOKENS = 2  # before them: what an engine compiles and lowers at its first prompt and step is not its speed


@dataclass(frozen=True, slots=True)
class Estimate:
    """probed: requests that the probe took. tok_s: of the probe, all together. hours: of decoding, if every answer took
    `cap`; prompts come on top."""

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
    """Time a few tokens of as many first prompts as the engine takes at a time, whose prefill goes before that.

    context: tokens that the engine has for prompt and answer, None = unknown. An answer takes no more than that.
    """
    asked = benchmark.config.max_tokens
    assert asked is not None
    cap = asked if context is None else min(asked, context)
    prompts = [next(benchmark.conversation(problem)) for problem in problems[: engine.parallel]]
    sampling = dataclasses.replace(sampling, seed=0)
    _decode(engine, [Request(prompt, min(cap, WARM_TOKENS), sampling, False) for prompt in prompts])
    started = time.perf_counter()
    tokens = _decode(engine, [Request(prompt, min(cap, PROBE_TOKENS), sampling, False) for prompt in prompts])
    rate = tokens / (time.perf_counter() - started)
    requests = runs * sum(benchmark.asks(problem) for problem in problems)
    return Estimate(requests, cap, 2 * len(prompts), rate, requests * cap / max(rate, 1e-9) / 3600)


def _decode(engine: Engine, requests: Sequence[Request]) -> int:
    """Tokens of all answers together."""
    for index, request in enumerate(requests):
        engine.submit(index, request)
    tokens, outstanding = 0, len(requests)
    while outstanding:
        for _, completion in engine.collect():
            tokens += completion.completion_tokens
            outstanding -= 1
    return tokens


def require_affordable(found: Estimate, max_hours: float) -> None:
    if found.hours > max_hours:
        raise MkError(
            f"up to {found.requests} answers of {found.cap} tokens at {found.tok_s:.0f} tokens/s may take "
            f"{found.hours:.1f} hours, experiment.max_hours is {max_hours:g}",
            hint="experiment.limit=<problems>, experiment.base_url=<a faster engine>, another model=, or "
            "experiment.max_hours=<more>",
        )
