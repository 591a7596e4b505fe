"""What may be kept: rows against their raw data, configuration and sources."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mk.errors import MkError
from mk.results.kept import card_of, config_problems
from mk.results.recompute import different
from mk.results.rows import Row
from mk.results.sources import ROOT, commit_source_hash

KEPT = ("rows.jsonl", "raw.jsonl", "config.yaml")
COPIED = {  # raw data of a row with a ratio: what of the other row it is a copy of
    "kernel_step_ms": "step_ms",
    "base_block_ms": "block_ms",
    "base_sent_s": "sent_s",
    "base_last_s": "last_s",
    "base_tokens": "tokens",
    "base_prompt_tokens": "prompt_tokens",
}


def names_none(commit: str) -> bool:
    """Whether a row was made without git or from edits, and so from sources that its commit may not have."""
    return commit == "none" or commit.endswith("-dirty")


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
