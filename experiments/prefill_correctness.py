"""Hold Triton's prefill against float32: every layer fed alike, then whole prompts, the step after them, and bits.

A layer gets the same bf16 residual and expert ids in three arms, for prompts of every length: KV pages and what
attention and FFN add are at most `DISTANCE_BAR` times as far from float32 as transformers' own layer
(`prefill_layers.py`), and needles are found where they are in sight (`prefill_needles.py`). Of random weights that
residual is noise: through many layers their tokens grow alike, and attention's scores flat. Of a checkpoint it is what
its layers make. Whole prompts (`prefill_prompts.py`) are compared after the last layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from experiments.device_weights import open_weights, pack
from experiments.distances import chosen_layers, read
from experiments.kernel_checks import OneLayer
from experiments.layer_arms import EXPERTS_IMPLEMENTATION, History, ReferenceArm, TransformersArm
from experiments.opening import machine_under_test
from experiments.prefill_figures import PARTS, PromptData, worst
from experiments.prefill_layers import LayerMeasure, PrefillArm
from experiments.prefill_needles import find
from experiments.prefill_prompts import compare_bits, replay
from experiments.prefill_rig import Rig
from experiments.prefill_steps import InterpreterStep, KernelStep, NextStep
from experiments.prefill_streams import Streams, Told
from experiments.unread import require_greedy, require_router
from mk.config import Config
from mk.errors import MkError
from mk.model.packing import PackedWeights
from mk.model.reference import Reference
from mk.model.tensors import WeightSource
from mk.results.rows import Row
from mk.results.runs import RunFolder
from prefill.interpreted import require_interpreter

SCORED = 16  # last tokens whose scores are looked at
ENOUGH_KEYS = 64  # for scores to have a deviation


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when a verdict is no."""
    if cfg.prefill.name != "triton":
        raise MkError(f"prefill_correctness tests Triton's, not prefill={cfg.prefill.name}", hint="prefill=triton")
    require_router(cfg)  # whose choice for float32 is replayed
    require_greedy(cfg)
    engine = machine_under_test(cfg, 1)
    device = torch.device("cuda" if engine == "cuda" else "cpu")
    if device.type == "cpu":
        require_interpreter()
    settings, source = cfg.experiment, open_weights(cfg, device)
    chosen = chosen_layers(settings.layers, source.geometry)
    weights = pack(source, device)
    found = {n: PromptData(source.label, len(chosen), settings.whole) for n in settings.lengths}
    with torch.inference_mode(), RunFolder.create(cfg) as run:
        step: NextStep | None = None
        if settings.whole:  # made first: what is wrong with it shows before the long walk
            make = KernelStep if engine == "cuda" else InterpreterStep
            step = make(cfg, weights, max(settings.lengths) + 1)

        def rows() -> list[Row]:
            return [_row(run, engine, length, of.raw, step) for length, of in found.items()]

        def keep() -> None:  # a run that is cut off leaves what it has measured
            run.draft([(row, of.raw) for row, of in zip(rows(), found.values(), strict=True)])

        told = walk(cfg, source, weights, chosen, device, found, keep)
        if step is not None and told is not None:
            whole_prompts(cfg, weights, step, told, found, keep)
        final = [run.append_row(row, of.raw) for row, of in zip(rows(), found.values(), strict=True)]
        print(f"\n{table(final, found)}\nrun folder: {run.path}")
    return 0 if all(all(row.checks.values()) for row in final) else 1


def walk(
    cfg: Config,
    source: WeightSource,
    weights: PackedWeights,
    chosen: list[int],
    device: torch.device,
    found: Mapping[int, PromptData],
    keep: Callable[[], None],
) -> Told | None:
    """Every chosen layer measured, and the references over all layers if whole prompts are to be compared. A layer's
    weights are made once for all who read them. keep: called after each layer that was measured."""
    settings, g = cfg.experiment, source.geometry
    longest = max(settings.lengths)
    products = cfg.prefill.products or "packed"
    arm = PrefillArm(Rig.for_prompts(weights, 1, longest, cfg.prefill.chunk, settings.seed, products))
    layers = OneLayer(source, device)
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
            keep()
            print(f"{line(layer, found)}, {time.perf_counter() - started:.1f} s", flush=True)
        if streams is not None:
            streams.layer(layer, exact, rounded)
    layers.forget()
    if streams is None or not settings.whole:
        return None
    return streams.told([position for length in settings.lengths for position in (length - 1, length)])


