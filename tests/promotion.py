"""A repository that runs are promoted to, and what must hold of a promoted run whatever its experiment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mk.results import runs
from mk.results.checks import _source_problem
from mk.results.promote import commit_of, promote
from mk.results.rows import Row, read_rows
from mk.results.sources import FILES, source_hash
from mk.results.verify import verify


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
    commit_of.cache_clear()
    _source_problem.cache_clear()
    return root


@pytest.fixture
def committed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository; runs that are made now say that they come from its commit."""
    head, sources = commit(repository), source_hash(repository)
    monkeypatch.setattr(runs, "git_commit", lambda: (head, False))
    monkeypatch.setattr(runs, "source_hash", lambda: sources)
    return repository


def commit(root: Path) -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def problems(root: Path, readme: str = "") -> list[str]:
    (root / "README.md").write_text(readme)
    return verify(root / "results", root / "README.md", root)[0]


def edit(path: Path, line: int, change: Callable[[dict], dict]) -> None:
    lines = path.read_text().splitlines()
    lines[line] = json.dumps(change(json.loads(lines[line])))
    path.write_text("\n".join(lines) + "\n")


def folder_of(root: Path) -> Path:
    """The only run folder under `root`."""
    (path,) = root.glob("*/rows.jsonl")
    return path.parent


def require_kept(root: Path, run: Path, **edits: Callable[[Any], Any]) -> list[Row]:
    """Promotes a run of a `committed` repository; returns its rows.

    They stand as they are; each field of `edits`, changed in the first row that has it and sealed anew, does not.
    """
    (folder,) = promote(run, root / "results", root)
    assert problems(root) == []
    path = folder / "rows.jsonl"
    text, rows = path.read_text(), read_rows(path)
    for field, change in edits.items():
        line = next(i for i, row in enumerate(rows) if getattr(row, field) is not None)
        changed = change(getattr(rows[line], field))
        assert changed != getattr(rows[line], field)
        edit(path, line, lambda v, field=field, to=changed: Row.from_json(v | {field: to}).sealed().to_json())
        wanted = f"{folder.parent.name}/{folder.name}/rows.jsonl:{line + 1}: {field} is {changed}, its raw data gives"
        assert any(problem.startswith(wanted) for problem in problems(root)), (field, problems(root))
        path.write_text(text)
    return rows


def no(checks: dict[str, bool]) -> dict[str, bool]:
    """The verdicts with the first turned over."""
    name = next(iter(checks))
    return {**checks, name: not checks[name]}
