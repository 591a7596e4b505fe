"""numerics=float32 against float32 transformers, over everything that a context or a batch can be.

Bound: both sides round to float32 everywhere and only order their sums differently, so neither may be much further from
the float64 result than the other. transformers' own distance is the yardstick; ours may be twice that.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mk.graph import StepShape
from mk.interpreter import Machine, StepInputs
from mk.kv import KVCache
from mk.model.folder import write_weights
from mk.model.geometry import Geometry
from mk.schedule.lower import lower
from mk.schedule.placement import PLACEMENTS
from mk.splits import SplitPolicy
from tests.interpreter_rig import (
    GEOMETRY,
    MAX_BLOCKS,
    WAVE_ORDERS,
    batch,
    program,
    random_tokens,
    reference_logits,
    source,
    weights,
)

# more than one k slot, group of 1, every kind of padding
WIDE = dataclasses.replace(GEOMETRY, hidden=272, q_heads=3, kv_heads=3, experts=20, expert_ffn=264, top_k=5)


def transformers_logits(geometry: Geometry, folder: Path, sequences: list[list[int]], dtype: torch.dtype) -> list[Any]:
    from transformers import Cohere2MoeForCausalLM

    weight_source = source(geometry)
    weight_source.write_folder(folder)
    write_weights(folder, weight_source)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = Cohere2MoeForCausalLM.from_pretrained(folder, dtype=dtype, **eager).eval()
    with torch.no_grad():
        return [model(torch.tensor([tokens])).logits[0].float().numpy() for tokens in sequences]


def worst(logits: Any, exact: Any) -> float:
    return float(np.abs(logits.astype(np.float64) - exact).max())


def teacher_forced(
    geometry: Geometry, sequences: list[list[int]], starts: list[int], stealing: bool, placement: str
) -> list[Any]:
    """Logits after every token of each sequence; row r joins at step `starts[r]`, an empty sequence never does."""
    rows, steps = len(sequences), max(s + len(t) for s, t in zip(starts, sequences, strict=True))
    kv = KVCache(geometry, rows * MAX_BLOCKS, rows * 3)  # sliding layers: fewer pages than a context has blocks
    machine = Machine(weights(geometry), kv, seed=11)
    machine.load(program(rows, placement=placement, stealing=stealing, geometry=geometry))
    allocator = kv.allocator(rows, MAX_BLOCKS, seed=5)
    logits: list[list[Any]] = [[] for _ in sequences]
    for step in range(steps):
        keys, tokens = [0] * rows, [-1] * rows
        for row, (start, sequence) in enumerate(zip(starts, sequences, strict=True)):
            if start <= step < start + len(sequence):
                keys[row], tokens[row] = step - start + 1, sequence[step - start]
                allocator.release_window(row, keys[row] - 1)
                allocator.reserve(row, keys[row])
        out = machine.step(StepInputs(tokens, keys, allocator.table))
        assert not out.status.any()
        for row in range(rows):
            assert (out.tokens[row] == -1) == (keys[row] == 0)
            if keys[row]:
                logits[row].append(out.logits[row])
    return [np.array(row) for row in logits]


@pytest.mark.parametrize(
    ("geometry", "stealing", "placement", "lengths"),
    [
        (GEOMETRY, False, "row_owner", (200, 0, 70, 133)),
        (GEOMETRY, True, "round_robin", (200, 0, 70, 133)),
        (WIDE, True, "row_owner", (70, 0, 30, 45)),
    ],
    ids=["static", "stealing", "wide"],
)
def test_ragged_decode_from_the_first_token(
    tmp_path: Path, geometry: Geometry, stealing: bool, placement: str, lengths: tuple[int, ...]
) -> None:
    """Contexts 1 .. 200 cross two windows and three pages; pages are permuted, released and used again, never zeroed.

    The rows end together, so they begin, and release pages to one another, at different steps.
    """
    sequences = [random_tokens(n, seed=n) for n in lengths]
    theirs = transformers_logits(geometry, tmp_path, [s for s in sequences if s], torch.float32)
    ours = teacher_forced(geometry, sequences, [max(lengths) - n for n in lengths], stealing, placement)
    for tokens, mine, yardstick in zip([s for s in sequences if s], [o for o in ours if len(o)], theirs, strict=True):
        exact = reference_logits(tuple(tokens), torch.float64, geometry)
        assert worst(mine, exact) <= 2 * worst(yardstick, exact)
        assert worst(mine, exact) < 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("context", [63, 64, 65, 127, 128, 129, 191, 256, 257, 400])
def test_decode_after_a_prefill(context: int) -> None:
    """At and around page, window and split edges, on pages that a prefill wrote."""
    tokens = random_tokens(context, seed=context)
    decoding = batch(program(1, bucket=448), [tokens[:-1]], [tokens[-1]])
    logits = decoding.step().logits[0]
    exact = reference_logits(tuple(tokens), torch.float64)[-1]
    yardstick = worst(reference_logits(tuple(tokens), torch.float32), reference_logits(tuple(tokens), torch.float64))
    assert worst(logits, exact) <= 2 * yardstick


@pytest.mark.parametrize("policy", [SplitPolicy(64, 64), SplitPolicy(64, 3)], ids=["many", "doubling"])
@pytest.mark.parametrize("context", [255, 256, 257, 320, 500])
def test_a_window_of_several_splits(context: int, policy: SplitPolicy) -> None:
    """Up to five splits of a 256-key window; with at most three a head, their size doubles to 128 (window) and 256."""
    geometry = dataclasses.replace(GEOMETRY, window=256)
    tokens = random_tokens(context, seed=context)
    shape = StepShape(geometry, 1, 512, n_sm=3, splits=policy)
    loaded = lower(shape, WAVE_ORDERS["default"], "round_robin")
    logits = batch(loaded, [tokens[:-1]], [tokens[-1]]).step().logits[0]
    exact = reference_logits(tuple(tokens), torch.float64, geometry)
    yardstick = worst(reference_logits(tuple(tokens), torch.float32, geometry), exact)
    assert worst(logits, exact[-1]) <= 2 * yardstick


def test_router_strips_of_one_k_slot_are_joined_over_two_slots() -> None:
    """Round robin over 2 SMs deals each SM one k slot of every strip, which lowering joins into one descriptor."""
    joined = program(1, placement="round_robin", n_sm=2, geometry=WIDE)
    tokens = random_tokens(40, seed=1)
    logits = batch(joined, [tokens[:-1]], [tokens[-1]]).step().logits[0]
    exact = reference_logits(tuple(tokens), torch.float64, WIDE)[-1]
    assert worst(logits, exact) < 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_more_rows_than_one_mma_column_block(placement: str) -> None:
    """17 rows on 7 SMs: nothing knows of a batch of 8."""
    prompts = [random_tokens(3 * row, seed=row) for row in range(17)]
    loaded = program(17, placement=placement, n_sm=7, bucket=64)
    logits = batch(loaded, prompts).step().logits
    assert np.isnan(logits[0]).all()  # the empty prompt: inactive
    for row in (1, 8, 16):
        exact = reference_logits((*prompts[row], 7), torch.float64)[-1]
        assert worst(logits[row], exact) < 1e-5 * np.abs(exact).max()


def test_kernel_numerics_stay_as_close_as_transformers_in_bf16(tmp_path: Path) -> None:
    """Rounding to bf16 where the kernel does may not lose more than rounding to bf16 everywhere.

    Compared at the median context: near a tie either side may choose another expert, and be far off from there on.
    """
    tokens = random_tokens(160, seed=8)
    exact = reference_logits(tuple(tokens), torch.float64)
    (theirs,) = transformers_logits(GEOMETRY, tmp_path, [tokens], torch.bfloat16)
    kv = KVCache.for_contexts(GEOMETRY, 1, 192)
    machine = Machine(weights(), kv, numerics="kernel")
    machine.load(program(1, bucket=192))
    allocator = kv.allocator(1, MAX_BLOCKS, seed=2)
    ours = []
    for keys, token in enumerate(tokens, start=1):
        allocator.release_window(0, keys - 1)
        allocator.reserve(0, keys)
        ours.append(machine.step(StepInputs([token], [keys], allocator.table)).logits[0])

    def median(logits: Any) -> float:
        return float(np.median(np.linalg.norm(logits - exact, axis=1) / np.linalg.norm(exact, axis=1)))

    assert median(np.array(ours)) <= 1.0 * median(theirs)
    assert median(np.array(ours)) > 1e-4  # it does round
