"""Kept results: what promotes, what is refused, and that an edit by hand never stands."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mk.compose import load_config
from mk.config import hash_of
from mk.errors import MkError
from mk.model.geometry import PRESETS
from mk.report.kept_rows import read_kept
from mk.results.__main__ import main
from mk.results.checks import KEPT
from mk.results.kept import host_free, model_name
from mk.results.old_rows import SUMS
from mk.results.promote import RAW_BYTES, as_published, prepare, promote
from mk.results.readme_figures import check_readme
from mk.results.recompute import KINDS, WITHOUT_RAW, different, figures, function_of
from mk.results.rows import FIGURES, SCHEMA, Row, read_raw, read_rows
from mk.results.runs import RunFolder
from mk.results.sources import ROOT, source_hash
from mk.results.step_figures import Ratio, experts_agree, median_ratio, raw_steps, step_figures
from mk.results.verify import ranked_problems, verify
from mk.roofline import uniform_experts
from tests.promotion import commit, edit, problems, repository

__all__ = ["repository"]

FULL = PRESETS["north_mini_code"]
PLAN = ("schedule", "wave_order", "placement")
STEPS = [2.0 + 0.001 * (i * 7 % 32) for i in range(64)]


def made(root: Path, *overrides: str, **meta: Any) -> RunFolder:
    """A run of both engines at batch 1 and 2."""
    run = RunFolder.create(load_config(["experiment=decode_throughput", *overrides]), root=root.parent / "runs")
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
        theirs = run.row(engine="vllm", **fields, **figures, **ratio, **dict.fromkeys(PLAN, "vllm"))
        run.append_row(theirs, slow | {"kernel_step_ms": raw["step_ms"], "log": ["INFO"]})
    return run


def kept(root: Path) -> Path:
    run = made(root)
    (folder,) = promote(run.path, root / "results", root)
    return folder


def test_a_promoted_run_is_computed_again_and_stands(repository: Path) -> None:
    folder = kept(repository)
    assert folder.parent.name == "h200" and {path.name for path in folder.iterdir()} == {
        "rows.jsonl",
        "raw.jsonl",
        "config.yaml",
    }
    assert problems(repository) == [] and len(read_rows(folder / "rows.jsonl")) == 4
    assert sum(path.stat().st_size for path in folder.iterdir()) < RAW_BYTES


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


def invented(field: str) -> Any:
    """A value that a row could have there."""
    hint = typing.get_args(typing.get_type_hints(Row)[field])[0]
    item = typing.get_args(hint)
    return {dict: {"1": 3}, list: [3], bool: True, int: 3, float: 3.0}[typing.get_origin(hint) if item else hint]


def test_no_figure_stands_that_raw_data_does_not_give(repository: Path) -> None:
    """Whichever, in a row of whichever kind; of rows that are older than this, but those that they had."""
    made_now = kept(repository)
    folders = [made_now, *(of for of in (ROOT / "results").glob("*/*") if of.is_dir())]
    seen: set[tuple[str, str, str, int]] = set()
    for folder in folders:
        raw = read_raw(folder / "raw.jsonl")
        for row in read_rows(folder / "rows.jsonl"):
            own = raw[row.raw_sha256 or ""]
            if (kind := (own["kind"], row.engine, row.experiment, row.schema)) in seen:
                continue
            seen.add(kind)
            given = figures(row, own)
            more = {field: invented(field) for field in FIGURES if field not in given}
            older = {field for names in WITHOUT_RAW.values() for field in names} if row.schema < 3 else set()
            told = set(different(dataclasses.replace(row, **more), own))
            wanted = {f"{field} is {value}, its raw data gives none" for field, value in more.items()}
            assert told <= wanted and {line.partition(" ")[0] for line in wanted - told} <= older, kind
    assert len(seen) > 20 and {schema for *_, schema in seen} == {2, SCHEMA}
    fields = {"gb_s": 3.0, "pct_matrix": 90.0, "logits_error": 0.1, "wall_ms": 2.0}
    edit(made_now / "rows.jsonl", 0, lambda values: Row.from_json(values | fields).sealed().to_json())
    told = {problem.partition(".jsonl:1: ")[2].partition(" ")[0] for problem in problems(repository)}
    assert told >= fields.keys()


def test_a_figure_that_was_read_off_stands_in_raw_data_as_it_is(repository: Path) -> None:
    run = made(repository)
    raw = raw_steps(STEPS, [8.0] * 48)
    axes: dict[str, Any] = {"engine": "cuda", "dtype": "bfloat16", "batch": 1, "context": [8192]}
    row = run.append_row(run.measured(raw, **axes, wall_ms=2.5, logits_error=0.1), raw)
    assert run.raw_of(row) == raw | {"told": {"wall_ms": 2.5, "logits_error": 0.1}}
    (folder,) = promote(run.path, repository / "results", repository)
    assert problems(repository) == []
    edit(folder / "rows.jsonl", 4, lambda values: Row.from_json(values | {"wall_ms": 2.4}).sealed().to_json())
    assert any("rows.jsonl:5: wall_ms is 2.4, its raw data gives 2.5" in problem for problem in problems(repository))
    for told in ({"p50_ms": 1.0}, {"arm": "best"}):  # that the steps give, that no figure is
        assert "its raw data tells" in next(iter(different(row, raw | {"told": told})))


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


def test_a_ratio_follows_the_row_that_it_is_to_wherever_that_stands(repository: Path) -> None:
    """The digests of a run that names no commit change as it is promoted."""
    run = made(repository, dirty=True)
    lines = (run.path / "rows.jsonl").read_text().splitlines(keepends=True)
    for order in ((0, 1, 2, 3), (1, 0, 3, 2), (3, 1, 2, 0)):
        (run.path / "rows.jsonl").write_text("".join(lines[at] for at in order))
        rows = read_rows(run.path / "rows.jsonl")
        out = as_published(rows, {}, repository)
        assert [row.engine for row in out] == [row.engine for row in rows]
        assert {row.ratio_to for row in out} == {None, *(row.digest for row in out if row.engine == "cuda")}
        assert all(new.digest != old.digest for new, old in zip(out, rows, strict=True))


def test_what_the_simulator_is_judged_by_is_kept_and_took_as_long(tmp_path: Path) -> None:
    kept = read_kept(ROOT / "results")
    judged = [of for of in kept if of.row.rank_correlation is not None]
    assert judged and list(ranked_problems(kept)) == []
    folder = Path(
        shutil.copytree(ROOT / "results" / judged[0].place.rpartition("/")[0], tmp_path / "simulated" / "run")
    )
    alone = read_kept(tmp_path)
    assert any("the measured row" in problem and "is not kept" in problem for problem in ranked_problems(alone))
    (at,) = {of.raw for of in alone}
    assert at == folder / "raw.jsonl"
    first = json.loads(at.read_text().splitlines()[0])
    name = (first.get("measured") or first.get("digests"))[0]
    slower = [
        dataclasses.replace(of, row=dataclasses.replace(of.row, p50_ms=(of.row.p50_ms or 0) + 1))
        if name in (of.row.digest, of.row.raw_sha256)
        else of
        for of in kept
    ]
    assert any(f"p50_ms of the row {name} is" in problem for problem in ranked_problems(slower))
    text = at.read_text().splitlines()
    edited = json.dumps(first | {"p50_ms": [*first["p50_ms"], 1.0]})  # a time that no row has
    (at.parent / "raw.jsonl").write_text("\n".join([edited, *text[1:]]) + "\n")
    sha = hashlib.sha256(edited.encode()).hexdigest()
    own = [dataclasses.replace(of, row=dataclasses.replace(of.row, raw_sha256=sha)) for of in read_kept(tmp_path)[:1]]
    assert [p for p in ranked_problems([*kept, *own]) if "the measured row None is not kept" in p]


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
    edit(folder / "rows.jsonl", 0, lambda v: Row.from_json({**v, "pct_nominal": 100.5}).to_json())
    assert any("100.5 % of the card's bandwidth" in problem for problem in problems(repository))


def test_a_row_whose_checks_failed_is_neither_promoted_nor_kept(repository: Path) -> None:
    def fail(values: dict) -> dict:
        return Row.from_json(values | {"checks": {"equal": False}}).sealed().to_json()

    folder = kept(repository)
    edit(folder / "rows.jsonl", 1, fail)
    assert any("rows.jsonl:2: failed equal" in problem for problem in problems(repository))
    run = made(repository)
    edit(run.path / "rows.jsonl", 2, fail)
    with pytest.raises(MkError, match="failed equal"):
        promote(run.path, repository / "results", repository)


def test_rows_from_other_sources_than_their_commits_are_not_promoted(repository: Path) -> None:
    for meta, message in (
        ({"source_hash": "0123456789abcdef"}, "its sources 0123456789abcdef are not those of commit"),
        ({"dirty": True, "source_hash": "0" * 16}, "-dirty: made from sources that no commit has"),
        ({"commit": "0" * 40}, "this repository has no commit 0000"),
    ):
        with pytest.raises(MkError, match=message):
            promote(made(repository, **meta).path, repository / "results", repository)
    assert not (repository / "results").exists()


@pytest.mark.parametrize("meta", [{"commit": "none"}, {"commit": "0" * 40, "dirty": True}], ids=["no git", "edits"])
def test_a_run_that_names_no_commit_gets_the_one_of_its_sources(repository: Path, meta: dict[str, object]) -> None:
    (folder,) = promote(made(repository, **meta).path, repository / "results", repository)
    rows = read_rows(folder / "rows.jsonl")
    assert {row.commit for row in rows} == {commit(repository)} and problems(repository) == []
    assert [rows[1].ratio_to, rows[3].ratio_to] == [rows[0].digest, rows[2].digest]
    with pytest.raises(MkError, match="its commit is none"):
        promote(made(repository, commit="none", source_hash="0").path, repository / "results", repository)


def test_an_edited_row_without_a_commit_is_not_sealed_anew(repository: Path) -> None:
    run = made(repository, commit="none")
    edit(run.path / "rows.jsonl", 0, lambda values: values | {"wave_order": "parted"})
    with pytest.raises(MkError, match="its fields are not those"):
        promote(run.path, repository / "results", repository)


def test_rows_without_raw_data_are_not_promoted(repository: Path) -> None:
    run = made(repository)
    run.append_row(run.row(engine="cuda", dtype="bfloat16", context=[1], checks={}))
    with pytest.raises(MkError, match="row 5: has no raw data"):
        promote(run.path, repository / "results", repository)


def test_too_much_raw_data_and_a_run_that_is_there_are_refused(repository: Path) -> None:
    run = made(repository)
    promote(run.path, repository / "results", repository)
    with pytest.raises(MkError, match="is there already"):
        promote(run.path, repository / "results", repository)
    with (run.path / "raw.jsonl").open("a") as file:
        file.write(json.dumps({"step_ms": [0] * 100_000}) + "\n")
    with pytest.raises(MkError, match="more than 200000"):
        promote(run.path, repository / "results", repository)
    with pytest.raises(MkError, match="no run folder"):
        promote(repository, repository / "results", repository)


@pytest.mark.parametrize("named", ["", " ", ",", "one,", ",one", "one,,two"])
def test_a_run_that_is_not_named_is_told(named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["promote", named]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: run={named} names a run that is empty" and hint.startswith("hint: make promote run=")


def test_what_cannot_be_kept_is_refused_before_anything_is_written(repository: Path) -> None:
    def refused(change: Callable[[Path], object], message: str) -> None:
        run = made(repository).path
        change(run)
        with pytest.raises(MkError, match=message):
            promote(run, repository / "results", repository)
        assert not (repository / "results").exists()

    old = {"schema": 1}
    refused(
        lambda run: edit(run / "rows.jsonl", 0, lambda v: Row.from_json(v | old).to_json()), "row 1: is of schema 1"
    )
    for name in ("raw.jsonl", "config.yaml"):
        refused(lambda run, name=name: (run / name).unlink(), rf"{name} is missing")
    refused(lambda run: (run / "rows.jsonl").write_text(""), r"rows\.jsonl has no rows")
    refused(lambda run: (run / "raw.jsonl").write_text("{}\n{"), r"raw\.jsonl:2: ")
    refused(lambda run: (run / "raw.jsonl").write_text("[1]\n"), r"raw\.jsonl:1: no JSON object")
    refused(lambda run: (run / "raw.jsonl").write_bytes(b"\xff\n"), r"raw\.jsonl cannot be read")
    refused(lambda run: (run / "config.yaml").write_text("a: ]"), r"config\.yaml is no configuration")
    refused(lambda run: (run / "config.yaml").write_text(edited(run)), r"config\.yaml is not as it was written")


def edited(folder: Path) -> str:
    text = (folder / "config.yaml").read_text()
    assert "context: 8192" in text
    return text.replace("context: 8192", "context: 1024")


def test_a_write_that_breaks_off_leaves_nothing(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (prepared,) = prepare(made(repository).path, repository / "results", repository)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", full)
        with pytest.raises(MkError, match="No space left"):
            prepared.write()
    assert list((repository / "results" / "h200").iterdir()) == []
    assert prepared.write().is_dir() and problems(repository) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"placement": "round_robin"}, "placement is round_robin, its configuration has row_owner"),
        ({"wave_order": "parted"}, "wave_order is parted, its configuration has"),
        ({"schedule": "work_stealing"}, "schedule is work_stealing, its configuration has static"),
        ({"gpu": "cpu"}, "is of cpu, its folder of h200"),
        ({"clock": "simulated"}, "is of simulated, its folder of h200"),
        ({"model_window": "vllm"}, "model_window is vllm, its configuration has None"),
        ({"window_kb": 64}, "window_kb is 64, its configuration has 56"),  # of one row
        ({"weights": "checkpoint"}, "weights is checkpoint, its configuration has random"),
        ({"sampling": "temperature 1"}, "sampling is temperature 1, its configuration has None"),
        ({"dtype": "float32"}, "dtype is float32, its configuration has bfloat16"),
        ({"batch": 3}, "batch is 3, its configuration has 1 or 2 or 4 or 8"),
        ({"context": [1024]}, r"context is \[1024\], its configuration has \[8192\]"),
        ({"config_hash": "0" * 64}, "its configuration 0000000000000000 is not beside it"),
        ({"schema": 1}, "is of schema 1"),
    ],
)
def test_an_axis_edited_and_sealed_anew_is_not_its_configurations(
    repository: Path, change: dict[str, Any], message: str
) -> None:
    folder = kept(repository)
    edit(folder / "rows.jsonl", 0, lambda values: Row.from_json(values | change).sealed().to_json())
    assert any(re.search(rf"^h200/{folder.name}/rows\.jsonl:1: {message}", problem) for problem in problems(repository))


def test_a_kept_folder_has_all_its_files_and_rows_and_its_own_configuration(repository: Path) -> None:
    folder = kept(repository)
    for name in KEPT:
        text = (folder / name).read_text()
        (folder / name).unlink()
        assert problems(repository) == [f"h200/{folder.name}/{name} is missing"]
        (folder / name).write_text(text)
    rows = (folder / "rows.jsonl").read_text()
    (folder / "rows.jsonl").write_text("")
    assert problems(repository) == [f"h200/{folder.name}/rows.jsonl has no rows"]
    (folder / "rows.jsonl").write_text(rows)
    raw = (folder / "raw.jsonl").read_text()
    (folder / "raw.jsonl").write_text(raw + "{\n")
    assert [problem.split("raw.jsonl")[1][:4] for problem in problems(repository)] == [":5: "]
    (folder / "raw.jsonl").write_text(raw)
    (folder / "config.yaml").write_text(edited(folder))
    assert "is not as it was written" in problems(repository)[0]
    digest = hash_of(yaml.safe_load((folder / "config.yaml").read_text()))
    lines = (folder / "config.yaml").read_text().splitlines(keepends=True)
    (folder / "config.yaml").write_text("".join([f"# config_hash: {digest}\n", *lines[1:]]))
    assert len(problems(repository)) == 4 and "is not beside it" in problems(repository)[0]


def test_rows_outside_of_their_runs_folder_are_refused(repository: Path) -> None:
    folder = kept(repository)
    (folder.parent / "more.jsonl").write_text((folder / "rows.jsonl").read_text())
    (folder.parent / "none.jsonl").write_text("")
    (folder / "other.jsonl").write_text((folder / "rows.jsonl").read_text())
    found = problems(repository)
    assert any("h200/more.jsonl:1: is kept in no folder of its run" in problem for problem in found)
    assert "h200/none.jsonl has no rows" in found
    assert f"h200/{folder.name}/other.jsonl: rows lie in <card>/<run>/rows.jsonl" in found


def test_a_run_of_several_configurations_keeps_each(repository: Path) -> None:
    run = made(repository)
    job = load_config(["experiment=decode_throughput", "placement=round_robin"])
    raw = raw_steps(STEPS, [8.0] * 48)
    row = run.under(job).row(
        engine="cuda", dtype="bfloat16", batch=1, context=[8192], checks={}, **step_figures(FULL, job.gpu, [8192], raw)
    )
    run.append_row(row, raw)
    (folder,) = promote(run.path, repository / "results", repository)
    assert problems(repository) == []
    (stored,) = (folder / "configs").iterdir()
    assert stored.name == f"{row.config_hash[:16]}.yaml"
    stored.unlink()
    assert problems(repository) == [
        f"h200/{folder.name}/rows.jsonl:5: its configuration {row.config_hash[:16]} is not beside it"
    ]


def test_what_a_run_simulated_and_what_it_measured_are_kept_apart(repository: Path) -> None:
    run = made(repository)
    raw = raw_steps(STEPS[:1], [8.0] * 48)
    axes: dict[str, Any] = {"dtype": "bfloat16", "batch": 1, "context": [8192]}
    run.append_row(run.measured(raw, engine="simulator", clock="simulated", **axes), raw)
    measured, simulated = promote(run.path, repository / "results", repository)
    assert (measured.parent.name, simulated.parent.name) == ("h200", "simulated") and measured.name == simulated.name
    assert [len(read_rows(folder / "rows.jsonl")) for folder in (measured, simulated)] == [4, 1]
    assert read_raw(simulated / "raw.jsonl").keys() == {read_rows(simulated / "rows.jsonl")[0].raw_sha256}
    assert problems(repository) == []
    edit(simulated / "rows.jsonl", 0, lambda values: values | {"p50_ms": 1.0})
    assert any(f"simulated/{simulated.name}/rows.jsonl:1: p50_ms is 1.0" in problem for problem in problems(repository))


def test_folders_of_the_host_are_not_published(repository: Path) -> None:
    model = repository.parent / "models" / "north_mini_code"
    model.mkdir(parents=True)
    run = made(repository, f"model.path={model}", "experiment.trace=true")
    original = run.meta["config_hash"]
    (folder,) = promote(run.path, repository / "results", repository)
    text, rows = (folder / "config.yaml").read_text(), read_rows(folder / "rows.jsonl")
    assert str(model) in (run.path / "config.yaml").read_text()
    assert not any(str(repository.parent) in path.read_text() for path in folder.iterdir())
    assert f"# with folders of its host: {original}\n" in text and "path: north_mini_code\n" in text
    assert {row.model for row in rows} == {"north_mini_code"} and {row.config_hash for row in rows} == {
        hash_of(yaml.safe_load(text))
    }
    assert [rows[1].ratio_to, rows[3].ratio_to] == [rows[0].digest, rows[2].digest]


@pytest.mark.parametrize(
    ("written", "public"),
    [
        ("/home/me/north", "north"),
        ("~/north", "north"),
        ("runs", "runs"),
        ("CohereLabs/North-Mini-Code-1.0", "CohereLabs/North-Mini-Code-1.0"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("wave_order=parted model.path=/home/me/north", "wave_order=parted model.path=north"),
        ("[/a/b,'/c/d']", "[b,'d']"),
        ("tokens / s", "tokens / s"),
    ],
)
def test_a_host_free_text_names_no_absolute_path(written: str, public: str) -> None:
    assert host_free(written) == public


def test_a_model_goes_by_its_folders_name(tmp_path: Path) -> None:
    assert model_name("nano", None) == "nano" and model_name("nano", str(tmp_path)) == tmp_path.name
    assert model_name("nano", "CohereLabs/North") == "CohereLabs/North" and model_name("nano", "/gone/north") == "north"


def test_several_runs_are_promoted_together_or_not_at_all(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mk.results.__main__.ROOT", repository)
    monkeypatch.setattr(prepare, "__defaults__", (repository,))
    one, two = made(repository).path, made(repository).path
    moved = two / "raw.jsonl"
    text = moved.read_text()
    moved.unlink()
    assert main(["promote", f"{one},{two}"]) == 2 and "raw.jsonl is missing" in capsys.readouterr().err
    assert not (repository / "results").exists()
    moved.write_text(text)
    assert main(["promote", f"{one},{one}"]) == 2 and "names a run twice" in capsys.readouterr().err
    assert main(["promote", f"{one},{two}"]) == 0
    assert {path.name for path in (repository / "results" / "h200").iterdir()} == {one.name, two.name}
    assert problems(repository) == []


@pytest.mark.parametrize(
    "raw",
    [
        {"kind": "prefill_calls", "call_ms": []},
        {"kind": "decoded", "new_tokens": [3], "decode_s": 0},
        {"kind": "prefill_calls", "call_ms": [1.0], "host_ms": "a"},
        {"step_ms": STEPS},
        {"kind": "x"},
    ],
)
def test_raw_data_that_gives_no_figure_is_a_problem_and_no_traceback(repository: Path, raw: dict[str, Any]) -> None:
    row = read_rows(made(repository).path / "rows.jsonl")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "its figures cannot be computed" in next(iter(different(row, raw)))


def test_every_kind_of_raw_data_that_is_written_has_its_function() -> None:
    sources = [path.read_text() for folder in ("experiments", "evals", "mk") for path in (ROOT / folder).rglob("*.py")]
    assert {kind for text in sources for kind in re.findall(r'"kind": "(\w+)"', text)} == KINDS.keys()
    assert len({function_of(kind) for kind in KINDS}) == len(KINDS)


def old_rows(root: Path) -> Path:
    """A file of two rows of schema 1, with its line in the list of such files."""
    folder = root / "results" / "h200"
    folder.mkdir(parents=True)
    row = dataclasses.replace(read_rows(made(root).path / "rows.jsonl")[0], schema=1, digest=None, raw_sha256=None)
    (folder / "old.jsonl").write_text(row.line() * 2)
    digest = hashlib.sha256((folder / "old.jsonl").read_bytes()).hexdigest()
    (root / "results" / SUMS).write_text(f"# of old rows\n{digest}  h200/old.jsonl\n")
    return folder / "old.jsonl"


def test_old_rows_are_listed_as_such(repository: Path) -> None:
    old_rows(repository)
    (repository / "README.md").write_text("")
    wrong, notes = verify(repository / "results", repository / "README.md", repository)
    assert not wrong and notes == ["h200/old.jsonl: 2 rows of schema 1, which have no raw data"]


def test_old_rows_that_were_edited_added_or_dropped_do_not_stand(repository: Path) -> None:
    path = old_rows(repository)
    text = path.read_text()
    edit(path, 0, lambda values: values | {"p50_ms": values["p50_ms"] * 0.999})
    assert [problem.split(":")[0] for problem in problems(repository)] == ["h200/old.jsonl is not as it was kept"]
    path.write_text(text)
    (path.parent / "more.jsonl").write_text(text)
    assert problems(repository) == [f"h200/more.jsonl holds rows of schema 1 and {SUMS} has no line for it"]
    (path.parent / "more.jsonl").unlink()
    path.unlink()
    assert problems(repository) == [f"{SUMS} names h200/old.jsonl, where no rows of schema 1 are"]


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


def test_a_column_that_rows_do_not_give_is_named(repository: Path) -> None:
    folder = kept(repository)
    wrong, notes = check_readme(TABLE.replace("vLLM ms", "published ms"), read_kept(folder.parent.parent))
    assert not wrong and notes == ["README: the column 'published ms' is not from rows here"]


def test_a_ratios_interval_covers_what_the_noise_explains_and_no_more() -> None:
    same = median_ratio(STEPS, list(reversed(STEPS)))
    assert not same.detectable and same.low <= 1 <= same.high
    faster = median_ratio([ms * 1.05 for ms in STEPS], STEPS)
    assert faster.detectable and faster.low < 1.05 < faster.high and faster.ratio == pytest.approx(1.05)
    # whose medians are known: of blocks of 16 of ones and twos it is 1, 1.5 or 2, of equal times the time
    halves = median_ratio([1.0] * 16 + [2.0] * 16, [4.0] * 32)
    assert halves == Ratio(0.375, 0.25, 0.5) and median_ratio([3.0] * 5, [2.0] * 40) == Ratio(1.5, 1.5, 1.5)
    assert experts_agree(51.6, 52.5) and not experts_agree(51.6, 53) and not experts_agree(None, 8.0)


def test_raw_data_is_found_by_its_hash(repository: Path) -> None:
    run = made(repository)
    raw = read_raw(run.path / "raw.jsonl")
    rows = read_rows(run.path / "rows.jsonl")
    assert [run.raw_of(row) for row in rows] == [raw[row.raw_sha256 or ""] for row in rows] and len(raw) == 4
