"""Prompts that wait at the same time share chunks: the same answers, a pass over the weights for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mk.engines.interpreted import MachineEngine
from mk.errors import MkError
from mk.graph import LAYER_WAVES
from mk.kv import KINDS
from mk.programs import Plan
from mk.sampling import SamplingParams
from prefill.chunks import Prompt
from tests.engine_rig import Answer, core, finish, interpreted, prompt, run, scripted, successor
from tests.interpreter_rig import weights

Chunks = list[list[tuple[int, int]]]


def watched(engine: Any) -> Chunks:
    """(first position, tokens) of each prompt in each chunk that the engine computes from now on."""
    chunks: Chunks = []
    compute = engine.prefill_together

    def noted(prompts: Sequence[Prompt]) -> Any:
        chunks.append([(each.start, len(each.tokens)) for each in prompts])
        return compute(prompts)

    engine.prefill_together = noted
    return chunks


def test_a_chunk_is_filled_with_the_prompts_that_wait_in_their_order() -> None:
    engine = scripted(rows=3)
    chunks = watched(engine)
    answers = [Answer(prompt(length, seed), 5) for seed, length in enumerate((10, 40, 15))]
    run(core(engine, chunk=32, prefill="pause", cache=False), *answers)
    assert chunks == [[(0, 10), (0, 22)], [(22, 18), (0, 14)], [(14, 1)]]
    for answer in answers:
        alone = Answer(answer.request.prompt, 5)
        run(core(scripted(rows=1), cache=False), alone)
        assert answer.sampled == alone.sampled


def test_a_long_prompt_goes_first_and_alone() -> None:
    engine = scripted(rows=3)
    chunks = watched(engine)
    run(core(engine, chunk=32, prefill="pause", cache=False), *(Answer(prompt(n, n), 3) for n in (64, 32)))
    assert chunks == [[(0, 32)], [(32, 32)], [(0, 32)]]


def test_an_engine_that_does_not_pack_gets_one_prompt_at_a_time() -> None:
    engine = interpreted(rows=3)
    chunks = watched(engine)
    run(core(engine, chunk=32, cache=False), *(Answer(prompt(9, seed), 3) for seed in range(3)))
    assert not engine.packs and chunks == [[(0, 9)]] * 3


def test_who_wants_a_prompts_logprobs_shares_no_chunk() -> None:
    engine = scripted(rows=3)
    chunks = watched(engine)
    answers = [Answer(prompt(9, seed), 3, **({"prompt_logprobs": 0} if seed == 1 else {})) for seed in range(3)]
    run(core(engine, prefill="pause", cache=False), *answers)
    assert chunks == [[(0, 9)]] * 2  # before it and after it; its own logits are of every token
    assert len(answers[1].deliveries[0].prompt_logprobs or ()) == 9


def test_nobody_gives_way_for_the_rest_of_a_chunk() -> None:
    """Pages for the first prompt alone: the second one waits for its turn, and the decoding third keeps its pages."""
    engine = scripted(rows=3, pages={"full": 5, "sliding": 6})
    scheduler = core(engine, chunk=400, prefill="pause", cache=False)
    decoding = Answer(prompt(60, 1), 3)
    scheduler.submit(decoding.request)
    scheduler.tick()
    chunks = watched(engine)
    waiting = [Answer(prompt(100, 2), 2), Answer(prompt(190, 3), 2)]
    for answer in waiting:
        scheduler.submit(answer.request)
    scheduler.tick()
    assert chunks == [[(0, 100)]] and not scheduler.totals.preemptions
    finish(scheduler)
    assert [len(answer.tokens) for answer in (decoding, *waiting)] == [3, 2, 2]


@pytest.mark.parametrize("chunk", (32, 200, 1000))
def test_what_several_prompts_begin_with_is_computed_once(chunk: int) -> None:
    """They come at once, so none of it is in the cache when they are seated."""
    engine = scripted(rows=4, pages={"full": 40, "sliding": 40})
    chunks = watched(engine)
    begin, other = prompt(130, 1), prompt(20, 2)
    answers = [Answer(tokens, 3) for tokens in ([*begin, 11], other, [*begin, 12, 13], begin[:128])]
    scheduler = core(engine, chunk=chunk, prefill="pause")
    run(scheduler, *answers)
    computed = sum(tokens for pieces in chunks for _, tokens in pieces)
    assert computed == 131 + 20 + 4 + 64  # of the last one its last block, for its logits
    assert [answer.deliveries[0].cached_tokens for answer in answers] == [0, 0, 128, 64]
    assert scheduler.totals.cached_tokens == 128 + 64
    if chunk > 200:
        assert chunks[0] == [(0, 131), (0, 20)] and sorted(chunks[1]) == [(64, 64), (128, 4)]
    for answer in answers:
        alone = Answer(answer.request.prompt, 3)
        run(core(scripted(rows=1), cache=False), alone)
        assert answer.sampled == alone.sampled


@pytest.mark.parametrize("length", (63, 64, 65, 127, 128, 129, 256))
def test_equal_prompts_take_two_passes_at_most(length: int) -> None:
    """The block that a prompt ends with is never hit: nobody waits for it."""
    engine = scripted(rows=4, pages={"full": 60, "sliding": 60})
    chunks = watched(engine)
    answers = [Answer(prompt(length, 1), 3) for _ in range(4)]
    run(core(engine, chunk=2000, prefill="pause"), *answers)
    before = (length - 1) // 64 * 64
    again = [[(before, length - before)] * 3]
    assert chunks == ([[(0, length)], *again] if before else [[(0, length)] * 4])
    assert len({tuple(answer.tokens) for answer in answers}) == 1


def test_a_prompt_is_counted_once_however_often_it_is_seated() -> None:
    engine = scripted(rows=3, pages={"full": 5, "sliding": 6})
    scheduler = core(engine, chunk=32, prefill="interleave")
    answers = [Answer(prompt(length, length), 40) for length in (60, 190, 61)]
    for answer in answers:
        scheduler.submit(answer.request)
        scheduler.tick()
    first = scheduler.running[-1]
    scheduler._preempt(first)  # which has nothing computed, and is seated again
    finish(scheduler)
    assert scheduler.totals.prompt_tokens == 60 + 190 + 61 and scheduler.totals.preemptions


@pytest.mark.parametrize("length", (63, 64, 65, 127, 128, 129, 191))
def test_every_tokens_logits_can_be_had_wherever_a_prompt_ends(length: int) -> None:
    engine = scripted(rows=2)
    answer = Answer(prompt(length, 1), 2, prompt_logprobs=0)
    run(core(engine, chunk=200, cache=False), answer)
    assert len(answer.deliveries[0].prompt_logprobs or ()) == length and answer.finish == "length"


def test_a_prompt_waits_for_a_beginning_that_then_fails() -> None:
    def fails(history: Sequence[int]) -> dict[int, float]:
        if history[-1] == 99:
            raise MkError("no such thing")
        return dict(successor(history))

    begin = prompt(130, 1)
    bad, good = Answer([*begin, 99], 3), Answer([*begin, 98], 3)
    scheduler = core(scripted(fails, rows=2), chunk=400, prefill="pause")
    run(scheduler, bad, good)
    alone = Answer(good.request.prompt, 3)
    run(core(scripted(rows=1), cache=False), alone)
    assert bad.finish == "error" and good.sampled == alone.sampled and good.deliveries[0].cached_tokens == 0


@pytest.mark.parametrize("place", range(3))
def test_a_prompt_that_fails_ends_alone(place: int) -> None:
    def fails(history: Sequence[int]) -> dict[int, float]:
        if history[-1] == 99:
            raise MkError("no such thing")
        return dict(successor(history))

    prompts = [prompt(70, seed) for seed in range(3)]
    prompts[place][-1] = 99
    engine = scripted(fails, rows=3)
    chunks = watched(engine)
    answers = [Answer(tokens, 4) for tokens in prompts]
    run(core(engine, chunk=300, prefill="pause"), *answers)
    assert chunks == [[(0, 70)] * 3, *([[(0, 70)]] * 3)]
    assert [answer.finish for answer in answers] == ["error" if i == place else "length" for i in range(3)]
    for answer in answers:
        if answer.finish == "length":
            alone = Answer(answer.request.prompt, 4)
            run(core(scripted(rows=1), cache=False), alone)
            assert answer.sampled == alone.sampled


def test_prompts_of_one_pass_leave_the_bits_of_passes_of_their_own() -> None:
    """Triton's kernels under their interpreter: logits, pages, and the steps after them; a prompt is continued too."""
    plan, pages = Plan(4, LAYER_WAVES, "row_owner"), {"full": 8, "sliding": 8}

    def make() -> MachineEngine:
        return MachineEngine(weights(), plan, 2, 192, chunk=192, prefill="triton", pages=pages)

    first, second = prompt(9, 1), prompt(12, 2)
    packed, apart = make(), make()
    assert packed.packs
    for engine in (packed, apart):
        engine.prefill(1, second[:5])
    together = packed.prefill_together([Prompt(0, first), Prompt(1, second[5:], 5)])
    for logits, alone in zip(together, (apart.prefill(0, first), apart.prefill(1, second[5:], 5)), strict=True):
        assert np.array_equal(logits, alone)
    for kind in KINDS:
        assert np.array_equal(packed.kv.pools[kind], apart.kv.pools[kind], equal_nan=True)
    steps = [engine.step([5, 6], [10, 13], [SamplingParams()] * 2).logits for engine in (packed, apart)]
    assert np.array_equal(*steps)
