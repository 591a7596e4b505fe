"""Bit identity: what a row computes depends on nothing but its own tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mk.interpreter import numerics
from mk.schedule.placement import PLACEMENTS
from tests.interpreter_rig import (
    WAVE_ORDERS,
    Batch,
    Floats,
    batch,
    program,
    random_tokens,
)

SEEDS = 20
# an inactive row, a first token, and contexts short of, at and past the window and several splits
PROMPTS = [random_tokens(n, seed=100 + n) for n in (150, 0, 64, 300)]


def same(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture(scope="module", params=["float32", "kernel"])
def expected(request: pytest.FixtureRequest) -> tuple[str, Floats]:
    """One interleaving of one schedule; everything else must equal it."""
    logits = batch(program(4), PROMPTS, numerics=request.param).decode(3)
    assert np.isfinite(logits[:, [0, 2, 3]]).all() and np.isnan(logits[:, 1]).all()
    return request.param, logits


@pytest.mark.parametrize(("order", "stealing"), list(itertools.product(WAVE_ORDERS, (False, True))))
def test_every_seed_order_and_schedule(expected: tuple[str, Floats], order: str, stealing: bool) -> None:
    mode, logits = expected
    loaded = program(4, order, stealing=stealing)
    for seed in range(SEEDS if mode == "float32" else 2):
        decoding = batch(loaded, PROMPTS, numerics=mode, seed=seed)
        assert same(decoding.decode(3), logits), f"interleaving seed {seed}"


def test_seeds_are_different_interleavings() -> None:
    """Of the SMs, and under stealing of who gets which tile; the same seed repeats itself."""
    traces = [batch(program(4, stealing=True), PROMPTS, seed=seed, trace=True).step().trace for seed in (0, 1, 2, 0)]
    assert traces[0] == traces[3] and len({str(trace) for trace in traces}) == 3
    lengths = {sum(sm == 0 for sm, _ in trace or ()) for trace in traces}
    assert len(lengths) > 1, "a claimer took the same number of tickets every time"


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("stealing", [False, True])
def test_every_placement(expected: tuple[str, Floats], placement: str, stealing: bool) -> None:
    """The fused reduction of row ownership adds the same numbers in the same order, so not even it differs."""
    mode, logits = expected
    for order in ("default", "interleaved"):
        decoding = batch(program(4, order, placement, stealing), PROMPTS, numerics=mode, seed=1)
        assert same(decoding.decode(3), logits), order


@pytest.mark.parametrize("n_sm", [1, 2, 13, 132])
def test_every_number_of_sms(expected: tuple[str, Floats], n_sm: int) -> None:
    mode, logits = expected
    for placement in ("round_robin", "row_owner"):
        loaded = program(4, placement=placement, n_sm=n_sm, stealing=n_sm > 1)
        assert same(batch(loaded, PROMPTS, numerics=mode).decode(3), logits), placement


@pytest.mark.parametrize("stealing", [False, True])
def test_one_sm_running_ahead_as_far_as_it_can(expected: tuple[str, Floats], stealing: bool) -> None:
    mode, logits = expected
    for seed in range(5):
        decoding = batch(program(4, stealing=stealing), PROMPTS, numerics=mode, seed=seed, interleaving="eager")
        assert same(decoding.decode(3), logits), seed


@pytest.mark.parametrize("stealing", [False, True])
def test_overlapping_steps(expected: tuple[str, Floats], stealing: bool) -> None:
    """Several steps in one launch: an SM enters the next step while others are still in the last one."""
    mode, logits = expected
    for interleaving in ("random", "eager"):
        decoding = batch(program(4, stealing=stealing), PROMPTS, numerics=mode, interleaving=interleaving)
        outs = decoding.machine.run(decoding.inputs(steps=3), 3)
        assert same(np.stack([out.logits for out in outs]), logits)


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 0, 3, 2), (2, 3, 0, 1)])
def test_every_batch_position(expected: tuple[str, Floats], order: tuple[int, ...]) -> None:
    mode, logits = expected
    for stealing in (False, True):
        moved = batch(program(4, stealing=stealing), [PROMPTS[row] for row in order], numerics=mode)
        assert same(moved.decode(3), logits[:, list(order)])


@pytest.mark.parametrize("numeric", ["float32", "kernel"])
def test_a_row_alone_and_beside_seven_very_different_ones(numeric: str) -> None:
    neighbours = [random_tokens(n, seed=200 + n) for n in (1, 500, 63, 65, 2, 257, 129)]
    for prompt in PROMPTS:
        if not prompt:
            continue
        alone = batch(program(1), [prompt], numerics=numeric).decode(2)
        for place, stealing in ((0, False), (3, True), (7, True)):
            prompts = [*neighbours[:place], prompt, *neighbours[place:]]
            beside = batch(program(8, placement="round_robin", stealing=stealing), prompts, numerics=numeric)
            assert same(beside.decode(2)[:, place], alone[:, 0]), f"row {place}"


def test_page_permutations_and_epochs_that_wrap(expected: tuple[str, Floats]) -> None:
    """Epochs cross 2^31 and 2^32, where counters wrap, once or several times a step."""
    mode, logits = expected
    for epoch in (0, 1, 2**31 - 2, 2**32 - 2):
        for stealing in (False, True):
            loaded = program(4, stealing=stealing)
            decoding = batch(loaded, PROMPTS, numerics=mode, page_seed=epoch % 97, epoch=epoch)
            assert same(decoding.decode(3), logits), f"epoch {epoch}"


@pytest.mark.parametrize("epoch", [2**31 - 3, 2**32 - 3])
def test_long_run_across_a_wrap_equals_a_fresh_one(epoch: int) -> None:
    fresh = batch(program(2, stealing=True), PROMPTS[2:]).decode(8)
    assert same(batch(program(2, stealing=True), PROMPTS[2:], epoch=epoch).decode(8), fresh)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 3e38])
def test_unused_memory_changes_nothing(expected: tuple[str, Floats], garbage: float) -> None:
    """Free pages, the unwritten rest of used ones, and whatever the last step left in any buffer."""
    mode, logits = expected

    def fill(decoding: Batch) -> None:
        machine, table = decoding.machine, decoding.allocator.table
        for kind, pool in machine.kv.pools.items():
            used = np.zeros((len(pool), 64), bool)
            for row, keys in enumerate(decoding.keys.tolist()):
                for block, page in enumerate(table[kind][row].tolist()):
                    if page >= 0:
                        used[page, : max(0, keys - 1 - 64 * block)] = True
            np.moveaxis(pool, 4, 1)[~used] = garbage
        machine.poison()

    decoding = batch(program(4, stealing=True), PROMPTS, numerics=mode)
    for expected_step in logits:
        fill(decoding)
        assert same(decoding.step().logits, expected_step)


def test_growing_the_bucket_in_the_middle_keeps_the_bits() -> None:
    """Also across schedules: the loaded program changes, fed-back tokens and pages stay."""
    prompts = [random_tokens(60, seed=1), random_tokens(20, seed=2)]
    large = batch(program(2, bucket=512), prompts).decode(9)
    growing = batch(program(2, bucket=64), prompts)
    logits = [growing.step().logits for _ in range(4)]
    growing.machine.load(program(2, bucket=128, stealing=True, placement="round_robin"))
    logits += [growing.step().logits for _ in range(3)]
    growing.machine.load(program(2, order="attention_first", bucket=512, n_sm=3))
    logits += [growing.step().logits for _ in range(2)]
    assert same(np.stack(logits), large)


def test_weights_converted_when_needed_give_the_same_bits(
    expected: tuple[str, Floats], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models too large to stand in memory as float32."""
    mode, logits = expected
    monkeypatch.setattr("mk.interpreter.memory.RESIDENT_BYTES", 0)
    for placement in ("row_owner", "round_robin"):
        decoding = batch(program(4, placement=placement), PROMPTS, numerics=mode)
        assert decoding.machine.weights.resident is None
        assert same(decoding.decode(3), logits)


