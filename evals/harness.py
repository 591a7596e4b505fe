"""A benchmark as a task of lm-evaluation-harness, which lists requests, asks the model and aggregates scores."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval import evaluate as harness_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task, TaskConfig
from lm_eval.filters import build_filter_ensemble

from evals.benchmarks.base import Benchmark, Problem, Score
from evals.lm_model import CONVERSATION, EngineModel
from evals.runner import Runner
from evals.sandbox.sandbox import Sandbox

logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of what its own task files would say
RunScores = list[list[Score]]  # of one problem: [runs][units]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """scores: of each run, problem by problem. results: what the harness says, with its version."""

    scores: list[list[Score]]
    results: Mapping[str, Any]


class BenchmarkTask(Task):
    """Problems of a benchmark, each asked `runs` times. A document of the harness is a problem's id."""

    VERSION = 1
    OUTPUT_TYPE = "generate_until"

    def __init__(
        self,
        benchmark: Benchmark,
        problems: Sequence[Problem],
        runs: int,
        sandbox: Sandbox | None,
        graded: Callable[[int], None],
    ) -> None:
        """graded: told how many problems are."""
        self._benchmark, self._runs, self._sandbox = benchmark, runs, sandbox
        self._graded, self._done = graded, 0
        self._problems = {problem.id: problem for problem in problems}
        super().__init__()
        self._config = TaskConfig(
            task=benchmark.config.name,
            repeats=runs,
            num_fewshot=0,
            output_type=self.OUTPUT_TYPE,
            generation_kwargs={"until": []},  # the model says how it samples
        )
        self._filters = [build_filter_ensemble("none", [("take_first_k", {"k": runs})])]

    def download(self, *_: Any, **__: Any) -> None:
        """The benchmark has its rows."""

    def has_training_docs(self) -> bool:
        return False

    def has_validation_docs(self) -> bool:
        return False

    def has_test_docs(self) -> bool:
        return True

    def test_docs(self) -> list[dict[str, str]]:
        return [{"id": name} for name in self._problems]

    def doc_to_text(self, doc: Mapping[str, str]) -> str:
        """The first request, which the harness takes a hash of."""
        prompt = next(self._benchmark.conversation(self._problems[doc["id"]]))
        return prompt.text if prompt.text is not None else json.dumps(prompt.messages, ensure_ascii=False)

    def doc_to_target(self, doc: Mapping[str, str]) -> str:
        return ""  # the benchmark's grader knows

    def fewshot_context(self, doc: Mapping[str, str], *_: Any, **__: Any) -> str:
        return self.doc_to_text(doc)  # a benchmark shows its own examples

    def construct_requests(self, doc: Mapping[str, str], ctx: str, **kwargs: Any) -> Instance:
        conversation = functools.partial(self._benchmark.conversation, self._problems[doc["id"]])
        return Instance("generate_until", doc, (ctx, {CONVERSATION: conversation}), 0, metadata=kwargs["metadata"])

    def process_results(self, doc: Mapping[str, str], results: Sequence[Any]) -> dict[str, RunScores]:
        """results: of the one request, the contents of each run's answers."""
        problem = self._problems[doc["id"]]
        scores = [self._benchmark.grade(problem, contents, self._sandbox) for contents in results[0]]
        self._done += 1
        self._graded(self._done)
        return {"score": scores}

    def by_run(self, problems: Sequence[RunScores]) -> list[list[Score]]:
        """The scores of each run from those of each problem."""
        return [[score for runs in problems for score in runs[run]] for run in range(self._runs)]

    def aggregation(self) -> dict[str, Callable[[Sequence[RunScores]], float]]:
        """The published figure, mean over runs."""
        return {
            "score": lambda problems: statistics.fmean(
                self._benchmark.figures(run)["score"] for run in self.by_run(problems)
            )
        }

    def higher_is_better(self) -> dict[str, bool]:
        return {"score": True}


def evaluate(
    benchmark: Benchmark,
    problems: Sequence[Problem],
    runs: int,
    runner: Runner,
    sandbox: Sandbox | None = None,
    graded: Callable[[int], None] = lambda problems: None,
) -> Evaluated:
    """Ask every problem `runs` times, then grade the answers. Raises MkError when the engine gives up.

    graded: told how many problems are.
    """
    task = BenchmarkTask(benchmark, problems, runs, sandbox, graded)
    name = benchmark.config.name
    found = harness_evaluate(lm=EngineModel(runner), task_dict={name: task}, bootstrap_iters=0)
    scores = task.by_run([sample["score"] for sample in found["samples"][name]])
    results = {key: found[key] for key in ("results", "versions", "n-samples", "higher_is_better")}
    return Evaluated(scores, {"lm_eval": importlib.metadata.version("lm_eval"), **results})
