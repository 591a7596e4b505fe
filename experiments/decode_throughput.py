"""Time decode steps of the CUDA kernel, after checking each batch's own program on the same library and weights.

Synthetic KV at a mean context, batch after batch, steps queued ahead with tokens fed back on the device. The last
step's tokens must be what the sampler's Python twin draws from the kernel's logits. A row counts its bytes from the
experts that top-k published, and is refused when the checks fail or the figures cannot be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from experiments import simulated_variants
from experiments.decode_rows import Timing, append_row, line, table
from experiments.device_clock import queued
from experiments.device_weights import HeldWeights, hold_weights
from experiments.forced_routing import distinct_experts, forced_ids
from experiments.kernel_checks import Outcome, fill, run_checks
from experiments.opening import make_runtime, sampling_of
from experiments.settings.decode import DecodeThroughput
from experiments.unread import require_kernel
from mk.config import Config
from mk.device import DeviceFacts
from mk.errors import MkError
from mk.kernel.build import DEPENDENT_LAUNCH, ZERO_WAIT_DEFINE, Library, build_for
from mk.kernel.runtime import Runtime
from mk.kernel.step_params import MAX_ROWS
from mk.kernel.trace import StepTrace, causes_table, records_of
from mk.kv import KINDS, PageAllocator, blocks_of
from mk.model.geometry import Geometry
from mk.model.opening import geometry_of
from mk.model.packing import PackedWeights
from mk.programs import Plan, Programs, bucket_for
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.ring import MIN_WINDOW, SLOT_KB, UNSAFE_SLOTS, window_for
from mk.routing import Trace
from mk.sampling import SamplingParams, sample_row
from mk.schedule.lower import Program

KV_STD = 0.01
SPARE_PAGES = 8  # that no sequence gets; they hold NaN while steps are timed
DEVICE = torch.device("cuda")


def main(cfg: Config) -> int:
    """Exit status 0; whatever is wrong is an MkError. Without a card steps are simulated."""
    if not torch.cuda.is_available():
        check_settings(cfg)
        if cfg.experiment.trace:
            print("experiment.trace: there is none without a card")
        return simulated_variants.run(cfg, [(simulated_variants.ALONE, cfg)], zero_wait=cfg.experiment.zero_wait)
    run(cfg)
    return 0


def run(cfg: Config, within: RunFolder | None = None) -> list[Row]:
    """A row a batch, written to a run folder of its own or to that of the run that this is a part of.

    Raises MkError for what cannot be measured, a check that fails and figures that cannot be.
    """
    check(cfg)
    settings = cfg.experiment
    bench = Bench.open(cfg)
    with _folder(cfg, within) as folder:
        bench.check()
        rows = []
        for batch in settings.batches:
            timing = bench.measure(batch)
            rows.append(bench.append(folder, batch, timing))
            print(line(rows[-1]), flush=True)
            if cfg.routing.name == "checkpoint":
                record(bench.runtime.geometry, timing, batch, folder)
        if settings.zero_wait:
            rows += bounds(bench, folder)
        if settings.trace:
            for batch in settings.batches:
                _trace(cfg, folder, bench.runtime.weights, bench.programs[batch], bench.routes[batch])
        print(f"\n{table(cfg, rows)}\nrun folder: {folder.path}")
    return rows


@dataclass
class Bench:
    """A configuration on the card, ready to be timed. outcomes: of the checks, by batch."""

    cfg: Config
    held: HeldWeights
    library: Library
    programs: dict[int, Program]
    routes: dict[int, Tensor | None]
    runtime: Runtime
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    @classmethod
    def open(cls, cfg: Config) -> Bench:
        """Lowers and verifies the programs of batch 1 and the configured ones, builds, and fills the card's memory."""
        held = hold_weights(cfg, DEVICE)
        programs, routes = plans(cfg, held.source.geometry)
        more = (DEPENDENT_LAUNCH,) if cfg.experiment.launches == "dependent" else ()
        library = build_for(cfg, held.source.geometry, programs[1].shape.splits, *more)
        spilled = f"{library.registers} registers, {library.spill_bytes} bytes spilled"
        print(f"library {library.build_hash}: {spilled}", flush=True)
        records = max(map(records_of, programs.values())) if cfg.engine.trace != "none" else 0
        return cls(cfg, held, library, programs, routes, open_runtime(cfg, library, held.packed, records))

    def check(self) -> None:
        """The checks of every batch's own program. Raises MkError when one fails."""
        settings = self.cfg.experiment
        self.outcomes = _check(self.runtime, self.held, self.programs, settings.batches, settings.check_tokens)

    def measure(self, batch: int, block: int = 0, blocks: int = 1) -> Timing:
        """The configured steps, or the `block`-th of `blocks` equal parts of them, with experts of their own."""
        settings, routes = self.cfg.experiment, self.routes[batch]
        steps = settings.steps // blocks
        if routes is not None:
            first = block * steps
            routes = routes[first : first + settings.warmup + steps]
        sampling = configured_sampling(self.cfg, batch)
        lengths = settings.context, steps, settings.warmup
        return measure(self.runtime, self.programs[batch], routes, sampling, *lengths)

    def executed(self, batch: int) -> str:
        """A hash of all that a step's execution depends on, but for what top-k finds out by itself."""
        ids = self.routes[batch]
        routed = "" if ids is None else hashlib.sha256(ids.numpy().tobytes()).hexdigest()
        library, settings, window = self.library, self.cfg.experiment, window_for(self.cfg.engine.ring.windows, batch)
        said = self.programs[batch].schedule_hash, library.build_hash, library.defines, window, routed
        asked = configured_sampling(self.cfg, batch), settings.context, settings.launches
        return hashlib.sha256(repr((*said, *asked)).encode()).hexdigest()[:16]

    def append(self, run: RunFolder, batch: int, timing: Timing, raw: Mapping[str, Any] = MappingProxyType({}),
               **more: Any) -> Row:  # fmt: skip
        """Writes the batch's row to this configuration's part of a run; raw, more: further raw data and fields."""
        bound = "oracle" if self.cfg.routing.name == "oracle" else None
        program, outcome = self.programs[batch], self.outcomes.get(batch)
        return append_row(self.cfg, run.under(self.cfg), self.library, program, timing, outcome, bound, raw, more)


