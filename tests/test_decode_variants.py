"""Variants: each is what the command line would have made, all in turn, told apart by their intervals."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import decode_throughput, decode_variants, device_weights
from mk.compose import experiment_main, load_config, vary
from mk.config import Config, config_hash, group_options
from mk.errors import MkError
from mk.model.geometry import PRESETS
from mk.results.recompute import different
from mk.results.rows import Row, read_raw, read_rows
from mk.roofline import uniform_experts
from mk.routing import Trace
from mk.schedule.placement import PLACEMENTS
from tests.device_rig import FakeLibrary, fake_device
from tests.test_decode_throughput import stand_in

__all__ = ["fake_device", "stand_in"]

SMALL = ["model=nano", "weights=checkpoint", "experiment.batches=[1,2]"]


def ablation(*more: str) -> Config:
    return load_config(["experiment=wave_order_ablation", *SMALL, *more])


@pytest.mark.parametrize(
    "overrides",
    [
        ["wave_order=parted"],
        ["schedule=work_stealing", "schedule.attention_claimers=7"],
        ["engine.ring.window_kb=40", "routing=checkpoint"],
        ["experiment.context=1024", "experiment.batches=[3]"],
    ],
)
def test_a_variant_is_the_configuration_of_the_command_line(overrides: list[str]) -> None:
    base = ["experiment=decode_throughput", *SMALL]
    varied = vary(load_config(base), overrides)
    assert config_hash(varied) == config_hash(load_config([*base, *overrides]))
    assert config_hash(varied) != config_hash(load_config(base))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("wave_order=partd", "unknown option wave_order=partd"),
        ("engine.ring.windw_kb=40", "engine.ring.windw_kb"),
        ("engine.ring.window_kb=four", "window_kb"),
        ("engine.ring.window_kb=41", "window_kb=41 is no multiple"),
        ("wave_order=default,parted", "names several values"),
    ],
)
def test_a_variant_that_cannot_be_is_named(override: str, message: str) -> None:
    with pytest.raises(MkError, match=message):
        vary(load_config(["experiment=decode_throughput"]), [override])


ABLATIONS = ("wave_order", "placement", "schedule", "routing", "kernel", "ring", "sampling", "trace", "plan")


@pytest.mark.parametrize("name", ABLATIONS)
def test_variants_of_an_ablation_differ_in_its_axes_alone(name: str) -> None:
    jobs = decode_variants.variants(load_config([f"experiment={name}_ablation"]))
    assert len({config_hash(job) for _, job in jobs}) == len(jobs) >= 3
    assert {job.experiment.name for _, job in jobs} == {"decode_throughput"}


def test_the_ablations_have_what_they_are_named_for() -> None:
    def values(name: str, of: Callable[[Config], object]) -> list:
        return [of(job) for _, job in decode_variants.variants(load_config([f"experiment={name}"]))]

    orders = values("wave_order_ablation", lambda job: job.wave_order.name)
    assert orders == ["default", "interleaved", "attention_first", "oproj_before_down"]
    assert set(values("placement_ablation", lambda job: job.placement.name)) == set(PLACEMENTS)
    plans = values("plan_ablation", lambda job: (job.wave_order.name, job.placement.name, job.schedule.name))
    orders = set(group_options("wave_order")) - {"custom"}
    assert sorted(plans) == sorted(itertools.product(orders, PLACEMENTS, ("static", "work_stealing")))
    claimers = values("schedule_ablation", lambda job: (job.schedule.attention_claimers, job.schedule.moe_claimers))
    assert claimers == [(None, None), (33, 33), (66, 66), (132, 132)]
    routings = values("routing_ablation", lambda job: job.routing)
    uniform = uniform_experts(PRESETS["north_mini_code"], 8)
    assert [r.distinct for r in routings if r.distinct] == [round(uniform * share) for share in (0.5, 0.75, 1)]
    assert {r.pattern for r in routings} >= {"all_same", "all_different"}
    assert {r.name for r in routings} == set(group_options("routing"))
    rings = values("ring_ablation", lambda job: (job.engine.ring.slots, job.engine.ring.window_kb))
    assert rings == [(22, 32), (18, 32), (20, 32)]
    assert values("trace_ablation", lambda job: job.engine.trace) == ["none", "moments", "waits"]
    draws = values("sampling_ablation", lambda job: decode_throughput.configured_sampling(job, 1)[0])
    assert draws[0].greedy and not any(params.greedy for params in draws[1:])
    assert {(params.top_k > 0, params.top_p < 1) for params in draws[1:]} == {(a, b) for a in (0, 1) for b in (0, 1)}
    kernels = values("kernel_ablation", lambda job: job)
    assert {kernel.engine.ring.window_kb for kernel in kernels[5:]} == {kernels[0].engine.ring.window_kb} == {64}
    apart = [[k.engine.ring.slots, k.engine.ring.window_kb, k.engine.ring.copy_kb, k.routing.name] for k in kernels]
    assert all(sum(a != b for a, b in zip(each, apart[0], strict=True)) <= 1 for each in apart)  # one thing at a time


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ("['wave_order=default','wave_order=parted engine.ring.window_kb=40']", "differ in engine.ring.window_kb"),
        ("['schedule=static','schedule=work_stealing']", "differ in schedule.attention_claimers"),
        ("['routing=uniform','routing=oracle']", "differ in routing.name"),
    ],
)
def test_variants_that_differ_in_more_than_the_axes_are_refused(variants: str, message: str) -> None:
    with pytest.raises(MkError, match=message):
        decode_variants.variants(ablation(f"experiment.variants={variants}"))


def test_an_axis_that_is_no_key_is_named() -> None:
    with pytest.raises(MkError, match=r"experiment\.axes: wave_ordr is no key of the configuration"):
        decode_variants.variants(ablation("experiment.axes=[wave_order,wave_ordr]"))


@pytest.mark.parametrize("key", ["batch.size", "engine.prefix_cache.generated", "experiment.rounds"])
def test_a_variant_in_a_key_that_nothing_reads_is_refused(key: str) -> None:
    with pytest.raises(MkError, match=f"decode_throughput does not read {key}"):
        decode_variants.variants(ablation(f"experiment.variants=['{key}=1','{key}=2']", f"experiment.axes=[{key}]"))


# ---- on a stand-in for the card ----
CARD = ["model=nano", "weights=checkpoint", "experiment.batches=[1,2]", "experiment.context=300", "experiment.steps=40",
        "experiment.warmup=3", "experiment.check_tokens=20", "experiment.rounds=5"]  # fmt: skip


def on_card(name: str, folder: Path, *more: str) -> tuple[int, list[Row], dict[str, dict]]:
    status = decode_variants.main(load_config([f"experiment={name}", *CARD, f"run_dir={folder}", *more]))
    (path,) = folder.iterdir()
    return status, read_rows(path / "rows.jsonl"), read_raw(path / "raw.jsonl")


def test_arms_run_in_turn_and_each_is_compared_with_the_first(
    stand_in: FakeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows, raw = on_card("wave_order_ablation", tmp_path)
    assert status == 0 and len(rows) == 2 * 5
    for batch in (1, 2):
        first, *others = [row for row in rows if row.batch == batch]
        assert first.arm == "wave_order=default" and first.ratio is None
        assert others[-1].arm == "wave_order=default (again)"
        assert others[-1].schedule_hash == first.schedule_hash
        assert len({row.schedule_hash for row in (first, *others)}) == 4
        assert len({row.routing_hash for row in (first, *others)}) == 1  # the same ids in all arms
        for row in (first, *others):
            assert row.steps == 40 and len(raw[row.raw_sha256 or ""]["block_ms"]) == 5
            assert row.tasks and row.tasks["topk"] > 0 and row.experiment == "wave_order_ablation"
        for row in others:
            assert (row.ratio, row.ratio_to) == (1.0, first.digest)
            assert list(different(row, raw[row.raw_sha256 or ""])) == []
    out = capsys.readouterr().out
    assert out.count("no detectable difference") == 8


def test_an_effect_is_told_from_noise_and_a_variant_that_differs_from_itself_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, stand_in: FakeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = {"drifts": 0.0}
    noise = itertools.cycle([0.0, 0.001, 0.002])
    measure = decode_variants.Bench.measure

    def timed(self: decode_variants.Bench, *args: int) -> decode_variants.Timing:
        timing = measure(self, *args)
        slower["drifts"] += slower.get("by", 0.0)
        ms = 1 + next(noise) + slower["drifts"] + 0.1 * (self.cfg.wave_order.name == "parted")
        return dataclasses.replace(timing, step_ms=[ms] * len(timing.step_ms))

    monkeypatch.setattr(decode_variants.Bench, "measure", timed)
    one = ["experiment.variants=['wave_order=default,interleaved,parted']", "experiment.batches=[1]"]
    status, rows, _ = on_card("wave_order_ablation", tmp_path / "a", *one)
    out = capsys.readouterr().out
    by_arm = {row.arm: row for row in rows}
    parted = by_arm["wave_order=parted"]
    assert status == 0 and parted.ratio_low and 1 < parted.ratio_low < 1.1 < (parted.ratio_high or 0)
    assert out.count("no detectable difference") == 2 and not parted.unstable
    monkeypatch.setattr(decode_variants, "reversed", list, raising=False)  # always forwards: a drift is not cancelled
    slower["by"] = 0.01
    status, rows, _ = on_card("wave_order_ablation", tmp_path / "b", *one)
    assert status == 1 and all("differs from itself" in (row.unstable or "") for row in rows)
    assert "failed: batch 1: wave_order=default differs from itself" in capsys.readouterr().out


def test_arms_that_execute_the_same_fail_the_run(stand_in: FakeLibrary, tmp_path: Path) -> None:
    same = "experiment.variants=['wave_order=default','wave_order=custom wave_order.waves=[qkv,router,topk,route_setup,"
    same += "moe_gather,attn,attn_combine,moe_up,moe_down,moe_combine,oproj,rmsnorm]']"
    with pytest.raises(MkError, match=r"'wave_order=default' and 'wave_order=custom .*' execute the same"):
        on_card("wave_order_ablation", tmp_path, same)


@pytest.mark.parametrize(("batch", "same"), [(1, "56"), (2, "64")])
@pytest.mark.parametrize("card", [True, False])
def test_windows_by_batch_size_execute_what_the_number_of_that_size_does(
    card: bool, batch: int, same: str, stand_in: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    arms = "experiment.variants=['engine.ring.window_kb=[56,64]','engine.ring.window_kb=64,56']"
    small = ["model=slice", "weights=random"] if not card else []  # of nano no step is simulated
    with pytest.raises(MkError, match=rf"'engine.ring.window_kb=\[56,64\]' and 'engine.ring.window_kb={same}' execute"):
        on_card("kernel_ablation", tmp_path, arms, f"experiment.batches=[{batch}]", *small)


def test_a_routing_ablation_has_other_ids_in_every_arm_and_names_the_oracle(
    stand_in: FakeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = ["routing=uniform", "routing=correlated routing.distinct=6", "routing=adversarial", "routing=checkpoint"]
    arms = f"experiment.variants={[*variants, 'routing=oracle']}"
    status, rows, _ = on_card("routing_ablation", tmp_path, arms, "experiment.batches=[2]")
    by_arm = {row.arm: row for row in rows}
    assert status == 0 and len(by_arm) == 6
    assert len({by_arm[arm].routing_hash for arm in variants}) == 4
    assert by_arm["routing=correlated routing.distinct=6"].distinct_experts == 6
    oracle, uniform = by_arm["routing=oracle"], by_arm["routing=uniform"]
    assert (oracle.bound, oracle.routing_hash) == ("oracle", uniform.routing_hash)
    assert oracle.schedule_hash == uniform.schedule_hash == by_arm["routing=checkpoint"].schedule_hash
    assert "(a bound)" in capsys.readouterr().out
    same = "experiment.variants=['routing=adversarial','routing=correlated routing.distinct=8']"  # of 2 x 4 ids
    with pytest.raises(MkError, match="'routing=adversarial' and 'routing=correlated .*' execute the same"):
        on_card("routing_ablation", tmp_path / "same", same, "experiment.batches=[2]")
    with pytest.raises(MkError, match="names 'routing=uniform' twice"):
        on_card("routing_ablation", tmp_path / "twice", "experiment.variants=['routing=uniform','routing=uniform']")


def test_what_the_router_chose_is_replayed_in_the_same_run(stand_in: FakeLibrary, tmp_path: Path) -> None:
    arms = "experiment.variants=['routing=checkpoint','routing=uniform','routing=replay routing.path=recorded']"
    status, rows, _ = on_card("routing_ablation", tmp_path, arms, "experiment.batches=[2]")
    by_arm = {row.arm: row for row in rows}
    again = by_arm["routing=replay routing.path=recorded"]
    assert status == 0 and set(again.data or {}) == {"routing.path"}
    (path,) = tmp_path.glob("*/routing_batch2.npz")
    settings = load_config(["experiment=routing_ablation", *CARD]).experiment
    steps, blocks = settings.steps // settings.rounds, range(settings.rounds)
    ids = Trace.load(path).ids
    assert len(ids) == settings.warmup + settings.steps
    timed = [step for b in blocks for step in ids[b * steps + settings.warmup : (b + 1) * steps + settings.warmup]]
    experts = np.mean([[len(np.unique(layer)) for layer in step] for step in timed])
    assert again.distinct_experts == pytest.approx(experts)
    for given in (
        "['routing=replay routing.path=recorded','routing=checkpoint']",
        "['routing=uniform','routing=replay routing.path=recorded']",
    ):
        where = tmp_path / str(len(given))
        status, rows, _ = on_card("routing_ablation", where, f"experiment.variants={given}", "experiment.batches=[2]")
        assert status == 1 and "routing=replay routing.path=recorded" not in {row.arm for row in rows}


def test_what_the_router_chose_is_replayed_where_variants_run_one_after_the_other(
    stand_in: FakeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again, one = "routing=replay routing.path=recorded", ["experiment.rounds=1", "experiment.batches=[2]"]
    arms = f"experiment.variants=['routing=checkpoint','routing=uniform','{again}']"
    status, rows, _ = on_card("routing_ablation", tmp_path / "one", arms, *one)
    by_arm = {row.arm: row for row in rows}
    assert status == 0 and by_arm[again].routing_hash == by_arm["routing=checkpoint"].routing_hash
    (path,) = tmp_path.glob("one/*/routing_batch2.npz")
    assert (by_arm[again].data or {}).keys() == {"routing.path"} and len(Trace.load(path).ids) == 43
    lost = f"experiment.variants=['{again}','routing=checkpoint']"
    more = ["experiment.rounds=1", "experiment.batches=[1,2]"]
    for number, given in enumerate(([lost, *one], [arms, *more])):  # none before it; more batches than one
        status, rows, _ = on_card("routing_ablation", tmp_path / str(number), *given)
        assert status == 1 and again not in {row.arm for row in rows}
        assert f"failed: {again}: routing.path=recorded is what a variant before it" in capsys.readouterr().out


@pytest.mark.parametrize("rounds", ["5", "1"])
def test_a_variant_that_fails_stops_no_other(
    rounds: str,
    monkeypatch: pytest.MonkeyPatch,
    stand_in: FakeLibrary,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check = decode_variants.Bench.check

    def fails(self: decode_variants.Bench) -> None:
        if self.cfg.wave_order.name == "parted":
            raise MkError("batch 1: bits_repeat failed")
        check(self)

    monkeypatch.setattr(decode_variants.Bench, "check", fails)
    arms = "experiment.variants=['wave_order=default,parted,interleaved']"
    status, rows, _ = on_card("wave_order_ablation", tmp_path, arms, f"experiment.rounds={rounds}")
    out = capsys.readouterr().out
    assert status == 1 and "failed: wave_order=parted: batch 1: bits_repeat" in out
    again = {"wave_order=default (again)"} if rounds == "5" else set()
    assert {row.arm for row in rows} == {"wave_order=default", "wave_order=interleaved"} | again
    assert all((row.ratio is None) == (rounds == "1" or row.arm == "wave_order=default") for row in rows)


def breaks(monkeypatch: pytest.MonkeyPatch, failing: Callable[[int], bool], error: Exception) -> None:
    """Measurements of the first variant fail, by their number from 0."""
    measure, numbers = decode_variants.Bench.measure, itertools.count()

    def measured(self: decode_variants.Bench, *args: int) -> decode_variants.Timing:
        if self.cfg.wave_order.name == "default" and failing(next(numbers)):
            raise error
        return measure(self, *args)

    monkeypatch.setattr(decode_variants.Bench, "measure", measured)


TWO = ["experiment.variants=['wave_order=default,parted']"]


@pytest.mark.parametrize("error", [MkError("row 0: a logit is NaN"), torch.cuda.OutOfMemoryError("no memory")])
def test_without_the_second_arm_rows_are_written_and_unstable(
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    stand_in: FakeLibrary,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    breaks(monkeypatch, lambda number: number == 1, error)  # of batch 1, the second arm's first block
    status, rows, raw = on_card("wave_order_ablation", tmp_path, *TWO)
    out = capsys.readouterr().out
    assert status == 1 and f"failed: wave_order=default (again): batch 1, block 1 of 5: {error}" in out
    one, two = ([row for row in rows if row.batch == batch] for batch in (1, 2))
    assert [row.arm for row in one] == ["wave_order=default", "wave_order=parted"] and len(two) == 3
    assert {row.unstable for row in one} == {"wave_order=default was not compared with itself"}
    assert one[1].ratio == 1.0 and {row.unstable for row in two} == {None}
    assert all(list(different(row, raw[row.raw_sha256 or ""])) == [] for row in rows)


@pytest.mark.parametrize("measured", [0, 3])
def test_blocks_before_a_failure_are_written(
    measured: int, monkeypatch: pytest.MonkeyPatch, stand_in: FakeLibrary, tmp_path: Path
) -> None:
    first = [0, 3, 4, 7, 8]  # the first arm's blocks, when both arms of the first variant take turns
    breaks(monkeypatch, lambda number: number >= (first[measured]), MkError("illegal access"))
    status, rows, raw = on_card("wave_order_ablation", tmp_path, *TWO, "experiment.batches=[1]")
    by_arm = {row.arm: row for row in rows}
    parted = by_arm["wave_order=parted"]
    assert status == 1 and len(raw[parted.raw_sha256 or ""]["step_ms"]) == 40 and parted.unstable
    assert ("wave_order=default" in by_arm) == (parted.ratio is not None) == (measured > 0)
    if measured:
        default = by_arm["wave_order=default"]
        assert len(raw[default.raw_sha256 or ""]["block_ms"]) == measured == default.steps // 8
        assert (default.unstable or "").startswith("3 of 5 blocks")
        assert len(raw[parted.raw_sha256 or ""]["base_block_ms"]) == measured
    assert all(list(different(row, raw[row.raw_sha256 or ""])) == [] for row in rows)


def test_one_round_holds_one_bench_at_a_time_and_arms_that_execute_the_same_fail(
    monkeypatch: pytest.MonkeyPatch, stand_in: FakeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened, opens = [], decode_variants.Bench.open

    def tracked(job: Config) -> decode_variants.Bench:
        assert [held() for held in opened] == [None] * len(opened)
        bench = opens(job)
        opened.append(weakref.ref(bench))
        return bench

    monkeypatch.setattr(decode_variants.Bench, "open", tracked)
    arms = "experiment.variants=['routing=uniform','routing=adversarial','routing=correlated routing.distinct=8']"
    one = ["experiment.rounds=1", "experiment.batches=[2]"]
    status, rows, _ = on_card("routing_ablation", tmp_path, arms, *one)
    assert status == 1 and len(opened) == 3
    assert [row.arm for row in rows] == ["routing=uniform", "routing=adversarial"]
    said = "'routing=adversarial' and 'routing=correlated routing.distinct=8' execute the same"
    assert f"failed: routing=correlated routing.distinct=8: batch 2: {said}" in capsys.readouterr().out


# ---- without a card ----
@pytest.mark.parametrize("setting", ["batches=[0]", "batches=[9]", "batches=[]", "context=0"])
def test_without_a_card_settings_are_refused_as_on_one(setting: str) -> None:
    cfg = load_config(["experiment=wave_order_ablation", f"experiment.{setting}"])
    with pytest.raises(MkError) as caught:
        decode_variants.main(cfg)
    with pytest.raises(MkError) as on_one:
        decode_throughput.check_settings(decode_throughput.job_of(cfg))
    assert str(caught.value) == str(on_one.value) and setting.split("=")[0] in str(caught.value)


def test_without_a_card_a_run_of_which_nothing_can_be_simulated_is_refused_with_each_reason(tmp_path: Path) -> None:
    arms = ["experiment.variants=['routing=checkpoint','routing=oracle']", f"run_dir={tmp_path / 'runs'}"]
    said = (
        "routing_ablation needs a GPU, and torch sees none here. Not simulated: routing=checkpoint: the router's own "
        "choice, for which a simulated step has no logits; routing=oracle: another build of the kernel"
    )
    with pytest.raises(MkError, match=said):
        decode_variants.main(load_config(["experiment=routing_ablation", "model=slice", *arms]))
    assert not (tmp_path / "runs").exists()


def test_without_a_card_a_routing_that_fails_is_named_and_refuses_a_run_without_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What its mode only says once it is asked for ids."""
    lost, run = "routing=replay routing.path=/nowhere.npz", ["experiment=routing_ablation", "model=slice"]
    run += ["experiment.batches=[1]", f"run_dir={tmp_path / 'runs'}"]
    with pytest.raises(MkError, match="routing.path=/nowhere.npz: no such file") as caught:
        decode_variants.main(load_config([*run, f"experiment.variants=['{lost}']"]))
    assert "quickstart writes" in str(caught.value.hint) and not (tmp_path / "runs").exists()
    assert decode_variants.main(load_config([*run, f"experiment.variants=['{lost}','routing=uniform']"])) == 0
    assert f"not simulated: {lost}: routing.path=/nowhere.npz: no such file" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["ladder", "transformers_decode", "decode_throughput", "op_bench", "wave_occupancy"])
