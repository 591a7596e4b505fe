"""Hold Triton's prefill against float32: every layer fed alike, then whole prompts, the step after them, and bits.

A layer gets the same bf16 residual and expert ids in three arms, for prompts of every length: KV pages and what
attention and FFN add are at most `BAR` times as far from float32 as transformers' own layer (`prefill_layers.py`), and
needles are found where they are in sight (`prefill_needles.py`). Of random weights that residual is noise: through many
layers their tokens grow alike, and attention's scores flat. Of a checkpoint it is what its layers make.
Whole prompts (`prefill_prompts.py`) are compared after the last layer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from experiments.device_weights import open_weights, pack
from experiments.distances import BAR, LEAST_STD, chosen_layers, figure
from experiments.kernel_checks import SLACK, OneLayer
from experiments.layer_arms import EXPERTS_IMPLEMENTATION, History, ReferenceArm, TransformersArm
from experiments.opening import machine_under_test
from experiments.prefill_layers import PARTS, Distance, Flips, LayerMeasure, PrefillArm
from experiments.prefill_needles import find
from experiments.prefill_prompts import compare_bits, replay
from experiments.prefill_rig import Rig
from experiments.prefill_steps import InterpreterStep, KernelStep, NextStep
from experiments.prefill_streams import Streams, Told
from mk.config import Config
from mk.errors import MkError
from mk.model.packing import PackedWeights
from mk.model.reference import Reference
from mk.model.tensors import WeightSource
from mk.rows import Row
from mk.runs import RunFolder
from prefill.interpreted import require_interpreter

MARGIN = 2.0**-7  # of the last chosen logit, that a router may be mistaken by
SCORED = 16  # last tokens whose scores are looked at
ENOUGH_KEYS = 64  # for scores to have a deviation


@dataclass(frozen=True, slots=True)
class Worst:
    """Of one part of a prompt's layers: the largest ratio and where it was."""

    distance: Distance
    layer: int


