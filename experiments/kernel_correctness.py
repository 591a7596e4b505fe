"""Measure every layer's contributions against float32, beside transformers in bfloat16, and look for needle keys.

A layer gets the same bf16 input, bf16 history and expert ids in three arms (`experiments/layer_arms.py`); attention and
FFN are measured apart, before they are added to the residual. The kernel may be at most `DISTANCE_BAR` times as far
from float32 as transformers' own layer. History is noise whose scores have the standard deviation `logit_std`: with
scores near zero attention would be an average, and a wrong one would hide. Then single keys must be returned
(`experiments/needles.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.device_weights import open_weights, pack
from experiments.distances import chosen_layers, distance, worst_ratio
from experiments.kernel_checks import OneLayer
from experiments.kernel_figures import raw_layer
from experiments.layer_arms import (
    EXPERTS_IMPLEMENTATION,
    Arm,
    History,
    InterpreterArm,
    KernelArm,
    ReferenceArm,
    TransformersArm,
)
from experiments.needles import passes, place, returned, turned_away, with_needles
from experiments.opening import machine_under_test, make_runtime, plan_for
from experiments.unread import require_greedy, require_router
from mk.config import Config
from mk.kernel.build import build_for
from mk.kv import KINDS, KVCache, PageAllocator, blocks_of, pages_of
from mk.model.geometry import Geometry
from mk.model.reference import Reference
from mk.model.tensors import WeightSource
from mk.programs import Programs, bucket_for
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.splits import SplitPolicy

ENOUGH_KEYS = 64  # of a context whose scores are counted


@dataclass(slots=True)
class Batch:
    """Contexts that run together: their machine, and the residual as the layers before have left it, bf16."""

    keys: list[int]
    tested: Arm
    x: Tensor  # [rows, hidden]

    @property
    def active(self) -> list[int]:
        return [row for row, keys in enumerate(self.keys) if keys]


@dataclass(frozen=True, slots=True)
class Measured:
    """One layer of one batch. Errors are relative distances from float32, one a row: (tested, bfloat16)."""

    attention: list[tuple[float, float]]
    ffn: list[tuple[float, float]]
    logit_std: float | None  # None: no row has enough keys in sight
    needles: int
    lost: list[str]  # needles that were not returned, or were where they must not be

    @property
    def raw(self) -> dict[str, Any]:
        return raw_layer(self.attention, self.ffn, self.logit_std, self.needles, len(self.lost))


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when a verdict is no."""
    require_router(cfg)  # whose choice for float32 is replayed
    require_greedy(cfg)
    engine = machine_under_test(cfg, max(map(len, cfg.experiment.batches)))
    device = torch.device("cuda" if engine == "cuda" else "cpu")
    settings, source = cfg.experiment, open_weights(cfg, device)
    g = source.geometry
    chosen = chosen_layers(settings.layers, g)
    with torch.inference_mode():
        batches, split_by, build_hash = _batches(cfg, source, engine, device)
        with RunFolder.create(cfg) as run:
            rows = []
            layers = OneLayer(source, device)
            for layer in range(max(chosen) + 1):
                layers.forget()
                exact = ReferenceArm(Reference(g, layers.get))
                rounded = TransformersArm(g, layers.get, layer, device) if layer in chosen else None
                for index, (batch, splits) in enumerate(zip(batches, split_by, strict=True)):
                    generator = torch.Generator(device).manual_seed(settings.seed + 1000 * layer + index)
                    found = measure(g, batch, layer, exact, rounded, splits, settings.logit_std, generator)
                    if found is not None:
                        row = _row(run, batch, layer, found, build_hash)
                        rows.append(run.append_row(row, found.raw))
                        print(line(rows[-1], found), flush=True)
            print(f"\n{table(rows)}\nrun folder: {run.path}")
    return 0 if all(all(row.checks.values()) for row in rows) else 1


