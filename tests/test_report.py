"""Figures and their page: from the kept rows, all of them told apart, and the README's lists beside them."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from mk.model.geometry import PRESETS
from mk.report import distances, palette
from mk.report.chart import Chart
from mk.report.decode import COLUMNS, layer_cost
from mk.report.kept_rows import MODEL, Kept, of_one_machine, plan_of, read_kept, told_apart
from mk.report.page import COULD, FOLDER, PAGE, charts, draw, missing, stale
from mk.report.plans import _short
from mk.results.promote import promote
from mk.results.readme_bullets import HEADING, PHRASES, ZERO_WAIT, bullet_problems
from mk.results.readme_figures import check_readme
from mk.results.sources import ROOT
from tests.promotion import repository
from tests.report_rig import RESULTS, assert_labelled, cell_is_right
from tests.test_results import made

__all__ = ["repository"]

KEPT = read_kept(RESULTS)
CHARTS = {chart.name: chart for chart in charts(KEPT)}
README = (ROOT / "README.md").read_text()

# of linear RGB, at full severity: Machado, Oliveira and Fernandes 2009, table 1
BLIND = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
APART = 11.0  # CIE 1976 difference; 2.3 is a just noticeable one


def lab(colour: str, matrix: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of an sRGB colour as somebody sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.clip(np.array(matrix) @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.array([x ** (1 / 3) if x > 0.008856 else 7.787 * x + 16 / 116 for x in xyz / [0.9505, 1.0, 1.089]])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", BLIND)
def test_colours_that_stand_together_are_apart_for_everyone(sight: str) -> None:
    for group in palette.GROUPS:
        for one, other in itertools.combinations(sorted(set(group.values())), 2):
            apart = float(np.linalg.norm(lab(one, BLIND[sight]) - lab(other, BLIND[sight])))
            assert apart > APART, (one, other, apart)


def test_no_colour_is_chosen_outside_of_the_palette() -> None:
    """Of series; text and edges may be grey."""
    for folder in ("mk", "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "palette.py":
                found = set(re.findall(r"#[0-9a-fA-F]{6}\b", path.read_text()))
                assert all(len(set(to_rgb(colour))) == 1 for colour in found), (path, found)


@pytest.mark.parametrize("name", CHARTS)
def test_every_axis_is_labelled_with_its_unit_or_its_categories(name: str) -> None:
    figure = Figure(figsize=CHARTS[name].size)
    CHARTS[name].draw(figure)
    assert_labelled(figure)


def test_what_is_drawn_is_what_rows_give() -> None:
    wanted = {"decode_batch_uniform", "decode_context", "layer_cost", "plans", "prefill_rate", "served_step"}
    assert wanted <= CHARTS.keys()
    assert len(CHARTS["plans"].rows) == 84
    assert {of.leaf("prefill.products") for of in CHARTS["prefill_rate"].rows} == {"packed", "torch"}
    assert all(len(chart.rows) == len({of.place for of in chart.rows}) for chart in CHARTS.values())


def test_the_committed_page_is_of_the_committed_rows_and_its_cells_are_theirs() -> None:
    assert list(stale(RESULTS, KEPT)) == []

    class Cells(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.row, self.cell, self.text, self.found = "", None, "", []  # type: ignore[var-annotated]

        def handle_starttag(self, tag: str, attrs: list) -> None:
            of = dict(attrs)
            self.row = of.get("data-row", self.row)
            if tag == "td" and "data-field" in of:
                self.cell, self.text = (of["data-field"], float(of["data-unit"])), ""

        def handle_data(self, data: str) -> None:
            self.text += data

        def handle_endtag(self, tag: str) -> None:
            if tag == "td" and self.cell is not None:
                self.found.append((self.row, *self.cell, self.text))
                self.cell = None

    cells = Cells()
    cells.feed((RESULTS / PAGE).read_text())
    assert len(cells.found) == sum(len(chart.rows) * len(chart.shown) for chart in CHARTS.values())
    assert [cell for cell in cells.found if not cell_is_right(*cell)] == []


def test_a_cell_that_is_not_its_rows_is_found() -> None:
    place, p50 = next((of.place, of.row.p50_ms) for of in CHARTS["plans"].rows)
    assert cell_is_right(place, "p50_ms", 1.0, f"{p50:.3f}")
    assert not cell_is_right(place, "p50_ms", 1.0, f"{p50 + 0.001:.3f}")
    assert not cell_is_right(place, "placement", 1.0, "nowhere")
    assert not cell_is_right(place, "engine.ring.window_kb", 1.0, "63")


def test_the_page_names_no_other_place() -> None:
    text = (RESULTS / PAGE).read_text()
    assert {url for url in re.findall(r"https?://[^\s\"'<)]+", text) if "www.w3.org" not in url} == set()
    assert all(target.startswith("#") for target in re.findall(r'(?:href|src)="([^"]*)"', text) if target != "data:,")
    for of in (of for chart in CHARTS.values() for of in chart.rows):
        assert of.row.commit in text and of.row.config_hash[:16] in text and of.row.env["device"] in text


def copied(tmp_path: Path) -> Path:
    shutil.copytree(RESULTS, tmp_path / "results")
    return tmp_path / "results"


def test_the_committed_files_are_what_is_drawn(tmp_path: Path) -> None:
    """Character by character, with the pinned matplotlib."""
    copy = copied(tmp_path)
    (copy / FOLDER / "plans.svg").write_text("<svg/>")
    (copy / FOLDER / "gone.svg").write_text("<svg/>")
    drawn = {path.relative_to(copy): path.read_text() for path in draw(copy)}
    committed = [RESULTS / PAGE, *(RESULTS / FOLDER).iterdir()]
    assert drawn == {path.relative_to(RESULTS): path.read_text() for path in committed}
    assert not (copy / FOLDER / "gone.svg").exists()


def test_a_page_of_other_rows_and_an_edited_figure_are_told(tmp_path: Path) -> None:
    copy = copied(tmp_path)
    changed = dataclasses.replace(CHARTS["slow_sm"].rows[0].row, p50_ms=0.5)
    kept = [dataclasses.replace(of, row=changed) if of == CHARTS["slow_sm"].rows[0] else of for of in KEPT]
    assert list(stale(copy, kept)) == [f"{PAGE}: slow_sm is not drawn from the rows that are kept: make figures"]
    without = [of for of in KEPT if of.row.experiment != "slow_sm"]
    assert list(stale(copy, without)) == [f"{PAGE}: slow_sm is not drawn from the rows that are kept: make figures"]
    svg = copy / FOLDER / "plans.svg"
    svg.write_text(svg.read_text().replace("ms a step", "us a step"))
    assert list(stale(copy, KEPT)) == [f"{FOLDER}/plans.svg is not the one of {PAGE}: make figures"]
    other = dataclasses.replace(KEPT[0], run="new", place="h200/new/rows.jsonl:1", row=KEPT[0].row)
    assert any("not drawn" in problem for problem in stale(copy, [*KEPT, other]))
    (tmp_path / "again").mkdir()
    copy = copied(tmp_path / "again")
    drawn = (copy / PAGE).read_text()
    cell = re.search(r'(<td data-field="p50_ms"[^>]*>)[\d.]+<', drawn)
    assert cell is not None
    (copy / PAGE).write_text(drawn.replace(cell.group(), f"{cell.group(1)}8.765<", 1))
    assert list(stale(copy, KEPT)) == [f"{PAGE}: its tables or texts are not what the rows give: make figures"]
    (copy / PAGE).unlink()
    assert list(stale(copy, KEPT)) == []


def test_a_baseline_stands_beside_the_kernel_in_its_own_colour(repository: Path) -> None:
    promote(made(repository).path, repository / "results", repository)
    kept = read_kept(repository / "results")
    (chart,) = charts(kept)
    assert chart.name == "decode_batch_uniform" and "baseline yet" not in chart.says and len(chart.rows) == 4
    assert "ratio" in [column.field for column in chart.shown]
    colours = dict(drawn_lines(chart))
    assert colours["kernel"] == to_hex(palette.ENGINE["cuda"]) and colours["vLLM"] == to_hex(palette.ENGINE["vllm"])
    assert sum(name.startswith("floor") for name in colours) == 2


def swept() -> list[Kept]:
    """Rows of a sweep by both engines, vLLM's the newer ones and twice as slow; a step takes a microsecond a key."""
    base = next(of for of in KEPT if "context_sweep" in (of.row.experiment, of.run))
    found = []
    for engine, context, batch in itertools.product(("cuda", "vllm"), (1024, 8192), (1, 8)):
        ms = context * batch * 1e-3 * (1 + (engine == "vllm"))
        fields = {"engine": engine, "batch": batch, "context": [context] * batch, "tokens_per_s": batch / ms * 1e3}
        times = {"p50_ms": ms, "p10_ms": ms * 0.9, "p90_ms": ms * 1.2, "bytes_per_step": 1e6, "pct_nominal": 50.0}
        times["ratio"] = 2.0 + batch / 100 if engine == "vllm" else None
        row = dataclasses.replace(base.row, **fields, **times, time=f"2030-01-01T00:00:0{len(found)}+00:00")  # type: ignore[arg-type]
        found.append(dataclasses.replace(base, row=row, place=f"h200/sweep/rows.jsonl:{len(found) + 1}"))
    return found


