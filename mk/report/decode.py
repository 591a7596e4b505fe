"""Figures of whole decode steps: against batch, against context, and what a layer's time goes to."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import cycle, groupby

from matplotlib.figure import Figure

from mk.report import palette
from mk.report.chart import (
    BATCH,
    BOUND,
    CONTEXT,
    ENGINE,
    RATIOS,
    SHARE,
    TIMES,
    Chart,
    Column,
    floor,
    legend_below,
    line,
    panels,
    powers,
    spread,
    stacked,
)
from mk.report.kept_rows import Kept, newest, plan_of, told_apart, with_common_keys
from mk.results.recompute import card, geometry_of_row
from mk.results.rows import Row
from mk.roofline import step_bytes

AGAINST_BATCH = ("decode_throughput", "vllm_decode", "transformers_decode")
NAMES = {
    "cuda": "kernel",
    "vllm": "vLLM",
    "transformers": "transformers as CUDA graphs",
    "zero_wait": "bound: no wait for another SM",
}
COLUMNS = (ENGINE, BOUND, Column("engine.ring.window_kb", "window, KB", leaf=True), BATCH, CONTEXT, *TIMES)


def charts(kept: Sequence[Kept]) -> Iterator[Chart]:
    full = [of for of in kept if of.row.clock is None and of.row.p50_ms is not None and of.row.bytes_per_step]
    yield from _against_batch([of for of in full if of.row.experiment in AGAINST_BATCH and of.config is not None])
    sweep = [of for of in full if of.row.experiment == "context_sweep" or of.run == "context_sweep"]
    yield from _against_context(sweep)
    yield from _layer_cost([of for of in full if of.row.experiment == "decode_throughput" and of.config is not None])


def _against_batch(rows: Sequence[Kept]) -> Iterator[Chart]:
    """One a routing, of rows that all hold the most common number of keys."""
    for routing in sorted({of.row.routing for of in rows}):
        plans = {of.row.config_hash: plan_of(of) for of in rows}
        mine = newest(
            (of for of in rows if of.row.routing == routing),
            lambda row: (row.engine, row.bound, plans[row.config_hash], row.batch, row.context[0]),  # noqa: B023
        )
        mine = with_common_keys(mine)
        yield Chart(
            f"decode_batch_{routing}",
            f"Decode against batch: {mine[0].row.context[0]:,} keys a row, {routing} routing",
            "A whole step, sampling and token feedback included. Points are medians, bars p10 to p90 of the steps; "
            "floors are the bytes of the experts that were touched at the card's bandwidth." + _without_baseline(mine),
            mine,
            (*COLUMNS, Column("tokens_per_s", "tokens/s", 0), *SHARE, *RATIOS),
            lambda figure, mine=mine: _draw_batch(figure, mine),  # type: ignore[misc]
        )


def _without_baseline(rows: Sequence[Kept]) -> str:
    return "" if any(of.row.engine != "cuda" for of in rows) else " No kept row is of a baseline yet."


def _draw_batch(figure: Figure, rows: Sequence[Kept]) -> None:
    times, rates = panels(figure, "time of a step", "throughput")
    for name, colour, own, marker in _series(rows):
        ms = [(of.row.batch, *spread(of)) for of in own]
        rate = [_rate(of.row.batch, of.row.batch, *spread(of)) for of in own]
        for axes, points in ((times, ms), (rates, rate)):
            line(axes, points, colour, name, marker=marker)
    for name, style in (("nominal", "--"), ("measured", ":")):
        at = [(of.row.batch, least) for of in rows if (least := floor_ms(of.row, name)) is not None]
        if at:
            label = f"floor: bytes at {_bandwidth(rows[0].row, name)} TB/s, {name}"
            floor(times, at, palette.BOUND[name], label, style)
            floor(rates, [(x, 1e3 * x / least) for x, least in at], palette.BOUND[name], label, style)
    for axes, unit in ((times, "ms"), (rates, "tokens/s, all rows together")):
        powers(axes, [of.row.batch for of in rows], "batch, rows")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
    legend_below(figure, times, columns=3)


def _series(rows: Sequence[Kept]) -> Iterator[tuple[str, str, list[Kept], str]]:
    """(label, colour, rows, marker): by engine and bound, and by what is executed, the newest of most rows first."""

    def kind(of: Kept) -> tuple[bool, str]:
        return of.row.bound is not None, of.row.bound or of.row.engine

    for (bound, name), group in groupby(sorted(rows, key=kind), key=kind):
        of_kind = list(group)
        plans = [plan_of(of) for of in of_kind]
        latest = sorted(of_kind, key=lambda of: of.row.time, reverse=True)
        own: dict[Hashable, list[Kept]] = {}
        for of in sorted(latest, key=lambda of: -plans.count(plan_of(of))):
            own.setdefault(plan_of(of), []).append(of)
        first = next(iter(own.values()))[0]
        for marker, series in zip(cycle("osD^v"), own.values(), strict=False):
            _, other = told_apart([first, series[0]])
            label = NAMES.get(name, name) + f", {other}" * bool(other)
            colour = palette.colour(palette.BOUND if bound else palette.ENGINE, name)
            yield label, colour, sorted(series, key=lambda of: of.row.batch), marker


def _bandwidth(row: Row, name: str) -> float | None:
    """In TB/s."""
    return card(row.gpu).nominal_tb_s if name == "nominal" else card(row.gpu).measured_tb_s


def floor_ms(row: Row, name: str) -> float | None:
    """That the bytes of a step take at the card's nominal or measured bandwidth."""
    tb_s = _bandwidth(row, name)
    return None if tb_s is None or row.bytes_per_step is None else row.bytes_per_step / (tb_s * 1e9)


