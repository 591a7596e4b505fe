"""The host side of the kernel without a card: what it refuses, what it hands over, what it says of a stalled step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mk.compose import load_config
from mk.device import DeviceFacts
from mk.errors import MkError
from mk.graph import LAYER_WAVES
from mk.interpreter import Status
from mk.isa import NONE, Word
from mk.kernel.launches import WaveLaunches
from mk.kernel.runtime import Runtime, StepAborted
from mk.kernel.stalls import describe_stall, missing_signals
from mk.kernel.step_params import HOST_STEPS, MAX_ROWS, OWNED, counters_at, pack_sampling
from mk.kv import KINDS, PageAllocator
from mk.model.packing import PackedWeights
from mk.programs import Plan
from mk.ring import MIN_WINDOW, RING_SLOTS, UNSAFE_SLOTS
from mk.sampling import SamplingParams
from mk.schedule.cut import cut
from mk.schedule.lower import Program
from mk.splits import SplitPolicy
from tests.device_rig import H200, FakeLibrary, fake_build, fake_device, next_logits
from tests.interpreter_rig import GEOMETRY, weights

__all__ = ["fake_device"]

PLAN = Plan(6, LAYER_WAVES, "row_owner", splits=SplitPolicy(128, 4))
PAGES = {"full": 40, "sliding": 40}
KEYS = 256


def program(rows: int = 2, plan: Plan = PLAN) -> Program:
    return plan.lower(GEOMETRY, rows, KEYS)


@pytest.fixture
def runtime(fake_device: FakeLibrary) -> Runtime:
    made = Runtime(fake_build(GEOMETRY, PLAN.splits), weights(), PAGES, 4, KEYS)
    fake_device.runtime = made
    return made


def test_a_card_is_compared_with_its_configuration() -> None:
    gpu = load_config(["gpu=h200"]).gpu
    H200.require(gpu)
    for change, message in (
        ({"name": "NVIDIA H100 80GB HBM3"}, "gpu.name=h200, but the device has NVIDIA H100"),
        ({"sms": 114}, "gpu.sms=132, but the device has 114 SMs"),
        ({"shared_bytes": 100 * 1024}, "gpu.smem_per_block_kb=227, but the device has 102400 bytes"),
    ):
        with pytest.raises(MkError, match=message):
            dataclasses.replace(H200, **change).require(gpu)
    with pytest.raises(MkError, match="gpu=cpu is no CUDA card"):
        H200.require(load_config().gpu)


def test_a_program_that_owns_more_strips_than_an_sm_keeps_is_refused(runtime: Runtime) -> None:
    strips = GEOMETRY.hidden // 16
    fits = -(-strips // OWNED)
    runtime.load(program(plan=dataclasses.replace(PLAN, n_sm=fits)))
    with pytest.raises(MkError, match=rf"an SM would own \d+ strips of the residual, the kernel keeps at most {OWNED}"):
        runtime.load(program(plan=dataclasses.replace(PLAN, n_sm=fits - 1)))
    for wave in ("0.dense_down", "2.moe_down", "2.oproj", "2.rmsnorm"):
        runtime.load(cut(program(plan=dataclasses.replace(PLAN, n_sm=fits)), wave, wave))
        with pytest.raises(MkError, match=rf"the kernel keeps at most {OWNED}"):
            runtime.load(cut(program(plan=dataclasses.replace(PLAN, n_sm=fits - 1)), wave, wave))
    runtime.load(program(plan=dataclasses.replace(PLAN, n_sm=1, placement="round_robin")))  # sums go to memory


def test_without_a_card_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MkError, match="needs a GPU"):
        DeviceFacts.read()


MAX_WINDOW = RING_SLOTS - UNSAFE_SLOTS


@pytest.mark.parametrize("place", [0, 1])  # that no step has run with yet, too
@pytest.mark.parametrize("window", [MIN_WINDOW - 1, MAX_WINDOW + 1])
def test_a_window_that_could_overrun_the_ring_is_refused(fake_device: FakeLibrary, window: int, place: int) -> None:
    with pytest.raises(MkError, match=f"window of {window} slots must lie in {MIN_WINDOW}..{MAX_WINDOW}"):
        windows = [window if at == place else MIN_WINDOW for at in range(2)]
        Runtime(fake_build(GEOMETRY), weights(), PAGES, 4, KEYS, windows=windows)


def test_a_step_has_the_window_of_its_rows(fake_device: FakeLibrary) -> None:
    """Whatever ran before, and in launches of parts too."""
    for kind in (Runtime, WaveLaunches):
        made = kind(fake_build(GEOMETRY, PLAN.splits), weights(), PAGES, 4, KEYS, windows=(7, 5, 8))
        fake_device.runtime = made
        launched: list[tuple[int, int]] = []
        fake_device.fault = lambda rt, step, to=launched: to.append((rt.params.rows, rt.params.window_slots))
        for rows in (2, 1, 4, 3, 1):
            made.load(program(rows))
            made.set_sequences([0] * rows)
            made.launch()
            made.finish()
        assert launched == [(2, 5), (1, 7), (4, 8), (3, 8), (1, 7)], kind


def test_what_does_not_belong_together_is_refused(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MkError, match="256 resident blocks"):
        runtime.load(program(plan=dataclasses.replace(PLAN, n_sm=256, placement="round_robin")))
    with pytest.raises(MkError, match=f"at most {MAX_ROWS} rows, the program has 9"):
        runtime.load(program(rows=9))
    with pytest.raises(MkError, match="cuts attention by"):
        runtime.load(program(plan=dataclasses.replace(PLAN, splits=SplitPolicy(128, 8))))
    other = dataclasses.replace(GEOMETRY, rms_eps=0.5)
    with pytest.raises(MkError, match="another model geometry"):
        runtime.load(PLAN.lower(other, 2, KEYS))
    with pytest.raises(MkError, match="built for another model geometry"):
        Runtime(fake_build(other), weights(), PAGES, 4, KEYS)
    monkeypatch.setattr(FakeLibrary, "mk_params_bytes", lambda self: 8)
    with pytest.raises(MkError, match="parameters differ"):
        Runtime(fake_build(GEOMETRY), weights(), PAGES, 4, KEYS)


def test_a_kernel_that_the_device_refuses_is_told_apart(fake_device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLibrary, "mk_prepare", lambda self: -209)
    with pytest.raises(MkError, match="refuses the kernel: error 209"):
        Runtime(fake_build(GEOMETRY), weights(), PAGES, 4, KEYS)
    monkeypatch.setattr(FakeLibrary, "mk_prepare", lambda self: 0)
    with pytest.raises(MkError, match="does not fit an SM"):
        Runtime(fake_build(GEOMETRY), weights(), PAGES, 4, KEYS)


def test_sequences_need_a_program_room_and_pages(runtime: Runtime) -> None:
    with pytest.raises(MkError, match="no program is loaded"):
        runtime.set_sequences([1, 1])
    runtime.load(program())
    pages = PageAllocator(GEOMETRY, PAGES, 2, 4, seed=0)
    pages.reserve(0, 64)
    runtime.set_tables(pages.table.table)
    runtime.set_sequences([64, 0], [5, -1])
    for keys, tokens, steps, message in (
        ([64], None, 1, "1 rows for a program of 2"),
        ([64, 0], [1], 1, "2 rows for a program of 2"),
        ([-1, 0], None, 1, "row 0: contexts of -1 to -1"),
        ([64, 257], None, 1, "row 1: contexts of 257 to 257 keys do not fit 1..256"),
        ([64, 0], None, 194, "row 0: contexts of 64 to 257"),
        ([64, 0], None, 2, "row 0: a context of 65 keys has no full page"),
        ([64, 1], None, 1, "row 1: a context of 1 keys has no full page"),
        ([64, 0], [GEOMETRY.vocab, 0], 1, f"row 0: token {GEOMETRY.vocab} is outside"),
    ):
        with pytest.raises(MkError, match=message):
            runtime.set_sequences(keys, tokens, steps)
    pages.table["full"][0, 1] = 40
    with pytest.raises(MkError, match="the full page table names page 40 of 40"):
        runtime.set_tables(pages.table.table)


def test_only_what_changed_in_a_page_table_goes_up(runtime: Runtime) -> None:
    rng = np.random.default_rng(4)
    table = {kind: np.full((2, 4), -1, np.int32) for kind in KINDS}
    for _ in range(50):
        for kind in KINDS:
            for _ in range(int(rng.integers(4))):
                table[kind][tuple(rng.integers((2, 4)))] = rng.integers(-1, PAGES[kind])
        runtime.set_tables(table)
        for kind in KINDS:
            device = runtime[f"table_{kind}"].numpy()
            assert (
                np.array_equal(device[:2, :4], table[kind]) and (device[2:] == -1).all() and (device[:, 4:] == -1).all()
            )
    runtime["table_full"][1, 2] = 77  # as nobody told it to
    table["full"][0, 3] = (table["full"][0, 3] + 1) % PAGES["full"]
    runtime.set_tables(table)
    assert runtime["table_full"][1, 2] == 77 and runtime["table_full"][0, 3] == table["full"][0, 3]
    runtime.set_tables({kind: table[kind][:1] for kind in KINDS})  # a row that is left out has no pages
    assert (runtime["table_full"][1, [0, 1, 3]] == -1).all()


def test_a_program_that_is_loaded_again_lies_on_the_device(runtime: Runtime) -> None:
    one, two = program(rows=1), program(rows=2)
    runtime.load(one)
    words = runtime["words"]
    runtime.load(two)
    assert runtime["words"] is not words and runtime.params.words == runtime["words"].data_ptr()
    runtime.load(one)
    assert runtime["words"] is words and runtime.params.words == words.data_ptr()
    assert (runtime.params.rows, runtime.program) == (1, one)


def test_pages_that_left_the_window_may_be_gone(runtime: Runtime) -> None:
    runtime.load(program(rows=1))
    pages = PageAllocator(GEOMETRY, PAGES, 1, 4)
    keys = GEOMETRY.window_keys + 65
    pages.reserve(0, keys)
    assert pages.table["sliding"][0, 0] == NONE
    runtime.set_tables(pages.table.table)
    runtime.set_sequences([keys], [0])
    with pytest.raises(MkError, match="no sliding page"):
        runtime.set_sequences([keys - 2], [0])


def test_steps_advance_on_the_device_and_feed_tokens_back(runtime: Runtime) -> None:
    runtime.load(program())
    pages = PageAllocator(GEOMETRY, PAGES, 2, 4, seed=1)
    pages.reserve(1, 12)
    runtime.set_tables(pages.table.table)
    runtime.set_sequences([0, 10], [0, 7], steps=3)
    token = 7
    for step in range(3):
        runtime.launch()
        expected = next_logits(GEOMETRY, token, 10 + step)
        assert torch.equal(runtime.logits(1), expected)
        token = int(expected.argmax())
    runtime.finish()
    assert (runtime["keys"].tolist()[:2], runtime.epoch, runtime.status()) == ([0, 13], 3, [0, 0])
    with pytest.raises(MkError, match="all steps"):
        runtime.launch()
    runtime.set_sequences([0, 12])
    runtime.launch()
    runtime.launch()
    assert int(runtime["keys"][1]) == 12  # a single step leaves contexts to the host


def test_tokens_are_read_from_the_ring_while_later_steps_run(runtime: Runtime) -> None:
    runtime.load(program())
    pages = PageAllocator(GEOMETRY, PAGES, 2, 4, seed=1)
    pages.reserve(0, 10)
    pages.reserve(0, 159)
    runtime.set_tables(pages.table.table)
    runtime.set_sequences([10, 0], [7, 0], steps=150)
    launches = [runtime.launch() for _ in range(150)]
    assert launches == list(range(150))
    token = 7
    for launch in launches:
        token = int(next_logits(GEOMETRY, token, 10 + launch).argmax())
        assert runtime.tokens_of(launch).tokens.tolist() == [token, -1]
    assert runtime.poll(149) is not None
    runtime.ring.records["step"][149] = 0  # as before the step has ended
    assert runtime.poll(149) is None
    with pytest.raises(MkError, match="launch 149 ended without a token"):
        runtime.tokens_of(149)


def test_rows_that_a_loop_launches_are_checked_as_far_as_they_may_go(runtime: Runtime) -> None:
    runtime.load(program(), epoch=7)
    pages = PageAllocator(GEOMETRY, PAGES, 2, 4, seed=1)
    pages.reserve(0, 100, since=9)
    runtime.set_tables(pages.table.table)
    runtime.set_sequences([10, 0], [7, 0], held=[128, 0])
    assert (runtime.params.advance, runtime.params.epoch, runtime.longest) == (1, 7, KEYS)
    with pytest.raises(MkError, match="all steps"):
        runtime.launch()  # it is the loop that does
    runtime.count_launches(3)
    assert (runtime.launched, runtime.epoch) == (3, 10)
    runtime.require_pages(0, 10, 128)
    for held, message in (
        ([129, 0], "row 0: a context of 129 keys has no full page"),
        ([257, 0], "row 0: contexts of 10 to 257 keys do not fit 1..256"),
        ([9, 0], "row 0: contexts of 10 to 9 keys"),
    ):
        with pytest.raises(MkError, match=message):
            runtime.set_sequences([10, 0], [7, 0], held=held)
    with pytest.raises(MkError, match="row 0: a context of 129 keys has no full page"):
        runtime.require_pages(0, 129, 129)


def test_a_lapped_step_is_not_read(runtime: Runtime) -> None:
    runtime.load(program())
    runtime.set_sequences([0, 0])
    for _ in range(HOST_STEPS + 2):
        runtime.launch()
    assert runtime.poll(2) is not None
    for launch in (-1, 0, 1, HOST_STEPS + 2):
        with pytest.raises(MkError, match=f"launch {launch} of {HOST_STEPS + 2} has no tokens"):
            runtime.poll(launch)


def test_a_greedy_program_refuses_to_draw(runtime: Runtime) -> None:
    runtime.load(program())
    with pytest.raises(MkError, match="row 1: the program only takes the likeliest"):
        runtime.set_sequences([0, 0], sampling=[SamplingParams(), SamplingParams(1.0)])
    with pytest.raises(MkError, match="2 rows for a program of 2"):
        runtime.set_sequences([0, 0], sampling=[SamplingParams()])


def test_parameters_are_packed_as_the_kernel_reads_them() -> None:
    rows = [SamplingParams(0.7, 40, 0.9, seed=2**64 - 1), SamplingParams(), SamplingParams(2.0, 5000)]
    packed = pack_sampling(rows, vocab=300)
    assert packed.nbytes == MAX_ROWS * 32
    assert packed["seed"][0] == 2**64 - 1 and packed["rate"][0] == np.float32(1.4426950408889634 / np.float32(0.7))
    assert packed["top_p"].tolist()[:3] == [0.9, 0.0, 1.0]
    assert packed["top_k"].tolist() == [40, 0, 0, *[0] * 5] and packed["cuts"].tolist() == [1, 0, 0, *[0] * 5]


def test_counters_of_a_late_epoch_start_where_a_long_run_would_stand(runtime: Runtime) -> None:
    loaded = program()
    runtime.load(loaded, epoch=2**32 - 3)
    values = runtime["counters"].numpy()[: len(loaded.counters), 0].view(np.uint32)
    assert values.tolist() == [counter.per_step * (2**32 - 3) % 2**32 for counter in loaded.counters]


def test_a_launch_that_cuda_refuses_is_an_error(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.load(program())
    monkeypatch.setattr(FakeLibrary, "mk_launch", lambda self, params, stream: 720)
    with pytest.raises(MkError, match="launch failed: error 720"):
        runtime.launch()
    assert runtime.epoch == 0


def stalled(loaded: Program, counter: int) -> tuple[np.ndarray, np.ndarray]:
    """Signals that counters lack, and records, of a step in which one signal of `counter` was lost: those before it, by
    number, have all of that step, and later ones none."""
    missing = np.array([c.per_step for c in loaded.counters], np.int32)
    missing[1:counter], missing[counter] = 0, 1
    records = np.zeros((132, 8), np.int32)
    waiters = loaded.sm_of[loaded.words[:, Word.WAIT0] == counter]
    task = loaded.words[loaded.words[:, Word.WAIT0] == counter][0]
    target = int(task[Word.WAIT0_COUNT] + 7 * task[Word.WAIT0_STEP])
    records[waiters[0]] = [1, 1, task[Word.OPCODE], task[Word.LAYER], task[Word.TASK], counter, target, target - 1]
    records[(waiters[0] + 1) % 6] = [1, 0, task[Word.OPCODE], task[Word.LAYER], 3, NONE, 0, 0]
    return missing, records


@pytest.mark.parametrize("epoch", [0, 7, 2**31, 2**32 - 1])
def test_signals_are_missed_also_where_counters_have_wrapped(epoch: int) -> None:
    per_step = np.array([1, 132, 5_000_000], np.int64)
    counters = counters_at(per_step, epoch)[:, 0]
    assert missing_signals(per_step, epoch, counters).tolist() == [0, 0, 0]
    assert missing_signals(per_step, epoch + 2, counters).tolist() == [2, 264, 10_000_000]
    counters += np.array([1, 131, 0], np.int32)
    assert missing_signals(per_step, epoch + 1, counters).tolist() == [0, 1, 5_000_000]


def test_a_stalled_step_names_the_signal_that_is_missing(runtime: Runtime, fake_device: FakeLibrary) -> None:
    loaded = program()
    for counter in (1, len(loaded.counters) // 2, len(loaded.counters) - 1):
        missing, records = stalled(loaded, counter)
        name, count = loaded.counters[counter].name, loaded.counters[counter].per_step
        message = describe_stall(loaded, missing, records, blamed=0)
        assert message.startswith(f"the step was given up: counter {name} got {count - 1} of {count} signals")
        assert f"waits for {name}: wants" in message and message.endswith("waits for a barrier")

    def give_up(rt: Runtime, step: int) -> None:
        missing, records = stalled(loaded, 3)
        rt["counters"][: len(missing), 0] -= torch.from_numpy(missing)
        rt["stalls"].copy_(torch.from_numpy(records))
        rt["abort_word"][0] = 1

    runtime.load(loaded)
    fake_device.fault = give_up
    runtime.launch()
    with pytest.raises(StepAborted, match=loaded.counters[3].name):
        runtime.finish()
    fake_device.fault = None
    assert (runtime.epoch, int(runtime["abort_word"]), int(runtime["counters"].sum())) == (0, 0, 0)
    runtime.launch()
    runtime.finish()


def test_a_status_names_the_row_and_what_it_means(runtime: Runtime, fake_device: FakeLibrary) -> None:
    runtime.load(program())
    pages = PageAllocator(GEOMETRY, PAGES, 2, 4)
    pages.reserve(1, 9)
    runtime.set_tables(pages.table.table)
    runtime.set_sequences([0, 9], [0, 1])
    runtime["status"][0] = int(Status.LOGITS)  # an inactive row may hold anything
    runtime.require_healthy("step 4")
    for flags, reason in (
        (Status.LOGITS, "a logit is NaN or infinite"),
        (Status.ROUTER_NAN | Status.LOGITS, "a logit is NaN or infinite, a router logit is NaN"),
        (Status.EXPERT_ID, "an expert id that replaced the router's does not exist"),
    ):
        runtime["status"][1] = int(flags)
        with pytest.raises(MkError, match=f"^step 4: row 1: {reason}$"):
            runtime.require_healthy("step 4")
    ids = torch.zeros_like(runtime["route_ids"])
    for bad in (GEOMETRY.experts, -2):
        ids[3, 1, 2] = bad
        runtime.force_routing(ids)
        with pytest.raises(MkError, match=rf"row 1: .*: layer 3 got {bad}, ids are 0\.\.{GEOMETRY.experts - 1}"):
            runtime.require_healthy("step 4")


def test_delays_need_a_library_that_has_them(runtime: Runtime) -> None:
    with pytest.raises(MkError, match="built without delays") as refused:
        runtime.inject_delays(most_ns=100)
    assert "MK_DELAYS" in str(refused.value.hint)
    made = Runtime(fake_build(GEOMETRY, PLAN.splits, defines=("MK_DELAYS",)), weights(), PAGES, 4, KEYS)
    made.inject_delays(seed=3, most_ns=2000, slow_sm=5, slow_ns=70)
    p = made.params
    assert (p.delay_seed, p.delay_ns, p.slow_sm, p.slow_ns) == (3, 2000, 5, 70)
    assert p.tiles_taken == made["tiles_taken"].data_ptr()


def test_weights_are_not_copied(runtime: Runtime) -> None:
    packed: PackedWeights = weights()
    assert runtime.params.slots == packed.slots.data_ptr() and runtime.params.norms == packed.norms.data_ptr()
