"""Score a quality benchmark (benchmark=NAME), several runs of different seeds, and keep every sample.

Answers come from the configured engine in this process, or from the server at experiment.base_url. Rows, samples,
scores and the report of what the data and the sandbox were stand in the run folder; experiment.resume goes on from one
that broke off, experiment.compare gives the interval of the difference to another engine's.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from evals.benchmarks import open_benchmark
from evals.benchmarks.base import Benchmark, Problem
from evals.offline import OfflineEngine, prompt_ids
from evals.preflight import estimate, require_affordable
from evals.report import lines, raw_answers, summarise, theirs, write_report, write_scores
from evals.runner import Runner, grade
from evals.samples import FILE, SampleStore
from evals.sandbox.probes import SandboxReport, open_sandbox
from evals.sandbox.sandbox import Sandbox
from evals.served import ServedEngine
from experiments.console import progress
from mk.config import Config
from mk.engines import make_engine, require_engine
from mk.errors import MkError
from mk.model.greedy_oracle import GreedyOracle
from mk.model.opening import Model, open_model
from mk.runs import RunFolder
from mk.sampling import SamplingParams


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when a check fails; the score is none of them."""
    settings, sampled = cfg.experiment, cfg.sampling
    if settings.base_url is None:
        require_engine(cfg, cfg.batch.size)
    benchmark = open_benchmark(cfg.benchmark, Path(settings.data_dir))
    problems = _problems(cfg, benchmark)
    sandbox, sandboxed = open_sandbox(settings.allow_missing) if benchmark.runs_code else (None, None)
    sampling = SamplingParams(sampled.temperature, sampled.top_k, sampled.top_p, sampled.seed)
    with tempfile.TemporaryDirectory(prefix="mk-") as scratch:
        model = open_model(cfg.model, cfg.weights, Path(scratch))
        engine = _engine(cfg, model, benchmark, problems)
        name = cfg.model.path or cfg.model.name
        where = "" if settings.base_url is None else f" at {settings.base_url}"
        print(f"model: {name}, weights: {model.weights_label}\nengine: {engine.name}{where}, batch {engine.parallel}")
        known = "" if benchmark.facts["hash_known"] else ", whose hash nobody has confirmed"
        print(f"benchmark: {cfg.benchmark.name}, {len(problems)} problems of {benchmark.facts['source']}{known}")
        cost = estimate(benchmark, problems, settings.runs, engine, sampling)
        print(
            f"at most {cost.requests} answers of {cost.cap} tokens at {cost.tok_s:.0f} tokens/s, "
            f"{60 * cost.hours:.1f} minutes"
        )
        require_affordable(cost, settings.max_hours)
        with RunFolder.create(cfg) as run:
            store = SampleStore(run.path / FILE, engine.name, f"{name} ({model.weights_label})")
            if settings.resume is not None:
                store.resume(Path(settings.resume))
                print(f"resumed: {len(store)} samples")
            runner = Runner(benchmark, engine, sampling, store)
            return _evaluate(cfg, run, model, benchmark, problems, engine, runner, store, sandbox, sandboxed)


def _problems(cfg: Config, benchmark: Benchmark) -> list[Problem]:
    """The problems that are asked. Raises MkError where a toy would be asked everything."""
    limit = cfg.experiment.limit
    toy = cfg.model.path is None and (cfg.model.preset == "nano" or cfg.weights.name == "random")
    if toy and benchmark.config.name != "nano_code":
        if limit is None:
            raise MkError(
                f"model={cfg.model.name} cannot solve {benchmark.config.name}: its score only proves the pipeline",
                hint="experiment.limit=2, or model.path=<a model that can>",
            )
        print(f"note: of model={cfg.model.name} this score only proves that the pipeline works")
    return benchmark.problems[:limit]


def _engine(
    cfg: Config, model: Model, benchmark: Benchmark, problems: Sequence[Problem]
) -> OfflineEngine | ServedEngine:
    """The server's engine, or the configured one with room for every first prompt and its answer."""
    settings = cfg.experiment
    if settings.base_url is not None:
        return ServedEngine(settings.base_url, settings.served_model, cfg.batch.size, settings.timeout_s)
    cap, most = benchmark.config.max_tokens or 1, model.geometry.max_positions
    prompts = [next(benchmark.conversation(problem)) for problem in problems]
    context = max(len(prompt_ids(model.tokenizer, prompt)) for prompt in prompts) + cap
    if context > most:
        raise MkError(
            f"benchmark.max_tokens={cap} and the longest prompt exceed the model's {most} positions",
            hint=f"benchmark.max_tokens={max(1, most - context + cap)}",
        )
    engine = make_engine(cfg, model, min(cfg.batch.size, len(problems)), settings.context or context)
    return OfflineEngine(engine, model.tokenizer)


