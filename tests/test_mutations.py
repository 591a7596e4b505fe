"""The verifier against wrong schedules: of the mutants that matter, at least 99 % must be refused.

Whether a mutant matters is the oracle's to say: it deadlocks or has a race (`tests/happens_before.py`), or, being
determinate, computes other bits than the unmutated schedule (the interpreter, over NaN). The others are equivalent.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from mk.errors import MkError
from mk.interpreter import Machine, StepInputs
from mk.kv import KVCache
from mk.model.geometry import Geometry, rope_layers
from mk.model.packing import PackedWeights
from mk.model.random_weights import RandomWeights, sharp_qk_scale
from mk.programs import Plan
from mk.sampling import SamplingParams
from mk.schedule.lower import Program
from mk.verify import VerifyError, verify
from tests.happens_before import STEPS, Deadlock, find_race
from tests.interpreter_rig import WAVE_ORDERS
from tests.mutants import KINDS

PER_KIND = 49  # mutants of each kind, dealt over the programs
_LAYERS = (("full", "dense"), ("sliding", "sparse"), ("full", "sparse"))
_KINDS, _MLPS = zip(*_LAYERS, strict=True)

GEOMETRY = Geometry(
    hidden=48,
    layers=len(_LAYERS),
    q_heads=2,
    kv_heads=1,
    head_dim=128,
    experts=5,
    top_k=2,
    expert_ffn=24,
    dense_ffn=40,
    vocab=90,
    layer_kinds=_KINDS,
    mlp_kinds=_MLPS,
    rope=rope_layers(_KINDS, _MLPS, 1),
    window=64,
    rms_eps=1e-5,
    rope_theta=10_000.0,
    logit_scale=1.0,
    max_positions=1024,
)
BUCKET = 300
KEYS = (BUCKET - STEPS, BUCKET - STEPS + 1)  # every split of the lists is in use from the first step to the last

DEFAULT, ATTENTION_FIRST = WAVE_ORDERS["default"], WAVE_ORDERS["attention_first"]
ROUTER_FIRST = ("router", *(wave for wave in WAVE_ORDERS["interleaved"] if wave != "router"))

PROGRAMS = {
    "static, round_robin": (3, "round_robin", 0, 0, DEFAULT),
    "static, round_robin, draws": (3, "round_robin", 0, 0, DEFAULT),
    "some claim, row_owner, draws": (4, "row_owner", 1, 2, DEFAULT),
    "static, dependency_affinity": (4, "dependency_affinity", 0, 0, ATTENTION_FIRST),
    "static, row_owner": (3, "row_owner", 0, 0, DEFAULT),
    "more strips than SMs": (2, "row_owner", 0, 2, ATTENTION_FIRST),
    "all claim, round_robin": (3, "round_robin", 3, 3, ROUTER_FIRST),
    "some claim, dependency_affinity": (4, "dependency_affinity", 2, 1, DEFAULT),
    "some claim, row_owner": (4, "row_owner", 1, 2, ROUTER_FIRST),
    "one claims, more SMs than strips": (6, "row_owner", 1, 1, DEFAULT),
}


@cache
def program(name: str) -> Program:
    n_sm, placement, attention, moe, order = PROGRAMS[name]
    plan = Plan(n_sm, order, placement, attention, moe)
    return plan.lower(GEOMETRY, len(KEYS), BUCKET, draws=name.endswith("draws"))


@cache
def weights() -> PackedWeights:
    std = 0.1
    source = RandomWeights(GEOMETRY, seed=3, std=std, qk_scale=sharp_qk_scale(GEOMETRY, std=std))
    return PackedWeights.from_state(source.tensor, GEOMETRY)


def decode(loaded: Program, starve: int | None = None, seed: int = 0) -> bytes:
    """Logits and tokens of the steps, as bytes. `starve`: that track runs only when no other can."""
    blocks = -(-BUCKET // 64)
    kv = KVCache(GEOMETRY, len(KEYS) * blocks, len(KEYS) * blocks)
    allocator = kv.allocator(len(KEYS), blocks, seed=1)
    history = np.random.default_rng(5)
    for row, keys in enumerate(KEYS):
        allocator.reserve(row, keys - 1)
        for layer in range(GEOMETRY.layers):
            k, v = history.standard_normal((2, keys - 1, GEOMETRY.kv_heads, 128), np.float32)
            kv.write(allocator.table, row, layer, 0, k, v)
        allocator.reserve(row, keys + STEPS - 1)
    machine = Machine(weights(), kv, seed=seed)
    if starve is not None:
        machine.pick = lambda runnable: next((i for i, at in enumerate(runnable) if at.track != starve), 0)
    machine.load(loaded)
    sampling = [SamplingParams(1.0, 30, 0.9, seed=2), SamplingParams()] if loaded.shape.draws else None
    outputs = machine.run(StepInputs([7, 60], np.array(KEYS), allocator.table, sampling), STEPS)
    return b"".join(out.logits.tobytes() + out.tokens.tobytes() for out in outputs)


def result(loaded: Program, starve: int | None = None, seed: int = 0) -> bytes | str:
    """`decode`, with whatever stops the machine as the result."""
    try:
        return decode(loaded, starve, seed)
    except (MkError, ValueError, IndexError, KeyError, TypeError, StopIteration) as stopped:
        return f"{type(stopped).__name__}: {stopped}"


def race(loaded: Program) -> str | None:
    """Deadlock or race, if any; under routings that use few experts and all of them."""
    try:
        for active in ((1, 3), tuple(range(GEOMETRY.experts))):
            found = find_race(loaded, active)
            if found:
                return f"race: {found}"
    except Deadlock as deadlock:
        return f"deadlock: {deadlock}"
    except (IndexError, ZeroDivisionError, KeyError, ValueError) as broken:
        return f"broken: {broken!r}"
    return None


def refusal(loaded: Program) -> str | None:
    try:
        verify(loaded)
    except VerifyError as error:
        return str(error)
    return None


@cache
def expected(name: str) -> bytes:
    return decode(program(name))


@pytest.mark.parametrize("name", PROGRAMS)
def test_verifier_and_oracle_accept_what_lowering_makes(name: str) -> None:
    assert refusal(program(name)) is None
    assert race(program(name)) is None
    for starve in range(program(name).tracks):
        assert decode(program(name), starve) == expected(name)


def test_kill_rate(figure: Callable[[str], None]) -> None:
    table: dict[str, Counter[str]] = {}
    survivors, start = [], time.perf_counter()
    for kind, mutate in KINDS.items():
        counts = table[kind] = Counter()
        rng = random.Random(kind)
        for attempt in range(PER_KIND):
            name = list(PROGRAMS)[attempt % len(PROGRAMS)]
            mutant = mutate(program(name), rng)
            if mutant is None:
                continue
            refused = refusal(mutant)
            matters = race(mutant) or (result(mutant) != expected(name) and "other bits")
            counts["refused" if refused else "accepted", bool(matters)] += 1
            if matters and not refused:
                survivors.append(f"{kind} of {name}: {matters}")

    figure(f"{'mutants of the task list':34s} mutants killed survived | equivalent: accepted refused")
    total: Counter[object] = Counter()
    for kind, counts in table.items():
        total += counts
        figure(_line(kind, counts))
    figure(_line("all", total))
    killed, survived = total["refused", True], total["accepted", True]
    rate = killed / (killed + survived)
    figure(f"kill rate {100 * rate:.2f} %, {time.perf_counter() - start:.1f} s")
    assert rate >= 0.99, "\n".join(survivors)
    for kind, counts in table.items():
        assert counts["refused", True] >= 3, f"too few mutants of kind {kind!r} that matter"


def test_oracle_and_hostile_interleavings_agree(figure: Callable[[str], None]) -> None:
    """A race or deadlock that the oracle sees shows in the bits of some interleaving that starves one track, or of a
    random one: a starved claimer draws no ticket. None shows in a program that the oracle finds determinate. Not of
    programs that draw: half a histogram may give the same token.
    """
    plain = [name for name in PROGRAMS if not name.endswith("draws")]
    shown = racing = determinate = 0
    for kind in ("wait dropped", "signal dropped, books balanced", "signal early", "neighbours swapped"):
        rng = random.Random(f"hostile {kind}")
        for attempt in range(14):
            name = plain[attempt % len(plain)]
            mutant = KINDS[kind](program(name), rng)
            if mutant is None:
                continue
            results = {result(mutant, starve) for starve in (None, *range(mutant.tracks))}
            if results == {expected(name)}:
                results.update(result(mutant, seed=seed) for seed in range(1, 13))
            if race(mutant):
                racing += 1
                shown += results != {expected(name)}
            else:
                determinate += 1
                assert len(results) == 1, f"{kind} of {name}"
    figure(f"{shown} of {racing} races and deadlocks change bits; {determinate} determinate mutants never do")
    assert determinate >= 5 and racing >= 20
    assert shown >= 0.9 * racing


def _line(kind: str, counts: Counter) -> str:
    cells = (sum(counts.values()), *(counts[key] for key in (("refused", True), ("accepted", True))))
    equivalent = (counts["accepted", False], counts["refused", False])
    return f"{kind:34s} {cells[0]:7d} {cells[1]:6d} {cells[2]:8d} | {equivalent[0]:20d} {equivalent[1]:7d}"
