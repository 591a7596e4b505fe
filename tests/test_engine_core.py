"""The scheduler: whatever else is going on, a request gets the tokens and logprobs it would get alone."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from mk.batching.core import Core
from mk.batching.request import Phase, Request
from mk.engines.interpreted import MachineEngine
from mk.errors import MkError
from mk.graph import LAYER_WAVES
from mk.kv import KINDS
from mk.programs import Plan
from mk.sampling import SamplingParams
from tests.engine_rig import (
    EOS,
    Answer,
    assert_nothing_held,
    core,
    finish,
    interpreted,
    prompt,
    run,
    scripted,
    successor,
)
from tests.interpreter_rig import weights

WARM = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
# (prompt, max_tokens, parameters): greedy and sampled, inside and past the window of 64, with and without logprobs
REQUESTS = (
    (prompt(5, 1), 9, {}),
    (prompt(100, 2), 30, {"sampling": WARM}),
    (prompt(63, 3), 12, {"logprobs": 3}),
    (prompt(130, 4), 70, {"repetition_penalty": 1.2}),
    (prompt(33, 5), 6, {"sampling": WARM, "logprobs": 0}),
)


def answers() -> list[Answer]:
    return [Answer(tokens, count, **params) for tokens, count, params in REQUESTS]


def alone(make: object = interpreted, **policy: object) -> list[Answer]:
    """Each request by itself, on a fresh engine without a cache."""
    found = answers()
    for answer in found:
        run(core(make(rows=1), cache=False, **policy), answer)  # type: ignore[operator]
    return found


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone()


def same(found: Sequence[Answer], expected: Sequence[Answer]) -> bool:
    return [a.sampled for a in found] == [e.sampled for e in expected] and [a.finish for a in found] == [
        e.finish for e in expected
    ]


@pytest.mark.parametrize(
    "policy",
    [
        {"prefill": "pause"},
        {"prefill": "interleave", "steps_between": 3, "chunk": 50},
        {"chunk": 7, "deliver": 4},
        {"chunk": 200, "cache": False},
        {"held": 1},
    ],
    ids=["pause", "interleave", "chunks of 7", "whole prompts", "pages when they are needed"],
)
def test_neighbours_and_chunks_change_no_bit(expected: list[Answer], policy: dict) -> None:
    found = answers()
    run(core(interpreted(rows=3), **policy), *found)
    assert same(found, expected)


@pytest.mark.parametrize(
    ("policy", "between"),
    [({"prefill": "pause"}, 0), ({"prefill": "interleave", "steps_between": 1}, 1), ({"steps_between": 4}, 4)],
    ids=["pause", "one step", "four steps"],
)
def test_so_many_steps_run_between_two_chunks(policy: dict, between: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = core(scripted(rows=2), chunk=32, **policy)
    engine.submit(Answer(prompt(5, 1), 200).request)
    engine.tick()  # its prompt
    done: list[int] = []  # steps before each chunk of the other one
    whole = engine._prefill

    def chunk(request: Request) -> None:
        done.append(sum(engine.totals.steps.values()))
        whole(request)

    monkeypatch.setattr(engine, "_prefill", chunk)
    engine.submit(Answer(prompt(160, 2), 3).request)
    while len(done) < 5:
        engine.tick()
    assert [b - a for a, b in itertools.pairwise(done)] == [between] * 4


def test_arrival_and_slot_change_no_bit(expected: list[Answer]) -> None:
    found, engine = answers(), core(interpreted(rows=4, seed=3))
    for answer in reversed(found):
        engine.submit(answer.request)
        for _ in range(3):
            engine.tick()
    finish(engine)
    assert same(found, expected)


@pytest.mark.parametrize("make", [interpreted, scripted], ids=["interpreter", "scripted"])
def test_preemption_changes_no_bit(make: object) -> None:
    engine = core(make(rows=3, pages={"full": 5, "sliding": 6}))  # type: ignore[operator]
    found = answers()
    run(engine, *found)
    assert engine.totals.preemptions > 0
    assert same(found, alone(make))


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_a_run_that_is_parked_at_any_step_loses_and_repeats_none(ahead: int) -> None:
    """For somebody who interrupts, for newcomers, for a request that ends while steps beyond its end are under way."""
    for interrupt in range(1, 140, 13):
        engine = core(scripted(rows=3, ahead=ahead), cache_generated=interrupt % 2 == 0, held=1 + interrupt % 70)
        first, second, late = (
            Answer(prompt(40, 1), 150),
            Answer(prompt(30, 2), 5 + interrupt),
            Answer(prompt(70, 3), 60),
        )
        steps = iter(range(10_000))
        engine.attend = lambda: next(steps) % interrupt == interrupt - 1  # noqa: B023
        engine.submit(first.request)
        engine.submit(second.request)
        for _ in range(4):
            engine.tick()
        engine.submit(late.request)
        finish(engine)
        for answer in (first, second, late):
            cold = Answer(answer.request.prompt, answer.request.params.max_tokens)
            run(core(scripted(rows=1), cache=False), cold)
            assert answer.tokens == cold.tokens


def test_a_run_is_parked_only_for_what_can_be_done() -> None:
    """Pages come while it goes on; a request that finds no slot waits for one that ends, and nothing else is parked."""
    runs, engine = [], core(scripted(rows=2))
    resume = engine.engine.loop.resume
    engine.engine.loop.resume = lambda given: (runs.append(given), resume(given))  # type: ignore[method-assign]
    first, second, third = (Answer(prompt(20, seed), count) for seed, count in enumerate((250, 100, 60)))
    for answer in (first, second):
        engine.submit(answer.request)
    steps = itertools.count()

    def attend() -> bool:
        if next(steps) == 30:
            engine.submit(third.request)  # both slots are taken
        return False

    engine.attend = attend
    finish(engine)
    # the first alone before the second's prompt is computed, both, the first and the third, the first to its end
    assert [sum(length > 0 for length in given.keys) for given in runs] == [1, 2, 2, 1]
    assert engine.totals.steps.total() == 249 and [len(a.tokens) for a in (first, second, third)] == [250, 100, 60]


def begin(engine: Core, answer: Answer) -> None:
    """Compute its prompt."""
    engine.submit(answer.request)
    while not answer.tokens:
        engine.tick()


@pytest.mark.parametrize(
    ("blocks", "length", "count", "stands"),
    [(6, 300, 5, Phase.WAITING), (24, 300, 5, Phase.PREFILL), (24, 20, 200, Phase.DECODE)],
    ids=["waits for pages", "is in prefill", "decodes"],
)
def test_who_waits_behind_one_that_is_cancelled_during_a_run_is_next(
    blocks: int, length: int, count: int, stands: Phase
) -> None:
    """Wherever that one stands, a run that goes on without it does not go on without who could take its place."""
    engine = core(scripted(rows=2, pages={"full": blocks, "sliding": blocks}), steps_between=20, chunk=64)
    decodes, blocker, waits = Answer(prompt(70, 1), 250), Answer(prompt(length, 2), count), Answer(prompt(10, 3), 4)
    begin(engine, decodes)
    for answer in (blocker, waits):
        engine.submit(answer.request)
    seated: list[int] = []  # tokens of the one that decodes, when the waiting one has its slot

    def attend() -> bool:
        if len(decodes.tokens) == 30:
            assert (blocker.request.phase, waits.request.phase) == (stands, Phase.WAITING)
            engine.cancel(blocker.request)
        if waits.request.phase is not Phase.WAITING:
            seated.append(len(decodes.tokens))
        return False

    engine.attend = attend
    finish(engine)
    assert blocker.finish == "cancelled" and [len(a.tokens) for a in (decodes, waits)] == [250, 4]
    assert seated and seated[0] <= 31 + engine.engine.loop.ahead


def test_a_cancelled_one_that_nobody_can_take_the_place_of_parks_nothing() -> None:
    runs, engine = [], core(scripted(rows=3, pages={"full": 6, "sliding": 7}))
    resume = engine.engine.loop.resume
    engine.engine.loop.resume = lambda given: (runs.append(given), resume(given))  # type: ignore[method-assign]
    decodes, first, second = Answer(prompt(70, 1), 250), Answer(prompt(300, 2), 5), Answer(prompt(300, 3), 5)
    begin(engine, decodes)
    for answer in (first, second):
        engine.submit(answer.request)

    def attend() -> bool:
        if len(decodes.tokens) == 30:
            engine.cancel(first.request)
        return False

    engine.attend = attend
    finish(engine)
    assert [sum(length > 0 for length in given.keys) for given in runs] == [1, 1]
    assert first.finish == "cancelled" and second.finish == "length"


def test_who_is_cancelled_during_a_run_leaves_when_it_is_parked() -> None:
    engine = core(scripted(rows=3))
    leaves, stays, waits = Answer(prompt(20, 1), 200), Answer(prompt(20, 2), 200), Answer(prompt(20, 3), 200)
    for answer in (leaves, stays, waits):
        engine.submit(answer.request)
    said: dict[int, str | None] = {}

    def attend() -> bool:
        if len(stays.tokens) == 50 and leaves.finish is None and not said:
            engine.cancel(leaves.request)
            engine.cancel(leaves.request)
            said[len(leaves.tokens)] = leaves.finish
        return False

    engine.attend = attend
    finish(engine)
    (at,) = said
    assert said[at] is None and leaves.finish == "cancelled"
    assert at <= len(leaves.tokens) <= at + engine.engine.loop.ahead
    assert stays.finish == waits.finish == "length"


def test_a_hit_on_prompt_blocks_changes_no_bit(expected: list[Answer]) -> None:
    engine = core(interpreted(rows=2))
    first, again = answers(), answers()
    run(engine, *first)
    run(engine, *again)
    assert same(first, expected) and same(again, expected)
    assert [a.request.cached for a in again] == [0, 64, 0, 128, 0]
    longer = Answer(REQUESTS[3][0] + prompt(20, 9), 5)  # shares two full blocks, then goes on differently
    cold = Answer(longer.request.prompt, 5)
    run(engine, longer)
    run(core(interpreted(rows=1), cache=False), cold)
    assert longer.request.cached == 128 and longer.sampled == cold.sampled


def test_a_hit_on_generated_blocks_is_the_conversation_going_on() -> None:
    """The second turn's logits are those of decoding on: the cache holds what the steps wrote."""
    turn = prompt(60, 6)
    whole = Answer(turn, 80, logprobs=0)
    run(core(interpreted(rows=1)), whole)
    engine = core(interpreted(rows=2))
    first = Answer(turn, 69)  # its last token is never computed: 128 tokens are
    run(engine, first)
    second = Answer(turn + first.tokens, 11, logprobs=0)
    run(engine, second)
    assert second.request.cached == 128
    assert second.tokens == whole.tokens[69:]
    again = core(interpreted(rows=2))  # the same hits, beside another request: the same bits
    run(again, Answer(turn, 69))
    beside = Answer(turn + first.tokens, 11, logprobs=0)
    run(again, beside, Answer(prompt(40, 8), 20))
    assert beside.request.cached == 128 and beside.sampled == second.sampled
    off = core(interpreted(rows=2), cache_generated=False)
    run(off, first := Answer(turn, 69))
    run(off, third := Answer(turn + first.tokens, 11, logprobs=0))
    assert third.request.cached == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_was_evicted_in_part_is_replaced_as_a_whole(kind: str) -> None:
    """What is computed again takes both kinds' places: later turns do not read one kind from before, one from after."""

    def third_turn(evicted: Sequence[str]) -> Answer:
        engine = core(interpreted(rows=2))
        assert engine.cache is not None
        run(engine, first := Answer(prompt(60, 6), 69))
        for name in evicted:
            engine.cache.evict(name, 1)  # of the two blocks the last
        run(engine, second := Answer([*first.request.history(), 20, 21], 1))
        assert second.request.cached == 64
        run(engine, third := Answer([*second.request.history(), 22], 8, logprobs=0))
        assert third.request.cached == 128
        return third

    assert third_turn([kind]).sampled == third_turn(KINDS).sampled


