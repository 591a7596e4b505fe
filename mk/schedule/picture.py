"""A picture of a lowered step: what stands in each SM's list, in which order, and how many bytes each entry streams.

The horizontal axis is *list order*, not time: an SM's entries stand one after the other, each as wide as the bytes it
streams through the ring. Waits do not show; a long bar beside short ones is an imbalance that every hand-off pays for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mk.graph import WAVE_NAMES
from mk.isa import ISA, Word, Words
from mk.model.geometry import HEAD_DIM, SLOT_BYTES
from mk.report.palette import OTHER_WAVE, WAVE
from mk.schedule.lower import Program

Floats = npt.NDArray[np.float64]

THINNEST = 0.0012  # width of an entry that streams nothing, as a share of the panel


def task_bytes(program: Program, distinct_experts: float | None = None) -> Floats:
    """Bytes each descriptor streams, [n]: weights, and for attention the KV pages of a context that fills the bucket.

    `distinct_experts` active experts a layer; None: as many as the rows can reach. A run-time phase counts its share.
    """
    shape, words = program.shape, program.words
    g = shape.geometry
    active = min(g.experts, shape.rows * g.top_k) if distinct_experts is None else distinct_experts
    matrix = words[:, Word.TILES].astype(np.float64) * words[:, Word.K_SLOTS] * SLOT_BYTES
    # top-k and sample carry sizes in the same words but stream nothing: only a strip pitch marks a weight
    streamed = np.where(words[:, Word.STRIP_PITCH] > 0, matrix, 0.0)
    per_expert = words[:, Word.EXPERT_PITCH] > 0
    streamed[per_expert] *= active / np.maximum(1, words[per_expert, Word.RANKS])
    for name in ("attention", "attn_drain"):
        chosen = np.flatnonzero(words[:, Word.OPCODE] == ISA.named(name).opcode)
        streamed[chosen] = [_attention_bytes(program, task) for task in words[chosen]]
    return streamed


def _attention_bytes(program: Program, task: Words) -> float:
    shape = program.shape
    bounds = shape.splits.bounds(shape.bucket, shape.window(int(task[Word.LAYER])))
    key_bytes = 2 * HEAD_DIM * 2  # K and V, bf16
    if task[Word.RANKS]:
        heads = shape.rows * shape.geometry.kv_heads
        return sum(hi - lo for lo, hi in bounds) * heads * key_bytes / int(task[Word.RANKS])
    split = int(task[Word.SPLIT])
    return float((bounds[split][1] - bounds[split][0]) * key_bytes) if split < len(bounds) else 0.0


def draw_schedule(program: Program, path: Path, title: str, distinct_experts: float | None = None) -> None:
    """Write a PNG of a program: the whole step, and one layer enlarged. Coloured by wave, one row an SM."""
    streamed = task_bytes(program, distinct_experts)
    layer = _typical_layer(program)
    height = 1.35 + min(4.2, max(1.2, 0.3 * program.shape.n_sm))
    figure = Figure(figsize=(14, 2 * height + 1.1), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    step, enlarged = figure.subplots(2, 1)
    _mark_layers(step, program, _draw(step, program, streamed, np.ones(len(program.words), bool)))
    step.set_title("the whole step\n", loc="left", fontsize=9)
    ends = [WAVE_NAMES.index(wave) for wave in ("embed", "lm_head", "sample")]
    inside = (program.words[:, Word.LAYER] == layer) & ~np.isin(program.words[:, Word.WAVE], ends)
    _draw(enlarged, program, streamed, inside)
    g = program.shape.geometry
    kind = f"{g.layer_kinds[layer]} attention, {g.mlp_kinds[layer]} FFN"
    enlarged.set_title(f"layer {layer} ({kind})", loc="left", fontsize=9)
    _legend(figure, program, streamed)
    figure.savefig(path)


def _typical_layer(program: Program) -> int:
    """The first sliding layer with experts, the kind a model has most of; else the last layer."""
    g = program.shape.geometry
    typical = set(g.sliding_layers) & set(g.sparse_layers)
    return min(typical) if typical else g.layers - 1


def _draw(axes: Axes, program: Program, streamed: Floats, shown: npt.NDArray[np.bool_]) -> Floats:
    """Draw the shown entries, packed to the left of their SM's row; returns where each entry begins [n]."""
    sms, n_sm = program.track_of, program.shape.n_sm  # main tracks only: what stands aside streams nothing
    shown = shown & (sms < n_sm)
    longest = np.bincount(sms, streamed * shown).max()
    unit, scale = ("MB", 1e6) if longest > 1e7 else ("KB", 1e3)
    widths = streamed * shown / scale
    entries = np.bincount(sms, shown).max()
    widths += shown * max(longest / scale, 1.0) * min(THINNEST, 0.05 / entries)
    ends = np.cumsum(widths)
    starts = ends - widths - np.concatenate([[0.0], ends])[program.offsets[:-1]][sms]
    reach = float((starts + widths).max())
    few = n_sm <= 16  # room for a gap between rows, an edge between entries, a name in a bar
    half = 0.42 if few else 0.5
    for wave, name in enumerate((*WAVE_NAMES, "other")):
        chosen = np.flatnonzero(shown & (program.words[:, Word.WAVE] == wave))
        left, right = starts[chosen], starts[chosen] + widths[chosen]
        low, high = sms[chosen] - half, sms[chosen] + half
        corners = np.stack([left, low, left, high, right, high, right, low], axis=1).reshape(-1, 4, 2)
        bars = PolyCollection(list(corners), facecolors=WAVE.get(name, OTHER_WAVE))
        bars.set_edgecolor("white" if few else "face")
        bars.set_linewidth(0.3 if few else 0.1)
        axes.add_collection(bars)
        for lo, hi, sm in zip(left, right, sms[chosen], strict=True):
            if few and hi - lo > 0.008 * reach * len(name):
                axes.text((lo + hi) / 2, sm, name, ha="center", va="center", fontsize=7, color="white")
    axes.set_xlim(0, reach * 1.003)
    axes.set_ylim(n_sm - 0.45, -0.55)
    axes.set_ylabel("SM", fontsize=9)
    axes.set_xlabel(f"{unit} an SM streams, in list order: not time, waits do not show", fontsize=8)
    axes.tick_params(labelsize=8)
    if few:
        axes.set_yticks(range(n_sm))
    axes.spines[["top", "right"]].set_visible(False)
    return starts


