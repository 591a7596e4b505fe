"""Score a quality benchmark (benchmark=NAME), several runs of different seeds, and keep every sample.

Answers come over HTTP: from the server at experiment.base_url, else from one that this command starts with the
configured engine and stops at its end. Rows, samples, scores and the report of what the data and the sandbox were stand
in the run folder; experiment.resume goes on from one that broke off, experiment.compare gives the interval of the
difference to another engine's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evals.asked import Asked, named_server, own_server
from evals.benchmarks import open_benchmark
from evals.benchmarks.base import Benchmark, Problem, Score
from evals.greedy import count_equal
from evals.harness import Evaluated, evaluate
from evals.preflight import estimate, require_affordable
from evals.report import Finished, lines, raw_answers, summarise, write_report, write_scores
from evals.runner import Runner
from evals.samples import FILE, Sample, SampleStore
from evals.sandbox.probes import open_sandbox
from evals.sandbox.sandbox import Sandbox
from experiments.console import progress
from experiments.opening import sampling_of
from experiments.unread import require_router
from mk.config import Config
from mk.engines.choice import require_engine
from mk.errors import MkError
from mk.results.runs import RunFolder


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when a check fails; the score is none of them."""
    return score(cfg, cfg.experiment.resume, cfg.experiment.compare)[0]


def score(
    cfg: Config, resume: str | None, compare: str | Path | None, started: Asked | None = None
) -> tuple[int, Path]:
    """(exit status, run folder) of one evaluation. resume, compare: run folders, None = without.

    started: a server of the configured model; None = the one at experiment.base_url, or one that is started here.
    """
    settings = cfg.experiment
    if started is None and settings.base_url is None:
        require_engine(cfg, cfg.server.slots)
    else:
        require_router(cfg)
    benchmark = open_benchmark(cfg.benchmark, Path(settings.data_dir))
    other = None if compare is None else Finished.read(Path(compare))  # before anything is asked
    with contextlib.ExitStack() as stack:
        if started is not None:
            problems, asked = _problems(cfg, benchmark, _is_toy(cfg)), started
        elif settings.base_url is None:
            problems = _problems(cfg, benchmark, _is_toy(cfg))  # before a server is started for nothing
            asked = stack.enter_context(own_server(cfg))
        else:
            asked = named_server(cfg)
            problems = _problems(cfg, benchmark, asked.engine.model == "nano")
        sandbox, sandboxed = open_sandbox(settings.allow_missing) if benchmark.runs_code else (None, None)
        answered = _preflight(cfg, benchmark, problems, asked)
        with RunFolder.create(cfg) as run:
            store = SampleStore(run.path / FILE, asked.engine.name, asked.title)
            if resume is not None:
                store.resume(Path(resume))
                print(f"resumed: {len(store)} samples")
            runner, found = _ask(cfg, run, benchmark, problems, asked, store, sandbox)
            samples = [sample for sample in store if runner.requests.get(sample.key) == sample.request]
            raw = _raw(cfg, asked, runner, samples, found.scores, answered)
            result = summarise(benchmark, raw, found.scores, runner.requests)
            failed = None  # why what was asked for cannot be compared, which is no reason to lose the answers
            if other is not None:
                try:
                    raw["theirs"] = other.of(found.scores, result.requests_hash)
                except MkError as error:
                    failed = f"not compared: {error}"
            said = {"engine": asked.engine.name, "dtype": asked.dtype, **asked.fields}
            row = run.measured(
                raw,
                batch=asked.engine.parallel,
                context=[max(sample.completion.prompt_tokens for sample in samples)],
                benchmark=cfg.benchmark.name,
                benchmark_sha256=benchmark.facts["sha256"],
                requests_hash=result.requests_hash,
                **said,
            )
            write_scores(run.path, found.scores)
            write_report(
                run.path,
                result,
                data=benchmark.facts,
                sandbox=None if sandboxed is None else dataclasses.asdict(sandboxed),
                checks=row.checks,
                harness=found.results,
            )
            run.append_row(row, raw)
            print("\n".join([*lines(result, row), *filter(None, [failed]), f"run folder: {run.path}"]))
            return int(failed is not None or not all(row.checks.values())), run.path


def _is_toy(cfg: Config) -> bool:
    """Whether the configured model can solve nothing."""
    bundled = cfg.model.path is None and (cfg.model.preset == "nano" or cfg.weights.name == "random")
    return bundled and cfg.engine.name != "scripted"


