"""Kept results: what promotes, what is refused, and that an edit by hand never stands."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mk import results
from mk.compose import load_config
from mk.errors import MkError
from mk.model.geometry import PRESETS
from mk.readme_figures import check_readme
from mk.roofline import uniform_experts
from mk.rows import Row, read_raw, read_rows
from mk.runs import RunFolder
from mk.sources import FILES, ROOT, source_hash
from mk.step_figures import experts_agree, median_ratio, raw_steps, step_figures

FULL = PRESETS["north_mini_code"]
STEPS = [2.0 + 0.001 * (i * 7 % 32) for i in range(64)]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit of some sources."""
    root = tmp_path / "repository"
    (root / "mk").mkdir(parents=True)
    for name in (*FILES, "mk/a.py"):
        (root / name).write_text(name)
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", *command], cwd=root, check=True)
    results.commit_of.cache_clear()
    results._source_problem.cache_clear()
    return root


def commit(root: Path) -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def made(root: Path, **meta: Any) -> RunFolder:
    """A run of both engines at batch 1 and 2."""
    run = RunFolder.create(load_config(["experiment=decode_throughput"]), root=root.parent / "runs")
    run.meta.update({"commit": commit(root), "dirty": False, "source_hash": source_hash(root), **meta})
    for batch in (1, 2):
        experts, context = [uniform_experts(FULL, batch)] * 48, [8192] * batch
        raw = raw_steps([ms * (1 + batch) / 2 for ms in STEPS], experts)
        figures = step_figures(FULL, run.config.gpu, context, raw)
        fields: dict[str, Any] = {"dtype": "bfloat16", "batch": batch, "context": context, "checks": {"equal": True}}
        kernel = run.append_row(run.row(engine="cuda", **fields, **figures), raw)
        slow = raw_steps([ms * 3 for ms in STEPS], experts)
        of = median_ratio(slow["step_ms"], raw["step_ms"])
        ratio = {"ratio": of.ratio, "ratio_low": of.low, "ratio_high": of.high, "ratio_to": kernel.digest}
        figures = step_figures(FULL, run.config.gpu, context, slow)
        theirs = run.row(engine="vllm", **fields, **figures, **ratio)
        run.append_row(theirs, slow | {"kernel_step_ms": raw["step_ms"], "log": ["INFO"]})
    return run


def kept(root: Path) -> Path:
    run = made(root)
    return results.promote(run.path, root / "results", root)


def problems(root: Path, readme: str = "") -> list[str]:
    (root / "README.md").write_text(readme)
    return results.verify(root / "results", root / "README.md", root)[0]


def test_a_promoted_run_is_computed_again_and_stands(repository: Path) -> None:
    folder = kept(repository)
    assert folder.parent.name == "h200" and {path.name for path in folder.iterdir()} == {
        "rows.jsonl",
        "raw.jsonl",
        "config.yaml",
    }
    assert problems(repository) == [] and len(read_rows(folder / "rows.jsonl")) == 4
    assert sum(path.stat().st_size for path in folder.iterdir()) < results.RAW_BYTES


def edit(path: Path, line: int, change: Callable[[dict], dict]) -> None:
    lines = path.read_text().splitlines()
    lines[line] = json.dumps(change(json.loads(lines[line])))
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "field",
    ["p50_ms", "p10_ms", "tokens_per_s", "bytes_per_step", "pct_nominal", "fixed_us_per_layer", "distinct_experts"],
)
@pytest.mark.parametrize("resealed", [False, True])
def test_a_figure_edited_by_hand_is_refused_with_or_without_a_new_digest(
    repository: Path, field: str, resealed: bool
) -> None:
    folder = kept(repository)

    def change(values: dict) -> dict:
        row = Row.from_json(values | {field: values[field] * 0.999})
        return (row.sealed() if resealed else row).to_json()

    edit(folder / "rows.jsonl", 0, change)
    found = problems(repository)
    assert any(f"h200/{folder.name}/rows.jsonl:1: {field} is" in problem for problem in found)
    assert any("not those that it was written with" in problem for problem in found) != resealed


