"""What servers are loaded with: prompts of random tokens, and how many tokens each request is to generate.

Both are seeded, and alike for every engine; nobody reads the text. Generation goes on past the model's end tokens, so
that every engine generates as many tokens as it was asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.settings import Workload
from mk.sampling import SamplingParams

COMPLETIONS = "/completions"
FIRST_TOKEN = 16  # ids below are markers in the vocabularies here
WARM_TOKENS = 4  # by which the answers of one warming request are longer than the last one's


def lengths(workload: Workload, seed: int) -> list[int]:
    """Tokens that each request generates: log-normal around the mean, which they have exactly but for one rounding."""
    draws = np.exp(workload.spread * np.random.default_rng(seed).standard_normal(workload.requests))
    wanted = draws * (workload.tokens * workload.scale / draws.mean())
    whole = np.diff(np.round(np.cumsum(wanted)), prepend=0.0)
    return [max(1, int(tokens)) for tokens in whole]


def bodies(workload: Workload, vocab: int, seed: int, sampling: SamplingParams) -> list[dict[str, Any]]:
    """The requests, without a model's name."""
    rng = np.random.default_rng([seed, workload.prompt])
    return [request(rng, workload.prompt, tokens, vocab, sampling) for tokens in lengths(workload, seed)]


def warming(workload: Workload, vocab: int, seed: int, parallel: int) -> list[dict[str, Any]]:
    """Requests for what an engine compiles or lowers when it meets it first: batch by batch, as they end one after the
    other, contexts as long as the workload's longest; then a prompt as long as the workload's."""
    longest = longest_of(workload, seed)
    rng = np.random.default_rng([seed, workload.prompt, 1])
    tokens = [min(WARM_TOKENS * (row + 1), longest - 1) for row in range(parallel)]
    shapes = [*((longest - more, more) for more in tokens), (workload.prompt, 1)]
    return [request(rng, *shape, vocab, SamplingParams()) for shape in shapes]


def longest_of(workload: Workload, seed: int) -> int:
    """Tokens of prompt and answer together."""
    return workload.prompt + max(lengths(workload, seed))


def request(rng: np.random.Generator, prompt: int, tokens: int, vocab: int, sampling: SamplingParams) -> dict[str, Any]:
    """Without a seed: one makes vLLM draw row by row."""
    cuts: dict[str, float] = {"top_k": sampling.top_k} if sampling.top_k else {}
    cuts |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
    return {
        "prompt": rng.integers(FIRST_TOKEN, vocab, prompt).tolist(),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": sampling.temperature,
        **cuts,
    }


def digest(asked: Sequence[dict[str, Any]]) -> str:
    """sha256 (hex) of all requests: equal where two engines were asked the same."""
    text = json.dumps(list(asked), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
