"""Figures of serving: a served step beside the kernel's own, time between tokens, interruptions, an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure

from mk.report import palette
from mk.report.chart import ARM, BATCH, CONTEXT, ENGINE, RATIOS, TIMES, Chart, Column, drawn, panels
from mk.report.kept_rows import Kept, newest
from mk.results.rows import Row

ITL = {"itl_p50_ms": "p50", "itl_p99_ms": "p99", "itl_most_ms": "most", "ttft_ms": "first token\nof the prompt"}


def charts(kept: Sequence[Kept]) -> Iterator[Chart]:
    mine = [of for of in kept if of.row.experiment == "served_step" and of.row.clock is None]
    rows = newest(mine, lambda row: (row.batch, row.arm, row.event, row.prefill_policy))
    if rows:
        yield Chart(
            "served_step",
            "Serving: a step, the time between tokens, interruptions",
            "Left: step time of the decode loop beside the kernel's own, with its 95 % interval. Middle: between "
            "tokens of running requests while a long prompt enters, and until that prompt's first token. Right: time "
            "that the card idles at an interruption, median.",
            rows,
            (BATCH, CONTEXT, ARM, TIMES[0], *RATIOS, Column("prefill_policy", "policy"))
            + tuple(Column(field, f"{name.split(chr(10))[0]}, ms", 1) for field, name in ITL.items())
            + (Column("event", "event"), Column("idle_us", "idle, us", 0), Column("park_us", "until rest, us", 0)),
            lambda figure: _draw(figure, [of.row for of in rows]),
            (11.0, 3.6),
        )
    scored = [of for of in kept if of.row.scores is not None and of.row.clock is None]
    for benchmark in sorted({of.row.benchmark or "" for of in scored}):
        own = newest((of for of in scored if of.row.benchmark == benchmark), lambda row: (row.model, row.engine))
        yield Chart(
            f"accuracy_{benchmark}",
            f"Accuracy: {benchmark}",
            "Share of problems that are right: a point a run, the line their mean. “served”: another engine's server.",
            own,
            (Column("model", "model"), ENGINE, Column("sampling", "sampling"), Column("answers", "answers"))
            + (Column("score", "%", 2, 0.01), Column("score_sd", "sd, points", 2, 0.01))
            + (Column("score_difference_low", "difference from, points", 1, 0.01),)
            + (Column("score_difference_high", "to", 1, 0.01),),
            lambda figure, own=own: _draw_scores(figure, [of.row for of in own]),  # type: ignore[misc]
            (9.0, 1.1 + 0.5 * len(own)),
        )


def _draw(figure: Figure, rows: Sequence[Row]) -> None:
    ratio, between, idle = panels(figure, "served beside own", "between tokens", "interruptions")
    compared = [row for row in rows if row.ratio is not None]
    ratio.axhline(1, color=palette.BLACK, linewidth=0.8)
    for place, row in enumerate(compared):
        ratio.plot(
            [place] * 2, [drawn(row.ratio_low), drawn(row.ratio_high)], color=palette.ENGINE["cuda"], linewidth=1.5
        )
        ratio.plot(place, drawn(row.ratio), "o", color=palette.ENGINE["cuda"], markersize=5)
    ratio.set_xticks(range(len(compared)), [f"batch {row.batch}" for row in compared])
    ratio.set_xlim(-0.6, len(compared) - 0.4)
    ratio.set_ylabel("ratio of step times")
    policies = [row for row in rows if row.prefill_policy is not None]
    for number, row in enumerate(policies):
        at = [place + 0.8 * (number + 0.5) / len(policies) - 0.4 for place in range(len(ITL))]
        heights = [getattr(row, field) for field in ITL]
        bars = between.bar(at, heights, 0.7 / len(policies), color=palette.colour(palette.POLICY, row.prefill_policy))
        bars.set_label(str(row.prefill_policy))
        between.bar_label(bars, [f"{ms:.0f}" for ms in heights], fontsize=7)
    between.set_xticks(range(len(ITL)), list(ITL.values()), fontsize=8)
    between.set_ylabel("ms")
    between.legend(fontsize=8, frameon=False, loc="upper left")
    events = [row for row in rows if row.event is not None]
    heights = [(row.idle_us or 0) / 1e3 for row in events]
    bars = idle.bar(range(len(events)), heights, 0.6, color=palette.ENGINE["cuda"])
    idle.bar_label(bars, [f"{ms:.1f}" for ms in heights], fontsize=7)
    idle.set_xticks(range(len(events)), [row.event or "" for row in events])
    idle.set_ylabel("ms that the card idles")


def _draw_scores(figure: Figure, rows: Sequence[Row]) -> None:
    (axes,) = panels(figure, "score of each run")
    for place, row in enumerate(rows):
        colour = palette.colour(palette.ENGINE, row.engine)
        axes.plot([100 * score for score in row.scores or []], [place] * len(row.scores or []), "o", color=colour)
        axes.plot([100 * (row.score or 0)] * 2, [place - 0.3, place + 0.3], color=colour, linewidth=2)
    axes.set_yticks(range(len(rows)), [row.engine for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("% right")