@pytest.mark.parametrize("field", ["ratio", "ratio_low", "ratio_high"])
def test_an_edited_ratio_is_refused(repository: Path, field: str) -> None:
    folder = kept(repository)
    edit(folder / "rows.jsonl", 1, lambda values: Row.from_json(values | {field: 9.0}).sealed().to_json())
    assert any(f"rows.jsonl:2: {field} is 9.0" in problem for problem in problems(repository))


def test_a_ratio_is_to_the_steps_of_the_row_that_it_names(repository: Path) -> None:
    folder = kept(repository)
    other = read_rows(folder / "rows.jsonl")[2].digest
    edit(folder / "rows.jsonl", 1, lambda values: Row.from_json(values | {"ratio_to": other}).sealed().to_json())
    assert any("its ratio is not to the steps of the row" in problem for problem in problems(repository))
    edit(folder / "rows.jsonl", 1, lambda values: Row.from_json(values | {"ratio_to": "none"}).sealed().to_json())
    assert any("no such row beside it" in problem for problem in problems(repository))


def test_a_label_edited_by_hand_is_refused(repository: Path) -> None:
    folder = kept(repository)
    edit(folder / "rows.jsonl", 0, lambda values: values | {"wave_order": "parted"})
    assert problems(repository)[0].endswith("its fields are not those that it was written with")


def test_edited_or_missing_raw_data_is_refused(repository: Path) -> None:
    folder = kept(repository)
    edit(folder / "raw.jsonl", 0, lambda values: values | {"step_ms": [1.9] * 64})
    assert any("its raw data is not the one beside it" in problem for problem in problems(repository))
    edit(folder / "rows.jsonl", 0, lambda v: Row.from_json({**v, "raw_sha256": None}).sealed().to_json())
    assert any("rows.jsonl:1: has no raw data" in problem for problem in problems(repository))


def test_faster_than_memory_is_refused(repository: Path) -> None:
    folder = kept(repository)
    edit(folder / "rows.jsonl", 0, lambda v: Row.from_json({**v, "schema": 1, "pct_nominal": 100.5}).to_json())
    assert any("100.5 % of the card's bandwidth" in problem for problem in problems(repository))


def test_rows_from_other_sources_than_their_commits_are_not_promoted(repository: Path) -> None:
    for meta, message in (
        ({"source_hash": "0123456789abcdef"}, "its sources 0123456789abcdef are not those of commit"),
        ({"dirty": True}, "-dirty: made from sources that no commit has"),
        ({"commit": "0" * 40}, "this repository has no commit 0000"),
    ):
        with pytest.raises(MkError, match=message):
            results.promote(made(repository, **meta).path, repository / "results", repository)
    assert not (repository / "results").exists()


def test_a_run_from_a_machine_without_git_gets_the_commit_of_its_sources(repository: Path) -> None:
    folder = results.promote(made(repository, commit="none").path, repository / "results", repository)
    rows = read_rows(folder / "rows.jsonl")
    assert {row.commit for row in rows} == {commit(repository)} and problems(repository) == []
    assert [rows[1].ratio_to, rows[3].ratio_to] == [rows[0].digest, rows[2].digest]
    with pytest.raises(MkError, match="its commit is none"):
        results.promote(made(repository, commit="none", source_hash="0").path, repository / "results", repository)


def test_an_edited_row_without_a_commit_is_not_sealed_anew(repository: Path) -> None:
    run = made(repository, commit="none")
    edit(run.path / "rows.jsonl", 0, lambda values: values | {"wave_order": "parted"})
    with pytest.raises(MkError, match="its fields are not those"):
        results.promote(run.path, repository / "results", repository)


def test_rows_without_raw_data_are_not_promoted(repository: Path) -> None:
    run = made(repository)
    run.append_row(run.row(engine="cuda", dtype="bfloat16", context=[1], checks={}))
    with pytest.raises(MkError, match="row 5: has no raw data"):
        results.promote(run.path, repository / "results", repository)


