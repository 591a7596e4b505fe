"""Multiple choice, reasoning first: GPQA diamond, and MMLU-Pro's computer science questions after five examples.

The letter is the last one that the content gives as its answer; without one the answer is wrong, never guessed.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.benchmarks.base import Benchmark, Conversation, Problem, Prompt, Score
from evals.benchmarks.data import load_rows
from evals.benchmarks.examples import OWN_EXAMPLES
from evals.sandbox.sandbox import Sandbox
from mk.config import BenchmarkConfig
from mk.errors import MkError

LETTERS = "ABCDEFGHIJ"
_OPENING = r"""(?:[\s*_`"'$(\[{]|\\[(\[]|\\(?:text|textbf|mathrm|mathbf|boxed|fbox)\{)*+"""
# The word in any case, what leads to a letter, and a capital letter that ends as a word. Runs are possessive: an answer
# may repeat a character without end.
_ANSWER = re.compile(
    r"(?<![^\W_])(?i:answer)"
    r"""(?:[\s*_]*+(?:[:=]|(?i:is)(?![^\W_])\s*+:?)|(?=\s*+[*_`"'$(\[{\\]))"""
    rf"{_OPENING}(?:(?i:option|choice)(?![^\W_]){_OPENING})?"
    r"([A-J])(?!_*+[^\W_]|['’/-][^\W_]|[+#])"
    # A and I are words as well: they are letters where the line ends, a sign follows, or a word that follows no article
    # and no pronoun
    r"(?:(?<![AI])|(?![ \t]++\w)|(?=[ \t]++(?i:and|as|because|but|due|for|is|since|which|with)(?![^\W_])))"
)

_GPQA_PROMPT = """Answer the following multiple choice question. Reason step by step. The last line of your response \
must be 'Answer: X', where X is one of A, B, C and D.

{question}

{options}"""
_GPQA_FIELDS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")

_MMLU_SYSTEM = """The following are multiple choice questions (with answers) about computer science. Think step by \
step and then finish your answer with "the answer is (X)" where X is the correct letter choice."""


class Gpqa(Benchmark):
    """Choices stand in an order that depends on the question's id alone: the same in every run and for every engine."""

    def __init__(self, config: BenchmarkConfig, data_dir: Path) -> None:
        rows, facts = load_rows(config, data_dir, _GPQA_FIELDS)
        problems = []
        for row in rows:
            # without a record id, the question is its own
            name = str(row.get("Record ID") or hashlib.sha256(row["Question"].encode()).hexdigest()[:16])
            right, *wrong = (str(row[field]).strip() for field in _GPQA_FIELDS[1:])
            options, letter = shuffled(name, right, wrong)
            problems.append(Problem(name, {"question": row["Question"].strip(), "options": options, "answer": letter}))
        super().__init__(config, problems, facts)

    def conversation(self, problem: Problem) -> Conversation:
        fields = problem.fields
        options = "\n".join(f"{letter}) {text}" for letter, text in zip(LETTERS, fields["options"], strict=False))
        yield Prompt.user(_GPQA_PROMPT.format(question=fields["question"], options=options))

    def grade(self, problem: Problem, contents: Sequence[str], sandbox: Sandbox | None) -> list[Score]:
        return [_score(problem, contents[0])]


class MmluPro(Benchmark):
    """The official examples where the validation split is at hand, else five of our own; the report says which."""

    def __init__(self, config: BenchmarkConfig, data_dir: Path) -> None:
        fields = ("question_id", "question", "options", "answer", "category")
        rows, facts = load_rows(config, data_dir, fields, lambda row: row["category"] == "computer science")
        problems = [Problem(str(row["question_id"]), row) for row in rows]
        examples, whose = _examples(data_dir)
        self._examples = [turn for example in examples for turn in _example_turns(example)]
        super().__init__(config, problems, {**facts, "examples": whose})

    def conversation(self, problem: Problem) -> Conversation:
        system = {"role": "system", "content": _MMLU_SYSTEM}
        yield Prompt((system, *self._examples, {"role": "user", "content": _mmlu_question(problem.fields)}))

    def grade(self, problem: Problem, contents: Sequence[str], sandbox: Sandbox | None) -> list[Score]:
        return [_score(problem, contents[0])]


def shuffled(name: str, right: str, wrong: Sequence[str]) -> tuple[list[str], str]:
    """The choices in the order that `name` gives them, and the letter of the right one."""
    order = list(range(1 + len(wrong)))
    random.Random(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])).shuffle(order)
    options = [right, *wrong]
    return [options[index] for index in order], LETTERS[order.index(0)]


def chosen_letter(content: str, options: int) -> str | None:
    """The last letter that is given as the answer: "Answer: C", "the answer is (C)", with or without Markdown."""
    return next((letter for letter in reversed(_ANSWER.findall(content)) if letter in LETTERS[:options]), None)


def _score(problem: Problem, content: str) -> Score:
    letter = chosen_letter(content, len(problem.fields["options"]))
    return Score(problem.id, letter == problem.fields["answer"], letter)


def _examples(data_dir: Path) -> tuple[Sequence[Mapping[str, Any]], str]:
    path = data_dir / "mmlu_pro_cs_validation.jsonl"
    if not path.exists():
        return OWN_EXAMPLES, "own"
    config = BenchmarkConfig(name="mmlu_pro_cs", file=path.stem, max_tokens=1)
    rows, _ = load_rows(config, data_dir, ("question", "options", "answer", "cot_content"))
    if len(rows) < 5:
        raise MkError(f"{path} has {len(rows)} rows, five examples are shown")
    return rows[:5], "validation"


def _example_turns(row: Mapping[str, Any]) -> list[dict[str, str]]:
    reasoning = str(row["cot_content"]).removeprefix("A: ")
    return [
        {"role": "user", "content": _mmlu_question(row)},
        {"role": "assistant", "content": f"Answer: {reasoning}"},
    ]


def _mmlu_question(row: Mapping[str, Any]) -> str:
    options = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, row["options"], strict=False))
    return f"Question:\n{row['question']}\nOptions:\n{options}"
