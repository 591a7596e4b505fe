"""Computes again all rows that are kept, and the README's figures and the page of them.

`results/<card>/<ID>/` holds rows.jsonl, raw.jsonl, config.yaml, and configs/ of a run of several. Files of schema 1 lie
flat beside those folders: they have no raw data, are listed as such, and only what needs none is checked of them, and
that they are the files that mk/results/old_rows.py knows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from mk.errors import MkError
from mk.report.kept_rows import Kept
from mk.report.page import stale
from mk.results.checks import KEPT, check_kept, check_rows
from mk.results.kept import read_configs
from mk.results.old_rows import sum_problems
from mk.results.readme_figures import check_readme
from mk.results.rows import read_raw, read_rows
from mk.results.sources import ROOT


def verify(results: Path, readme: Path, root: Path = ROOT) -> tuple[list[str], list[str]]:
    """(what is wrong, what could not be computed again and why) of all rows under `results`, of the README's tables and
    lists, and of the page of figures."""
    problems: list[str] = []
    notes: list[str] = []
    kept: list[Kept] = []
    files = set(results.rglob("*.jsonl"))
    flat = sorted(results.glob("*/*.jsonl"))
    folders = sorted(path for path in results.glob("*/*") if path.is_dir())
    old: set[str] = set()
    for path in flat:
        problems += _verify_flat(path, path.relative_to(results).as_posix(), kept, old, notes, root)
    problems += sum_problems(results, old)
    for folder in folders:
        problems += _verify_folder(folder, folder.relative_to(results).as_posix(), kept, root)
    known = {*flat, *(folder / name for folder in folders for name in KEPT)}
    problems += [f"{path.relative_to(results)}: rows lie in <card>/<run>/rows.jsonl" for path in sorted(files - known)]
    problems += ranked_problems(kept)
    wrong, unknown = check_readme(readme.read_text(), kept)
    return problems + wrong + list(stale(results, kept)), notes + unknown


def ranked_problems(kept: Sequence[Kept]) -> Iterable[str]:
    """Of rows that say how well the simulator ranks measured ones: those must be kept, with the times that it took."""
    known = {name: of.row for of in kept for name in (of.row.raw_sha256, of.row.digest) if name is not None}
    ranked = [of for of in kept if of.row.rank_correlation is not None]
    files = {path: read_raw(path) for path in {of.raw for of in ranked} if path is not None}
    for of in ranked:
        raw = files.get(of.raw, {}).get(of.row.raw_sha256 or "", {}) if of.raw else {}
        names = raw.get("measured", raw.get("digests", []))  # by raw data, once by digest
        for name, p50_ms in itertools.zip_longest(names, raw.get("p50_ms", [])):
            if name not in known:
                yield f"{of.place}: the measured row {name} is not kept"
            elif known[name].p50_ms != p50_ms:
                yield f"{of.place}: p50_ms of the row {name} is {known[name].p50_ms}, its raw data has {p50_ms}"


def _verify_flat(
    path: Path, name: str, kept: list[Kept], older: set[str], notes: list[str], root: Path
) -> Iterable[str]:
    """Of a file of rows that are older than raw data; adds its rows, its name, and a note on them."""
    try:
        rows = read_rows(path)
    except MkError as error:
        return [str(error)]
    if not rows:
        return [f"{name} has no rows"]
    kept += [Kept(row, path.stem, f"{name}:{line}", None, None) for line, row in enumerate(rows, start=1)]
    old = Counter(row.schema for row in rows if row.schema < 2)
    if old:
        older.add(name)
    notes += [f"{name}: {count} rows of schema {schema}, which have no raw data" for schema, count in old.items()]
    new = [number for number, row in enumerate(rows, start=1) if row.schema >= 2]
    alone = [f"{name}:{number}: is kept in no folder of its run with raw data: make promote" for number in new]
    return alone + [f"{name}:{number}: {problem}" for number, problem in check_rows(rows, {}, root)]


def _verify_folder(folder: Path, name: str, kept: list[Kept], root: Path) -> Iterable[str]:
    """Of a promoted run; adds its rows."""
    missing = [f"{name}/{file} is missing" for file in KEPT if not (folder / file).is_file()]
    if missing:
        return missing
    try:
        rows, raw, configs = read_rows(folder / "rows.jsonl"), read_raw(folder / "raw.jsonl"), read_configs(folder)
    except MkError as error:
        return [str(error)]
    kept += [
        Kept(row, folder.name, f"{name}/rows.jsonl:{line}", configs.get(row.config_hash), folder / "raw.jsonl")
        for line, row in enumerate(rows, start=1)
    ]
    if not rows:
        return [f"{name}/rows.jsonl has no rows"]
    found = check_kept(rows, raw, configs, folder.parent.name, root)
    return [f"{name}/rows.jsonl:{number}: {problem}" for number, problem in found]
