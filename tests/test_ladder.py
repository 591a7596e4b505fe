"""The ladder: neighbours differ in one thing, the launched arms leave the same bits, and the bound stands apart."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from experiments import ladder
from experiments.decode_variants import variants
from mk.compose import load_config
from mk.config import resolved
from mk.errors import MkError
from mk.kernel.build import DEPENDENT_LAUNCH, NO_RUN_AHEAD, ZERO_WAIT_DEFINE, Library
from mk.results.kept import leaves_of
from mk.results.recompute import different
from mk.results.rows import Row, read_raw, read_rows
from tests.device_rig import FakeLibrary, fake_build, fake_device
from tests.test_decode_throughput import stand_in

__all__ = ["fake_device", "stand_in"]

SMALL = ["experiment=ladder", "model=nano", "weights=checkpoint", "experiment.context=300", "experiment.steps=10",
         "experiment.warmup=2", "experiment.check_tokens=8", "experiment.rounds=5"]  # fmt: skip


def test_every_arm_differs_from_the_one_before_in_one_key() -> None:
    jobs = variants(load_config(["experiment=ladder"]))
    leaves = [dict(leaves_of(resolved(job))) for _, job in jobs]
    steps = [{key for key in a if a[key] != b[key]} for a, b in itertools.pairwise(leaves)]
    assert steps == [
        *[{"experiment.launches"}] * 3,
        {"engine.handoff.barriers"},
        {"engine.ring.window_kb"},
        {"engine.ring.run_ahead"},
        {"engine.ring.window_kb"},
        {"placement.name"},
    ]
    assert [job.experiment.launches for _, job in jobs[:4]] == ["waves", "graph", "dependent", "step"]
    last = resolved(jobs[-1][1])
    plain = resolved(load_config(["experiment=decode_throughput"]))
    assert {**last, "experiment": None} == {**plain, "experiment": None}  # what everything else measures


def run(folder: Path, *more: str) -> tuple[int, list[Row], dict[str, dict]]:
    status = ladder.main(load_config([*SMALL, f"run_dir={folder}", *more]))
    (path,) = folder.iterdir()
    return status, read_rows(path / "rows.jsonl"), read_raw(path / "raw.jsonl")


def test_arms_are_compared_with_the_one_before(
    stand_in: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[tuple[str, ...]] = []

    def build(*args: object, defines: tuple[str, ...] = (), **more: object) -> Library:
        built.append(defines)
        return fake_build(*args, defines=defines, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("mk.kernel.build.build", build)
    status, rows, raw = run(tmp_path, "experiment.batches=[2]")
    assert status == 0 and len(rows) == 9 + 1 + 1
    quiet, loud = (NO_RUN_AHEAD,), ()
    assert built[:9] == [quiet, quiet, (NO_RUN_AHEAD, DEPENDENT_LAUNCH), quiet, quiet, quiet, loud, loud, loud]
    assert built[-1] == (ZERO_WAIT_DEFINE,)
    *arms, again, bound = rows
    assert arms[0].ratio is None and again.ratio_to == arms[0].digest and (again.arm or "").endswith("(again)")
    for before, row in itertools.pairwise(arms):
        assert row.ratio_to == before.digest and row.ratio == 1.0
        assert list(different(row, raw[row.raw_sha256 or ""])) == []
    assert len({row.logits_hash for row in arms}) == 1 and all(row.logits_hash for row in arms)
    assert len({row.routing_hash for row in arms}) == 1
    hashes = [row.schedule_hash for row in arms]
    assert hashes[0] == hashes[1] == hashes[2]  # the same launches
    assert hashes[4] == hashes[5] == hashes[6] == hashes[7]  # the same lists
    assert len(set(hashes)) == 4
    assert (bound.bound, bound.arm, bound.experiment) == ("zero_wait", "no waits", "ladder")
    assert all(row.checks["bits_repeat"] for row in arms) and "bits_repeat" not in bound.checks
    assert not stand_in.graphs and set(stand_in.dependent) == {0, 1}
    out = capsys.readouterr().out
    assert "to the one before" in out and "(a bound)" in out


def test_an_arm_that_leaves_other_bits_fails_the_run(
    stand_in: FakeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(rt, step: int) -> None:  # type: ignore[no-untyped-def]
        if rt.params.advance and rt.params.window_slots == 4:  # two arms, while they are timed
            rt["logits"].mul_(1 + 2**-20)

    stand_in.fault = breaks
    status, rows, _ = run(tmp_path, "experiment.batches=[1]", "experiment.zero_wait=false")
    out = capsys.readouterr().out
    assert status == 1 and len(rows) == 10
    assert out.count("leaves other logits than 'placement=round_robin") == 2 and "window_kb=32' leaves" in out


def test_a_launched_step_has_neither_a_bound_nor_a_trace() -> None:
    for more in ("experiment.zero_wait=true", "experiment.trace=true"):
        with pytest.raises(MkError, match="experiment.launches=waves has neither"):
            job = load_config(["experiment=decode_throughput", "experiment.launches=waves", more])
            ladder.decode_throughput.check_settings(job)
    with pytest.raises(MkError, match="experiment.launches=wave is not one of step, waves, graph, dependent"):
        load_config(["experiment=decode_throughput", "experiment.launches=wave"])


def test_without_a_card_the_arms_that_the_simulator_knows_are_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, rows, raw = run(tmp_path, "experiment.batches=[1]")
    out = capsys.readouterr().out
    assert status == 0 and out.startswith("simulated") and out.count("not simulated: ") == 3
    assert len(rows) == 6 + 1 and {row.clock for row in rows} == {"simulated"}
    *arms, bound = rows
    assert bound.bound == "zero_wait" and bound.p50_ms and bound.p50_ms < min(row.p50_ms or 0 for row in arms)
    barriers, counters, *_ = arms
    assert counters.ratio and counters.ratio < 1 and counters.ratio_to == barriers.digest
    assert all(list(different(row, raw[row.raw_sha256 or ""])) == [] for row in rows)


def test_without_a_card_a_bound_is_of_the_last_arm_that_was_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, many = "placement=round_robin", "placement=round_robin experiment.launches=graph"
    axes = "experiment.axes=[placement,experiment.launches]"
    status, rows, *_ = run(tmp_path / "a", f"experiment.variants=['{one}','{many}']", axes)
    bounds = [row for row in rows if row.bound == "zero_wait"]
    assert status == 0 and bounds and {row.config_hash for row in bounds} == {rows[0].config_hash}
    alone = [*SMALL, f"run_dir={tmp_path / 'b'}", f"experiment.variants=['{many}']", axes]
    with pytest.raises(MkError, match=f"ladder needs a GPU, .* Not simulated: {many}: a step of many launches"):
        ladder.main(load_config(alone))
    assert capsys.readouterr().out.count("not simulated: ") == 1
