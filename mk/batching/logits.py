"""From a row of logits to a token, on the host: penalties, bias, masks, cuts; and logprobs.

The order is that of transformers: penalties, bias, what is forbidden, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mk.batching.request import Logprobs, Mask, Request
from mk.sampling import sample_row

Floats = npt.NDArray[np.float32]


def needs_logits(request: Request, ends: frozenset[int]) -> bool:
    """Whether the request's next token is picked here; otherwise the engine's own sampler does. ends: end tokens."""
    p = request.params
    return bool(
        p.logprobs is not None
        or p.min_p
        or p.repetition_penalty != 1
        or p.presence_penalty
        or p.frequency_penalty
        or p.logit_bias
        or p.constraints
        or (len(request.tokens) < p.min_tokens and ends)
    )


def pick(logits: Floats, request: Request, ends: frozenset[int]) -> int:
    """The request's next token, given the model's logits float32 [vocab]; `NO_TOKEN` where there can be none."""
    p = request.params
    return sample_row(
        processed(logits, request), p.sampling, request.context, allowed(request, ends, len(logits)), p.min_p
    )


def processed(logits: Floats, request: Request) -> Floats:
    """Logits after penalties and bias.

    The repetition penalty divides positive logits and multiplies negative ones of all tokens so far, prompt included
    (Keskar et al., 2019); presence and frequency penalties are subtracted for tokens of the answer (OpenAI).
    """
    p = request.params
    if p.repetition_penalty == 1 and not (p.presence_penalty or p.frequency_penalty or p.logit_bias):
        return logits
    logits = logits.copy()
    if p.repetition_penalty != 1:
        seen = np.unique(request.history())
        penalty = np.float32(p.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if p.presence_penalty or p.frequency_penalty:
        for token, count in Counter(request.tokens).items():
            logits[token] -= np.float32(p.presence_penalty + p.frequency_penalty * count)
    for token, bias in p.logit_bias.items():
        logits[token] += np.float32(bias)
    return logits


def allowed(request: Request, ends: frozenset[int], vocab: int) -> Mask | None:
    """What may come next, bool [vocab]; None = anything."""
    masks = list(_masks(request, ends, vocab))
    return np.logical_and.reduce(masks) if masks else None


def _masks(request: Request, ends: frozenset[int], vocab: int) -> Iterator[Mask]:
    if len(request.tokens) < request.params.min_tokens and ends:
        going_on = np.ones(vocab, bool)
        going_on[list(ends)] = False
        yield going_on
    for constraint in request.params.constraints:
        mask = constraint.allowed()
        if mask is not None:
            yield mask


def logprobs_of(logits: Floats, token: int, count: int) -> Logprobs:
    """The logprob of a token and of the `count` likeliest, float64, from the model's logits float32 [vocab]."""
    wide = logits.astype(np.float64)
    top = wide.max()
    total = top + np.log(np.exp(wide - top).sum())
    likeliest: list[int] = []
    if count:
        least = np.partition(logits, len(logits) - count)[len(logits) - count]
        ids = np.flatnonzero(logits >= least)  # more than `count` where several have the least one's logit
        likeliest = ids[np.lexsort((ids, -logits[ids]))][:count].tolist()
    return Logprobs(float(wide[token] - total), tuple((i, float(wide[i] - total)) for i in likeliest))
