"""A stored run again: found, refused where it cannot be the same, repeated, and compared where there is an interval."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from experiments import quickstart, rerun
from mk.compose import load_config, stored_config
from mk.config import resolved
from mk.errors import MkError
from mk.results.promote import promote
from mk.results.rows import Row, read_rows
from mk.results.runs import RunFolder
from mk.results.sources import source_hash
from tests.promotion import committed, edit, folder_of, repository

__all__ = ["committed", "repository"]

SMALL = ["experiment=quickstart", "experiment.new_tokens=3", "experiment.ragged=[5,2]"]


@pytest.fixture
def kept(committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quickstart that was promoted, where a rerun looks for it."""
    assert quickstart.main(load_config([*SMALL, f"run_dir={tmp_path / 'first'}"])) == 0
    sources = source_hash(committed)
    monkeypatch.setattr(rerun, "source_hash", lambda: sources)
    monkeypatch.setattr(rerun, "ROOT", committed)
    (folder,) = promote(folder_of(tmp_path / "first"), committed / "results", committed)
    return folder


def again(kept: Path, root: Path, *overrides: str) -> int:
    return rerun.main(load_config(["experiment=rerun", f"run={kept.name}", f"run_dir={root / 'again'}", *overrides]))


def test_a_run_is_repeated_with_its_own_configuration(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert again(kept, tmp_path) == 0
    rows = read_rows(folder_of(tmp_path / "again") / "rows.jsonl")
    assert [(row.experiment, row.batch, row.new_tokens) for row in rows] == [("quickstart", 1, 3), ("quickstart", 2, 3)]
    assert [row.schedule_hash for row in rows] == [row.schedule_hash for row in read_rows(kept / "rows.jsonl")]
    told = capsys.readouterr().out
    assert "row 2, interpreter, batch 2: equal_tokens 6 [6, 6], again 6: within" in told and "all as it was" in told


def test_what_comes_out_otherwise_fails(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(kept / "rows.jsonl", 0, lambda values: values | {"equal_tokens": 2})
    edit(kept / "rows.jsonl", 1, lambda values: values | {"checks": dict.fromkeys(values["checks"], False)})
    assert again(kept, tmp_path) == 1
    told = capsys.readouterr().out
    assert "row 1, interpreter, batch 1: equal_tokens 3 lies outside of 2 to 2" in told
    assert "equal_to_transformers was False and is True" in told
    edit(kept / "rows.jsonl", 0, lambda values: values | {"arm": "other"})
    assert again(kept, tmp_path) == 1
    assert "row 1 did not come again; " in (told := capsys.readouterr().out) and "1 rows came that were not" in told


def test_a_run_that_cannot_be_repeated_is_refused(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MkError, match="run=2026-quickstart: there is no such run in") as unknown:
        rerun.main(load_config(["experiment=rerun", "run=2026-quickstart", f"run_dir={tmp_path}"]))
    assert kept.name in str(unknown.value.hint)
    with pytest.raises(MkError, match="a rerun has the batch of its run"):
        again(kept, tmp_path, "batch.size=2")
    with pytest.raises(MkError, match=r"experiment\.run has no value"):
        load_config(["experiment=rerun"])
    (row, *_) = read_rows(kept / "rows.jsonl")
    monkeypatch.setattr(rerun, "source_hash", lambda: "0123456789abcdef")
    with pytest.raises(
        MkError, match=f"the sources {row.source_hash} of commit {row.commit}, and these are 0123"
    ) as other:
        again(kept, tmp_path)
    assert other.value.hint == f"git checkout {row.commit}" and not (tmp_path / "again").exists()


def test_both_parts_of_a_run_are_found(tmp_path: Path) -> None:
    """In the run's own folder first, else what was measured and what was simulated."""
    for place in ("runs/one", "results/h200/one", "results/simulated/one", "results/h200/two"):
        (tmp_path / place).mkdir(parents=True)
        for name in ("rows.jsonl", "config.yaml"):
            (tmp_path / place / name).touch()
    runs, kept = tmp_path / "runs", tmp_path / "results"
    assert rerun.find("one", runs, kept) == [runs / "one"]
    assert rerun.find("one", tmp_path, kept) == [kept / "h200" / "one", kept / "simulated" / "one"]
    assert rerun.find(str(kept / "h200" / "two"), runs, kept) == [kept / "h200" / "two"]


@pytest.mark.parametrize("missing", ["rows.jsonl", "config.yaml"])
def test_a_broken_run_is_not_taken_for_none(tmp_path: Path, missing: str) -> None:
    """A name that is there is no misspelling of itself."""
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    for name in {"rows.jsonl", "config.yaml"} - {missing}:
        (folder / name).touch()
    with pytest.raises(MkError, match=f"run=one: {folder} has no {missing}"):
        rerun.find("one", tmp_path / "runs", tmp_path / "results")


def test_a_stored_configuration_is_the_one_that_was_resolved() -> None:
    for overrides in (SMALL, ["experiment=wave_order_ablation"], ["experiment=accuracy", "sampling=top_p"]):
        config = load_config(overrides)
        assert stored_config(resolved(config)) == config
    with pytest.raises(MkError, match="nonsense"):
        stored_config(resolved(config) | {"nonsense": 1})


def test_figures_are_held_to_the_intervals_of_their_rows(tmp_path: Path) -> None:
    with RunFolder.create(load_config(["experiment=decode_throughput", f"run_dir={tmp_path}"])) as run:
        row = run.row(engine="cuda", dtype="bfloat16", context=[8192], checks={})
    row = dataclasses.replace(row, p10_ms=1.9, p50_ms=2.0, p90_ms=2.2, ratio=1.1, ratio_low=1.05, ratio_high=1.15)

    def outside(stored: Row, **changes: object) -> list[str]:
        return [of.figure for of in rerun.comparisons(stored, dataclasses.replace(stored, **changes)) if not of.within]

    assert outside(row, p50_ms=2.19, ratio=1.06) == []
    assert outside(row, p50_ms=2.21) == ["p50_ms"] and outside(row, ratio=1.04) == ["ratio"]
    assert outside(row, p50_ms=None) == ["p50_ms"]
    simulated = dataclasses.replace(row, clock="simulated", ratio=None)
    assert outside(simulated, p50_ms=2.0 + 1e-10) == [] and outside(simulated, p50_ms=2.001) == ["p50_ms"]
    scored = dataclasses.replace(row, p50_ms=None, ratio=None, score=0.5, scores=[0.4, 0.6])
    assert outside(scored, score=0.6) == [] and outside(scored, score=0.7) == ["score"]
