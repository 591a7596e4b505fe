"""Figures of why a step is one kernel: arms from a launch a wave to the kernel as it runs, and its SMs in a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from mk.report import palette
from mk.report.chart import (
    ARM,
    BATCH,
    BOUND,
    CONTEXT,
    RATIOS,
    SHARE,
    TIMES,
    Chart,
    Column,
    floor,
    legend_below,
    panels,
    spread,
    stacked,
)
from mk.report.decode import floor_ms
from mk.report.kept_rows import Kept, of_last_run, raw_of
from mk.results.kept import EXECUTED, leaves_of, within

LAUNCHES = "experiment.launches"
ADDS = {  # what an arm has that the one before it had not, by key and value of its configuration
    (LAUNCHES, "waves"): "a launch a wave",
    (LAUNCHES, "graph"): "a CUDA graph of them",
    (LAUNCHES, "dependent"): "dependent launch",
    (LAUNCHES, "step"): "one kernel",
    ("engine.handoff.barriers", True): "barriers between waves",
    ("engine.handoff.barriers", False): "counters, no barriers",
    ("engine.ring.run_ahead", True): "weights past the waits",
    ("engine.ring.run_ahead", False): "no weights past the waits",
    ("placement.name", "row_owner"): "owned strips",
}
KINDS = {"launches": "a step of many launches", "kernel": "one kernel", "zero_wait": "bound: no wait for another SM"}
SAYS = "Each arm differs from the one above it in what its name says; the last is the kernel as it runs."
STRETCHES = 1600  # most that a picture of SMs draws, so that it has some 200 KB


def charts(kept: Sequence[Kept]) -> Iterator[Chart]:
    arms = [of for of in kept if of.row.clock is None and of.row.arm is not None and of.config is not None]
    steps = [of for of in arms if of.row.experiment == "ladder" and of.row.p50_ms is not None]
    yield from _ladder(of_last_run(steps, lambda row: row.batch))
    layers = [of for of in arms if of.row.experiment == "wave_occupancy" and of.row.idle_us_by_wave is not None]
    yield from _layers(of_last_run(layers, lambda row: row.batch))


def _ladder(rows: Sequence[Kept]) -> Iterator[Chart]:
    if rows:
        yield Chart(
            "ladder",
            "The ladder: from one launch a wave to the megakernel",
            f"Median time of a step, bars p10 to p90 of the steps. {SAYS} Below it is that kernel without any wait for "
            "another SM, which no schedule can beat. Dashed: the step's bytes at the card's nominal bandwidth. Ratios, "
            "over blocks that ran in turn, are to the arm before; “(again)” is the first arm beside itself.",
            rows,
            (BATCH, CONTEXT, ARM, BOUND, *TIMES, *RATIOS, *SHARE),
            lambda figure: _draw_ladder(figure, rows),
            (10.0, 1.6 + 0.27 * len(labels(rows))),
        )


def _layers(rows: Sequence[Kept]) -> Iterator[Chart]:
    if rows:
        yield Chart(
            "occupancy",
            "SMs in one layer: at work, and idle wave by wave",
            "Of one layer with experts, mean over SMs, in trace builds, which are some percent slower; it begins when "
            f"the layer before is complete. Idle time counts for the wave that is complete next. {SAYS}",
            rows,
            (BATCH, CONTEXT, ARM, Column("layer", "layer"), Column("layer_us", "us of the layer", 1))
            + (Column("idle_pct", "% idle", 1), *(_idle(wave) for wave in _waves(rows)), TIMES[0]),
            lambda figure: _draw_occupancy(figure, rows),
            (10.0, 1.1 + sum(0.6 + 0.36 * len(own) for _, own in _by_batch(rows))),
        )
        for batch, own in _by_batch(rows):
            yield Chart(
                f"timeline_batch{batch}",
                f"SMs in one layer over time, batch {batch}",
                "Coloured: at work, whatever at, in the last step of a trace build. Lines are the moments at which "
                f"waves are complete, the last of them the layer's end. {SAYS} Where the axis says so only some SMs "
                "are drawn, which keeps the figure small; the raw data beside the rows has all.",
                own,
                (ARM, CONTEXT, Column("layer", "layer"), Column("layer_us", "us of the layer", 1))
                + (Column("idle_pct", "% idle", 1),),
                lambda figure, own=own: _draw_timelines(figure, own),  # type: ignore[misc]
                (10.0, 0.7 + 2.1 * len(own)),
            )


def _by_batch(rows: Sequence[Kept]) -> list[tuple[int, list[Kept]]]:
    return [(batch, [of for of in rows if of.row.batch == batch]) for batch in sorted({of.row.batch for of in rows})]


def labels(rows: Sequence[Kept]) -> dict[str, str]:
    """Arm -> a short name, in order: what it has otherwise than the arm before. Without the first arm's repetition."""
    found: dict[str, str] = {}
    for _, own in _by_batch(rows):
        before: Mapping[str, object] = {}
        for of in own:
            arm, leaves = of.row.arm or "", dict(leaves_of(of.config or {}))
            if of.row.bound is not None:
                found.setdefault(arm, "no waits: a bound")
            elif not _again(of):
                found.setdefault(arm, _added(leaves, before))
                before = leaves
    bounds = {of.row.arm or "": None for of in rows if of.row.bound is not None}
    return {arm: found[arm] for arm in [*(arm for arm in found if arm not in bounds), *bounds]}


