"""What serving changes and costs: logprobs over cached blocks of answers, and a step's time by sampling option.

A hit on blocks that decode steps wrote is not bit for bit what prefill computes for the same tokens: conversations go
on over such hits and, cold, without them. Options are timed on the server's own scheduler, without HTTP.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.prompts import sample_prompts
from mk.config import Config
from mk.engine.core import Core
from mk.engine.logits import logprobs_of, needs_logits, pick
from mk.engine.request import Delivery, GenerationParams, Phase, Request, Sampled
from mk.errors import MkError
from mk.model.geometry import PAGE
from mk.model.opening import open_model
from mk.rows import Row
from mk.runs import RunFolder
from mk.sampling import SamplingParams
from mk.server.launch import build_service

WARM = SamplingParams(temperature=1.0, seed=1)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"sampling": WARM},
    "top_k 40": {"sampling": dataclasses.replace(WARM, top_k=40)},
    "top_p 0.95": {"sampling": dataclasses.replace(WARM, top_p=0.95)},
    "logit_bias": {"logit_bias": {7: 0.5}},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logprobs 0": {"logprobs": 0},
    "logprobs 20": {"logprobs": 20},
    "min_p 0.1": {"sampling": WARM, "min_p": 0.1},
    "top_p 0.95, penalties, logprobs 20": {
        "sampling": dataclasses.replace(WARM, top_p=0.95),
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.5,
        "logprobs": 20,
    },
}
VOCABULARY = 262_144  # the full model's, over which a choice on the host is timed by itself
CHOICES = 30


class Asked:
    """A request, and the tokens that it was given."""

    def __init__(self, name: str, prompt: Sequence[int], max_tokens: int, **params: Any) -> None:
        self.sampled: list[Sampled] = []
        given = GenerationParams(max_tokens, ignore_eos=True, **params)
        self.request = Request(name, list(prompt), given, self._take)

    def _take(self, delivery: Delivery) -> None:
        if delivery.error is not None:
            raise MkError(f"{self.request.id}: {delivery.error}")
        self.sampled += delivery.tokens


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when a conversation missed the blocks that it should have hit."""
    settings = cfg.experiment
    most = max(settings.batches)
    if cfg.server.slots < most:
        raise MkError(f"a batch of {most} needs as many server.slots", hint=f"server.slots={most}")
    with tempfile.TemporaryDirectory(prefix="mk-") as scratch:
        model = open_model(cfg.model, cfg.weights, Path(scratch))
        core = build_service(cfg, model).worker.core
        # without a cache; and prompts first, so that a batch is whole from its first step to its last
        plain = Core(
            core.engine,
            model.tokenizer.eos,
            dataclasses.replace(core.policy, prefill="pause", cache=False, cache_generated=False),
        )
        prompts = sample_prompts(model.tokenizer, [settings.context] * max(most, settings.conversations))
        with RunFolder.create(cfg) as run:

            def note(batch: int, checks: dict[str, bool], **more: Any) -> Row:
                kernel = core.engine.name == "cuda" or cfg.engine.numerics == "kernel"
                dtype = "bfloat16" if kernel else "float32"
                context = [settings.context] * batch
                row = run.row(engine=core.engine.name, dtype=dtype, batch=batch, context=context, checks=checks, **more)
                run.append_row(row)
                return row

            shift = cached_answers(core, plain, prompts[: settings.conversations], settings.answer)
            checks = {"generated_blocks_hit": shift.pop("hits") == settings.conversations}
            row = note(1, checks, **shift)
            print(
                f"{row.positions} of {settings.conversations * settings.answer} tokens are the same over hits on "
                "generated blocks and cold; "
                f"their logprobs differ by {row.logprob_shift:.1e} on average, {row.logprob_shift_most:.1e} at most\n"
            )
            print(f"{'option':>36} {'batch':>5} {'ms a step':>10} {'us a choice':>12}")
            for name, params in OPTIONS.items():
                chosen = choice_us(params)
                for batch in settings.batches:
                    wall = step_ms(plain, prompts[:batch], params, settings.steps, settings.rounds)
                    timed = {"sampling": name, "steps": settings.steps, "wall_ms": wall, "choice_us": chosen}
                    note(batch, {"all_tokens_came": True}, **timed)
                    shown = "engine's" if chosen is None else f"{chosen:.0f}"
                    print(f"{name:>36} {batch:>5} {wall:>10.2f} {shown:>12}", flush=True)
        print(f"run folder: {run.path}")
    return 0 if checks["generated_blocks_hit"] else 1


