"""Figures of a server under load beside another engine's: what its client sees, by workload and engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from mk.report import palette
from mk.report.chart import CONTEXT, ENGINE, RATIOS, Chart, Column, legend_below, panels
from mk.report.kept_rows import Kept, newest
from mk.results.rows import Row

NAMES = {"cuda": "this server", "interpreter": "this server, interpreted", "vllm": "vLLM's", "served": "another one"}
SAYS = (
    " By the client's clock. Tokens a second are generated ones by wall time, from the first request to the last "
    "token; under each workload how many times as long the other server takes for the same requests and as many tokens."
    " Times to the first token of a request and between tokens are of all requests: filled the median, hollow p99."
)
TIMES = "ms: median, and hollow p99"
COLUMNS = (
    *(Column("workload", "workload"), ENGINE, Column("batch", "in flight"), CONTEXT, Column("answers", "requests", 0)),
    *(Column("usage_prompt_tokens", "tokens in", 0), Column("hit_tokens", "of them cached", 0)),
    *(Column("usage_completion_tokens", "tokens out", 0), Column("wall_s", "wall, s", 1)),
    *(Column("tok_s", "tokens/s", 0), RATIOS[0], Column("ttft_ms", "first token, ms", 1)),
    *(Column("ttft_p99_ms", "p99", 1), Column("itl_p50_ms", "between tokens, ms", 2), Column("itl_p99_ms", "p99", 2)),
    *(Column("itl_most_ms", "most", 1), Column("tpot_ms", "a later token, ms", 2)),
    *(Column("active_batch", "decoding", 2), Column("version", "version")),
)


def charts(kept: Sequence[Kept]) -> Iterator[Chart]:
    loaded = [of for of in kept if of.row.clock is None and of.row.tok_s is not None and of.row.workload is not None]
    yield from _chart(
        "serving",
        "Serving over HTTP: workloads beside another engine's server",
        "As many requests in flight as the table says: the next goes out when one has ended.",
        [of for of in loaded if of.row.experiment == "serving"],
    )
    yield from _chart(
        "agent_replay",
        "A coding agent's conversation, sent again to either server",
        "Turn by turn, one request at a time, each with all recorded turns before it.",
        [of for of in loaded if of.row.experiment == "agent_trial" and of.row.agent == "replay"],
    )


def _chart(name: str, title: str, says: str, rows: Sequence[Kept]) -> Iterator[Chart]:
    mine = newest(rows, lambda row: (*_asked(row), row.engine))
    if mine:
        yield Chart(name, title, says + SAYS, mine, COLUMNS, lambda figure: _draw(figure, [of.row for of in mine]))


def _asked(row: Row) -> tuple[str, int, str]:
    """What servers that stand beside each other were asked."""
    return row.workload or "", row.batch, row.requests_hash or ""


def _draw(figure: Figure, rows: Sequence[Row]) -> None:
    rate, first, between = panels(figure, "throughput", "time to first token", "time between tokens")
    workloads = list(dict.fromkeys(map(_asked, rows)))
    engines = list(dict.fromkeys(row.engine for row in rows))
    width = 0.8 / len(engines)
    for number, engine in enumerate(engines):
        own = [row for row in rows if row.engine == engine]
        at = [workloads.index(_asked(row)) + (number + 0.5) * width - 0.4 for row in own]
        colour, name = palette.colour(palette.ENGINE, engine), NAMES.get(engine, engine)
        bars = rate.bar(at, [row.tok_s or 0 for row in own], 0.9 * width, color=colour, label=name)
        rate.bar_label(bars, [f"{row.tok_s:,.0f}" for row in own], fontsize=8)
        for place, row in zip(at, own, strict=True):
            _median_and_tail(first, place, row.ttft_ms, row.ttft_p99_ms, colour)
            _median_and_tail(between, place, row.itl_p50_ms, row.itl_p99_ms, colour)
    for axes, unit in ((rate, "tokens/s, all requests together"), (first, TIMES), (between, TIMES)):
        axes.set_xticks(range(len(workloads)), [name for name, *_ in workloads])
        axes.set_xlim(-0.6, len(workloads) - 0.4)
        axes.set_ylabel(unit)
    rate.set_xticks(range(len(workloads)), [_compared(asked, rows) for asked in workloads])
    for axes in (first, between):
        _logarithmic(axes)
    legend_below(figure, rate)


def _compared(asked: tuple[str, int, str], rows: Sequence[Row]) -> str:
    """A workload with its ratios to rows that are drawn."""
    own = [row for row in rows if _asked(row) == asked]
    drawn = {row.digest for row in own}
    ratios = [f"{row.ratio:.2f} times" for row in own if row.ratio is not None and row.ratio_to in drawn]
    return "\n".join([asked[0], *ratios])


def _median_and_tail(axes: Axes, place: float, median: float | None, tail: float | None, colour: str) -> None:
    """What is None was not there to be timed: a request of one token has no time between tokens."""
    if median is None or tail is None:
        return
    axes.plot([place] * 2, [median, tail], color=colour, linewidth=1.2)
    for ms, inside, away in ((median, colour, -10), (tail, "white", 5)):
        axes.plot(place, ms, "o", color=colour, markersize=5.5, markerfacecolor=inside)
        text = f"{ms:,.0f}" if ms >= 99.5 else f"{ms:.3g}"
        axes.annotate(text, (place, ms), (0, away), textcoords="offset points", ha="center", fontsize=8)


def _logarithmic(axes: Axes) -> None:
    """With room for the figures above and below the points."""
    if not axes.lines:
        return
    axes.set_yscale("log")
    low, high = axes.dataLim.intervaly
    axes.set_ylim(low / 1.5, high * 1.5)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
