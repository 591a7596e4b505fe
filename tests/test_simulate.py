"""The simulator against times worked out by hand, the probes' skeleton, the roofline's bytes and measured steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from mk.compose import load_config
from mk.errors import MkError
from mk.isa import ISA
from mk.model.geometry import PRESETS, SLOT_BYTES
from mk.programs import Plan, bucket_for
from mk.results.rows import read_rows
from mk.roofline import step_bytes
from mk.schedule.costs import Costs, OpCosts
from mk.schedule.simulate import costs_of, estimate, first_layers, layer_period, ring_of, simulate
from mk.schedule.simulator.engine import Engine
from mk.schedule.simulator.expand import Sample, expand
from mk.schedule.simulator.path import CriticalPath
from mk.schedule.simulator.work import Queue, Ring, Task, Work
from tests import skeleton
from tests.tiny_model import tiny_geometry

H200 = ["experiment=decode_throughput"]
ROOT = Path(__file__).resolve().parent.parent
MEASURED = sorted((ROOT / "results" / "h200").glob("*-decode_throughput-*/rows.jsonl"))

# memory serves a slot a microsecond and a copy lands two later; other costs are nought unless a graph names them
PLAIN = Costs(0.008192, 2.0, 1e6, 0, 0, 0, 0, 0, 0, 0, 0, 0, {"mul": OpCosts(slot=3.0), "tail": OpCosts(close=7.0)})
SINGLE = Ring(slots=4, window=4, lanes=1)


def run(
    tracks: list[list[Task]], costs: Costs = PLAIN, ring: Ring = SINGLE, queues: dict[int, Queue] | None = None
) -> Engine:
    """Main tracks, one an SM; nothing stands aside. A counter is complete when all that signal it have."""
    signals = [task.signal for track in tracks for task in track]
    counts = [signals.count(counter) for counter in range(max(signals) + 1)]
    engine = Engine(Work(len(tracks), 1, [*tracks, *([] for _ in tracks)], counts, queues or {}), costs, ring)
    engine.run()
    return engine


def with_costs(**changes: float) -> Costs:
    return dataclasses.replace(PLAIN, **changes)


def test_graph_1_a_product_alone() -> None:
    """Slots land at 3 and 4; computing takes them to 6 and 9; the storer's tile to 14, its close to 21."""
    costs = with_costs(ops={"mul": OpCosts(slot=3.0, tile=5.0, close=7.0)})
    assert run([[Task("mul", 2, 1)]], costs).end == pytest.approx(21.0, abs=1e-9)


def test_graph_2_a_hand_off_between_two_sms() -> None:
    """The product is stored at 9. Four later, at 13, the other SM sees it; loading takes it to 15, its slot to 18."""
    costs = with_costs(handoff=4.0, ops={"mul": OpCosts(slot=3.0), "next": OpCosts(open=2.0, slot=3.0)})
    engine = run([[Task("mul", 2, 1, signal=0)], [Task("next", 1, 1, waits=(0,))]], costs)
    assert engine.end == pytest.approx(18.0, abs=1e-9)
    path = CriticalPath(engine)
    assert sum(segment.us for segment in path.segments) == pytest.approx(18.0, abs=1e-9)
    assert path.by_cause()["handoff", "next"] == pytest.approx(4.0, abs=1e-9)
    assert path.by_cause()["work", "next"] == pytest.approx(5.0, abs=1e-9)


def test_graph_3_two_sms_share_memory_one_copy_each_at_a_time() -> None:
    """First copies land at 3 and 4, for memory serves them in turn; second ones, issued then, are served to 4 and 5."""
    engine = run([[Task("copy", 2, 1)], [Task("copy", 2, 1)]], ring=Ring(slots=4, window=1, lanes=1))
    assert [s.done[-1] for s in engine.sms] == pytest.approx([6.0, 7.0], abs=1e-9)


def test_graph_4_the_producer_runs_ahead_until_the_ring_is_full() -> None:
    """SM 1 waits from the start for a signal at 10, with two slots landed in a ring of two. The first is free at 13,
    so the third copy lands at 16; the second is free at 16, so the fourth lands at 19 and is done at 22."""
    costs = with_costs(ops={"mul": OpCosts(slot=3.0), "late": OpCosts(close=10.0)})
    tracks = [[Task("late", signal=0)], [Task("mul", 1, 1, waits=(0,)), Task("mul", 3, 1)]]
    engine = run(tracks, costs, Ring(slots=2, window=2, lanes=1))
    assert engine.sms[1].done == pytest.approx([13.0, 22.0], abs=1e-9)
    assert engine.end == pytest.approx(22.0, abs=1e-9)


def test_graph_5_experts_are_streamed_only_once_they_are_known() -> None:
    """Router done at 6, seen at 10, top-k stored at 17: only then is the expert's slot issued, to land at 20. What
    stands between them was streamed from the start, and is done 3 after its entry opens at 10."""
    costs = with_costs(handoff=4.0)
    track = [
        Task("mul", 1, 1, signal=0),
        Task("tail", waits=(0,), routes=True),
        Task("mul", 1, 1),
        Task("mul", 1, 1, routed=True),
    ]
    s = run([track], costs).sms[0]
    assert (s.stream[2], s.stream[3]) == pytest.approx((0.0, 17.0), abs=1e-9)
    assert s.done[2:] == pytest.approx([13.0, 23.0], abs=1e-9)


def test_claimers_share_what_there_is_and_signal_after_a_failed_ticket() -> None:
    """Three tiles for two SMs: done at 6 and 7, the third by the SM that was first, at 12. Both signals by then."""
    claimer = Task("claim", signal=0, queue=5, claim_ahead=1)
    engine = run([[claimer], [dataclasses.replace(claimer)]], queues={5: Queue("mul", [1, 1, 1])})
    assert [len(s.tasks) for s in engine.sms] == [3, 2] and engine.end == pytest.approx(12.0, abs=1e-9)


