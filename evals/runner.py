"""Run a benchmark against an engine: every problem's conversation, in several runs of different seeds; then grade."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from evals.benchmarks.base import Benchmark, Conversation, Problem, Score
from evals.completion import Completion, Engine, Request
from evals.samples import SampleStore
from evals.sandbox.sandbox import Sandbox
from mk.errors import MkError
from mk.sampling import SamplingParams


@dataclass(slots=True)
class Answers:
    """The answers to one problem in one run, in order."""

    run: int
    problem: Problem
    completions: list[Completion] = field(default_factory=list)

    @property
    def contents(self) -> list[str]:
        return [completion.content for completion in self.completions]


@dataclass(slots=True)
class _Open:
    """A conversation that waits for an answer."""

    answers: Answers
    conversation: Conversation
    request: Request


class Runner:
    def __init__(self, benchmark: Benchmark, engine: Engine, sampling: SamplingParams, store: SampleStore) -> None:
        self.sent = 0  # requests that went to the engine, stored answers not among them
        self.requests: dict[tuple[int, str, int], str] = {}  # their hashes, stored answers among them
        self._benchmark, self._engine, self._store = benchmark, engine, store
        self._sampling = sampling

    def run(
        self, problems: Sequence[Problem], runs: int, progress: Callable[[int], None] = lambda done: None
    ) -> list[Answers]:
        """Ask every problem `runs` times, run i with seed + i; `progress` is told how many conversations have ended.

        Raises MkError when the engine gives up; what had been answered by then is in the store.
        """
        finished: list[Answers] = []
        waiting: dict[tuple[int, str], _Open] = {}
        for run in range(runs):
            for problem in problems:
                conversation = self._benchmark.conversation(problem)
                opened = self._advance(Answers(run, problem), conversation, None)
                if opened is None:
                    raise MkError(f"problem {problem.id} asks nothing")
                self._settle(opened, waiting, finished)
        progress(len(finished))
        try:
            while waiting:
                for key, completion in self._engine.collect():
                    opened = waiting.pop(key)  # type: ignore[call-overload]
                    answers = opened.answers
                    seed = opened.request.sampling.seed
                    self._store.add(
                        answers.run,
                        answers.problem.id,
                        len(answers.completions),
                        seed,
                        opened.request.digest,
                        completion,
                    )
                    self._take(opened, completion, waiting, finished)
                    progress(len(finished))
        finally:
            self._engine.close()
        order = {problem.id: index for index, problem in enumerate(problems)}
        return sorted(finished, key=lambda answers: (answers.run, order[answers.problem.id]))

    def _settle(self, opened: _Open, waiting: dict[tuple[int, str], _Open], finished: list[Answers]) -> None:
        """Answer a conversation from the store as far as that goes, then send its request to the engine."""
        answers = opened.answers
        step, digest = len(answers.completions), opened.request.digest
        self.requests[answers.run, answers.problem.id, step] = digest
        stored = self._store.find(answers.run, answers.problem.id, step, digest)
        if stored is not None:
            self._take(opened, stored, waiting, finished)
            return
        key = (answers.run, answers.problem.id)
        waiting[key] = opened
        self._engine.submit(key, opened.request)
        self.sent += 1

    def _take(
        self,
        opened: _Open,
        completion: Completion,
        waiting: dict[tuple[int, str], _Open],
        finished: list[Answers],
    ) -> None:
        opened.answers.completions.append(completion)
        following = self._advance(opened.answers, opened.conversation, completion.content)
        if following is None:
            finished.append(opened.answers)
        else:
            self._settle(following, waiting, finished)

    def _advance(self, answers: Answers, conversation: Conversation, content: str | None) -> _Open | None:
        """The conversation's next request; None at its end."""
        try:
            prompt = next(conversation) if content is None else conversation.send(content)
        except StopIteration:
            return None
        sampling = dataclasses.replace(self._sampling, seed=(self._sampling.seed + answers.run) % 2**64)
        assert self._benchmark.config.max_tokens is not None
        return _Open(answers, conversation, Request(prompt, self._benchmark.config.max_tokens, sampling))


def grade(benchmark: Benchmark, answers: Sequence[Answers], runs: int, sandbox: Sandbox | None) -> list[list[Score]]:
    """The scores of each run, problem by problem."""
    scores: list[list[Score]] = [[] for _ in range(runs)]
    for each in answers:
        scores[each.run] += benchmark.grade(each.problem, each.contents, sandbox)
    return scores
