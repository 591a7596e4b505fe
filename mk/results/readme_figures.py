"""The README's measurements against the rows that they come from: its tables here, its lists in readme_bullets.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mk.report.kept_rows import CARD, MODEL, Kept, newest, of_card
from mk.results.readme_bullets import bullet_problems
from mk.results.rows import Row

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

# a line of the simulator's table: (the experiment whose rows it was held against, names of their group)
RANKED = {
    "`plan_ablation`, all 42 plans": ("plan_ablation", ("plans",)),
    "of them `row_owner`, whose operations were traced": ("plan_ablation", ("row_owner",)),
    "of them the other placements": ("plan_ablation", ("other placements",)),
    "windows of 32 to 64 KB and smaller rings, the kernel's plan": ("plan_ablation", ("rings", "handover")),
    "`ladder`, `round_robin`: windows, weights held back, barriers": ("ladder", ("handover",)),
    "`context_sweep`, 1K to 256K keys": ("context_sweep", ("plans",)),
}
# a heading of the page, and what its table's head has
EXPECTED = {
    "## Measured: the kernel on an H200": "ms a step",
    "## Measured: the interpreter on a CPU": "placement",
    "## Ranking schedules without a card": "schedules",
}


def check_readme(text: str, kept: Sequence[Kept]) -> tuple[list[str], list[str]]:
    """(figures that no row gives, columns that are not from rows)."""
    rows = [of.row for of in kept]
    wrong: list[str] = []
    notes: list[str] = []
    found = tables(text)
    for heading, column in EXPECTED.items():
        if f"\n{heading}\n" in text and not any(column in head for head, _ in found):
            wrong.append(f"README: under {heading.strip('# ')!r} no table has a column {column!r}")
    for head, lines in found:
        if "ms a step" in head and "batch" in head:
            notes += [
                f"README: the column {name!r} is not from rows here" for name in head if name not in KERNEL | BASELINE
            ]
            wrong += [problem for cells in lines for problem in _decode(dict(zip(head, cells, strict=True)), rows)]
        elif head[:2] == ["placement", "schedule"]:
            wrong += [problem for cells in lines for problem in _interpreter(head, cells, rows)]
        elif "rank correlation" in " ".join(head):
            wrong += [problem for cells in lines for problem in _ranking(head, cells, kept)]
    return wrong + bullet_problems(text, kept), notes


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """(head, lines) of each Markdown table, a cell a string."""
    found = []
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, flags=re.MULTILINE):
        head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.append((head, lines))
    return found


def _decode(cells: dict[str, str], rows: Sequence[Row]) -> list[str]:
    rows = [row for row in rows if of_card(row)]
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
    """Tokens a second of quickstart on a CPU, a column a batch."""
    wrong = []
    for name, cell in zip(head[2:], cells[2:], strict=True):
        found = {
            f"{row.tok_s:.0f}"
            for row in rows
            if [row.experiment, row.gpu, row.engine, row.model] == ["quickstart", "cpu", "interpreter", "nano"]
            and [row.placement, row.schedule, f"batch {row.batch}"] == [*cells[:2], name]
        }
        if cell not in found:
            wrong.append(
                f"README: {cells[0]}, {cells[1]}, {name} is {cell}, rows have {', '.join(sorted(found)) or 'none'}"
            )
    return wrong


def _ranking(head: list[str], cells: list[str], kept: Sequence[Kept]) -> list[str]:
    """What the simulator's accuracy is over some schedules, the same ones at every batch that the head names."""
    batches = re.findall(r"\d+", head[2])
    if cells[0] not in RANKED:
        return [f"README: no kept simulation is known as {cells[0]}"]
    source, group = RANKED[cells[0]]
    mine = {
        (of.row.arm or "").removeprefix("batch ").partition(": ")[0]: of.row
        for of in newest(
            [of for of in kept if _judged_by(of, source) and (of.row.arm or "").partition(": ")[2] in group],
            lambda row: row.arm,
        )
    }
    try:
        rows = [mine[batch] for batch in batches]
    except KeyError:
        return [f"README: no kept simulation of {cells[0]}"]
    ranks = ", ".join(f"{row.rank_correlation:.2f}" for row in rows)
    errors = ", ".join(f"{100 * (row.mean_error or 0):.1f} %" for row in rows)
    wanted = [" and ".join(sorted({str(row.schedules) for row in rows})), ranks, errors]
    return [] if cells[1:] == wanted else [f"README: {cells[0]} is {', '.join(wanted)} in the rows kept"]


def _judged_by(of: Kept, source: str) -> bool:
    """Whether the row says how well the simulator ranks the rows of this experiment, by default those of the plans."""
    if [of.row.experiment, of.row.gpu, of.row.model] != ["simulator_accuracy", CARD, MODEL]:
        return False
    (first, *_) = (of.config or {}).get("experiment", {}).get("rows", []) or [""]
    return f"-{source}-" in first