def test_a_chain_is_evicted_from_its_end() -> None:
    engine = core(scripted(rows=1))
    assert engine.cache is not None
    run(engine, first := Answer(prompt(200, 1), 60))
    for left in (3, 2, 1, 0):
        for kind in KINDS:
            engine.cache.evict(kind, engine.cache.evictable(kind) - left)
        run(engine, again := Answer(first.request.prompt, 1))
        assert again.request.cached == 64 * left


def test_eviction_makes_room_and_keeps_what_is_shared() -> None:
    engine = core(scripted(rows=2, pages={"full": 6, "sliding": 8}))
    for seed in range(12):
        answer = Answer(prompt(150, seed), 10)
        run(engine, answer)
        cold = Answer(prompt(150, seed), 10)
        run(core(scripted(rows=1), cache=False), cold)
        assert answer.sampled == cold.sampled
    assert len(engine.cache) > 0


def test_running_requests_keep_their_blocks_while_others_come_and_go() -> None:
    shared = prompt(128, 7)
    engine = core(scripted(rows=2, pages={"full": 7, "sliding": 8}))
    run(engine, Answer(shared + [11], 2))
    keeper = Answer(shared + [12], 100)
    engine.submit(keeper.request)
    engine.tick()
    assert keeper.request.cached == 128
    for seed in range(4):
        engine.submit(Answer(prompt(140, 20 + seed), 3).request)
    finish(engine)
    cold = Answer(shared + [12], 100)
    run(core(scripted(rows=1), cache=False), cold)
    assert keeper.sampled == cold.sampled


