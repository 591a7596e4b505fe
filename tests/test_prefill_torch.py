"""Prefill: the reference's numbers, and the same bits however the prompt is cut and whatever lies around it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mk.errors import MkError
from mk.interpreter import Machine, StepInputs
from mk.interpreter.numerics import round_bf16
from mk.kv import ABSENT, KVCache, PageAllocator
from prefill import torch_prefill
from prefill.torch_prefill import TorchPrefill
from tests.interpreter_rig import GEOMETRY, program, random_tokens, reference_kv, reference_logits, weights

MAX_BLOCKS = 9
PROMPT = random_tokens(333, seed=5)  # five windows and a bit
WINDOW = GEOMETRY.window_keys


def prefilled(
    prompt: list[int] = PROMPT, chunk: int = 512, numerics: str = "float32", page_seed: int = 0, slot: int = 0
) -> tuple[np.ndarray, KVCache, PageAllocator]:
    kv = KVCache(GEOMETRY, 2 * MAX_BLOCKS, 2 * MAX_BLOCKS)
    pages = kv.allocator(2, MAX_BLOCKS, page_seed)
    logits = TorchPrefill(weights(), kv, numerics, chunk).run(pages, slot, prompt)
    return logits, kv, pages


def visible(kv: KVCache, pages: PageAllocator, slot: int, keys: int) -> list[np.ndarray]:
    """Every K and V that the next token can see, layer after layer, head after head."""
    parts = []
    for layer, kind in enumerate(GEOMETRY.layer_kinds):
        lo = max(0, keys + 1 - WINDOW) if kind == "sliding" else 0
        for head in range(GEOMETRY.kv_heads):
            parts += kv.read(pages.table[kind][slot], layer, head, lo, keys)
    return parts


@pytest.mark.parametrize("length", [1, 63, 64, 65, 333])
def test_logits_and_cache_are_the_references(length: int) -> None:
    prompt = PROMPT[:length]
    logits, kv, pages = prefilled(prompt)
    expected = reference_logits(tuple(prompt), torch.float64)[-1]
    noise = np.abs(reference_logits(tuple(prompt), torch.float32)[-1] - expected).max()
    assert np.abs(logits - expected).max() < 3 * noise < 1e-4
    held, found = reference_kv(tuple(prompt)), iter(visible(kv, pages, 0, length))
    for layer, kind in enumerate(GEOMETRY.layer_kinds):
        lo = max(0, length + 1 - WINDOW) if kind == "sliding" else 0
        for head in range(GEOMETRY.kv_heads):
            for part in (held.keys[layer], held.values[layer]):
                np.testing.assert_allclose(next(found), part[head, lo:].numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("numerics", ["float32", "kernel"])
@pytest.mark.parametrize("chunk", [64, 100, 192, 31])
def test_chunks_change_no_bit(chunk: int, numerics: str) -> None:
    whole, parts = prefilled(numerics=numerics), prefilled(chunk=chunk, numerics=numerics)
    assert (whole[0] == parts[0]).all()
    for a, b in zip(visible(*whole[1:], 0, len(PROMPT)), visible(*parts[1:], 0, len(PROMPT)), strict=True):
        assert (a == b).all()


def test_slots_pages_and_neighbours_change_no_bit() -> None:
    logits, kv, pages = prefilled()
    other = KVCache(GEOMETRY, 3 * MAX_BLOCKS, 3 * MAX_BLOCKS)
    for pool in other.pools.values():
        pool.fill(1e30)  # what the pages held before
    crowded = other.allocator(3, MAX_BLOCKS, seed=9)
    prefill = TorchPrefill(weights(), other)
    prefill.run(crowded, 0, random_tokens(130, seed=6))
    assert (prefill.run(crowded, 2, PROMPT) == logits).all()
    prefill.run(crowded, 1, random_tokens(70, seed=7))
    for a, b in zip(visible(kv, pages, 0, len(PROMPT)), visible(other, crowded, 2, len(PROMPT)), strict=True):
        assert (a == b).all()


def test_a_prompt_may_continue_what_the_slot_holds() -> None:
    logits, _, _ = prefilled()
    kv = KVCache(GEOMETRY, MAX_BLOCKS, MAX_BLOCKS)
    pages = kv.allocator(1, MAX_BLOCKS)
    prefill = TorchPrefill(weights(), kv, chunk=50)
    prefill.run(pages, 0, PROMPT[:141])
    assert (prefill.run(pages, 0, PROMPT[141:], start=141) == logits).all()


@pytest.mark.parametrize(("numerics", "tolerance"), [("float32", 5e-6), ("kernel", 2e-2)])
def test_the_machine_takes_over_where_prefill_stops(numerics: str, tolerance: float) -> None:
    """The last token decoded by the machine on prefilled pages, or prefilled with the others: the same logits."""
    expected, _, _ = prefilled(numerics=numerics)
    _, kv, pages = prefilled(PROMPT[:-1], numerics=numerics)
    machine = Machine(weights(), kv, numerics)
    machine.load(program(2))
    pages.reserve(0, len(PROMPT))
    logits = machine.step(StepInputs([PROMPT[-1], 0], [len(PROMPT), 0], pages.table)).logits[0]
    assert np.abs(logits - expected).max() < tolerance * np.abs(expected).max()


def test_kernel_numerics_store_bf16() -> None:
    exact = visible(*prefilled()[1:], 0, len(PROMPT))
    rounded = visible(*prefilled(numerics="kernel")[1:], 0, len(PROMPT))
    assert all((part == round_bf16(part)).all() for part in rounded)
    assert not all((part == round_bf16(part)).all() for part in exact)


def test_a_long_prompt_needs_no_more_sliding_pages_than_its_window_and_a_chunk() -> None:
    kv = KVCache(GEOMETRY, MAX_BLOCKS, 4)  # window: one page and the one it straddles; a chunk: likewise
    pages = kv.allocator(1, MAX_BLOCKS)
    logits = TorchPrefill(weights(), kv, chunk=64).run(pages, 0, PROMPT)
    assert (logits == prefilled()[0]).all()
    held = np.flatnonzero(pages.table["sliding"][0] != ABSENT)
    assert held.tolist() == [4, 5]  # keys 270.. of 334 are in sight


def test_weights_too_large_to_keep_are_unpacked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, _, _ = prefilled()
    monkeypatch.setattr(torch_prefill, "_CACHED", 0)
    monkeypatch.setattr(torch_prefill, "_HEAD_STRIPS", 19)  # all of this head's, as before: one product
    kv = KVCache(GEOMETRY, MAX_BLOCKS, MAX_BLOCKS)
    prefill = TorchPrefill(weights(), kv)
    assert (prefill.run(kv.allocator(1, MAX_BLOCKS), 0, PROMPT) == logits).all()
    assert not prefill._weights._kept


def test_the_number_of_threads_changes_no_bit_and_is_left_alone() -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(prefilled()[0])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all((result == results[0]).all() for result in results)


@pytest.mark.parametrize(
    ("tokens", "start", "message"),
    [
        ([], 0, "no tokens"),
        ([GEOMETRY.vocab], 0, "outside 0.."),
        ([-1], 0, "outside 0.."),
        ([1], 1024, "max_positions"),
    ],
)
def test_what_can_not_be_prefilled_is_named(tokens: list[int], start: int, message: str) -> None:
    kv = KVCache(GEOMETRY, 1, 1)
    with pytest.raises(MkError, match=message):
        TorchPrefill(weights(), kv).run(kv.allocator(1, 1), 0, tokens, start)


def test_too_few_pages_are_named() -> None:
    kv = KVCache(GEOMETRY, 2, 4)
    with pytest.raises(MkError, match=r"slot 0: 333 keys need 6 more full pages, 2 are free"):
        TorchPrefill(weights(), kv).run(kv.allocator(1, MAX_BLOCKS), 0, PROMPT)
    with pytest.raises(MkError, match="prefill.chunk=0"):
        TorchPrefill(weights(), kv, chunk=0)
