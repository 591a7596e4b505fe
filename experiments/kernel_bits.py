"""Hold the logits of one sequence to the same bits: whatever runs beside it, in which row, and by which schedule.

The probe is one sequence in the middle of its context; a step of it is run alone, and then in every arrangement that
must not change a bit: again and again, in each row of a full batch, beside single neighbours of other lengths, by every
wave order and schedule, with another program at every step, with counters about to wrap, with NaN in all that a step
has to write first, and with the SMs held up at random. Where no SM owns a strip of the residual, the experts' parts
are added in another order (`moe_combine`): those placements have bits of their own, and all of them the same. On a
CPU the interpreter stands for the kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from experiments.bits_machines import BitsMachine, InterpreterBits, KernelBits
from experiments.device_weights import open_weights, pack
from experiments.opening import machine_under_test, make_runtime, plan_for
from experiments.unread import require_greedy, require_router
from mk.compose import group_options, load_config
from mk.config import Config
from mk.errors import MkError
from mk.kernel.build import build_for
from mk.kernel.runtime import DELAYS
from mk.kv import KVCache, PageAllocator, blocks_of, pages_of
from mk.model.geometry import Geometry
from mk.programs import Plan, Programs, bucket_for
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.schedule.lower import Program
from mk.schedule.placement import OWNING, PLACEMENTS

WRAPS = (2**31 - 3, 2**32 - 3)  # epochs three steps before a counter's sign and its range change
WRAP_STEPS = 6
QUIET_STEPS = 5  # of the library with delays, without any
HELD_UP = 1.05  # of a quiet step's time, that a delayed one takes at least
OWNED, SHARED = "owned", "shared"  # who adds the experts' parts: a strip's owner, or moe_combine
GROUPS = {
    **dict.fromkeys(("repeat", "rows", "neighbours", "schedules", "switching", "epochs", "poisoned", "delays"), OWNED),
    "shared": SHARED,  # the other placements, by both schedules and between switches
}


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when an arrangement changed a bit."""
    settings = cfg.experiment
    rows = 1 + len(settings.neighbours)
    require_router(cfg)
    require_greedy(cfg)
    engine = machine_under_test(cfg, rows)
    if cfg.placement.name != "row_owner":
        raise MkError(f"kernel_bits goes through placements by itself, from row_owner, not {cfg.placement.name}")
    bench = Bench.open(cfg, engine)
    with RunFolder.create(cfg) as run:
        digests: dict[str, list[str]] = {group: [] for group in GROUPS}
        bases = {SHARED: bench.alone(bench.shared_plans()[0][1]), OWNED: bench.alone()}
        executed = bench.machine.executed_hash()
        print(f"{bench.machine.name}: {settings.context} keys beside {settings.neighbours}: {bases}", flush=True)
        for group, what, found in bench.arrangements():
            digests[group].append(found)
            if found != bases[GROUPS[group]]:
                print(f"{group}, {what}: {found}, not {bases[GROUPS[group]]}", flush=True)
        raw = {"kind": "bits", "bases": bases, "digests": digests, **bench.held_up}
        row = run.measured(
            raw,
            engine=bench.machine.name,
            dtype="bfloat16",
            context=[settings.context, *settings.neighbours],
            batch=rows,
            build_hash=bench.build_hash,
            schedule_hash=executed,
        )
        run.append_row(row, raw)
        print(table(row, raw))
        print(f"run folder: {run.path}")
    return 0 if all(row.checks.values()) else 1


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Row`: a group of arrangements passes if it has any and all of them gave the probe's own bits."""
    bases, digests = raw["bases"], raw["digests"]
    # a schedule that is refused is never loaded
    checks = {"schedule_verified": True, "logits_finite": "not finite" not in bases.values()}
    for group, adds in GROUPS.items():
        checks[f"bits_{group}"] = bool(digests[group]) and all(found == bases[adds] for found in digests[group])
    if raw.get("quiet_ms"):  # delays that delay nothing would prove nothing
        checks["held_up"] = median(raw["delayed_ms"]) > HELD_UP * median(raw["quiet_ms"])
    return {"steps": sum(map(len, digests.values())), "checks": checks}


def table(row: Row, raw: dict[str, Any]) -> str:
    """A line a group."""
    lines = [f"{'arrangements':<14} {'steps':>6} {'other bits':>11}"]
    for group, adds in GROUPS.items():
        found, base = raw["digests"][group], raw["bases"][adds]
        lines.append(f"{group:<14} {len(found):>6} {sum(one != base for one in found):>11}")
    return "\n".join(lines)


@dataclass
class Bench:
    """Sequences with pages of their own, and machines to step them. Sequence 0 is the probe."""

    cfg: Config
    geometry: Geometry
    plan: Plan
    machine: BitsMachine
    disturbed: BitsMachine  # of the same pages and weights, that can be held up at random
    build_hash: str | None
    pages: PageAllocator
    keys: list[int]
    tokens: list[int]
    held_up: dict[str, list[float]] = field(default_factory=lambda: {"quiet_ms": [], "delayed_ms": []})
    _programs: dict[tuple[Plan, int], Programs] = field(default_factory=dict)

    @classmethod
    def open(cls, cfg: Config, engine: str) -> Bench:
        """Packs the weights and fills the pages. Raises MkError for contexts that the model cannot have."""
        settings = cfg.experiment
        device = torch.device("cuda" if engine == "cuda" else "cpu")
        source = open_weights(cfg, device)
        g, keys = source.geometry, [settings.context, *settings.neighbours]
        if max(keys) > g.max_positions:
            raise MkError(f"contexts of {keys} keys: the model has {g.max_positions} positions")
        counts = pages_of(g, keys)
        pages = PageAllocator(g, counts, len(keys), blocks_of(max(keys)), settings.seed)
        for slot, length in enumerate(keys):
            pages.reserve(slot, length)
        tokens = torch.randint(g.vocab, (len(keys),), generator=torch.Generator().manual_seed(settings.seed)).tolist()
        weights, plan, build_hash = pack(source, device), plan_for(cfg, engine), None
        machine: BitsMachine
        disturbed: BitsMachine
        if engine == "cuda":
            library, slow = build_for(cfg, g, plan.splits), build_for(cfg, g, plan.splits, DELAYS)
            build_hash = library.build_hash
            machine, disturbed = (
                KernelBits(
                    make_runtime(cfg, of, weights, counts, blocks_of(max(keys)), max(keys)), settings.seed, delays_ns
                )
                for of, delays_ns in ((library, 0), (slow, settings.delays_ns))
            )
        else:
            host = weights.to("cpu")
            machine = disturbed = InterpreterBits(host, KVCache(g, counts["full"], counts["sliding"]), settings.seed)
        return cls(cfg, g, plan, machine, disturbed, build_hash, pages, keys, tokens)

    def alone(self, plan: Plan | None = None) -> str:
        """The probe's step by itself, which all those that add up the experts alike are compared with."""
        self.machine.load(self.program(1, plan))
        return self.step([0], 0)

    def program(self, rows: int, plan: Plan | None = None) -> Program:
        """The verified program of `rows` rows of a plan, the configured one by default."""
        made = self._programs.setdefault((plan or self.plan, rows), Programs(self.geometry, rows, plan or self.plan))
        return made.get(bucket_for(max(self.keys)))

    def step(self, sequences: Sequence[int], row: int, machine: BitsMachine | None = None) -> str:
        """One step of the loaded program with these sequences in its rows; what `row` gives."""
        keys, tokens = ([of[sequence] for sequence in sequences] for of in (self.keys, self.tokens))
        return (machine or self.machine).step(keys, tokens, self.pages.table.rows(sequences), row)

    def rotated(self, row: int) -> list[int]:
        """All sequences, the probe in `row`."""
        count = len(self.keys)
        return [(place - row) % count for place in range(count)]

    def arrangements(self) -> Iterator[tuple[str, str, str]]:
        """(group, what it is, digest) of every arrangement. Groups are in the order of their needs for programs."""
        settings, count = self.cfg.experiment, len(self.keys)
        for turn in range(settings.repeats):
            yield "repeat", f"turn {turn}", self.step([0], 0)
        self.machine.poison()
        yield "poisoned", "alone", self.step([0], 0)
        for epoch in WRAPS:
            self.machine.load(self.program(1), epoch)
            for turn in range(WRAP_STEPS):
                yield "epochs", f"{epoch} + {turn}", self.step([0], 0)
        self.machine.load(self.program(2))
        for other in range(1, count):
            yield "neighbours", f"{self.keys[other]} keys", self.step([0, other], 0)
        self.machine.load(self.program(count))
        for row in range(count):
            yield "rows", f"row {row}", self.step(self.rotated(row), row)
        self.machine.poison()
        yield "poisoned", "full batch", self.step(self.rotated(0), 0)
        owned, shared = self.owned_plans(), self.shared_plans()
        for group, plans in (("schedules", owned), ("shared", shared)):
            for turn, (name, plan) in enumerate(plans):
                self.machine.load(self.program(count, plan))
                yield group, name, self.step(self.rotated(turn % count), turn % count)
        changing = [("switching", plan) for _, plan in owned[:: max(1, len(owned) // 4)]]
        changing += [("shared", plan) for _, plan in shared[-1:]]
        for turn in range(settings.switches):
            group, plan = changing[turn % len(changing)]
            self.machine.load(self.program(1, plan))
            yield group, f"switch {turn}", self.step([0], 0)
        self.disturbed.load(self.program(count))
        for turn in range(QUIET_STEPS):
            yield "repeat", f"quiet {turn}", self.step(self.rotated(0), 0, self.disturbed)
            self._note("quiet_ms")
        for seed in range(1, settings.delays + 1):
            self.disturbed.disturb(seed)
            yield "delays", f"seed {seed}", self.step(self.rotated(seed % count), seed % count, self.disturbed)
            self._note("delayed_ms")
        self.disturbed.disturb(0)

    def _note(self, which: str) -> None:
        if self.disturbed.step_ms is not None:
            self.held_up[which].append(self.disturbed.step_ms)

    def owned_plans(self) -> list[tuple[str, Plan]]:
        """Every wave order by both schedules where strips of the residual are owned."""
        orders = [name for name in group_options("wave_order") if name != "custom"]
        return [choice for order in orders for choice in self._both_schedules(order, "row_owner")]

    def shared_plans(self) -> list[tuple[str, Plan]]:
        """The other placements by both schedules, in the default order."""
        placements = [name for name in PLACEMENTS if name not in OWNING]
        return [choice for placement in placements for choice in self._both_schedules("default", placement)]

    def _both_schedules(self, order: str, placement: str) -> Iterator[tuple[str, Plan]]:
        waves = tuple(load_config([f"wave_order={order}"]).wave_order.waves)
        for claimers in (0, self.plan.n_sm):
            plan = dataclasses.replace(
                self.plan,
                wave_order=waves,
                placement=placement,
                attention_claimers=claimers,
                moe_claimers=claimers,
                claim_ahead=2,
                costs=None,
            )
            yield f"{'work_stealing' if claimers else 'static'} {order} {placement}", plan