def test_the_earliest_request_is_never_preempted() -> None:
    engine = core(scripted(rows=3, pages={"full": 5, "sliding": 6}))
    first, others = Answer(prompt(100, 1), 200), [Answer(prompt(100, s), 60) for s in (2, 3)]
    for answer in (first, *others):
        engine.submit(answer.request)
    while first.finish is None:
        engine.tick()
        assert first.request.phase is not Phase.PREEMPTED
    finish(engine)
    assert engine.totals.preemptions and all(len(answer.tokens) == 60 for answer in others)


def test_end_tokens_stop_tokens_and_their_exceptions() -> None:
    def says_end(history: Sequence[int]) -> dict[int, float]:
        return {EOS: 30.0, 50: 20.0} if len(history) >= 12 else {40: 30.0}

    cases = (
        ({}, [40, 40, EOS], "stop"),
        ({"ignore_eos": True}, [40, 40, EOS, EOS, EOS, EOS], "length"),
        ({"min_tokens": 4}, [40, 40, 50, 50, EOS], "stop"),
        ({"stop_token_ids": frozenset({40})}, [40], "stop"),
        ({"stop_token_ids": frozenset({40}), "min_tokens": 1}, None, "stop"),
        ({"logit_bias": {EOS: -100.0}}, [40, 40, 50, 50, 50, 50], "length"),
    )
    for params, tokens, why in cases:
        answer = Answer(prompt(10), 6, **params)
        run(core(scripted(says_end)), answer)
        assert answer.finish == why, params
        if tokens is not None:
            assert answer.tokens == tokens, params