def test_too_much_raw_data_and_a_run_that_is_there_are_refused(repository: Path) -> None:
    run = made(repository)
    results.promote(run.path, repository / "results", repository)
    with pytest.raises(MkError, match="is there already"):
        results.promote(run.path, repository / "results", repository)
    with (run.path / "raw.jsonl").open("a") as file:
        file.write(json.dumps([0] * 100_000) + "\n")
    with pytest.raises(MkError, match="more than 200000"):
        results.promote(run.path, repository / "results", repository)
    with pytest.raises(MkError, match="no run folder"):
        results.promote(repository, repository / "results", repository)


def test_old_rows_are_listed_as_such(repository: Path) -> None:
    folder = repository / "results" / "h200"
    folder.mkdir(parents=True)
    row = dataclasses.replace(
        read_rows(made(repository).path / "rows.jsonl")[0], schema=1, digest=None, raw_sha256=None
    )
    (folder / "old.jsonl").write_text(row.line())
    (repository / "README.md").write_text("")
    wrong, notes = results.verify(repository / "results", repository / "README.md", repository)
    assert not wrong and notes == ["h200/old.jsonl: 1 rows of schema 1, which have no raw data"]


TABLE = """
| batch | ms a step | tokens/s | experts a layer | GB a step | % of the floor's speed | vLLM ms | vLLM / kernel |
|---|---|---|---|---|---|---|---|
| 1 | 2.02 | 496 | 8.0 | 7.13 | 73.7 | 6.05 | 3.00 |
| 2 | 3.02 | 662 | 15.5 | 11.05 | 76.1 | 6.05 | 2.00 |
"""


def test_the_readmes_figures_are_those_of_rows(repository: Path) -> None:
    kept(repository)
    assert problems(repository, TABLE) == []
    for edited, message in (("| 2.02 |", "no row has batch 1, ms a step"), ("| 2.00 |", "no baseline beside batch 2")):
        assert any(message in problem for problem in problems(repository, TABLE.replace(edited, "| 1.99 |")))


def test_bullets_of_the_readme_are_checked_too() -> None:
    rows = [row for path in (ROOT / "results").rglob("*.jsonl") if path.name != "raw.jsonl" for row in read_rows(path)]
    assert check_readme((ROOT / "README.md").read_text(), rows)[0] == []
    for bullet, shown, edited in (
        ("context_sweep", "at 64K", "2.31 at 64K"),
        ("wave_order_ablation", "`parted`", "`parted` 2.99 and 7.79,"),
        ("prefill_throughput", "128K", "128K 6.1 s"),
    ):
        line = f"\n* `{bullet}`: {edited}\n"
        assert shown in edited and len(check_readme(line, rows)[0]) == 1, bullet


def test_a_column_that_rows_do_not_give_is_named(repository: Path) -> None:
    folder = kept(repository)
    wrong, notes = check_readme(TABLE.replace("vLLM ms", "published ms"), read_rows(folder / "rows.jsonl"))
    assert not wrong and notes == ["README: the column 'published ms' is not from rows here"]


def test_a_ratios_interval_covers_what_the_noise_explains_and_no_more() -> None:
    same = median_ratio(STEPS, list(reversed(STEPS)))
    assert not same.detectable and same.low <= 1 <= same.high
    faster = median_ratio([ms * 1.05 for ms in STEPS], STEPS)
    assert faster.detectable and faster.low < 1.05 < faster.high and faster.ratio == pytest.approx(1.05)
    assert median_ratio(STEPS, STEPS, seed=1) == median_ratio(STEPS, STEPS, seed=1)
    assert experts_agree(51.6, 52.5) and not experts_agree(51.6, 53) and not experts_agree(None, 8.0)


def test_raw_data_is_found_by_its_hash(repository: Path) -> None:
    run = made(repository)
    raw = read_raw(run.path / "raw.jsonl")
    rows = read_rows(run.path / "rows.jsonl")
    assert [run.raw_of(row) for row in rows] == [raw[row.raw_sha256 or ""] for row in rows] and len(raw) == 4
