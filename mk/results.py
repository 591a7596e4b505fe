"""Results that are kept: `promote` copies a run's rows and raw data to results/<card>/, `verify` computes them again.

    python -m mk.results promote ID[,ID...]  make promote run=ID[,ID...]
    python -m mk.results verify              make verify-results

`results/<card>/<ID>/` holds rows.jsonl, raw.jsonl, config.yaml, and configs/ of a run of several. Files of schema 1 lie
flat beside those folders: they have no raw data, are listed as such, and only what needs none is checked of them, and
that they are the files that mk/old_rows.py knows.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mk.errors import MkError
from mk.kept import card_of, config_problems, published, read_configs
from mk.old_rows import sum_problems
from mk.readme_figures import check_readme
from mk.recompute import different
from mk.report.kept_rows import Kept
from mk.report.page import stale
from mk.rows import Row, read_raw, read_rows
from mk.sources import ROOT, commit_source_hash, recent_commits

KEPT = ("rows.jsonl", "raw.jsonl", "config.yaml")
RAW_BYTES = 200_000  # of a run
COPIED = {  # raw data of a row with a ratio: what of the other row it is a copy of
    "kernel_step_ms": "step_ms",
    "base_block_ms": "block_ms",
    "base_sent_s": "sent_s",
    "base_last_s": "last_s",
    "base_tokens": "tokens",
    "base_prompt_tokens": "prompt_tokens",
}
SEARCHED = 200  # commits in which sources of an unnamed one are looked for


def promote(run: Path, results: Path, root: Path = ROOT) -> list[Path]:
    """Copy a run's rows, raw data and configurations to `results`/<card>/<run>; returns that folder, and the one in
    `results`/simulated/ of a run that also has simulated rows.

    Raises MkError for whatever `prepare` refuses, and then has written nothing.
    """
    return [prepared.write() for prepared in prepare(run, results, root)]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run, or a card's part of it, that was checked: the folder that is to hold it, and the text of each file."""

    folder: Path
    files: dict[str, str]

    def write(self) -> Path:
        """The folder is there whole, or not at all."""
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder.parent, prefix=".promote-") as scratch:
                made = Path(scratch) / self.folder.name
                for name, text in self.files.items():
                    (made / name).parent.mkdir(parents=True, exist_ok=True)
                    (made / name).write_text(text)
                made.rename(self.folder)
        except OSError as error:
            raise MkError(f"cannot write {self.folder}: {error.strerror}") from error
        return self.folder


def prepare(run: Path, results: Path, root: Path = ROOT) -> list[Prepared]:
    """Reads and checks a run; writes nothing. What it simulated and what it measured go to folders of their own.

    A row made where there was no git, or from edits that were committed later, gets the commit with the same sources,
    and one whose configuration names folders of its host the hash of that without them. Raises MkError for missing or
    broken files, rows that `verify` would refuse, rows of several cards and raw data over `RAW_BYTES`.
    """
    if not (run / "rows.jsonl").is_file():
        raise MkError(f"{run} is no run folder with rows", hint="make promote run=<the name of a folder in runs/>")
    run = run.resolve()
    for name in KEPT:
        if not (run / name).is_file():
            raise MkError(f"{run / name} is missing")
    size = (run / "raw.jsonl").stat().st_size
    if size > RAW_BYTES:
        raise MkError(f"{run / 'raw.jsonl'} has {size} bytes, more than {RAW_BYTES}")
    rows, raw = read_rows(run / "rows.jsonl"), read_raw(run / "raw.jsonl")
    if not rows:
        raise MkError(f"{run / 'rows.jsonl'} has no rows")
    cards = {row.gpu for row in rows}
    if len(cards) != 1:
        raise MkError(f"{run} has rows of {', '.join(sorted(cards))}: one card a run")
    configs = read_configs(run)
    files, hashes = published(configs)
    rows = as_published(rows, hashes, root)
    public = {hashes[digest]: config for digest, config in configs.items()}
    prepared, problems = [], []
    for card in sorted({card_of(row) for row in rows}):
        own = {number: row for number, row in enumerate(rows, start=1) if card_of(row) == card}
        found = check_kept(list(own.values()), raw, public, card, root)
        problems += [f"row {list(own)[number - 1]}: {problem}" for number, problem in found]
        folder = results / card / run.name
        if folder.exists():
            raise MkError(f"{folder} is there already")
        lines = {"rows.jsonl": [row.line() for row in own.values()], "raw.jsonl": raw_lines(run, own.values())}
        prepared.append(Prepared(folder, files | {name: "".join(text) for name, text in lines.items()}))
    if problems:
        raise MkError(
            f"{run} cannot be promoted: {problems[0]}" + f" (and {len(problems) - 1} more)" * (len(problems) > 1)
        )
    return prepared


def raw_lines(run: Path, rows: Iterable[Row]) -> list[str]:
    """The lines of a run's raw data that these rows name."""
    named = {row.raw_sha256 for row in rows}
    lines = (run / "raw.jsonl").read_text().splitlines()
    return [f"{line}\n" for line in lines if hashlib.sha256(line.encode()).hexdigest() in named]


