"""A picture of steps as they ran: every SM over time, coloured by the wave that it is at; white is idle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mk.graph import WAVE_NAMES
from mk.kernel.occupancy import Spans
from mk.report.palette import OTHER_WAVE, WAVE


def draw_timelines(panels: Mapping[str, Spans], layer: int, path: Path, title: str) -> None:
    """Write a PNG: a panel for each title of `panels`, all on one scale of time from 0. What belongs to another layer
    than `layer` is pale."""
    figure = Figure(figsize=(14, 0.9 + 3.2 * len(panels)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    longest = max((float(spans.end.max(initial=0.0)) for spans in panels.values()), default=0.0)
    seen: set[str] = set()
    for axes, (name, spans) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items(), strict=True):
        waves = spans.waves()
        seen.update(waves.tolist())
        place = {sm: number for number, sm in enumerate(np.unique(spans.sm).tolist())}
        row = np.array([place[sm] for sm in spans.sm.tolist()], np.float64)
        corners = np.stack(
            [spans.begin, row - 0.5, spans.begin, row + 0.5, spans.end, row + 0.5, spans.end, row - 0.5], axis=1
        ).reshape(-1, 4, 2)
        for pale, alpha in ((True, 0.25), (False, 1.0)):
            for wave in np.unique(waves).tolist():
                chosen = np.flatnonzero((waves == wave) & ((spans.layer != layer) == pale))
                bars = PolyCollection(list(corners[chosen]), facecolors=WAVE.get(wave, OTHER_WAVE), alpha=alpha)
                bars.set_linewidth(0)
                axes.add_collection(bars)
        axes.set_xlim(0, longest * 1.01)
        axes.set_ylim(len(place) - 0.5, -0.5)
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_ylabel("SM", fontsize=9)
        axes.set_xlabel(f"microseconds since layer {layer - 1} was complete", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    names = [*(wave for wave in WAVE_NAMES if wave in seen), *sorted(seen - set(WAVE_NAMES))]
    handles = [Patch(facecolor=WAVE.get(wave, OTHER_WAVE), label=wave) for wave in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=10, fontsize=8, frameon=False)
    figure.savefig(path)
