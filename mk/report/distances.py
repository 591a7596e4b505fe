"""Figures of correctness and robustness: distance from float32 by layer and by prompt, and one slow SM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mk.report import palette
from mk.report.chart import BATCH, CONTEXT, PLAN, TIMES, Chart, Column, drawn, legend_below, panels, powers
from mk.report.kept_rows import Kept, newest
from mk.results.recompute import geometry_of_row
from mk.results.rows import DISTANCE_BAR as BAR
from mk.results.rows import Row

RATIOS = {"attention": "attention_ratio", "ffn": "ffn_ratio", "kv": "kv_ratio"}
COLUMNS = tuple(Column(field, f"{name}, of bfloat16's", 3) for name, field in RATIOS.items())
SAYS = (
    "How far a part is from float32, as a multiple of how far transformers' bfloat16 is; under 1 it is nearer, "
    f"and {BAR:g} is the bar."
)


def charts(kept: Sequence[Kept]) -> Iterator[Chart]:
    layers = [of for of in kept if of.row.experiment == "kernel_correctness" and of.row.attention_ratio is not None]
    rows = newest(layers, lambda row: (row.gpu, tuple(row.context), row.layer))
    if rows:
        yield Chart(
            "kernel_distance",
            "The kernel's layers: distance from float32",
            SAYS + " A point a layer and batch, of the worst row of the batch.",
            rows,
            (BATCH, CONTEXT, Column("layer", "layer"), *COLUMNS[:2]),
            lambda figure: _draw_layers(figure, [of.row for of in rows]),
        )
    prompts = [of for of in kept if of.row.experiment == "prefill_correctness" and of.row.attention_ratio is not None]
    lengths = newest(prompts, lambda row: (row.gpu, tuple(row.context)))
    if lengths:
        yield Chart(
            "prefill_distance",
            "Prefill: distance from float32 against the length of a prompt",
            SAYS + " Of each prompt the layer where it is largest.",
            lengths,
            (CONTEXT, *COLUMNS),
            lambda figure: _draw_prompts(figure, [of.row for of in lengths]),
        )
    slow = [of for of in kept if of.row.experiment == "slow_sm" and of.row.clock is None]
    held = newest(slow, lambda row: (row.schedule, row.slow_ns_per_tile))
    if held:
        yield Chart(
            "slow_sm",
            "One SM slower than the others",
            f"Time of a step of {_layers(held)} layers with every SM alike and with one that takes longer for each "
            "tile.",
            held,
            (PLAN[2], Column("slow_ns_per_tile", "slower by, ns a tile"), BATCH, CONTEXT, *TIMES)
            + (Column("slow_sm_tiles", "its tiles", 1), Column("mean_sm_tiles", "mean of SMs", 1)),
            lambda figure: _draw_slow(figure, [of.row for of in held]),
            (9.0, 2.4),
        )


WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def in_words(number: int) -> str:
    return WORDS[number] if number < len(WORDS) else f"{number:,}"


def _layers(rows: Sequence[Kept]) -> str:
    """How many the rows' models have."""
    return " or ".join(in_words(number) for number in sorted({geometry_of_row(of.row).layers for of in rows}))


def _draw_layers(figure: Figure, rows: Sequence[Row]) -> None:
    for axes, part in zip(panels(figure, "attention", "FFN"), ("attention", "ffn"), strict=True):
        for batch in sorted({row.batch for row in rows}):
            own = [row for row in rows if row.batch == batch]
            label = f"batch {batch}, up to {max(max(row.context) for row in own):,} keys"
            ratios = [getattr(row, RATIOS[part]) for row in own]
            colour = palette.colour(palette.BATCH, batch)
            axes.plot([row.layer or 0 for row in own], ratios, "o", markersize=3, color=colour, label=label)
        _bars(axes)
        axes.set_xlabel("layer")
    legend_below(figure, axes)


def _draw_prompts(figure: Figure, rows: Sequence[Row]) -> None:
    (axes,) = panels(figure, "worst layer")
    ordered = sorted(rows, key=lambda row: row.context[0])
    for (part, field), marker in zip(RATIOS.items(), "osD", strict=True):
        colour, label = palette.PART[part], {"ffn": "FFN", "kv": "K and V"}.get(part, part)
        ratios = [getattr(row, field) for row in ordered]
        axes.plot([row.context[0] for row in ordered], ratios, f"-{marker}", color=colour, label=label, markersize=5)
    _bars(axes)
    powers(axes, [row.context[0] for row in ordered], "tokens of a prompt")
    legend_below(figure, axes)


def _bars(axes: Axes) -> None:
    axes.axhline(BAR, color=palette.PART["bar"], linestyle="--", linewidth=1.2, label="bar")
    axes.axhline(1, color=palette.GREY, linestyle=":", linewidth=1.2, label="transformers' bfloat16")
    axes.set_ylim(0, BAR * 1.1)
    axes.set_ylabel("of bfloat16's distance")


def _draw_slow(figure: Figure, rows: Sequence[Row]) -> None:
    (axes,) = panels(figure, "time of a step")
    for place, row in enumerate(rows):
        colour = palette.VERDICT["differs" if row.slow_ns_per_tile else "no difference"]
        axes.barh(place, row.p50_ms or 0, 0.6, color=colour)
        axes.plot([drawn(row.p10_ms), drawn(row.p90_ms)], [place] * 2, color=palette.BLACK, linewidth=1.2)
    names = [f"{row.schedule}, {'one slow' if row.slow_ns_per_tile else 'all alike'}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms; black: p10 to p90")
