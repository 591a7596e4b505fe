"""The verifier's verdicts on regions and words: reads before writes, early overwrites, wrong coordinates."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import mk.schedule.lower
import mk.verify
from mk.isa import ISA, NONE, Buffer, Word
from mk.schedule.lower import Counter, lower
from mk.verify import verify
from tests.happens_before import find_race
from tests.verify_rig import ORDER, edited, find, lowered, place, refusal, shape


@pytest.mark.parametrize(
    ("op", "buffer", "counter"),
    [
        ("attention", "QKV", "qkv.2"),
        ("attn_combine", "PARTIAL", "attn.2"),
        ("moe_down", "HIDDEN", "moe_up.2"),
        ("moe_combine", "FFN_PART", "moe_down.2"),
        ("lm_head", "X1", "rmsnorm.4"),
    ],
)
def test_a_read_before_its_write(op: str, buffer: str, counter: str) -> None:
    program = lowered()
    layer = 5 if op == "lm_head" else 2
    at = find(program, op, layer, Word.WAIT0)
    said = refusal(edited(program, at, WAIT0=NONE, WAIT0_COUNT=0, WAIT0_STEP=0), "read")
    assert f"{place(program, at)} ({op}.{layer}) may read {buffer}" in said
    assert f"counter {counter} tells of it" in said


def test_a_wait_orders_only_after_signals_it_cannot_do_without() -> None:
    program = lowered()
    at = find(program, "attn_combine", 2, Word.WAIT0)
    count = int(program.words[at, Word.WAIT0_COUNT])
    said = refusal(edited(program, at, WAIT0_COUNT=count - 1), "read")
    assert "PARTIAL" in said and "attn.2" in said
    # worth two from each SM: without any one of them the sum stays below the target all the same
    counter, words = int(program.words[at, Word.WAIT0]), program.words.copy()
    words[words[:, Word.SIGNAL] == counter, Word.SIGNAL_VALUE] = 2
    for slot in (Word.WAIT0, Word.WAIT1):
        words[words[:, slot] == counter, slot + 1 : slot + 3] = 2 * count - 1, 2 * count
    counters = [Counter(c.name, c.per_step * (1 + (i == counter))) for i, c in enumerate(program.counters)]
    verify(dataclasses.replace(program, words=words, counters=tuple(counters)))


def test_a_wait_that_program_order_makes_needless() -> None:
    """Whoever knows all of an SM's O-proj to be done knows what stood before it in that SM's main track."""
    program = lowered()
    words = program.words
    residual = words[(words[:, Word.OPCODE] == ISA.named("residual").opcode) & (words[:, Word.LAYER] == 2)]
    waiting = residual[residual[:, Word.WAIT0] != NONE]
    assert {program.counters[counter].name for counter in waiting[:, Word.WAIT0]} == {"oproj.2"}
    assert len(waiting) and (residual[:, Word.WAIT1] == NONE).all()
    assert find_race(program, active=(0, 1, 2)) is None


def test_what_stands_aside_is_known_through_its_counter_alone() -> None:
    """O-proj stands behind the merge of the heads on the same SMs, and yet must wait for it."""
    program = lowered()
    words, merges = program.words, program.words[:, Word.OPCODE] == ISA.named("attn_combine").opcode
    assert (program.track_of[merges] >= program.shape.n_sm).all() and (program.track_of[~merges] < 4).all()
    at = find(program, "o_proj", 2, Word.WAIT0)
    assert program.counters[words[at, Word.WAIT0]].name == "attn_combine.2"
    said = refusal(edited(program, at, WAIT0=NONE, WAIT0_COUNT=0, WAIT0_STEP=0), "read")
    assert "may read ATTN_OUT" in said and "aside" in said and "counter attn_combine.2 tells of it" in said


def test_an_operation_in_the_wrong_track() -> None:
    program = lowered()
    tracks = [program.track(track) for track in range(program.tracks)]
    tracks[0], tracks[4] = np.concatenate([tracks[0], tracks[4][:1]]), tracks[4][1:]
    offsets = np.cumsum([0, *(len(tasks) for tasks in tracks)]).astype(np.int32)
    moved = dataclasses.replace(program, words=np.concatenate(tracks), offsets=offsets)
    assert "does not stand in its SM's second track" in refusal(moved, "word")


def test_copies_that_nobody_waits_for_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A top-k on an SM that uses no route may still be reading when the next layer's router writes."""
    monkeypatch.setattr(mk.schedule.lower, "_drop_unread", lambda waves: None)
    program = lower(shape(n_sm=20, rows=1, own_rows=True, claimers=1), ORDER, "row_owner")
    said = refusal(program, "overwrite")
    assert "may overwrite ROUTER_PART before" in said and "(topk." in said and "(router." in said
    assert "counter" in said
    race = find_race(program, active=(0, 1, 2))
    assert race is not None and "router" in race