def _batches(
    cfg: Config, source: WeightSource, engine: str, device: torch.device
) -> tuple[list[Batch], list[SplitPolicy], str | None]:
    """The batches with their machines, how they split attention, and the library's hash where there is one."""
    g, plan, contexts = source.geometry, plan_for(cfg, engine), cfg.experiment.batches
    programs = [Programs(g, len(keys), plan).get(bucket_for(max(keys))) for keys in contexts]
    longest = max(max(keys) for keys in contexts)
    # the batches take turns in one pool: each writes the history of a layer before it runs the layer
    caches = [pages_of(g, keys) for keys in contexts]
    pages = {kind: max(count[kind] for count in caches) for kind in KINDS}
    allocators = [PageAllocator(g, pages, len(keys), blocks_of(longest), cfg.experiment.seed) for keys in contexts]
    for allocator, keys in zip(allocators, contexts, strict=True):
        for row, length in enumerate(keys):
            if length:
                allocator.reserve(row, length)
    weights, build_hash = pack(source, device), None
    machines: list[Arm]
    if engine == "cuda":
        library = build_for(cfg, g, plan.splits)
        build_hash = library.build_hash
        runtime = make_runtime(cfg, library, weights, pages, blocks_of(longest), longest)
        machines = [
            KernelArm(runtime, program, allocator.table, keys)
            for program, allocator, keys in zip(programs, allocators, contexts, strict=True)
        ]
    else:
        host = weights.to("cpu")
        kv = KVCache(g, pages["full"], pages["sliding"])
        machines = [
            InterpreterArm(host, kv, program, allocator.table, keys)
            for program, allocator, keys in zip(programs, allocators, contexts, strict=True)
        ]
    embed = Reference(g, source.tensor).embed
    batches = []
    for keys, machine in zip(contexts, machines, strict=True):
        tokens = torch.randint(g.vocab, (len(keys),), generator=torch.Generator().manual_seed(cfg.experiment.seed))
        batches.append(Batch(keys, machine, embed(tokens).to(device, torch.bfloat16)))
    return batches, [program.shape.splits for program in programs], build_hash


def measure(
    g: Geometry,
    batch: Batch,
    layer: int,
    exact: ReferenceArm,
    rounded: TransformersArm | None,
    splits: SplitPolicy,
    logit_std: float,
    generator: torch.Generator,
) -> Measured | None:
    """One layer of a batch, whose residual goes on to the next. Without `rounded` nothing but that is done."""
    queries = {row: exact.queries(layer, batch.x[row], batch.keys[row]) for row in batch.active}
    history = {row: _history(g, batch.keys[row], queries[row], logit_std, generator) for row in batch.active}
    outputs = {row: exact.row(layer, batch.x[row], history[row]) for row in batch.active}
    found = None
    if rounded is not None:
        routed = torch.zeros(len(batch.keys), max(1, g.top_k), dtype=torch.int64, device=batch.x.device)
        routed[:] = torch.arange(max(1, g.top_k))
        for row, out in outputs.items():
            if out.expert_ids is not None:
                routed[row] = out.expert_ids[0]
        ids = routed if g.mlp_kinds[layer] == "sparse" else None
        for row in batch.active:
            batch.tested.set_history(layer, row, history[row])
        ours = batch.tested.run(layer, batch.x, ids)
        attention, ffn = [], []
        for row, out in outputs.items():
            theirs = rounded.run(batch.x[row, None], history[row], None if ids is None else ids[row, None])
            attention.append((distance(ours.attention[row], out.attention), distance(theirs.attention, out.attention)))
            ffn.append((distance(ours.ffn[row], out.ffn), distance(theirs.ffn, out.ffn)))
        count, lost = _needles(g, batch, layer, splits, queries, history, ids)
        found = Measured(attention, ffn, _logit_std(g, layer, queries, history), count, lost)
    for row, out in outputs.items():
        batch.x[row] = (batch.x[row].float() + (out.attention[0] + out.ffn[0])).bfloat16()
    return found


def _history(g: Geometry, keys: int, queries: Tensor, logit_std: float, generator: torch.Generator) -> History:
    """Noise behind a context: a score, 128 products over sqrt(128), has the deviation of q times that of K."""
    shape = (g.kv_heads, keys - 1, g.head_dim)
    std = logit_std / queries.square().mean().sqrt()
    k, v = (torch.randn(shape, generator=generator, device=queries.device) for _ in range(2))
    return History((k * std).bfloat16(), v.bfloat16())


