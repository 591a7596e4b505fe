"""nano's own domain: Python of a file that its training never saw, from `mk/model/nano/held_out_sample.txt`.

Two kinds of items, both graded by exact match. `next_line`: the text up to the end of a line; the next line that is not
blank must come out, indent included. `continuation`: the text up to the middle of a line; its rest must come out.
Prompts never end in a line break, which the tokenizer joins with the indent that follows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from evals.benchmarks.base import Benchmark, Conversation, Problem, Prompt, Score
from evals.sandbox.sandbox import Sandbox
from mk.config import BenchmarkConfig
from mk.errors import MkError
from mk.model.opening import NANO

SAMPLE = NANO / "held_out_sample.txt"
_CONTEXT_LINES = 70  # before the one that is asked for: its file's habits are in there
_LEAST_LENGTH = 8  # characters of a line that is asked for, without its indent


class NanoCode(Benchmark):
    def __init__(self, config: BenchmarkConfig, data_dir: Path) -> None:
        """The set lies in the repository, data_dir is not read. Raises MkError for another hash."""
        data = SAMPLE.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        if config.sha256 is not None and digest != config.sha256:
            raise MkError(f"{SAMPLE.name} has sha256 {digest}, benchmark=nano_code has {config.sha256}")
        problems = make_problems(data.decode())
        facts = {
            "source": SAMPLE.name,
            "rows": len(problems),
            "sha256": digest,
            "hash_known": config.sha256 is not None,
        }
        super().__init__(config, problems, facts)

    def conversation(self, problem: Problem) -> Conversation:
        yield Prompt(text=problem.fields["prompt"])

    def grade(self, problem: Problem, contents: Sequence[str], sandbox: Sandbox | None) -> list[Score]:
        kind = problem.fields["kind"]
        found = next_line(contents[0]) if kind == "next_line" else contents[0].split("\n")[0].rstrip()
        return [Score(problem.id, found == problem.fields["target"], found, kind)]


def make_problems(text: str) -> list[Problem]:
    """An item a line of code that is long enough and has some context, the two kinds in turn."""
    lines = text.split("\n")
    problems = []
    for index in range(_CONTEXT_LINES, len(lines)):
        line = lines[index].rstrip()
        if len(line.strip()) < _LEAST_LENGTH:
            continue
        before = "\n".join(lines[index - _CONTEXT_LINES : index])
        kind = ("next_line", "continuation")[len(problems) % 2]
        if kind == "next_line":
            prompt, target = before.rstrip(), line
        else:
            middle = line.index(line.strip()) + len(line.strip()) // 2
            prompt, target = f"{before}\n{line[:middle]}", line[middle:]
        fields = {"kind": kind, "prompt": prompt, "target": target}
        problems.append(Problem(f"{kind}-{index + 1:03}", fields))
    return problems


def next_line(content: str) -> str | None:
    """The first line after the one that the prompt ended, blank ones aside; None if that one went on instead."""
    current, *rest = content.split("\n")
    if current.strip():
        return None
    return next((line.rstrip() for line in rest if line.strip()), None)
