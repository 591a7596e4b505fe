"""A step of many launches: barriers between waves, and what the host hands to the card for every part."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mk.compose import load_config
from mk.errors import MkError
from mk.isa import Word
from mk.kernel.launches import RUNTIMES, GraphedLaunches, StepPart, WaveLaunches, _Parts
from mk.kernel.runtime import Runtime, StepAborted
from mk.kv import KINDS
from mk.programs import Plan
from mk.schedule.cut import launches_of, places, waves_of
from mk.schedule.lower import Program
from mk.splits import SplitPolicy
from mk.verify import verify
from tests.device_rig import FakeLibrary, fake_build, fake_device
from tests.interpreter_rig import GEOMETRY, WAVE_ORDERS, batch, program, random_tokens, weights

__all__ = ["fake_device"]

PLANS = list(itertools.product(("default", "parted", "oproj_before_down"), ("row_owner", "round_robin")))
PROMPTS = (random_tokens(100, seed=1), [], random_tokens(63, seed=2))


def barred(order: str, placement: str, rows: int = 3) -> Program:
    return Plan(5, WAVE_ORDERS[order], placement, barriers=True).lower(GEOMETRY, rows, 512)


@pytest.mark.parametrize(("order", "placement"), PLANS)
def test_barriers_let_a_wave_begin_after_the_whole_wave_before(order: str, placement: str) -> None:
    """One wait at the first task that a track has of a wave, for all that the wave before signals."""
    barriers = barred(order, placement)
    verify(barriers)
    task, waves = barriers.words[:, Word.TASK], [p for p in places(barriers) if p.end > p.first]
    for before, wave in itertools.pairwise(waves):
        of = barriers.words[(wave.first <= task) & (task < wave.end)]
        tracks = barriers.track_of[(wave.first <= task) & (task < wave.end)]
        heads = of[np.flatnonzero(np.diff(tracks, prepend=-1))]
        told = barriers.words[(before.first <= task) & (task < before.end)]
        (counter,) = set(told[:, Word.SIGNAL].tolist()) - {-1}
        waits = heads[:, Word.WAIT0] == counter
        alone = len(set(barriers.track_of[(before.first <= task) & (task < before.end)].tolist())) == 1
        assert waits.all() or alone  # a track that was alone in the wave before need not wait for itself
        assert (heads[waits, Word.WAIT0_COUNT] == barriers.counters[counter].per_step).all()
        assert (heads[waits, Word.WAIT1] == -1).all()
    free = program(3, order, placement)
    waiting = [(p.words[:, Word.WAIT0] >= 0).sum() for p in (barriers, free)]
    assert waiting[0] > waiting[1] and barriers.schedule_hash != free.schedule_hash


@pytest.mark.parametrize(("order", "placement"), PLANS)
def test_barriers_change_no_bit(order: str, placement: str) -> None:
    expected = batch(program(3, order, placement), PROMPTS, numerics="kernel").step()
    found = batch(barred(order, placement), PROMPTS, numerics="kernel", seed=3).step()
    assert (found.logits.view(np.int32) == expected.logits.view(np.int32)).all()


def test_with_barriers_the_launches_are_the_same() -> None:
    """But for the last one, which has several waves."""
    *parts, _ = launches_of(program(2, placement="round_robin"))
    *others, _ = launches_of(barred("default", "round_robin", rows=2))
    assert [part.schedule_hash for part in parts] == [part.schedule_hash for part in others]


# ---- on a stand-in for the card ----
PAGES = dict.fromkeys(KINDS, 16)


def runtime(library: FakeLibrary, launches: str) -> Runtime:
    library.runtime = made = RUNTIMES[launches](fake_build(GEOMETRY, SplitPolicy()), weights(), PAGES, 9, 512)
    made.load(program(2, placement="round_robin", n_sm=5), epoch=2**32 - 2)
    pages = torch.arange(2 * 9, dtype=torch.int32).reshape(2, 9).remainder(16).numpy()
    made.set_tables(dict.fromkeys(KINDS, pages))
    return made


@pytest.mark.parametrize(("launches", "dependent"), [("waves", 0), ("graph", 0), ("dependent", 1)])
def test_steps_of_many_launches_are_those_of_one(fake_device: FakeLibrary, launches: str, dependent: int) -> None:
    """Each with its own ids, whenever it was prepared; tokens come through the ring by the launch's number."""
    ids = torch.randint(GEOMETRY.experts, (4, GEOMETRY.layers, 8, GEOMETRY.top_k), dtype=torch.int32)
    found = {}
    for kind in ("step", launches):
        rt = runtime(fake_device, kind)
        taken = torch.zeros_like(ids)
        rt.set_sequences([5, 70], [1, 2], steps=4)

        def tell(step: int, rt: Runtime = rt, taken: torch.Tensor = taken) -> None:
            rt.force_routing(ids[step])
            rt.publish_routing(taken[step])

        launch = rt.launcher(tell, 4)
        numbers = [launch(step) for step in range(4)]
        tokens = [rt.tokens_of(number).tokens.tolist()[:2] for number in numbers]
        rt.finish()
        assert numbers == [0, 1, 2, 3] and rt.launched == 4 and not fake_device.graphs
        assert (taken[:, list(GEOMETRY.sparse_layers), :2] == ids[:, list(GEOMETRY.sparse_layers), :2]).all()
        found[kind] = tokens, rt["logits"].clone(), rt["keys"].tolist()
    assert found["step"][0] == found[launches][0] and found["step"][2] == found[launches][2]
    assert torch.equal(found["step"][1], found[launches][1])
    assert fake_device.dependent == [dependent] * 4