def test_a_sweep_is_drawn_in_time_and_throughput_with_the_baseline_beside_the_kernel() -> None:
    (chart,) = [chart for chart in charts(swept()) if chart.name == "decode_context"]
    assert len(chart.rows) == 8 and "baseline yet" not in chart.says
    colours = dict(drawn_lines(chart))
    assert [name for name in colours if name.startswith("floor")] == ["floor, a batch each"]
    for batch in (1, 8):
        assert colours[f"kernel, batch {batch}"] == to_hex(palette.ENGINE["cuda"])
        assert colours[f"vLLM, batch {batch}"] == to_hex(palette.ENGINE["vllm"])
    figure = Figure()
    chart.draw(figure)
    rates = {str(bars.get_label()): bars.lines[0].get_ydata() for bars in figure.axes[1].containers}  # type: ignore[attr-defined]
    assert list(rates["vLLM, batch 8"]) == pytest.approx([1e6 / 2 / 1024, 1e6 / 2 / 8192])
    assert list(rates["kernel, batch 1"]) == pytest.approx([1e6 / 1024, 1e6 / 8192])
    alone = [of for of in swept() if of.row.engine == "cuda"]
    (chart,) = [chart for chart in charts(alone) if chart.name == "decode_context"]
    assert "baseline yet" in chart.says


