"""Penalties, bias, cuts and logprobs against transformers' processors and float64, and 10,000 draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mk.batching.logits import allowed, logprobs_of, needs_logits, pick, processed
from mk.batching.request import GenerationParams, Request
from mk.sampling import NO_TOKEN, SamplingParams

VOCAB = 40
LOGITS = np.random.default_rng(0).normal(0, 2.5, VOCAB).astype(np.float32)
ENDS = frozenset({3})


def request(tokens: list[int] | None = None, **params: Any) -> Request:
    return Request("r", [5, 6, 6, 39], GenerationParams(max_tokens=9, **params), print, list(tokens or []))


def transformed(asked: Request) -> torch.Tensor:
    """What transformers makes of the logits, float64 [vocab]."""
    p, scores = asked.params, torch.from_numpy(LOGITS).double()[None]
    ids = torch.tensor([asked.history()])
    stages: list[Any] = []
    if p.repetition_penalty != 1:
        stages.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.logit_bias:
        stages.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in p.logit_bias.items()}))
    if p.sampling.temperature not in (0, 1):
        stages.append(TemperatureLogitsWarper(p.sampling.temperature))
    if p.sampling.top_k:
        stages.append(TopKLogitsWarper(p.sampling.top_k))
    if p.sampling.top_p < 1:
        stages.append(TopPLogitsWarper(p.sampling.top_p))
    if p.min_p:
        stages.append(MinPLogitsWarper(p.min_p))
    for stage in stages:
        scores = stage(ids, scores)
    return scores[0]


CASES: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.8},
    "bias": {"logit_bias": {4: 3.0, 11: -5.0}},
    "all": {"min_p": 0.05, "repetition_penalty": 1.3, "logit_bias": {8: 2.0}},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cuts", [{}, {"top_k": 12, "top_p": 0.9}], ids=["no cuts", "cuts"])
def test_ten_thousand_draws_are_distributed_as_transformers_says(case: str, cuts: dict[str, Any]) -> None:
    asked = request([7, 7, 9], sampling=SamplingParams(temperature=0.8, **cuts), **CASES[case])
    expected = torch.softmax(transformed(asked), -1).numpy()
    drawn = np.zeros(VOCAB, int)
    for seed in range(10_000):
        sampling = SamplingParams(temperature=0.8, seed=seed, **cuts)
        again = request([7, 7, 9], sampling=sampling, **CASES[case])
        drawn[pick(LOGITS, again, ENDS)] += 1
    assert not drawn[expected == 0].any()
    likely = expected * drawn.sum() >= 5
    counts, mean = drawn[likely], expected[likely] * drawn.sum()
    rest = drawn.sum() - counts.sum()
    if not likely.all() and drawn.sum() - mean.sum() >= 5:
        counts, mean = np.append(counts, rest), np.append(mean, drawn.sum() - mean.sum())
    assert chisquare(counts, mean * counts.sum() / mean.sum()).pvalue > 1e-3


def test_presence_and_frequency_count_the_answer_alone() -> None:
    asked = request([7, 7, 9], presence_penalty=0.5, frequency_penalty=0.25)
    expected = LOGITS.copy()
    expected[7] -= 1.0
    expected[9] -= 0.75
    np.testing.assert_array_equal(processed(LOGITS, asked), expected)
    assert processed(LOGITS, request([7])) is LOGITS


def test_end_tokens_wait_for_min_tokens_and_constraints_all_hold() -> None:
    class Even:
        def allowed(self) -> np.ndarray:
            return np.arange(VOCAB) % 2 == 0

        def accept(self, token: int) -> None: ...

    class Anything(Even):
        def allowed(self) -> None:  # type: ignore[override]
            return None

    assert allowed(request(), ENDS, VOCAB) is None
    early, late = request([1], min_tokens=2), request([1, 2], min_tokens=2)
    assert np.flatnonzero(~allowed(early, ENDS, VOCAB)).tolist() == [3]
    assert allowed(late, ENDS, VOCAB) is None
    assert needs_logits(early, ENDS) and not needs_logits(late, ENDS) and not needs_logits(early, frozenset())
    both = request([1], min_tokens=2, constraints=[Even(), Anything()])
    mask = allowed(both, frozenset({4}), VOCAB)
    assert not mask[4] and not mask[5] and mask[6] and mask.sum() == VOCAB // 2 - 1
    nothing = request(constraints=[Even()])
    nothing.params.constraints[0].allowed = lambda: np.zeros(VOCAB, bool)  # type: ignore[method-assign]
    assert pick(LOGITS, nothing, ENDS) == NO_TOKEN


@pytest.mark.parametrize(
    "field",
    [
        {"logprobs": 0},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {1: 1.0}},
    ],
)
def test_each_of_these_needs_logits(field: dict[str, Any]) -> None:
    assert not needs_logits(request(sampling=SamplingParams(1.0, 5, 0.9)), ENDS)
    assert needs_logits(request(**field), ENDS)


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB])
def test_logprobs_are_log_softmax_with_ties_by_id(count: int) -> None:
    logits = LOGITS.copy()
    logits[[9, 4, 30]] = logits.max() + 1  # three equal ones
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    found = logprobs_of(logits, 11, count)
    order = np.lexsort((np.arange(VOCAB), -logits))[:count]
    assert found.logprob == pytest.approx(expected[11], abs=1e-12)
    assert [token for token, _ in found.top] == order.tolist()
    np.testing.assert_allclose([value for _, value in found.top], expected[order], atol=1e-12)
