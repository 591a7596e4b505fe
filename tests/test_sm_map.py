"""placement=sm_map: the map's file, who then owns what, the simulator's hand-offs, and the probe that measures one."""

from __future__ import annotations

import ctypes
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import quickstart, sm_map
from mk.compose import load_config
from mk.config import Config
from mk.device import DeviceFacts
from mk.errors import MkError
from mk.isa import ISA, Word
from mk.probes import handoff
from mk.probes.handoff import launch, matrix, open_library
from mk.programs import Plan
from mk.results.rows import read_rows
from mk.results.runs import RunFolder
from mk.schedule.lower import Program
from mk.schedule.simulate import costs_of, estimate, ring_of, simulate
from mk.schedule.simulator.engine import Engine
from mk.schedule.simulator.expand import Sample
from mk.schedule.simulator.path import CriticalPath
from mk.schedule.simulator.work import Task, Work
from mk.schedule.sm_map import SmMap
from mk.schedule.stored import StoredSchedule
from mk.verify import verify
from tests.interpreter_rig import NANO_GEOMETRY
from tests.promotion import committed, folder_of, repository, require_kept
from tests.test_simulate import SINGLE, with_costs

__all__ = ["committed", "repository"]

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
SMS = 20  # nano's residual has 16 strips
SLOW = (3, 8, 13, 19)


def handoffs(sms: int = SMS, slow: tuple[int, ...] = SLOW, ns: float = 500.0) -> np.ndarray:
    """Every hand-off takes 500 ns, those from or to a slow SM 100 more for each; SM 7 is a little faster."""
    apart = np.array([100.0 * (sm in slow) - 5.0 * (sm == 7) for sm in range(sms)])
    found = ns + apart[:, None] + apart[None, :]
    np.fill_diagonal(found, 0.0)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    SmMap.of("NVIDIA H200", handoffs()).save(tmp_path / "map.json")
    return tmp_path / "map.json"


def config(path: Path, *more: str) -> Config:
    chosen = ["experiment=decode_throughput", "model=nano", "weights=checkpoint", f"gpu.sms={SMS}"]
    return load_config([*chosen, "placement=sm_map", f"placement.path={path}", *more])


def sms_of(program: Program, wave: str) -> set[int]:
    opcodes = [op.opcode for op in ISA if op.wave == wave]
    return set(program.sm_of[np.isin(program.words[:, Word.OPCODE], opcodes)].tolist())


def test_a_map_is_read_as_it_was_written(path: Path) -> None:
    found = SmMap.load(path)
    assert found == SmMap.of("NVIDIA H200", handoffs())
    assert found.ranked()[0] == 7 and set(found.ranked()[-4:].tolist()) == set(SLOW)
    beyond = np.array(found.beyond_us())
    off_diagonal = beyond[~np.eye(SMS, dtype=bool)]
    assert off_diagonal.mean() == pytest.approx(0, abs=1e-12) and (np.diag(beyond) == 0).all()
    assert beyond[3, 8] - beyond[0, 1] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("card"), "a map has schema, card and handoff_ns, and nothing else"),
        (lambda v: v.update(sms=20), "and nothing else"),
        (lambda v: v.update(schema=2), "schema 2, this code reads 1"),
        (lambda v: v.update(card=""), "card '' is no name"),
        (lambda v: v.update(handoff_ns=[[0]]), "no matrix of two SMs or more"),
        (lambda v: v["handoff_ns"][4].pop(), r"handoff_ns\[4\]: 19 entries for 20 SMs"),
        (lambda v: v["handoff_ns"][4].__setitem__(5, "x"), r"handoff_ns\[4\]: 'x' is no time"),
        (lambda v: v["handoff_ns"][4].__setitem__(5, float("nan")), r"handoff_ns\[4\]: nan is no time"),
        (
            lambda v: v["handoff_ns"][4].__setitem__(5, -1),
            r"handoff_ns\[4\]: -1 to SM 5: 0 to itself, and more to every",
        ),
        (lambda v: v["handoff_ns"][4].__setitem__(4, 1), r"handoff_ns\[4\]: 1 to SM 4: 0 to itself"),
        (lambda v: v["handoff_ns"][4].__setitem__(5, 501), r"handoff_ns\[4\]: 501 to SM 5 and 500\.0 back"),
    ],
)
def test_a_file_that_is_no_map_says_why(path: Path, change: Any, message: str) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(MkError, match=message) as refused:
        Plan.from_config(config(path))
    assert "experiment=sm_map writes" in str(refused.value.hint)