def _again(of: Kept) -> bool:
    return (of.row.arm or "").endswith("(again)")


def _added(leaves: Mapping[str, object], before: Mapping[str, object]) -> str:
    """Of a configuration beside the one before; of the first, how its steps are launched."""
    executed = [key for key in sorted(leaves) if within(key, (*EXECUTED, LAUNCHES))]
    changed = [key for key in executed if leaves[key] != before.get(key)] if before else [LAUNCHES]
    if LAUNCHES in changed and leaves[LAUNCHES] == "step" and leaves.get("engine.handoff.barriers"):
        changed.append("engine.handoff.barriers")
    return ", ".join(_in_words(key, leaves[key]) for key in dict.fromkeys(changed))


def _in_words(key: str, value: object) -> str:
    if key == "engine.ring.window_kb":
        sizes = value if isinstance(value, list) else [value]  # of one row, and of more
        return f"{' or '.join(map(str, sizes))} KB in flight"
    return ADDS.get((key, value), f"{key.rpartition('.')[2]} {value}")


def _kind(of: Kept) -> str:
    return of.row.bound or ("kernel" if of.leaf(LAUNCHES) in (None, "step") else "launches")


def _draw_ladder(figure: Figure, rows: Sequence[Kept]) -> None:
    names = labels(rows)
    arms = list(names)
    batches = _by_batch(rows)
    every = panels(figure, *(f"batch {batch}, {own[0].row.context[0]:,} keys" for batch, own in batches))
    for number, (axes, (_, own)) in enumerate(zip(every, batches, strict=True)):
        shown = [of for of in own if not _again(of)]
        longest = max(spread(of)[2] for of in shown)
        for of in shown:
            (p50, p10, p90), place = spread(of), arms.index(of.row.arm or "")
            axes.barh(place, p50, height=0.65, color=palette.colour(palette.STEP, _kind(of)))
            axes.plot([p10, p90], [place] * 2, color=palette.BLACK, linewidth=1.2, solid_capstyle="butt")
            axes.text(max(p50, p90) + 0.015 * longest, place, f"{p50:.2f}", va="center", fontsize=8)
        if floors := [least for of in own if (least := floor_ms(of.row, "nominal")) is not None]:
            ends = [(min(floors), end) for end in (-0.5, len(arms) - 0.5)]
            floor(axes, ends, palette.STEP["nominal"], "floor: bytes at nominal bandwidth")
        axes.set_yticks(range(len(arms)), names.values() if number == 0 else [""] * len(arms))
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.set_xlim(0, 1.14 * longest)
        axes.set_xlabel("ms a step")
    kinds = {_kind(of) for of in rows}
    handles = [Patch(color=palette.STEP[kind], label=label) for kind, label in KINDS.items() if kind in kinds]
    lines, _ = every[0].get_legend_handles_labels()
    figure.legend(handles=[*handles, *lines], loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _waves(rows: Sequence[Kept]) -> list[str]:
    """In the order of the palette, which tells them apart."""
    found = {wave for of in rows for wave in of.row.idle_us_by_wave or {}}
    return [*(wave for wave in palette.WAVE if wave in found), *sorted(found - palette.WAVE.keys())]


def _idle(wave: str) -> Column:
    return Column("idle_us_by_wave", f"idle, {wave}, us", 2, key=wave)


def _draw_occupancy(figure: Figure, rows: Sequence[Kept]) -> None:
    batches, names = _by_batch(rows), labels(rows)
    titles = (f"batch {batch}, {own[0].row.context[0]:,} keys, layer {own[0].row.layer}" for batch, own in batches)
    every = panels(figure, *titles, down=True)
    for axes, (_, own) in zip(every, batches, strict=True):
        idle = [of.row.idle_us_by_wave or {} for of in own]
        lengths = [of.row.layer_us or 0.0 for of in own]
        work = [us - sum(by_wave.values()) for us, by_wave in zip(lengths, idle, strict=True)]
        parts = [("SMs at work", palette.PALE, work)]
        for wave in _waves(rows):
            colour = palette.WAVE.get(wave, palette.OTHER_WAVE)
            parts.append((f"idle, {wave}", colour, [by_wave.get(wave, 0.0) for by_wave in idle]))
        stacked(axes, [fill(names[of.row.arm or ""], 34) for of in own], parts, least=0.045)
        for place, of in enumerate(own):
            axes.text(1.01 * lengths[place], place, f" {of.row.idle_pct:.0f} % idle", va="center", fontsize=8)
        axes.set_xlim(0, 1.12 * max(lengths))
        axes.set_xlabel("us")
    legend_below(figure, every[0], columns=6)


def _draw_timelines(figure: Figure, rows: Sequence[Kept]) -> None:
    names, raws = labels(rows), raw_of(rows)
    sms = max(len(raw["busy_us"]) for raw in raws)
    step = next(n for n in count(1) if n >= sms or sum(_stretches(raw["busy_us"][::n]) for raw in raws) <= STRETCHES)
    longest = max(max(raw["wave_ends_us"].values()) for raw in raws)
    every = panels(figure, *(names[of.row.arm or ""] for of in rows), down=True, share=True)
    for axes, of, raw in zip(every, rows, raws, strict=True):
        shown = raw["busy_us"][::step]
        axes.add_patch(PathPatch(_bars(shown), facecolor=palette.STEP[_kind(of)], linewidth=0))
        _mark(axes, raw["wave_ends_us"], len(shown), longest)
        axes.set_xlim(0, 1.02 * longest)
        axes.set_ylim(len(shown) - 0.5, -0.5 - 0.85 * len(shown))
        axes.set_yticks([0, len(shown) - 1], ["0", f"{(len(shown) - 1) * step}"])
        axes.set_ylabel("SM" if step == 1 else f"every {_th(step)} SM")
        axes.grid(visible=False)
        axes.tick_params(labelsize=8)
    every[-1].set_xlabel(f"us since layer {(rows[0].row.layer or 0) - 1} was complete")


def _stretches(busy: Sequence[Sequence[object]]) -> int:
    return sum(map(len, busy))


def _bars(busy: Sequence[Sequence[Sequence[float]]]) -> Path:
    """One path for all stretches of all SMs: a lane an SM."""
    corners, codes = [], []
    for place, stretches in enumerate(busy):
        for begin, end in stretches:
            low, high = place - 0.42, place + 0.42
            corners += [(begin, low), (end, low), (end, high), (begin, high), (begin, low)]
            codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return Path(corners, codes)


def _mark(axes: Axes, ends: Mapping[str, float], lanes: int, longest: float) -> None:
    """A line at the end of each wave, and its name above, moved to the side where two would stand on each other."""
    apart, top = 0.018 * longest, -0.5 - 0.1 * lanes
    order = sorted(ends, key=ends.__getitem__)
    at: list[float] = []
    for wave in order:
        at.append(max(ends[wave], at[-1] + apart if at else 0.0))
    for number in range(len(at)):
        at[number] = min(at[number], 1.01 * longest - (len(at) - 1 - number) * apart)
    for wave, place in zip(order, at, strict=True):
        axes.plot([ends[wave], ends[wave], place], [lanes - 0.5, -0.5, top], color=palette.BLACK, linewidth=0.9)
        axes.text(place, top - 0.04 * lanes, wave, rotation=90, ha="center", va="bottom", fontsize=6.5)


def _th(number: int) -> str:
    return f"{number}{ {2: 'nd', 3: 'rd'}.get(number % 10 if number // 10 != 1 else 0, 'th') }"
