"""Run folders are complete and unique; a row is checked before it is written."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import math
import subprocess
import typing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mk.compose import load_config, to_yaml
from mk.config import Config, config_hash
from mk.errors import MkError
from mk.results.kept import NAMES_FILES
from mk.results.rows import Row, read_raw, read_rows
from mk.results.runs import RunFolder, command_line, data_of, git_commit
from mk.results.sources import FILES, ROOT, commit_source_hash, recent_commits, source_hash


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(load_config(["batch=ragged4", "schedule=work_stealing"]), root=tmp_path)


def make_row(run: RunFolder, **more: Any) -> Row:
    return run.row(engine="interpreter", dtype="float32", context=[3, 4, 5, 6], checks={"equal": True}, **more)


def test_folder_holds_the_configuration_and_its_origin(run: RunFolder) -> None:
    meta = json.loads((run.path / "meta.json").read_text())
    assert (run.path / "config.yaml").read_text() == to_yaml(run.config)
    assert meta["config_hash"] == config_hash(run.config)
    assert run.path.name.endswith(f"-quickstart-{meta['config_hash'][:8]}")
    assert meta["environment"]["packages"]["torch"] != "absent"
    commit, dirty = git_commit()
    assert (meta["commit"], meta["dirty"]) == (commit, dirty)


def test_commit_is_the_one_of_this_tree() -> None:
    inside = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert git_commit()[0] == (inside.stdout.strip() if inside.returncode == 0 else "none")


def test_no_commit_outside_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mk.results.runs.ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() == ("none", False)


def test_runs_at_once_never_share_a_folder(tmp_path: Path) -> None:
    config = load_config()
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: RunFolder.create(config, root=tmp_path).path, range(8)))
    assert len(set(paths)) == 8
    first = min(paths, key=lambda path: len(path.name))
    assert {path.name for path in paths} == {first.name} | {f"{first.name}-{n}" for n in range(2, 9)}


def test_run_dir_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MkError, match="cannot make the run folder"):
        RunFolder.create(load_config([f"run_dir={tmp_path}/file"]))
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(MkError, match=f"cannot make the run folder {tmp_path}/link"):
        RunFolder.create(load_config([f"run_dir={tmp_path}/link"]))


def test_a_row_carries_the_axes_of_its_run_and_survives_the_file(run: RunFolder) -> None:
    row = run.append_row(make_row(run, tok_s=20.5, build_hash="abc"))
    run.append_row(make_row(run))
    assert read_rows(run.path / "rows.jsonl")[0] == row
    assert len(read_rows(run.path / "rows.jsonl")) == 2
    assert (row.batch, row.schedule, row.placement, row.routing) == (4, "work_stealing", "row_owner", "checkpoint")
    assert (row.config_hash, row.tok_s, row.build_hash) == (run.meta["config_hash"], 20.5, "abc")


def test_figures_that_do_not_apply_are_left_out_but_required_nulls_stay(run: RunFolder) -> None:
    values = make_row(run).to_json()
    assert "tok_s" not in values
    assert values["build_hash"] is None


def test_a_row_names_its_sources_seeds_raw_data_and_itself(run: RunFolder) -> None:
    row = run.append_row(make_row(run), {"step_ms": [1.0, 2.0]})
    (line,) = (run.path / "raw.jsonl").read_text().splitlines()
    assert row.raw_sha256 == hashlib.sha256(line.encode()).hexdigest() and json.loads(line) == {"step_ms": [1.0, 2.0]}
    assert row.source_hash == source_hash() and row.seeds and row.seeds["sampling.seed"] == 0
    (found,) = read_rows(run.path / "rows.jsonl")
    assert found.digest == found.computed_digest()
    assert dataclasses.replace(found, batch=5).computed_digest() != found.digest


def test_drafts_stand_until_the_next_row(run: RunFolder) -> None:
    first = run.append_row(make_row(run, new_tokens=1), {"n": 1})
    run.draft([(make_row(run, new_tokens=2), {"n": 2}), (make_row(run, new_tokens=3), {"n": 3})])
    run.draft([(make_row(run, new_tokens=4), {"n": 4})])
    kept, draft = read_rows(run.path / "rows.jsonl")
    assert kept == first and draft.new_tokens == 4 and run.raw_of(draft) == {"n": 4}
    last = run.append_row(make_row(run, new_tokens=5), {"n": 5})
    assert read_rows(run.path / "rows.jsonl") == [first, last] and len(read_raw(run.path / "raw.jsonl")) == 2


@pytest.mark.parametrize("ended", [KeyboardInterrupt(), MkError("no room"), SystemExit(143)])
def test_a_run_that_is_broken_off_says_where_its_rows_are(
    run: RunFolder, ended: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(ended)), run:
        raise ended
    assert capsys.readouterr().err == ""  # none is lost
    with pytest.raises(type(ended)), run:
        run.append_row(make_row(run))
        raise ended
    assert capsys.readouterr().err == f"the rows so far are in {run.path}\n"
    with run:
        run.append_row(make_row(run))
    assert capsys.readouterr().err == ""


def test_variants_share_a_folder_and_keep_their_configurations(run: RunFolder) -> None:
    other = load_config(["batch=ragged4", "placement=round_robin"])
    row = run.under(other).append_row(make_row(run.under(other)))
    assert (row.placement, row.config_hash) == ("round_robin", config_hash(other))
    assert (run.path / "configs" / f"{row.config_hash[:16]}.yaml").read_text() == to_yaml(other)
    assert read_rows(run.path / "rows.jsonl") == [row]


def test_a_command_line_names_no_folder_of_the_host() -> None:
    argv = ["/home/me/mk/run.py", "experiment=vllm_decode", "baseline.vllm.site=/home/me/site", "batch.contexts=[1, 2]"]
    line = "python run.py experiment=vllm_decode baseline.vllm.site=site 'batch.contexts=[1, 2]'"
    assert command_line(argv) == line and command_line(["pytest"]) is None


@pytest.mark.parametrize("key", NAMES_FILES)
def test_files_that_a_configuration_names_are_hashed(key: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    group, _, leaf = key.partition(".")
    values = {group: {leaf: str(path)}, "debug": False}
    assert data_of(values) == data_of({group: {leaf: None}}) == {}
    path.write_bytes(b"ids")
    assert data_of(values) == {key: hashlib.sha256(b"ids").hexdigest()}
    path.write_bytes(b"other ids")  # within the same run
    assert data_of(values) == {key: hashlib.sha256(b"other ids").hexdigest()}


def texts_of(schema: Any, prefix: str = "") -> Iterator[str]:
    """Every leaf of the configuration that may be any text, by its key."""
    for name, hint in typing.get_type_hints(schema).items():
        of = next((arg for arg in typing.get_args(hint) if arg is not type(None)), hint)
        if dataclasses.is_dataclass(of):
            yield from texts_of(of, f"{prefix}{name}.")
        elif of is str:
            yield prefix + name


def test_every_leaf_that_names_a_file_by_its_name_is_hashed() -> None:
    found = set(texts_of(Config))
    assert set(NAMES_FILES) <= found
    named = {key for key in found if key.rpartition(".")[2] in {"path", "trace", "script", "map", "data"}}
    assert named - {"engine.trace"} == set(NAMES_FILES)  # that is what the kernel notes


def test_a_checkpoints_folder_has_the_digest_of_its_files(tmp_path: Path) -> None:
    """Wherever it lies; other weights, and another tokenizer, have another. Not of what is no part of a model."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        for name in ("config.json", "model.safetensors", "chat_template.jinja"):
            (folder / name).write_text(name)
    (other / "notes.txt").write_text("of this host")
    before = data_of({"model": {"path": str(one)}})
    assert set(before) == {"model.path"} and before == data_of({"model": {"path": str(other)}})
    for name in ("config.json", "model.safetensors", "chat_template.jinja"):
        text = (other / name).read_text()
        (other / name).write_text("edited")
        assert data_of({"model": {"path": str(other)}}) != before, name
        (other / name).write_text(text)
    assert data_of({"model": {"path": "CohereLabs/North"}}) == {}