def test_a_signal_that_never_comes_is_an_error() -> None:
    with pytest.raises(MkError, match="SM 0 waits for signals that never come"):
        run([[Task("mul", 1, 1, waits=(0,)), Task("tail", signal=0)]])


def test_the_probes_skeleton_in_the_right_order_and_within_ten_percent() -> None:
    simulated = [skeleton.us_a_layer(row, skeleton.FIT) for row in skeleton.ROWS]
    measured = [row.us_a_layer for row in skeleton.ROWS]
    assert np.argsort(simulated).tolist() == np.argsort(measured).tolist()
    assert simulated == pytest.approx(measured, rel=0.10)


@pytest.mark.parametrize("claimers", [0, 16])
@pytest.mark.parametrize("placement", ["row_owner", "round_robin"])
def test_a_simulated_step_streams_the_bytes_of_the_roofline(placement: str, claimers: int) -> None:
    g = PRESETS["slice"]
    order = tuple(load_config().wave_order.waves)
    plan = Plan(16, order, placement, claimers, claimers)
    program = plan.lower(g, 2, 512)
    sample = Sample((512, 256), dict.fromkeys(g.sparse_layers, 11))
    config = load_config(H200)
    result = simulate(program, sample, costs_of(config.gpu), ring_of(config.engine.ring, 2))
    streamed = sum(task.slots for s in result.engine.sms for task in s.tasks) * SLOT_BYTES
    assert streamed == step_bytes(g, sample.keys, 11).total
    assert all(s.issued == s.read for s in result.engine.sms)
    path = result.critical_path()
    assert sum(segment.us for segment in path.segments) == pytest.approx(result.engine.end)
    trace = result.trace()
    assert len(trace.sm) == sum(len(s.tasks) for s in result.engine.sms)
    assert set(trace.causes()) >= {op.name for op in ISA if op.name in ("qkv", "topk", "lm_head", "residual")}


def test_a_sample_must_fit_the_program() -> None:
    g = tiny_geometry()
    program = Plan(4, tuple(load_config().wave_order.waves), "row_owner").lower(g, 2, 256)
    with pytest.raises(MkError, match=r"contexts \[300, 1\] do not fit a program of 2 rows with at most 256 keys"):
        expand(program, Sample((300, 1), dict.fromkeys(g.sparse_layers, 3)))
    with pytest.raises(MkError, match="no logits to route by"):
        Sample.draw(g, load_config().routing, [4])


def test_where_a_model_repeats_itself() -> None:
    g = PRESETS["north_mini_code"]
    assert layer_period(g) == (1, 4) and first_layers(g, 9).layer_kinds == g.layer_kinds[:9]
    assert layer_period(first_layers(g, 1)) == (0, 1)


def test_an_estimate_from_the_first_layers_is_near_the_whole_step() -> None:
    g = first_layers(PRESETS["north_mini_code"], 21)
    config = load_config(H200)
    plan, ring = Plan.from_config(config), ring_of(config.engine.ring, 1)
    sample = Sample.draw(g, config.routing, [8192])
    whole = simulate(plan.lower(g, 1, 16384), sample, costs_of(config.gpu), ring).step_us
    assert estimate(plan, g, sample, 16384, costs_of(config.gpu), ring) == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize("batch", [1, 8])
def test_measured_steps_are_met_within_ten_percent(batch: int) -> None:
    """The rows that were committed after runs on the card, in the plan that they name."""
    config, g = load_config(H200), PRESETS["north_mini_code"]
    rows = [row for path in MEASURED for row in read_rows(path) if row.batch == batch and row.bound is None]
    assert rows
    sample = Sample.draw(g, config.routing, rows[0].context)
    bucket = bucket_for(rows[0].context[0] + 256)
    us = estimate(Plan.from_config(config), g, sample, bucket, costs_of(config.gpu), ring_of(config.engine.ring, batch))
    assert [row.p50_ms for row in rows] == pytest.approx([us / 1e3] * len(rows), rel=0.10)


def test_a_step_is_simulated_with_the_window_of_its_rows() -> None:
    usual, *numbers = (load_config([*H200, *more]).engine.ring for more in ((), ["engine.ring.window_kb=40"]))
    assert [ring_of(usual, rows).window for rows in (1, 2, 3, 8)] == [7, 8, 8, 8]
    assert [ring_of(numbers[0], rows).window for rows in (1, 2, 8)] == [5, 5, 5]
    three = dataclasses.replace(usual, window_kb=[32, 40, 48])
    assert [ring_of(three, rows).window for rows in (1, 2, 3, 4)] == [4, 5, 6, 6]


def test_memory_is_as_fast_as_what_is_in_flight_lets_it() -> None:
    """32 KB in flight reach half of the bandwidth, 64 KB all, 48 KB what lies between: slots take 2, 1 and 4/3."""
    costs = dataclasses.replace(PLAIN, latency=0.0, in_flight_kb=[32, 64], in_flight_share=[0.5, 1.0])
    for window, slot_us in ((4, 2.0), (6, 4 / 3), (8, 1.0), (9, 1.0)):
        assert Engine(Work(1, 1, [[], []], []), costs, Ring(window=window)).slot_us == pytest.approx(slot_us)
    for kb, share in (([32, 16], [0.5, 1.0]), ([16], [0.5, 1.0]), ([16, 32], [0.0, 1.0])):
        with pytest.raises(MkError, match="must be ascending sizes"):
            dataclasses.replace(PLAIN, in_flight_kb=kb, in_flight_share=share)