def test_prompt_logprobs_are_of_every_token_and_pass_the_cache() -> None:
    engine = core(interpreted(rows=2))
    tokens = prompt(100, 8)
    run(engine, Answer(tokens, 1))
    found = Answer(tokens, 1, prompt_logprobs=2)
    run(engine, found)
    told = [d.prompt_logprobs for d in found.deliveries if d.prompt_logprobs]
    assert len(told) == 1 and len(told[0]) == 100 and told[0][0] is None and found.request.cached == 0
    for length in (1, 64, 99):  # what a shorter prompt's next token would have had
        shorter = Answer(tokens[:length], 1, logprobs=2)
        run(core(interpreted(rows=1), cache=False), shorter)
        assert told[0][length].top == shorter.sampled[0].logprobs.top


def test_cancelling_frees_at_once_wherever_a_request_stands() -> None:
    engine = core(scripted(rows=2, pages={"full": 6, "sliding": 7}))
    found = [Answer(prompt(120, s), 50) for s in range(4)]
    for answer in found:
        engine.submit(answer.request)
    for _ in range(9):
        engine.tick()
    assert {answer.request.phase for answer in found} >= {Phase.WAITING, Phase.DECODE}
    for answer in found:
        engine.cancel(answer.request)
        engine.cancel(answer.request)  # twice is no harm
        assert answer.finish == "cancelled"
    assert not engine.busy
    assert_nothing_held(engine)


def test_what_cannot_be_served_is_refused_before_the_engine_sees_it() -> None:
    engine = core(scripted())
    for tokens, count, says in (
        ([], 1, "no tokens"),
        ([-1], 1, "outside"),
        ([10_000], 1, "outside"),
        ([5] * 319, 3, "exceed"),
    ):
        with pytest.raises(MkError, match=says):
            engine.submit(Answer(tokens, count).request)
    with pytest.raises(MkError, match="a context of 320 tokens needs 5 full pages, the pool has 4"):
        core(scripted(pages={"full": 4, "sliding": 24}))