@pytest.mark.parametrize(
    ("op", "change", "kind", "names"),
    [
        ("o_proj", {"DST": Buffer.FFN_OUT}, "read", ("OPROJ_OUT strip", "which no task writes", "oproj.2")),
        ("dense_down", {"DST": Buffer.OPROJ_OUT}, "overlap", ("OPROJ_OUT strip", "o_proj.0", "dense_down.0")),
        ("residual", {"SRC": Buffer.ACC_ATTN}, "read", ("ACC_ATTN strip", "no task before it on this SM")),
        ("attention", {"SPLIT": 1}, "overlap", ("PARTIAL row 1 KV head 0 split 1", "attention.2")),
        ("attn_combine", {"HEAD": 3}, "overlap", ("ATTN_OUT row 0 head 3", "attn_combine.2")),
        ("moe_up", {"RANK": 1}, "overlap", ("HIDDEN expert", "moe_up.2", "one row active")),
        ("qkv", {"LAYER": 3}, "read", ("X1 strip", "qkv.3", "residual.2")),
        ("lm_head", {"TILE": 400}, "word", ("LOGITS", "outside")),
    ],
)
def test_regions_alone_catch_wrong_coordinates(
    op: str, change: dict[str, int], kind: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the checks of words: the hazard itself is found, and its buffer named."""
    monkeypatch.setattr(mk.verify, "check_words", lambda program, names: None)
    program = lowered()
    at = find(program, op, {"lm_head": 5, "dense_down": 0}.get(op, 2))
    said = refusal(edited(program, at, **{name: int(value) for name, value in change.items()}), kind)
    for name in names:
        assert name in said, said


@pytest.mark.parametrize(
    ("op", "change", "what"),
    [
        ("qkv", {"WEIGHT": 0}, "WEIGHT"),
        ("qkv", {"TILE": 1}, "computed twice"),
        ("qkv", {"STRIP_PITCH": 2}, "STRIP_PITCH"),
        ("o_proj", {"K_SLOTS": 1}, "K_SLOTS"),
        ("o_proj", {"DST": Buffer.FFN_OUT}, "DST is FFN_OUT, not OPROJ_OUT"),
        ("residual", {"SRC": Buffer.FFN_OUT}, "SRC is FFN_OUT, not OPROJ_OUT"),
        ("moe_up", {"EXPERT_PITCH": 1}, "EXPERT_PITCH"),
        ("moe_up", {"RANK": 1}, "computed twice"),
        ("moe_down", {"TILES": 1}, "TILES"),
        ("attention", {"HEAD": 2}, "HEAD is 2"),
        ("attention", {"SPLIT": 9}, "SPLIT is 9"),
        ("attention", {"FLAGS": 0}, "FLAGS"),
        ("attn_combine", {"ROW": 2}, "ROW is 2"),
        ("topk", {"FLAGS": 4}, "publish ROUTE"),
        ("router", {"ROWS": 3}, "ROWS"),
        ("router", {"OPCODE": 99}, "opcode 99"),
        ("router", {"LAYER": 0}, "a layer that has router"),
    ],
)
def test_wrong_words(op: str, change: dict[str, int], what: str) -> None:
    program = lowered()
    at = find(program, op, 2)
    if op == "topk":  # the second task that publishes
        at = next(t for t in range(at, len(program.words)) if program.words[t, Word.OPCODE] == 7)
        publishing = program.words[:, Word.FLAGS] == 4
        if publishing[at]:
            change = {"FLAGS": 0}
    said = refusal(edited(program, at, **{name: int(value) for name, value in change.items()}), "word")
    assert what in said, said


def test_lists_that_are_not_the_descriptors() -> None:
    program = lowered()
    for offsets in (program.offsets[:-1], program.offsets + 1, program.offsets[::-1].copy()):
        assert "8 tracks, two an SM" in refusal(dataclasses.replace(program, offsets=offsets), "word")
    assert "shape" in refusal(dataclasses.replace(program, words=program.words[:, :31]), "word")