def measure(
    layer: int,
    x: Tensor,
    exact: ReferenceArm,
    rounded: TransformersArm,
    arm: PrefillArm,
    found: Mapping[int, PromptData],
) -> None:
    """One layer, fed the first tokens of x bf16 [tokens, hidden] for each length."""
    g = exact.reference.geometry
    ours, logits = exact.run(layer, x)
    measured = LayerMeasure(ours, logits, rounded.run(x, History.none(g, x.device), ours.choice))
    for length, of in found.items():
        tested = arm.run(layer, x[:length], None if ours.choice is None else ours.choice[:length])
        count, lost = find(arm, layer, x[:length], seed=layer)
        for needle in lost[:3]:
            print(f"layer {layer} LOST {needle}", flush=True)
        std = _logit_std(exact, layer, x[:length], ours.keys)
        of.take(layer, measured.distances(tested), measured.flips(tested), count, len(lost), std)


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


def whole_prompts(
    cfg: Config,
    weights: PackedWeights,
    step: NextStep,
    told: Told,
    found: Mapping[int, PromptData],
    keep: Callable[[], None],
) -> None:
    """Logits with replayed ids, and bits and choices of prompts that run freely."""
    started = time.perf_counter()
    noise = {length: (told.noise(length - 1), told.noise(length)) for length in found}
    every = [distance for pair in noise.values() for distance in pair]
    for length, of in found.items():
        logits, following = replay(step, told, length)
        of.take_logits((logits, noise[length][0]), (following, noise[length][1]), every)
        keep()
    bits = compare_bits(cfg, weights, told.tokens)
    for length, checks in bits.checks.items():
        found[length].take_bits(checks, told.flips(bits.taken) if length == max(found) else None)
    print(f"whole prompts in {time.perf_counter() - started:.1f} s", flush=True)


def _row(run: RunFolder, engine: str, length: int, raw: Mapping[str, Any], step: NextStep | None) -> Row:
    return run.measured(
        raw,
        engine=engine,
        dtype="bfloat16",
        batch=1,
        context=[length],
        routing="replay",
        build_hash=None if step is None else step.build_hash,
        schedule_hash=None if step is None else step.schedule_hash,
        prompt_tokens=length,
        experts_implementation=EXPERTS_IMPLEMENTATION,
    )


def line(layer: int, found: Mapping[int, PromptData]) -> str:
    """The layers so far: the largest ratio of each part, with the prompt, the layer and the token that has it."""
    cells = []
    for part in PARTS:
        length, at = max(((n, worst(of.raw, part)) for n, of in found.items()), key=lambda pair: pair[1].rank)
        cells.append(f"{part} {at.distance.ratio:.2f} ({length} tokens, layer {at.layer}, token {at.distance.token})")
    return f"layer {layer:>2}, worst so far: {', '.join(cells)}"


def table(rows: list[Row], found: Mapping[int, PromptData]) -> str:
    """A line a length. Ratios are the worst of any layer, with that layer; flips and logits stand beside bfloat16's."""
    heads = [*PARTS, "flips / bf16", "needles", "logits / bf16", "next step / bf16", "scores"]
    widths = [12, 12, 12, 12, 15, 7, 19, 19, 6]
    head = " ".join(name.rjust(width) for name, width in zip(heads, widths, strict=True))
    lines = [f" tokens {head}  verdict"]
    for row in rows:
        raw = found[row.context[0]].raw
        held = [worst(raw, part) for part in PARTS]
        cells = [f"{of.distance.ratio:.2f} @{of.layer}" for of in held]
        cells.append("-" if row.router_flips is None else f"{row.router_flips} / {row.router_flips_bf16}")
        cells.append(str(row.needles))
        for name in ("logits", "next_step"):
            cells.append(f"{read(raw[name][0]):.2e} / {raw[name][1]:.2e}" if name in raw else "-")
        cells.append("-" if row.logit_std is None else f"{row.logit_std:.1f}")
        failed = [name for name, passed in row.checks.items() if not passed]
        shown = " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{row.context[0]:>7} {shown}  {'FAILED ' + ', '.join(failed) if failed else 'ok'}")
    longest = max(rows, key=lambda row: row.context[0])
    if longest.free_flips is not None:
        told = f"{longest.free_flips} sets of experts differ, bfloat16's {longest.free_flips_bf16}"
        lines.append(f"free-running, {longest.context[0]} tokens: {told}")
    return "\n".join(lines)