def _problems(cfg: Config, benchmark: Benchmark, toy: bool) -> list[Problem]:
    """The problems that are asked. Raises MkError where a toy would be asked everything."""
    limit = cfg.experiment.limit
    if toy and benchmark.config.name != "nano_code":
        if limit is None:
            raise MkError(
                f"model={cfg.model.name} cannot solve {benchmark.config.name}: its score only proves the pipeline",
                hint="experiment.limit=2, or model.path=<a model that can>",
            )
        print(f"note: of model={cfg.model.name} this score only proves that the pipeline works")
    return benchmark.problems[:limit]


def _preflight(cfg: Config, benchmark: Benchmark, problems: Sequence[Problem], asked: Asked) -> int | None:
    """Say what is about to happen; how many requests the server has answered by then, None where it does not count.

    Raises MkError for what would take longer than it may.
    """
    settings, engine, facts = cfg.experiment, asked.engine, benchmark.facts
    known = "count and hash are as known" if facts["hash_known"] else "nobody has confirmed its hash"
    where = "" if settings.base_url is None else f" at {settings.base_url}"
    print(f"model: {asked.title}\nengine: {engine.name}{where}, {engine.parallel} requests at a time")
    print(f"benchmark: {cfg.benchmark.name}, {len(problems)} problems of {facts['source']}")
    print(f"data: sha256 {facts['sha256'][:16]}, {known}", flush=True)
    before = engine.count()
    cost = estimate(benchmark, problems, settings.runs, engine, sampling_of(cfg), engine.context)
    print(
        f"at most {cost.requests} answers of {cost.cap} tokens at {cost.tok_s:.0f} tokens/s, "
        f"{60 * cost.hours:.1f} minutes, and their prompts",
        flush=True,
    )
    require_affordable(cost, settings.max_hours)
    return None if before is None else engine.count(before + cost.probed)


def _ask(
    cfg: Config,
    run: RunFolder,
    benchmark: Benchmark,
    problems: Sequence[Problem],
    asked: Asked,
    store: SampleStore,
    sandbox: Sandbox | None,
) -> tuple[Runner, Evaluated]:
    """Ask and grade. Raises MkError, with the way on, when the engine gives up."""
    settings, max_tokens = cfg.experiment, cfg.benchmark.max_tokens
    assert max_tokens is not None

    def way_on() -> str:
        return f"experiment.resume={run.path} goes on from the {len(store)} samples that are there"

    try:
        conversations = len(problems) * settings.runs
        with progress("ask and grade", conversations + len(problems)) as done:
            runner = Runner(asked.engine, sampling_of(cfg), max_tokens, store, settings.token_ids, done)
            found = evaluate(
                benchmark, problems, settings.runs, runner, sandbox, lambda graded: done(conversations + graded)
            )
        return runner, found
    except MkError as error:
        raise MkError(f"{error}; there is no score", hint=way_on()) from error
    except KeyboardInterrupt:
        print(f"hint: {way_on()}")
        raise


def _raw(
    cfg: Config,
    asked: Asked,
    runner: Runner,
    samples: Sequence[Sample],
    scores: Sequence[Sequence[Score]],
    answered: int | None,
) -> dict[str, Any]:
    """What the row is computed from."""
    raw = raw_answers([sample.completion for sample in samples], scores, runner.wall_s)
    raw["counted"] = {
        "requests": len(runner.requests),
        "sent": runner.sent,
        "answered": _counted(asked, runner, answered),
        "seeds": len({sample.seed for sample in samples}),
        "runs": cfg.experiment.runs,
    }
    raw["equal"] = _equal(cfg, asked, samples)
    if asked.log:
        raw["log"] = list(asked.log)
    return raw


def _counted(asked: Asked, runner: Runner, answered: int | None) -> int | None:
    """Requests of the runner that the server has answered, by its own count; `answered`: those before them."""
    now = None if answered is None else asked.engine.count(answered + runner.sent)
    if answered is None or now is None:
        print("the server counts no answers in /metrics: not compared with the requests that were sent")
        return None
    return now - answered


def _equal(cfg: Config, asked: Asked, samples: Sequence[Sample]) -> dict[str, bool]:
    """Whether greedy answers are the reference's, token by token: a verdict on float32 alone."""
    if not cfg.experiment.check or asked.model is None or not sampling_of(cfg).greedy:
        return {}
    with progress("compare with the reference", len(samples)) as done:
        oracle, equal = count_equal(asked.model, samples, done)
    if asked.dtype == "float32":
        return {f"equal_to_{oracle}": equal == len(samples)}
    print(f"{equal} of {len(samples)} answers are {oracle}'s in float32, token by token")
    return {}  # in bfloat16 another token may be the likeliest where two are close
