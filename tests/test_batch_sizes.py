"""The batch size follows the requests that decode: slots are exchanged, programs change, and no bit does."""

from __future__ import annotations

from typing import Any

import pytest

from mk.batching.core import Core
from mk.batching.request import Phase
from mk.compose import load_config
from mk.errors import MkError
from mk.graph import LAYER_WAVES
from mk.programs import Plan, programs_by_size
from mk.sampling import SamplingParams
from tests.engine_rig import Answer, core, every_size, finish, interpreted, prompt, run, scripted
from tests.interpreter_rig import GEOMETRY

WARM = SamplingParams(temperature=1.0, top_p=0.9, seed=5)


class Watched:
    """An engine whose steps and runs are noted: (rows of the batch, active ones)."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.steps: list[tuple[int, int]] = []
        resume = engine.loop.resume
        engine.loop.resume = lambda run: (self._note(run.keys), resume(run))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, tokens: Any, keys: Any, *args: Any, **more: Any) -> Any:
        self._note(keys)
        return self._engine.step(tokens, keys, *args, **more)

    def _note(self, keys: Any) -> None:
        self.steps.append((len(keys), sum(length > 0 for length in keys)))


def answers() -> list[Answer]:
    """Requests that come to an end one after the other, some of which are sampled or need logits."""
    return [
        Answer(prompt(5, 1), 9),
        Answer(prompt(100, 2), 60, sampling=WARM),
        Answer(prompt(63, 3), 22, logprobs=3),
        Answer(prompt(130, 4), 90),
        Answer(prompt(33, 5), 6, sampling=WARM, logprobs=0),
        Answer(prompt(40, 6), 45),
        Answer(prompt(20, 7), 30),
    ]


def alone(make: Any) -> list[Answer]:
    found = answers()
    for answer in found:
        run(core(make(rows=1), cache=False), answer)
    return found


@pytest.mark.parametrize("policy", [{}, {"held": 1, "prefill": "pause"}, {"steps_between": 2, "chunk": 50}])
@pytest.mark.parametrize("make", [interpreted, scripted], ids=["interpreter", "scripted"])
def test_the_smallest_batch_that_suffices_is_taken_and_no_bit_changes(make: Any, policy: dict[str, Any]) -> None:
    engine = Watched(make(rows=7, pages={"full": 40, "sliding": 40}))
    assert engine.sizes == (1, 2, 4, 7)
    found, scheduler = answers(), core(engine, **policy)
    run(scheduler, *found)
    assert {rows for rows, _ in engine.steps} == {1, 2, 4, 7}
    assert all(rows == min(size for size in engine.sizes if size >= active) for rows, active in engine.steps)
    assert set(scheduler.totals.steps) == {1, 2, 4, 7}
    assert [(a.sampled, a.finish) for a in found] == [(e.sampled, e.finish) for e in alone(make)]


def test_preemption_and_sizes_go_together() -> None:
    engine = core(interpreted(rows=4, pages={"full": 5, "sliding": 6}))
    found = answers()
    run(engine, *found)
    assert engine.totals.preemptions and len(engine.totals.steps) > 1
    assert [a.sampled for a in found] == [e.sampled for e in alone(interpreted)]


def test_a_prompt_in_the_first_slot_makes_way_for_one_that_decodes() -> None:
    engine: Core = core(interpreted(rows=2), steps_between=2, cache=False)
    short, long, late = Answer(prompt(5, 1), 4), Answer(prompt(6, 2), 30), Answer(prompt(200, 3), 3)
    for answer in (short, long, late):
        engine.submit(answer.request)
    while short.finish is None:
        engine.tick()
    assert (long.request.slot, late.request.phase) == (1, Phase.WAITING)  # and slot 0 is free
    engine.totals.steps.clear()
    engine.tick()
    while late.request.phase is Phase.PREFILL:
        engine.tick()
    assert (long.request.slot, late.request.slot) == (0, 1) and set(engine.totals.steps) == {1}
    finish(engine)
    for answer in (long, late):
        cold = Answer(answer.request.prompt, answer.request.params.max_tokens)
        run(core(interpreted(rows=1), cache=False), cold)
        assert answer.tokens == cold.tokens


def test_sizes_of_a_configuration() -> None:
    assert every_size(6) == [1, 2, 4, 6] and every_size(1) == [1]
    assert load_config(["server.slots=3", "server.batches=[2,4,1]"]).server.sizes == (1, 2, 3)
    assert load_config(["server.batches=[]"]).server.sizes == (8,)
    with pytest.raises(MkError, match=r"server.batches"):
        load_config(["server.batches=[0]"])
    plan = Plan(4, LAYER_WAVES, "row_owner")
    made = programs_by_size(GEOMETRY, (1, 3), plan)
    assert {size: made[size].get(256).shape.rows for size in made} == {1: 1, 3: 3}
    assert made[3].fit(made[1].get(512), 10, False) is made[3].get(512)  # a bucket that was needed stays
    for sizes in ((), (2, 1), (1, 1), (0, 1)):
        with pytest.raises(MkError, match="must ascend"):
            programs_by_size(GEOMETRY, sizes, plan)
