"""Every operation of a decode step alone, on the kernel and by torch, in CUDA graphs over all layers.

A sweep runs one operation in every layer that has it, so that weights and KV come from memory; before each the L2 is
read full of something else. The kernel's operations are parts of a step (mk/schedule/cut.py), launched on what a whole
step has left in memory: those that need the routing make it again, top-k included. Bytes are those that the operation
must read. torch computes on noise of the same shapes, from memory layouts of its own choice. A ratio stands only where
both do the same from the same inputs: what torch does in one and the kernel in two waves is timed as one
(experiments/op_parts.py), and each wave alone has no ratio. To the kernel's cost, products apply the norm and every
wave of experts its own top-k. Without a card the kernel's operations are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments import op_simulated, op_torch
from experiments.decode_throughput import KV_STD, check_steps, open_runtime, plans, require_card
from experiments.device_weights import hold_weights
from experiments.forced_routing import distinct_experts, forced_ids
from experiments.kernel_checks import fill, same_bits
from experiments.op_figures import COLUMNS, line, told
from experiments.op_parts import chosen, operations_of
from experiments.unread import require_greedy
from mk.config import Config
from mk.errors import MkError
from mk.kernel.build import build_for
from mk.kernel.launches import OperationLaunches
from mk.kv import KINDS, PageAllocator
from mk.model.opening import geometry_of
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.schedule.cut import cut
from mk.schedule.lower import Program

DEVICE = torch.device("cuda")
FLUSH = 4  # times the L2 that is read between sweeps


def main(cfg: Config) -> int:
    """Exit status 0; whatever is wrong is an MkError."""
    check_steps(cfg)
    require_greedy(cfg)
    if forced_ids(cfg.routing, geometry_of(cfg.model), 1, 1) is None:
        raise MkError(f"op_bench needs to know the experts, not routing={cfg.routing.name}", hint="routing=uniform")
    names = chosen(cfg)
    if not torch.cuda.is_available():
        return op_simulated.run(cfg, names)
    require_card(cfg)
    held = hold_weights(cfg, DEVICE)
    g = held.source.geometry
    programs, routes = plans(cfg, g)
    library = build_for(cfg, g, programs[1].shape.splits)
    runtime = open_runtime(cfg, library, held.packed, launches="operations")
    assert isinstance(runtime, OperationLaunches)
    flush = torch.zeros(FLUSH * (cfg.gpu.l2_mb or 1) * 2**18, device=DEVICE)
    with RunFolder.create(cfg) as run:
        print(line(*COLUMNS), flush=True)
        for batch in cfg.experiment.batches:
            ids = routes[batch]
            assert ids is not None
            bench = KernelOperations(cfg, runtime, programs[batch], ids[0], flush)
            inputs = op_torch.Inputs(g, [cfg.experiment.context] * batch, ids[0], DEVICE)
            for name in names:
                own = bench.row(run, name, library.build_hash)
                for method, alike in op_torch.METHODS.get(name, {}).items():
                    torch_row(cfg, run, inputs, name, method, own if alike else None, bench, flush)
        print(f"run folder: {run.path}")
    return 0


class KernelOperations:
    """The operations of one program, ready to be timed: a step in one launch and one in parts left the same bits."""

    def __init__(self, cfg: Config, runtime: OperationLaunches, program: Program, ids: Tensor, flush: Tensor) -> None:
        """ids: experts of each layer, int32 [layers, MAX_ROWS, top_k] on the CPU. Raises MkError for other bits."""
        self.cfg, self.runtime, self.program, self.flush = cfg, runtime, program, flush
        self.operations = operations_of(program)
        g, rows, self.context = runtime.geometry, program.shape.rows, cfg.experiment.context
        self.experts = sum(distinct_experts(ids[None, :, :rows], g)) / max(1, len(g.sparse_layers))
        self.ids = ids.to(runtime.device)
        counts = {kind: len(runtime[f"pool_{kind}"]) for kind in KINDS}
        pages = PageAllocator(g, counts, rows, runtime.max_blocks, seed=0)
        for row in range(rows):
            pages.reserve(row, self.context)
        fill(runtime, KV_STD)
        runtime.stream.wait_stream(torch.cuda.current_stream())
        logits = []
        for whole in (cut(program), program):
            runtime.load(whole)
            runtime.set_tables(pages.table.table)
            runtime.set_sequences([self.context] * rows, [7 % g.vocab] * rows)
            runtime.force_routing(self.ids)
            runtime.launch()
            runtime.finish()
            runtime.require_healthy(f"batch {rows}")
            logits.append(runtime["logits"][:rows].clone())
        if not same_bits(*logits):
            raise MkError(f"batch {rows}: part by part, a step leaves other logits than in one launch")
        self.schedule_hash = runtime.executed_hash()

    def row(self, run: RunFolder, name: str, build_hash: str) -> tuple[Row, list[float]]:
        """Writes an operation's row; with its times."""
        layers, runtime, rows = self.operations[name], self.runtime, self.program.shape.rows
        settings = self.cfg.experiment
        runtime.choose([part for parts in layers for part in parts])
        runtime.set_sequences([self.context] * rows)  # which stay as they are
        launch = runtime.launcher(lambda step: None, settings.warmup + settings.steps)
        with torch.cuda.stream(runtime.stream):
            times = sweeps(launch, self.flush, settings.warmup, settings.steps)
        runtime.finish()
        raw = {"kind": "operation", "sweep_ms": times, "runs": len(layers), "experts": self.experts}
        row = run.measured(
            raw,
            engine="cuda",
            dtype="bfloat16",
            batch=rows,
            context=[self.context] * rows,
            kernel=name,
            build_hash=build_hash,
            schedule_hash=self.schedule_hash,
            checks={"schedule_verified": True, "bits_of_the_step": True},
        )
        row = run.append_row(row, raw)
        print(told(row, "kernel"), flush=True)
        return row, times


