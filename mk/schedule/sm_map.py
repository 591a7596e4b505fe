"""A measured map of a card: how long a hand-off takes between any two SMs. `experiment=sm_map` writes it.

A JSON file: `schema`, the `card`'s name as its driver has it, and `handoff_ns`, a symmetric matrix whose diagonal is 0.
SM k is block k of a grid that fills the card.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mk.errors import MkError

SCHEMA = 1
HINT = "experiment=sm_map writes a map in its run folder"


@dataclass(frozen=True, slots=True)
class SmMap:
    """handoff_ns[a][b]: nanoseconds from a signal of SM a to its being seen by SM b."""

    card: str
    handoff_ns: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, card: str, handoff_ns: npt.NDArray[np.float64]) -> SmMap:
        return cls(card, tuple(map(tuple, handoff_ns.tolist())))

    @classmethod
    def load(cls, path: Path) -> SmMap:
        """Raises MkError for a file that is missing or is no map, naming what is wrong with it."""
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise MkError(f"placement.path={path}: no such file", hint=HINT) from error
        except (OSError, ValueError, RecursionError) as error:
            raise MkError(f"placement.path={path}: is no JSON ({type(error).__name__})", hint=HINT) from error
        if problem := _problem(values):
            raise MkError(f"placement.path={path}: {problem}", hint=HINT)
        return cls(values["card"], tuple(map(tuple, values["handoff_ns"])))

    def save(self, path: Path) -> None:
        """A line an SM."""
        rows = ",\n".join(f"    {json.dumps([round(ns, 1) for ns in row])}" for row in self.handoff_ns)
        head = f'  "schema": {SCHEMA},\n  "card": {json.dumps(self.card)},\n  "handoff_ns": [\n'
        path.write_text(f"{{\n{head}{rows}\n  ]\n}}\n")

    def require(self, gpu: str, sms: int) -> None:
        """Raises MkError where the map is of another card than the configured one."""
        if gpu.lower() not in self.card.lower():
            raise MkError(f"placement.path: a map of {self.card}, and gpu.name={gpu}", hint=HINT)
        if len(self.handoff_ns) != sms:
            raise MkError(f"placement.path: a map of {len(self.handoff_ns)} SMs, and gpu.sms={sms}", hint=HINT)

    def mean_ns(self) -> npt.NDArray[np.float64]:
        """Of each SM, over all others."""
        matrix = np.array(self.handoff_ns)
        return np.asarray(matrix.sum(axis=1) / (len(matrix) - 1))

    def ranked(self) -> npt.NDArray[np.int64]:
        """SMs, the shortest mean hand-off first; of equal ones the lower number."""
        return np.argsort(self.mean_ns(), kind="stable").astype(np.int64)

    def beyond_us(self) -> list[list[float]]:
        """Of each pair, beyond the mean of all pairs; 0 from an SM to itself, which the mean knows nothing of."""
        matrix = np.array(self.handoff_ns)
        apart = (matrix - self.mean_ns().mean()) / 1e3
        np.fill_diagonal(apart, 0.0)
        found: list[list[float]] = apart.tolist()
        return found


def _problem(values: Any) -> str | None:
    """What keeps JSON from being a map."""
    if not isinstance(values, dict) or set(values) != {"schema", "card", "handoff_ns"}:
        return "a map has schema, card and handoff_ns, and nothing else"
    if values["schema"] != SCHEMA:
        return f"schema {values['schema']!r}, this code reads {SCHEMA}"
    if not isinstance(values["card"], str) or not values["card"]:
        return f"card {values['card']!r} is no name"
    matrix = values["handoff_ns"]
    if not isinstance(matrix, list) or len(matrix) < 2 or any(not isinstance(row, list) for row in matrix):
        return "handoff_ns is no matrix of two SMs or more"
    return next((f"handoff_ns[{a}]: {p}" for a, row in enumerate(matrix) if (p := _row_problem(matrix, a, row))), None)


def _row_problem(matrix: Sequence[Sequence[Any]], a: int, row: Sequence[Any]) -> str | None:
    if len(row) != len(matrix):
        return f"{len(row)} entries for {len(matrix)} SMs"
    for b, ns in enumerate(row):
        if not isinstance(ns, int | float) or isinstance(ns, bool) or not math.isfinite(ns):
            return f"{ns!r} is no time"
        if (ns == 0) != (a == b) or ns < 0:
            return f"{ns} to SM {b}: 0 to itself, and more to every other"
        if len(matrix[b]) > a and matrix[b][a] != ns:
            return f"{ns} to SM {b} and {matrix[b][a]} back"
    return None
