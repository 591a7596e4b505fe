"""LiveCodeBench, release_v6: programs that are tested on standard input, or by calls of a function.

One run gives both readings of the name: `score` is of the rows at hand; where that is the whole release, `v6` is of the
problems that this version added, its last 175. Expected outputs never enter the sandbox: a program is run on the
inputs, and what it wrote is compared outside.
"""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
import zlib
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from evals.benchmarks.base import Benchmark, Conversation, Problem, Prompt, Score, last_code_block
from evals.benchmarks.data import load_rows
from evals.sandbox.sandbox import Limits, Outcome, Sandbox
from mk.config import BenchmarkConfig
from mk.errors import MkError

RELEASE, ADDED = 1055, 175  # problems of release_v6, and of v6 alone, which stand last

_FIELDS = ("question_id", "question_content", "starter_code", "public_test_cases", "private_test_cases", "metadata")
_SYSTEM = (
    "You are an expert Python programmer. You will be given a programming problem and write a correct Python program "
    "that meets its specification and passes all tests."
)
_STDIN_TASK = """Read the inputs from standard input, solve the problem, and write the answer to standard output. Do \
not test on the sample inputs. Put the whole program into one block:
```python
# YOUR CODE HERE
```"""
_CALL_TASK = """Use the following starter code, and put the whole program into one block:
```python
{starter}
```"""
# The names that LiveCodeBench's own harness makes known beforehand. The order counts: builtins give back pow, abs and
# others that math and operator replace, and a module goes before a function of its name.
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
_PRELUDE = "\n".join(
    [
        *(f"from {name} import *" for name in (*_MODULES, "builtins", "typing")),
        f"import {', '.join(_MODULES)}",
        "sys.setrecursionlimit(50000)\n",
    ]
)
# Executes the solution as a module that is not the main one, then calls its function once a test; a line of JSON each
# on a stream that no print of the solution reaches. Loading it and every call have {code_s} s of CPU time of their own,
# and twice that to wait; the timers' signals end the process.
_CALLS = """
import json, os, signal, sys, types
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

def start_limit():
    signal.setitimer(signal.ITIMER_PROF, {code_s!r})
    signal.setitimer(signal.ITIMER_REAL, 2 * {code_s!r})

with open("inputs.json") as file:
    inputs = json.load(file)
solution = sys.modules["solution"] = types.ModuleType("solution")
with open("solution.py", "rb") as file:
    source = file.read()
start_limit()
exec(compile(source, "solution.py", "exec"), solution.__dict__)
call = getattr(solution.Solution() if hasattr(solution, "Solution") else solution, {name!r})
for arguments in inputs:
    start_limit()
    answers.write(json.dumps(call(*arguments)) + "\\n")
    answers.flush()
"""


class LiveCodeBench(Benchmark):
    runs_code = True

    def __init__(self, config: BenchmarkConfig, data_dir: Path) -> None:
        rows, facts = load_rows(config, data_dir, _FIELDS)
        tests = [_tests(row, facts["hash_known"]) for row in rows]
        problems = [
            Problem(
                str(row["question_id"]),
                {**row, "tests": found, "function": _function(row), "slice": _slice(index, len(rows))},
            )
            for index, (row, found) in enumerate(zip(rows, tests, strict=True))
        ]
        super().__init__(config, problems, facts)

    def conversation(self, problem: Problem) -> Conversation:
        fields = problem.fields
        task = _CALL_TASK.format(starter=fields["starter_code"]) if fields["starter_code"] else _STDIN_TASK
        yield Prompt.user(f"### Question\n{fields['question_content']}\n\n### Format\n{task}", _SYSTEM)

    def grade(self, problem: Problem, contents: Sequence[str], sandbox: Sandbox | None) -> list[Score]:
        program, group = last_code_block(contents[0]), problem.fields["slice"]
        if program is None:
            return [Score(problem.id, False, None, group, "no code block")]
        assert sandbox is not None
        run = run_calls if problem.fields["function"] else run_stdin
        why = run(sandbox, problem, program, self.config.code_s or 6.0)
        return [Score(problem.id, why == "", program, group, why)]