def test_the_sources_of_a_commit_hash_like_the_files(tmp_path: Path) -> None:
    def git(*args: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *author, *args], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    for name in FILES:
        (tmp_path / name).write_text(name)
    (tmp_path / "mk").mkdir()
    (tmp_path / "mk" / "a.py").write_text("one")
    untracked = source_hash(tmp_path)  # as on a machine that has the files alone
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD").strip()
    assert untracked == source_hash(tmp_path) == commit_source_hash(commit, tmp_path)
    (tmp_path / "README.md").write_text("no source")
    (tmp_path / "mk" / "a.py").write_text("two")
    assert source_hash(tmp_path) != commit_source_hash(commit, tmp_path)
    with pytest.raises(MkError, match="no commit 0123"):
        commit_source_hash("0123", tmp_path)


def commit_all(root: Path) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "one"]):
        subprocess.run(["git", *command], cwd=root, check=True)


def write_sources(root: Path) -> None:
    (root / "mk").mkdir(parents=True)
    for name in (*FILES, "mk/a.py", "README.md"):
        (root / name).write_text(name)


def test_dirty_are_changes_to_what_may_be_read_as_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that nobody has added to git yet among them: a wave order of one's own is one."""
    monkeypatch.setattr("mk.results.runs.ROOT", tmp_path)
    write_sources(tmp_path)
    (tmp_path / ".gitignore").write_text("*.log\n")
    commit_all(tmp_path)
    commit, dirty = git_commit()
    assert len(commit) == 40 and not dirty
    (tmp_path / "README.md").write_text("a new figure")
    (tmp_path / "results" / "h200").mkdir(parents=True)
    (tmp_path / "results" / "h200" / "rows.jsonl").write_text("{}")  # as a promotion leaves it
    (tmp_path / "mk" / "ignored.log").write_text("")
    assert git_commit() == (commit, False)
    (tmp_path / "mk" / "a.py").write_text("edited")
    assert git_commit() == (commit, True)
    (tmp_path / "mk" / "a.py").unlink()
    assert git_commit() == (commit, True)
    (tmp_path / "mk" / "a.py").write_text("mk/a.py")
    assert git_commit() == (commit, False)
    (tmp_path / "mk" / "new.py").write_text("")
    assert git_commit() == (commit, True)
    subprocess.run(["git", "add", "mk/new.py"], cwd=tmp_path, check=True)
    assert git_commit() == (commit, True)


