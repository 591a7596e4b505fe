"""Arms of a comparison: they differ in the ablated axes alone, each executes something else; and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mk.config import Config, resolved
from mk.errors import MkError
from mk.results.kept import EXECUTED, leaves_of, within
from mk.results.rows import Row
from mk.results.step_figures import Ratio

# what decode_throughput reads of a configuration
READ = (*EXECUTED, "gpu", "engine.name", "experiment.context", "experiment.steps", "experiment.warmup",
        "experiment.check_tokens", "experiment.launches")  # fmt: skip


def require_read(override: str) -> None:
    """Raises MkError for an override of a variant that would change nothing of what runs."""
    key = override.partition("=")[0]
    if key != "engine" and not within(key, READ):
        raise MkError(f"experiment.variants: {override}: decode_throughput does not read {key}")


def require_axes(axes: Sequence[str], jobs: Sequence[tuple[str, Config]]) -> None:
    """Raises MkError for an axis that is no key, and for a key in which two variants differ beyond the axes."""
    (first, base), *others = [(label, dict(leaves_of(resolved(job)))) for label, job in jobs]
    keys = {*base}.union(*(leaves for _, leaves in others))
    for axis in axes:
        if not any(within(key, [axis]) for key in keys):
            raise MkError(
                f"experiment.axes: {axis} is no key of the configuration", hint="python run.py --cfg job lists them"
            )
    for label, leaves in others:
        apart = [key for key in {*base, *leaves} if base.get(key) != leaves.get(key)]
        beyond = sorted(key for key in apart if not within(key, axes))
        if beyond:
            raise MkError(
                f"{label!r} and {first!r} differ in {beyond[0]}, and experiment.axes={list(axes)}",
                hint="one axis a comparison, or add to experiment.axes",
            )


def require_apart(executed: Mapping[str, str], batch: int) -> None:
    """executed: a hash of descriptors, ids, build and launch by arm. Raises MkError where two execute the same."""
    seen: dict[str, str] = {}
    for label, what in executed.items():
        if what in seen:
            raise MkError(f"batch {batch}: {seen[what]!r} and {label!r} execute the same")
        seen[what] = label


def table(found: dict[str, list[Row]], batches: Sequence[int], to: str = "the first") -> str:
    """A line a variant and batch: p50, share of the nominal bandwidth, experts, and the ratio; `to`: which variant."""
    width = max([len("variant"), *map(len, found)])
    lines = [f"{'variant':{width}} {'batch':>5} {'p50 ms':>9} {'%':>5} {'experts':>8}  to {to} [95 %]"]
    for batch in batches:
        for label, rows in found.items():
            for row in rows:
                if row.batch == batch:
                    figures = f"{row.p50_ms:9.4f} {row.pct_nominal:5.1f} {row.distinct_experts:8.2f}"
                    bound = "  (a bound)" if row.bound else ""
                    lines.append(f"{label:{width}} {batch:5} {figures}  {effect(row)}{bound}")
    return "\n".join(lines)


def effect(row: Row) -> str:
    """The ratio in words that claim no more than its interval."""
    if row.ratio is None:
        return "-"
    if row.ratio_low is None or row.ratio_high is None:
        return f"{row.ratio:.4f}"
    interval = f"[{row.ratio_low:.4f}, {row.ratio_high:.4f}]"
    if not Ratio(row.ratio, row.ratio_low, row.ratio_high).detectable:
        return f"no detectable difference {interval}"
    return f"{row.ratio:.4f} {interval}"
