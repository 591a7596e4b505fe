"""The trained checkpoint on the machine: the same bits whatever the interleaving, the schedule and the neighbours.

`test_interpreter_bits.py` goes further on a tiny random model; this holds the main claims on real weights and text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from experiments.prompts import sample_prompts
from mk.model.opening import NANO
from mk.model.tokenizer import load_tokenizer
from mk.schedule.placement import PLACEMENTS
from tests.interpreter_rig import (
    NANO_GEOMETRY,
    WAVE_ORDERS,
    Batch,
    Floats,
    batch,
    program,
    reference_logits,
)

SEEDS = 20
STEPS = 3
LENGTHS = (254, 0, 30, 420)  # crosses the window of 256 in its second step, inactive, inside it, past it
TEXT = sample_prompts(load_tokenizer(NANO), [480])[0]


def texts(lengths: Sequence[int]) -> list[list[int]]:
    """Held-out Python, every row from another place."""
    return [list(TEXT[480 - length - row : 480 - row]) for row, length in enumerate(lengths)]


def decoding(prompts: Sequence[Sequence[int]], plan: dict[str, Any], **options: Any) -> Batch:
    return batch(program(len(prompts), geometry=NANO_GEOMETRY, **plan), prompts, **options)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return texts(LENGTHS)


@pytest.fixture(scope="module", params=["float32", "kernel"])
def expected(request: pytest.FixtureRequest, prompts: list[list[int]]) -> tuple[str, Floats]:
    """One interleaving of one schedule; everything else must equal it."""
    logits = decoding(prompts, {}, numerics=request.param).decode(STEPS)
    assert np.isfinite(logits[:, [0, 2, 3]]).all() and np.isnan(logits[:, 1]).all()
    return request.param, logits


@pytest.mark.parametrize(("order", "stealing"), list(itertools.product(WAVE_ORDERS, (False, True))))
def test_every_seed_order_and_schedule(
    expected: tuple[str, Floats], prompts: list[list[int]], order: str, stealing: bool
) -> None:
    mode, logits = expected
    for seed in range(SEEDS if mode == "float32" else 2):
        other = decoding(prompts, {"order": order, "stealing": stealing}, numerics=mode, seed=seed)
        assert other.decode(STEPS).tobytes() == logits.tobytes(), f"interleaving seed {seed}"


@pytest.mark.parametrize(("placement", "stealing"), list(itertools.product(PLACEMENTS, (False, True))))
def test_every_placement(
    expected: tuple[str, Floats], prompts: list[list[int]], placement: str, stealing: bool
) -> None:
    """Row ownership fuses the sum over experts; it adds the same numbers in the same order."""
    mode, logits = expected
    other = decoding(prompts, {"placement": placement, "stealing": stealing}, numerics=mode, seed=3)
    assert other.decode(STEPS).tobytes() == logits.tobytes()


@pytest.mark.parametrize("rows", [(3, 2, 1, 0), (1, 0, 3, 2), (2, 3, 0, 1)])
def test_every_batch_position(expected: tuple[str, Floats], prompts: list[list[int]], rows: tuple[int, ...]) -> None:
    mode, logits = expected
    moved = decoding([prompts[row] for row in rows], {"stealing": True}, numerics=mode).decode(STEPS)
    assert moved.tobytes() == logits[:, list(rows)].tobytes()


@pytest.mark.parametrize("mode", ["float32", "kernel"])
@pytest.mark.parametrize("length", [254, 420])
def test_alone_and_beside_seven_very_different_ones(mode: str, length: int) -> None:
    (prompt,) = texts([length])
    alone = decoding([prompt], {}, numerics=mode).decode(STEPS)
    neighbours = texts((1, 470, 255, 65, 2, 257, 129))
    for place, stealing in ((0, False), (3, True), (7, True)):
        together = [*neighbours[:place], prompt, *neighbours[place:]]
        beside = decoding(together, {"stealing": stealing, "placement": "round_robin"}, numerics=mode).decode(STEPS)
        assert beside[:, place].tobytes() == alone[:, 0].tobytes(), f"row {place}"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_within_float32s_noise_of_the_exact_result(prompts: list[list[int]], placement: str) -> None:
    """No further from float64 than twice what the float32 reference is, at the last of the steps."""
    other = decoding(prompts, {"placement": placement, "stealing": placement != "row_owner"})
    fed = [other.next_tokens]
    for _ in range(STEPS):
        out = other.step()
        fed.append(out.tokens.tolist())
    for row in (0, 2, 3):
        tokens = (*prompts[row], *(step[row] for step in fed[:STEPS] if step is not None))
        exact, single = (
            reference_logits(tokens, dtype, NANO_GEOMETRY)[-STEPS:] for dtype in (torch.float64, torch.float32)
        )
        assert np.abs(out.logits[row] - exact[-1]).max() <= 2 * np.abs(single - exact).max()
