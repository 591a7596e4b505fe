"""Batched decode: rows come and go, programs change, and every sequence keeps its own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mk.compose import load_config
from mk.config import RoutingConfig
from mk.decode import Decoder, Request
from mk.engines.choice import engine_name, make_engine, require_engine
from mk.engines.interpreted import MachineEngine
from mk.engines.reference import ReferenceEngine
from mk.errors import MkError
from mk.interpreter import StepOutputs
from mk.kv import ABSENT
from mk.model.opening import open_model
from mk.model.reference import greedy_decode
from mk.programs import Plan, Programs, bucket_for
from mk.routing import make_router
from mk.sampling import SamplingParams
from tests.interpreter_rig import GEOMETRY, WAVE_ORDERS, random_tokens, source, weights

STATIC = Plan(3, WAVE_ORDERS["default"], "row_owner")
STEALING = Plan(3, WAVE_ORDERS["interleaved"], "round_robin", attention_claimers=2, moe_claimers=3)
HOT = SamplingParams(temperature=1.0, top_p=0.9, seed=11)


def machine(rows: int, context: int = 400, plan: Plan = STATIC, **options: Any) -> MachineEngine:
    return MachineEngine(weights(), plan, rows, context, **options)


def decoded(engine: Any, requests: Sequence[Request], eos: Sequence[int] = ()) -> list[StepOutputs]:
    decoder = Decoder(engine, eos)
    for request in requests:
        decoder.add(request)
    return list(decoder.run())


def expected(prompt: Sequence[int], tokens: int) -> list[int]:
    return greedy_decode(GEOMETRY, source().tensor, prompt, tokens)


@pytest.mark.parametrize("plan", [STATIC, STEALING])
def test_a_ragged_batch_is_every_sequence_alone(plan: Plan) -> None:
    """Contexts inside, across and past the window of 64, and one that outgrows the first bucket of 256."""
    requests = [Request(random_tokens(n, seed=n), 14) for n in (3, 57, 130, 249)]
    engine = machine(4, plan=plan)
    outputs = decoded(engine, requests)
    assert len(outputs) == 13  # prefill gave the first token
    for request in requests:
        assert request.tokens == expected(request.prompt, 14) and request.finish == "length"
    assert engine.program is not None and engine.program.shape.bucket == 512


def test_the_program_changes_exactly_when_the_longest_context_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = machine(2)
    loads: list[int] = []
    load = engine.machine.load
    monkeypatch.setattr(engine.machine, "load", lambda program: (loads.append(program.shape.bucket), load(program)))
    fed: list[bool] = []
    step = engine.machine.step
    monkeypatch.setattr(engine.machine, "step", lambda given: (fed.append(given.tokens is None), step(given))[1])
    decoder = Decoder(engine)
    decoder.add(Request(random_tokens(250, seed=1), 12))
    decoder.add(Request(random_tokens(9, seed=2), 3))
    buckets = [engine.program.shape.bucket for _ in decoder.run() if engine.program]
    assert buckets == [256] * 6 + [512] * 5  # contexts 251..256, then 257..261
    assert loads == [256, 512]
    assert fed == [False] + [True] * 10  # tokens stay on the device, also over the change of program


def test_rows_retire_and_are_taken_again() -> None:
    engine = machine(2)
    decoder = Decoder(engine)
    long, short = Request(random_tokens(70, seed=3), 20), Request(random_tokens(20, seed=4), 4)
    decoder.add(long)
    decoder.add(short)
    with pytest.raises(MkError, match="2 of 2 batch rows are taken"):
        decoder.add(Request([1], 1))
    late = Request(random_tokens(61, seed=5), 9)
    for _ in range(5):
        out = decoder.step()
    assert short.finish == "length" and decoder.active == 1
    assert out.tokens[1] == -1 and np.isnan(out.logits[1]).all() and (out.expert_ids[1][1] == -1).all()
    decoder.add(late)
    assert decoder.rows[1] is late
    list(decoder.run())
    for request in (long, short, late):
        assert request.tokens == expected(request.prompt, request.max_tokens)
    with pytest.raises(MkError, match="nothing to decode"):
        decoder.step()
    for kind in ("full", "sliding"):
        assert (engine.pages.table[kind] == ABSENT).all()
        assert sorted(engine.pages.free_pages[kind]) == list(range(engine.kv.pages[kind]))


def test_an_end_token_ends_its_row_alone() -> None:
    prompts = [random_tokens(n, seed=n) for n in (33, 90)]
    first = expected(prompts[0], 10)
    stop = next(token for token in first[2:] if token not in first[:2])
    cut = first.index(stop) + 1
    requests = [Request(prompts[0], 10), Request(prompts[1], 10)]
    decoded(machine(2), requests, eos=[stop])
    assert requests[0].tokens == first[:cut] and requests[0].finish == "eos"
    other = expected(prompts[1], 10)
    assert requests[1].tokens == (other[: other.index(stop) + 1] if stop in other else other)
    at_once = Request(prompts[0], 10)
    assert decoded(machine(1), [at_once], eos=first[:1]) == []
    assert at_once.tokens == first[:1] and at_once.finish == "eos"


def test_sampled_tokens_depend_on_neither_row_nor_neighbours() -> None:
    prompt = random_tokens(80, seed=6)
    alone = Request(prompt, 12, HOT)
    decoded(machine(1), [alone])
    beside = Request(prompt, 12, HOT)
    decoded(machine(3, plan=STEALING), [Request(random_tokens(200, seed=7), 12, HOT), Request([5], 6), beside])
    assert alone.tokens == beside.tokens
    assert alone.tokens != expected(prompt, 12)
    other = Request(prompt, 12, SamplingParams(temperature=1.0, top_p=0.9, seed=12))
    decoded(machine(1), [other])
    assert other.tokens != alone.tokens


@pytest.mark.parametrize("routing", ["checkpoint", "uniform"])
@pytest.mark.parametrize("sampling", [SamplingParams(), HOT])
def test_the_reference_engine_decodes_the_same(routing: str, sampling: SamplingParams) -> None:
    router = make_router(RoutingConfig(routing, seed=None if routing == "checkpoint" else 2), GEOMETRY, 3)
    runs = []
    for engine in (machine(3, router=router), ReferenceEngine(source(), 3, 400, router)):
        requests = [Request(random_tokens(n, seed=n), 5 + n % 3, sampling) for n in (62, 20)]
        runs.append((decoded(engine, requests), [request.tokens for request in requests]))
    assert runs[0][1] == runs[1][1]
    for ours, theirs in zip(runs[0][0], runs[1][0], strict=True):
        assert (ours.tokens == theirs.tokens).all()
        for layer, ids in ours.expert_ids.items():
            assert (np.sort(ids) == np.sort(theirs.expert_ids[layer])).all()


@pytest.mark.parametrize("chunk", [64, 100, 512])
def test_the_last_free_row_has_pages_for_the_longest_prompt(chunk: int) -> None:
    """A chunk in flight needs sliding pages beside those of the window before it, whatever the other rows hold."""
    requests = [Request(random_tokens(391, seed=n), 10) for n in (1, 2, 3)]
    decoded(machine(3, chunk=chunk), requests)
    assert all(request.tokens == expected(request.prompt, 10) for request in requests)


def test_a_row_may_be_chosen() -> None:
    request, engine = Request(random_tokens(30, seed=8), 6), machine(4)
    decoder = Decoder(engine)
    decoder.add(request, row=2)
    for out in decoder.run():
        assert (np.flatnonzero(out.tokens >= 0) == [2]).all()
    assert request.tokens == expected(request.prompt, 6)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([1] * 90, 12), "need a context of 101, the engine has room for 100"),
        (Request([1], 0), "max_tokens=0"),
        (Request([], 4), "the prompt has no tokens"),
        (Request([GEOMETRY.vocab], 4), "outside 0.."),
    ],
)
@pytest.mark.parametrize("kind", ["machine", "reference"])
def test_requests_that_do_not_fit_leave_no_trace(kind: str, request_: Request, message: str) -> None:
    engine = machine(1, context=100) if kind == "machine" else ReferenceEngine(source(), 1, 100)
    decoder = Decoder(engine)
    with pytest.raises(MkError, match=message):
        decoder.add(request_)
    good = Request(random_tokens(93, seed=9), 8)  # exactly 100 positions: the last token needs none
    decoder.add(good)
    list(decoder.run())
    assert good.tokens == expected(good.prompt, 8)


def test_a_row_whose_logits_are_not_finite_is_named_and_the_others_go_on() -> None:
    engine = machine(3)
    decoder = Decoder(engine)
    requests = [Request(random_tokens(n, seed=n), 8) for n in (10, 20, 30)]
    for request in requests:
        decoder.add(request)
    decoder.step()
    engine.kv.pools["full"][engine.pages.table["full"][1, 0]] = np.nan
    with pytest.raises(MkError, match="row 1: .*LOGITS.* at position 22"):
        decoder.step()
    assert requests[1].finish == "error" and decoder.rows[1] is None
    list(decoder.run())
    for request in (requests[0], requests[2]):
        assert request.tokens == expected(request.prompt, 8)


def test_a_step_that_broke_off_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters were left in the middle of a step: the next one begins from a fresh load."""
    engine = machine(1)
    decoder = Decoder(engine)
    request = Request(random_tokens(10, seed=1), 6)
    decoder.add(request)
    decoder.step()
    attend = engine.kv.read
    monkeypatch.setattr(engine.kv, "read", raise_once(attend))
    with pytest.raises(MkError, match="broken off"):
        decoder.step()
    list(decoder.run())
    assert request.tokens == expected(request.prompt, 6)