def record(g: Geometry, timing: Timing, batch: int, run: RunFolder) -> Path:
    """Leaves in the run folder what the router chose, and returns the file: for routing=replay."""
    path = run.path / f"routing_batch{batch}.npz"
    Trace(g.sparse_layers, timing.ids[:, list(g.sparse_layers)].numpy()).save(path)
    return path


def plans(cfg: Config, geometry: Geometry) -> tuple[dict[int, Program], dict[int, Tensor | None]]:
    """By batch: the verified program, and the expert ids of the warm-up and the timed steps, None the router's own."""
    settings = cfg.experiment
    plan = Plan.from_config(cfg)
    bucket = bucket_for(settings.context + settings.steps)
    draws = not configured_sampling(cfg, 1)[0].greedy
    programs = {rows: Programs(geometry, rows, plan).get(bucket, draws) for rows in {1, *settings.batches}}
    total = settings.warmup + settings.steps
    return programs, {rows: forced_ids(cfg.routing, geometry, rows, total) for rows in settings.batches}


def job_of(cfg: Config, **settings: object) -> Config:
    """A configuration of an experiment that times such steps, as this one takes it: what it has no field of is off.
    settings: fields to change."""
    own: dict[str, Any] = {"launches": "step", "zero_wait": False, "trace": False}
    for name in (of.name for of in dataclasses.fields(DecodeThroughput)):
        if hasattr(cfg.experiment, name):
            own[name] = getattr(cfg.experiment, name)
    own |= {"name": "decode_throughput", **settings}
    return dataclasses.replace(cfg, experiment=DecodeThroughput(**own))


def _folder(cfg: Config, within: RunFolder | None) -> contextlib.AbstractContextManager[RunFolder]:
    return RunFolder.create(cfg) if within is None else contextlib.nullcontext(within)


def _check(
    runtime: Runtime, held: HeldWeights, programs: dict[int, Program], batches: list[int], length: int
) -> dict[int, Outcome]:
    """Outcomes of the batches' own programs, all against one pass of the reference. Raises MkError when one fails."""
    oracle = held.oracle(length)
    outcomes: dict[int, Outcome] = {}
    for batch in dict.fromkeys(batches):
        started = time.perf_counter()
        outcome = outcomes[batch] = run_checks(runtime, programs[batch], programs[1], oracle)
        verdicts = ", ".join(name if passed else f"{name} FAILED" for name, passed in outcome.checks.items())
        print(f"batch {batch} checked in {time.perf_counter() - started:.1f} s: {verdicts}")
        for name, (median, most) in (("kernel", outcome.error), ("bfloat16", outcome.error_bf16)):
            print(f"  logits off float32, {name}: median {median:.2e}, at most {most:.2e}", flush=True)
        outcome.require()
    return outcomes


