"""Run part of a decode step on the kernel and compare each wave with the interpreter's numerics=kernel.

Both machines start a wave from the buffers that the interpreter left behind the wave before, so a difference belongs to
the wave that shows it. Without a card the tested machine is a second interpreter in another interleaving, which must
give the same bits. `experiment.dump=true` keeps what every wave wrote, by unit, for a look with numpy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from experiments.device_weights import open_weights, pack
from experiments.distances import figure, largest, number
from experiments.opening import machine_under_test, make_runtime, plan_for
from experiments.unread import require_greedy, require_router
from mk.config import Config
from mk.errors import MkError
from mk.interpreter import Machine
from mk.interpreter.memory import Memory
from mk.isa import Buffer
from mk.kernel.build import build_for
from mk.kv import KVCache, blocks_of
from mk.model.tensors import WeightSource
from mk.parts import (
    InterpreterWorker,
    KernelWorker,
    StepInput,
    Tolerances,
    WaveResult,
    Worker,
    compare_waves,
    fields,
    synthetic_pages,
)
from mk.parts.compare import Difference
from mk.parts.fields import Mask
from mk.programs import Programs, bucket_for
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.schedule.cut import before, waves_of
from mk.schedule.lower import Program


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when a wave differs by more than the noise."""
    settings = cfg.experiment
    require_router(cfg)
    require_greedy(cfg)
    engine = machine_under_test(cfg, len(settings.contexts))
    source = open_weights(cfg, torch.device("cuda" if engine == "cuda" else "cpu"))
    g, keys = source.geometry, settings.contexts
    if max(keys) > g.max_positions:
        raise MkError(f"experiment.contexts={keys}: the model has {g.max_positions} positions")
    whole = Programs(g, len(keys), plan_for(cfg, engine)).get(bucket_for(max(keys)))
    try:
        earlier = before(whole, settings.start_at)
        parts = waves_of(whole, settings.start_at, settings.stop_after)
    except MkError as error:
        raise MkError(_full_keys(str(error)), hint=_full_keys(error.hint or "") or None) from error
    expected, tested, build_hash = _machines(cfg, engine, source, whole)
    pages = expected.kv.allocator(len(keys), blocks_of(max(keys)), settings.seed)
    synthetic_pages(expected.kv, pages, keys, settings.seed, settings.kv_std)
    tokens = torch.randint(g.vocab, (len(keys),), generator=torch.Generator().manual_seed(settings.seed)).tolist()
    inputs = StepInput(keys, tokens, pages.table)
    if earlier is not None:
        expected.run(earlier, inputs)
    with RunFolder.create(cfg) as run:
        print(
            f"{cfg.model.name}, weights {source.label}: {tested.name} against interpreter, contexts {keys}", flush=True
        )
        dump: dict[str, np.ndarray] = {}
        results = []
        allowed = Tolerances(g, exact=engine != "cuda")
        for result in compare_waves(parts, expected, tested, inputs, allowed, _keep(dump) if settings.dump else None):
            results.append(result)
            print("\n".join(lines(result)), flush=True)
        if settings.dump:
            np.savez_compressed(run.path / "waves.npz", **dump)
        waves = [[of.name, of.executed, [raw_difference(d) for d in of.differences]] for of in results]
        raw = {"kind": "waves", "waves": waves}
        row = run.measured(
            raw,
            engine=tested.name,
            dtype="bfloat16",
            context=keys,
            batch=len(keys),
            build_hash=build_hash,
        )
        run.append_row(row, raw)
        failed = [result.name for result in results if not result.passed]
        print(f"{len(results)} waves, {len(failed)} beyond the noise{': ' if failed else ''}{', '.join(failed)}")
        print(f"run folder: {run.path}")
    return 1 if failed else 0


def _machines(cfg: Config, engine: str, source: WeightSource, whole: Program) -> tuple[Worker, Worker, str | None]:
    """The interpreter, the machine that is compared with it, and the hash of the kernel's library where it is that."""
    g, settings, longest = source.geometry, cfg.experiment, max(cfg.experiment.contexts)
    weights = pack(source, torch.device("cuda" if engine == "cuda" else "cpu"))
    host = weights.to("cpu")
    caches = [KVCache.for_contexts(g, whole.shape.rows, longest) for _ in range(2)]
    expected = InterpreterWorker(Machine(host, caches[0], "kernel", settings.seed), whole.shape)
    if engine == "interpreter":
        other = Machine(host, caches[1], "kernel", settings.seed + 1)
        return expected, InterpreterWorker(other, whole.shape), None
    library = build_for(cfg, g, whole.shape.splits)
    runtime = make_runtime(cfg, library, weights, caches[1].pages, blocks_of(longest), longest)
    return expected, KernelWorker(runtime, whole.shape, caches[1]), library.build_hash


def raw_difference(of: Difference) -> list[Any]:
    """Its fields in their order, numbers to six digits, null where one is not finite."""
    return [number(value) if isinstance(value, float) else value for value in dataclasses.astuple(of)]


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Row` from the differences of each wave; one that stays in the SMs has none."""
    results = [
        WaveResult(name, [Difference(*(math.nan if x is None else x for x in of)) for of in differences], executed)
        for name, executed, differences in raw["waves"]
    ]
    schedules = hashlib.sha256("".join(result.executed for result in results).encode()).hexdigest()[:16]
    worst = largest([d.worst for result in results for d in result.differences] or [0.0])
    passed = all(result.passed for result in results)
    checks = {"schedule_verified": True, "waves_within_noise": passed}  # a program that is refused is never loaded
    found = {"waves": len(results), "worst_of_tolerance": figure(worst)}
    return {**found, "schedule_hash": schedules, "checks": checks}


def _full_keys(text: str) -> str:
    """A message about a cut, with its keys as they are given on the command line."""
    return re.sub(r"\b(start_at|stop_after)=", r"experiment.\1=", text)


def _keep(dump: dict[str, np.ndarray]) -> Callable[[Program, Memory, dict[Buffer, Mask]], None]:
    """Collects what the tested machine wrote, `<wave>/<buffer>/<field>`: the field's array, NaN where it did not."""

    def look(part: Program, memory: Memory, units: dict[Buffer, Mask]) -> None:
        assert part.cut is not None
        every = np.arange(part.shape.rows)
        for buffer, mask in units.items():
            for field in fields(memory, buffer):
                values = np.where(field.mask(mask, every), field.values, np.float32(np.nan))
                dump[f"{part.cut.name}/{buffer.name}/{field.name}"] = values

    return look


def lines(result: WaveResult) -> list[str]:
    """A line a field: elements, how many differ, the largest difference, and it in units of what is allowed."""
    if not result.differences:
        return [f"{result.name:<22} stays in the SMs: rmsnorm shows it"]
    text = []
    for d in result.differences:
        verdict = "" if d.passed else "  FAILED" + f", {d.unmatched} written by one side only" * bool(d.unmatched)
        where = f"{result.name:<22} {d.buffer:<11} {d.field:<19}"
        text.append(f"{where} {d.elements:>8} {d.unequal:>7} {d.largest:>10.2e} {d.worst:>6.2f}{verdict}")
    return text
