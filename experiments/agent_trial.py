"""A coding agent at work over our server and vLLM's: OpenCode, Cline or Aider over bundled tasks, or a recording.

agent=opencode, cline or aider runs that program headless, a fresh folder a task, and a row says whether the task's own
test passed, and what the server was asked for it (experiments/agents/task.py). agent=replay sends a recorded
conversation to each engine, so that all do the same work (experiments/agents/replay.py). Transcripts lie in the run
folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from experiments import load
from experiments.agents.replay import rehearse, replay
from experiments.agents.task import Task, run_task, version_of
from experiments.agents.trace import Trace
from experiments.device_weights import open_weights
from experiments.load_report import Engine, check_engines, measure_engines
from mk.config import Config
from mk.errors import MkError
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.sampling import SamplingParams

WARM_TOKENS, CONTINUED_TOKENS = 8, 301  # generated, and of the continuation's own


def main(cfg: Config) -> int:
    """Exit status: 0, also where no vLLM is configured; 1 where a check failed, or vLLM did. Success is no check."""
    if cfg.agent.name == "none":
        raise MkError("agent_trial needs an agent", hint="agent=opencode, cline, aider or replay")
    if cfg.agent.name == "replay":
        trace = Trace.load(Path(cfg.agent.trace or ""))
        return trial(cfg, partial(rehearse, cfg, trace), lambda run, engine: replay(cfg, run, trace, engine))
    version = version_of(cfg.agent)  # before minutes of a server's start
    tasks = [Task.load(name) for name in cfg.experiment.tasks]

    def work(run: RunFolder, engine: Engine) -> None:
        for task in tasks:
            print(line(run_task(cfg, run, engine, task, version)), flush=True)

    return trial(cfg, partial(warm, cfg), work, table)


def trial(
    cfg: Config,
    prepare: Callable[[Engine], None],
    work: Callable[[RunFolder, Engine], None],
    show: Callable[[Sequence[Row]], str] | None = None,
) -> int:
    missing = check_engines(cfg)

    def measure(engine: Engine) -> None:
        if cfg.experiment.warm:
            prepare(engine)
        work(run, engine)

    with RunFolder.create(cfg) as run:
        return measure_engines(cfg, run, missing, measure, show, parsers=show is not None)


def warm(cfg: Config, engine: Engine) -> None:
    """A prompt and its continuation, which share nothing with what comes."""
    settings = cfg.experiment
    vocab = open_weights(cfg, torch.device("cpu")).geometry.vocab
    draw = np.random.default_rng(settings.seed)
    warming = load.request(draw, settings.warm, WARM_TOKENS, vocab, SamplingParams())
    engine.client.ask(load.COMPLETIONS, warming)
    more = load.request(draw, CONTINUED_TOKENS, WARM_TOKENS, vocab, SamplingParams())
    engine.client.ask(load.COMPLETIONS, more | {"prompt": warming["prompt"] + more["prompt"]})


def line(row: Row) -> str:
    """Of the table."""
    shown = (row.ttft_ms, row.itl_p50_ms, row.itl_p99_ms, row.wall_s)
    cells = "".join(f"{'-' if value is None else f'{value:.2f}':>10}" for value in shown)
    hits = "-" if row.hit_tokens is None else str(row.hit_tokens)
    counts = f"{row.turns:7}{row.usage_prompt_tokens:9}{hits:>9}{row.usage_completion_tokens:9}"
    failed = [name for name, passed in row.checks.items() if not passed]
    said = "passed" if row.success else "failed"
    return f"{row.workload:16}{row.engine:12}{said:8}{counts}{cells}  {row.ended}" + (
        f"  FAILED: {', '.join(failed)}" * bool(failed)
    )


def table(rows: Sequence[Row]) -> str:
    """A line a task and engine."""
    heads = "".join(f"{head:>10}" for head in ("TTFT ms", "ITL ms", "p99", "wall s"))
    counts = f"{'turns':>7}{'prompt':>9}{'cached':>9}{'tokens':>9}"
    lines = [f"{'task':16}{'engine':12}{'test':8}{counts}{heads}  ended", *map(line, rows)]
    for engine in dict.fromkeys(row.engine for row in rows):
        own = [row for row in rows if row.engine == engine]
        solved = sum(bool(row.success) for row in own)
        lines.append(f"{own[0].agent} {own[0].agent_version} over {engine}: {solved} of {len(own)} tasks")
    return "\n".join(lines)