def test_every_part_gets_its_own_lists_and_counters(fake_device: FakeLibrary) -> None:
    rt = runtime(fake_device, "waves")
    assert isinstance(rt, WaveLaunches) and rt.program is not None and rt._parts is not None
    parts, made = launches_of(rt.program), rt._addresses
    assert len(made) == len(parts)
    words, offsets, counters = 0, 0, 0
    for part, at in zip(parts, made, strict=True):
        assert at.words == rt._parts.words.data_ptr() + 4 * 32 * words and at.words % 16 == 0
        assert at.offsets == rt._parts.offsets.data_ptr() + 4 * offsets
        assert at.counters == rt._part_counters.data_ptr() + 128 * counters
        assert (rt._parts.words[words : words + len(part.words)].numpy() == part.words).all()
        assert (rt._parts.offsets[offsets : offsets + len(part.offsets)].numpy() == part.offsets).all()
        words, offsets, counters = words + len(part.words), offsets + len(part.offsets), counters + len(part.counters)
    assert counters > 0  # of the head and what samples


def test_the_hash_is_of_what_the_card_holds(fake_device: FakeLibrary) -> None:
    hashes = []
    for launches in ("step", "waves", "graph"):
        rt = runtime(fake_device, launches)
        rt.set_sequences([5, 70], [1, 2], steps=2)
        with pytest.raises(MkError, match="no step of the loaded program has run"):
            rt.executed_hash()
        rt.launch(), rt.launch()
        hashes.append(rt.executed_hash())
    assert hashes[0] != hashes[1] == hashes[2]
    assert isinstance(rt, GraphedLaunches) and rt._parts is not None
    rt._parts.words[3, Word.TILE] += 1
    with pytest.raises(MkError, match="the machine executed schedule"):
        rt.executed_hash()
    rt._parts.words[3, Word.TILE] -= 1
    rt._part_counters[0, 0] += 1
    with pytest.raises(MkError, match="gained .* which is no whole number each"):
        rt.executed_hash()


def test_a_part_of_a_step_is_one_launch(fake_device: FakeLibrary) -> None:
    rt = runtime(fake_device, "waves")
    assert rt.program is not None
    rt.load(waves_of(rt.program)[3])
    rt.set_sequences([5, 70], [1, 2])
    rt.launch()
    assert fake_device.dependent == [] and fake_device.launches == 1
    rt.executed_hash()