def _logit_std(g: Geometry, layer: int, queries: dict[int, Tensor], history: dict[int, History]) -> float | None:
    """The smallest standard deviation of scores of any row that sees enough keys."""
    found = []
    for row, held in history.items():
        window = g.window_keys - 1 if g.layer_kinds[layer] == "sliding" else held.tokens
        keys = held.keys[:, max(0, held.tokens - window) :].float()
        if keys.shape[1] >= ENOUGH_KEYS:
            grouped = queries[row].unflatten(0, (g.kv_heads, g.group))
            found.append(float((grouped @ keys.transpose(-1, -2) * g.head_dim**-0.5).std()))
    return min(found, default=None)


def _needles(
    g: Geometry,
    batch: Batch,
    layer: int,
    splits: SplitPolicy,
    queries: dict[int, Tensor],
    history: dict[int, History],
    ids: Tensor | None,
) -> tuple[int, list[str]]:
    """How many needles were looked for, and those that were not returned, or returned from out of sight."""
    count, lost = 0, []
    for turn in range(passes(g, splits, layer, batch.keys)):
        needles = {row: place(g, splits, layer, batch.keys[row], turn) for row in batch.active}
        needled = {row: with_needles(history[row], queries[row], needles[row]) for row in batch.active}
        for row in batch.active:
            batch.tested.set_history(layer, row, needled[row])
        batch.tested.run(layer, batch.x, ids)
        for row in batch.active:
            count += len(needles[row])
            for needle in returned(batch.tested.heads[row].to(batch.x.device), needled[row], needles[row]):
                lost.append(f"row {row} head {needle.head} key {needle.position} of {batch.keys[row]}")
    away = {row: turned_away(history[row], queries[row], layer) for row in batch.active}
    for row, (turned, _) in away.items():
        batch.tested.set_history(layer, row, turned)
    batch.tested.run(layer, batch.x, ids)
    for row, (_, heads) in away.items():
        for kv_head, head in enumerate(heads):
            count += 1
            if not torch.equal(batch.tested.heads[row, head], batch.tested.values[row, kv_head]):
                lost.append(f"row {row} head {head} its own key, after {batch.keys[row] - 1}")
    return count, lost


def _row(run: RunFolder, batch: Batch, layer: int, found: Measured, build_hash: str | None) -> Row:
    return run.measured(
        found.raw,
        engine=batch.tested.name,
        dtype="bfloat16",
        batch=len(batch.keys),
        context=batch.keys,
        routing="replay",
        build_hash=build_hash,
        schedule_hash=batch.tested.executed_hash(),
        layer=layer,
        experts_implementation=EXPERTS_IMPLEMENTATION,
    )


def line(row: Row, found: Measured) -> str:
    failed = [name for name, passed in row.checks.items() if not passed]
    lost = f" ({'; '.join(found.lost[:3])})" if found.lost else ""
    verdict = f"FAILED {', '.join(failed)}{lost}" if failed else "ok"
    std = "-" if found.logit_std is None else f"{found.logit_std:.1f}"
    return (
        f"layer {row.layer:>2} rows {row.batch}: attention {worst_ratio(found.attention):.2f}, "
        f"ffn {worst_ratio(found.ffn):.2f} x bfloat16's, scores {std}, {found.needles} needles: {verdict}"
    )


def table(rows: Sequence[Row]) -> str:
    """A line a batch: the worst of its layers."""
    columns = ((10, "attention"), (9, "bf16"), (6, "ratio"), (9, "ffn"), (9, "bf16"), (6, "ratio"))
    head = " ".join(name.rjust(width) for width, name in columns)
    lines = [f"{'contexts':<44} {'layers':>6} {head}  layers that failed"]
    for contexts in dict.fromkeys(tuple(row.context) for row in rows):
        own = [row for row in rows if tuple(row.context) == contexts]

        def most(name: str, of: list[Row] = own) -> float:
            return max((getattr(row, name) if getattr(row, name) is not None else torch.inf) for row in of)

        failed = [f"{row.layer}" for row in own if not all(row.checks.values())]
        cells = (
            f"{most('attention_error'):>10.2e} {most('attention_error_bf16'):>9.2e} {most('attention_ratio'):>6.2f} "
        )
        cells += f"{most('ffn_error'):>9.2e} {most('ffn_error_bf16'):>9.2e} {most('ffn_ratio'):>6.2f}"
        lines.append(f"{', '.join(map(str, contexts)):<44} {len(own):>6} {cells}  {', '.join(failed) or '-'}")
    return "\n".join(lines)
