"""The CUDA engine over a stand-in for the card: what it hands the kernel, and what it makes of the answer."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import mk.engines.choice
from mk.compose import load_config
from mk.decode_loop import CardLost, LoopStep, Parked, Run
from mk.decode_loop import finish as finish_run
from mk.device import DeviceFacts
from mk.engines.cuda import CudaEngine
from mk.errors import MkError
from mk.graph import LAYER_WAVES
from mk.kernel import native_loop
from mk.kernel.runtime import StepAborted
from mk.kv import KINDS, kv_layers
from mk.model.opening import open_model
from mk.page_layout import pack_keys, pack_values
from mk.programs import Plan
from mk.sampling import SamplingParams, sample_row
from mk.splits import SplitPolicy
from tests.device_rig import H200, FakeLibrary, fake_build, fake_device, next_logits
from tests.interpreter_rig import GEOMETRY, source, weights
from tests.loop_rig import BUSY

__all__ = ["fake_device"]

PLAN = Plan(6, LAYER_WAVES, "row_owner", splits=SplitPolicy(128, 4))
PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, GEOMETRY.vocab, 150)]
GREEDY = SamplingParams()


@pytest.fixture
def engine(fake_device: FakeLibrary) -> CudaEngine:
    made = CudaEngine(weights(), fake_build(GEOMETRY, PLAN.splits), PLAN, rows=2, context=400, chunk=64, device="cpu")
    fake_device.runtime = made.runtime
    return made


def test_a_prompt_lies_in_the_pools_as_the_kernel_streams_it(engine: CudaEngine) -> None:
    engine.prefill(1, PROMPT)
    seen = 0
    for kind in KINDS:
        device, host = engine.runtime[f"pool_{kind}"], engine._prefill.kv.pools[kind]
        for page in engine.pages.table[kind][1]:
            for index in range(len(kv_layers(GEOMETRY, kind)) if page >= 0 else 0):
                k, v = (torch.from_numpy(host[page, index, :, which]).bfloat16() for which in (0, 1))
                packed = torch.stack([pack_keys(k), pack_values(v)], dim=1)
                assert torch.equal(device[page, index].nan_to_num(7.0), packed.nan_to_num(7.0))
                seen += 1
    # 150 tokens: three pages of every full layer, at least one of every sliding one
    assert seen >= 3 * len(GEOMETRY.full_layers) + len(GEOMETRY.sliding_layers)


def test_rows_decode_each_their_own_and_tokens_are_fed_back(engine: CudaEngine) -> None:
    engine.prefill(1, PROMPT)
    token, keys = 17, len(PROMPT) + 1
    for step in range(3):
        out = engine.step([0, token] if step == 0 else None, [0, keys + step], [GREEDY, GREEDY])
        expected = next_logits(GEOMETRY, token, keys + step).numpy()
        assert np.array_equal(out.logits[1], expected) and np.isnan(out.logits[0]).all()
        token = int(expected.argmax())
        assert out.tokens.tolist() == [-1, token] and out.status.tolist() == [0, 0]
        assert all((ids[0] == -1).all() and (ids[1] >= 0).all() for ids in out.expert_ids.values())
    assert set(out.expert_ids) == set(GEOMETRY.sparse_layers)


def test_rows_are_sampled_by_their_own_parameters(engine: CudaEngine) -> None:
    engine.prefill(0, PROMPT[:5])
    engine.prefill(1, PROMPT[:7])
    warm = SamplingParams(temperature=1.0, top_p=0.9, seed=3)
    logits = [next_logits(GEOMETRY, token, keys).numpy() for token, keys in ((9, 6), (8, 8))]
    for params, draws in (([warm, GREEDY], True), ([GREEDY, GREEDY], False), ([GREEDY, warm], True)):
        expected = [sample_row(*row) for row in zip(logits, params, (6, 8), strict=True)]
        assert engine.step([9, 8], [6, 8], params).tokens.tolist() == expected
        assert engine.program is not None and engine.program.shape.draws == draws
    assert len({id(engine.programs[engine.rows].get(256, draws)) for draws in (False, True)}) == 2


def run_of(engine: CudaEngine, token: int, keys: int, params: SamplingParams, budget: int = 400) -> Run:
    """Row 1 alone, as far as its pages go."""
    held = [engine.pages.held(row) for row in range(2)]
    return Run([0, token], [0, keys], [GREEDY, params], held, [0, budget], [frozenset(), frozenset()])


def read(engine: CudaEngine, steps: int) -> list[LoopStep]:
    found: list[LoopStep] = []
    while len(found) < steps:
        found += engine.loop.read()
    return found


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.0, 50, 0.9, seed=8)])
def test_a_run_gives_what_single_steps_do(engine: CudaEngine, sampling: SamplingParams) -> None:
    """Over two changes of page, whose pages come while it goes on, and one of bucket, for which it is parked."""
    engine.prefill(1, PROMPT + PROMPT[:96])
    first, params = 247, [GREEDY, sampling]
    singles = [engine.step([0, 17], [0, first], params)]
    singles += [engine.step(None, [0, first + step], params) for step in range(1, 140)]
    engine.free(1)
    engine.prefill(1, PROMPT + PROMPT[:96])
    engine.pages.advance([0, first])
    engine.loop.resume(run_of(engine, 17, first, sampling))
    found = finish_run(engine.loop)
    assert engine.loop.parked is Parked.ROOM and len(found) == 256 - first + 1
    engine.pages.advance([0, 257])
    engine.loop.resume(run_of(engine, int(found[-1].tokens[1]), 257, sampling))
    assert engine.program is not None and engine.program.shape.bucket == 512
    for keys in (300, 390):
        engine.pages.reserve(1, keys)
        engine.loop.grant([engine.pages.held(row) for row in range(2)])
    found += read(engine, 100)
    engine.loop.park()
    found += finish_run(engine.loop)
    assert engine.loop.parked in (Parked.ASKED, Parked.ROOM)
    last = len(found)
    # the engine is where it says it is
    found += [engine.step([0, int(found[-1].tokens[1])], [0, first + last], params)]
    assert [out.tokens.tolist() for out in found] == [out.tokens.tolist() for out in singles[: last + 1]]
    assert [step.number for step in found[:last]] == list(range(140, 140 + last))
    assert all(out.tokens[0] == -1 and not out.status.any() for out in found)
    times = [step.started_ns for step in found[:last]]
    assert times == sorted(set(times))


def test_a_step_given_up_ends_the_run_after_what_came_before_it(engine: CudaEngine, fake_device: FakeLibrary) -> None:
    engine.prefill(1, PROMPT[:5])
    engine.pages.advance([0, 6])
    fake_device.fault = lambda rt, step: rt["abort_word"].fill_(int(step >= 3))
    engine.loop.resume(run_of(engine, 9, 6, GREEDY))
    assert len(read(engine, 3)) == 3
    with pytest.raises(StepAborted):
        engine.loop.read()
    assert engine.loop.parked is Parked.ABORTED and engine.loop.read() == []
    fake_device.fault = None
    engine.loop.resume(run_of(engine, 9, 6, GREEDY, budget=4))
    assert len(finish_run(engine.loop)) == 4 and engine.loop.parked is Parked.BUDGET


def test_a_refused_launch_and_a_card_that_does_not_answer_are_errors(
    engine: CudaEngine, fake_device: FakeLibrary
) -> None:
    engine.prefill(1, PROMPT[:5])
    engine.pages.advance([0, 6])
    fake_device.refuses = 719
    engine.loop.resume(run_of(engine, 9, 6, GREEDY))
    with pytest.raises(MkError, match="launch failed: error 719"):
        engine.loop.read()
    fake_device.refuses = 0
    engine.loop.resume(run_of(engine, 9, 6, GREEDY, budget=2))
    with pytest.raises(MkError, match="a run is under way"):
        engine.loop.resume(run_of(engine, 9, 6, GREEDY))
    assert len(finish_run(engine.loop)) == 2
    fake_device.fault, fake_device.state = lambda rt, step: rt["abort_word"].fill_(1), 700  # an error of the stream
    engine.loop.resume(run_of(engine, 9, 6, GREEDY))
    with pytest.raises(CardLost, match="the card does not answer: error 700"):
        engine.loop.read()
    with pytest.raises(CardLost, match="has been lost"):
        engine.loop.resume(run_of(engine, 9, 6, GREEDY))


def test_a_kernel_that_never_ends_is_an_error_in_time(fake_device: FakeLibrary) -> None:
    library = fake_build(GEOMETRY, PLAN.splits)
    made = CudaEngine(weights(), library, PLAN, rows=2, context=400, chunk=64, device="cpu", time_limit_s=0.05)
    fake_device.runtime = made.runtime
    made.prefill(1, PROMPT[:5])
    made.pages.advance([0, 6])
    fake_device.fault, fake_device.state = lambda rt, step: rt["abort_word"].fill_(1), BUSY
    made.loop.resume(run_of(made, 9, 6, GREEDY))
    with pytest.raises(CardLost, match=r"no token and no end of a step in 0\.1 s"):
        made.loop.read()


def test_a_stop_does_not_wait_for_a_call_that_never_returns(
    fake_device: FakeLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_loop, "GRACE_S", 0.2)
    library = fake_build(GEOMETRY, PLAN.splits)
    made = CudaEngine(weights(), library, PLAN, rows=2, context=400, chunk=64, device="cpu", time_limit_s=0.05)
    fake_device.runtime = made.runtime
    made.prefill(1, PROMPT[:5])
    made.pages.advance([0, 6])
    called, hung = threading.Event(), threading.Event()
    fake_device.fault = lambda rt, step: (called.set(), hung.wait(60))
    made.loop.resume(run_of(made, 9, 6, GREEDY))
    assert called.wait(30)  # a loop that has not launched yet would park at once
    begun = time.monotonic()
    made.loop.stop()
    assert time.monotonic() - begun < 30 and not hung.is_set()
    assert "no sign of life" in caplog.text and made.loop.parked is Parked.LOST
    with pytest.raises(CardLost):
        made.loop.resume(run_of(made, 9, 6, GREEDY))
    hung.set()


def test_pages_that_were_not_had_are_not_granted(engine: CudaEngine) -> None:
    engine.prefill(1, PROMPT[:5])
    engine.pages.advance([0, 6])
    engine.loop.resume(run_of(engine, 9, 6, GREEDY, budget=1))
    with pytest.raises(MkError, match="row 1: a context of 128 keys has no full page"):
        engine.loop.grant([0, 128])
    finish_run(engine.loop)
    with pytest.raises(MkError, match="row 1: a context of 128 keys has no full page"):
        engine.loop.resume(Run([0, 9], [0, 6], [GREEDY] * 2, [0, 128], [0, 5], [frozenset()] * 2))


def test_a_row_whose_logits_are_not_finite_has_no_token(engine: CudaEngine, fake_device: FakeLibrary) -> None:
    fake_device.fault = lambda rt, step: rt["status"][0].fill_(1)
    engine.prefill(0, PROMPT[:5])
    out = engine.step([9, 0], [6, 0], [GREEDY, GREEDY])
    assert out.tokens.tolist() == [-1, -1] and out.status.tolist() == [1, 0]


def test_a_longer_context_changes_the_program(engine: CudaEngine) -> None:
    engine.prefill(0, PROMPT[:5])
    engine.step([1, 0], [6, 0], [GREEDY, GREEDY])
    small = engine.program
    engine.prefill(1, PROMPT * 2)
    engine.step([1, 2], [7, 301], [GREEDY, GREEDY])
    assert small is not None and engine.program is not None
    assert (small.shape.bucket, engine.program.shape.bucket) == (256, 512)


@pytest.mark.parametrize(
    ("overrides", "rows", "says"),
    [
        ([], 1, None),
        (["gpu=h200"], 8, None),
        ([], 9, "at most 8 rows, not 9"),
        (["routing=uniform"], 1, "not routing=uniform"),
        (["gpu=h100"], 1, "gpu.name=h100, but the device has NVIDIA H200"),
    ],
)
def test_auto_takes_the_kernel_exactly_where_asking_for_it_works(
    fake_device: FakeLibrary, monkeypatch: pytest.MonkeyPatch, overrides: list[str], rows: int, says: str | None
) -> None:
    auto, cuda = (load_config([f"engine={name}", *overrides]) for name in ("auto", "cuda"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for built in (False, True):
        monkeypatch.setattr(mk.engines.choice, "is_built", lambda *key, built=built: built)
        expected = "cuda" if built and says is None else "interpreter"
        assert mk.engines.choice.engine_name(auto, GEOMETRY, rows) == expected
    if says is None:
        mk.engines.choice.require_engine(cuda, rows)
    else:
        with pytest.raises(MkError, match=says) as refused:
            mk.engines.choice.require_engine(cuda, rows)
        assert refused.value.hint
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert mk.engines.choice.engine_name(auto, GEOMETRY, rows) == "interpreter"


@pytest.mark.parametrize(
    ("overrides", "n_sm", "claimers"),
    [
        (["schedule=work_stealing"], 132, (132, 132)),
        (["schedule=work_stealing", "schedule.moe_claimers=3"], 132, (132, 3)),
        (["gpu=h200", "gpu.sms=64", "schedule=work_stealing"], 64, (64, 64)),
        ([], 132, (0, 0)),
    ],
)
def test_all_virtual_claimers_stand_for_all_sms(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], n_sm: int, claimers: tuple[int, int]
) -> None:
    hopper = DeviceFacts("NVIDIA H200", 132, 227 * 1024, (9, 0))
    monkeypatch.setattr(DeviceFacts, "read", classmethod(lambda cls: hopper))
    plan = mk.engines.choice.card_plan(load_config(overrides))
    assert (plan.n_sm, (plan.attention_claimers, plan.moe_claimers)) == (n_sm, claimers)


def test_another_card_than_hopper_is_left_to_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = DeviceFacts("NVIDIA A100", 108, 164 * 1024, (8, 0))
    monkeypatch.setattr(DeviceFacts, "read", classmethod(lambda cls: ampere))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(mk.engines.choice, "is_built", lambda *key: True)
    assert mk.engines.choice.engine_name(load_config(["engine=auto"]), GEOMETRY, 1) == "interpreter"
    with pytest.raises(MkError, match="A100 is no Hopper GPU"):
        mk.engines.choice.require_engine(load_config(["engine=cuda"]), 1)


def test_the_engine_follows_the_card(fake_device: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default gpu group describes virtual SMs: the card's own count is taken. A named card has to be this one."""
    asked: list[Plan] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("mk.kernel.build.build", fake_build)
    monkeypatch.setattr(mk.engines.choice, "CudaEngine", lambda weights, library, plan, *_, **__: asked.append(plan))
    source().write_folder(tmp_path)
    axes = ["engine=cuda", f"model.path={tmp_path}", "weights=random"]
    for gpu in ("cpu", "h200"):
        config = load_config([*axes, f"gpu={gpu}"])
        model = open_model(config.model, config.weights, tmp_path)
        mk.engines.choice.make_engine(config, model, 1, 100)
    assert [plan.n_sm for plan in asked] == [H200.sms, H200.sms]
    with pytest.raises(MkError, match="at most 8 rows"):  # before anything is packed or prefilled
        mk.engines.choice.make_engine(load_config(axes), model, 9, 100)