def test_the_readmes_sweep_is_of_the_kernel_at_batch_1_and_of_the_baseline_at_each() -> None:
    """Whatever else a sweep measured, and later."""
    assert list(PHRASES["context_sweep"](swept())) == [
        "1.02 ms a step at 1K",
        "8.19 at 8K",
        "50 to 50 % of the floor's speed",
        "1K 2.01 and 2.08",
        "8K 2.01 and 2.08",
    ]


def drawn_lines(chart: Chart) -> list[tuple[str, str]]:
    """(label, colour) of what the first panel's legend has."""
    figure = Figure()
    chart.draw(figure)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    lines = [handle if hasattr(handle, "get_color") else handle.lines[0] for handle in handles]
    return [(label, to_hex(line.get_color())) for line, label in zip(lines, labels, strict=True)]


def test_a_layers_causes_add_up_to_its_time() -> None:
    rows = [of.row for of in CHARTS["layer_cost"].rows]
    for row, bound in zip(rows[::2], rows[1::2], strict=True):
        assert row.batch == bound.batch and row.bound is None and bound.bound == "zero_wait"
        cost = layer_cost(row, bound)
        assert sum(cost.values()) == pytest.approx(1e3 * (row.p50_ms or 0) / 49)
        assert all(us >= 0 for us in cost.values())
        beyond = cost.get("undivided") or cost["own"] + cost["waits"]
        assert beyond == pytest.approx(row.fixed_us_per_layer)
        assert ("undivided" in cost) == ((bound.p50_ms or 0) >= (row.p50_ms or 0))


def test_runs_without_a_figure_are_named() -> None:
    lines = missing(KEPT, list(CHARTS.values()))
    assert "No figure is of cpu/quickstart.jsonl." in lines and any("trace build" in line for line in lines)
    assert not any("plan_ablation" in line for line in lines)