def _evaluate(
    cfg: Config,
    run: RunFolder,
    model: Model,
    benchmark: Benchmark,
    problems: list[Problem],
    engine: OfflineEngine | ServedEngine,
    runner: Runner,
    store: SampleStore,
    sandbox: Sandbox | None,
    sandboxed: SandboxReport | None,
) -> int:
    settings, before = cfg.experiment, engine.answered
    started = time.perf_counter()
    try:
        with progress("ask", len(problems) * settings.runs) as done:
            answers = runner.run(problems, settings.runs, done)
    except MkError as error:
        raise MkError(f"{error}; there is no score", hint=_way_on(run, store)) from error
    except KeyboardInterrupt:
        print(f"hint: {_way_on(run, store)}")
        raise
    wall_s = time.perf_counter() - started
    scores = grade(benchmark, answers, settings.runs, sandbox)
    raw = raw_answers(answers, scores, wall_s)
    result = summarise(benchmark, raw, scores, runner.requests)
    raw["counted"] = {
        "requests": len(runner.requests),
        "answered": engine.answered - before,
        "sent": runner.sent,
        "seeds": _seeds(store),
        "runs": settings.runs,
    }
    compared = settings.check and settings.base_url is None and cfg.sampling.temperature == 0
    raw["equal"] = _equal_to_oracle(model, store) if compared else {}
    if settings.compare is not None:
        raw["theirs"] = theirs(Path(settings.compare), scores, result.requests_hash)
    row = run.measured(
        raw,
        engine=engine.name,
        dtype=_dtype(cfg, engine.name),
        batch=engine.parallel,
        context=[max(each.completions[0].prompt_tokens for each in answers)],
        benchmark=cfg.benchmark.name,
        benchmark_sha256=benchmark.facts["sha256"],
        requests_hash=result.requests_hash,
    )
    write_scores(run.path, scores)
    write_report(
        run.path,
        result,
        data=benchmark.facts,
        sandbox=None if sandboxed is None else dataclasses.asdict(sandboxed),
        checks=row.checks,
    )
    run.append_row(row, raw)
    print("\n".join(lines(result)))
    if row.score_difference is not None:
        interval = f"95 % from {row.score_difference_low:+.4f} to {row.score_difference_high:+.4f}"
        print(f"difference {row.score_difference:+.4f}, {interval}")
    for name, passed in row.checks.items():
        print(f"{name.replace('_', ' ')}: {'yes' if passed else 'NO'}")
    print(f"run folder: {run.path}")
    return 0 if all(row.checks.values()) else 1


def _way_on(run: RunFolder, store: SampleStore) -> str:
    return f"experiment.resume={run.path} goes on from the {len(store)} samples that are there"


def _dtype(cfg: Config, engine: str) -> str:
    if engine == "served":
        return "unknown"  # it does not say
    return "bfloat16" if engine == "cuda" or cfg.engine.numerics == "kernel" else "float32"


def _seeds(store: SampleStore) -> int:
    return len({sample.seed for sample in store})


def _equal_to_oracle(model: Model, store: SampleStore) -> dict[str, bool]:
    """Whether every greedy sample is the oracle's, token by token; says where the first is not."""
    oracle = GreedyOracle(model)
    equal = True
    samples = [sample for sample in store if sample.run == 0]
    with progress(f"compare with {oracle.name}", len(samples)) as done:
        for index, sample in enumerate(samples):
            found = sample.completion
            assert found.prompt_ids is not None and found.token_ids is not None
            # the oracle decodes as many tokens as there are
            apart = oracle.compare(index, found.prompt_ids, found.token_ids, model.tokenizer.eos)
            if apart is not None:
                equal = False
                print(f"{sample.problem}: token {apart.index} is {apart.got}, {oracle.name}'s {apart.expected}, whose "
                      f"margin is {apart.margin:.2e}")  # fmt: skip
            done(index + 1)
    return {f"equal_to_{oracle.name}": equal}
