"""What serving adds to a decode step: the served step beside the engine's own, interruptions, and a prompt that enters.

The scheduler runs on its thread as in the server, without HTTP and without a prefix cache; steps are timed from start
to start by the card's clock (on a CPU by the host's). The engine's own steps decode the same tokens in the same
process, in turn with the served ones; tokens that differ fail the run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np

from experiments.device_clock import queued
from experiments.opening import sampling_of
from experiments.prompts import sample_prompts
from experiments.served_report import Report
from experiments.served_rig import Asked, Bench, Ran, opened, require_context
from experiments.settings.serving import ServedStep
from experiments.unread import require_router
from mk.config import Config
from mk.engines.choice import require_engine
from mk.engines.cuda import CudaEngine
from mk.engines.protocol import PagedEngine
from mk.errors import MkError
from mk.kernel.step_params import HOST_STEPS
from mk.results.runs import RunFolder
from mk.sampling import SamplingParams, sample_row

NEWCOMER_TOKENS = 8
SETTLED_TOKENS = 8  # that every request has before another one enters
STAGGER = 6  # steps from one request's end to the next one's
PARK_EVERY = 5  # steps


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 where a check failed."""
    settings = cfg.experiment
    check(cfg)
    with opened(cfg) as (core, tokenizer):
        slots, longest = cfg.server.slots, max(settings.context, settings.prompt)
        prompts = sample_prompts(tokenizer, [longest] * (slots + 1))
        with Bench(cfg, core) as bench, RunFolder.create(cfg) as run:
            report = Report(cfg, run, bench.engine)
            begin = settings.context - settings.steps // settings.rounds // 2
            for batch in settings.batches:
                report.steps(batch, *steps_of(bench, [prompt[:begin] for prompt in prompts[:batch]], settings))
            short = [prompt[: settings.short] for prompt in prompts[:slots]]
            for name, runs in (
                ("park", parks(bench, short, settings.events)),
                ("retire and switch", ends(bench, short, settings.events)),
                ("admit", admissions(bench, short, settings.events)),
            ):
                report.interruptions(name, runs)
            for policy_name in ("pause", "interleave"):
                running = [prompt[: settings.context] for prompt in prompts[: slots - 1]]
                report.prompt(policy_name, *entering(bench, running, prompts[-1][: settings.prompt], policy_name))
            print(f"run folder: {run.path}")
    return int(report.failed)


def check(cfg: Config) -> None:
    """Refuses what cannot be measured, before anything is loaded."""
    settings, server = cfg.experiment, cfg.server
    require_router(cfg)
    require_engine(cfg, server.slots)
    if max(settings.batches) > server.slots or any(batch not in server.sizes for batch in settings.batches):
        raise MkError(
            f"experiment.batches={settings.batches} are not of the sizes {list(server.sizes)} that steps are built for",
            hint=f"server.batches={sorted(settings.batches)} server.slots={max(settings.batches)}",
        )
    if server.slots < 3 or server.slots - 1 in server.sizes:
        raise MkError(
            f"{server.slots - 1} requests and one more must decode in the same batch size, sizes are {server.sizes}",
            hint="server.slots=8 'server.batches=[1,2,4]'",
        )
    if settings.steps // settings.rounds >= HOST_STEPS:
        raise MkError(
            f"a round of {settings.steps // settings.rounds} steps is more than the ring of {HOST_STEPS} holds",
            hint=f"experiment.rounds={settings.steps // HOST_STEPS + 1}",
        )
    require_context(max(settings.context + settings.steps, settings.prompt + NEWCOMER_TOKENS), server.context)


# ---- the served step, and the engine's own ----


def steps_of(
    bench: Bench, prompts: Sequence[Sequence[int]], settings: ServedStep
) -> tuple[list[float], list[float], bool]:
    """Milliseconds of served and of own steps, and whether both gave the same tokens. The first round warms up."""
    steps, rows = settings.steps // settings.rounds, len(prompts)
    sampling = [sampling_of(bench.cfg, row) for row in range(rows)]
    served: list[float] = []
    own: list[float] = []
    same = True
    for number in range(settings.rounds + 1):
        pair: dict[str, list[list[int]]] = {}
        for arm in ("served", "own") if number % 2 else ("own", "served"):
            if arm == "own":
                times, pair[arm] = own_steps(bench.engine, prompts, steps, sampling)
                own += times if number else []
            else:
                # the first token comes with the prompt, and between the starts of n + 1 steps lie n times
                asked, runs = bench.serve(prompts, [steps + 2] * rows)
                pair[arm] = [one.tokens for one in asked]
                served += [ms for ran in runs if ran.active == rows for ms in ran.step_ms] if number else []
        same &= pair["served"] == pair["own"]
    return served, own, same