OTHERS = {
    "another card": {"gpu": "h100"},
    "a CPU": {"gpu": "cpu", "engine": "interpreter", "dtype": "float32"},
    "the interpreter beside the card": {"engine": "interpreter"},
    "the simulator": {"engine": "simulator", "clock": "simulated"},
    "a smaller model": {"model": "nano"},
    "another model": {"model": "other"},
}
ANY_MODEL = ("accuracy", "sm_map")


def others(changes: dict[str, Any]) -> list[Kept]:
    """Every kept row again, later, five times as slow, with these fields."""
    found = []
    for of in KEPT:
        row = of.row
        if "model" in changes and (row.experiment in ANY_MODEL or (row.model, row.experiment) == ("nano", "parity")):
            continue
        if changes.get("model") == "nano" and (row.model == "nano" or row.experiment == "parity"):
            continue  # which are told of nano
        slower = {name: 5 * value for name in ("p50_ms", "tok_s", "ratio") if (value := getattr(row, name)) is not None}
        new = dataclasses.replace(row, time="2999", **slower, **changes)
        found.append(dataclasses.replace(of, row=new, run=f"{of.run}-new", place=f"new/{of.place}"))
    return found


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_no_row_of_another_machine_or_model_changes_a_figure_or_the_readme(changes: dict[str, Any]) -> None:
    kept = [*KEPT, *others(changes)]
    assert len(kept) > 1.5 * len(KEPT)
    drawn = {chart.name: chart for chart in charts(kept)}
    assert drawn.keys() == CHARTS.keys()
    for name, chart in CHARTS.items():
        assert drawn[name].rows == chart.rows and drawn[name].drawn_from == chart.drawn_from, name
    for name, phrases in PHRASES.items():
        assert list(phrases(kept)) == list(phrases(KEPT)), name
    assert check_readme(README, kept) == check_readme(README, KEPT)
    wrong, _ = check_readme(README, others(changes))
    assert any("no row has batch 8, ms a step" in problem for problem in wrong)


def test_without_rows_of_the_card_figures_are_of_the_machine_that_was_last() -> None:
    cpu, h100 = others(OTHERS["a CPU"]), others(OTHERS["another card"])
    later = [dataclasses.replace(of, row=dataclasses.replace(of.row, time="3000")) for of in h100]
    assert {of.row.gpu for of in of_one_machine([*cpu, *later])} == {"h100"}
    assert {of.row.gpu for of in of_one_machine([*cpu, *later, *KEPT])} == {"h200"}
    assert of_one_machine(others(OTHERS["the simulator"])) == of_one_machine([]) == []


def test_every_list_of_the_readme_that_rows_give_is_there() -> None:
    assert bullet_problems(README, KEPT) == []
    for name, phrases in PHRASES.items():
        assert list(phrases(KEPT)), name
        assert name == "decode_throughput" or f"\n* `{name}`" in README


def test_figures_that_change_places_and_tables_that_are_gone_are_told() -> None:
    """A line's label says whose its figures are; a table is looked for under its heading."""
    head = "| kept rows of an H200"
    one, two, *_ = README[README.index(head) :].partition("\n\n")[0].splitlines()[2:]
    (label, rest), (other, figures) = (re.match(r"(\|[^|]+)(\|.*)", line).groups() for line in (one, two))  # type: ignore[union-attr]
    swapped = README.replace(one, label + figures).replace(two, other + rest)
    assert len([problem for problem in check_readme(swapped, KEPT)[0] if "in the rows kept" in problem]) == 2
    renamed = README.replace(one, f"| another name {rest}")
    assert "README: no kept simulation is known as another name" in check_readme(renamed, KEPT)[0]
    for column in ("ms a step", "| placement |", "schedules |"):
        gone = README.replace(f"| {column.strip('| ')} |", "| something |")
        assert any("no table has a column" in problem for problem in check_readme(gone, KEPT)[0]), column


