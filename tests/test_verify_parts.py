"""The verifier's parts: families of run-time data, and vector clocks against brute force."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

import mk.verify
from mk.graph import LAYER_WAVES, StepShape
from mk.isa import ISA, NONE, Buffer, Word
from mk.model.geometry import Geometry
from mk.phases import expert_tile, share
from mk.schedule.lower import Counter, Program, lower
from mk.splits import SplitPolicy
from mk.verify import VerifyError
from mk.verify.clocks import run_greedily
from mk.verify.errors import Names
from mk.verify.routing import DEFAULT_FAMILIES, ROUTED, check_contexts
from tests.happens_before import Deadlock, Order
from tests.tiny_model import tiny_geometry


def shape(n_sm: int = 4, rows: int = 2, claimers: int = 0, geometry: Geometry | None = None) -> StepShape:
    return StepShape(geometry or tiny_geometry(), rows, 300, n_sm, attention_claimers=claimers, moe_claimers=claimers)


def lowered() -> Program:
    return lower(shape(), LAYER_WAVES, "round_robin")


# ---- families ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", DEFAULT_FAMILIES, ids=lambda family: family.name)
def test_expanded_shares_are_the_tiles_of_the_phases(family: mk.verify.Family) -> None:
    """Region by region: the verifier's runs of strips are what `mk/phases.py` deals, tile by tile."""
    program = lowered()
    plan, active = program.shape, tuple(family.experts(program.shape))
    strips = {"moe_up": plan.layout.entry("up", 1).strips, "moe_down": plan.layout.entry("down", 1).strips}
    for op, buffer, pitch in (
        ("moe_up", Buffer.HIDDEN, plan.hidden_strips),
        ("moe_down", Buffer.FFN_PART, plan.strips),
    ):
        words = program.words[program.words[:, Word.OPCODE] == ISA.named(op).opcode]
        pieces = ROUTED[op, "write", buffer](plan, words, active)
        for task, descriptor in enumerate(words):
            mine = pieces.owner == pieces.member[task]
            units = [u for lo, hi in zip(pieces.lo[mine], pieces.hi[mine], strict=True) for u in range(lo, hi)]
            lo, hi = share(len(active) * strips[op], int(descriptor[Word.RANK]), int(descriptor[Word.RANKS]))
            tiles = [expert_tile(flat, active, strips[op]) for flat in range(lo, hi)]
            assert units == [expert * pitch + strip for expert, strip in tiles]


def test_families_span_the_extremes() -> None:
    plan = shape(rows=4, geometry=tiny_geometry(experts=20, top_k=3))
    sizes = {family.name: len(set(family.experts(plan))) for family in DEFAULT_FAMILIES}
    assert sizes["one row active"] == sizes["all rows on the same experts"] == 3
    assert (sizes["disjoint experts"], sizes["all experts active"], sizes["no row active"]) == (12, 20, 0)
    assert sizes["odd rows inactive"] == 6
    for family in DEFAULT_FAMILIES:
        keys = family.keys(plan)
        assert len(keys) == 4 and all(0 <= length <= plan.bucket for length in keys)
        assert list(family.experts(plan)) == sorted(family.experts(plan))


@dataclasses.dataclass(frozen=True, slots=True)
class _Short(SplitPolicy):
    """Lists one split too few for windows that straddle a split boundary."""

    def most(self, bucket: int, window: int | None) -> int:
        return -(-(window or bucket) // self.split_keys)


def test_lists_with_too_few_splits() -> None:
    plan = dataclasses.replace(shape(), splits=_Short())
    with pytest.raises(VerifyError, match=r"a context of 1\d\d keys \(window 64\) has 2 splits, .* holds 1: PARTIAL"):
        check_contexts(plan, DEFAULT_FAMILIES)


@pytest.mark.parametrize("bucket", [1, 63, 64, 65, 8192, 8193, 20_000, 262_144])
@pytest.mark.parametrize("window", [64, 4096])
def test_lists_hold_the_splits_of_every_context(bucket: int, window: int) -> None:
    plan = dataclasses.replace(shape(claimers=2, geometry=tiny_geometry(window=window)), bucket=bucket)
    check_contexts(plan, DEFAULT_FAMILIES)


# ---- clocks against brute force ---------------------------------------------------------------------------------


def _random_program(seed: int, whole_waits: bool) -> Program:
    """A few SMs whose tasks wait and signal at random: most are legal, many deadlock."""
    rng = random.Random(seed)
    n_sm, length, n_counters = 3, 6, 4
    words = lowered().words[: n_sm * length].copy()
    words[:, [Word.WAIT0, Word.WAIT1, Word.SIGNAL]] = NONE
    gains = [0] * n_counters
    for task in range(len(words)):
        if rng.random() < 0.6:
            counter, value = rng.randrange(n_counters), 1 if whole_waits else rng.randint(1, 3)
            words[task, [Word.SIGNAL, Word.SIGNAL_VALUE]] = counter, value
            gains[counter] += value
    for task in range(len(words)):
        counter = rng.randrange(n_counters)
        if rng.random() < 0.4 and gains[counter] and task % length > 1:
            count = gains[counter] if whole_waits else rng.randint(1, gains[counter])
            words[task, Word.WAIT0 : Word.WAIT0 + 3] = counter, count, gains[counter]
    counters = tuple(Counter(f"c{i}", gain) for i, gain in enumerate(gains))
    offsets = np.minimum(np.arange(2 * n_sm + 1) * length, len(words)).astype(np.int32)  # nothing aside
    return Program(shape(n_sm), words, offsets, counters, LAYER_WAVES, "random")


@pytest.mark.parametrize("whole_waits", [True, False])
def test_clocks_agree_with_brute_force(whole_waits: bool) -> None:
    """Deadlock exactly where every interleaving deadlocks; claimed orders hold, and for whole waits all are claimed.

    A wait for part of the signals may also order by what those depend on; the verifier does not look for that.
    """
    claimed = true = deadlocks = 0
    for seed in range(400):
        program = _random_program(seed, whole_waits)
        try:
            exact = np.stack(Order(program, steps=1).stopped[:3])  # [SM, task, SM]: nothing stands aside
        except Deadlock:
            deadlocks += 1
            with pytest.raises(VerifyError, match="deadlock"):
                run_greedily(program, Names(program))
            continue
        names = Names(program)
        before = run_greedily(program, names).before(np.arange(len(program.words)))
        for b in range(len(program.words)):
            for sm in range(3):
                for a in range(6):
                    if sm != names.track[b]:
                        really = exact[sm, a, names.track[b]] <= names.index[b]
                        claim = before[b, sm] >= a
                        assert really or not claim
                        claimed, true = claimed + int(claim), true + int(really)
    assert 40 < deadlocks < 360 and true > 1000
    print(f"{claimed} of {true} orders claimed, {deadlocks} of 400 programs deadlock")
    assert claimed == true if whole_waits else claimed > 0.7 * true