def test_without_a_card_nothing_is_written_for_a_card_without_costs(name: str, tmp_path: Path) -> None:
    with pytest.raises(MkError, match="gpu=cpu has no costs to simulate with"):
        experiment_main(name)(load_config([f"experiment={name}", "gpu=cpu", f"run_dir={tmp_path / 'runs'}"]))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["wave_order_ablation", "routing_ablation"])
def test_without_a_card_step_times_are_simulated_and_labelled(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["model=slice", "experiment.batches=[2]", "experiment.context=1024", "experiment.check_tokens=20"]
    if name == "routing_ablation":
        small.append(
            "experiment.variants=['routing=uniform','routing=checkpoint','routing=oracle','routing=adversarial',"
            "'routing=replay routing.path=recorded']"
        )
    assert decode_variants.main(load_config([f"experiment={name}", *small, f"run_dir={tmp_path}"])) == 0
    (folder,) = tmp_path.iterdir()
    rows, raw = read_rows(folder / "rows.jsonl"), read_raw(folder / "raw.jsonl")
    assert {(row.clock, row.engine) for row in rows} == {("simulated", "simulator")}
    assert len(rows) == (4 if name == "wave_order_ablation" else 2) and rows[0].ratio is None
    assert len({row.schedule_hash for row in rows}) == (4 if name == "wave_order_ablation" else 1)
    for row in rows[1:]:
        assert row.ratio == pytest.approx((row.p50_ms or 0) / (rows[0].p50_ms or 1), rel=1e-4)
        assert row.ratio_to == rows[0].digest and row.ratio_low is None
    assert row.model == "slice" and raw[row.raw_sha256 or ""]["step_ms"]
    for row in rows:
        assert list(different(row, raw[row.raw_sha256 or ""])) == []
    out = capsys.readouterr().out
    assert "simulated step times, slice on h200; measured by the same command" in out and "gpu=h200 engine=cuda" in out
    for message in (
        "routing=checkpoint: the router's own choice",
        "routing=oracle: another build of the kernel",
        "routing=replay routing.path=recorded: what a router chose",
    ):
        assert (f"not simulated: {message}" in out) == (name == "routing_ablation")


@pytest.mark.parametrize("variant", ["experiment=slow_sm", " "])
def test_a_variant_is_of_this_experiment(variant: str) -> None:
    with pytest.raises(MkError, match="is not some overrides of decode_throughput"):
        decode_variants.variants(ablation(f"experiment.variants=['{variant}']"))


def test_without_variants_there_is_nothing_to_run() -> None:
    with pytest.raises(MkError, match=r"experiment\.variants is empty"):
        decode_variants.variants(ablation("experiment.variants=[]"))


def test_weights_are_packed_once_for_configurations_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(device_weights, "_held", None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cfg = load_config(["experiment=decode_throughput", *SMALL])
    held = device_weights.hold_weights(cfg, cpu)
    assert device_weights.hold_weights(vary(cfg, ["wave_order=parted"]), cpu) is held
    assert held.oracle(3) is held.oracle(3) and len(held.oracle(4).tokens) == 4
    other = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, window="vllm"))
    assert device_weights.hold_weights(other, cpu) is not held
