"""The verifier's verdicts one by one: what it refuses, and that it names task, counter and buffer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mk.isa import ISA, NONE, Word
from mk.programs import Plan
from mk.ring import ENTRIES
from mk.schedule.lower import Counter, lower
from mk.verify import verify
from mk.verify.errors import Names
from mk.verify.routing import DEFAULT_FAMILIES
from tests.happens_before import find_race
from tests.tiny_model import tiny_geometry
from tests.verify_rig import ORDER, edited, find, lowered, place, refusal, shape

# ---- what it accepts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["round_robin", "dependency_affinity", "row_owner"])
@pytest.mark.parametrize("claimers", [0, 1, 4])
def test_lowered_steps_pass_and_are_counted(placement: str, claimers: int) -> None:
    program = lowered(placement, claimers)
    report = verify(program)
    assert report.tasks == len(program.words) == program.offsets[-1]
    assert report.counters == len(program.counters)
    assert report.signals == sum(counter.per_step for counter in program.counters)
    assert report.families == tuple(family.name for family in DEFAULT_FAMILIES)


def test_a_model_without_experts() -> None:
    dense = tiny_geometry(mlp_kinds=("dense",) * 5, experts=0, top_k=0, expert_ffn=0)
    for placement in ("round_robin", "row_owner"):
        plan = shape(own_rows=placement == "row_owner", claimers=2, geometry=dense)
        assert verify(lower(plan, ORDER, placement)).tasks


@pytest.mark.parametrize("n_sm", [2, 9, 40, 132])
@pytest.mark.parametrize("claimers", [1, 2])
def test_more_sms_than_work(n_sm: int, claimers: int) -> None:
    """Few strips, few words: some SMs have one task or none, and still no step overtakes another."""
    for placement in ("round_robin", "row_owner"):
        verify(lowered(placement, claimers, n_sm, vocab=50))


def test_no_tickets_without_a_clear_on_a_dense_layer() -> None:
    """Attention claimers draw tickets on dense layers too, so these need their clear."""
    program = lowered(claimers=2)
    assert program.words[find(program, "attn_drain", 0), Word.QUEUE] == 0
    at = find(program, "route_setup", 0)
    fewer = dataclasses.replace(
        program,
        words=np.delete(program.words, at, axis=0),
        offsets=program.offsets - (np.arange(len(program.offsets)) > program.track_of[at]).astype(np.int32),
    )
    said = refusal(fewer, "queue")
    assert "attn_drain.0" in said and "QUEUES queue 0" in said


def test_router_parts_are_not_joined_across_a_hole() -> None:
    """With as many SMs as k slots an SM gets the same k slot of every strip: neighbours, but not one region."""
    program = lowered(hidden=512, experts=40, n_sm=2)
    assert verify(program).tasks == len(program.words)
    routers = program.words[program.words[:, Word.OPCODE] == ISA.named("router").opcode]
    assert (routers[:, Word.TILES] == 1).all() and (routers[:, Word.K_SLOTS] == 1).all()
    at = find(program, "router", 2)
    said = refusal(edited(program, at, TILES=2), "word")
    assert place(program, at) in said and "whole k" in said


# ---- deadlocks --------------------------------------------------------------------------------------------------


def test_a_wave_before_its_input_deadlocks() -> None:
    order = tuple(wave for wave in ORDER if wave != "oproj")
    order = (*order[: order.index("attn")], "oproj", *order[order.index("attn") :])
    said = refusal(lower(shape(), order, "round_robin"), "deadlock")
    assert "deadlock" in said and "ATTN_OUT" in said
    assert "(o_proj.0) waits for counter attn_combine.0" in said and "(attn_combine.0) would signal it" in said


def test_a_deadlock_walks_from_sm_to_sm() -> None:
    program = lowered()
    names, signal = Names(program), find(program, "embed", 0, Word.SIGNAL)
    late = [c.name for c in program.counters].index("rmsnorm.0")
    gain = program.counters[late].per_step
    said = refusal(edited(program, signal, WAIT0=late, WAIT0_COUNT=gain, WAIT0_STEP=gain), "deadlock")
    assert f"{names.task(signal)} waits for counter rmsnorm.0 (0 of {gain} arrived)" in said
    assert "and so back to SM" in said


@pytest.mark.parametrize("op", ["moe_up", "moe_down_owned", "moe_up_drain"])
def test_a_phase_before_its_topk_blocks_the_ring(op: str) -> None:
    program = lowered("row_owner", claimers=4 if op == "moe_up_drain" else 0)
    words = program.words.copy()
    at = find(program, op, 2)
    topk = next(t for t in range(at, 0, -1) if words[t, Word.OPCODE] == ISA.named("topk").opcode)
    words[[topk, at]] = words[[at, topk]]
    said = refusal(dataclasses.replace(program, words=words), "ring")
    assert place(program, topk) in said and "weight ring" in said and "ROUTE" in said and f"{op}.2" in said


# ---- arrivals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "change", "what"),
    [
        ("qkv", {"SIGNAL": NONE}, "a step signals 3"),
        ("o_proj", {"SIGNAL_VALUE": 2}, "a step signals 5"),
        ("o_proj", {"SIGNAL_VALUE": 0}, "counters only grow"),
        ("moe_up", {"SIGNAL": 10_000}, "signals counter 10000"),
    ],
)
def test_arrivals_that_differ_from_targets(op: str, change: dict[str, int], what: str) -> None:
    program = lowered()
    at = find(program, op, 1, Word.SIGNAL)
    said = refusal(edited(program, at, **change), "arrivals")
    assert what in said and ("counter" in said)
    if "SIGNAL" not in change:
        assert program.counters[program.words[at, Word.SIGNAL]].name in said


@pytest.mark.parametrize("change", [{"WAIT0_COUNT": 5}, {"WAIT0_COUNT": -1}, {"WAIT0_STEP": 3}, {"WAIT0": 999}])
def test_targets_out_of_reach(change: dict[str, int]) -> None:
    program = lowered()
    at = find(program, "attn_combine", 1, Word.WAIT0)
    said = refusal(edited(program, at, **change), "arrivals")
    assert place(program, at) in said and ("attn.1" in said or "counter 999" in said)


def test_a_counter_that_would_wrap_within_a_step() -> None:
    program = lowered()
    at = find(program, "qkv", 1, Word.SIGNAL)
    counter, words = int(program.words[at, Word.SIGNAL]), program.words.copy()
    words[at, Word.SIGNAL_VALUE] = 2**30
    counters = list(program.counters)
    counters[counter] = Counter("qkv.1", 2**30 + 3)
    for slot in (Word.WAIT0, Word.WAIT1):
        waiting = words[:, slot] == counter
        words[waiting, slot + 1] = words[waiting, slot + 2] = 2**30 + 3
    assert "wraps" in refusal(dataclasses.replace(program, words=words, counters=tuple(counters)), "arrivals")


# ---- steps and queues -------------------------------------------------------------------------------------------


def test_a_step_that_does_not_wait_for_the_last_one() -> None:
    program = lowered()
    at = int(program.offsets[1])  # SM 0 draws the tokens itself: program order closes its steps
    assert program.sm_of[find(program, "sample", 5)] == 0
    verify(edited(program, 0, WAIT0=NONE, WAIT0_COUNT=0, WAIT0_STEP=0))
    said = refusal(edited(program, at, WAIT0=NONE, WAIT0_COUNT=0, WAIT0_STEP=0), "step")
    assert f"{place(program, at)} (embed.0)" in said and "TOKENS" in said and "counter sample.5" in said
    assert find_race(edited(program, at, WAIT0=NONE), active=(0, 1, 2)) is not None


def test_a_step_that_ends_before_an_sm_is_done() -> None:
    program = lowered()
    at = find(program, "sample", 5)
    said = refusal(edited(program, at, WAIT0=NONE, WAIT0_COUNT=0, WAIT0_STEP=0), "step")
    assert "(sample.5) may write TOKENS before" in said and "counter lm_head.5" in said


@pytest.mark.parametrize("op", ["attn_drain", "moe_up_drain", "moe_down_drain"])
def test_tickets_from_another_queue(op: str) -> None:
    program = lowered(claimers=3)
    at = find(program, op, 2)
    said = refusal(edited(program, at, QUEUE=1 + int(program.words[at, Word.QUEUE])), "word")
    assert place(program, at) in said and "QUEUE" in said


@pytest.mark.parametrize("op", ["attn_drain", "moe_up_drain", "moe_down_drain"])
def test_a_claimer_looks_back_no_further_than_the_task_ring(op: str) -> None:
    program = lowered(claimers=3)
    at = find(program, op, 2)
    for ahead in (1, ENTRIES):
        verify(edited(program, at, CLAIM_AHEAD=ahead))
    for ahead in (0, ENTRIES + 1, 2**31 - 1):
        said = refusal(edited(program, at, CLAIM_AHEAD=ahead), "word")
        assert place(program, at) in said and f"CLAIM_AHEAD is {ahead}, not in 1..{ENTRIES}" in said


def test_a_clear_of_another_layers_queues() -> None:
    program = lowered(claimers=3)
    at = find(program, "route_setup", 2)
    said = refusal(edited(program, at, QUEUE=9), "queue")
    assert "cleared twice" in said and "QUEUES queue 9" in said


@pytest.mark.parametrize("placement", ["row_owner", "round_robin", "dependency_affinity"])
@pytest.mark.parametrize("n_sm", [4, 5, 9, 40])
def test_a_slice_of_the_vocabulary_stays_on_its_sm(placement: str, n_sm: int) -> None:
    """Also where there are fewer slices than SMs: what the first wave finds, the second takes from the same SM."""
    plan = Plan(n_sm, ORDER, placement)
    program = plan.lower(tiny_geometry(), 2, 300, draws=True)
    verify(program)
    where = [
        program.track_of[program.words[:, Word.OPCODE] == ISA.named(op).opcode] for op in ("histogram", "shortlist")
    ]
    assert len(where[0]) and (where[0] == where[1]).all()


def test_a_slice_on_another_sm_is_refused() -> None:
    program = Plan(5, ORDER, "row_owner").lower(tiny_geometry(), 2, 300, draws=True)
    one, other = np.flatnonzero(program.words[:, Word.OPCODE] == ISA.named("shortlist").opcode)[:2]
    words = program.words.copy()
    moved = [Word.RANK, Word.TILE, Word.TILES]
    words[np.ix_([one, other], moved)] = words[np.ix_([other, one], moved)]
    said = refusal(dataclasses.replace(program, words=words), "word")
    assert "does not stand where its slice's histogram does" in said
