"""Every row under results/ with where it stands and the configuration it ran with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from mk.errors import MkError
from mk.results.kept import EXECUTED, leaves_of, read_configs, within
from mk.results.rows import Row, read_raw, read_rows
from mk.ring import window_kb_for

WINDOW = "engine.ring.window_kb"
CARD, MODEL = "h200", "north_mini_code"  # that figures and the README speak of
ENGINES = ("cuda", "served", "torch", "transformers", "vllm")  # that run on a card; served: a server of another's
OTHER_MODELS: dict[str, tuple[str, ...] | None] = {  # by experiment; None: any
    "accuracy": None,
    "accuracy_vllm": None,
    "parity": ("nano", MODEL),
    "prefill_tiles": ("slice",),
    "quickstart": ("nano",),
    "slow_sm": ("slice",),
    "sm_map": None,  # no model takes part
}


@dataclass(frozen=True, slots=True)
class Kept:
    """A row of a kept run."""

    row: Row
    run: str  # folder of the run, or the file's stem where rows of schema 1 lie flat
    place: str  # h200/<run>/rows.jsonl:3
    config: Mapping[str, Any] | None  # resolved; None beside rows of schema 1
    raw: Path | None  # the file of its raw data; None of schema 1

    @property
    def window_kb(self) -> int | None:
        """That a step of so many rows had; None beside rows whose configuration has none."""
        value = self.leaf(WINDOW)
        return value and window_kb_for(value, self.row.batch)

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
            place, run = f"{path.relative_to(results).as_posix()}:{line}", folder.name if folder else path.stem
            found.append(Kept(row, run, place, configs.get(row.config_hash), folder and folder / "raw.jsonl"))
    return found


def of_card(row: Row) -> bool:
    """Whether `CARD` left the row, of the model that its experiment is told of there: no CPU, no simulator."""
    models = OTHER_MODELS.get(row.experiment, (MODEL,))
    measured = row.gpu == CARD and row.clock is None and row.engine in ENGINES
    return measured and (models is None or row.model in models)


def of_one_machine(kept: Sequence[Kept]) -> list[Kept]:
    """What figures are drawn from: the rows of `of_card`; where there are none, those of the card and model that were
    measured last. So no figure mixes machines, whatever is kept beside them."""
    if stated := [of for of in kept if of_card(of.row)]:
        return stated
    measured = [of for of in kept if of.row.clock is None]
    if not measured:
        return []
    last = max(measured, key=lambda of: of.row.time).row
    return [of for of in measured if (of.row.gpu, of.row.model) == (last.gpu, last.model)]


def raw_of(rows: Sequence[Kept]) -> list[dict[str, Any]]:
    """What each row's figures were computed from. Raises MkError naming a row without it."""
    files = {path: read_raw(path) for path in dict.fromkeys(of.raw for of in rows) if path is not None}
    found = [files.get(of.raw, {}).get(of.row.raw_sha256 or "") for of in rows]  # type: ignore[arg-type]
    for of, raw in zip(rows, found, strict=True):
        if raw is None:
            raise MkError(f"{of.place}: its raw data is not beside it")
    return [raw for raw in found if raw is not None]


def newest(rows: Iterable[Kept], key: Callable[[Row], Hashable]) -> list[Kept]:
    """Of the rows with the same key the last one that was measured, in the order in which keys first occur."""
    best: dict[Hashable, Kept] = {}
    for kept in rows:
        name = key(kept.row)
        if name not in best or kept.row.time > best[name].row.time:
            best[name] = kept
    return list(best.values())


def of_last_run(rows: Sequence[Kept], key: Callable[[Row], Hashable]) -> list[Kept]:
    """Of the rows with the same key those of the run that ended last: what is compared was then measured together."""
    last: dict[Hashable, Kept] = {}
    for kept in rows:
        name = key(kept.row)
        if name not in last or kept.row.time >= last[name].row.time:
            last[name] = kept
    return [kept for kept in rows if kept.run == last[key(kept.row)].run]


def with_common_keys(rows: Sequence[Kept]) -> list[Kept]:
    """Those that all hold the most common number of keys."""
    counts = [of.row.context[0] for of in rows]
    keys = max(sorted(set(counts)), key=counts.count, default=0)
    return [of for of in rows if set(of.row.context) == {keys}]


def plan_of(kept: Kept) -> tuple[tuple[str, str], ...]:
    """What the row's configuration executes, by dotted key; the same for two that execute the same."""
    leaves = {"engine.trace": "none"} | dict(leaves_of(kept.config or {}))  # rows that are older than the leaf had none
    if WINDOW in leaves:
        leaves[WINDOW] = kept.window_kb
    return tuple(sorted((key, str(value)) for key, value in leaves.items() if within(key, EXECUTED)))


def told_apart(rows: Sequence[Kept]) -> list[str]:
    """What each row's plan says of the keys in which they differ. A row that is older than a key differs in nothing by
    it: what it had is not known."""
    plans = [dict(plan_of(of)) for of in rows]
    keys = sorted(key for key in set().union(*plans) if len({plan[key] for plan in plans if key in plan}) > 1)
    return [", ".join(f"{key.rpartition('.')[2]} {plan[key]}" for key in keys if key in plan) for plan in plans]
