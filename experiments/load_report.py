"""Rows of loaded servers, a table of them, and the ratio of one engine to another that generated as much.

Each engine is measured once, ours before vLLM's: a ratio is of one pass each, and has no interval.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from experiments.baselines.vllm_process import missing
from experiments.load_client import Answer, Client
from experiments.load_figures import as_many, base_of, raw_load
from experiments.server_process import Running, our_server, vllm_server
from experiments.unread import require_router
from mk.config import Config
from mk.engines.choice import require_engine
from mk.errors import MkError
from mk.results.rows import Row
from mk.results.runs import RunFolder

BAR = 1.25  # ours by vLLM's average decode throughput, of requests that run beside each other
ONCE = "one pass each, ours first: no interval"
Measure = Callable[["Engine"], None]


class Engine:
    """A server that runs, its client, and the rows of this run so far. Lives as long as the server does."""

    def __init__(self, cfg: Config, run: RunFolder, running: Running, rows: list[Row]) -> None:
        self.client = Client(running.base_url, cfg.experiment.timeout_s)
        self.name = str(running.fields["engine"])
        self._run, self._running, self._rows = run, running, rows
        self._named = cfg.experiment.base_url is not None

    def append_load(
        self, answers: Sequence[Answer], asked: Sequence[int], parallel: int, card: Any, **fields: Any
    ) -> None:
        """Writes and prints the row of a workload. asked: tokens of each answer. card: its state before and after."""
        raw = raw_load(answers, asked, parallel) | {"card": card}
        base = next((row for row in self._rows if row.workload == fields["workload"]), None)
        if base is not None and as_many(raw, self._run.raw_of(base)):
            raw |= base_of(self._run.raw_of(base))
            fields["ratio_to"] = base.digest
        print(line(self.append(raw, **fields)), flush=True)

    def append(self, raw: dict[str, Any], **fields: Any) -> Row:
        """Writes a row whose figures are what `raw` gives."""
        raw = raw | {"log": self._running.lines}
        if self._named:
            fields["model"] = self.client.model
        row = self._run.append_row(self._run.measured(raw, **self._running.fields, **fields), raw)
        self._rows.append(row)
        return row


def measure_engines(
    cfg: Config,
    run: RunFolder,
    missing: str | None,
    measure: Measure,
    show: Callable[[Sequence[Row]], str] | None = None,
    parsers: bool = False,
) -> int:
    """Has each configured server started, measured and stopped, and prints a table.

    missing: of `check_engines`. show: another table than `table`. parsers: whether vLLM is to find thoughts and calls
    in its answers, for which it keeps chunks back.

    Returns the exit status: 1 where a check failed, or vLLM did.
    """
    rows: list[Row] = []
    notes = []
    for name, start in _servers(cfg, run, missing is None, parsers).items():
        try:
            with start() as running:
                measure(Engine(cfg, run, running, rows))
        except MkError as error:
            if name != "vLLM":
                raise
            notes.append(f"vLLM: {error}")
    print("\n".join(["", (show or table)(rows), *notes, *filter(None, [missing]), f"run folder: {run.path}"]))
    return int(bool(notes) or not all(all(row.checks.values()) for row in rows))


def check_engines(cfg: Config) -> str | None:
    """A line on how to install vLLM where it is wanted and not configured.

    Raises MkError for a routing mode, an engine that cannot run here, and a vLLM that is configured and not there.
    """
    require_router(cfg)
    if cfg.experiment.base_url is not None:
        return None
    require_engine(cfg, cfg.server.slots)
    return None if cfg.baseline.vllm is None else missing(cfg.baseline.vllm)


def _servers(
    cfg: Config, run: RunFolder, vllm: bool, parsers: bool
) -> dict[str, Callable[[], AbstractContextManager[Running]]]:
    """How to start each; nothing is yet."""
    settings = cfg.experiment
    if settings.base_url is not None:
        return {"served": lambda: _named_server(settings.base_url)}
    found = {"ours": lambda: our_server(cfg, run.path / "server.log", settings.start_s)}
    if vllm and cfg.baseline.vllm is not None:
        config = cfg.baseline.vllm
        if not parsers:
            config = dataclasses.replace(config, reasoning_parser=None, tool_parser=None)
        theirs = dataclasses.replace(cfg, baseline=dataclasses.replace(cfg.baseline, vllm=config))
        found["vLLM"] = lambda: vllm_server(theirs, run.path / "vllm.log")
    return found


@contextlib.contextmanager
def _named_server(base_url: str) -> Iterator[Running]:
    """One that runs already, and does not say what it computes with."""
    yield Running(base_url, {"engine": "served", "dtype": "unknown"})


def line(row: Row) -> str:
    """Of the table."""
    shown = (row.tok_s, row.ttft_ms, row.ttft_p99_ms, row.itl_p50_ms, row.itl_p99_ms, row.tpot_ms, row.active_batch)
    cells = "".join(f"{'-' if value is None else f'{value:.2f}':>10}" for value in shown)
    hits = "-" if row.hit_tokens is None else str(row.hit_tokens)
    counts = f"{row.wall_s:9.1f}{row.usage_prompt_tokens:9}{hits:>9}{row.usage_completion_tokens:9}"
    failed = [name for name, passed in row.checks.items() if not passed]
    return f"{row.workload:16}{row.engine:12}{counts}{cells}" + f"  FAILED: {', '.join(failed)}" * bool(failed)


def table(rows: Sequence[Row]) -> str:
    """A line a workload and engine, what follows from two of them, and what vLLM settled on."""
    heads = ("tokens/s", "TTFT ms", "p99", "ITL ms", "p99", "TPOT ms", "active")
    counts = f"{'wall s':>9}{'prompt':>9}{'cached':>9}{'tokens':>9}"
    lines = [f"{'workload':16}{'engine':12}{counts}" + "".join(f"{head:>10}" for head in heads)]
    rows = sorted(rows, key=lambda row: [each.workload for each in rows].index(row.workload))
    lines += [line(row) for row in rows]
    theirs = [row for row in rows if row.engine == "vllm"]
    for row in theirs:
        if row.ratio is None:
            lines.append(f"{row.workload}: no ratio, the engines did not take and generate as many tokens")
            continue
        verdict = f", {'' if row.ratio >= BAR else 'NOT '}at least {BAR}" if row.agent is None else ""
        lines.append(f"{row.workload}: {row.ratio:.3f} x vLLM's tokens a second{verdict} ({ONCE})")
    if theirs:
        names = ("version", "attention_backend", "moe_backend", "moe_table", "graph_mode", "compile_mode")
        said = ", ".join(f"{name} {getattr(theirs[0], name) or 'not said'}" for name in names)
        weights = f"{theirs[0].weights}{', alike' if theirs[0].same_weights is False else ', the same'}"
        lines.append(f"vLLM: {said}; weights: {weights}")
    return "\n".join(lines)