def own_steps(
    engine: PagedEngine, prompts: Sequence[Sequence[int]], steps: int, sampling: Sequence[SamplingParams]
) -> tuple[list[float], list[list[int]]]:
    """Milliseconds from start to start of `steps` steps after the prompts, without a scheduler, and all tokens."""
    first = [sample_row(engine.prefill(row, prompt), sampling[row], len(prompt)) for row, prompt in enumerate(prompts)]
    keys = [len(prompt) + 1 for prompt in prompts]
    if isinstance(engine, CudaEngine):
        times, sampled = _kernel_steps(engine, first, keys, steps + 1, sampling)
    else:
        times, sampled = _single_steps(engine, first, keys, steps + 1, sampling)
    for row in range(len(prompts)):
        engine.free(row)
    return times, [[token, *more] for token, more in zip(first, sampled.T.tolist(), strict=True)]


def _kernel_steps(
    engine: CudaEngine, tokens: Sequence[int], keys: Sequence[int], steps: int, sampling: Sequence[SamplingParams]
) -> tuple[list[float], np.ndarray]:
    """The kernel's launches as decode_throughput times them, queued as far ahead as they go; of all but the last."""
    runtime = engine.runtime
    for row, length in enumerate(keys):
        engine.pages.reserve(row, length + steps - 1, since=length - 1)
    program = engine.programs[len(keys)].fit(engine.program, max(keys) + steps, not sampling[0].greedy)
    if program is not engine.program:
        runtime.load(program)
    runtime.set_tables(engine.pages.table.table)
    runtime.set_sequences(keys, tokens, steps, sampling)
    launches: list[int] = []
    times, _ = queued(lambda step: launches.append(runtime.launch()), steps, runtime.finish, runtime.stream)
    return times[:-1], np.array([runtime.tokens_of(launch).tokens for launch in launches])


def _single_steps(
    engine: PagedEngine, tokens: Sequence[int], keys: Sequence[int], steps: int, sampling: Sequence[SamplingParams]
) -> tuple[list[float], np.ndarray]:
    """Of an engine without a card, one after the other."""
    started, sampled = [], []
    for step in range(steps):
        started.append(time.perf_counter())
        grown = [length + step for length in keys]
        sampled.append(engine.step(tokens if step == 0 else None, grown, sampling).tokens)
    return (np.diff(started) * 1e3).tolist(), np.array(sampled)


# ---- interruptions ----


def parks(bench: Bench, prompts: Sequence[Sequence[int]], events: int) -> list[Ran]:
    """A full batch that is parked for nothing when a run has had a few steps."""
    most = PARK_EVERY + 3 * bench.loop.ahead  # of a run: some are under way when it is asked to end
    with bench.interrupted(lambda: len(bench.loop.runs[-1].started_ns) >= PARK_EVERY):
        return bench.serve(prompts, [most * (events + 1)] * len(prompts))[1]


def ends(bench: Bench, prompts: Sequence[Sequence[int]], events: int) -> list[Ran]:
    """Requests that end one after the other, from a full batch down to one.

    The first time is not counted: programs of batch sizes that are new are lowered and brought to the card then.
    """
    tokens = [STAGGER * (row + 2) for row in range(len(prompts))]
    bench.serve(prompts, tokens)
    return [ran for _ in range(-(-events // len(prompts))) for ran in bench.serve(prompts, tokens)[1]]


def admissions(bench: Bench, prompts: Sequence[Sequence[int]], events: int) -> list[Ran]:
    """Newcomers, one after the other, to a batch that has room for one."""
    before = len(bench.loop.runs)
    rest = prompts[:-1]
    running = bench.ask(rest, [SETTLED_TOKENS + events * 60] * len(rest))
    settle(running)
    for _ in range(events):
        for newcomer in bench.ask(prompts[-1:], [NEWCOMER_TOKENS], "newcomer"):
            newcomer.wait()
    for one in running:
        bench.worker.cancel(one.request)
    for one in running:
        one.wait()
    return bench.loop.runs[before:]


def entering(
    bench: Bench, running: Sequence[Sequence[int]], prompt: Sequence[int], policy_name: str
) -> tuple[list[float], float, list[float]]:
    """Milliseconds between tokens of running requests while a prompt enters, until its own first token, and until each
    one's last. They have come in under `pause`, else the first would end while the last one's prompt is computed."""
    bench.policy(prefill="pause")
    policy = bench.core.policy
    chunks = -(-len(prompt) // policy.chunk)
    asked = bench.ask(running, [4 * SETTLED_TOKENS + 2 * chunks * policy.steps_between + 64] * len(running))
    settle(asked)
    bench.policy(prefill=policy_name)
    (newcomer,) = bench.ask([prompt], [NEWCOMER_TOKENS], "newcomer")
    newcomer.wait()
    first = newcomer.times[0]
    last = [one.wait().times[-1] for one in asked]
    gaps = [
        (after - before) * 1e3
        for one in asked
        for before, after in itertools.pairwise(one.times)
        if after > newcomer.asked and before < first
    ]
    return gaps, (first - newcomer.asked) * 1e3, [(end - newcomer.asked) * 1e3 for end in last]


def settle(asked: Sequence[Asked]) -> None:
    """Until every request decodes."""
    for one in asked:
        one.has(SETTLED_TOKENS)
