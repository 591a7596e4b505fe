"""Greedy and searched schedules: what list scheduling decides, what a search finds and stores, and their ladder."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import numpy as np
import pytest

from experiments import schedule_paired, schedule_search
from experiments.schedule_figures import spearman
from experiments.schedule_ladder import LABELS
from mk.compose import load_config, vary
from mk.config import Config
from mk.errors import MkError
from mk.graph import LAYER_WAVES, StepShape
from mk.isa import ISA, Word
from mk.model.geometry import PRESETS
from mk.programs import Plan
from mk.results.runs import RunFolder
from mk.roofline import uniform_experts
from mk.schedule.bounds import bounds
from mk.schedule.costs import Costs, OpCosts
from mk.schedule.greedy import greedy_order, layer_waves, upward_ranks
from mk.schedule.search import AFTER, Judge, change, possible, random_candidate, search
from mk.schedule.simulate import costs_of, estimate, ring_of
from mk.schedule.simulator.engine import StandsStill
from mk.schedule.simulator.expand import Sample
from mk.schedule.stored import StoredSchedule
from mk.verify import verify
from tests.device_rig import FakeLibrary, fake_device
from tests.promotion import committed, folder_of, no, repository, require_kept
from tests.test_decode_throughput import stand_in
from tests.test_decode_variants import CARD
from tests.tiny_model import tiny_geometry

__all__ = ["committed", "fake_device", "repository", "stand_in"]

NORTH = PRESETS["north_mini_code"]
SLICE = ["experiment=schedule_search", "model=slice", "gpu.sms=16"]


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(["experiment=decode_throughput"])


def estimated(config: Config, rows: int) -> float:
    sample = Sample.draw(NORTH, config.routing, [8192] * rows)
    plan = Plan.from_config(config)
    return estimate(plan, NORTH, sample, 16384, costs_of(config.gpu), ring_of(config.engine.ring, rows))


def test_upward_ranks_add_up_along_the_longest_chain(config: Config) -> None:
    shape = StepShape(NORTH, 1, 8192, 132, own_rows=True)
    waves = layer_waves(shape, 8, costs_of(config.gpu), 8)
    assert waves["moe_up"].after == {"topk"} and waves["oproj"].after == {"attn_combine"}
    assert waves["rmsnorm"].after == {"oproj", "moe_down"}
    own = {name: max(wave.stream, wave.work) + wave.tail for name, wave in waves.items()}
    chain = ("router", "topk", "moe_up", "moe_down", "rmsnorm")
    assert upward_ranks(waves)["router"] == pytest.approx(sum(own[name] for name in chain))
    # 8 experts of 9.4 MB and the rest of a layer's weights, at the bandwidth that all SMs share
    bytes_ = 124.3e6 - 4.2e6 + 2 * 4 * 128 * 2 * 4096
    streamed = sum(wave.stream for wave in waves.values())
    assert streamed == pytest.approx(bytes_ / (costs_of(config.gpu).memory_tb_s * 1e6), rel=0.05)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_greedy_orders_hide_the_routing_and_stand_no_wave_before_its_inputs(config: Config, rows: int) -> None:
    shape = StepShape(NORTH, rows, 16384, 132, own_rows=True)
    order = greedy_order(shape, costs_of(config.gpu), uniform_experts(NORTH, rows))
    assert sorted(order) == sorted(LAYER_WAVES) and possible(order)
    # attention streams while top-k finds the experts, and O-proj while up's activations are handed over
    assert order.index("attn") < order.index("moe_up") and order.index("oproj") < order.index("moe_down")


def test_greedy_fills_another_wait_where_other_costs_say_so(config: Config) -> None:
    """With a hand-off of the projections that takes very long, the experts go first."""
    slow = costs_of(config.gpu)
    slow = dataclasses.replace(slow, ops={**slow.ops, "qkv": OpCosts(close=40.0)})
    order = greedy_order(StepShape(NORTH, 1, 16384, 132, own_rows=True), slow, 8)
    assert order.index("moe_up") < order.index("attn")


def test_greedy_is_as_fast_as_the_best_order_found_by_hand(config: Config) -> None:
    """Simulated, at batch 1; `default` is what it would otherwise be."""
    greedy = load_config(["experiment=decode_throughput", "schedule=greedy"])
    default = load_config(["experiment=decode_throughput", "wave_order=default"])
    assert estimated(greedy, 1) < 1.01 * estimated(config, 1) < 0.95 * estimated(default, 1)


def test_greedy_balances_time_where_row_owner_balances_bytes() -> None:
    """An entry that costs much more than its bytes goes to SMs that have no other one."""
    g = tiny_geometry(hidden=256, q_heads=4, kv_heads=2)
    costs = Costs(1e3, 0, 1e6, 0, 0, 0, 0, 0, 0, 0, 0, 0, {"router": OpCosts(close=100.0), "qkv": OpCosts(close=1.0)})
    order = ("router", *(wave for wave in LAYER_WAVES if wave != "router"))
    plan = Plan(8, order, "row_owner")
    layer = g.sparse_layers[0]

    def shared(program_plan: Plan) -> int:
        program = program_plan.lower(g, 1, 256)
        of = {
            name: set(
                program.sm_of[
                    (program.words[:, Word.OPCODE] == ISA.named(name).opcode) & (program.words[:, Word.LAYER] == layer)
                ].tolist()
            )
            for name in ("router", "qkv")
        }
        return len(of["router"] & of["qkv"])

    assert shared(dataclasses.replace(plan, costs=costs)) == 0 < shared(plan)


def test_greedy_programs_pass_the_verifier(config: Config) -> None:
    for rows in (1, 3):
        plan = Plan(6, LAYER_WAVES, "row_owner", costs=costs_of(config.gpu))
        verify(plan.lower(tiny_geometry(), rows, 512))
        verify(plan.lower(tiny_geometry(), rows, 512, draws=True))


def test_greedy_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(MkError, match="gpu=cpu has none"):
        Plan.from_config(load_config(["schedule=greedy"]))
    with pytest.raises(MkError, match="not placement=round_robin"):
        Plan.from_config(load_config(["schedule=greedy", "gpu=h200", "placement=round_robin"]))


def start() -> StoredSchedule:
    return StoredSchedule(LAYER_WAVES, "row_owner", 0, 0, 2, 128, 64, 8)


def test_candidates_never_stand_a_wave_before_its_inputs() -> None:
    rng = random.Random(3)
    schedule = start()
    for _ in range(300):
        assert possible(random_candidate(rng, schedule, 8).waves)
        schedule = change(rng, schedule, 8)
        assert possible(schedule.waves) and set(schedule.waves) == set(LAYER_WAVES)
    assert not possible(("moe_up", *LAYER_WAVES)) and set(AFTER) < set(LAYER_WAVES)


def test_a_search_finds_a_known_optimum_and_repeats_itself() -> None:
    """A judge that counts what differs from a hidden schedule: only the local search can take all steps to it."""
    hidden = dataclasses.replace(start(), window=5, max_splits=16, waves=("router", *LAYER_WAVES[:1], *LAYER_WAVES[2:]))

    def judge(schedule: StoredSchedule) -> float:
        wrong = sum(a != b for a, b in zip(schedule.waves, hidden.waves, strict=False))
        wrong += abs(len(schedule.waves) - len(hidden.waves))
        return 10.0 + wrong + abs(schedule.window - 5) + (schedule.max_splits != 16) + schedule.moe_claimers

    found = search(start(), judge, 8, candidates=5, steps=400, seed=1)
    assert (found.us, found.schedule.window, found.schedule.max_splits) == (10.0, 5, 16)
    assert found == search(start(), judge, 8, candidates=5, steps=400, seed=1)
    assert search(start(), judge, 8, candidates=0, steps=0, seed=1).schedule == start()


def test_the_judge_ranks_what_cannot_run_last() -> None:
    g = PRESETS["slice"]
    config = load_config(["experiment=decode_throughput"])
    judge = Judge(g, Sample.draw(g, config.routing, [256]), 256, 16, costs_of(config.gpu), 22)
    deadlock = dataclasses.replace(start(), waves=("attn", *(wave for wave in LAYER_WAVES if wave != "attn")))
    assert judge(start()) < judge(deadlock) == float("inf")


def test_what_no_candidate_is_to_blame_for_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts that the program has no room for, and a search of which nothing can run; one that stands still is."""
    g = PRESETS["slice"]
    config = load_config(["experiment=decode_throughput"])
    judge = Judge(g, Sample.draw(g, config.routing, [512]), 256, 16, costs_of(config.gpu), 22)
    with pytest.raises(MkError, match="do not fit a program"):
        judge(start())

    def stands(*_: object) -> float:
        raise StandsStill("everybody waits")

    with monkeypatch.context() as patched:
        patched.setattr("mk.schedule.search.estimate", stands)
        assert Judge(g, Sample.draw(g, config.routing, [200]), 256, 16, costs_of(config.gpu), 22)(start()) == math.inf
    with pytest.raises(MkError, match=r"none of \d+ schedules can run"):
        search(start(), lambda schedule: float("inf"), 8, candidates=3, steps=5, seed=1)
    only = random_candidate(random.Random(1), start(), 8)
    found = search(start(), lambda schedule: 7.0 if schedule == only else float("inf"), 8, 3, 5, seed=1)
    assert found.schedule == only and found.us == 7.0  # one is enough


