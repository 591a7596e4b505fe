"""The simulator's constants, fitted to a card:  python -m mk.schedule.fit RUN_FOLDER ...  prints them as YAML.

Run folders are those of decode_throughput and of ablations, in runs/ or kept. Constants of operations, and the steps
from one entry to the next, are read off the traces that `experiment.trace=true` leaves, in units of the plain build's
step; without a trace they stay. What SMs share, and a common factor on the former, is then moved until simulated steps
meet the measured p50 of all folders: so other wave orders and windows among them make the fit better. `tile` hides
behind the consumers and is kept. `orders=a,b` takes rows of these wave orders alone: the others are left to judge by.
It starts from the constants in configs/gpu/ of the card that the rows name, which must be one.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mk.errors import MkError
from mk.isa import ISA
from mk.schedule.costs import Costs, OpCosts
from mk.schedule.measured import Measured, read_folder
from mk.schedule.simulate import costs_of

Floats = npt.NDArray[np.float64]
BARRIER_US = 0.06  # a wait for a slot that is no longer than this is the barrier's own time, and counts as work
WIDE = 1.4  # times the smallest size: what sizes must span before a line is laid through their times
SHARED = {"memory_tb_s": 0.03, "latency": 0.15, "handoff": 0.15, "queued": 0.25, "operations": 0.05}
"""What is moved to meet the p50s, by these shares of itself at first, then by less."""
ROUNDS = 3


def fit_operations(steps: Sequence[Measured], start: Costs) -> Costs:
    """open, slot, close and row of every traced operation, and what lies between entries; the rest stays as it was."""
    entries = _Entries.of([step for step in steps if step.trace is not None], start.launch)
    ops = dict(start.ops)
    for name in sorted(set(entries.op.tolist())):
        chosen = entries.op == name
        before = ops.get(name, OpCosts())
        tiled = bool((entries.tiles[chosen] > 0).any())
        op = dataclasses.replace(before)
        if tiled:
            op.slot, op.open = _line(entries.slots[chosen], entries.work[chosen], before.open)
            op.close = max(0.0, float(np.median(entries.tail[chosen])) - op.tile)
        else:
            op.row, op.close = _line(entries.rows[chosen], entries.alone[chosen], before.close)
        ops[name] = op
    gaps: dict[str, Any] = {name: max(0.0, float(np.nanmedian(values))) for name, values in entries.gaps.items()}
    return dataclasses.replace(start, ops=ops, **gaps)


def _line(x: Floats, y: Floats, known: float) -> tuple[float, float]:
    """(slope, intercept) of medians of y over x, neither below nought; `known`: the latter where x hardly varies."""
    at = np.unique(x)
    medians = np.array([np.nanmedian(y[x == value]) for value in at])
    if at[-1] < WIDE * at[0]:
        known = min(known, float(medians.min()))
        return float(np.mean((medians - known) / at)), known
    slope, intercept = (float(v) for v in np.polyfit(at, medians, 1))
    if intercept < 0:
        return max(0.0, float((at * medians).sum() / (at * at).sum())), 0.0
    return max(0.0, slope), intercept


@dataclass(frozen=True)
class _Entries:
    """Entries of all traces: what they are [n], and how long each role took, in microseconds of the plain build."""

    op: npt.NDArray[np.str_]
    slots: Floats
    tiles: Floats
    rows: Floats
    work: Floats  # consumers, without their waits
    tail: Floats  # storer, from the consumers' end or its own last one
    alone: Floats  # storer, from being let in
    gaps: dict[str, Floats]

    @classmethod
    def of(cls, steps: Sequence[Measured], launch: float) -> _Entries:
        if not steps:
            raise MkError("no run folder holds a trace", hint="experiment=decode_throughput experiment.trace=true")
        parts = [cls._of_step(step, launch) for step in steps]
        joined = {
            f.name: np.concatenate([getattr(p, f.name) for p in parts])
            for f in dataclasses.fields(cls)
            if f.name != "gaps"
        }
        return cls(**joined, gaps={n: np.concatenate([p.gaps[n] for p in parts]) for n in parts[0].gaps})

    @classmethod
    def _of_step(cls, step: Measured, launch: float) -> _Entries:
        trace, work = step.trace, step.work()
        assert trace is not None
        tasks = [task for track in work.tracks[: work.n_sm] for task in track]
        names = {op.opcode: op.name for op in ISA}
        if [task.op for task in tasks] != [names.get(code) for code in trace.opcode.tolist()]:
            raise MkError("a trace is not of the program that its run folder describes", hint="schedule=static")
        # one scale for all: the trace build is slower than the plain one, and its clock need not be exact
        scale = (step.p50_ms * 1e3 - launch) / float(np.nanmax(trace.us["signalled"]))
        us = {name: values * scale for name, values in trace.us.items()}
        first = np.diff(trace.sm, prepend=-1) != 0

        def before(name: str) -> Floats:
            return np.where(first, 0.0, np.roll(us[name], 1))

        slots = np.array([task.slots for task in tasks], np.float64)
        opened = np.where(np.isnan(us["opened"]), us["taken"], us["opened"])
        waited = np.where(us["ring_empty"] > BARRIER_US * slots, us["ring_empty"], 0.0)
        return cls(
            op=np.array([task.op for task in tasks]),
            slots=slots,
            tiles=np.array([task.tiles for task in tasks], np.float64),
            rows=np.full(len(tasks), float(work.rows)),
            work=us["done"] - opened - waited - us["tile_full"],
            tail=us["signalled"] - np.maximum(us["done"], before("signalled")),
            alone=us["signalled"] - us["storing"],
            gaps={
                "next_entry": us["taken"] - np.maximum(before("done"), us["published"]),
                "next_store": us["storing"] - np.maximum(before("signalled"), us["go"]),
                "next_stream": us["stream"] - np.maximum(before("streamed"), us["published"]),
            },
        )


def moved(costs: Costs, name: str, factor: float) -> Costs:
    """One of `SHARED` times a factor."""
    if name != "operations":
        return dataclasses.replace(costs, **{name: getattr(costs, name) * factor})
    scaled = {
        op: OpCosts(**{key: value * factor for key, value in dataclasses.asdict(of).items()})
        for op, of in costs.ops.items()
    }
    return dataclasses.replace(costs, ops=scaled)


def fit_shared(
    costs: Costs, error: Callable[[Costs], float], told: Callable[[float, Costs], None] = lambda error, costs: None
) -> Costs:
    """Coordinate descent on `error` over what is in `SHARED`."""
    best = error(costs)
    for turn in range(ROUNDS):
        for name, share in SHARED.items():
            for direction in (1, -1):
                tried = moved(costs, name, 1 + direction * share * 0.6**turn)
                found = error(tried)
                if found < best:
                    best, costs = found, tried
                    told(best, costs)
                    break
    return costs


def mean_error(steps: Iterable[Measured], costs: Costs) -> float:
    """Mean of |simulated / measured - 1|."""
    return float(np.mean([abs(step.simulated_ms(costs) / step.p50_ms - 1) for step in steps]))


def to_yaml(costs: Costs) -> str:
    """The `costs` block of a file in configs/gpu, three digits a figure."""
    lines = ["costs:"]
    values = dataclasses.asdict(costs)
    for name, value in values.items():
        if name != "ops":
            lines.append(f"  {name}: {value if isinstance(value, list) else format(value, '.3g')}")
    lines.append("  ops:")
    for op, of in values["ops"].items():
        lines.append(f"    {op}: {{{', '.join(f'{name}: {value:.3g}' for name, value in of.items() if value)}}}")
    return "\n".join(lines)


def _usual(step: Measured) -> bool:
    """Whether the step waits as the kernel does: an ablation's that waits more tells less of what a wait costs."""
    return step.ring.run_ahead and not step.plan.barriers