def test_a_failing_prompt_ends_alone_and_is_not_shared() -> None:
    def fails(history: Sequence[int]) -> dict[int, float]:
        if history[-1] == 99:
            raise MkError("no such thing")
        return dict(successor(history))

    engine = core(scripted(fails), chunk=200)
    bad, good = Answer([*prompt(127), 99], 3), Answer(prompt(100), 3)
    run(engine, bad, good)
    assert bad.finish == "error" and "no such thing" in bad.error
    assert good.finish == "length" and len(good.tokens) == 3
    assert len(engine.cache) == 2  # a full and a sliding page of `good`


def test_a_failed_run_keeps_nobody_in_memory() -> None:
    def breaks(history: Sequence[int]) -> dict[int, float]:
        if len(history) == 25:
            raise MkError("SM 3 gave up")
        return dict(successor(history))

    engine = core(scripted(breaks))
    answer = Answer(prompt(20), 30)
    engine.submit(answer.request)
    with contextlib.suppress(MkError):
        while True:
            engine.tick()
    engine.fail_all("SM 3 gave up")
    assert answer.finish == "error" and len(answer.tokens) == 5
    name = answer.request.id
    del answer
    gc.collect()
    assert not [kept for kept in gc.get_objects() if type(kept) is Request and kept.id == name]
    run(engine, Answer(prompt(60), 3))


def test_rows_that_are_not_finite_end_alone() -> None:
    def poisoned(history: Sequence[int]) -> dict[int, float]:
        return {7: float("nan")} if history[0] == 99 and len(history) > 6 else {40: 30.0}

    engine = core(scripted(poisoned))
    bad, good = Answer([99, 1, 2, 3, 4], 8, logprobs=0), Answer([98, 1, 2, 3, 4], 8)
    run(engine, bad, good)
    assert bad.finish == "error" and len(bad.tokens) == 2
    assert good.tokens == [40] * 8


def test_many_random_requests_leave_nothing_behind() -> None:
    """Requests of every length, a tenth cancelled, in pools that force preemption and eviction."""
    rng, moments = np.random.default_rng(3), np.random.default_rng(4)
    engine: Core = core(scripted(rows=4, pages={"full": 8, "sliding": 9}, ahead=3), deliver=2, held=4)
    found: list[Answer] = []

    def attend() -> bool:
        if moments.random() < 0.002:
            engine.cancel(found[int(moments.integers(len(found)))].request)
        return bool(moments.random() < 0.5)

    engine.attend = attend
    for number in range(120):
        base = prompt(128, int(rng.integers(3)))[: int(rng.integers(1, 128))]
        answer = Answer(base + prompt(int(rng.integers(1, 40)), 100 + number), int(rng.integers(1, 60)))
        found.append(answer)
        engine.submit(answer.request)
        for _ in range(int(rng.integers(0, 25))):
            engine.tick()
        if rng.random() < 0.1:
            engine.cancel(found[int(rng.integers(len(found)))].request)
    finish(engine)
    assert engine.totals.preemptions and engine.totals.cached_tokens
    for answer in found:
        cold = Answer(answer.request.prompt, answer.request.params.max_tokens)
        run(core(scripted(rows=1), cache=False), cold)
        assert answer.tokens == cold.tokens[: len(answer.tokens)]
        assert answer.finish == "cancelled" or answer.tokens == cold.tokens
    assert all(
        len(engine.pages.free_pages[kind]) + engine.cache.evictable(kind) == engine.pages.pages[kind] for kind in KINDS
    )


def test_prefill_in_triton_goes_on_where_decode_has_written() -> None:
    """Chunks, every position's logits, and a second turn over blocks that steps wrote, under Triton's interpreter."""
    plan, pages = Plan(4, LAYER_WAVES, "row_owner"), {"full": 8, "sliding": 8}

    def make() -> MachineEngine:
        return MachineEngine(weights(), plan, 1, 192, chunk=192, prefill="triton", pages=pages)

    tokens = prompt(10, 4)
    whole, parts = make(), make()
    every = whole.prefill(0, tokens, every=True)
    parts.prefill(0, tokens[:6])
    assert np.array_equal(parts.prefill(0, tokens[6:], 6), every[-1])
    token = int(every[-1].argmax())
    logits = [engine.step([token], [11], [SamplingParams()]).logits[0] for engine in (whole, parts)]
    assert np.array_equal(*logits)
    for pool in parts._prefill._prefill.pools.values():  # type: ignore[union-attr]
        pool.fill_(float("nan"))  # all that is left is what the decode step's pages hold
    following = [engine.prefill(0, [7, 8], 11) for engine in (whole, parts)]
    assert np.array_equal(*following) and np.isfinite(following[0]).all()
