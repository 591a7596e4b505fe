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
from experiments.unread import require_greedy, require_router
from mk.batching.core import Core
from mk.batching.logits import logprobs_of, needs_logits, pick
from mk.batching.request import Delivery, GenerationParams, Phase, Request, Sampled
from mk.config import Config
from mk.errors import MkError
from mk.model.geometry import PAGE
from mk.model.opening import open_model
from mk.results.rows import Row, dtype_of
from mk.results.runs import RunFolder
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
    require_router(cfg)
    require_greedy(cfg)  # each option samples by itself
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

            def note(batch: int, raw: dict[str, Any], **more: Any) -> Row:
                dtype = dtype_of(core.engine.name, cfg.engine.numerics)
                context = [settings.context] * batch
                row = run.measured(raw, engine=core.engine.name, dtype=dtype, batch=batch, context=context, **more)
                return run.append_row(row, raw)

            cached = note(1, cached_answers(core, plain, prompts[: settings.conversations], settings.answer))
            print(
                f"{cached.positions} of {settings.conversations * settings.answer} tokens are the same over hits on "
                "generated blocks and cold"
            )
            if cached.positions:
                print(
                    f"their logprobs differ by {cached.logprob_shift:.1e} on average, {cached.logprob_shift_most:.1e} "
                    "at most\n"
                )
            rows = [cached]
            print(f"{'option':>36} {'batch':>5} {'ms a step':>10} {'us a choice':>12}")
            for name, params in OPTIONS.items():
                chosen = choice_us(params)
                for batch in settings.batches:
                    raw = steps_of(plain, prompts[:batch], params, settings.steps, settings.rounds)
                    rows.append(row := note(batch, {**raw, "choice_us": chosen}, sampling=name))
                    shown = "engine's" if row.choice_us is None else f"{row.choice_us:.0f}"
                    print(f"{name:>36} {batch:>5} {row.wall_ms:>10.2f} {shown:>12}", flush=True)
        print(f"run folder: {run.path}")
    return 0 if all(all(row.checks.values()) for row in rows) else 1


# ---- blocks of answers ----


def cached_answers(core: Core, plain: Core, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
    """Second turns over hits on the first answer's blocks, against the same prompts cold; the row's raw data.

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
        "kind": "cached_answers",
        "hits": sum(asked.request.cached >= blocks for asked, blocks in zip(warm, least, strict=True)),
        "conversations": len(prompts),
        "answer": tokens,
        "shifts": shifts,
    }


def complete(core: Core, asked: Sequence[Asked]) -> None:
    for one in asked:
        core.submit(one.request)
    while core.busy:
        core.tick()


# ---- options ----


def steps_of(
    core: Core, prompts: Sequence[Sequence[int]], params: dict[str, Any], steps: int, rounds: int
) -> dict[str, Any]:
    """Rounds of decode steps of all prompts together, by the host's clock: raw data of a row."""
    raw: dict[str, Any] = {"kind": "options", "asked": steps + 1, "round_s": [], "round_steps": [], "came": []}
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
        raw["round_s"].append(time.perf_counter() - started)
        raw["round_steps"].append(core.totals.steps.total() - before)
        raw["came"].append([len(one.sampled) for one in asked])
    return raw


def choice_us(params: dict[str, Any]) -> list[float] | None:
    """Microseconds of choices on the host from logits of the full model's size; None: the engine chooses."""
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
        times.append((time.perf_counter() - started) * 1e6)
    return times