# ---- blocks of answers ----


def cached_answers(core: Core, plain: Core, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
    """Second turns over hits on the first answer's blocks, against the same prompts cold; figures of the row.

    Both turns of a conversation have `tokens` tokens, the likeliest. Logprobs are compared while both say the same.
    Raises MkError for a core that does not cache answers.
    """
    if core.cache is None or not core.policy.cache_generated:
        raise MkError("there is nothing to compare", hint="engine.prefix_cache.generated=true")
    turns, warm = [], []
    for number, prompt in enumerate(prompts):
        first = Asked(f"first {number}", prompt, tokens)
        complete(core, [first])
        follow_up = prompts[number - 1][1:20]
        turns.append([*prompt, *(sampled.token for sampled in first.sampled), *follow_up])
        warm.append(second := Asked(f"second {number}", turns[-1], tokens, logprobs=0))
        complete(core, [second])
    core.cache.clear()
    cold = [Asked(f"cold {number}", turn, tokens, logprobs=0) for number, turn in enumerate(turns)]
    for asked in cold:
        complete(plain, [asked])
    shifts: list[float] = []
    for one, other in zip(warm, cold, strict=True):
        for mine, theirs in zip(one.sampled, other.sampled, strict=True):
            if mine.token != theirs.token:
                break
            assert mine.logprobs is not None and theirs.logprobs is not None
            shifts.append(abs(mine.logprobs.logprob - theirs.logprobs.logprob))
    least = [(len(prompt) + tokens - 1) // PAGE * PAGE for prompt in prompts]
    return {
        "hits": sum(asked.request.cached >= blocks for asked, blocks in zip(warm, least, strict=True)),
        "new_tokens": tokens,
        "positions": len(shifts),
        "logprob_shift": float(np.mean(shifts)),
        "logprob_shift_most": max(shifts),
    }


def complete(core: Core, asked: Sequence[Asked]) -> None:
    for one in asked:
        core.submit(one.request)
    while core.busy:
        core.tick()


# ---- options ----


def step_ms(core: Core, prompts: Sequence[Sequence[int]], params: dict[str, Any], steps: int, rounds: int) -> float:
    """Milliseconds of a decode step of all prompts together, by the host's clock: of the fastest round."""
    best = float("inf")
    for _ in range(rounds):
        asked = [Asked(f"row {row}", prompt, steps + 1, **params) for row, prompt in enumerate(prompts)]
        for one in asked:
            core.submit(one.request)
        while any(one.request.phase is not Phase.DECODE for one in asked):
            core.tick()
        before = core.totals.steps.total()
        started = time.perf_counter()
        while core.busy:
            core.tick()
        best = min(best, (time.perf_counter() - started) / (core.totals.steps.total() - before))
    return best * 1e3


def choice_us(params: dict[str, Any]) -> float | None:
    """Microseconds of a choice on the host from logits of the full model's size, median; None: the engine chooses."""
    request = Asked("choice", range(1000), 1000, **params).request
    if not needs_logits(request, frozenset()):
        return None
    logits = np.random.default_rng(0).standard_normal((CHOICES, VOCABULARY), np.float32) * 3
    times = []
    for row in logits:
        started = time.perf_counter()
        request.tokens.append(pick(row, request, frozenset()))
        if request.params.logprobs is not None:
            logprobs_of(row, request.tokens[-1], request.params.logprobs)
        times.append(time.perf_counter() - started)
    return float(np.median(times)) * 1e6
