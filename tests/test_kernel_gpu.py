"""The kernel on a card, with the nano checkpoint: against the float32 reference, against itself, when a step fails."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from experiments.kernel_checks import STARTS, Oracle, consult, decode, fill, poison, run_checks, same_bits
from mk.compose import load_config
from mk.config import group_options
from mk.device import DeviceFacts
from mk.errors import MkError
from mk.graph import LAYER_WAVES
from mk.isa import NONE, Word, Words
from mk.kernel.build import Library, build
from mk.kernel.runtime import Runtime, StepAborted
from mk.kv import KINDS, PageAllocator, blocks_of, kv_layers
from mk.model.checkpoint import load_checkpoint
from mk.model.opening import NANO
from mk.model.packing import PackedWeights
from mk.model.reference import ReferenceCache, greedy_decode, reference_forward
from mk.model.tensors import WeightSource
from mk.page_layout import pack_keys, pack_values
from mk.programs import Plan, Programs
from mk.schedule.lower import Program
from mk.schedule.placement import PLACEMENTS
from mk.splits import SplitPolicy

pytestmark = pytest.mark.gpu

SPLITS = SplitPolicy(128, 2)  # from 257 keys on a full layer's splits are twice as long
LENGTH = 330  # past nano's window of 256
EDGES = (0, 1, 62, 63, 64, 65, 127, 128, 254, 255, 256, 257, 319, 320, 329)
PAGES = {"full": 64, "sliding": 64}
BUCKET = 1024
NOISE_RATIO = 1.5


@pytest.fixture(scope="module")
def source() -> WeightSource:
    return load_checkpoint(NANO)


@pytest.fixture(scope="module")
def library(source: WeightSource) -> Library:
    return build(source.geometry, SPLITS)


@pytest.fixture(scope="module")
def packed(source: WeightSource) -> PackedWeights:
    return PackedWeights.from_state(source.tensor, source.geometry, "cuda")


@pytest.fixture(scope="module")
def runtime(library: Library, packed: PackedWeights) -> Runtime:
    return Runtime(library, packed, PAGES, blocks_of(BUCKET), BUCKET, time_limit_s=1.0)


@pytest.fixture(scope="module")
def oracle(source: WeightSource) -> Oracle:
    tokens = torch.randint(source.geometry.vocab, (LENGTH,), generator=torch.Generator().manual_seed(3))
    return consult(source, tokens, torch.device("cuda"))


def first(oracle: Oracle, length: int) -> Oracle:
    """The oracle of the first tokens, a copy."""
    return Oracle(*(getattr(oracle, field.name)[:length].clone() for field in dataclasses.fields(oracle)))


def plan(n_sm: int, wave_order: tuple[str, ...] = LAYER_WAVES, placement: str = "row_owner", **more: int) -> Plan:
    return Plan(n_sm, wave_order, placement, splits=SPLITS, **more)


def program(runtime: Runtime, rows: int, chosen: Plan | None = None) -> Program:
    return Programs(runtime.geometry, rows, chosen or plan(runtime.facts.sms)).get(BUCKET)


def pages(runtime: Runtime, rows: int, seed: int = 0) -> PageAllocator:
    return PageAllocator(runtime.geometry, PAGES, rows, runtime.max_blocks, seed)


@pytest.fixture(scope="module")
def base(runtime: Runtime, oracle: Oracle) -> torch.Tensor:
    """Logits [LENGTH, vocab] of the default plan, one row, every page NaN before."""
    poison(runtime)
    return decode(runtime, program(runtime, 1), pages(runtime, 1), oracle, (0,))[0][0]


def test_the_card_is_the_one_that_is_configured() -> None:
    facts = DeviceFacts.read()
    known = [load_config([f"gpu={name}"]).gpu for name in group_options("gpu") if name != "cpu"]
    for gpu in known:
        if gpu.name in facts.name.lower():
            facts.require(gpu)
            return
    pytest.skip(f"no configs/gpu option for {facts.name}")


def test_logits_with_replayed_ids_lie_within_the_noise_of_bfloat16(base: torch.Tensor, oracle: Oracle) -> None:
    exact = oracle.logits
    error = (base - exact).norm(dim=-1) / exact.norm(dim=-1)
    noise = (oracle.logits_bf16 - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.isfinite().all()
    assert error.median() <= NOISE_RATIO * noise.median()
    assert error.max() <= NOISE_RATIO * noise.max()
    for position in EDGES:
        assert error[position] <= NOISE_RATIO * noise.max(), position


def test_the_checks_of_the_benchmark_pass(runtime: Runtime, oracle: Oracle) -> None:
    outcome = run_checks(runtime, program(runtime, len(STARTS)), program(runtime, 1), oracle)
    outcome.require()


@pytest.mark.parametrize("prompt_length", [5, 60, 250])
def test_greedy_tokens_are_those_of_the_reference(
    runtime: Runtime, source: WeightSource, oracle: Oracle, base: torch.Tensor, prompt_length: int
) -> None:
    """64 queued steps. Where the tokens part, the reference's two best logits lie closer than the kernel's noise."""
    steps, g = 64, runtime.geometry
    prompt = oracle.tokens[:prompt_length].tolist()
    table = pages(runtime, 1, seed=5)
    for length in range(1, prompt_length):  # fill the KV cache token by token, the router choosing
        if length == 1:
            runtime.load(program(runtime, 1))
            table.reserve(0, 1)
            table.reserve(0, prompt_length + steps)
            runtime.set_tables(table.table.table)
        runtime.set_sequences([length], [prompt[length - 1]])
        runtime.launch()
        runtime.finish()
    taken = torch.zeros(steps, dtype=torch.int32, device=runtime.device)
    runtime.stream.wait_stream(torch.cuda.current_stream())
    runtime.set_sequences([prompt_length], [prompt[-1]], steps=steps)
    with torch.cuda.stream(runtime.stream):
        for step in range(steps):
            runtime.launch()
            taken[step].copy_(runtime["tokens"][0])
    runtime.finish()
    assert runtime.status() == [0]
    assert int(runtime["keys"][0]) == prompt_length + steps
    got = taken.tolist()
    expected = greedy_decode(g, source.tensor, prompt, steps)
    parted = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    if parted:
        context = torch.tensor([*prompt, *expected[: parted[0]]])
        best = reference_forward(g, source.tensor, context, keep=1)[0].topk(2).values
        noise = (base - oracle.logits).abs().max().item()
        assert float(best[0] - best[1]) <= 2 * noise, f"token {parted[0]}: {got[parted[0]]}, not {expected[parted[0]]}"


ORDERS = [name for name in group_options("wave_order") if name != "custom"]
CHOICES = [
    *(("static", order, "row_owner") for order in ORDERS),
    *(("work_stealing", order, "row_owner") for order in ORDERS),
    *(("static", "default", placement) for placement in PLACEMENTS if placement != "row_owner"),
    *(("work_stealing", "default", placement) for placement in PLACEMENTS if placement != "row_owner"),
]


@pytest.mark.parametrize(("schedule", "order", "placement"), CHOICES)
def test_every_schedule_gives_the_same_bits(
    runtime: Runtime, oracle: Oracle, base: torch.Tensor, schedule: str, order: str, placement: str
) -> None:
    """In every batch position, beside rows at other contexts and an inactive one."""
    waves = tuple(load_config([f"wave_order={order}"]).wave_order.waves)
    n_sm = runtime.facts.sms
    stealing = {"attention_claimers": n_sm, "moe_claimers": n_sm} if schedule == "work_stealing" else {}
    batch = program(runtime, len(STARTS), plan(n_sm, waves, placement, **stealing))
    fill(runtime, 0.01)
    logits, _ = decode(runtime, batch, pages(runtime, len(STARTS), seed=7), first(oracle, 150), STARTS)
    for row, found in logits.items():
        assert same_bits(found, base[:150]), f"row {row}"


def test_eight_rows_and_one_give_the_same_bits(runtime: Runtime, oracle: Oracle, base: torch.Tensor) -> None:
    starts = (3, 0, 11, None, 2, 70, 1, 5)
    logits, _ = decode(runtime, program(runtime, 8), pages(runtime, 8, seed=2), first(oracle, 150), starts)
    assert all(same_bits(found, base[:150]) for found in logits.values())


@pytest.mark.parametrize("epoch", [2**31 - 3, 2**32 - 3])
@pytest.mark.parametrize("claimers", [0, 132])
def test_counters_may_wrap(runtime: Runtime, oracle: Oracle, base: torch.Tensor, epoch: int, claimers: int) -> None:
    claimers = min(claimers, runtime.facts.sms)
    one = program(runtime, 1, plan(runtime.facts.sms, attention_claimers=claimers, moe_claimers=claimers))
    logits, _ = decode(runtime, one, pages(runtime, 1), first(oracle, 12), (0,), epoch=epoch)
    assert same_bits(logits[0], base[:12])
    assert runtime.executed_hash() == one.schedule_hash  # read back: descriptors, lists, and what counters gained


def test_programs_may_change_every_step(runtime: Runtime, oracle: Oracle, base: torch.Tensor) -> None:
    """KV and tokens stay on the device; counters and queues start anew."""
    n_sm = runtime.facts.sms
    choices = [
        program(runtime, 1),
        program(runtime, 1, plan(n_sm, placement="round_robin")),
        program(runtime, 1, plan(n_sm, attention_claimers=n_sm, moe_claimers=n_sm)),
    ]
    table = pages(runtime, 1, seed=4)
    table.reserve(0, 100)
    runtime.set_tables(table.table.table)
    for step in range(100):
        ids = torch.zeros_like(runtime["route_ids"])
        ids[:, 0] = oracle.ids[step]
        torch.cuda.synchronize()
        runtime.load(choices[step % len(choices)])
        runtime.set_sequences([step + 1], [int(oracle.tokens[step])])
        runtime.force_routing(ids)
        runtime.launch()
        runtime.finish()
        assert same_bits(runtime.logits(0), base[step]), step
    runtime.force_routing(None)


def test_pages_hold_the_references_keys_and_values_and_may_be_written_by_others(
    runtime: Runtime, source: WeightSource, oracle: Oracle
) -> None:
    """What the kernel appended for layer 0 unpacks to the reference's; from the reference's pages it goes on right."""
    length, g = 64, runtime.geometry
    cache = ReferenceCache()
    reference_forward(g, source.tensor, oracle.tokens[:length], cache=cache)
    mine = pages(runtime, 1, seed=6)
    page = {kind: mine.free_pages[kind][-1] for kind in KINDS}  # the next to be handed out
    decode(runtime, program(runtime, 1), mine, first(oracle, length), (0,))
    kind = g.layer_kinds[0]
    place = torch.arange(length * 128).view(length, 128)
    for half, pack, expected in ((0, pack_keys, cache.keys[0]), (1, pack_values, cache.values[0])):
        packed_page = runtime[f"pool_{kind}"][page[kind], 0, :, half].float().cpu()
        found = packed_page[:, pack(place).argsort()].view(g.kv_heads, length, 128)
        assert ((found - expected).norm() / expected.norm()).item() < 2**-7

    table = pages(runtime, 1, seed=8)
    table.reserve(0, 1)
    table.reserve(0, length + 1)
    fill(runtime, 0.01)
    for kind in KINDS:
        for index, layer in enumerate(kv_layers(g, kind)):
            runtime.write_pages(kind, int(table.table[kind][0, 0]), index, cache.keys[layer], cache.values[layer])
    ids = torch.zeros_like(runtime["route_ids"])
    ids[:, 0] = oracle.ids[length]
    torch.cuda.synchronize()
    runtime.load(program(runtime, 1))
    runtime.set_tables(table.table.table)
    runtime.set_sequences([length + 1], [int(oracle.tokens[length])])
    runtime.force_routing(ids)
    runtime.launch()
    runtime.finish()
    runtime.force_routing(None)
    exact = oracle.logits[length]
    noise = ((oracle.logits_bf16 - oracle.logits).norm(dim=-1) / oracle.logits.norm(dim=-1)).max()
    assert (runtime.logits(0) - exact).norm() / exact.norm() <= NOISE_RATIO * noise


def broken(healthy: Program, word: Word, change: Callable[[Words, int], None]) -> tuple[Program, str]:
    """A program with one signal (or wait) in the middle of the step changed, and the name of the counter it hits."""
    words = healthy.words.copy()
    counter = next(c for c in range(len(healthy.counters) // 2, len(healthy.counters)) if (words[:, word] == c).any())
    change(words, int(np.flatnonzero(words[:, word] == counter)[0]))
    return dataclasses.replace(healthy, words=words), healthy.counters[counter].name


def drop_signal(words: Words, task: int) -> None:
    words[task, Word.SIGNAL] = NONE


def raise_target(words: Words, task: int) -> None:
    words[task, Word.WAIT0_COUNT] += 1


@pytest.mark.parametrize(("word", "change"), [(Word.SIGNAL, drop_signal), (Word.WAIT0, raise_target)])
def test_a_step_that_cannot_end_is_given_up_and_named(
    runtime: Runtime,
    oracle: Oracle,
    base: torch.Tensor,
    word: Word,
    change: Callable[[Words, int], None],
) -> None:
    """Within the time limit; the process and the next step are none the worse."""
    faulty, name = broken(program(runtime, 1), word, change)
    started = time.perf_counter()
    with pytest.raises(StepAborted, match=re.escape(name)):
        decode(runtime, faulty, pages(runtime, 1), first(oracle, 1), (0,))
    assert time.perf_counter() - started < 5
    logits, _ = decode(runtime, program(runtime, 1), pages(runtime, 1), first(oracle, 8), (0,))
    assert same_bits(logits[0], base[:8])


@pytest.mark.parametrize("bad", [-7, 24, 10**6])
def test_an_expert_that_does_not_exist_is_named(runtime: Runtime, oracle: Oracle, base: torch.Tensor, bad: int) -> None:
    """In row, layer and id, within the time limit; nothing is read for it, and the next step is none the worse."""
    assert runtime.geometry.experts == 24
    faulty = first(oracle, 4)
    faulty.ids[2, 3, 1] = bad
    started = time.perf_counter()
    with pytest.raises(MkError, match=rf"step 2: row 0: .* does not exist: layer 3 got {bad}, ids are 0\.\.23"):
        decode(runtime, program(runtime, 1), pages(runtime, 1), faulty, (0,))
    assert time.perf_counter() - started < 5
    logits, _ = decode(runtime, program(runtime, 1), pages(runtime, 1), first(oracle, 8), (0,))
    assert same_bits(logits[0], base[:8])
