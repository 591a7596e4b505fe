"""A cell of the report beside the row that it says it is of, read from the row's file without the report's own code."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import yaml

from mk.kept import hash_of
from mk.sources import ROOT

RESULTS = ROOT / "results"


@functools.cache
def row_at(place: str) -> dict[str, Any]:
    """The JSON object at `<card>/<run>/rows.jsonl:<line>`."""
    name, _, line = place.rpartition(":")
    found: dict[str, Any] = json.loads((RESULTS / name).read_text().splitlines()[int(line) - 1])
    return found


@functools.cache
def configs_beside(folder: Path) -> dict[str, dict[str, Any]]:
    values = [yaml.safe_load(path.read_text()) for path in [folder / "config.yaml", *folder.glob("configs/*.yaml")]]
    return {hash_of(of): of for of in values}


def value_at(place: str, field: str) -> Any:
    """Of the row, or where the field is a dotted key, of its configuration."""
    row = row_at(place)
    if "." not in field:
        return row.get(field)
    value: Any = configs_beside((RESULTS / place.rpartition(":")[0]).parent)[row["config_hash"]]
    for key in field.split("."):
        value = value[key] if value else None
    return value


def cell_is_right(place: str, field: str, unit: float, shown: str) -> bool:
    """Whether a cell shows the row's value, a number to the digits that it has."""
    value = value_at(place, field)
    if value is None:
        return shown == ""
    if isinstance(value, list):
        counts = [int(text.replace(",", "")) for text in shown.split(", ")]
        return counts == value or (counts == [value[0]] and set(value) == set(counts))
    if isinstance(value, str):
        return shown == value
    digits = len(shown.partition(".")[2])
    return abs(value / unit - float(shown.replace(",", ""))) <= 0.5 * 10.0**-digits * (1 + 1e-9)
