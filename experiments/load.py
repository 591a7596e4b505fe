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

from experiments.settings.serving import Workload
from mk.sampling import SamplingParams

COMPLETIONS = "/completions"
FIRST_TOKEN = 16  # ids below are markers in the vocabularies here
TOGETHER_TOKENS = 256  # of a warming answer: the first is not done when the last of long prompts has been read
STEP_TOKENS = 4  # by which it is longer than the one before


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


def warming(
    workload: Workload, vocab: int, seed: int, parallel: int, sampling: SamplingParams
) -> list[list[dict[str, Any]]]:
    """Requests for what an engine compiles or lowers when it meets it first, in two waves that are sent one after the
    other: contexts as long as the workload's longest, which decode together before they end one by one; then prompts as
    long as the workload's, of which `parallel` come at once and as many more beside what decodes."""
    longest = longest_of(workload, seed)
    rng = np.random.default_rng([seed, workload.prompt, 1])
    together = min(TOGETHER_TOKENS, longest // 2)
    step = max(1, min(STEP_TOKENS, (longest - 1 - together) // parallel))
    ends = [min(together + step * row, longest - 1) for row in range(parallel)]
    begins = [min(STEP_TOKENS * (row + 1), longest - workload.prompt) for row in range(2 * parallel)]
    waves = [(longest - more, more) for more in ends], [(workload.prompt, more) for more in begins]
    return [[request(rng, *shape, vocab, sampling) for shape in wave] for wave in waves]


def longest_of(workload: Workload, seed: int) -> int:
    """Tokens of prompt and answer together."""
    return workload.prompt + max(lengths(workload, seed))


def request(rng: np.random.Generator, prompt: int, tokens: int, vocab: int, sampling: SamplingParams) -> dict[str, Any]:
    """Without a seed: one makes vLLM draw row by row."""
    return {
        "prompt": rng.integers(FIRST_TOKEN, vocab, prompt).tolist(),
        "max_tokens": tokens,
        "ignore_eos": True,
        **asked_sampling(sampling),
    }


def asked_sampling(sampling: SamplingParams) -> dict[str, float]:
    """Fields of a request, but for the seed; what is off is left out."""
    cuts = {"top_k": sampling.top_k} if sampling.top_k else {}
    return {"temperature": sampling.temperature, **cuts, **({"top_p": sampling.top_p} if sampling.top_p < 1 else {})}


def digest(asked: Sequence[dict[str, Any]]) -> str:
    """sha256 (hex) of all requests: equal where two engines were asked the same."""
    text = json.dumps(list(asked), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
