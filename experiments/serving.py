"""Serve two workloads end to end over HTTP, our server and vLLM's in turn, and compare what a client sees.

The same client sends both the same token ids, `batch.size` requests in flight: the next goes out when one has ended.
Each request generates a given number of tokens past any end token, which the server's usage confirms. Each server has a
process of its own and the card alone; experiment.base_url names another server instead. A ratio stands only between
engines that generated as many tokens for each request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from experiments import load
from experiments.baselines import vllm_process
from experiments.baselines.vllm_process import card_state
from experiments.console import progress
from experiments.device_weights import open_weights
from experiments.load_client import Client
from experiments.load_figures import base_of, raw_load
from experiments.server_process import Running, our_server, vllm_server
from mk.config import Config
from mk.engines import require_engine
from mk.errors import MkError
from mk.rows import Row
from mk.runs import RunFolder
from mk.sampling import SamplingParams

BAR = 1.25  # ours by vLLM's average decode throughput
Start = Callable[[], AbstractContextManager[Running]]


def main(cfg: Config) -> int:
    """Exit status: 0, also where no vLLM is configured; 1 where a check failed, or vLLM did."""
    check(cfg)
    rows: dict[str, list[Row]] = {name: [] for name in cfg.experiment.workloads}
    notes = []
    missing = vllm_missing(cfg)
    with RunFolder.create(cfg) as run:
        for name, start in servers(cfg, run, missing is None).items():
            try:
                with start() as running:
                    measure(cfg, run, running, rows)
            except MkError as error:
                if name != "vLLM":
                    raise
                notes.append(f"vLLM: {error}")
        print("\n".join(["", table(rows), *notes, *filter(None, [missing]), f"run folder: {run.path}"]))
    return int(bool(notes) or not all(all(row.checks.values()) for of in rows.values() for row in of))


def check(cfg: Config) -> None:
    """Refuses what cannot be served, before anything is started."""
    settings = cfg.experiment
    if settings.base_url is None:
        require_engine(cfg, cfg.server.slots)
    longest = max(load.longest_of(getattr(settings, name), settings.seed) for name in settings.workloads)
    if longest > cfg.server.context:
        raise MkError(
            f"requests of {longest} tokens exceed server.context={cfg.server.context}", hint=f"server.context={longest}"
        )


def vllm_missing(cfg: Config) -> str | None:
    """A line on how to install vLLM where it was wanted and is not configured.

    Raises MkError where it is configured and not there.
    """
    if cfg.baseline.vllm is None or cfg.experiment.base_url is not None:
        return None
    try:
        vllm_process.find(cfg.baseline.vllm)
    except vllm_process.Missing as error:
        return f"vLLM is missing: {error}; to install it: {error.hint}"
    return None


def servers(cfg: Config, run: RunFolder, vllm: bool) -> dict[str, Start]:
    """How to start each engine's server; nothing is yet."""
    settings = cfg.experiment
    if settings.base_url is not None:
        return {"served": lambda: named_server(settings.base_url)}
    found: dict[str, Start] = {"ours": lambda: our_server(cfg, run.path / "server.log", settings.start_s)}
    if vllm and cfg.baseline.vllm is not None:
        found["vLLM"] = lambda: vllm_server(cfg, run.path / "vllm.log")
    return found


@contextlib.contextmanager
def named_server(base_url: str) -> Iterator[Running]:
    """One that runs already, and does not say what it computes with."""
    yield Running(base_url, {"engine": "served", "dtype": "unknown"})


def measure(cfg: Config, run: RunFolder, running: Running, rows: dict[str, list[Row]]) -> None:
    """Loads a server with each workload, after a warming, and appends a row to each of `rows`."""
    settings, parallel = cfg.experiment, cfg.batch.size
    vocab = open_weights(cfg, "cpu").geometry.vocab
    sampled = cfg.sampling
    sampling = SamplingParams(sampled.temperature, sampled.top_k, sampled.top_p, sampled.seed)
    client = Client(running.base_url, settings.timeout_s)
    fields = dict(running.fields)
    if settings.base_url is not None:
        fields["model"] = client.model
    for name, before in rows.items():
        workload = getattr(settings, name)
        asked = load.bodies(workload, vocab, settings.seed, sampling)
        client.drive(load.COMPLETIONS, load.warming(workload, vocab, settings.seed, parallel), parallel, lambda _: None)
        card = [card_state()]
        with progress(f"{fields['engine']}, {name}", len(asked)) as done:
            answers = client.drive(load.COMPLETIONS, asked, parallel, done)
        raw = raw_load(answers, [body["max_tokens"] for body in asked], parallel)
        raw["card"] = [*card, card_state()]
        raw["log"] = running.lines
        ratio: dict[str, Any] = {}
        base = run.raw_of(before[0]) if before else None
        if base is not None and base["tokens"] == raw["tokens"]:
            raw |= base_of(base)
            ratio["ratio_to"] = before[0].digest
        context = [workload.prompt] * parallel
        requests_hash = load.digest(asked)
        row = run.measured(raw, context=context, workload=name, requests_hash=requests_hash, **fields, **ratio)
        before.append(run.append_row(row, raw))
        print(line(before[-1]), flush=True)


def line(row: Row) -> str:
    """A row of the table."""
    shown = [row.tok_s, row.ttft_ms, row.ttft_p99_ms, row.itl_p50_ms, row.itl_p99_ms, row.tpot_ms, row.active_batch]
    cells = "".join(f"{'-' if value is None else f'{value:.2f}':>11}" for value in shown)
    told = f"{row.workload:10}{row.engine:12}{row.wall_s:9.1f}{row.usage_completion_tokens:9}{cells}"
    failed = [name for name, passed in row.checks.items() if not passed]
    return told + (f"  FAILED: {', '.join(failed)}" if failed else "")


def table(rows: dict[str, list[Row]]) -> str:
    """A line a workload and engine, and what follows from two of them."""
    heads = ("tokens/s", "TTFT ms", "p99", "ITL ms", "p99", "TPOT ms", "active")
    lines = [f"{'workload':10}{'engine':12}{'wall s':>9}{'tokens':>9}" + "".join(f"{head:>11}" for head in heads)]
    lines += [line(row) for of in rows.values() for row in of]
    for name, of in rows.items():
        for row in of[1:]:
            if row.ratio is None:
                lines.append(f"{name}: no ratio, the engines did not generate as many tokens")
                continue
            verdict = "at least" if row.ratio >= BAR else "NOT at least"
            lines.append(f"{name}: {row.ratio:.3f} x {row.engine}'s tokens a second, {verdict} {BAR}")
    for row in (row for of in rows.values() for row in of if row.engine == "vllm"):
        names = ("version", "attention_backend", "moe_backend", "moe_table", "graph_mode", "compile_mode")
        said = ", ".join(f"{name} {getattr(row, name) or 'not said'}" for name in names)
        lines.append(f"vLLM: {said}; weights: {row.weights}, {'the same' if row.same_weights else 'alike'}")
        break
    return "\n".join(lines)
