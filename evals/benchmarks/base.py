"""What a benchmark is: problems, the prompts that each one leads to, and a grader of what came back."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evals.figures import share
from evals.sandbox.sandbox import Sandbox
from mk.config import BenchmarkConfig
from mk.errors import MkError

Conversation = Generator["Prompt", str, None]


@dataclass(frozen=True, slots=True)
class Problem:
    """One item of a set: an id that stays, and the fields of its row."""

    id: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks: a conversation for the model's chat template, or a text that is continued as it stands."""

    messages: tuple[Mapping[str, str], ...] = ()
    text: str | None = None

    @classmethod
    def user(cls, content: str, system: str | None = None) -> Prompt:
        opening = () if system is None else ({"role": "system", "content": system},)
        return cls((*opening, {"role": "user", "content": content}))


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict on one scored unit. answer: what was read from the content, None where nothing could be."""

    unit: str
    correct: bool
    answer: str | None
    group: str | None = None  # units of a group also get a figure of their own
    why: str = ""  # of a program that failed


class Benchmark:
    """One benchmark. `conversation` yields prompts and is sent the content of each answer; `grade` reads them all."""

    runs_code = False

    def __init__(self, config: BenchmarkConfig, problems: Sequence[Problem], facts: Mapping[str, Any]) -> None:
        """facts: where the data came from and what is known of it, for the report. Raises MkError for an id twice."""
        ids = [problem.id for problem in problems]
        if twice := next((name for name in ids if ids.count(name) > 1), None):
            raise MkError(f"benchmark={config.name}: two rows have the id {twice}")
        self.config = config
        self.problems = list(problems)
        self.facts = dict(facts)

    def asks(self, problem: Problem) -> int:
        """Requests that a problem takes."""
        return 1

    def conversation(self, problem: Problem) -> Conversation:
        raise NotImplementedError

    def grade(self, problem: Problem, contents: Sequence[str], sandbox: Sandbox | None) -> list[Score]:
        """Scores of one problem from the contents of its answers, reasoning not among them, in order."""
        raise NotImplementedError

    def figures(self, scores: Sequence[Score]) -> dict[str, float]:
        """Shares of a run in 0..1: `score`, the figure that is published, and those of its groups."""
        found = {"score": mean_correct(scores)}
        for group in sorted({score.group for score in scores if score.group is not None}):
            found[group] = mean_correct([score for score in scores if score.group == group])
        return found


def mean_correct(scores: Sequence[Score]) -> float:
    return share([score.correct for score in scores])


def code_blocks(content: str) -> list[str]:
    """The fenced blocks of an answer, in whichever language they say they are; one that is not closed is none."""
    blocks: list[str] = []
    inside: list[str] | None = None
    for line in content.split("\n"):
        if not line.lstrip(" \t").startswith("```"):
            if inside is not None:
                inside.append(f"{line}\n")
        elif inside is None:
            inside = []
        else:
            blocks.append("".join(inside))
            inside = None
    return blocks


def last_code_block(content: str) -> str | None:
    """None without one."""
    return next(reversed(code_blocks(content)), None)
