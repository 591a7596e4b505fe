"""results/figures/*.svg and results/report.html: a static page of all figures, their tables and where they are from."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from mk.report import decode, distances, launches, load, operations, plans, prefill, served
from mk.report.chart import Chart
from mk.report.kept_rows import Kept, of_one_machine, read_kept

SUBJECTS = (decode, launches, plans, operations, prefill, served, load, distances)
PAGE, FOLDER = "report.html", "figures"

# what a figure could show and no row holds
WITHOUT_ROWS = (
    "A timeline of a whole step, and an SM's time by operation and cause: a trace build writes both to its run folder, "
    "as tables and a file for ui.perfetto.dev; no row holds them.",
)
# of experiments that have a figure as soon as a run of theirs is kept
COULD = {
    "ladder": "The ablation ladder, from one launch a wave to the kernel as it runs",
    "op_bench": "Every operation alone, beside torch",
    "wave_occupancy": "How long SMs idle in a layer, wave by wave",
    "agent_trial": "A coding agent's conversation with either server",
    "sampling_ablation": "What drawing tokens costs",
    "trace_ablation": "What a trace costs",
}


@dataclass(frozen=True, slots=True)
class Run:
    """Where rows of a figure come from."""

    path: str
    day: str
    card: str
    commit: str
    configs: str


@dataclass(frozen=True, slots=True)
class Part:
    """A figure on the page."""

    chart: Chart
    svg: str
    runs: list[Run]


def charts(kept: Sequence[Kept]) -> list[Chart]:
    own = of_one_machine(kept)
    return [chart for subject in SUBJECTS for chart in subject.charts(own)]


def draw(results: Path) -> list[Path]:
    """Write the page and the figures of what is kept in `results`, and remove older figures; returns the files."""
    kept = read_kept(results)
    parts = [Part(chart, chart.svg(), runs_of(chart.rows)) for chart in charts(kept)]
    (results / FOLDER).mkdir(exist_ok=True)
    written = {results / FOLDER / f"{part.chart.name}.svg": part.svg for part in parts}
    for old in set((results / FOLDER).glob("*.svg")) - written.keys():
        old.unlink()
    drawn = [part.chart for part in parts]
    for path, text in (written | {results / PAGE: page(parts, missing(kept, drawn))}).items():
        path.write_text(text)
    return [results / PAGE, *written]


def page(parts: Sequence[Part], missing: Sequence[str]) -> str:
    environment = Environment(
        loader=PackageLoader("mk.report", "."), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.get_template("page.html.jinja").render(parts=parts, missing=missing)


def missing(kept: Sequence[Kept], drawn: Sequence[Chart]) -> list[str]:
    """What the page does not show, a line each: figures that no row gives, and runs that no figure is of."""
    shown = {of.run for chart in drawn for of in chart.rows}
    lines = {f"No figure is of {folder_of(of)}." for of in kept if of.run not in shown}
    measured = {of.row.experiment for of in kept if of.row.clock is None}
    never = [f"{what}: no kept run of {name}." for name, what in COULD.items() if name not in measured]
    return [*WITHOUT_ROWS, *never, *sorted(lines)]


def folder_of(kept: Kept) -> str:
    return kept.place.partition(":")[0].removesuffix("/rows.jsonl")


def runs_of(rows: Sequence[Kept]) -> list[Run]:
    """The runs of these rows, as they come."""
    found = []
    for path in dict.fromkeys(map(folder_of, rows)):
        own = [of.row for of in rows if folder_of(of) == path]
        hashes = list(dict.fromkeys(row.config_hash[:16] for row in own))
        found.append(
            Run(
                path,
                min(row.time for row in own)[:10],
                ", ".join(dict.fromkeys(row.env.get("device", row.gpu) for row in own)),
                ", ".join(dict.fromkeys(row.commit for row in own)),
                " ".join(hashes),
            )
        )
    return found


def stale(results: Path, kept: Sequence[Kept]) -> Iterator[str]:
    """What of the page and figures in `results` is not of the rows that are kept now; nothing without a page."""
    if not (results / PAGE).exists():
        return
    text = (results / PAGE).read_text()
    drawn = charts(kept)
    named = dict(re.findall(r'<figure id="(\w+)" data-drawn-from="(\w+)">', text))
    now = {chart.name: chart.drawn_from for chart in drawn}
    problems = []
    for name in sorted(now.keys() | named.keys()):
        if named.get(name) != now.get(name):
            problems.append(f"{PAGE}: {name} is not drawn from the rows that are kept: make figures")
        elif not (svg := results / FOLDER / f"{name}.svg").exists() or svg.read_text() not in text:
            problems.append(f"{FOLDER}/{name}.svg is not the one of {PAGE}: make figures")
    listed = re.findall(r"^<li>(.*)</li>$", text.partition('id="not-drawn"')[2], flags=re.M)
    if [html.unescape(line) for line in listed] != missing(kept, drawn):
        problems.append(f"{PAGE}: what it calls not drawn is not what no figure is of: make figures")
    if not problems:  # the figures are these rows', by their digests: what else it says is written again
        parts = [Part(c, (results / FOLDER / f"{c.name}.svg").read_text(), runs_of(c.rows)) for c in drawn]
        if page(parts, missing(kept, drawn)) != text:
            problems.append(f"{PAGE}: its tables or texts are not what the rows give: make figures")
    yield from problems
