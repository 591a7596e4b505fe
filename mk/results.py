"""Results that are kept: `promote` copies a run's rows and raw data to results/<card>/, `verify` computes them again.

    python -m mk.results promote ID          make promote run=ID
    python -m mk.results verify              make verify-results

`results/<card>/<ID>/` holds rows.jsonl, raw.jsonl and config.yaml. Files of schema 1 lie flat beside those folders:
they have no raw data, are listed as such, and only what needs none is checked of them.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from mk.errors import MkError
from mk.readme_figures import check_readme
from mk.recompute import different
from mk.rows import Row, read_raw, read_rows
from mk.sources import ROOT, commit_source_hash

RAW_BYTES = 200_000  # of a run
SEARCHED = 200  # commits in which sources of an unnamed one are looked for


def promote(run: Path, results: Path, root: Path = ROOT) -> Path:
    """Copy a run's rows, raw data and configuration to `results`/<card>/<run>; returns that folder.

    A row made where there was no git gets the commit with the same sources. Raises MkError for rows that `verify` would
    refuse, for rows of several cards and for raw data over `RAW_BYTES`.
    """
    if not (run / "rows.jsonl").is_file():
        raise MkError(f"{run} is no run folder with rows", hint="make promote run=<the name of a folder in runs/>")
    rows, raw = named_commits(read_rows(run / "rows.jsonl"), root), run / "raw.jsonl"
    cards = {"simulated" if row.clock == "simulated" else row.gpu for row in rows}
    if len(cards) != 1:
        raise MkError(f"{run} has rows of {', '.join(sorted(cards))}: one card a run")
    if raw.exists() and raw.stat().st_size > RAW_BYTES:
        raise MkError(f"{raw} has {raw.stat().st_size} bytes, more than {RAW_BYTES}")
    problems = [f"row {number}: {problem}" for number, problem in check_rows(rows, read_raw(raw), root)]
    if problems:
        raise MkError(
            f"{run} cannot be promoted: {problems[0]}" + f" (and {len(problems) - 1} more)" * (len(problems) > 1)
        )
    folder = results / cards.pop() / run.name
    if folder.exists():
        raise MkError(f"{folder} is there already")
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("".join(row.line() for row in rows))
    for name in ("raw.jsonl", "config.yaml"):
        shutil.copyfile(run / name, folder / name)
    return folder


def named_commits(rows: list[Row], root: Path) -> list[Row]:
    """The rows with the commit that their sources are of, where they were made without git; digests follow."""
    out: list[Row] = []
    renamed: dict[str, str | None] = {}
    for row in rows:
        if row.commit != "none":
            out.append(row)
            continue
        commit = commit_of(row.source_hash or "", root)
        to = renamed.get(row.ratio_to or "", row.ratio_to)
        new = dataclasses.replace(row, commit=commit, ratio_to=to).sealed()
        if row.digest != row.computed_digest():
            new = dataclasses.replace(new, digest=row.digest)  # an edited row stays one
        renamed[row.digest or ""] = new.digest
        out.append(new)
    return out


@functools.cache
def commit_of(source_hash: str, root: Path) -> str:
    """The newest commit with these sources; "none" where there is none."""
    command = ["git", "rev-list", f"--max-count={SEARCHED}", "HEAD"]
    try:
        commits = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "none"
    return next((commit for commit in commits if commit_source_hash(commit, root) == source_hash), "none")


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
    if row.digest != row.computed_digest():
        yield "its fields are not those that it was written with"
    if row.commit == "none" or row.commit.endswith("-dirty"):
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
            if (own.get("kernel_step_ms"), own.get("base_block_ms")) not in (
                (other.get("step_ms"), None),
                (None, other.get("block_ms", [])),
            ):
                yield f"its ratio is not to the steps of the row {row.ratio_to}"


@functools.cache
def _source_problem(commit: str, source_hash: str, root: Path) -> str | None:
    try:
        found = commit_source_hash(commit, root)
    except MkError as error:
        return str(error)
    return None if found == source_hash else f"its sources {source_hash} are not those of commit {commit}: {found}"


def verify(results: Path, readme: Path, root: Path = ROOT) -> tuple[list[str], list[str]]:
    """(what is wrong, what could not be computed again and why) of all rows under `results` and of the README."""
    problems, notes, kept = [], [], []
    for path in sorted(path for path in results.rglob("*.jsonl") if path.name != "raw.jsonl"):
        name = path.relative_to(results).as_posix()
        try:
            rows = read_rows(path)
        except MkError as error:
            problems.append(str(error))
            continue
        kept += rows
        problems += [
            f"{name}:{number}: {problem}"
            for number, problem in check_rows(rows, read_raw(path.parent / "raw.jsonl"), root)
        ]
        old = Counter(row.schema for row in rows if row.schema < 2)
        notes += [f"{name}: {count} rows of schema {schema}, which have no raw data" for schema, count in old.items()]
    wrong, unknown = check_readme(readme.read_text(), kept)
    return problems + wrong, notes + unknown


def main(argv: list[str]) -> int:
    """Exit status: 0, 1 where verify finds something wrong, 2 for a wrong input."""
    results = ROOT / "results"
    try:
        if len(argv) == 2 and argv[0] == "promote":
            run = Path(argv[1]) if Path(argv[1]).is_dir() else ROOT / "runs" / argv[1]
            print(promote(run, results))
            return 0
        if argv != ["verify"]:
            raise MkError("promote RUN, or verify", hint="make promote run=ID, make verify-results")
    except MkError as error:
        print(f"error: {error}" + f"\nhint: {error.hint}" * bool(error.hint), file=sys.stderr)
        return 2
    problems, notes = verify(results, ROOT / "README.md")
    print("\n".join([*(f"note: {note}" for note in notes), *(f"WRONG: {problem}" for problem in problems)]))
    print(f"{len(problems)} wrong" if problems else "all that can be computed again is as it stands")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
