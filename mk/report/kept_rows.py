"""Every row under results/ with where it stands and the configuration it ran with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from mk.kept import EXECUTED, leaves_of, read_configs, within
from mk.rows import Row, read_rows


@dataclass(frozen=True, slots=True)
class Kept:
    """A row of a kept run."""

    row: Row
    run: str  # folder of the run, or the file's stem where rows of schema 1 lie flat
    place: str  # h200/<run>/rows.jsonl:3
    config: Mapping[str, Any] | None  # resolved; None beside rows of schema 1

    @property
    def short(self) -> str:
        """The place without the card, and with the end of the run's name alone."""
        return f"{self.run.rpartition('-')[2]}:{self.place.rpartition(':')[2]}"

    def leaf(self, key: str) -> Any:
        """A value of the configuration by its dotted key; None where there is none."""
        return reduce(lambda at, name: (at or {}).get(name), key.split("."), self.config)


def read_kept(results: Path) -> list[Kept]:
    """All rows, by file and line. Raises MkError naming a broken file."""
    found: list[Kept] = []
    for path in sorted([*results.glob("*/*.jsonl"), *results.glob("*/*/rows.jsonl")]):
        folder = path.parent if path.name == "rows.jsonl" else None
        configs = read_configs(folder) if folder else {}
        for line, row in enumerate(read_rows(path), start=1):
            place = f"{path.relative_to(results).as_posix()}:{line}"
            found.append(Kept(row, folder.name if folder else path.stem, place, configs.get(row.config_hash)))
    return found


def newest(rows: Iterable[Kept], key: Callable[[Row], Hashable]) -> list[Kept]:
    """Of the rows with the same key the last one that was measured, in the order in which keys first occur."""
    best: dict[Hashable, Kept] = {}
    for kept in rows:
        name = key(kept.row)
        if name not in best or kept.row.time > best[name].row.time:
            best[name] = kept
    return list(best.values())


def plan_of(kept: Kept) -> tuple[tuple[str, str], ...]:
    """What the row's configuration executes, by dotted key; the same for two that execute the same."""
    leaves = {"engine.trace": "none"} | dict(leaves_of(kept.config or {}))  # rows that are older than the leaf had none
    return tuple(sorted((key, str(value)) for key, value in leaves.items() if within(key, EXECUTED)))


def told_apart(rows: Sequence[Kept]) -> list[str]:
    """What each row's plan says of the keys in which they differ. A row that is older than a key differs in nothing by
    it: what it had is not known."""
    plans = [dict(plan_of(of)) for of in rows]
    keys = sorted(key for key in set().union(*plans) if len({plan[key] for plan in plans if key in plan}) > 1)
    return [", ".join(f"{key.rpartition('.')[2]} {plan[key]}" for key in keys if key in plan) for plan in plans]