def test_what_the_arithmetic_takes_for_granted() -> None:
    """Of numpy and its BLAS on this machine: an element's bits do not depend on where it stands, or beside what."""
    generator = np.random.default_rng(0)
    strips = generator.standard_normal((5, 3, 16, 256), dtype=np.float32)
    rows = generator.standard_normal((9, 768), dtype=np.float32)
    whole = numerics.strip_product(strips, rows)
    for row in range(9):
        shifted = np.full(768 + 16, np.nan, np.float32)[row : row + 768]  # another alignment
        shifted[:] = rows[row]
        for strip in range(5):
            alone = numerics.strip_product(strips[strip : strip + 1].copy(), shifted[None])
            assert same(alone[0, 0], whole[strip, row])
    values = generator.standard_normal(1001, dtype=np.float32) * 20
    for function in (np.exp, np.sqrt, numerics.sigmoid, numerics.round_bf16):
        with np.errstate(invalid="ignore"):
            full = function(values)
            for start, stop in ((0, 1), (1, 4), (3, 20), (5, 38), (900, 1001)):
                assert same(function(values[start:stop].copy()), full[start:stop])
    terms = generator.standard_normal((200, 7), dtype=np.float32)
    assert same(np.array([numerics.ordered_sum(terms[:, i].copy()) for i in range(7)]), numerics.ordered_sum(terms))


def test_round_bf16_is_torchs() -> None:
    import torch

    bits = np.random.default_rng(1).integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = (np.arange(65536, dtype=np.uint32) << 16) | np.uint32(0x8000)
    values = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    rounded = numerics.round_bf16(values)
    assert np.array_equal(rounded, expected, equal_nan=True)