@dataclass(slots=True)
class Found:
    """What there is to say of prompts of one length; layers' figures are of all that were measured together."""

    worst: dict[str, Worst] = field(default_factory=dict)
    flips: list[Flips] = field(default_factory=list)
    needles: int = 0
    lost: list[str] = field(default_factory=list)
    logit_std: float | None = None  # the smallest of any layer
    logits: tuple[float, float] | None = None  # distances from float32, of prefill and of bfloat16
    following: tuple[float, float] | None = None  # the same of the next step's
    free_flips: tuple[int, int] | None = None
    bits: dict[str, bool] = field(default_factory=dict)

    def take(self, layer: int, distances: Mapping[str, Distance]) -> None:
        for name, found in distances.items():
            new = Worst(found, layer)
            self.worst[name] = max(self.worst.get(name, new), new, key=_rank)


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when a verdict is no."""
    if cfg.prefill.name != "triton":
        raise MkError(f"prefill_correctness tests Triton's, not prefill={cfg.prefill.name}", hint="prefill=triton")
    engine = machine_under_test(cfg, 1)
    device = torch.device("cuda" if engine == "cuda" else "cpu")
    if device.type == "cpu":
        require_interpreter()
    settings, source = cfg.experiment, open_weights(cfg, device)
    chosen = chosen_layers(settings.layers, source.geometry)
    weights = pack(source, device)
    with torch.inference_mode(), RunFolder.create(cfg) as run:
        step: NextStep | None = None
        if settings.whole:  # made first: what is wrong with it shows before the long walk
            make = KernelStep if engine == "cuda" else InterpreterStep
            step = make(cfg, weights, max(settings.lengths) + 1)
        found, told = walk(cfg, source, weights, chosen, device)
        if step is not None and told is not None:
            whole_prompts(cfg, weights, step, told, found)
        rows = [_row(cfg, run, engine, length, found, source.label, step) for length in settings.lengths]
        for row in rows:
            run.append_row(row)
        print(f"\n{table(rows, found)}\nrun folder: {run.path}")
    return 0 if all(all(row.checks.values()) for row in rows) else 1


def walk(
    cfg: Config, source: WeightSource, weights: PackedWeights, chosen: list[int], device: torch.device
) -> tuple[dict[int, Found], Told | None]:
    """Every chosen layer measured, and the references over all layers if whole prompts are to be compared. A layer's
    weights are made once for all who read them."""
    settings, g = cfg.experiment, source.geometry
    longest = max(settings.lengths)
    products = cfg.prefill.products or "packed"
    arm = PrefillArm(Rig.for_prompts(weights, 1, longest, cfg.prefill.chunk, settings.seed, products))
    layers = OneLayer(source, device)
    found = {length: Found() for length in settings.lengths}
    streams: Streams | None = None
    if settings.whole or source.label == "checkpoint":
        tokens = torch.randint(g.vocab, (longest + 1,), generator=torch.Generator().manual_seed(settings.seed))
        streams = Streams(g, layers.get, tokens.tolist(), device)
    last = g.layers - 1 if settings.whole else max(chosen)
    for layer in range(last + 1):
        if streams is None and layer not in chosen:
            continue
        layers.forget()
        started = time.perf_counter()
        exact, rounded = ReferenceArm(Reference(g, layers.get)), TransformersArm(g, layers.get, layer, device)
        if layer in chosen:
            if source.label == "checkpoint":
                assert streams is not None
                x = streams.x[:longest].bfloat16()
            else:
                generator = torch.Generator(device).manual_seed(settings.seed + 1000 * layer)
                x = torch.randn(longest, g.hidden, generator=generator, device=device).bfloat16()
            measure(layer, x, exact, rounded, arm, found)
            print(f"{line(layer, found)}, {time.perf_counter() - started:.1f} s", flush=True)
        if streams is not None:
            streams.layer(layer, exact, rounded)
    layers.forget()
    if streams is None or not settings.whole:
        return found, None
    return found, streams.told([position for length in settings.lengths for position in (length - 1, length)])


def measure(
    layer: int,
    x: Tensor,
    exact: ReferenceArm,
    rounded: TransformersArm,
    arm: PrefillArm,
    found: Mapping[int, Found],
) -> None:
    """One layer, fed the first tokens of x bf16 [tokens, hidden] for each length."""
    g = exact.reference.geometry
    ours, logits = exact.run(layer, x)
    measured = LayerMeasure(ours, logits, rounded.run(x, History.none(g, x.device), ours.choice))
    for length, of in found.items():
        tested = arm.run(layer, x[:length], None if ours.choice is None else ours.choice[:length])
        of.take(layer, measured.distances(tested))
        flips = measured.flips(tested)
        if flips is not None:
            of.flips.append(flips)
        count, lost = find(arm, layer, x[:length], seed=layer)
        of.needles += count
        of.lost += [f"layer {layer} {needle}" for needle in lost]
        std = _logit_std(exact, layer, x[:length], ours.keys)
        if std is not None:
            of.logit_std = std if of.logit_std is None else min(of.logit_std, std)


def _logit_std(exact: ReferenceArm, layer: int, x: Tensor, keys: Tensor) -> float | None:
    """Standard deviation over the keys that a query sees, of scores of a prompt's last tokens: root mean square over
    queries and heads. None: they see too few."""
    g, reference, n = exact.reference.geometry, exact.reference, len(x)
    first = max(0, n - g.window_keys) if g.layer_kinds[layer] == "sliding" else 0
    queries = min(SCORED, n)
    if n - queries - first < ENOUGH_KEYS:
        return None
    h = reference.normed(layer, x[-queries:].float())
    q = reference.project(layer, h, n - queries)[0].unflatten(0, (g.kv_heads, g.group))
    scores = q @ keys[:, None, first : n - queries + 1].transpose(-1, -2) * g.head_dim**-0.5
    return float(scores.var(-1).mean().sqrt())


def whole_prompts(cfg: Config, weights: PackedWeights, step: NextStep, told: Told, found: Mapping[int, Found]) -> None:
    """Logits with replayed ids, and bits and choices of prompts that run freely."""
    started = time.perf_counter()
    for length, of in found.items():
        logits, following = replay(step, told, length)
        of.logits, of.following = (logits, told.noise(length - 1)), (following, told.noise(length))
    bits = compare_bits(cfg, weights, told.tokens)
    for length, checks in bits.checks.items():
        found[length].bits = checks
    found[max(found)].free_flips = told.flips(bits.taken)
    print(f"whole prompts in {time.perf_counter() - started:.1f} s", flush=True)


def checks(length: int, found: Mapping[int, Found], label: str) -> dict[str, bool]:
    """Verdicts on prompts of one length."""
    of = found[length]
    passed = {
        f"{name}_within_bar": all(of.worst[part].distance.ratio <= BAR for part in parts)
        for name, parts in (("attention", ("attention",)), ("ffn", ("ffn",)), ("kv", ("keys", "values")))
    }
    passed["needles_returned"] = not of.lost
    if of.flips:
        ours, theirs = (sum(getattr(flips, arm) for flips in of.flips) for arm in ("tested", "rounded"))
        passed["router_within_bfloat16"] = ours <= theirs + SLACK
        passed["router_margin"] = all(flips.margin <= MARGIN for flips in of.flips)
    if of.logit_std is not None and label == "random":  # of a checkpoint they are as they are
        passed["scores_are_sharp"] = of.logit_std >= LEAST_STD
    if of.logits is not None and of.following is not None:
        # one position's noise is a matter of luck
        most = max(noise for each in found.values() for _, noise in (each.logits, each.following))
        passed["logits_within_bar"] = of.logits[0] <= BAR * most
        passed["next_step_within_bar"] = of.following[0] <= BAR * most
    if of.free_flips is not None:
        passed["free_router_within_bfloat16"] = of.free_flips[0] <= of.free_flips[1] + SLACK
    return {**passed, **of.bits}


def _row(
    cfg: Config,
    run: RunFolder,
    engine: str,
    length: int,
    found: Mapping[int, Found],
    label: str,
    step: NextStep | None,
) -> Row:
    of = found[length]

    def worst(*parts: str) -> Worst:
        return max((of.worst[part] for part in parts), key=_rank)

    errors: dict[str, float | None] = {}
    for name, parts in (("attention", ("attention",)), ("ffn", ("ffn",)), ("kv", ("keys", "values"))):
        held = worst(*parts).distance
        errors |= {
            f"{name}_error": figure(held.tested),
            f"{name}_error_bf16": figure(held.rounded),
            f"{name}_ratio": figure(held.ratio),
        }
    return run.row(
        engine=engine,
        dtype="bfloat16",
        batch=1,
        context=[length],
        routing="replay",
        checks=checks(length, found, label),
        build_hash=None if step is None else step.build_hash,
        schedule_hash=None if step is None else step.schedule_hash,
        prompt_tokens=length,
        layer=worst(*PARTS).layer,
        **errors,
        logit_std=of.logit_std,
        needles=of.needles,
        experts_implementation=EXPERTS_IMPLEMENTATION,
        router_flips=sum(flips.tested for flips in of.flips) if of.flips else None,
        router_flips_bf16=sum(flips.rounded for flips in of.flips) if of.flips else None,
        router_margin=max(flips.margin for flips in of.flips) if of.flips else None,
        free_flips=None if of.free_flips is None else of.free_flips[0],
        free_flips_bf16=None if of.free_flips is None else of.free_flips[1],
        logits_error=None if of.logits is None else figure(of.logits[0]),
        logits_error_bf16=None if of.logits is None else of.logits[1],
        next_step_error=None if of.following is None else figure(of.following[0]),
        next_step_error_bf16=None if of.following is None else of.following[1],
    )


def _rank(worst: Worst) -> float:
    """A NaN is the worst of all."""
    return torch.inf if math.isnan(worst.distance.ratio) else worst.distance.ratio


def line(layer: int, found: Mapping[int, Found]) -> str:
    """The layers so far: the largest ratio of each part, with the prompt, the layer and the token that has it."""
    cells = []
    for part in PARTS:
        length, worst = max(((n, of.worst[part]) for n, of in found.items()), key=lambda pair: _rank(pair[1]))
        at = f"{length} tokens, layer {worst.layer}, token {worst.distance.token}"
        cells.append(f"{part} {worst.distance.ratio:.2f} ({at})")
    lost = [f"; LOST {needle}" for of in found.values() for needle in of.lost[:1]]
    return f"layer {layer:>2}, worst so far: {', '.join(cells)}{''.join(lost[:3])}"


def table(rows: list[Row], found: Mapping[int, Found]) -> str:
    """A line a length. Ratios are the worst of any layer, with that layer; flips and logits stand beside bfloat16's."""
    heads = [*PARTS, "flips / bf16", "needles", "logits / bf16", "next step / bf16", "scores"]
    widths = [12, 12, 12, 12, 15, 7, 19, 19, 6]
    head = " ".join(name.rjust(width) for name, width in zip(heads, widths, strict=True))
    lines = [f" tokens {head}  verdict"]
    for row in rows:
        of = found[row.context[0]]
        cells = [f"{of.worst[part].distance.ratio:.2f} @{of.worst[part].layer}" for part in PARTS]
        cells.append(f"{row.router_flips} / {row.router_flips_bf16}" if of.flips else "-")
        cells.append(str(of.needles))
        for pair in (of.logits, of.following):
            cells.append("-" if pair is None else f"{pair[0]:.2e} / {pair[1]:.2e}")
        cells.append("-" if of.logit_std is None else f"{of.logit_std:.1f}")
        failed = [name for name, passed in row.checks.items() if not passed]
        shown = " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{row.context[0]:>7} {shown}  {'FAILED ' + ', '.join(failed) if failed else 'ok'}")
    free = found[max(found)].free_flips
    if free is not None:
        lines.append(f"free-running, {max(found)} tokens: {free[0]} sets of experts differ, bfloat16's {free[1]}")
    return "\n".join(lines)
