"""Conversations with an engine, many at a time, each request with its run's seed and every answer kept."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from evals.benchmarks.base import Conversation
from evals.completion import Completion, Engine, Request
from evals.samples import SampleStore
from mk.errors import MkError
from mk.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """A conversation to have. No two of a runner have the same run and name."""

    run: int
    name: str  # the problem's
    conversation: Conversation


@dataclass(slots=True)
class Answers:
    """The answers to one problem in one run, in order."""

    run: int
    name: str
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

    @property
    def key(self) -> tuple[int, str]:
        return self.answers.run, self.answers.name


class Runner:
    def __init__(
        self,
        engine: Engine,
        sampling: SamplingParams,
        max_tokens: int,
        store: SampleStore,
        token_ids: bool = True,
        progress: Callable[[int], None] = lambda ended: None,
    ) -> None:
        """Run i has the seed of `sampling` + i. max_tokens: of every answer, reasoning included.

        progress: told how many conversations have ended.
        """
        self.sent = 0  # requests that went to the engine, stored answers not among them
        self.requests: dict[tuple[int, str, int], str] = {}  # their hashes, stored answers among them
        self.wall_s = 0.0  # from the first request to the last answer
        self._engine, self._store = engine, store
        self._sampling, self._max_tokens, self._token_ids = sampling, max_tokens, token_ids
        self._progress = progress

    def run(self, jobs: Sequence[Job]) -> list[Answers]:
        """Have every conversation; the answers in the order of the jobs.

        Raises MkError when the engine gives up; what had been answered by then is in the store.
        """
        finished: dict[tuple[int, str], Answers] = {}
        waiting: dict[tuple[int, str], _Open] = {}
        started = time.perf_counter()
        for job in jobs:
            opened = self._advance(Answers(job.run, job.name), job.conversation, None)
            if opened is None:
                raise MkError(f"problem {job.name} asks nothing")
            self._settle(opened, waiting, finished)
        self._progress(len(finished))
        try:
            while waiting:
                for key, completion in self._engine.collect():
                    opened = waiting.pop(key)  # type: ignore[call-overload]
                    step, request = len(opened.answers.completions), opened.request
                    self._store.add(*opened.key, step, request.sampling.seed, request.digest, completion)
                    self._take(opened, completion, waiting, finished)
                    self._progress(len(finished))
        finally:
            self._engine.close()
        self.wall_s += time.perf_counter() - started
        return [finished[job.run, job.name] for job in jobs]

    def _settle(
        self, opened: _Open, waiting: dict[tuple[int, str], _Open], finished: dict[tuple[int, str], Answers]
    ) -> None:
        """Answer a conversation from the store as far as that goes, then send its request to the engine."""
        step, digest = len(opened.answers.completions), opened.request.digest
        self.requests[*opened.key, step] = digest
        stored = self._store.find(*opened.key, step, digest)
        if stored is not None:
            self._take(opened, stored, waiting, finished)
            return
        waiting[opened.key] = opened
        self._engine.submit(opened.key, opened.request)
        self.sent += 1

    def _take(
        self,
        opened: _Open,
        completion: Completion,
        waiting: dict[tuple[int, str], _Open],
        finished: dict[tuple[int, str], Answers],
    ) -> None:
        opened.answers.completions.append(completion)
        following = self._advance(opened.answers, opened.conversation, completion.content)
        if following is None:
            finished[opened.key] = opened.answers
        else:
            self._settle(following, waiting, finished)

    def _advance(self, answers: Answers, conversation: Conversation, content: str | None) -> _Open | None:
        """The conversation's next request; None at its end."""
        try:
            prompt = next(conversation) if content is None else conversation.send(content)
        except StopIteration:
            return None
        sampling = dataclasses.replace(self._sampling, seed=(self._sampling.seed + answers.run) % 2**64)
        return _Open(answers, conversation, Request(prompt, self._max_tokens, sampling, self._token_ids))