def raise_once(function: Callable[..., Any]) -> Callable[..., Any]:
    broken = []

    def call(*args: Any) -> Any:
        if not broken:
            broken.append(True)
            raise MkError("broken off")
        return function(*args)

    return call


@pytest.mark.parametrize(("keys", "bucket"), [(1, 256), (256, 256), (257, 512), (513, 1024), (262_144, 262_144)])
def test_buckets_are_powers_of_two(keys: int, bucket: int) -> None:
    assert bucket_for(keys) == bucket


def test_programs_are_lowered_once_and_refused_early() -> None:
    programs = Programs(GEOMETRY, 2, STATIC)
    assert programs.get(256) is programs.get(256) is not programs.get(512)
    backwards = Plan(3, ("attn", *(wave for wave in WAVE_ORDERS["default"] if wave != "attn")), "row_owner")
    with pytest.raises(MkError, match="deadlock"):
        machine(1, plan=backwards)
    with pytest.raises(MkError, match="moe_claimers=4 must lie in 0..3"):
        machine(1, plan=Plan(3, WAVE_ORDERS["default"], "round_robin", moe_claimers=4))


def test_engines_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    names = {asked: engine_name(load_config([f"engine={asked}"]), GEOMETRY, 1) for asked in ("auto", "reference")}
    assert names == {"auto": "interpreter", "reference": "reference"}
    with pytest.raises(MkError, match="engine=cuda: there is no CUDA device here") as caught:
        require_engine(load_config(["engine=cuda"]), 1)
    assert caught.value.hint and caught.value.hint.startswith("engine=interpreter executes")
    with pytest.raises(MkError) as caught:  # of a model that no CPU holds
        require_engine(load_config(["engine=cuda", "model=north_mini_code", "weights=random"]), 1)
    assert "engine=interpreter model=nano weights=checkpoint gpu=cpu" in (caught.value.hint or "")

    source().write_folder(tmp_path)
    axes = [f"model.path={tmp_path}", "weights=random", "gpu.sms=3"]
    config = load_config([*axes, "schedule=work_stealing", "schedule.moe_claimers=3", "placement=round_robin"])
    model = open_model(config.model, config.weights, tmp_path)
    engine = make_engine(config, model, 2, 100)
    assert isinstance(engine, MachineEngine) and engine.programs[engine.rows].plan.moe_claimers == 3
    assert engine.programs[engine.rows].plan.attention_claimers == config.schedule.attention_claimers
    with pytest.raises(MkError, match="a context of 1025 tokens exceeds the model's max_positions=1024"):
        make_engine(config, model, 2, 1025)
    config = load_config([*axes, "engine=reference"])
    assert isinstance(make_engine(config, model, 2, 1024), ReferenceEngine)
    with pytest.raises(MkError, match="engine=reference computes in float32"):
        make_engine(load_config([*axes, "engine=reference", "engine.numerics=kernel"]), model, 1, 9)
    with pytest.raises(MkError, match="split_keys=100 is not a positive multiple"):
        make_engine(load_config([*axes, "engine.attention.split_keys=100"]), model, 1, 9)