def as_published(rows: list[Row], hashes: Mapping[str, str], root: Path) -> list[Row]:
    """The rows with the commit of their sources, where they name none, and the hash of the configuration that is kept;
    digests follow."""
    renamed: dict[str, str | None] = {}

    def publish(row: Row) -> Row:
        found = commit_of(row.source_hash or "", root) if names_none(row.commit) else "none"
        commit = row.commit if found == "none" else found
        config = hashes.get(row.config_hash, row.config_hash)
        to = renamed.get(row.ratio_to or "", row.ratio_to)
        new = dataclasses.replace(row, commit=commit, config_hash=config, ratio_to=to)
        if new != row and row.digest == row.computed_digest():  # an edited row stays one
            new = new.sealed()
            renamed[row.digest or ""] = new.digest
        return new

    after = {row.digest: row.ratio_to for row in rows}
    order = sorted(range(len(rows)), key=lambda number: _depth(rows[number].ratio_to, after))
    made = {number: publish(rows[number]) for number in order}  # what a ratio is to, before the row that has it
    return [made[number] for number in range(len(rows))]


def _depth(to: str | None, after: Mapping[str | None, str | None]) -> int:
    """How many rows stand behind one with this `ratio_to`, by digest; of a ring, as many as there are."""
    depth = 0
    while to is not None and depth < len(after):
        depth, to = depth + 1, after.get(to)
    return depth


def names_none(commit: str) -> bool:
    """Whether a row was made without git or from edits, and so from sources that its commit may not have."""
    return commit == "none" or commit.endswith("-dirty")


@functools.cache
def commit_of(source_hash: str, root: Path) -> str:
    """The newest commit with these sources; "none" where there is none."""
    commits = recent_commits(SEARCHED, root)
    return next((commit for commit in commits if commit_source_hash(commit, root) == source_hash), "none")


def check_kept(
    rows: list[Row], raw: dict[str, dict], configs: Mapping[str, dict[str, Any]], card: str, root: Path
) -> Iterable[tuple[int, str]]:
    """As `check_rows`, of the rows in a folder of a card with their configurations beside them."""
    yield from check_rows(rows, raw, root)
    for number, row in enumerate(rows, start=1):
        if row.schema < 2:
            yield number, f"is of schema {row.schema}, which has no raw data"
        if card_of(row) != card:
            yield number, f"is of {card_of(row)}, its folder of {card}"
        for problem in config_problems(row, configs):
            yield number, problem


def check_rows(rows: list[Row], raw: dict[str, dict], root: Path = ROOT) -> Iterable[tuple[int, str]]:
    """(number from 1, what is wrong) of each row at fault."""
    by_digest = {row.digest: row for row in rows}
    for number, row in enumerate(rows, start=1):
        for problem in _problems(row, by_digest, raw, root):
            yield number, problem


def _problems(row: Row, by_digest: dict[str | None, Row], raw: dict[str, dict], root: Path) -> Iterable[str]:
    if row.pct_nominal is not None and row.pct_nominal > 100:
        yield f"{row.pct_nominal:.1f} % of the card's bandwidth"
    if row.schema < 2:
        return
    if failed := [name for name, passed in row.checks.items() if not passed]:
        yield f"failed {', '.join(failed)}"
    if row.digest != row.computed_digest():
        yield "its fields are not those that it was written with"
    if names_none(row.commit):
        yield f"its commit is {row.commit}: made from sources that no commit has"
    elif problem := _source_problem(row.commit, row.source_hash or "", root):
        yield problem
    if row.raw_sha256 is None:
        yield "has no raw data"
    elif row.raw_sha256 not in raw:
        yield "its raw data is not the one beside it"
    else:
        yield from different(row, raw[row.raw_sha256])
        if row.ratio_to is not None and row.ratio_to not in by_digest:
            yield f"ratio_to={row.ratio_to}: no such row beside it"
        elif row.ratio_to is not None:
            own, other = raw[row.raw_sha256], raw.get(by_digest[row.ratio_to].raw_sha256 or "", {})
            copied = [name for name in COPIED if name in own]
            if not copied or any(own[name] != other.get(COPIED[name]) for name in copied):
                yield f"its ratio is not to the steps of the row {row.ratio_to}"


@functools.cache
def _source_problem(commit: str, source_hash: str, root: Path) -> str | None:
    try:
        found = commit_source_hash(commit, root)
    except MkError as error:
        return str(error)
    return None if found == source_hash else f"its sources {source_hash} are not those of commit {commit}: {found}"


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


def main(argv: list[str]) -> int:
    """Exit status: 0, 1 where verify finds something wrong, 2 for a wrong input."""
    results = ROOT / "results"
    try:
        if len(argv) == 2 and argv[0] == "promote":
            if not all(run.strip() for run in argv[1].split(",")):
                raise MkError(
                    f"run={argv[1]} names a run that is empty", hint="make promote run=<the name of a folder in runs/>"
                )
            runs = [Path(run) if Path(run).is_dir() else ROOT / "runs" / run for run in argv[1].split(",")]
            if len({run.resolve().name for run in runs}) < len(runs):
                raise MkError(f"{argv[1]} names a run twice")
            prepared = [part for run in runs for part in prepare(run, results)]  # all are sound before one is written
            print("\n".join(str(part.write()) for part in prepared))
            return 0
        if argv != ["verify"]:
            raise MkError("promote RUN[,RUN...], or verify", hint="make promote run=ID[,ID...], make verify-results")
    except MkError as error:
        print(f"error: {error}" + f"\nhint: {error.hint}" * bool(error.hint), file=sys.stderr)
        return 2
    problems, notes = verify(results, ROOT / "README.md")
    print("\n".join([*(f"note: {note}" for note in notes), *(f"WRONG: {problem}" for problem in problems)]))
    print(f"{len(problems)} wrong" if problems else "all that can be computed again is as it stands")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