def run_stdin(sandbox: Sandbox, problem: Problem, program: str, code_s: float) -> str:
    """Why the program fails, "" if it passes: every test a run of its own, up to the first that fails."""
    limits = Limits(wall_s=2 * code_s, cpu_s=max(1, round(code_s)))
    for number, test in enumerate(problem.fields["tests"]):
        outcome = sandbox.run(_PRELUDE + program, stdin=test["input"], limits=limits)
        if not outcome.ok:
            return f"test {number}: {_how(outcome)}"
        if not same_output(outcome.stdout, test["output"]):
            return f"test {number}: wrong output"
    return ""


def run_calls(sandbox: Sandbox, problem: Problem, program: str, code_s: float) -> str:
    """Why the function fails, "" if it passes: all tests in one run, each with a limit of its own."""
    tests = problem.fields["tests"]
    inputs = [[json.loads(line) for line in test["input"].split("\n") if line.strip()] for test in tests]
    # of the solution that is loaded, every test, and the start of Python
    limits = Limits(wall_s=2 * code_s * (len(tests) + 1) + 5.0, cpu_s=math.ceil(code_s * (len(tests) + 1)) + 1)
    caller = _CALLS.format(name=problem.fields["function"], code_s=code_s)
    solution = (_PRELUDE + program).encode(errors="surrogatepass")  # which Python refuses, as the sandbox has it
    files = {"inputs.json": json.dumps(inputs).encode(), "solution.py": solution}
    outcome = sandbox.run(caller, limits=limits, files=files)
    given = outcome.stdout.splitlines()
    for number, test in enumerate(tests):
        if number >= len(given):
            return f"test {number}: {_how(outcome)}"
        try:
            answer = json.loads(given[number])
        except (ValueError, RecursionError):
            return f"test {number}: no JSON"
        if answer != json.loads(test["output"]):
            return f"test {number}: wrong answer"
    return ""


def same_output(given: str, expected: str) -> bool:
    """Equal line by line, spaces at the ends aside; else equal word by word, where numbers are equal by value."""
    ours, theirs = ([line.strip() for line in text.strip().splitlines()] for text in (given, expected))
    if ours == theirs:
        return True
    if len(ours) != len(theirs):
        return False
    return all(_same_words(a.split(), b.split()) for a, b in zip(ours, theirs, strict=True))


def _same_words(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    if len(ours) != len(theirs):
        return False
    try:
        return all(a == b or Decimal(a) == Decimal(b) for a, b in zip(ours, theirs, strict=True))
    except InvalidOperation:
        return False


def _how(outcome: Outcome) -> str:
    """A word on a program that did not end well, with its error's last line."""
    last = outcome.stderr.strip().splitlines()[-1:] or [""]
    return f"{'ended early' if outcome.ok else outcome.why} {last[0][:200]}".strip()


def _function(row: dict[str, Any]) -> str | None:
    metadata = row["metadata"]
    metadata = json.loads(metadata) if isinstance(metadata, str) and metadata else metadata or {}
    name = metadata.get("func_name")
    return str(name) if name else None


def _slice(index: int, rows: int) -> str | None:
    """`v6` for the last problems of the whole release; of other row counts nothing is known."""
    return "v6" if rows == RELEASE and index >= RELEASE - ADDED else None


def _tests(row: dict[str, Any], hash_known: bool) -> list[dict[str, str]]:
    public, private = row["public_test_cases"], row["private_test_cases"]
    public = json.loads(public) if isinstance(public, str) else public
    tests = [*public, *_private_tests(private, str(row["question_id"]), hash_known)]
    if not tests:
        raise MkError(f"livecodebench: problem {row['question_id']} has no tests")
    return tests


def _private_tests(packed: Any, name: str, hash_known: bool) -> list[dict[str, str]]:
    """JSON, or as the hub has it: JSON in a pickled string, deflated, in base64."""
    if not isinstance(packed, str):
        return list(packed)
    try:
        return list(json.loads(packed))
    except ValueError:
        pass
    if not hash_known:
        raise MkError(
            f"livecodebench: the private tests of problem {name} are pickled, and the hash of this data is not known",
            hint="benchmark.sha256=<hash of the file>, once you know where it comes from",
        )
    try:
        text = _PlainUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(packed)))).load()
        return list(json.loads(text))
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise MkError(f"livecodebench: the private tests of problem {name} cannot be read: {error}") from error


class _PlainUnpickler(pickle.Unpickler):
    """Reads strings, numbers and containers; a pickle that asks for anything by name, as one that runs code must, is
    refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")
