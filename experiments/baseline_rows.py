"""Rows of another engine's decode steps beside the kernel's, and the table of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mk.config import Config
from mk.model.opening import geometry_of
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.results.step_figures import experts_agree, median_ratio, raw_steps, step_figures


def append_beside(
    job: Config,
    run: RunFolder,
    kernel: Row,
    step_ms: Sequence[float],
    experts_by_layer: Sequence[float],
    more_raw: Mapping[str, Any],
    **fields: Any,
) -> Row:
    """Writes another engine's row at the kernel's batch and context, with its ratio to the kernel's where both touched
    as many experts, within 2 %. fields: of `Row`, `engine` among them; experts_by_layer: empty where uncounted."""
    run, g, engine = run.under(job), geometry_of(job.model), fields["engine"]
    counted = list(experts_by_layer) if len(experts_by_layer) == len(g.sparse_layers) else []
    raw = raw_steps(list(step_ms), counted)
    figures = step_figures(g, job.gpu, list(kernel.context), raw)
    ratio = {}
    if experts_agree(figures.get("distinct_experts"), kernel.distinct_experts):
        raw |= {"kernel_step_ms": run.raw_of(kernel)["step_ms"]}
        of = median_ratio(raw["step_ms"], raw["kernel_step_ms"])
        ratio = {"ratio": of.ratio, "ratio_low": of.low, "ratio_high": of.high, "ratio_to": kernel.digest}
    checks = {"experts_counted": bool(counted), **fields.pop("checks", {})}
    planned = dict.fromkeys(("schedule", "wave_order", "placement"), engine)
    row = run.row(
        dtype="bfloat16", batch=kernel.batch, context=list(kernel.context), checks=checks, **planned, **fields,
        **figures, **ratio,
    )  # fmt: skip
    return run.append_row(row, {**raw, **more_raw})


def comparison(pairs: Sequence[tuple[Row, Row | None]], name: str) -> str:
    """A line a routing, context and batch; no ratio where the experts do not agree, and why. name: of the other
    engine."""
    other_ms = f"{name} ms"
    head = f"{'routing':12}{'keys':>8}{'batch':>6}{'kernel ms':>11}{'experts':>9}"
    head += f"{other_ms:>{max(10, len(other_ms) + 2)}}"
    lines = [f"{head}{'experts':>9}  {name} / kernel [95 %]"]
    for kernel, other in pairs:
        line = f"{kernel.routing:12}{kernel.context[0]:8}{kernel.batch:6}"
        line += f"{kernel.p50_ms:11.4f}{kernel.distinct_experts:9.2f}"
        if other is None:
            lines.append(f"{line}{'missing':>{len(head) - len(line)}}")
            continue
        counted = "-" if other.distinct_experts is None else f"{other.distinct_experts:.2f}"
        line += f"{other.p50_ms:{len(head) - len(line)}.4f}{counted:>9}  "
        if other.ratio is None:
            line += "no ratio: experts differ" if other.distinct_experts else "no ratio: experts not counted"
        else:
            line += f"{other.ratio:.3f} [{other.ratio_low:.3f}, {other.ratio_high:.3f}]"
        lines.append(line + (f"  unstable: {other.unstable}" if other.unstable else ""))
    return "\n".join(lines)
