"""Continuous batching over the decode kernel's engine: over a stand-in for the card, and on a card."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mk.build import build
from mk.cuda_engine import CudaEngine
from mk.graph import LAYER_WAVES
from mk.programs import Plan
from mk.sampling import SamplingParams
from mk.splits import SplitPolicy
from tests.device_rig import FakeLibrary, fake_build, fake_device, next_logits
from tests.engine_rig import CONTEXT, Answer, core, every_size, finish, prompt, run
from tests.interpreter_rig import GEOMETRY, NANO_GEOMETRY, weights

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


def on_card(library: Any, rows: int, products: str | None, pages: dict[str, int] | None = None) -> CudaEngine:
    from mk.device import DeviceFacts

    plan = Plan(DeviceFacts.read().sms, LAYER_WAVES, "row_owner", splits=SPLITS)
    counts = pages or {"full": 64, "sliding": 64}
    sizes = every_size(rows)
    return CudaEngine(
        weights(NANO_GEOMETRY), library, plan, rows, 320, 64, products=products, pages=counts, sizes=sizes
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
    for _ in range(2):  # the second time over blocks of the first
        found = answers()
        run(tight, *found)
        assert same(found, expected)
    assert tight.totals.preemptions and tight.totals.cached_tokens


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
        started = time.perf_counter()
        for _ in engine.run([5] * 4, [21] * 4, [SamplingParams()] * 4, steps, 4):
            pass
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
