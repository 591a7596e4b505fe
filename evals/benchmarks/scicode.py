"""SciCode: scientific problems in steps, each solved on top of the model's own code for the steps before it.

`split=test` has 65 problems; its numeric targets lie in `data_dir/scicode/test_data.h5`. `split=dev` has 15, whose
targets are what the ground truth in the rows computes: here, once a problem, in the sandbox. The rows of both come from
`data_dir`, or from the installed package nvidia-scicode, whose own dependencies are not needed.

Some steps of three test problems are given, not asked for: their code is among the package's files.
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import hashlib
import importlib.util
import re
import secrets
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.benchmarks.base import Benchmark, Conversation, Problem, Prompt, Score, code_blocks
from evals.benchmarks.data import load_rows
from evals.benchmarks.scicode_programs import check_program, target_program
from evals.benchmarks.scicode_targets import read_targets
from evals.sandbox.sandbox import Limits, Sandbox
from mk.config import BenchmarkConfig
from mk.errors import MkError

GIVEN = {("13", 5), ("62", 0), ("76", 2)}  # (problem, index of the step)

_FIELDS = ("problem_id", "required_dependencies", "sub_steps")
_FILES = {"dev": "problems_dev", "test": "problems_all"}  # of the package; rows, and their hash in version 26.3
_KNOWN = {
    "dev": (15, "f6be6ccdf2d13d01caf3f93ed544d8fcb8c9063cd48a3c9f9d6b9560567a4c11"),
    "test": (65, "e4b1ba4ac0c32f732f63962e5cfd16a6c8c5fdd79e71f44634c076639ecbf9dc"),
}
_DEFINED = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_PROMPT = """You solve a scientific problem in Python, step by step.

# Steps so far, with their code
{before}

# The next step
{description}

```python
{header}

{return_line}
```

# Rules
Use only these dependencies, which are already imported; do not import them again:
{dependencies}