def _mark_layers(axes: Axes, program: Program, starts: Floats) -> None:
    """Number the layers above the first row, each where that SM's first entry of it stands."""
    layers = program.shape.geometry.layers
    first_sm = program.words[: program.offsets[1]]
    layer_of = np.where(first_sm[:, Word.WAVE] == WAVE_NAMES.index("embed"), -1, first_sm[:, Word.LAYER])
    for layer in range(0, layers + 1, -(-layers // 24)):
        entries = np.flatnonzero(layer_of == layer)
        if len(entries):
            name = "head" if layer == layers else f"layer {layer}" if layers <= 24 else str(layer)
            place = (starts[entries[0]], -0.55)
            axes.annotate(name, place, (0, 3), textcoords="offset points", fontsize=7, color="#444444")
            axes.plot([place[0]] * 2, [-0.55, -0.42], color="#444444", linewidth=0.8, clip_on=False)


def _legend(figure: Figure, program: Program, streamed: Floats) -> None:
    """Every wave of the program with its share of the step's bytes."""
    total = max(1.0, float(streamed.sum()))
    handles = []
    for wave, name in enumerate((*WAVE_NAMES, "other")):
        chosen = program.words[:, Word.WAVE] == wave
        if chosen.any():
            share = streamed[chosen].sum() / total
            label = f"{name} {share:.1%}" if share > 0 else name
            handles.append(Patch(facecolor=WAVE.get(name, OTHER_WAVE), label=label))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=8,
        fontsize=8,
        frameon=False,
        title=f"waves, and their shares of the {total / 1e6:,.1f} MB that a step streams; "
        "an entry that streams nothing is drawn as a line",
        title_fontsize=8,
    )