def test_a_stored_schedule_replaces_the_axes_of_any_run(tmp_path: Path) -> None:
    path = tmp_path / "found.yaml"
    order = tuple(load_config(["wave_order=parted"]).wave_order.waves)
    schedule = StoredSchedule(order, "round_robin", 3, 2, 1, 256, 32, 5)
    schedule.save(path, "two\nlines")
    loaded = load_config(["schedule=search", f"schedule.path={path}", "placement=row_owner"])
    assert StoredSchedule.of(loaded, 1) == schedule and path.read_text().startswith("# two\n# lines\n")
    plan = Plan.from_config(loaded)
    assert (plan.wave_order, plan.placement, plan.attention_claimers, plan.moe_claimers) == (order, "round_robin", 3, 2)
    assert loaded.engine.ring.window_kb == 40 and plan.splits.split_keys == 256
    dataclasses.replace(schedule, claim_ahead=17).save(path, "claims too early")
    with pytest.raises(MkError, match=r"schedule\.claim_ahead=17 must be at most 16"):
        load_config(["schedule=search", f"schedule.path={path}"])
    path.write_text("waves: [qkv]\n")
    with pytest.raises(MkError, match="is no schedule"):
        load_config(["schedule=search", f"schedule.path={path}"])
    with pytest.raises(MkError, match="no such file"):
        load_config(["schedule=search", f"schedule.path={tmp_path}/other.yaml"])
    with pytest.raises(MkError, match=r"schedule\.path"):
        load_config(["schedule=search"])