Write the complete function or class of the next step, with exactly this header, in one ```python block. Do not repeat \
the code of earlier steps, which you may call, and write neither examples nor tests."""


class SciCode(Benchmark):
    runs_code = True

    def __init__(self, config: BenchmarkConfig, data_dir: Path) -> None:
        folder, split = data_dir / "scicode", str(config.split)
        path = folder / f"{_FILES[split]}.jsonl"
        rows_folder = folder if path.exists() else _package()
        if rows_folder is None:
            raise MkError(
                f"no data for benchmark=scicode: {path} does not exist, nor is nvidia-scicode installed",
                hint=f"pip install --no-deps nvidia-scicode, or a JSON object a line there, with {', '.join(_FIELDS)}",
            )
        count, digest = _KNOWN[split]
        config = dataclasses.replace(
            config, file=_FILES[split], count=config.count or count, sha256=config.sha256 or digest
        )
        rows, facts = load_rows(config, rows_folder, _FIELDS)
        self._h5 = None if config.split == "dev" else folder / "test_data.h5"
        if self._h5 is not None and not self._h5.exists():
            raise MkError(
                f"benchmark=scicode benchmark.split=test needs {self._h5}",
                hint="SciCode's test_data.h5 lies there, or benchmark.split=dev computes its own targets",
            )
        self._given = {key: _given_code(rows_folder, *key) for key in GIVEN} if config.split == "test" else {}
        self._targets: dict[str, bytes] = {}
        if self._h5 is not None:  # there is no hash to compare it with
            with self._h5.open("rb") as file:
                facts["targets_sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        super().__init__(config, [Problem(str(row["problem_id"]), row) for row in rows], facts)

    def asks(self, problem: Problem) -> int:
        return sum((problem.id, index) not in self._given for index in range(len(problem.fields["sub_steps"])))

    def conversation(self, problem: Problem) -> Conversation:
        code: list[str] = []
        for index, step in enumerate(problem.fields["sub_steps"]):
            given = self._given.get((problem.id, index))
            if given is None:
                content = yield Prompt.user(step_prompt(problem, index, code))
                given = step_code(content, step["function_header"])
            code.append(given)

    def grade(self, problem: Problem, contents: Sequence[str], sandbox: Sandbox | None) -> list[Score]:
        """A score a step: its tests pass with the model's own code of all steps up to it."""
        assert sandbox is not None
        answers, code, scores = iter(contents), [], []
        for index, step in enumerate(problem.fields["sub_steps"]):
            given = self._given.get((problem.id, index))
            code.append(given if given is not None else step_code(next(answers), step["function_header"]))
            if given is None:
                why = self._check(problem, index, code, sandbox) if code[-1] else "no code block"
                scores.append(Score(f"{problem.id}.{index + 1}", why == "", code[-1] or None, why=why))
        return scores

    def figures(self, scores: Sequence[Score]) -> dict[str, float]:
        """`score` counts steps; `problems` those whose steps are all right."""
        verdicts: dict[str, bool] = {}
        for score in scores:
            name = score.unit.split(".")[0]
            verdicts[name] = verdicts.get(name, True) and score.correct
        return {**super().figures(scores), "problems": sum(verdicts.values()) / max(1, len(verdicts))}

    def _check(self, problem: Problem, index: int, code: Sequence[str], sandbox: Sandbox) -> str:
        """Why a step's tests fail, "" if they pass."""
        step = problem.fields["sub_steps"][index]
        passed = secrets.token_hex(16)  # printed after the last test: a program that exits early does not have it
        targets = self._step_targets(problem, step, sandbox)
        program = check_program(problem.fields["required_dependencies"], code, step["test_cases"], passed)
        outcome = sandbox.run(program, limits=self._limits(), files={"targets.pickle": targets})
        if outcome.ok and outcome.stdout.rstrip().endswith(passed):
            return ""
        last = outcome.stderr.strip().splitlines()[-1:] or [""]
        return f"{outcome.why} {last[0][:200]}".strip()

    def _step_targets(self, problem: Problem, step: Mapping[str, Any], sandbox: Sandbox) -> bytes:
        number = str(step["step_number"])
        if number not in self._targets:
            if self._h5 is not None:
                self._targets[number] = read_targets(self._h5, number, len(step["test_cases"]))
            else:
                self._targets[number] = self._ground_truth(problem, step, sandbox)
        return self._targets[number]

    def _ground_truth(self, problem: Problem, step: Mapping[str, Any], sandbox: Sandbox) -> bytes:
        """What the ground truth of all steps makes of a step's tests, pickled, as the program that checks reads it."""
        code = [str(s["ground_truth_code"]) for s in problem.fields["sub_steps"]]
        program = target_program(problem.fields["required_dependencies"], code, step["test_cases"])
        outcome = sandbox.run(program, limits=self._limits())
        if not outcome.ok:
            raise MkError(
                f"scicode: the ground truth of step {step['step_number']} {outcome.why}: {outcome.stderr[-300:]}"
            )
        return zlib.decompress(base64.b64decode(outcome.stdout.split()[-1]))

    def _limits(self) -> Limits:
        seconds = self.config.code_s or 300.0
        return Limits(wall_s=2 * seconds, cpu_s=round(seconds), memory_mb=4096, file_mb=512)


def step_prompt(problem: Problem, index: int, code: Sequence[str]) -> str:
    """The prompt of a step, with the code of those before it."""
    steps = problem.fields["sub_steps"]
    before = [f"{steps[i]['step_description_prompt']}\n\n```python\n{code[i]}\n```" for i in range(index)]
    return _PROMPT.format(
        before="\n\n".join(before) or "None, this is the first.",
        description=steps[index]["step_description_prompt"],
        header=steps[index]["function_header"],
        return_line=steps[index]["return_line"],
        dependencies=problem.fields["required_dependencies"],
    )


def step_code(content: str, header: str) -> str:
    """The code of an answer without imports at the top level; of several blocks the last that defines the step's name,
    or the last of all if none does.

    "" where there is none: later steps then lack it too, as they would in a notebook.
    """
    blocks = code_blocks(content)
    if not blocks:
        return ""
    name = _DEFINED.search(header)
    named = [block for block in blocks if name and name[1] in _DEFINED.findall(block)]
    # Python ends lines at these alone, which are what ast counts
    block = (named or blocks)[-1].replace("\r\n", "\n").replace("\r", "\n")
    try:
        tree = ast.parse(block)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # of a lone surrogate, of code that is nested deep
        return block  # it fails its tests, with the reason
    lines = block.split("\n")
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""
    return "\n".join(lines).strip("\n")


def _package() -> Path | None:
    """The data folder of nvidia-scicode, found without importing it."""
    found = importlib.util.find_spec("scicode")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations))) / "data"


def _given_code(folder: Path, problem: str, index: int) -> str:
    path = folder / f"{problem}.{index + 1}.txt"
    if not path.exists():
        raise MkError(f"benchmark=scicode: {path} does not exist", hint="the package nvidia-scicode has it")
    return re.sub(r"^# code .*\n", "", path.read_text())
