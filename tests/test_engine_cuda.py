"""Continuous batching over the decode kernel's engine: over a stand-in for the card, and on a card."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mk.decode_loop import Parked, Run, TwinLoop
from mk.decode_loop import finish as finish_run
from mk.engines.cuda import CudaEngine
from mk.errors import MkError
from mk.graph import LAYER_WAVES
from mk.isa import Word
from mk.kernel.build import build
from mk.kernel.runtime import StepAborted
from mk.programs import Plan
from mk.sampling import SamplingParams
from mk.splits import SplitPolicy
from tests.device_rig import FakeLibrary, fake_build, fake_device, next_logits
from tests.engine_rig import CONTEXT, Answer, core, every_size, finish, prompt, run
from tests.interpreter_rig import GEOMETRY, NANO_GEOMETRY, weights
from tests.test_kernel_gpu import broken, drop_signal

__all__ = ["fake_device"]

SPLITS = SplitPolicy(128, 4)
PAGES = {"full": 24, "sliding": 24}
WARM = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
REQUESTS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    # tokens of the prompt, of the answer, parameters
    (5, 90, {}),
    (100, 30, {"sampling": WARM}),
    (63, 12, {"logprobs": 3}),
    (130, 70, {"sampling": WARM, "repetition_penalty": 1.2}),
    (200, 40, {"logprobs": 0, "min_p": 0.1, "sampling": WARM}),
)


def answers() -> list[Answer]:
    return [Answer(prompt(length, seed), count, **more) for seed, (length, count, more) in enumerate(REQUESTS)]


def stand_in(device: FakeLibrary, rows: int, pages: dict[str, int]) -> CudaEngine:
    plan = Plan(6, LAYER_WAVES, "row_owner", splits=SPLITS)
    library = fake_build(GEOMETRY, SPLITS)
    made = CudaEngine(
        weights(), library, plan, rows, CONTEXT, chunk=32, device="cpu", pages=pages, sizes=every_size(rows)
    )
    device.runtime = made.runtime
    return made


def test_greedy_tokens_of_a_run_are_the_kernels_in_any_company(fake_device: FakeLibrary) -> None:
    """The stand-in's logits follow from a row's last token and context, so a row that is fed wrongly shows."""
    found = [Answer(prompt(length, seed), count) for seed, (length, count) in enumerate(((5, 60), (100, 33), (70, 48)))]
    engine = core(stand_in(fake_device, 2, PAGES))
    for answer in found:
        engine.submit(answer.request)
        engine.tick()
    finish(engine)
    for answer in found:
        context, token = len(answer.request.prompt) + 1, answer.tokens[0]
        for following in answer.tokens[1:]:
            token = int(next_logits(GEOMETRY, token, context).argmax())
            assert token == following
            context += 1


def test_pages_go_to_the_host_and_back_bit_for_bit(fake_device: FakeLibrary) -> None:
    engine = stand_in(fake_device, 2, PAGES)
    engine.prefill(0, prompt(100))
    held = [int(page) for page in engine.pages.table["full"][0] if page >= 0]
    before = engine.runtime["pool_full"][held].clone()
    saved = engine.copy_out("full", held)
    engine.runtime["pool_full"][held] = 0
    engine.copy_in("full", held, saved)
    assert torch.equal(before.view(torch.int16), engine.runtime["pool_full"][held].view(torch.int16))


def test_a_prompt_in_chunks_reads_what_the_device_holds(fake_device: FakeLibrary) -> None:
    """The prefill on the CPU takes over pages that steps may have written to."""
    engine = stand_in(fake_device, 2, PAGES)
    tokens = prompt(128, 4)
    whole = engine.prefill(0, tokens)
    engine.prefill(1, tokens[:64])
    for kind in ("full", "sliding"):
        engine._prefill.kv.pools[kind][:] = float("nan")  # as if it had never seen the first chunk
    second = engine.prefill(1, tokens[64:], 64)
    assert (whole == second).all()


@pytest.fixture(scope="module")
def library() -> Any:
    return build(NANO_GEOMETRY, SPLITS)


def on_card(
    library: Any, rows: int, products: str | None, pages: dict[str, int] | None = None, **more: Any
) -> CudaEngine:
    from mk.device import DeviceFacts

    plan = Plan(DeviceFacts.read().sms, LAYER_WAVES, "row_owner", splits=SPLITS)
    counts = pages or {"full": 64, "sliding": 64}
    sizes = every_size(rows)
    return CudaEngine(
        weights(NANO_GEOMETRY), library, plan, rows, 320, 64, products=products, pages=counts, sizes=sizes, **more
    )


def same(found: Sequence[Answer], expected: Sequence[Answer]) -> bool:
    return [(a.sampled, a.finish) for a in found] == [(e.sampled, e.finish) for e in expected]


@pytest.mark.gpu
@pytest.mark.parametrize("products", ["packed", None], ids=["prefill on the card", "prefill on the host"])
def test_on_a_card_company_chunks_preemption_and_hits_change_no_bit(library: Any, products: str | None) -> None:
    expected = answers()
    for answer in expected:
        run(core(on_card(library, 1, products), cache=False, chunk=64), answer)
    assert all(answer.finish in ("stop", "length") for answer in expected)
    for policy in ({"chunk": 64}, {"chunk": 50, "prefill": "pause", "held": 1}):
        found = answers()
        run(core(on_card(library, 4, products), **policy), *found)
        assert same(found, expected), policy
    tight = core(on_card(library, 4, products, {"full": 7, "sliding": 9}), chunk=64)
    found = answers()
    run(tight, *found)
    assert same(found, expected) and tight.totals.preemptions
    roomy = core(on_card(library, 4, products), chunk=64)
    for _ in range(2):  # the second time over blocks of the first
        found = answers()
        run(roomy, *found)
        assert same(found, expected)
    assert roomy.totals.cached_tokens


@pytest.mark.gpu
def test_on_a_card_a_change_of_batch_size_costs_little(library: Any, figure: Callable[[str], None]) -> None:
    """Steps of batch 1 and 4 in turn, against as many of either in a row; programs lie on the device by then."""
    engine = on_card(library, 4, "packed")
    for row in range(4):
        engine.prefill(row, prompt(20, row))

    def per_step(sizes: Sequence[int]) -> float:
        started = time.perf_counter()
        for _ in range(50):
            for size in sizes:
                engine.step([5] * size, [21] * size, [SamplingParams()] * size, details=False)
        return (time.perf_counter() - started) / 50 / len(sizes) * 1e6

    per_step((1, 4))
    kept = (per_step((1, 1)) + per_step((4, 4))) / 2
    changed = per_step((1, 4))
    figure(f"nano on a card: {kept:.0f} us a step, {changed:.0f} us where each changes the batch size")
    assert changed < kept + 2000


@pytest.mark.gpu
def test_on_a_card_runs_keep_the_device_busy(library: Any, figure: Callable[[str], None]) -> None:
    """The scheduler's steps against the engine's own, nano, batch 4: the same launches, read in the same way."""
    engine = on_card(library, 4, "packed")
    steps = 250

    def own() -> float:
        for row in range(4):
            engine.prefill(row, prompt(20, row))
            engine.pages.reserve(row, 20 + steps)
        started = time.perf_counter()
        engine.loop.resume(going_on(engine, [5] * 4, [21] * 4, budgets=[steps] * 4))
        assert len(finish_run(engine.loop)) == steps
        elapsed = time.perf_counter() - started
        for row in range(4):
            engine.free(row)
        return elapsed

    def served() -> float:
        scheduler = core(engine, chunk=64, cache=False)
        for row in range(4):
            scheduler.submit(Answer(prompt(20, row), steps + 1, ignore_eos=True).request)
        while any(r is None or not r.tokens for r in scheduler.slots):
            scheduler.tick()
        before, started = scheduler.totals.steps.total(), time.perf_counter()
        finish(scheduler)
        return (time.perf_counter() - started) * steps / (scheduler.totals.steps.total() - before)

    own(), served()  # programs are lowered, verified and loaded
    times = [(own(), served()) for _ in range(3)]
    mine, theirs = (min(pair[which] for pair in times) / steps * 1e6 for which in (1, 0))
    figure(f"nano on a card, batch 4: {theirs:.0f} us a step of the engine, {mine:.0f} us of the scheduler")
    assert mine < 3 * theirs  # nano's step is shorter than the host's work for it; the full model's is not


# ---- the native loop ----


def going_on(engine: CudaEngine, tokens: Sequence[int], keys: Sequence[int], **more: Any) -> Run:
    """A run of rows as far as their pages go."""
    rows = len(keys)
    given: dict[str, Any] = {
        "sampling": [SamplingParams()] * rows,
        "held": [engine.pages.held(row) for row in range(rows)],
        "budgets": [1000] * rows,
        "ends": [frozenset()] * rows,
    }
    return Run(tokens, keys, **{**given, **more})


def prefilled(library: Any, lengths: Sequence[int], reserved: int, **more: Any) -> CudaEngine:
    """An engine whose rows hold prompts, and pages for `reserved` tokens."""
    engine = on_card(library, len(lengths), "packed", **more)
    for row, length in enumerate(lengths):
        engine.prefill(row, prompt(length, row))
        engine.pages.reserve(row, reserved, since=length)
    return engine


@pytest.mark.gpu
def test_on_a_card_the_loop_gives_the_tokens_of_its_twin(library: Any) -> None:
    """The twin steps another engine one by one: greedy and sampled rows, budgets, ends, pages, a row that sits out."""
    lengths = (20, 90, 33)
    engine, single = (prefilled(library, lengths, 256, ahead=4) for _ in range(2))
    twin = TwinLoop(lambda *step: single.step(*step, details=False), ahead=4)
    rng, reasons = np.random.default_rng(1), set()
    for number in range(24):
        keys = [length + 1 if row != number % 4 else 0 for row, length in enumerate(lengths)]
        run = going_on(
            engine,
            rng.integers(0, NANO_GEOMETRY.vocab, 3).tolist(),
            keys,
            sampling=[WARM if rng.random() < 0.5 else SamplingParams() for _ in keys],
            held=[int(rng.integers(length + 1, 257)) if length else 0 for length in keys],
            budgets=rng.integers(1, 120, 3).tolist(),
            ends=[frozenset(rng.integers(0, NANO_GEOMETRY.vocab, int(rng.integers(0, 40))).tolist()) for _ in keys],
            steps=None if number % 3 else int(rng.integers(1, 40)),
        )
        engine.loop.resume(run)
        twin.resume(run)
        mine, theirs = finish_run(engine.loop), finish_run(twin)
        assert engine.loop.parked == twin.parked
        reasons.add(twin.parked)
        slack = 3 if twin.parked is Parked.END else 0  # steps under way when the end was noticed
        assert len(theirs) - slack <= len(mine) <= len(theirs)
        for step, other in zip(mine, theirs, strict=False):
            assert step.tokens.tolist() == other.tokens.tolist() and not step.status.any()
    assert reasons == {Parked.END, Parked.STEPS, Parked.BUDGET, Parked.ROOM}


@pytest.mark.gpu
def test_on_a_card_a_run_is_parked_anywhere_and_goes_on_with_pages_that_came_meanwhile(library: Any) -> None:
    whole = prefilled(library, (20, 90), 256)
    whole.loop.resume(going_on(whole, [5, 6], [21, 91], budgets=[150] * 2))
    expected = [step.tokens.tolist() for step in finish_run(whole.loop)]
    engine, rng = prefilled(library, (20, 90), 128), np.random.default_rng(2)
    found: list[list[int]] = []
    times: list[int] = []
    while len(found) < 150:
        last = found[-1] if found else [5, 6]
        keys = [length + 1 + len(found) for length in (20, 90)]
        for row, length in enumerate(keys):
            engine.pages.reserve(row, length)
        engine.loop.resume(going_on(engine, last, keys, budgets=[150 - len(found)] * 2))
        quiet = int(rng.integers(1, 30))
        while steps := engine.loop.read():
            found += [step.tokens.tolist() for step in steps]
            times += [step.started_ns for step in steps]
            if len(found) < 140 and rng.random() < 0.5:
                for row in range(2):
                    engine.pages.reserve(row, min(256, engine.pages.held(row) + 1))
                engine.loop.grant([engine.pages.held(row) for row in range(2)])
            quiet -= len(steps)
            if quiet < 0:
                engine.loop.park()
    assert found == expected
    assert times == sorted(set(times)) and min(times) >= 0


@pytest.mark.gpu
def test_on_a_card_a_step_that_stalls_is_named_in_time_and_the_loop_goes_on(library: Any) -> None:
    engine = prefilled(library, (20,), 256, time_limit_s=0.3)
    healthy = engine.programs[1].get(256)
    faulty, name = broken(healthy, Word.SIGNAL, drop_signal)
    engine.runtime.load(faulty)
    started = time.perf_counter()
    engine.loop.resume(going_on(engine, [5], [21]))
    with pytest.raises(StepAborted, match=re.escape(name)):
        finish_run(engine.loop)
    assert time.perf_counter() - started < 5 and engine.loop.parked is Parked.ABORTED
    engine.runtime.load(healthy)
    engine.loop.resume(going_on(engine, [5], [21], budgets=[40]))
    again = [step.tokens.tolist() for step in finish_run(engine.loop)]
    other = prefilled(library, (20,), 256)
    other.loop.resume(going_on(other, [5], [21], budgets=[40]))
    assert again == [step.tokens.tolist() for step in finish_run(other.loop)]


@pytest.mark.gpu
@pytest.mark.parametrize("read", [0, 3])
def test_on_a_card_a_loop_is_stopped_amid_a_run(library: Any, read: int) -> None:
    engine = prefilled(library, (20, 90), 256)
    engine.loop.resume(going_on(engine, [5, 6], [21, 91]))
    for _ in range(read):
        engine.loop.read()
    engine.loop.stop()
    torch.cuda.synchronize()
    assert not int(engine.runtime["abort_word"]) and engine.loop.parked is Parked.LOST
    with pytest.raises(MkError, match="stopped"):
        engine.loop.resume(going_on(engine, [5, 6], [21, 91]))