def test_an_edited_figure_of_the_tables_of_a_card_is_told() -> None:
    """The last digit of every cell, one after the other."""
    heads = ("| batch | ms a step", "| kept rows of an H200")
    lines = [line for head in heads for line in README[README.index(head) :].partition("\n\n")[0].splitlines()[2:]]
    assert len(lines) == 10
    for line in lines:
        label, *cells = re.findall(r"[^|]+", line)
        for place, cell in enumerate(cells):
            at = re.search(r"\d(?=\D*$)", cell)
            assert at is not None, line
            other = cell[: at.start()] + str((int(at.group()) + 1) % 10) + cell[at.end() :]
            edited = f"|{'|'.join([label, *cells[:place], other, *cells[place + 1 :]])}|"
            wrong, _ = check_readme(README.replace(line, edited), KEPT)
            assert wrong, edited


@pytest.mark.parametrize("name", PHRASES)
def test_a_list_that_is_gone_or_renamed_is_told(name: str) -> None:
    head = ZERO_WAIT if name == "decode_throughput" else f"* `{name}`"
    assert README.count(head) == 1 and HEADING in README
    told = f"README, {name}: its bullet is missing"
    for other in ("", "* `renamed`", "Waiting for nobody"):
        assert told in bullet_problems(README.replace(head, other), KEPT)
    assert told in bullet_problems(README.replace(head, "").replace(HEADING, "## Measured"), KEPT)


def test_a_text_without_lists_lacks_none() -> None:
    assert (
        bullet_problems("", KEPT) == bullet_problems("* `schedule`: `static` lists say which SM runs what", KEPT) == []
    )
    told = bullet_problems(f"# mini-mk\n\n{HEADING}\nNothing.\n", KEPT)
    assert told == [f"README, {name}: its bullet is missing" for name in PHRASES]