def _against_context(rows: Sequence[Kept]) -> Iterator[Chart]:
    mine = newest(rows, lambda row: (row.engine, row.batch, row.context[0]))
    if mine:
        yield Chart(
            "decode_context",
            "A decode step against context",
            "Points are medians, bars p10 to p90 of the steps; dashed: the bytes at the card's nominal bandwidth. A "
            "colour is an engine, a marker a batch." + _without_baseline(mine),
            mine,
            (ENGINE, BATCH, CONTEXT, *TIMES, Column("tokens_per_s", "tokens/s", 0), *SHARE, *RATIOS),
            lambda figure: _draw_context(figure, mine),
            (9.0, 4.2),
        )


def _draw_context(figure: Figure, rows: Sequence[Kept]) -> None:
    times, rates = panels(figure, "time of a step", "throughput")
    markers = {batch: "osD^v"[i % 5] for i, batch in enumerate(sorted({of.row.batch for of in rows}))}
    for engine, batch in sorted({(of.row.engine, of.row.batch) for of in rows}):
        own = [of for of in rows if (of.row.engine, of.row.batch) == (engine, batch)]
        colour, name = palette.colour(palette.ENGINE, engine), f"{NAMES.get(engine, engine)}, batch {batch}"
        ms = [(of.row.context[0], *spread(of)) for of in own]
        line(times, ms, colour, name, marker=markers[batch])
        line(rates, [_rate(batch, *point) for point in ms], colour, name, marker=markers[batch])
        at = [(of.row.context[0], least) for of in own if (least := floor_ms(of.row, "nominal")) is not None]
        if engine == "cuda":
            named = "floor, a batch each" if batch == min(markers) else "_"  # once in the legend
            floor(times, at, palette.BOUND["nominal"], named)
            floor(rates, [(x, 1e3 * batch / least) for x, least in at], palette.BOUND["nominal"], named)
    for axes, unit in ((times, "ms"), (rates, "tokens/s, all rows together")):
        powers(axes, [of.row.context[0] for of in rows], "keys a row")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
    legend_below(figure, times)


def _rate(batch: int, x: float, p50: float, p10: float, p90: float) -> tuple[float, float, float, float]:
    """Tokens a second of all rows, from milliseconds of a step: (x, median, low, high)."""
    return x, 1e3 * batch / p50, 1e3 * batch / p90, 1e3 * batch / p10


LAYER = "A layer's share of a step, by cause"


def _layer_cost(rows: Sequence[Kept]) -> Iterator[Chart]:
    """Of the newest run of each batch that also timed the bound without waits."""
    bounds = {(of.run, of.row.config_hash, of.row.batch): of for of in rows if of.row.bound == "zero_wait"}
    beside = [of for of in rows if of.row.bound is None and (of.run, of.row.config_hash, of.row.batch) in bounds]
    plain = newest(beside, lambda row: row.batch)
    pairs = [(of, bounds[of.run, of.row.config_hash, of.row.batch]) for of in plain]
    if not pairs or any(card(of.row.gpu).measured_tb_s is None for of, _ in pairs):
        return
    yield Chart(
        "layer_cost",
        LAYER,
        "Microseconds of a step divided by its layers: its bytes at the bandwidth that the card was measured to reach, "
        "what a build without waits for other SMs takes beyond them, and what those waits add. Where that build is the "
        "slower one the two cannot be told apart. Causes by operation are in the trace of a run folder, not in rows.",
        [of for pair in pairs for of in pair],
        (BATCH, BOUND, CONTEXT, TIMES[0], Column("fixed_us_per_layer", "us a layer beyond bytes", 2), *SHARE),
        lambda figure: _draw_layer(figure, pairs),
        (9.0, 1.2 + 0.55 * len(pairs)),
    )


def layer_cost(row: Row, bound: Row) -> dict[str, float]:
    """Microseconds a layer by cause; they add up to the row's p50 divided by layers.

    row: of a decode whose configuration's bound without waits is `bound`, both with their bytes.
    """
    geometry, tb_s = geometry_of_row(row), card(row.gpu).measured_tb_s
    assert row.distinct_experts is not None and row.p50_ms is not None and bound.p50_ms is not None and tb_s
    each = step_bytes(geometry, row.context, row.distinct_experts)
    names = ("attention", "kv", "router", "dense", "experts", "head")
    found = {name: getattr(each, name) / (tb_s * 1e6) / geometry.layers for name in names}
    total, least = (1e3 * ms / geometry.layers for ms in (row.p50_ms, bound.p50_ms))
    bytes_us = sum(found.values())
    if bytes_us < least < total:
        return found | {"own": least - bytes_us, "waits": total - least}
    return found | {"undivided": total - bytes_us}


COST_NAMES = {
    "attention": "attention's weights",
    "kv": "K and V",
    "router": "router",
    "dense": "dense FFN",
    "experts": "experts",
    "head": "head",
    "own": "in an SM beyond bytes",
    "waits": "waits for other SMs",
    "undivided": "both, not divided",
}


def _draw_layer(figure: Figure, pairs: Sequence[tuple[Kept, Kept]]) -> None:
    (axes,) = panels(figure, "us a layer")
    costs = [layer_cost(of.row, bound.row) for of, bound in pairs]
    parts = {name: [cost.get(name, 0.0) for cost in costs] for name in COST_NAMES}
    shown = [(COST_NAMES[name], palette.COST[name], widths) for name, widths in parts.items() if any(widths)]
    stacked(axes, [f"batch {of.row.batch}" for of, _ in pairs], shown)
    axes.set_xlabel("us")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