def torch_row(
    cfg: Config,
    run: RunFolder,
    inputs: op_torch.Inputs,
    name: str,
    method: str,
    own: tuple[Row, list[float]] | None,
    bench: KernelOperations,
    flush: Tensor,
) -> None:
    """Writes the row of an operation by torch; one that it cannot do here is named and has none. own: the kernel's row
    and times, None where the two do not do the same."""
    settings = cfg.experiment
    try:
        work = op_torch.runs(name, method, inputs)
        replay = graphed(work)
        times = sweeps(lambda step: replay(), flush, settings.warmup, settings.steps)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        print(f"not measured: {name} by torch, {method}: {str(error).splitlines()[0]}", flush=True)
        return
    if len(work) != len(bench.operations[name]):
        raise MkError(f"{name}: torch has {len(work)} layers of it, the program {len(bench.operations[name])}")
    raw: dict[str, Any] = {"kind": "operation", "sweep_ms": times, "runs": len(work), "experts": bench.experts}
    axes = {"batch": inputs.rows, "context": list(inputs.contexts), "kernel": name, "method": method}
    if own is not None:
        base, raw["base_sweep_ms"] = own
        axes["ratio_to"] = base.digest
    row = run.measured(raw, engine="torch", dtype="bfloat16", build_hash=None, **axes)
    print(told(run.append_row(row, raw), f"torch {method}"), flush=True)


def graphed(work: Sequence[op_torch.Run]) -> Callable[[], object]:
    """What runs all of it once, as one CUDA graph."""
    work[0]()  # libraries set themselves up outside of a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        for each in work:
            each()
    return graph.replay


def sweeps(launch: Callable[[int], object], flush: Tensor, warmup: int, count: int) -> list[float]:
    """Milliseconds of launches on the current stream, after `warmup` ones, each after the L2 was read full."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for step in range(warmup + count):
        flush.sum()  # clean lines: nothing is left to be written back while the launch runs
        begin, end = events[max(0, step - warmup)]
        begin.record()
        launch(step)
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]