def test_a_map_of_another_card_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(MkError, match=r"a map of 20 SMs, and gpu\.sms=16"):
        Plan.from_config(config(path, "gpu.sms=16"))
    with pytest.raises(MkError, match=r"a map of NVIDIA H200, and gpu\.name=h100"):
        Plan.from_config(config(path, "gpu=h100", f"gpu.sms={SMS}"))
    with pytest.raises(MkError, match="no such file"):
        Plan.from_config(config(tmp_path / "none.json"))
    path.write_text("[" * 100_000)
    with pytest.raises(MkError, match="is no JSON"):
        Plan.from_config(config(path))
    path.write_text("{")
    with pytest.raises(MkError, match="is no JSON"):
        Plan.from_config(config(path))
    with pytest.raises(MkError, match=r"placement\.path"):
        load_config(["placement=sm_map"])
    with pytest.raises(MkError, match=r"needs a map of 20 SMs"):
        Plan(SMS, Plan.from_config(load_config([])).wave_order, "sm_map").lower(NANO_GEOMETRY, 1, 256)


@pytest.mark.parametrize("schedule", ["static", "work_stealing", "greedy"])
@pytest.mark.parametrize("rows", [1, 8])
def test_owners_and_single_tasks_stand_where_hand_offs_are_short(path: Path, schedule: str, rows: int) -> None:
    plan = Plan.from_config(config(path, f"schedule={schedule}"))
    program = plan.lower(NANO_GEOMETRY, rows, 512)
    assert verify(program)
    assert program.placement == "sm_map"
    fast = set(range(SMS)) - set(SLOW)
    for wave in ("oproj", "moe_down", "rmsnorm", "embed"):
        assert sms_of(program, wave) == fast, wave
    assert sms_of(program, "sample") == {7}
    owned = dataclasses.replace(plan, placement="row_owner", sm_map=None).lower(NANO_GEOMETRY, rows, 512)
    assert sms_of(owned, "oproj") & set(SLOW)  # which knows no map
    if schedule == "static":
        assert program.tasks_by_operation() == owned.tasks_by_operation()


def test_the_interpreter_decodes_by_it(tmp_path: Path) -> None:
    """And finds transformers' tokens, or the experiment fails."""
    SmMap.of("none", handoffs(4, (1,))).save(tmp_path / "map.json")
    values = json.loads((tmp_path / "map.json").read_text()) | {"card": "cpu"}
    (tmp_path / "map.json").write_text(json.dumps(values))
    small = ["experiment.new_tokens=3", "experiment.ragged=[5,2]", f"run_dir={tmp_path / 'runs'}"]
    chosen = ["placement=sm_map", f"placement.path={tmp_path / 'map.json'}"]
    assert quickstart.main(load_config(["experiment=quickstart", *small, *chosen])) == 0
    rows = read_rows(folder_of(tmp_path / "runs") / "rows.jsonl")
    assert all(row.placement == "sm_map" and row.checks["equal_to_transformers"] for row in rows)
    assert rows[0].data and "placement.path" in rows[0].data


def test_a_simulated_hand_off_takes_what_the_map_says() -> None:
    """Stored at 3 + 3 = 6; SM 1 would see it at 10 and sees it at 11.5, SM 2 at 9."""
    tracks = [[Task("mul", 1, 1, signal=0)], [Task("tail", waits=(0,))], [Task("tail", waits=(0,))]]
    beyond = [[0.0, 1.5, -1.0], [1.5, 0.0, 0.0], [-1.0, 0.0, 0.0]]
    work = Work(3, 1, [*tracks, [], [], []], [1])
    engine = Engine(work, with_costs(handoff=4.0), SINGLE, beyond)
    assert engine.run() == pytest.approx(18.5, abs=1e-9)
    assert [s.signalled[-1] for s in engine.sms[1:]] == pytest.approx([18.5, 16.0], abs=1e-9)
    path = CriticalPath(engine)
    assert path.by_cause()["handoff", "tail"] == pytest.approx(5.5, abs=1e-9)
    assert sum(segment.us for segment in path.segments) == pytest.approx(18.5, abs=1e-9)


def test_a_simulated_step_reads_the_map(path: Path) -> None:
    """One whose hand-offs are all equal changes nothing; with some slow SMs, all wait for what runs there."""
    cfg = config(path)
    costs, ring = costs_of(cfg.gpu), ring_of(cfg.engine.ring, 1)
    sample = Sample.draw(NANO_GEOMETRY, load_config(["routing=uniform"]).routing, [300])
    plan = Plan.from_config(cfg)

    def step_us(sm_map: SmMap | None) -> float:
        return simulate(plan.lower(NANO_GEOMETRY, 1, 512), sample, costs, ring, sm_map=sm_map).step_us

    level = SmMap.of("NVIDIA H200", handoffs(slow=(), ns=500.0).clip(max=490.0))
    assert step_us(level) == pytest.approx(step_us(None), abs=1e-6)
    assert step_us(plan.sm_map) > step_us(None)
    assert estimate(plan, NANO_GEOMETRY, sample, 512, costs, ring) == pytest.approx(step_us(plan.sm_map))