def test_no_bound_exceeds_the_step_it_bounds(config: Config) -> None:
    g = PRESETS["slice"]
    for overrides in (["placement=row_owner"], ["placement=round_robin"]):
        plan = dataclasses.replace(Plan.from_config(load_config(overrides)), n_sm=16)
        sample = Sample.draw(g, config.routing, [512, 300])
        arguments = (plan, g, sample, 512, costs_of(config.gpu), ring_of(config.engine.ring, 2))
        least = bounds(*arguments, tb_s=4.70)
        assert max(dataclasses.astuple(least)) < estimate(*arguments)
        assert min(dataclasses.astuple(least)) > 0


def test_the_experiment_prints_stores_draws_and_keeps_the_ladder(
    committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["experiment.candidates=1", "experiment.local_steps=3", "experiment.context=256", "experiment.steps=8"]
    cfg = load_config([*SLICE, *few, "experiment.batches=[2]", f"run_dir={tmp_path / 'runs'}"])
    assert schedule_search.main(cfg) == 0
    run = folder_of(tmp_path / "runs")
    names = ("p50_ms", "zero_wait_ms", "bytes_ms", "distinct_experts", "bytes_per_step", "regret")
    rows = require_kept(committed, run, **dict.fromkeys(names, lambda value: value + 1), checks=no)
    ladder = [row for row in rows if row.regret is None]
    assert [row.arm for row in ladder] == list(LABELS) and {row.clock for row in rows} == {"simulated"}
    assert [row.schedule for row in ladder] == ["static", "static", "static", "greedy", "search"]
    assert len({row.config_hash for row in rows}) == 5
    times = [row.p50_ms for row in ladder]
    assert times[-1] <= times[2]  # the search starts from the configured schedule
    regrets = [row.regret for row in rows if row.regret is not None]
    assert len(regrets) == 4 * 5 and min(regrets) == 0 <= max(regrets)
    assert (run / "ladder.png").stat().st_size > 10_000
    stored = run / "schedule_batch2.yaml"
    assert Plan.from_config(load_config(["schedule=search", f"schedule.path={stored}"]))
    out = capsys.readouterr().out
    assert "batch 2, simulated" in out and "all_different" in out and str(stored) in out


def test_the_experiment_refuses_what_it_cannot_rank(tmp_path: Path) -> None:
    with pytest.raises(MkError, match="no costs to simulate with"):
        schedule_search.main(load_config(["experiment=schedule_search", "gpu=h100"]))
    with pytest.raises(MkError, match="starts from a static schedule"):
        schedule_search.main(load_config(["experiment=schedule_search", "schedule=work_stealing"]))


def test_a_variant_takes_a_stored_schedule_as_the_command_line_does(tmp_path: Path) -> None:
    base = load_config(["experiment=decode_throughput"])
    own = dataclasses.replace(StoredSchedule.of(base, 1), split_keys=256, window=6, waves=LAYER_WAVES)
    own.save(tmp_path / "schedule.yaml", "found by hand")
    chosen = ["schedule=search", f"schedule.path={tmp_path / 'schedule.yaml'}"]
    varied = vary(base, chosen)
    assert varied == load_config(["experiment=decode_throughput", *chosen]) and StoredSchedule.of(varied, 8) == own


def test_schedules_run_in_turn_on_the_card(
    committed: Path, stand_in: FakeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with its own configuration, the configured one first and twice; of two that execute the same, one."""
    cfg = load_config(["experiment=schedule_search", *CARD, f"run_dir={tmp_path / 'runs'}"])
    other = dataclasses.replace(cfg, placement=dataclasses.replace(cfg.placement, name="round_robin"))
    broken = dataclasses.replace(cfg, placement=dataclasses.replace(cfg.placement, name="sm_map", path="nowhere"))
    schedules = {"other": other, "configured": cfg, "twin": cfg, "broken": broken}
    simulated = {"other": 2.6, "configured": 2.0, "twin": 2.0, "broken": 1.0}
    with RunFolder.create(cfg) as folder:
        failed = schedule_paired.compare(cfg, folder, schedules, simulated, 2)
    assert len(failed) == 1 and "batch 2, broken: placement.path=nowhere: no such file" in failed[0]
    rows = require_kept(committed, folder.path, p50_ms=lambda ms: ms + 1, ratio=lambda of: of + 1)
    assert [row.arm for row in rows] == ["configured", "other", "configured (again)", "ladder"]
    first, second, again, ladder = rows
    assert second.placement == "round_robin" and second.experiment == "schedule_search" and second.batch == 2
    assert (second.ratio_to, again.ratio_to) == (first.digest, first.digest) and second.ratio_low is not None
    assert (ladder.engine, ladder.clock, ladder.schedules) == ("simulator", None, 2)
    out = capsys.readouterr().out
    assert "twin executes what configured does" in out and "batch 2 on the card" in out


def test_rank_correlation() -> None:
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0])) == pytest.approx(0.5)
    # ties share their rank: ranks 1.5, 1.5, 3 and 1, 2, 3, of which Pearson's is 1.5 / sqrt(1.5 * 2)
    assert spearman(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(0.75**0.5)
    assert spearman(np.array([1.0, 1.0]), np.array([1.0, 2.0])) == 0.0