@pytest.mark.parametrize("known", [False, True])
def test_sources_inside_another_repository_are_without_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    inside = tmp_path / "other" / "vendored"
    write_sources(inside)
    alone = source_hash(inside)
    (tmp_path / "other" / ".gitignore").write_text("" if known else "vendored")
    commit_all(tmp_path / "other")
    monkeypatch.setattr("mk.results.runs.ROOT", inside)
    assert git_commit() == ("none", False) and source_hash(inside) == alone
    assert recent_commits(5, inside) == []
    (inside / "mk" / "a.py").write_text("two")
    assert source_hash(inside) != alone
    with pytest.raises(MkError, match="in no repository"):
        commit_source_hash("HEAD", inside)


def test_a_repository_that_tracks_no_source_is_none(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("")
    commit_all(tmp_path)
    write_sources(tmp_path / "copy")
    for path in (tmp_path / "copy").iterdir():
        path.rename(tmp_path / path.name)
    assert recent_commits(1, tmp_path) == []
    found = source_hash(tmp_path)
    (tmp_path / "mk" / "a.py").write_text("two")
    assert source_hash(tmp_path) != found


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf])
def test_figures_must_be_finite(run: RunFolder, figure: float) -> None:
    with pytest.raises(MkError, match=r"row\.tok_s"):
        make_row(run, tok_s=figure)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch", "4"),
        ("batch", 4.0),
        ("batch", True),
        ("context", [1.5]),
        ("context", 3),
        ("checks", {"equal": 1}),
        ("env", {"threads": 2}),
        ("engine", None),
        ("build_hash", 7),
        ("tok_s", "fast"),
        ("new_tokens", 2.5),
        ("schema", 0),
        ("schema", 4),
        ("source_hash", None),
    ],
)
def test_wrong_types_name_the_field(run: RunFolder, field: str, value: Any) -> None:
    values = asdict(make_row(run)) | {field: value}
    with pytest.raises(MkError, match=rf"row\.{field}"):
        Row.from_json(values)


def test_an_int_may_stand_for_a_float(run: RunFolder) -> None:
    assert make_row(run, tok_s=20).tok_s == 20


def test_missing_and_unknown_fields_are_named(run: RunFolder) -> None:
    values = make_row(run).to_json()
    required = [field.name for field in dataclasses.fields(Row) if field.default is dataclasses.MISSING]
    assert {"schema", "commit", "checks"} < set(required)
    for name in required:
        with pytest.raises(MkError, match=f"row lacks {name}"):
            Row.from_json({key: value for key, value in values.items() if key != name})
    with pytest.raises(MkError, match="row has unknown speed"):
        make_row(run, speed=1.0)


def test_a_damaged_file_names_its_line(run: RunFolder) -> None:
    run.append_row(make_row(run))
    with (run.path / "rows.jsonl").open("a") as file:
        file.write('{"schema": 1\n')
    with pytest.raises(MkError, match=r"rows\.jsonl:2"):
        read_rows(run.path / "rows.jsonl")


def test_the_rows_are_a_table_too(run: RunFolder) -> None:
    with run:
        run.append_row(make_row(run, tok_s=20.5))
        run.append_row(make_row(run, p50_ms=1.5))
    with (run.path / "rows.csv").open(newline="") as file:
        one, two = csv.DictReader(file)
    assert (one["tok_s"], one["p50_ms"], two["tok_s"], two["p50_ms"]) == ("20.5", "", "", "1.5")
    assert json.loads(one["context"]) == [3, 4, 5, 6] and json.loads(one["checks"]) == {"equal": True}
