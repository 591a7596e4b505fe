"""Figures of prefill: rate against the length of a prompt, by what multiplies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure

from mk.report import palette
from mk.report.chart import BATCH, TIMES, Chart, Column, floor, legend, line, panels, powers, spread
from mk.report.kept_rows import Kept, newest

PRODUCTS = Column("prefill.products", "products", leaf=True)
NAMES = {"packed": "packed weights", "torch": "torch's products"}


def charts(kept: Sequence[Kept]) -> Iterator[Chart]:
    mine = [of for of in kept if of.row.experiment == "prefill_throughput" and of.row.clock is None]
    rows = newest(mine, lambda row: (row.config_hash, row.batch, row.prompt_tokens))
    if rows:
        yield Chart(
            "prefill_rate",
            "Prefill against the length of a prompt",
            "Points are medians of a few calls, bars p10 to p90. Hollow: eight prompts packed in one call, at the "
            "length of one. Dashed: a large bfloat16 product by torch in the same run. Operations count the tokens' "
            "own experts and the visible pairs of attention.",
            rows,
            (PRODUCTS, BATCH, Column("prompt_tokens", "tokens in the call", 0), *TIMES)
            + (Column("prefill_tok_s", "tokens/s", 0), Column("tflop_s", "TFLOP/s", 1))
            + (Column("pct_matrix", "% of torch's product", 1), Column("ttft_ms", "first token, ms", 1)),
            lambda figure: _draw(figure, rows),
            (9.0, 3.8),
        )


def _draw(figure: Figure, rows: Sequence[Kept]) -> None:
    speed, rate = panels(figure, "tokens/s", "TFLOP/s")
    for products in sorted({PRODUCTS.text(of) for of in rows}):
        for alone in (True, False):
            own = [of for of in rows if PRODUCTS.text(of) == products and (of.row.batch == 1) == alone]
            if not own:
                continue
            name = NAMES.get(products, products) + ("" if alone else f", {own[0].row.batch} prompts")
            for axes, field in ((speed, "prefill_tok_s"), (rate, "tflop_s")):
                points = []
                for of in own:
                    (p50, p10, p90), value = spread(of), getattr(of.row, field)
                    points.append((of.row.context[0], value, value * p50 / p90, value * p50 / p10))
                colour, style = palette.colour(palette.PRODUCTS, products), "-" if alone else ":"
                line(axes, points, colour, name, hollow=not alone, style=style)
    at = [(of.row.context[0], of.row.matrix_tflop_s) for of in rows if of.row.matrix_tflop_s]
    if at:
        highest = max(value for _, value in at)  # runs differ by less than a line's width
        ends = [(x, highest) for x in (min(x for x, _ in at), max(x for x, _ in at))]
        floor(rate, ends, palette.PRODUCTS["product"], "a large product by torch")
        rate.annotate("a large product by torch", ends[0], (0, -11), textcoords="offset points", fontsize=8)
    for axes, unit in ((speed, "tokens/s"), (rate, "TFLOP/s")):
        powers(axes, [of.row.context[0] for of in rows], "tokens of a prompt")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
    legend(speed, "lower right")
