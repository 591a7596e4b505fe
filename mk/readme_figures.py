"""The README's tables and lists of measurements against the rows that they come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mk.rows import Row

# of a table that has a line a batch: the figures of one row of the kernel's, and of the baseline's beside it
KERNEL: dict[str, Callable[[Row], str]] = {
    "batch": lambda row: f"{row.batch}",
    "ms a step": lambda row: f"{row.p50_ms:.2f}",
    "tokens/s": lambda row: f"{row.tokens_per_s:.0f}",
    "experts a layer": lambda row: f"{row.distinct_experts:.1f}",
    "GB a step": lambda row: f"{(row.bytes_per_step or 0) / 1e9:.2f}",
    "% of the floor's speed": lambda row: f"{row.pct_nominal:.1f}",
}
BASELINE: dict[str, Callable[[Row], str]] = {
    "vLLM ms": lambda row: f"{row.p50_ms:.2f}",
    "vLLM / kernel": lambda row: f"{row.ratio:.2f}" if row.ratio is not None else "-",
}


def check_readme(text: str, rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """(figures that no row gives, columns that are not from rows)."""
    wrong: list[str] = []
    notes: list[str] = []
    for head, lines in tables(text):
        if "ms a step" in head and "batch" in head:
            notes += [
                f"README: the column {name!r} is not from rows here" for name in head if name not in KERNEL | BASELINE
            ]
            wrong += [problem for cells in lines for problem in _decode(dict(zip(head, cells, strict=True)), rows)]
        elif head[:2] == ["placement", "schedule"]:
            wrong += [problem for cells in lines for problem in _interpreter(head, cells, rows)]
    return wrong + _bullets(text, rows), notes


def _bullets(text: str, rows: Sequence[Row]) -> list[str]:
    """Milliseconds in the bullets that begin with an experiment's name."""
    bullets = dict(re.findall(r"^\* `(\w+)`(.*?)(?=^\* |^#|\Z)", text, flags=re.M | re.S))
    said: list[tuple[str, str, Callable[[Row], bool]]] = []
    for ms, keys in re.findall(r"([\d.]+)(?:\s+ms a step)?\s+at\s+(\d+)K", bullets.get("context_sweep", "")):
        said.append((f"context_sweep, {keys}K keys", ms, _at(1, round_keys=int(keys))))
    orders = re.findall(r"`(\w+)`\s+(\d+\.\d+)\s+and\s+(\d+\.\d+)", bullets.get("plan_ablation", ""))
    for order, *both in orders:
        for batch, ms in zip((1, 8), both, strict=True):
            said.append((f"wave_order {order}, batch {batch}", ms, _at(batch, order)))
    for tokens, kilo, value, unit in re.findall(
        r"(\d+)(K?)(?:\s+tokens\s+takes)?\s+([\d.]+)\s+(ms|s)\b", bullets.get("prefill_throughput", "")
    ):
        length = int(tokens) * (1024 if kilo else 1)
        said.append((f"prefill of {length}", value if unit == "ms" else f"{value}e3", _prompt(length)))
    return [
        f"README: {about} is {shown} ms, and no row's"
        for about, shown, fits in said
        if not any(fits(row) and row.p50_ms is not None and _rounds(row.p50_ms, shown) for row in rows)
    ]


def _at(batch: int, order: str | None = None, round_keys: int = 8) -> Callable[[Row], bool]:
    """Whether a row is of the kernel's static, owned lists at about so many thousand keys."""
    return lambda row: (
        row.engine == "cuda"
        and not row.bound
        and row.batch == batch
        and round((row.context or [0])[0] / 1024) == round_keys
        and (row.schedule, row.placement) == ("static", "row_owner")
        and order in (None, row.wave_order)
    )


def _prompt(tokens: int) -> Callable[[Row], bool]:
    return lambda row: row.experiment == "prefill_throughput" and row.batch == 1 and row.prompt_tokens == tokens


def _rounds(value: float, shown: str) -> bool:
    """Whether a value is what is shown, to the digits that are."""
    digits, _, power = shown.partition("e")
    unit = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
    return abs(value - float(shown)) <= unit / 2 * (1 + 1e-9)


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """(head, lines) of each Markdown table, a cell a string."""
    found = []
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, flags=re.MULTILINE):
        head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.append((head, lines))
    return found


def _decode(cells: dict[str, str], rows: Sequence[Row]) -> list[str]:
    mine = [row for row in rows if row.engine == "cuda" and row.experiment == "decode_throughput" and not row.bound]
    shown = {name: cell for name, cell in cells.items() if name in KERNEL}
    fit = [row for row in mine if all(KERNEL[name](row) == cell for name, cell in shown.items())]
    if not fit:
        return [f"README: no row has {', '.join(f'{name} {cell}' for name, cell in shown.items())}"]
    theirs = {name: cell for name, cell in cells.items() if name in BASELINE}
    beside = [row for row in rows if row.engine == "vllm" and row.ratio_to in {row.digest for row in fit}]
    if theirs and not any(all(BASELINE[name](row) == cell for name, cell in theirs.items()) for row in beside):
        return [f"README: no baseline beside batch {cells['batch']} has {theirs}"]
    return []


def _interpreter(head: list[str], cells: list[str], rows: Sequence[Row]) -> list[str]:
    """Tokens a second of quickstart, a column a batch."""
    wrong = []
    for name, cell in zip(head[2:], cells[2:], strict=True):
        found = {
            f"{row.tok_s:.0f}"
            for row in rows
            if row.experiment == "quickstart"
            and [row.placement, row.schedule, f"batch {row.batch}"] == [*cells[:2], name]
        }
        if cell not in found:
            wrong.append(
                f"README: {cells[0]}, {cells[1]}, {name} is {cell}, rows have {', '.join(sorted(found)) or 'none'}"
            )
    return wrong