def one_card(steps: Iterable[Measured]) -> str:
    """The card that all rows name. Raises MkError where they name several: constants are of one."""
    cards = sorted({step.row.gpu for step in steps})
    if len(cards) > 1:
        raise MkError(f"rows of {' and '.join(cards)}: constants are fitted to one card", hint="run folders of one")
    return cards[0]


def main(arguments: Sequence[str]) -> int:
    from mk.compose import load_config

    orders = next((a.removeprefix("orders=").split(",") for a in arguments if a.startswith("orders=")), None)
    folders = [Path(a) for a in arguments if not a.startswith("orders=")]
    steps = [step for folder in folders for step in read_folder(folder, print) if _usual(step)]
    steps = [step for step in steps if orders is None or step.row.wave_order in orders]
    if not steps:
        raise MkError("no measured steps", hint="python -m mk.schedule.fit RUN_FOLDER ... [orders=default,parted]")
    costs = costs_of(load_config([f"gpu={one_card(steps)}"]).gpu)
    if any(step.trace for step in steps):
        costs = fit_operations(steps, costs)
    costs = fit_shared(
        costs, lambda tried: mean_error(steps, tried), lambda e, _: print(f"# mean error {e:.2%}", flush=True)
    )
    print(to_yaml(costs))
    for step in steps:
        simulated = step.simulated_ms(costs)
        print(f"# batch {len(step.sample.keys)}: measured {step.p50_ms:.4f} ms, simulated {simulated:.4f}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MkError as error:
        sys.exit(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""))