def test_a_refused_launch_or_capture_is_an_error(fake_device: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = runtime(fake_device, "graph")
    rt.set_sequences([5, 70], [1, 2])
    monkeypatch.setattr(fake_device, "mk_capture_end", lambda stream, graph: 901)
    with pytest.raises(MkError, match="launch failed: error 901"):
        rt.launch()
    with pytest.raises(MkError, match="2000 steps as graphs"):
        rt.launcher(lambda step: None, 2000)


@pytest.fixture
def graphed(fake_device: FakeLibrary) -> GraphedLaunches:
    rt = runtime(fake_device, "graph")
    assert isinstance(rt, GraphedLaunches)
    rt.set_sequences([5, 70], [1, 2], steps=8)
    return rt


def as_it_would_be_without(rt: GraphedLaunches, library: FakeLibrary, run: int) -> None:
    """No graph is left, and the steps that follow those that have run are what they would be."""
    assert not library.graphs and not rt._made and not rt._running
    assert (rt.launched, rt.epoch, library.launches) == (run, 2**32 - 2 + run, run)
    rt.set_sequences([5, 70], [1, 2], steps=2)
    launch = rt.launcher(lambda step: None, 2)
    assert [launch(step) for step in range(2)] == [run, run + 1]
    rt.finish()
    rt.executed_hash()  # of counters that have grown with the epoch
    assert len(rt.tokens_of(run + 1).tokens) and not library.graphs


@pytest.mark.parametrize("run", [0, 2])
def test_graphs_that_are_not_run_end_and_count_no_more(
    graphed: GraphedLaunches, fake_device: FakeLibrary, run: int
) -> None:
    """With the next launcher or program; a wait for what has run leaves them."""
    launch = graphed.launcher(lambda step: None, 5)
    for step in range(run):
        launch(step)
    graphed.finish()
    assert len(fake_device.graphs) == 5 - run and graphed.launched == 5
    graphed.launcher(lambda step: None, 0)
    as_it_would_be_without(graphed, fake_device, run)
    graphed.set_sequences([5, 70], [1, 2], steps=8)
    graphed.launcher(lambda step: None, 5)
    assert graphed.program is not None
    graphed.load(graphed.program)
    assert not fake_device.graphs and (graphed.launched, graphed.epoch) == (run + 2, 0)


@pytest.mark.parametrize("fault", ["tell", "launch", "capture", "upload"])
def test_making_graphs_that_fails_leaves_none(
    graphed: GraphedLaunches, fake_device: FakeLibrary, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def tell(step: int) -> None:
        if step < 3:
            return
        if fault == "tell":
            raise ValueError("no such step")
        if fault == "launch":
            broken.setattr(fake_device, "mk_launch_parts", lambda *_: 7)
        else:
            end = fake_device.mk_capture_end
            done = end if fault == "upload" else lambda stream, graph: setattr(fake_device, "_capturing", None)
            broken.setattr(fake_device, "mk_capture_end", lambda stream, graph: (done(stream, graph), 901)[1])

    with (
        monkeypatch.context() as broken,
        pytest.raises((ValueError, MkError), match="no such step|error 7|error 901"),
    ):
        graphed.launcher(tell, 5)
    launch = graphed.launcher(lambda step: None, 8)  # contexts have room for as many steps as before
    graphed.launcher(lambda step: None, 0)
    with pytest.raises(IndexError):
        launch(0)  # whose graphs have ended
    as_it_would_be_without(graphed, fake_device, 0)


@pytest.mark.parametrize("place", ["finish", "launcher"])
def test_a_card_that_refuses_to_end_graphs_too_does_not_hide_what_went_wrong(
    graphed: GraphedLaunches, fake_device: FakeLibrary, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """An interrupt above all: as an MkError an ablation would take it for an arm that fails, and go on."""
    destroy = fake_device.mk_graph_destroy

    def broken(*_: object) -> None:
        monkeypatch.setattr(fake_device, "mk_graph_destroy", lambda graph: destroy(graph) or 700)
        raise KeyboardInterrupt

    if place == "finish":
        graphed.launch()
        monkeypatch.setattr(Runtime, "finish", broken)
        with pytest.raises(KeyboardInterrupt):
            graphed.finish()
    else:
        with pytest.raises(KeyboardInterrupt):
            graphed.launcher(lambda step: broken() if step else None, 3)
    assert not fake_device.graphs


def test_a_graph_that_is_refused_and_one_that_gives_up_end_with_the_others(
    graphed: GraphedLaunches, fake_device: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = graphed.launcher(lambda step: None, 5)
    launch(0)
    with monkeypatch.context() as refusing:
        refusing.setattr(fake_device, "mk_graph_launch", lambda graph, stream: 700)
        with pytest.raises(MkError, match="error 700"):
            launch(1)

    def gives_up(rt: Runtime, step: int) -> None:
        rt["stalls"][2] = torch.tensor([1, 1, 1, 0, 3, 0, 9, 8], dtype=torch.int32)
        rt["abort_word"][0] = 3

    fake_device.fault = gives_up
    launch(1)
    seen: list[int] = []
    monkeypatch.setattr(WaveLaunches, "_given_up", lambda rt, stalls: (seen.append(rt.epoch), rt.program, [])[1:])
    monkeypatch.setattr("mk.kernel.runtime.describe_stall", lambda *_: "as told")
    with pytest.raises(StepAborted, match="as told"):
        graphed.finish()
    assert seen == [2**32] and not fake_device.graphs and graphed.launched == 2


def test_a_part_is_three_pointers() -> None:
    assert [name for name, _ in StepPart._fields_] == ["words", "offsets", "counters", "trace"]
    whole = program(2, placement="round_robin")
    assert len(_Parts(whole, launches_of(whole), torch.device("cpu")).programs) > 10


def test_a_launch_that_gives_up_is_named_by_its_own_counters(fake_device: FakeLibrary) -> None:
    rt = runtime(fake_device, "waves")
    assert isinstance(rt, WaveLaunches) and rt.program is not None and rt._parts is not None
    parts = rt._parts.programs
    counting = [number for number, part in enumerate(parts) if part.counters]
    number = counting[-1]
    part, first = parts[number], sum(len(of.counters) for of in parts[:number])
    waiter = part.words[part.words[:, Word.WAIT0] == 0][0]
    opcode, layer, task = (int(waiter[word]) for word in (Word.OPCODE, Word.LAYER, Word.TASK))

    def gives_up(rt: Runtime, step: int) -> None:
        assert isinstance(rt, WaveLaunches)
        rt._part_counters[first, 0] -= 1
        rt["stalls"][2] = torch.tensor([1, 1, opcode, layer, task, 0, 9, 8], dtype=torch.int32)
        rt["abort_word"][0] = 3

    fake_device.fault = gives_up
    rt.set_sequences([5, 70], [1, 2])
    rt.launch()
    name, count = part.counters[0].name, part.counters[0].per_step
    with pytest.raises(StepAborted) as caught:
        rt.finish()
    assert f"counter {name} got {count - 1} of {count} signals" in str(caught.value)
    assert f"(task {task}) waits for {name}: wants 9, has 8" in str(caught.value)
    assert name != rt.program.counters[0].name


def test_of_parts_that_share_tasks_the_one_with_most_of_those_that_stand_has_given_up(fake_device: FakeLibrary) -> None:
    """A part makes a routing again with the very tasks of another one."""
    rt = runtime(fake_device, "waves")
    assert isinstance(rt, WaveLaunches) and rt._parts is not None
    parts = rt._parts.programs
    tasks = [set(part.words[:, Word.TASK].tolist()) for part in parts]
    first, second = next((a, b) for a, b in itertools.combinations(range(len(parts)), 2) if tasks[a] & tasks[b])
    stalls = np.zeros((5, 8), np.int32)
    stalls[1, [0, 4]] = 1, min(tasks[first] & tasks[second])
    assert rt._given_up(stalls)[0] is parts[first]
    stalls[2, [0, 4]] = 1, min(tasks[second] - tasks[first])
    assert rt._given_up(stalls)[0] is parts[second]
    stalls[1:3, 0] = 0  # records of an earlier step
    stalls[3, [0, 4]] = 1, min(tasks[-1])
    assert rt._given_up(stalls)[0] is parts[-1]


def test_weights_that_wait_for_what_the_controller_has_seen_need_it_to_poll() -> None:
    with pytest.raises(MkError, match=r"engine.ring.run_ahead=false engine.handoff.pollers=warps"):
        load_config(["engine.ring.run_ahead=false", "engine.handoff.pollers=warps"])
