"""AIME 2025: thirty problems whose answers are integers from 0 to 999, read from the last \\boxed{} of the content."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from evals.benchmarks.base import Benchmark, Conversation, Problem, Prompt, Score
from evals.benchmarks.data import load_rows
from evals.sandbox.sandbox import Sandbox
from mk.config import BenchmarkConfig

_PROMPT = """{problem}

The answer is an integer from 0 to 999. Reason step by step, and put the final answer within \\boxed{{}}."""
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
_DECORATION = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}|\\[,;!: ]|[\s,$]")


class Aime(Benchmark):
    def __init__(self, config: BenchmarkConfig, data_dir: Path) -> None:
        rows, facts = load_rows(config, data_dir, ("problem", "answer"))
        problems = [Problem(str(row.get("id", f"{index + 1:02}")), row) for index, row in enumerate(rows)]
        super().__init__(config, problems, facts)

    def conversation(self, problem: Problem) -> Conversation:
        yield Prompt.user(_PROMPT.format(problem=problem.fields["problem"]))

    def grade(self, problem: Problem, contents: Sequence[str], sandbox: Sandbox | None) -> list[Score]:
        found = boxed(contents[0])
        given = None if found is None else as_integer(found)
        return [Score(problem.id, given is not None and given == as_integer(str(problem.fields["answer"])), found)]


def boxed(content: str) -> str | None:
    """What stands in the last complete \\boxed{...}, whose braces may be nested."""
    open_: list[tuple[int, bool]] = []  # where the contents of each open brace begin, and whether it is a box's
    last = (-1, -1)
    for brace in _BRACE.finditer(content):
        if brace[0] != "}":
            open_.append((brace.end(), brace[0] != "{"))
        elif open_:
            start, is_box = open_.pop()
            if is_box:
                last = max(last, (start, brace.start()))
    return content[slice(*last)] if last[0] >= 0 else None


def as_integer(text: str) -> int | None:
    """016, 16, 1,016 and \\text{16} are integers; 16.5 and x=16 are none, nor is one too long to be an answer."""
    plain = _DECORATION.sub(lambda match: match.group(1) or "", text)
    found = re.fullmatch(r"([+-]?)0*([0-9]{1,18})", plain)
    return int(found[1] + found[2]) if found else None