def test_a_stored_schedule_keeps_the_map_of_its_configuration(path: Path) -> None:
    cfg = config(path)
    own = StoredSchedule.of(cfg, 1)
    assert own.apply(cfg).placement == cfg.placement
    other = dataclasses.replace(own, placement="round_robin").apply(cfg)
    assert (other.placement.name, other.placement.path) == ("round_robin", None)


def raw_of(launches: int = 3, moved: bool = False) -> dict[str, Any]:
    pairs = handoffs()[np.triu_indices(SMS, 1)]
    smid = [list(range(SMS)) for _ in range(launches)]
    if moved:
        smid[-1] = smid[-1][::-1]
    return {"kind": "handoffs", "pair_ns": [(pairs + 2 * k).tolist() for k in range(launches)], "smid": smid}


def test_a_kept_map_is_computed_again(committed: Path, tmp_path: Path) -> None:
    cfg = load_config(["experiment=sm_map", f"run_dir={tmp_path / 'runs'}"])
    with RunFolder.create(cfg) as run:
        row = run.append_row(run.measured(raw_of(), engine="cuda", dtype="bfloat16", context=[]), raw_of())
    assert row.handoff_ns == pytest.approx(handoffs()[np.triu_indices(SMS, 1)].mean() + 2)  # median of the launches
    assert row.handoff_repeats == pytest.approx(1.0) and all(row.checks.values())
    assert row.handoff_ns_least == pytest.approx(SmMap.of("", handoffs()).mean_ns()[7] + 2)
    names = ("handoff_ns", "handoff_ns_least", "handoff_ns_most", "handoff_repeats")
    require_kept(committed, folder_of(tmp_path / "runs"), **dict.fromkeys(names, lambda value: value + 1))
    assert not sm_map.figures(row, raw_of(moved=True))["checks"]["blocks_stay"]
    shared = raw_of()
    shared["smid"][0][1] = 0
    assert not sm_map.figures(row, shared)["checks"]["one_block_an_sm"]


def test_the_matrix_has_the_pairs_in_the_probes_order() -> None:
    assert matrix(np.array([1.0, 2.0, 3.0]), 3).tolist() == [[0, 1, 2], [1, 0, 3], [2, 3, 0]]


@NO_GPU
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(MkError, match="sm_map measures a GPU, and torch sees none here"):
        sm_map.main(load_config(["experiment=sm_map"]))


def test_the_probe_compiles_and_takes_the_hosts_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    library = open_library()
    assert library.handoff_params_bytes() == ctypes.sizeof(handoff._Params) == 7 * 8 + 3 * 4 + 4
    assert library.handoff_error(0) == b"no error" and library.handoff_launch is not None

    class Fewer(ctypes.Structure):
        _fields_ = handoff._Params._fields_[1:]

    monkeypatch.setattr(handoff, "_Params", Fewer)
    with pytest.raises(MkError, match="has parameters of 72 bytes, this file another idea"):
        open_library()


@pytest.mark.gpu
def test_the_probe_measures_a_card(tmp_path: Path) -> None:
    facts = DeviceFacts.read()
    one = launch(open_library(), facts.sms, facts.shared_bytes, lines=4, rounds=4, limit_s=30)
    assert sorted(one.smid) == list(range(facts.sms))
    assert (one.ns > 100).all() and (one.ns < 20_000).all() and np.median(one.ns) < 3_000
    few = ["experiment.launches=2", "experiment.lines=4", "experiment.rounds=8"]
    assert sm_map.main(load_config(["experiment=sm_map", *few, f"run_dir={tmp_path}"])) == 0
    chosen = ["experiment=decode_throughput", "placement=sm_map"]
    (found,) = tmp_path.glob("*/sm_map.json")
    plan = Plan.from_config(load_config([*chosen, f"placement.path={found}"]))
    assert verify(plan.lower(NANO_GEOMETRY, 1, 512))


@pytest.mark.gpu
def test_a_probe_whose_time_is_up_ends_and_names_a_block() -> None:
    facts = DeviceFacts.read()
    with pytest.raises(MkError, match=r"block \d+ of the probe waited longer than 0\.05 s"):
        launch(open_library(), facts.sms, facts.shared_bytes, lines=16, rounds=4096, limit_s=0.05)
