"""The decode benchmark's arithmetic, its routing tables and its refusals; the run itself on a stand-in for the card."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import decode_throughput as experiment
from experiments import device_weights, settings
from experiments.decode_throughput import check_context
from experiments.forced_routing import distinct_experts, forced_ids
from experiments.kernel_checks import Oracle, Outcome, consult, relative_error, same_bits, starts_of
from mk.compose import experiment_main, load_config
from mk.config import RoutingConfig, group_options
from mk.errors import MkError
from mk.kernel.launches import RUNTIMES
from mk.kernel.runtime import Runtime
from mk.model.geometry import PRESETS, Geometry
from mk.model.opening import NANO
from mk.model.reference import reference_forward
from mk.results.recompute import different
from mk.results.rows import read_raw, read_rows
from mk.roofline import step_bytes, uniform_experts
from mk.routing import make_router
from tests.device_rig import FakeLibrary, fake_build, fake_device, next_ids, next_logits
from tests.interpreter_rig import GEOMETRY, random_tokens, source

__all__ = ["fake_device"]

FULL = PRESETS["north_mini_code"]
UNIFORM = RoutingConfig("uniform", seed=3)


def test_bytes_of_the_full_model_at_8k() -> None:
    """7.13 GB at batch 1: attention 1.850, router 0.025, dense 0.038, head 1.074, 8 experts a layer 3.624, KV 0.520."""
    one = step_bytes(FULL, [8192], 8)
    assert one.attention == 49 * (5120 * 2048 + 2048 * 4096) * 2
    assert one.head == 262_144 * 2048 * 2
    assert one.experts == 48 * 8 * 3 * 2048 * 768 * 2
    assert one.kv == (13 * 8192 + 36 * 4096) * 4 * 128 * 2 * 2
    assert round(one.total / 1e9, 2) == 7.13
    floors = [step_bytes(FULL, [8192] * b, uniform_experts(FULL, b)).total / 4.8e9 for b in (1, 2, 4, 8)]
    assert [round(ms, 3) for ms in floors] == [1.485, 2.302, 3.804, 6.36]


def test_uniform_tables_are_the_router_of_that_mode_and_touch_what_chance_says() -> None:
    tables = {rows: forced_ids(UNIFORM, FULL, rows, 12) for rows in (1, 2, 8)}
    router, logits = make_router(UNIFORM, FULL, 8), np.zeros((8, FULL.experts), np.float32)
    assert router is not None
    for step, layer in ((0, 1), (11, 48), (5, 20)):
        assert (tables[8][step, layer].numpy() == router(layer, step, logits)).all()
    assert torch.equal(tables[2][:, :, :2], tables[8][:, :, :2])
    assert not torch.equal(tables[8][0, 1], tables[8][1, 1]) and not torch.equal(tables[8][0, 1], tables[8][0, 2])
    for rows, table in tables.items():
        mean = np.mean(distinct_experts(table[:, :, :rows], FULL))
        assert mean == pytest.approx(uniform_experts(FULL, rows), rel=0.02)
    assert forced_ids(RoutingConfig("checkpoint"), FULL, 1, 4) is None


def test_other_modes_touch_exactly_what_they_promise() -> None:
    correlated = forced_ids(RoutingConfig("correlated", seed=0, distinct=20), FULL, 4, 3)
    assert correlated is not None
    assert distinct_experts(correlated[:, :, :4], FULL) == [20] * len(FULL.sparse_layers)
    with pytest.raises(MkError, match="distinct=3"):
        forced_ids(RoutingConfig("correlated", seed=0, distinct=3), FULL, 4, 3)


def test_the_oracle_is_the_reference_and_bfloat16_is_near() -> None:
    tokens = torch.from_numpy(np.array(random_tokens(12, seed=0)))
    oracle = consult(source(), tokens, torch.device("cpu"))
    trace: list = []
    exact = reference_forward(GEOMETRY, source().tensor, tokens, trace=trace)
    assert same_bits(oracle.logits, exact)
    for layer in GEOMETRY.sparse_layers:
        assert torch.equal(oracle.ids[:, layer], trace[layer].expert_ids.int())
    median, most = relative_error(oracle.logits_bf16, exact)
    assert 1e-3 < median < 3e-2 and median <= most < 0.1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine=interpreter"], "not engine=interpreter"),
        (["engine.ring.slots=18"], "engine.ring.window_kb=[56, 64]: the kernel takes 32..32"),
        (["engine.ring.window_kb=[32,24]"], "engine.ring.window_kb=[32, 24]: the kernel takes 32..64"),
        (["engine.ring.window_kb=[72,64]", "experiment.batches=[8]"], "the kernel takes 32..64"),
        (["experiment.batches=[]"], "experiment.batches is empty"),
        (["experiment.batches=[1,9]"], "must lie in 1..8"),
        (["experiment.steps=0"], "experiment.steps=0"),
        (["experiment.warmup=-1"], "experiment.warmup=-1"),
        (["experiment.context=130", "experiment.check_tokens=8"], "leaves no room"),
        (["experiment.check_tokens=9000"], "experiment.check_tokens=9000"),
        (["engine.ring.window_kb=41"], "window_kb=41"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything_is_loaded(overrides: list[str], message: str) -> None:
    with pytest.raises(MkError) as caught:
        experiment.main(load_config(["experiment=decode_throughput", *overrides]))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["op_bench", "transformers_decode"])
def test_another_engine_is_refused_by_the_experiments_own_name(name: str) -> None:
    with pytest.raises(MkError, match=f"^{name} times the kernel, not engine=interpreter"):
        experiment_main(name)(load_config([f"experiment={name}", "engine=interpreter"]))


DECODES = sorted(
    name
    for name in group_options("experiment")
    if {"context", "steps", "warmup"}
    <= {field.name for field in dataclasses.fields(getattr(settings, name.title().replace("_", "")))}
)


@pytest.mark.parametrize("card", [False, True])
@pytest.mark.parametrize("name", DECODES)
def test_no_experiment_decodes_beyond_the_models_positions(
    name: str, card: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    cfg = load_config([f"experiment={name}", f"run_dir={tmp_path / 'runs'}"])
    most = 500_000 - cfg.experiment.steps // 2
    beyond = load_config([f"experiment={name}", f"run_dir={tmp_path / 'runs'}", f"experiment.context={most + 1}"])
    if hasattr(cfg.experiment, "variants"):
        beyond = dataclasses.replace(
            beyond, experiment=dataclasses.replace(beyond.experiment, variants=[f"experiment.context={most + 1}"],
                                                   axes=["experiment.context"])
        )  # fmt: skip
    with pytest.raises(MkError, match=f"experiment.context={most + 1}, and .* exceed the 500000 positions") as caught:
        experiment_main(name)(beyond)
    hint, most_is = caught.value.hint or "", f"experiment.context={most} is the most"
    own = f"experiment.variants without experiment.context={most + 1}; " if hint.startswith("experiment.var") else ""
    assert hint == own + most_is and not (tmp_path / "runs").exists()
    check_context(load_config([f"experiment={name}", f"experiment.context={most}"]))


# ---- the whole run, on nano and a stand-in whose step takes a millisecond by the events' clock


NANO_GEOMETRY = Geometry.from_hf_config(NANO)
RUN = [
    "experiment=decode_throughput",
    "model=nano",
    "weights=checkpoint",
    "experiment.batches=[1,2]",
    "experiment.context=300",
    "experiment.steps=40",
    "experiment.warmup=3",
    "experiment.check_tokens=20",
]


@pytest.fixture
def stand_in(fake_device: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    def known(kind: type[Runtime]) -> Callable[..., Runtime]:
        def made(*args: Any, **more: Any) -> Runtime:
            fake_device.runtime = runtime = kind(*args, **more)
            return runtime

        return made

    def oracle(weights: object, tokens: torch.Tensor, device: object) -> Oracle:
        places = list(enumerate(tokens.tolist(), start=1))
        logits = torch.stack([next_logits(NANO_GEOMETRY, token, keys) for keys, token in places])
        ids = torch.zeros(len(places), NANO_GEOMETRY.layers, NANO_GEOMETRY.top_k, dtype=torch.int32)
        for layer in NANO_GEOMETRY.sparse_layers:
            ids[:, layer] = torch.stack([next_ids(NANO_GEOMETRY, token, keys, layer) for keys, token in places])
        return Oracle(tokens, logits, logits * 1.01, ids, ids[:, 1])

    for name, kind in RUNTIMES.items():
        monkeypatch.setitem(RUNTIMES, name, known(kind))
    monkeypatch.setattr("mk.kernel.build.build", fake_build)
    monkeypatch.setattr(device_weights, "consult", oracle)
    monkeypatch.setattr(device_weights, "_held", None)
    monkeypatch.setattr(experiment, "DEVICE", torch.device("cpu"))
    return fake_device


def rows_of(folder: Path) -> list:
    return [row for path in folder.glob("*/rows.jsonl") for row in read_rows(path)]


def test_a_run_writes_a_row_a_batch_and_ends_with_a_table(
    stand_in: FakeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert experiment.main(load_config([*RUN, f"run_dir={tmp_path}"])) == 0
    first, second = rows_of(tmp_path)
    assert (first.batch, second.batch, first.engine, first.steps) == (1, 2, "cuda", 40)
    assert (first.p10_ms, first.p50_ms, first.p90_ms, first.tokens_per_s) == (1.0, 1.0, 1.0, 1000.0)
    assert first.distinct_experts == NANO_GEOMETRY.top_k
    assert first.bytes_per_step == step_bytes(NANO_GEOMETRY, [300], NANO_GEOMETRY.top_k).total
    assert first.build_hash == "0123456789abcdef" and first.schedule_hash != second.schedule_hash
    assert all(first.checks.values()) and all(second.checks.values())
    assert set(second.checks) - set(first.checks) == {"bits_rows", "bits_alone"}  # one row has nothing beside it
    assert len(second.checks) == 9 and first.sampling is None
    assert (first.window_kb, second.window_kb) == (56, 64)
    raw = [json.loads(line) for path in tmp_path.glob("*/raw.jsonl") for line in path.read_text().splitlines()]
    assert [len(each["step_ms"]) for each in raw] == [40, 40]
    assert first.distinct_experts == np.mean(raw[0]["experts_by_layer"])
    table = capsys.readouterr().out.split("\n\n")[-1]
    assert "routing uniform" in table and "p50 ms" in table and table.count("1.0000") >= 6


def test_every_step_of_one_row_has_its_own_window(stand_in: FakeLibrary, tmp_path: Path) -> None:
    """Checks of another batch, bounds and steps of many launches included; a number is for all."""
    launched: set[tuple[int, int]] = set()
    stand_in.fault = lambda rt, step: launched.add((rt.params.rows, 8 * rt.params.window_slots))
    for folder, more in (("bound", "experiment.zero_wait=true"), ("graph", "experiment.launches=graph")):
        launched.clear()
        assert experiment.main(load_config([*RUN, more, f"run_dir={tmp_path}/{folder}"])) == 0
        assert launched == {(1, 56), (2, 64)}
    launched.clear()
    assert experiment.main(load_config([*RUN, "engine.ring.window_kb=48", f"run_dir={tmp_path}/48"])) == 0
    assert launched == {(1, 48), (2, 48)} and {row.window_kb for row in rows_of(tmp_path / "48")} == {48}


def test_bytes_of_the_other_reading_of_a_window_are_computed_again(stand_in: FakeLibrary, tmp_path: Path) -> None:
    assert experiment.main(load_config([*RUN, "model.window=vllm", f"run_dir={tmp_path}"])) == 0
    row, _ = rows_of(tmp_path)
    (raw,) = (read_raw(path) for path in tmp_path.glob("*/raw.jsonl"))
    more = dataclasses.replace(NANO_GEOMETRY, window_includes_extra=True)
    assert row.bytes_per_step == step_bytes(more, [300], more.top_k).total
    assert row.bytes_per_step > step_bytes(NANO_GEOMETRY, [300], more.top_k).total
    assert list(different(row, raw[row.raw_sha256 or ""])) == []


def test_a_bound_is_labelled_and_claims_no_check(
    stand_in: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defines = []
    monkeypatch.setattr(
        "mk.kernel.build.build", lambda *args, **more: defines.append(more.get("defines")) or fake_build(*args, **more)
    )
    assert experiment.main(load_config([*RUN, "experiment.zero_wait=true", f"run_dir={tmp_path}"])) == 0
    rows = rows_of(tmp_path)
    assert [(row.batch, row.bound) for row in rows] == [(1, None), (2, None), (1, "zero_wait"), (2, "zero_wait")]
    assert rows[2].checks == {"schedule_verified": True} and rows[2].logits_error is None
    assert rows[2].bytes_per_step == rows[0].bytes_per_step and defines == [(), ("MK_ZERO_WAIT",)]


def test_the_bound_has_an_experiment_of_its_own(stand_in: FakeLibrary, tmp_path: Path) -> None:
    preset = ["experiment=zero_wait_bound", *RUN[1:], f"run_dir={tmp_path}"]
    assert experiment_main("zero_wait_bound")(load_config(preset)) == 0
    (folder,) = tmp_path.iterdir()
    assert "zero_wait_bound" in folder.name
    assert [row.bound for row in read_rows(folder / "rows.jsonl")] == [None, None, "zero_wait", "zero_wait"]


@pytest.mark.parametrize("name", ["decode_throughput", "zero_wait_bound", "vllm_decode"])
def test_without_a_card_steps_are_simulated_and_labelled(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small = [*RUN[1:], "weights=random", f"run_dir={tmp_path}"]
    assert experiment_main(name)(load_config([f"experiment={name}", *small])) == 0
    rows = rows_of(tmp_path)
    assert {(row.clock, row.engine, row.ratio) for row in rows} == {("simulated", "simulator", None)}
    bounds = [None, None] if name != "zero_wait_bound" else [None, "zero_wait"] * 2
    assert [row.bound for row in rows] == bounds and {row.batch for row in rows} == {1, 2}
    out = capsys.readouterr().out
    assert "simulated step times, nano on h200" in out and ("vLLM is missing" in out) == (name == "vllm_decode")


def test_an_oracle_is_a_bound_from_a_build_of_its_own(stand_in: FakeLibrary, tmp_path: Path) -> None:
    assert experiment.main(load_config([*RUN, f"run_dir={tmp_path}/uniform"])) == 0
    assert experiment.main(load_config([*RUN, "routing=oracle", f"run_dir={tmp_path}/oracle"])) == 0
    uniform, oracle = (rows_of(tmp_path / name)[1] for name in ("uniform", "oracle"))
    assert (oracle.routing, oracle.bound, oracle.checks) == ("oracle", "oracle", uniform.checks)
    assert (uniform.routing, uniform.bound) == ("uniform", None) and uniform.routing_hash == oracle.routing_hash
    assert oracle.distinct_experts == uniform.distinct_experts and oracle.bytes_per_step == uniform.bytes_per_step


def test_the_routers_choice_is_recorded_and_replayed(stand_in: FakeLibrary, tmp_path: Path) -> None:
    assert experiment.main(load_config([*RUN, "routing=checkpoint", f"run_dir={tmp_path}/own"])) == 0
    (trace,) = tmp_path.glob("own/*/routing_batch2.npz")
    replay = ["routing=replay", f"routing.path={trace}", "experiment.batches=[2]"]
    assert experiment.main(load_config([*RUN, *replay, f"run_dir={tmp_path}/replay"])) == 0
    (_, own), (again,) = rows_of(tmp_path / "own"), rows_of(tmp_path / "replay")
    assert again.routing_hash == own.routing_hash and again.distinct_experts == own.distinct_experts
    assert again.data and set(again.data) == {"routing.path"}


def test_sampled_steps_are_timed_on_the_programs_that_draw(stand_in: FakeLibrary, tmp_path: Path) -> None:
    assert experiment.main(load_config([*RUN, f"run_dir={tmp_path}/greedy"])) == 0
    top_k = ["sampling=top_p", "sampling.top_k=20"]
    assert experiment.main(load_config([*RUN, *top_k, f"run_dir={tmp_path}/top_p"])) == 0
    greedy, drawn = (rows_of(tmp_path / name)[1] for name in ("greedy", "top_p"))
    assert drawn.sampling == "temperature 1, top_k 20, top_p 0.95" and drawn.checks["drawn_as_twin"]
    assert drawn.schedule_hash != greedy.schedule_hash


def test_tokens_that_the_twin_does_not_draw_get_no_row(stand_in: FakeLibrary, tmp_path: Path) -> None:
    stand_in.fault = lambda rt, step: rt["logits"].neg_() if rt.params.advance else None
    with pytest.raises(MkError, match="batch 1: the last step's tokens are not"):
        experiment.main(load_config([*RUN, f"run_dir={tmp_path}"]))
    assert not rows_of(tmp_path)


@pytest.mark.parametrize(
    ("breaks", "check"),
    [
        (lambda rt, step: rt["logits"][0].mul_(1.1), "logits_within_noise"),
        (lambda rt, step: rt["logits"][1].mul_(1 + 2**-20), "bits_rows"),
        (lambda rt, step: rt["logits"].add_(2**-16 * (step >= 20)), "bits_repeat"),
        (lambda rt, step: rt["logits"].add_(2**-16 * (step >= 40)), "bits_permuted"),
        (lambda rt, step: rt["logits"].mul_(1 + 2**-20 * (rt.params.rows == 1)), "bits_alone"),
        (lambda rt, step: rt["logits"].add_(torch.nan_to_num(rt["x"][0, 1, 0], nan=2**-16)), "bits_poisoned"),
        (lambda rt, step: rt["route_ids"].add_(1) if not rt.params.forced_ids else None, "router_within_noise"),
    ],
)
def test_a_kernel_that_fails_a_check_gets_no_row(stand_in: FakeLibrary, tmp_path: Path, breaks, check: str) -> None:
    stand_in.fault = breaks
    with pytest.raises(MkError, match=f"the kernel failed .*{check}"):
        experiment.main(load_config([*RUN, f"run_dir={tmp_path}"]))
    assert not rows_of(tmp_path)


@pytest.mark.parametrize("row", range(8))
def test_every_batch_is_checked_on_its_own_program_in_all_its_rows(
    stand_in: FakeLibrary, tmp_path: Path, row: int
) -> None:
    def breaks(rt: Runtime, step: int) -> None:
        if rt.params.rows == 8:
            rt["logits"][row].mul_(1 + 2**-20)

    stand_in.fault = breaks
    with pytest.raises(MkError, match="batch 8: the kernel failed"):
        experiment.main(load_config([*RUN, "experiment.batches=[1,8]", f"run_dir={tmp_path}"]))
    assert not rows_of(tmp_path)


def test_a_batch_of_any_size_has_rows_that_start_apart() -> None:
    assert starts_of(1) == (0,) and starts_of(3) == (0, 7, 14)
    for rows in range(4, 9):
        starts = starts_of(rows)
        assert starts.count(None) == 1 and len(set(starts)) == rows
        assert starts[::-1].index(None) != starts.index(None)  # mirrored, the idle row works


def test_figures_that_cannot_be_get_no_row(
    stand_in: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "run_checks", lambda *args: Outcome(1, {}, (0.0, 0.0), (0.0, 0.0)))
    slow = [*RUN, f"run_dir={tmp_path}", "gpu.nominal_tb_s=0.0001"]
    with pytest.raises(MkError, match="batch 1: p50 1.0000 ms is under"):
        experiment.main(load_config(slow))
    stand_in.fault = lambda rt, step: rt["route_ids"][:, 1].copy_(rt["route_ids"][:, 0])
    with pytest.raises(MkError, match=r"batch 2: 4\.00 distinct experts, uniform routing has 7\.33"):
        experiment.main(load_config([*RUN, f"run_dir={tmp_path}"]))
    stand_in.fault = lambda rt, step: rt["status"][0].fill_(1)
    with pytest.raises(MkError, match="batch 1: row 0: a logit is NaN or infinite"):
        experiment.main(load_config([*RUN, f"run_dir={tmp_path}"]))
