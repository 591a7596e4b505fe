"""Rows and lines of experiment=served_step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from experiments.served_rig import Ran, engine_fields
from mk.config import Config
from mk.engines.cuda import CudaEngine
from mk.engines.protocol import PagedEngine
from mk.errors import MkError
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.results.step_figures import MS_DIGITS, raw_steps

TARGET = 1.03  # served steps by the engine's own
US_DIGITS = 2


class Report:
    """Writes a row for each thing that was measured, and tells of it. failed: whether a check has failed."""

    def __init__(self, cfg: Config, run: RunFolder, engine: PagedEngine) -> None:
        self.failed = False
        self._cfg, self._run, self._engine = cfg, run, engine
        self._fields = engine_fields(cfg, engine)
        clock = "the card" if isinstance(engine, CudaEngine) else "the host: there is no card here"
        print(f"engine {engine.name}, weights: {cfg.weights.name}; steps are timed by {clock}")

    def steps(self, batch: int, served: Sequence[float], own: Sequence[float], same: bool) -> None:
        """The engine's own steps, and the served ones, in milliseconds."""
        checks = {"tokens_as_own": same}
        raw = raw_steps(own, [])
        base = self._append(raw, batch=batch, arm="own", checks=checks)
        raw = {**raw_steps(served, []), "kernel_step_ms": raw["step_ms"]}
        row = self._append(raw, batch=batch, arm="served", checks=checks, ratio_to=base.digest)
        assert row.ratio is not None
        verdict = "within" if row.ratio <= TARGET else "NOT within"
        print(
            f"batch {batch}: p50 {row.p50_ms:.4f} ms served, {base.p50_ms:.4f} ms own, of {row.steps} and {base.steps} "
            f"steps; ratio {row.ratio:.4f} ({row.ratio_low:.4f} to {row.ratio_high:.4f}), {verdict} {TARGET}; "
            f"tokens {'are the same' if same else 'DIFFER'}",
            flush=True,
        )

    def interruptions(self, name: str, runs: Sequence[Ran]) -> None:
        """What runs that followed one another cost between them, by kind."""
        found = by_kind(runs)
        if not found:
            raise MkError(f"{name}: nothing was interrupted")
        for kind, (gaps, parks) in found.items():
            if kind not in name:
                continue
            raw = {"kind": "interruption", "gap_us": _rounded(gaps), "park_us": _rounded(parks)}
            row = self._append(raw, batch=self._engine.rows, event=kind)
            line = f"{kind}: the device idles {row.idle_us:.0f} us, median of {row.interruptions}"
            print(line + (f"; from asking to rest {row.park_us:.0f} us" if row.park_us else ""), flush=True)

    def prompt(self, policy: str, gaps: Sequence[float], first_ms: float, last_ms: Sequence[float]) -> None:
        """Milliseconds between tokens of all that ran while a prompt entered, until its own first token, and until the
        last one of each of them."""
        tokens = self._cfg.experiment.prompt
        raw = {"kind": "between_tokens", "gap_ms": [round(ms, MS_DIGITS) for ms in gaps], "first_ms": first_ms}
        raw["last_ms"] = [round(ms, MS_DIGITS) for ms in last_ms]
        row = self._append(raw, batch=self._engine.rows - 1, prompt_tokens=tokens, prefill_policy=policy)
        print(
            f"a prompt of {tokens} enters, {policy}: ITL of {row.batch} others p50 {row.itl_p50_ms:.2f} ms, p99 "
            f"{row.itl_p99_ms:.2f}, most {row.itl_most_ms:.2f}; its first token after {row.ttft_ms:.0f} ms"
            + ("" if row.checks["ran_throughout"] else "; FAILED: not all of them ran until then"),
            flush=True,
        )

    def _append(
        self, raw: dict[str, Any], batch: int, checks: Mapping[str, bool] = MappingProxyType({}), **more: Any
    ) -> Row:
        context = [self._cfg.experiment.short if "event" in more else self._cfg.experiment.context] * batch
        row = self._run.measured(raw, **self._fields, batch=batch, context=context, checks=dict(checks), **more)
        self.failed |= not all(row.checks.values())
        return self._run.append_row(row, raw)


def by_kind(runs: Sequence[Ran]) -> dict[str, tuple[list[float], list[float]]]:
    """Interruptions by what they were for: microseconds that each took beyond a step and a prompt, and of parking."""
    step_us = {
        rows: float(np.median([ms for ran in runs if ran.rows == rows for ms in ran.step_ms])) * 1e3
        for rows in {ran.rows for ran in runs if len(ran.started_ns) > 1}
    }
    found: dict[str, tuple[list[float], list[float]]] = {}
    for kind, before, after in _interruptions(runs):
        if before.rows not in step_us:
            continue
        gaps, parks = found.setdefault(kind, ([], []))
        between = (after.started_ns[0] - before.started_ns[-1]) / 1e3
        gaps.append(between - step_us[before.rows] - after.prefill_us)
        if before.park_us is not None:
            parks.append(before.park_us)
    return found


def _interruptions(runs: Sequence[Ran]) -> Iterator[tuple[str, Ran, Ran]]:
    for before, after in itertools.pairwise(runs):
        if not before.started_ns or not after.started_ns or after.active > before.active + 1:
            continue  # another group of requests
        if after.active > before.active:
            yield "admit", before, after
        elif after.rows != before.rows:
            yield "switch", before, after
        elif after.active < before.active:
            yield "retire", before, after
        elif before.park_us is not None:
            yield "park", before, after


def _rounded(us: Sequence[float]) -> list[float]:
    return [round(one, US_DIGITS) for one in us]
