"""What the machine says when a program, its inputs or its numbers are wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mk.errors import MkError
from mk.interpreter import Machine, Stalled, Status, StepInputs
from mk.isa import ISA, NONE, Word
from mk.kv import KVCache
from mk.model.packing import PackedWeights
from mk.sampling import NO_TOKEN, SamplingParams
from mk.schedule.lower import Program
from tests.interpreter_rig import GEOMETRY, batch, program, random_tokens, source, weights

PROMPTS = [random_tokens(70, seed=1), random_tokens(9, seed=2)]


def edited(loaded: Program, at: int, **words: int) -> Program:
    """A program with words of one descriptor replaced."""
    changed = loaded.words.copy()
    for name, value in words.items():
        changed[at, Word[name]] = value
    return dataclasses.replace(loaded, words=changed)


def find(loaded: Program, op: str, layer: int, word: Word = Word.SIGNAL) -> int:
    """The first descriptor of an operation and layer that uses a word."""
    rows = loaded.words
    wanted = (rows[:, Word.OPCODE] == ISA.named(op).opcode) & (rows[:, Word.LAYER] == layer) & (rows[:, word] != NONE)
    return int(np.flatnonzero(wanted)[0])


@pytest.mark.parametrize("op", ["qkv", "attention", "moe_up", "residual"])
def test_a_dropped_signal_stalls_and_is_named(op: str) -> None:
    loaded = program(2)
    at = find(loaded, op, layer=2)
    counter = int(loaded.words[at, Word.SIGNAL])
    decoding = batch(edited(loaded, at, SIGNAL=NONE), PROMPTS)
    with pytest.raises(Stalled) as stalled:
        decoding.step()
    name = loaded.counters[counter].name
    assert f"waits for counter {counter} ({name}), 1 short" in str(stalled.value)
    assert "which nobody is left to signal" in str(stalled.value)
    assert stalled.value.blocked
    for track, index, waits_for in stalled.value.blocked:
        words = loaded.track(track)[index]
        assert waits_for in (words[Word.WAIT0], words[Word.WAIT1])
    track, index, _ = stalled.value.blocked[0]
    words = loaded.track(track)[index]
    assert (
        f"{loaded.name_of(track)} task {index} ({ISA.rows[int(words[Word.OPCODE])].name}.{words[Word.LAYER]})"
        in str(stalled.value)
    )


def test_a_signal_that_is_too_small_stalls_at_a_wrapping_epoch() -> None:
    loaded = program(2, placement="round_robin")
    at = find(loaded, "o_proj", layer=1)
    decoding = batch(edited(loaded, at, SIGNAL_VALUE=0), PROMPTS, epoch=2**32 - 1)
    with pytest.raises(Stalled, match=r"oproj\.1\), 1 short"):
        decoding.step()


def test_a_dropped_signal_of_the_last_wave_stalls_the_next_step_only() -> None:
    loaded = program(2)
    decoding = batch(edited(loaded, find(loaded, "sample", GEOMETRY.layers), SIGNAL=NONE), PROMPTS)
    decoding.step()
    with pytest.raises(Stalled, match=r"embed\.0\) .*waits for counter \d+ \(sample"):
        decoding.step()


def test_a_dropped_wait_reads_poison() -> None:
    """Without its wait o_proj may run before its heads are merged: NaN reaches the logits, and is reported."""
    loaded = program(2, order="attention_first", n_sm=2)
    broken = edited(loaded, find(loaded, "o_proj", layer=0, word=Word.WAIT0), WAIT0=NONE)
    outs = [batch(broken, PROMPTS, seed=seed, interleaving="eager").step() for seed in range(6)]
    assert any(out.status[1] == Status.LOGITS | Status.ROUTER_NAN and out.tokens[1] == NO_TOKEN for out in outs)
    assert any(not out.status.any() for out in outs), "a race: not every interleaving shows it"


def test_queue_heads_that_are_not_cleared_lose_tiles() -> None:
    loaded = program(2, stealing=True)
    at = find(loaded, "route_setup", layer=1, word=Word.QUEUE)
    decoding = batch(edited(loaded, at, TILES=0), PROMPTS)
    good = batch(loaded, PROMPTS)
    for step in range(3):  # the two sets start clear
        decoding.machine.poison()
        same = np.array_equal(decoding.step().logits, good.step().logits)
        assert same == (step < 2)


def test_unknown_opcodes_are_refused() -> None:
    machine = Machine(weights(), KVCache.for_contexts(GEOMETRY, 1, 64))
    with pytest.raises(MkError, match="opcode 99 has no executor"):
        machine.load(edited(program(1), 0, OPCODE=99))


def test_inputs_that_do_not_fit() -> None:
    kv = KVCache.for_contexts(GEOMETRY, 2, 512)
    machine = Machine(weights(), kv)
    table = kv.allocator(2, 8).table
    with pytest.raises(MkError, match="no program is loaded"):
        machine.step(StepInputs([1, 2], [1, 1], table))
    machine.load(program(2, bucket=64))
    for inputs, message in (
        (StepInputs([1, 2, 3], [1, 1], table), r"tokens has shape \(3,\), the program was built for 2 rows"),
        (StepInputs([1, 2], [1], table), r"keys has shape \(1,\)"),
        (StepInputs([1, 2], [1, -1], table), r"row 1: a context of -1 keys"),
        (StepInputs([1, 2], [65, 1], table), r"row 0: a context of 65 keys does not fit 0..64"),
        (StepInputs([1, 2], [0, 3], table), r"row 1: the full layers have no page for token 2"),
        (StepInputs([1, 2], [1, 1], table, [SamplingParams()]), r"1 sampling parameters for 2 rows"),
        (StepInputs([1, 2], [1, 1], kv.allocator(3, 8).table), r"the full page table has 3 rows"),
    ):
        with pytest.raises(MkError, match=message):
            machine.step(inputs)
        machine.load(program(2, bucket=64))


def test_a_hole_inside_the_window_is_named() -> None:
    decoding = batch(program(1), [PROMPTS[0]])
    decoding.allocator.table["full"][0, 0] = -1
    with pytest.raises(MkError, match="layer 0: block 0 of the context has no page"):
        decoding.step()


def test_a_token_that_was_never_fed_back() -> None:
    kv = KVCache.for_contexts(GEOMETRY, 1, 64)
    machine = Machine(weights(), kv)
    machine.load(program(1))
    allocator = kv.allocator(1, 8)
    allocator.reserve(0, 1)
    with pytest.raises(MkError, match="row 0: token None is not in 0..292"):
        machine.step(StepInputs(None, [1], allocator.table))
    machine.load(program(1))
    with pytest.raises(MkError, match="row 0: token 293 is not in"):
        machine.step(StepInputs([293], [1], allocator.table))


@pytest.mark.parametrize("option", [{"numerics": "fp8"}, {"interleaving": "fair"}])
def test_unknown_options(option: dict[str, str]) -> None:
    with pytest.raises(MkError, match="is not one of"):
        Machine(weights(), KVCache.for_contexts(GEOMETRY, 1, 64), **option)


def with_tensor(name: str, change: torch.Tensor) -> PackedWeights:
    original = source()
    return PackedWeights.from_state(lambda n: change if n == name else original.tensor(n), GEOMETRY)


def test_nan_in_one_row_is_reported_and_stays_there() -> None:
    """A token whose embedding is NaN: its router logits count as -inf, its logits draw nothing, its neighbour's bits
    are those it has beside an inactive row."""
    table = source().tensor("model.embed_tokens.weight").clone()
    table[5] = float("nan")
    kv = KVCache.for_contexts(GEOMETRY, 2, 64)
    machine = Machine(with_tensor("model.embed_tokens.weight", table), kv)
    outs = []
    for keys in ([1, 1], [0, 1]):
        machine.load(program(2, stealing=True))
        allocator = kv.allocator(2, 8)
        for row in range(2):
            allocator.reserve(row, 1)
        outs.append(machine.step(StepInputs([5, 9], keys, allocator.table)))
    both, alone = outs
    assert both.status[0] == Status.ROUTER_NAN | Status.LOGITS and both.tokens[0] == NO_TOKEN
    for ids in both.expert_ids.values():
        assert ids[0].tolist() == list(range(GEOMETRY.top_k))  # ties of -inf: the lowest ids, always top_k of them
    # the tied head turns the NaN row into one NaN logit of every row
    assert np.array_equal(both.logits[1], alone.logits[1], equal_nan=True)
    assert both.status[1] == alone.status[1] == Status.LOGITS