def check(cfg: Config, name: str | None = None) -> None:
    """Refuses what this experiment cannot measure, or not here, before anything is loaded. name: of the experiment
    that was asked for, where it is another one."""
    check_settings(cfg, name)
    require_card(cfg, name)


def require_card(cfg: Config, name: str | None = None) -> None:
    """Raises MkError where the configured card is not here. name: as of `check`."""
    if not torch.cuda.is_available():
        raise MkError(
            f"{name or cfg.experiment.name} needs a GPU, and torch sees none here",
            hint="experiment=quickstart executes the same descriptors on a CPU, in the interpreter",
        )
    DeviceFacts.read().require(cfg.gpu)


def check_settings(cfg: Config, name: str | None = None) -> None:
    """Raises MkError for settings that cannot be timed, on any machine. name: as of `check`."""
    check_steps(cfg, name)
    s = cfg.experiment
    if s.launches != "step" and (s.zero_wait or s.trace or cfg.engine.trace != "none"):
        raise MkError(
            f"experiment.launches={s.launches} has neither a bound nor a trace", hint="experiment.launches=step"
        )
    if not 1 <= s.check_tokens <= s.context:
        raise MkError(f"experiment.check_tokens={s.check_tokens} must lie in 1..experiment.context={s.context}")


def check_steps(cfg: Config, name: str | None = None) -> None:
    """Of these, what every experiment that times decode steps has."""
    s, ring = cfg.experiment, cfg.engine.ring
    most = ring.slots - UNSAFE_SLOTS
    require_kernel(cfg, name)
    cases: list[tuple[bool, str, str | None]] = [
        (bool(s.batches), "experiment.batches is empty", "experiment.batches=[1]"),
        (all(1 <= b <= MAX_ROWS for b in s.batches), f"experiment.batches={s.batches} must lie in 1..{MAX_ROWS}", None),
        (s.steps >= 1, f"experiment.steps={s.steps} must be at least 1", None),
        (s.warmup >= 0, f"experiment.warmup={s.warmup} must be at least 0", None),
        (
            all(MIN_WINDOW <= window <= most for window in ring.windows),
            f"engine.ring.window_kb={ring.window_kb}: the kernel takes {MIN_WINDOW * SLOT_KB}..{most * SLOT_KB}",
            None,
        ),
    ]
    for holds, message, hint in cases:
        if not holds:
            raise MkError(message, hint=hint)
    check_context(cfg)


def check_context(cfg: Config) -> None:
    """Raises MkError for a context around which the steps have no room: before it, or in the model's positions."""
    s, positions = cfg.experiment, geometry_of(cfg.model).max_positions
    if s.context <= s.warmup + s.steps // 2:
        raise MkError(
            f"experiment.context={s.context} leaves no room for {s.warmup} + {s.steps} steps around it",
            hint="fewer steps, or a longer context",
        )
    if s.context + s.steps // 2 > positions:
        raise MkError(
            f"experiment.context={s.context}, and {s.steps} steps around it, exceed the {positions} positions of "
            f"model={cfg.model.name}",
            hint=f"experiment.context={positions - s.steps // 2} is the most",
        )


def configured_sampling(cfg: Config, rows: int) -> list[SamplingParams]:
    """The configured parameters of each row."""
    return [sampling_of(cfg, row) for row in range(rows)]


def open_runtime(
    cfg: Config, library: Library, weights: PackedWeights, trace_records: int = 0, launches: str | None = None
) -> Runtime:
    """With pages for every configured batch. launches: a key of RUNTIMES, None = as configured."""
    settings, g = cfg.experiment, weights.geometry
    longest = settings.context + settings.steps
    blocks = blocks_of(longest)
    rows = max(settings.batches)
    # the window, what the steps append, and a page that it straddles at either end
    sliding = min(blocks, blocks_of(g.window_keys + settings.warmup + settings.steps) + 2)
    pages = {"full": rows * blocks + SPARE_PAGES, "sliding": rows * sliding + SPARE_PAGES}
    return make_runtime(cfg, library, weights, pages, blocks, longest, trace_records, launches or settings.launches)


