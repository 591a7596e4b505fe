"""Copy a run's rows, raw data and configurations to results/<card>/<ID>/: all of it, or nothing."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mk.errors import MkError
from mk.results.checks import KEPT, check_kept, names_none
from mk.results.kept import card_of, published, read_configs
from mk.results.rows import Row, read_raw, read_rows
from mk.results.sources import ROOT, commit_source_hash, recent_commits

RAW_BYTES = 200_000  # of a run
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


@functools.cache
def commit_of(source_hash: str, root: Path) -> str:
    """The newest commit with these sources; "none" where there is none."""
    commits = recent_commits(SEARCHED, root)
    return next((commit for commit in commits if commit_source_hash(commit, root) == source_hash), "none")