def test_layers_of_a_slow_sm_are_those_of_the_rows_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of `slice`; of another model another text, here and under the figure."""
    (phrase,) = PHRASES["slow_sm"](KEPT)
    assert "a step of five layers" in phrase and "a step of five layers" in CHARTS["slow_sm"].says
    full = [dataclasses.replace(of, row=dataclasses.replace(of.row, model=MODEL)) for of in CHARTS["slow_sm"].rows]
    (chart,) = [chart for chart in distances.charts(full) if chart.name == "slow_sm"]
    assert "a step of 49 layers" in chart.says
    monkeypatch.setattr("mk.results.readme_bullets.geometry_of_row", lambda row: PRESETS[MODEL])
    (other,) = PHRASES["slow_sm"](KEPT)
    grows = [int(re.findall(r"grows by (\d+) us", each)[0]) for each in (phrase, other)]
    assert "a step of 49 layers" in other and grows[1] == pytest.approx(grows[0] * 5 / 49, abs=0.6)


@pytest.mark.parametrize("name", PHRASES)
def test_a_figure_of_a_list_that_is_edited_is_told_with_the_right_one(name: str) -> None:
    for phrase in PHRASES[name](KEPT):
        stands = re.compile(r"\s+".join(map(re.escape, phrase.split())))
        assert stands.search(README), phrase
        for digit in re.finditer(r"\d(?!\d)(?![KL])", phrase):
            edited = phrase[: digit.start()] + str((int(digit.group()) + 1) % 10) + phrase[digit.end() :]
            problems = bullet_problems(stands.sub(edited, README), KEPT)
            assert any(phrase in problem for problem in problems), edited


def test_a_list_whose_rows_are_gone_is_told() -> None:
    few: list[Kept] = [of for of in KEPT if of.row.experiment != "kernel_ablation"]
    (problem,) = bullet_problems(README, few)
    assert problem.startswith("README, kernel_ablation: the rows kept do not have what it says")


def test_an_evaluation_of_vllms_server_is_read_by_either_name() -> None:
    """`served` of earlier runs; of a later one, whose row says who it is, the figures count."""
    served = next(of for of in KEPT if of.row.benchmark == "nano_code" and of.row.engine == "served")
    row = dataclasses.replace(served.row, engine="vllm", experiment="accuracy_vllm")
    later = dataclasses.replace(served, row=row)
    assert bullet_problems(README, [later if of is served else of for of in KEPT]) == []
    other = dataclasses.replace(later, row=dataclasses.replace(later.row, score=0.25))
    (problem,) = bullet_problems(README, [*KEPT, other])
    assert problem.startswith("README, accuracy: rows give “25.00 %")


def test_an_arm_is_named_by_its_file_and_without_what_all_have() -> None:
    assert _short("engine.ring.window_kb=56") == "ring.window_kb=56"
    assert _short("schedule=search schedule.path=results/simulated/a.yaml") == "schedule=search schedule.path=a.yaml"
    assert _short("placement=row_owner (again)") == "placement=row_owner (again)"


def test_series_are_of_what_is_executed() -> None:
    """Not of what a run was compared with, nor of which constants the simulator had then."""
    some = next(of for of in KEPT if of.row.experiment == "decode_throughput" and of.config is not None)
    assert some.config is not None
    other = dataclasses.replace(some, config={**some.config, "baseline": {"name": "other"}, "gpu": {"name": "other"}})
    assert plan_of(other) == plan_of(some) != ()
    engine = some.config["engine"] | {"trace": "none"}
    assert plan_of(dataclasses.replace(some, config={**some.config, "engine": engine})) == plan_of(some)
    engine = engine | {"trace": "waits"}
    traced = dataclasses.replace(some, config={**some.config, "engine": engine})
    assert told_apart([traced, some]) == ["trace waits", "trace none"]
    ring = some.config["engine"]["ring"] | {"window_kb": [56, 64]}
    by_rows = dataclasses.replace(some, config={**some.config, "engine": some.config["engine"] | {"ring": ring}})
    assert told_apart([some, by_rows]) == ["window_kb 64", "window_kb 56"]
    one, eight = (dataclasses.replace(of, row=dataclasses.replace(of.row, batch=batch))
                  for of, batch in ((by_rows, 1), (by_rows, 8)))  # fmt: skip
    assert plan_of(eight) == plan_of(dataclasses.replace(some, row=eight.row)) != plan_of(one)  # by what executes
    ring = {key: value for key, value in ring.items() if key not in ("window_kb", "copy_kb")}  # older than two leaves
    older = dataclasses.replace(some, config={**some.config, "engine": some.config["engine"] | {"ring": ring}})
    assert told_apart([some, older]) == ["", ""] == told_apart([some, some])
    assert told_apart([older, some, by_rows]) == ["", "window_kb 64", "window_kb 56"]
    assert next(column for column in COLUMNS if column.leaf).text(by_rows) == "56, 64"


def test_a_comparison_that_was_repeated_is_drawn_as_it_was_the_last_time() -> None:
    """Whatever its folder is called; and two comparisons stay two."""

    def repeated(experiment: str, name: Callable[[str], str]) -> list[Kept]:
        mine = [of for of in KEPT if of.row.experiment == experiment]
        return [dataclasses.replace(of, run=name(of.run), row=dataclasses.replace(of.row, time="2999")) for of in mine]

    drawn = {chart.name: chart for chart in charts([*KEPT, *repeated("kernel_ablation", lambda run: "again")])}
    assert {of.run for of in drawn["kernel_ablation"].rows} == {"again"}
    assert len(drawn["kernel_ablation"].rows) == len(CHARTS["kernel_ablation"].rows)
    twice = {chart.name: chart for chart in charts([*KEPT, *repeated("schedule_ablation", lambda run: f"{run}-2")])}
    for name in ("schedule_ablation_1", "schedule_ablation_2"):
        assert {of.run for of in twice[name].rows} == {f"{of.run}-2" for of in CHARTS[name].rows}
        assert twice[name].title == CHARTS[name].title
    assert CHARTS["schedule_ablation_1"].title != CHARTS["schedule_ablation_2"].title


def test_the_page_says_of_which_experiments_it_could_have_figures() -> None:
    without = [of for of in KEPT if of.row.experiment != "ladder"]
    (line,) = [line for line in missing(without, []) if "ladder" in line]
    row = dataclasses.replace(KEPT[0].row, experiment="ladder", clock=None)
    assert line not in missing([*without, dataclasses.replace(KEPT[0], row=row)], [])
    simulated = dataclasses.replace(row, clock="simulated")
    assert line in missing([*without, dataclasses.replace(KEPT[0], row=simulated)], [])
    assert all((ROOT / "configs" / "experiment" / f"{name}.yaml").is_file() for name in COULD)
