"""Evaluations as the command runs them: configuration in, row and samples out, over the built-in HTTP server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.benchmarks import open_benchmark
from evals.benchmarks.base import Benchmark
from evals.samples import Sample, read_samples
from experiments.accuracy import main
from mk.compose import load_config
from mk.errors import MkError
from mk.results.rows import Row, read_rows
from tests.server_rig import thought

CHECKS = {"samples_are_requests": True, "seeds_differ": True, "metrics_are_requests": True}  # of a run that is sound


@dataclass(frozen=True, slots=True)
class Ran:
    status: int
    folder: Path
    row: Row
    samples: list[Sample]

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return found

    @property
    def scores(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "scores.jsonl").read_text().split("\n") if line]


def run(root: Path, *overrides: str) -> Ran:
    """An evaluation whose run folder is the only new one under `root`/runs."""
    runs = root / "runs"
    before = set(runs.iterdir()) if runs.exists() else set()
    status = main(load_config(["experiment=accuracy", f"experiment.data_dir={root}", f"run_dir={runs}", *overrides]))
    (folder,) = set(runs.iterdir()) - before
    (row,) = read_rows(folder / "rows.jsonl")
    return Ran(status, folder, row, read_samples(folder))


def scripted(root: Path, replies: Iterable[tuple[str, str]]) -> list[str]:
    """Overrides for a model that says a content where the last turn holds a text, after thoughts of the wrong kind."""
    decoy = r"\boxed{1} Answer: A ```python" "\nprint(1)\n```"
    script = [{"when": when, "say": thought(decoy, content)} for when, content in replies]
    (root / "replies.json").write_text(json.dumps(script))
    return ["engine=scripted", f"engine.script={root / 'replies.json'}"]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def known(root: Path, name: str, count: int, *overrides: str) -> tuple[Benchmark, list[str]]:
    """The benchmark of the rows under `root` with their count and hash made known, and the overrides that say so."""
    wanted = [f"benchmark={name}", f"benchmark.count={count}", *overrides]
    try:
        open_benchmark(load_config([*wanted, "benchmark.sha256=unknown"]).benchmark, root)
    except MkError as error:
        wanted.append(str(error.hint).split()[0])
    return open_benchmark(load_config(wanted).benchmark, root), wanted
