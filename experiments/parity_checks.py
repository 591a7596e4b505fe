"""How far an engine's distributions are from float32's over the same tokens, beside how far bfloat16's are.

Teacher-forced: every position is given the true tokens before it, so that one different token does not make the rest
incomparable. The noise floor is the reference computed in bfloat16, its own routing included: what the arithmetic alone
costs, whoever does it. Bars are on medians: where rounding changes an expert, a position is far off, and a few of those
make most of a mean, in bfloat16 as in a kernel, at other positions each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.distances import figure, number, read
from experiments.kernel_checks import Bfloat16Reference, OneLayer
from mk.engines.protocol import Engine
from mk.model.reference import Reference, ReferenceCache
from mk.model.tensors import WeightSource
from mk.results.rows import Row
from mk.sampling import SamplingParams

BAR = 1.5  # times the noise floor
DIGITS = 9  # of raw data: an nll's error is the difference of two that are near each other
SLACK = 5  # positions whose likeliest token may differ more often than that


@dataclass(frozen=True, slots=True)
class Positions:
    """One sequence's distributions beside float32's, position by position. nats.

    kl: of float32 from the tested. differs: whether another token is the likeliest. nll, nll_exact: of the true next
    token, the tested and float32's.
    """

    kl: list[float]
    differs: list[bool]
    nll: list[float]
    nll_exact: list[float]

    @property
    def distance(self) -> Distance:
        kl, nll, exact = (np.array(values) for values in (self.kl, self.nll, self.nll_exact))
        error = float(np.median(np.abs(nll - exact)))
        return Distance(len(kl), float(kl.mean()), float(np.median(kl)), sum(self.differs), float(nll.mean()), error)

    @property
    def raw(self) -> dict[str, Any]:
        """As JSON has it; `Positions.read` is its inverse."""
        numbers = {name: [number(x, DIGITS) for x in getattr(self, name)] for name in ("kl", "nll", "nll_exact")}
        return {**numbers, "differs": [int(differs) for differs in self.differs]}

    @classmethod
    def read(cls, raw: dict[str, Any]) -> Positions:
        kl, nll, exact = ([read(x) for x in raw[name]] for name in ("kl", "nll", "nll_exact"))
        return cls(kl, [bool(differs) for differs in raw["differs"]], nll, exact)


@dataclass(frozen=True, slots=True)
class Distance:
    """Of one sequence's distributions from float32's, over its positions. nats.

    kl: of float32 from the tested, mean and median. disagreements: positions with another likeliest token. nll: of the
    true next token, mean. nll_error: |nll - float32's|, median.
    """

    positions: int
    kl: float
    kl_median: float
    disagreements: int
    nll: float
    nll_error: float


def verdicts(tested: Distance, floor: Distance) -> dict[str, bool]:
    """Of an engine's distance and the noise floor. NaN fails every one that it is in."""
    return {
        "kl_within_bar": tested.kl_median <= BAR * floor.kl_median,
        "nll_within_bar": tested.nll_error <= BAR * floor.nll_error,
        "top1_within_bar": tested.disagreements <= BAR * floor.disagreements + SLACK,
    }


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Row` from an engine's positions and those of the reference in bfloat16."""
    tested, rounded = Positions.read(raw["tested"]), Positions.read(raw["rounded"])
    ours, floor = tested.distance, rounded.distance
    return {
        "checks": verdicts(ours, floor),
        "positions": ours.positions,
        "kl": figure(ours.kl),
        "kl_bf16": floor.kl,
        "kl_median": figure(ours.kl_median),
        "kl_median_bf16": floor.kl_median,
        "top1_agreement": 1 - ours.disagreements / ours.positions,
        "top1_agreement_bf16": 1 - floor.disagreements / floor.positions,
        "nll": figure(ours.nll),
        "nll_float32": float(np.mean(rounded.nll_exact)),
        "nll_error": figure(ours.nll_error),
        "nll_error_bf16": floor.nll_error,
    }


@torch.no_grad()
def reference_logits(source: WeightSource, tokens: Tensor, keep: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits float32 [keep, vocab] after each of the last `keep` tokens of int64 [T]: in float32, and in bfloat16.

    Weights are upcast layer by layer, so that one layer at a time is there in float32.
    """
    layers = OneLayer(source, device)
    both = Reference(source.geometry, layers.get), Bfloat16Reference(source.geometry, layers.get)
    caches = ReferenceCache(), ReferenceCache()
    residuals = [model.embed(tokens) for model in both]
    for layer in range(source.geometry.layers):
        layers.forget()
        for index, model in enumerate(both):
            out = model.layer(layer, residuals[index], 0, caches[index])
            residuals[index] = residuals[index] + (out.attention + out.ffn)
            for held in (caches[index].keys, caches[index].values):
                held.pop(layer)  # the sequence is over: nothing reads them again
    layers.forget()
    exact, rounded = (model.logits(x[-keep:]).float() for model, x in zip(both, residuals, strict=True))
    return exact, rounded


def forced_logits(engine: Engine, sequences: Sequence[Sequence[int]], keep: int) -> list[Tensor]:
    """What an engine says after each of the last `keep` tokens of its rows' sequences, float32 [keep, vocab] each.

    The first of them comes from prefill, the others from decode steps of all rows together.
    """
    contexts = [len(tokens) - keep + 1 for tokens in sequences]
    found = [
        [torch.from_numpy(engine.prefill(row, tokens[:context]).copy())]
        for row, (tokens, context) in enumerate(zip(sequences, contexts, strict=True))
    ]
    greedy = [SamplingParams()] * len(sequences)
    for step in range(keep - 1):
        keys = [context + step + 1 for context in contexts]
        out = engine.step([tokens[n - 1] for tokens, n in zip(sequences, keys, strict=True)], keys, greedy)
        for row, logits in enumerate(found):
            logits.append(torch.from_numpy(out.logits[row].copy()))
    return [torch.stack(logits) for logits in found]


def positions(logits: Tensor, exact: Tensor, following: Tensor) -> Positions:
    """Of logits [T, vocab] beside float32's, where the true next tokens are int64 [T]."""
    ours, theirs = (x.double().log_softmax(-1) for x in (logits.to(exact.device), exact))
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    index = following.to(exact.device)[:, None]
    nll, nll_exact = (-x.gather(1, index)[:, 0] for x in (ours, theirs))
    differs = ours.argmax(-1) != theirs.argmax(-1)
    return Positions(kl.tolist(), differs.tolist(), nll.tolist(), nll_exact.tolist())
