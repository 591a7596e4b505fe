"""What steps of the smallest built batch gain while requests end one after the other, beside those of the largest.

As many requests as there are slots begin together; each generates some tokens more than the one before. The scheduler
runs on its thread as in the server, without HTTP and without a prefix cache. Arms run in turn, forwards then backwards:
with every batch size of `server.batches`, with `server.slots` alone, and the first again. A round is timed from its
first step to its last, prompts apart, by the card's clock (on a CPU by the host's). All must give the same tokens,
drawn ones too: what a row gets depends on no batch size.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from experiments.arms import effect
from experiments.prompts import sample_prompts
from experiments.served_rig import Bench, engine_fields, opened, require_context
from experiments.unread import require_router
from mk.config import Config
from mk.engines.choice import require_engine
from mk.engines.cuda import CudaEngine
from mk.errors import MkError
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.results.step_figures import MS_DIGITS, block_ratio

SWITCHING, LARGEST, AGAIN = "every size", "the largest alone", "every size (again)"


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 where tokens differ, or the first arm differs from itself by the card's clock."""
    settings = cfg.experiment
    check(cfg)
    with opened(cfg) as (core, tokenizer):
        prompts = sample_prompts(tokenizer, [settings.context] * cfg.server.slots)
        with Bench(cfg, core) as bench, RunFolder.create(cfg) as run:
            rows = append(cfg, run, bench, measured(bench, prompts, settings.stagger, settings.rounds))
            for row in rows:
                print(line(row), flush=True)
            print(f"run folder: {run.path}")
            drifts = rows[0].unstable is not None and isinstance(bench.engine, CudaEngine)
    return int(drifts or not all(row.checks["tokens_the_same"] for row in rows))


def check(cfg: Config) -> None:
    """Refuses what cannot be compared, before anything is loaded."""
    settings, server = cfg.experiment, cfg.server
    require_router(cfg)
    require_engine(cfg, server.slots)
    if len(server.sizes) < 2:
        hint = "server.slots=2 'server.batches=[1]'" if server.slots == 1 else "'server.batches=[1]'"
        raise MkError(f"server.batches has no size beside server.slots={server.slots}", hint=hint)
    require_context(settings.context + settings.stagger * server.slots, server.context)


@dataclasses.dataclass(slots=True)
class Rounds:
    """Of an arm: milliseconds of each, steps by batch size of all of them, and the tokens of each request, once."""

    ms: list[float] = dataclasses.field(default_factory=list)
    steps: Counter[int] = dataclasses.field(default_factory=Counter)
    tokens: list[list[list[int]]] = dataclasses.field(default_factory=list)


def measured(bench: Bench, prompts: Sequence[Sequence[int]], stagger: int, rounds: int) -> dict[str, Rounds]:
    """By arm. A round of each goes before: programs are lowered and brought to the card then."""
    engine = bench.engine
    sizes = {SWITCHING: engine.sizes, LARGEST: engine.sizes[-1:], AGAIN: engine.sizes}
    found = {arm: Rounds() for arm in sizes}
    lengths = [stagger * (row + 1) for row in range(len(prompts))]
    try:
        for number in range(rounds + 1):
            for arm in list(sizes) if number % 2 else list(reversed(sizes)):
                engine.sizes = sizes[arm]
                asked, runs = bench.serve(prompts, lengths)
                began, ended = runs[0].started_ns[0], runs[-1].started_ns[-1]
                found[arm].tokens.append([one.tokens for one in asked])
                if number:
                    found[arm].ms.append(round((ended - began) / 1e6, MS_DIGITS))
                    for ran in runs:
                        found[arm].steps[ran.rows] += len(ran.started_ns)
    finally:
        engine.sizes = sizes[SWITCHING]
    return found


def append(cfg: Config, run: RunFolder, bench: Bench, rounds: dict[str, Rounds]) -> list[Row]:
    """Writes a row an arm."""
    engine, settings, rows = bench.engine, cfg.experiment, cfg.server.slots
    first = rounds[SWITCHING].tokens[0]
    fields: dict[str, Any] = {
        **engine_fields(cfg, engine),
        "batch": rows,
        "context": [settings.context] * rows,
    }
    itself = block_ratio(rounds[AGAIN].ms, rounds[SWITCHING].ms)
    if itself.detectable:
        fields["unstable"] = f"{SWITCHING} differs from itself: ratio {itself.low:.4f} to {itself.high:.4f}"
    written: list[Row] = []
    for arm, of in rounds.items():
        raw: dict[str, Any] = {
            "kind": "draining",
            "block_ms": of.ms,
            "tokens": settings.stagger * rows * (rows + 1) // 2,
            "steps_of": {str(size): count for size, count in sorted(of.steps.items())},
        }
        checks = {"tokens_the_same": all(tokens == first for tokens in of.tokens)}
        more = {"ratio_to": written[0].digest} if written else {}
        if written:
            raw["base_block_ms"] = rounds[SWITCHING].ms
        row = run.measured(raw, arm=arm, checks=checks, **fields, **more)
        written.append(run.append_row(row, raw))
    return written


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """block_ms: from the first step's start to the last one's in each round, in which all requests together get
    `tokens`, but for the first of each and the one of the last step; base_block_ms: of the arm it is compared with,
    round by round; steps_of: steps by batch size."""
    mean_ms = sum(raw["block_ms"]) / len(raw["block_ms"])
    found: dict[str, Any] = {
        "tok_s": (raw["tokens"] - row.batch - 1) / mean_ms * 1e3,
        "wall_s": mean_ms / 1e3,
        "steps": sum(raw["steps_of"].values()),
        "steps_of": raw["steps_of"],
    }
    if "base_block_ms" in raw:
        of = block_ratio(raw["block_ms"], raw["base_block_ms"])
        found |= {"ratio": of.ratio, "ratio_low": of.low, "ratio_high": of.high}
    return found


def line(row: Row) -> str:
    steps = ", ".join(f"{count} of {size}" for size, count in (row.steps_of or {}).items())
    more = "" if row.checks["tokens_the_same"] else "  FAILED: other tokens"
    more += f"  unstable: {row.unstable}" if row.unstable else ""
    return f"{row.arm:20}{row.wall_s:9.3f} s a round{row.tok_s:10.1f} tokens/s  {effect(row)}; steps: {steps}{more}"