def measure(
    runtime: Runtime,
    program: Program,
    forced: Tensor | None,
    sampling: list[SamplingParams],
    context: int,
    steps: int,
    warmup: int,
    seed: int = 0,
    trusted: bool = True,
) -> Timing:
    """Decode `warmup` + `steps` tokens in every row of the program, the timed ones around `context` keys.

    trusted: whether what is computed must make sense.
    """
    g, rows = runtime.geometry, program.shape.rows
    first = context - (steps - 1) // 2 - warmup
    counts = {kind: len(runtime[f"pool_{kind}"]) for kind in KINDS}
    pages = PageAllocator(g, counts, rows, runtime.max_blocks, seed)
    for row in range(rows):
        pages.reserve(row, first)
        pages.reserve(row, first + warmup + steps - 1)
    fill(runtime, KV_STD, seed)
    with torch.cuda.stream(runtime.stream):
        for kind in KINDS:
            runtime[f"pool_{kind}"][pages.free_pages[kind]] = float("nan")
    ids = None if forced is None else forced.to(runtime.device)
    taken = torch.zeros(warmup + steps, g.layers, MAX_ROWS, max(1, g.top_k), dtype=torch.int32, device=runtime.device)
    runtime.stream.wait_stream(torch.cuda.current_stream())
    runtime.load(program)
    runtime.set_tables(pages.table.table)
    tokens = torch.randint(g.vocab, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()
    runtime.set_sequences([first] * rows, tokens, warmup + steps, sampling)

    def tell(step: int) -> None:
        runtime.force_routing(None if ids is None else ids[step])
        runtime.publish_routing(taken[step])

    launch = runtime.launcher(tell, warmup + steps)
    for step in range(warmup):
        launch(step)
    runtime.finish()
    launched: list[int] = []
    times, wall = queued(lambda step: launched.append(launch(warmup + step)), steps, runtime.finish, runtime.stream)
    if trusted:
        runtime.require_healthy(f"batch {rows}")
    runtime.force_routing(None)
    bits = hashlib.sha256(runtime["logits"][:rows].cpu().numpy().tobytes()).hexdigest()[:16]
    keys, drawn = first + warmup + steps - 1, runtime.tokens_of(launched[-1]).tokens.tolist()
    twin = [sample_row(runtime.logits(row).cpu().numpy(), params, keys) for row, params in enumerate(sampling)]
    routed = taken[:, :, :rows]
    experts = distinct_experts(routed[warmup:], g)
    executed = runtime.executed_hash()
    window_kb = SLOT_KB * runtime.params.window_slots
    return Timing(times, wall, experts, drawn == twin, executed, routed.to("cpu", torch.int16), bits, window_kb)


def bounds(bench: Bench, run: RunFolder, **more: Any) -> list[Row]:
    """A row a batch of the build that waits for no other SM; more: further fields."""
    cfg, some = bench.cfg, bench.programs[1].shape
    settings = cfg.experiment
    library = build_for(cfg, some.geometry, some.splits, ZERO_WAIT_DEFINE)
    runtime = open_runtime(cfg, library, bench.held.packed)
    rows = []
    print("without a wait for any other SM, a bound:", flush=True)
    for batch in settings.batches:
        program, routes, sampling = bench.programs[batch], bench.routes[batch], configured_sampling(cfg, batch)
        lengths = settings.context, settings.steps, settings.warmup
        timing = measure(runtime, program, routes, sampling, *lengths, trusted=False)
        rows.append(append_row(cfg, run.under(cfg), library, program, timing, None, "zero_wait", more=more))
        print(line(rows[-1]), flush=True)
    return rows


def noting(cfg: Config, what: str) -> Config:
    """The same with a kernel that notes `what` (`engine.trace`) of a step."""
    return dataclasses.replace(cfg, engine=dataclasses.replace(cfg.engine, trace=what))


def _trace(cfg: Config, run: RunFolder, weights: PackedWeights, program: Program, forced: Tensor | None) -> None:
    """A few steps of either trace build, and their p50: the last step as a timeline, of the one that notes moments
    alone, and where its time goes, of the other."""
    settings, rows = cfg.experiment, program.shape.rows
    lengths = settings.context, min(settings.steps, 32), settings.warmup
    path = run.path / f"trace_batch{rows}.json"
    for what in ("moments", "waits"):
        library = build_for(noting(cfg, what), program.shape.geometry, program.shape.splits)
        runtime = open_runtime(cfg, library, weights, records_of(program))
        timing = measure(runtime, program, forced, configured_sampling(cfg, rows), *lengths)
        step = StepTrace.read(runtime["trace"])
        print(f"batch {rows}, {what} noted: p50 {timing.p50_ms:.4f} ms", flush=True)
        if what == "moments":
            step.perfetto(path)
        else:
            step.save(path.with_suffix(".npz"))
            print(f"{causes_table(step.causes(), program.shape.geometry.layers)}\ntimeline in {path}\n", flush=True)
