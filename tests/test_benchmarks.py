"""Benchmarks: the prompts they make of rows, the answers they read from contents, the data they refuse."""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
import json
import os
import pickle
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from evals.benchmarks import _OPEN, open_benchmark
from evals.benchmarks.aime import as_integer, boxed
from evals.benchmarks.base import Benchmark, Problem, code_blocks, last_code_block
from evals.benchmarks.choices import LETTERS, chosen_letter, shuffled
from evals.benchmarks.livecode import same_output
from evals.benchmarks.nano_code import SAMPLE, next_line
from evals.benchmarks.scicode import step_code
from evals.benchmarks.scicode_targets import read_targets
from evals.completion import Completion, Request
from evals.report import REPORT, SCORES, Finished, write_scores
from evals.samples import FILE, SampleStore, read_samples
from evals.sandbox.sandbox import Sandbox
from mk.compose import load_config
from mk.errors import MkError
from mk.sampling import SamplingParams


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox()


def benchmark(name: str, data_dir: Path, *overrides: str) -> Benchmark:
    config = load_config([f"benchmark={name}", *(f"benchmark.{override}" for override in overrides)])
    return open_benchmark(config.benchmark, data_dir)


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompts(bench: Benchmark, problem: Problem, contents: Sequence[str]) -> list[str]:
    """What each request asks (its last message, or its text) when these contents come back."""
    conversation, found = bench.conversation(problem), []
    prompt = next(conversation)
    for content in contents:
        found.append(prompt.text if prompt.text is not None else prompt.messages[-1]["content"])
        try:
            prompt = conversation.send(content)
        except StopIteration:
            break
    return found


# AIME


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (r"so \boxed{016}.", 16), (r"\boxed{1} no, \boxed{ 70 }", 70), (r"\boxed{\text{588}}", 588),
        (r"$\boxed{1{,}016}$", None), (r"\boxed{1,016}", 1016), (r"\boxed{16.0}", None), (r"\boxed{x=16}", None),
        (r"\boxed{\frac{1}{2}}", None), ("the answer is 16", None), (r"\boxed{16", None), (r"\boxed{7}\boxed{8", 7),
        (rf"\boxed{{{'0' * 5000}16}}", 16), (rf"\boxed{{{'3' * 5000}}}", None), (r"} \boxed{8} }{ \boxed{", 8),
        (r"\boxed{\boxed{5}+\frac{1}{2}}", 5), (r"\boxed{4}\boxed{\text{5}", 4),
        (r"\boxed{-3}", -3), (r"\boxed{\,204\,}", 204), (r"\fbox{5}", 5), (r"\boxed{}", None),
    ],
)  # fmt: skip
def test_boxed_integers(content: str, answer: int | None) -> None:
    found = boxed(content)
    assert (None if found is None else as_integer(found)) == answer


def test_aime_grades_by_integer(tmp_path: Path) -> None:
    write(tmp_path / "aime2025.jsonl", [{"id": "a", "problem": "2^4?", "answer": "16"}, {"problem": "?", "answer": 7}])
    bench = benchmark("aime2025", tmp_path, "count=2", "sha256=null")
    first, second = bench.problems
    assert prompts(bench, first, [""])[0].startswith("2^4?") and "\\boxed{}" in prompts(bench, first, [""])[0]
    assert [bench.grade(first, [text], None)[0].correct for text in (r"\boxed{016}", r"\boxed{15}", "16", "")] == [
        True, False, False, False,
    ]  # fmt: skip
    assert bench.grade(second, [r"\boxed{7}"], None)[0].correct
    assert bench.facts["hash_known"] is False and bench.facts["rows"] == 2


# data


def test_missing_data_names_path_fields_and_hub(tmp_path: Path) -> None:
    with pytest.raises(MkError) as missing:
        benchmark("gpqa", tmp_path)
    text = f"{missing.value} {missing.value.hint}"
    assert str(tmp_path / "gpqa.jsonl") in text and "Incorrect Answer 3" in text and "Idavidrein/gpqa" in text


def test_counts_hashes_and_fields_are_checked(tmp_path: Path) -> None:
    rows = [{"problem": "p", "answer": "1"}] * 3
    write(tmp_path / "aime2025.jsonl", rows)
    with pytest.raises(MkError, match="has 3 rows, benchmark=aime2025 has 30"):
        benchmark("aime2025", tmp_path)
    with pytest.raises(MkError, match="has sha256") as refused:
        benchmark("aime2025", tmp_path, "count=3")
    assert refused.value.hint is not None
    digest = refused.value.hint.split("benchmark.")[1].split()[0]
    assert benchmark("aime2025", tmp_path, "count=3", digest).facts["hash_known"] is True
    # neither the order of keys, nor fields that nobody reads, change the hash
    write(tmp_path / "aime2025.jsonl", [{"answer": "1", "year": 2025, "problem": "p"}] * 3)
    assert benchmark("aime2025", tmp_path, "count=3", digest).facts["hash_known"] is True
    write(tmp_path / "aime2025.jsonl", [*rows[:2], {"problem": "p"}])
    with pytest.raises(MkError, match="row 3 has no answer"):
        benchmark("aime2025", tmp_path)
    (tmp_path / "aime2025.jsonl").write_text("{")
    with pytest.raises(MkError, match="aime2025.jsonl:1: not JSON"):
        benchmark("aime2025", tmp_path)


def test_the_hub_is_asked_for_what_the_configuration_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that has only a loading script is read by its files, in their order."""
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    asked: list[Any] = []

    def load_dataset(*arguments: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((arguments, options))
        return [STDIN_ROW]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = "livecodebench/code_generation_lite"
    assert benchmark("livecodebench_v6", tmp_path, "count=1").facts["source"] == f"{hub}:test"
    ((arguments, options),) = asked
    files = options["data_files"]["test"]
    assert arguments == ("json",) and len(files) == 6 and options["split"] == "test"
    assert [files[0], files[5]] == [f"hf://datasets/{hub}/test.jsonl", f"hf://datasets/{hub}/test6.jsonl"]
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **_: asked.append(arguments) or [])
    with pytest.raises(MkError, match="has 0 rows, benchmark=gpqa has 198"):
        benchmark("gpqa", tmp_path)
    assert asked[-1] == ("Idavidrein/gpqa", "gpqa_diamond")


# choices


ANSWERS: dict[str, Sequence[str]] = {
    "C": [
        "Answer: C", "answer: C", "ANSWER: C.", "Final Answer: C", "final_answer = C", "Answer:\nC", "Answer:\n\nC\n",
        "Answer C: no. Answer: C", "**Answer**: C", "**Answer:** C", "**Answer: C**", "**Answer:**\n\n**C**",
        "*Answer*: *C*", "__Answer__: __C__", "Answer: **C**", "Answer: `C`", "Answer: \"C\"", "Answer: 'C'.",
        "Answer: (C)", "Answer: [C]", "answer **C**", "## Answer\n\n**C**", "## Final answer: C", "my answer (C)",
        "answer \\boxed{C}", "answer: $C$", r"Answer: \(C\)", r"Answer: $\boxed{C}$", r"Answer: \[\boxed{\text{C}}\]",
        r"answer is $\boxed{\textbf{(C)}}$", r"Answer: $\mathrm{C}$", "the answer is C", "The answer is (C).",
        "the answer is: C", "the answer is **C**", "The answer **is** C", "The correct answer is option C.",
        "Answer: Option (C)", "the answer is choice C", "the answer is C because A is not", "Answer: C) the third",
        "Answer: C. the third", "Answer: C - the third", "Answer: C, the third", "Answer: C: the third",
        "The answer is C even so", "First the answer is (A), but the answer is (C).", "Answer: E, no, Answer: C",
        "Answer: C\n\nI double-checked this answer a second time.", "Answer: C\nAn answer I am sure of.",
        "Answer: C. The answer is a good one.", "Answer: C\n\nThis answer is based on the text.",
        "Answer: C\nAnswer: Because",
    ],
    "A": [
        "Answer: A", "the answer is A", "the answer is A because", "The answer is A since it is so",
        "Answer: A\nbecause", "Answer: A) one", "Answer: (A) one", "Answer: **A** one", "the answer is A, the first",
        "the answer is A is what I say",
    ],
    "": [
        "", "A", "C", "Answer", "Answer:", "Answer: c", "the answer is (c)", "the answer is c", "Answer: E",
        "The answer is (E)", "I cannot answer a question like this.", "The answer is a tricky one.",
        "The answer is A tricky one.", "Answer: Because", "Answer: Both", "Answer: Carbon", "Answer: B2",
        "Answer: C_1", "Answer: D'Alembert", "Answer: C-14", "Answer: C++", "Answer: C#", "Answer: A/D converters",
        "Answer: Bézier curves", "Answer: A graph has nodes.", "Answer: I think it is (C)", "Answer: I'd say so",
        "answer C", "answer I can give", "I answer A", "unanswered: C", "Answer: none", "Answer: not C",
        "the answer is not C", "the answer isn't C", "the answer cannot be C", "answer by C", "the answer to C",
        "the answers: C", "Answer: the letter", "Answer: optional C", "Answers a C question",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "letter"), [(content, letter or None) for letter, contents in ANSWERS.items() for content in contents]
)
def test_chosen_letters(content: str, letter: str | None) -> None:
    assert chosen_letter(content, 4) == letter


def test_i_is_a_letter_and_a_pronoun() -> None:
    for content in (
        "Answer: I",
        "the answer is (I).",
        "The answer is I because of it",
        "Answer: I. nine",
        "Answer: I\n",
    ):
        assert chosen_letter(content, 10) == "I"
    for content in ("Answer: I think it is (C)", "Answer: I'm not sure", "This answer I doubt", "Answer: (I guess)"):
        assert chosen_letter(content, 10) is None


def test_choices_are_shuffled_by_the_question_alone() -> None:
    orders = {name: shuffled(name, "right", ["w1", "w2", "w3"]) for name in map(str, range(200))}
    assert all(options[LETTERS.index(letter)] == "right" for options, letter in orders.values())
    counts = [sum(letter == each for _, letter in orders.values()) for each in "ABCD"]
    assert min(counts) > 25  # of 50 expected
    assert shuffled("7", "right", ["w1", "w2", "w3"]) == orders["7"]


def test_gpqa(tmp_path: Path) -> None:
    row = {"Record ID": "rec1", "Question": "Which?", "Correct Answer": "this\n"}
    row |= {f"Incorrect Answer {n}": f"that {n}" for n in (1, 2, 3)}
    write(tmp_path / "gpqa.jsonl", [row])
    bench = benchmark("gpqa", tmp_path, "count=1")
    (problem,) = bench.problems
    (prompt,) = prompts(bench, problem, [""])
    letter = next(line[0] for line in prompt.splitlines() if line.endswith(") this"))
    wrong = next(other for other in "ABCD" if other != letter)
    assert bench.grade(problem, [f"Answer: {letter}"], None)[0].correct
    assert not bench.grade(problem, [f"Answer: {wrong}"], None)[0].correct


def test_mmlu_pro_shows_five_examples_and_keeps_its_category(tmp_path: Path) -> None:
    row = {"question_id": 1, "question": "q", "options": ["x", "y"], "answer": "B", "category": "computer science"}
    write(tmp_path / "mmlu_pro_computer_science.jsonl", [row, {**row, "question_id": 2, "category": "law"}])
    bench = benchmark("mmlu_pro_cs", tmp_path, "count=1", "sha256=null")
    prompt = next(bench.conversation(bench.problems[0]))
    assert [m["role"] for m in prompt.messages] == ["system", *["user", "assistant"] * 5, "user"]
    for question, reply in zip(prompt.messages[1:-1:2], prompt.messages[2:-1:2], strict=True):
        assert chosen_letter(reply["content"], question["content"].count("\n")) is not None
    assert bench.facts["examples"] == "own"
    assert bench.grade(bench.problems[0], ["the answer is (B)"], None)[0].correct
    assert not bench.grade(bench.problems[0], ["the answer is (C)"], None)[0].correct  # there is no C
    write(tmp_path / "mmlu_pro_cs_validation.jsonl", [{**row, "cot_content": f"A: Let's. ({n})"} for n in range(5)])
    official = benchmark("mmlu_pro_cs", tmp_path, "count=1", "sha256=null")
    assert official.facts["examples"] == "validation"
    assert next(official.conversation(official.problems[0])).messages[2]["content"] == "Answer: Let's. (0)"


# LiveCodeBench


def packed(tests: Sequence[Mapping[str, str]]) -> str:
    """As the hub has private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


STDIN_ROW = {
    "question_id": "s1",
    "question_content": "Print the sum.",
    "starter_code": "",
    "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
    "private_test_cases": json.dumps([{"input": "5 6\n", "output": "11", "testtype": "stdin"}]),
    "metadata": "{}",
}
CALL_ROW = {
    **STDIN_ROW,
    "question_id": "c1",
    "starter_code": "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n",
    "public_test_cases": json.dumps([{"input": "1\n[2, 3]", "output": "6", "testtype": "functional"}]),
    "private_test_cases": json.dumps([{"input": "0\n[]", "output": "0", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "add"}),
}


def code(text: str) -> str:
    return f"Here:\n```python\n{text}\n```\n"


def test_livecodebench_runs_programs_and_functions(tmp_path: Path, sandbox: Sandbox) -> None:
    write(tmp_path / "livecodebench_v6.jsonl", [STDIN_ROW, CALL_ROW])
    bench = benchmark("livecodebench_v6", tmp_path, "count=2", "code_s=2.0")
    stdin, call = bench.problems
    assert "standard input" in prompts(bench, stdin, [""])[0] and "def add" in prompts(bench, call, [""])[0]

    def why(problem: Problem, content: str) -> str:
        (score,) = bench.grade(problem, [content], sandbox)
        assert score.correct == (score.why == "")
        return score.why

    assert why(stdin, code("a, b = map(int, input().split())\nprint(a + b)")) == ""
    assert why(stdin, code("print(3)")) == "test 1: wrong output"
    assert why(stdin, code("print(input()")).startswith("test 0: failed SyntaxError")
    assert why(stdin, code("while True: pass")) == "test 0: timeout"
    assert why(stdin, "print(3)") == "no code block"
    right = "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        print('noise')\n"
    assert why(call, code(f"{right}        return a + sum(b)")) == ""
    assert why(call, code(f"{right}        return a + len(b)")) == "test 0: wrong answer"
    assert why(call, code(f"{right}        return a + sum(b) if b else 1 // a")).startswith("test 1: failed Zero")
    assert why(call, code("def add(a, b): return a + sum(b)")) == ""
    assert why(call, code(f"{right}        import os; os.write(1, b'6\\n0\\n'); os._exit(0)")).startswith("test 0: ")


ADD = "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        {}return a + sum(b)\n"
BURN = "import time; end = time.process_time() + {}\n        while time.process_time() < end: pass\n        "


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (ADD.format("") + "if __name__ == '__main__':\n    print(Solution().add(int(input()), []))", ""),
        (ADD.format("") + "print(6, flush=True)\nimport os, sys; os.write(1, b'6'); sys.stdout.write('6')", ""),
        (ADD.format("print(7, flush=True); ") + "print(Solution().add(1, [2]))", ""),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int' = 0\n" + ADD.format("P(); "), ""),
        ("seen = []\ndef helper(x): return x\ndef add(a, b): seen.append(a); return helper(a) + sum(b)", ""),
        (ADD.format("assert __name__ != '__main__'; "), ""),
        (ADD.format("") + "raise SystemExit", "test 0: ended early"),
        (ADD.format("") + "input()", "test 0: failed EOFError: EOF when reading a line"),
        ("class Solution:\n    def sub(self, a, b): return 6", "test 0: failed AttributeError"),
        (ADD.format(BURN.format(1.5)), "test 0: timeout"),
        (ADD.format(BURN.format("(0 if b else 1.5)")), "test 1: timeout"),
        (ADD.format(BURN.format(0.6)), ""),  # the limit is of each
        (ADD.format("import time; time.sleep(30); "), "test 0: timeout"),
        ("while True: pass\n" + ADD.format(""), "test 0: timeout"),
        (ADD.format("try: sum(range(10 ** 10))\n        except BaseException: pass\n        "), "test 0: timeout"),
    ],
)
def test_functions_are_called_as_livecodebench_does(
    program: str, why: str, every_benchmark: dict[str, Benchmark], sandbox: Sandbox
) -> None:
    """In a module that is not the main one; code_s, here one second, is a test's."""
    bench = every_benchmark["livecodebench_v6"]
    started = time.monotonic()
    (score,) = bench.grade(bench.problems[1], [code(program)], sandbox)
    assert score.why.startswith(why) and score.correct == (why == ""), score.why
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(
    "line",
    [
        "assert pow(2, -1, 7) == 4 and abs(-1) == 1 and sum([1], 2) == 3",
        "assert math.pow(2, 2) == 4.0 == sqrt(16) and random.random() < 1 and datetime.date(2024, 1, 1).day == 1",
        "assert deepcopy([1]) == copy.copy([1]) and mean([1, 3]) == 2 and itemgetter(0)([5]) == 5 and timedelta",
        "assert json.loads(dumps([1])) == [1] and StringIO('x').read() == 'x' and maxsize == sys.maxsize and reduce",
        "assert heappop([1]) == bisect_left([1], 1) + 1 and Counter('aa')['a'] == 2 and List and re.sub",
    ],
)
def test_livecodebench_makes_names_known(line: str, every_benchmark: dict[str, Benchmark], sandbox: Sandbox) -> None:
    bench = every_benchmark["livecodebench_v6"]
    programs = f"{line}\nprint(sum(map(int, input().split())))", ADD.format(f"{line}; ")
    for problem, program in zip(bench.problems, programs, strict=True):
        assert bench.grade(problem, [code(program)], sandbox)[0].why == ""


def test_private_tests_that_are_pickled_need_a_known_hash(tmp_path: Path) -> None:
    row = {**STDIN_ROW, "private_test_cases": packed([{"input": "5 6\n", "output": "11", "testtype": "stdin"}])}
    write(tmp_path / "livecodebench_v6.jsonl", [row])
    with pytest.raises(MkError, match="pickled, and the hash of this data is not known"):
        benchmark("livecodebench_v6", tmp_path, "count=1")
    with pytest.raises(MkError) as refused:
        benchmark("livecodebench_v6", tmp_path, "count=1", "sha256=0")
    digest = str(refused.value.hint).split("benchmark.")[1].split()[0]
    bench = benchmark("livecodebench_v6", tmp_path, "count=1", digest)
    assert [test["output"] for test in bench.problems[0].fields["tests"]] == ["3\n", "11"]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


def test_a_pickle_that_runs_code_is_refused_even_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    write(tmp_path / "livecodebench_v6.jsonl", [{**STDIN_ROW, "private_test_cases": evil}])
    with pytest.raises(MkError) as refused:
        benchmark("livecodebench_v6", tmp_path, "count=1", "sha256=0")
    digest = str(refused.value.hint).split("benchmark.")[1].split()[0]
    with pytest.raises(MkError, match=r"it asks for \w+\.mkdir"):
        benchmark("livecodebench_v6", tmp_path, "count=1", digest)
    assert not (tmp_path / "made-by-a-pickle").exists()


def test_the_whole_release_has_both_readings(tmp_path: Path) -> None:
    from evals.benchmarks.base import Score

    write(tmp_path / "livecodebench_v6.jsonl", [{**STDIN_ROW, "question_id": str(n)} for n in range(1055)])
    bench = benchmark("livecodebench_v6", tmp_path)
    groups = [problem.fields["slice"] for problem in bench.problems]
    assert groups.count("v6") == 175 and groups[-175] == "v6" and groups[-176] is None
    scores = [Score(p.id, index >= 1000, None, groups[index]) for index, p in enumerate(bench.problems)]
    assert bench.figures(scores) == {"score": 55 / 1055, "v6": 55 / 175}


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("1 2\n", "1 2", True), (" 1 2 \n3\n\n", "1 2\n3", True), ("1.0", "1", True), ("0.5000 YES", "0.5 YES", True),
        ("1\n2", "1 2", False), ("yes", "YES", False), ("1 2", "1", False), ("", "0", False), ("nan", "nan", True),
    ],
)  # fmt: skip
def test_outputs_are_compared_by_value(given: str, expected: str, same: bool) -> None:
    assert same_output(given, expected) is same


def test_the_last_code_block_counts() -> None:
    assert last_code_block("```python\na\n```\ntext\n```\nb\n```") == "b\n"
    assert last_code_block("  ```py\n  a\n  ```") == "  a\n"
    assert last_code_block("no code") is None and last_code_block("```python\nunfinished") is None
    assert code_blocks("```\n```\n```py title\na\n\nb\n ``` end\n`x`\n```\nunfinished") == ["", "a\n\nb\n"]


# SciCode

SCICODE_ROW = {
    "problem_id": "900",
    "required_dependencies": "import numpy as np",
    "sub_steps": [
        {
            "step_number": "900.1",
            "step_description_prompt": "Double it.",
            "function_header": "def double(x):\n    '''Twice x.'''",
            "return_line": "    return y",
            "ground_truth_code": "def double(x):\n    return 2 * x",
            "test_cases": [
                "x = np.arange(3)\nassert np.allclose(double(x), target)",
                "assert (double(1) == 2) == target",
            ],
        },
        {
            "step_number": "900.2",
            "step_description_prompt": "Double it twice.",
            "function_header": "def quadruple(x):\n    '''Four times x.'''",
            "return_line": "    return y",
            "ground_truth_code": "def quadruple(x):\n    return {'y': double(double(x)), 'n': (1, 2)}",
            "test_cases": [
                "from scicode.compare.cmp import are_dicts_close\nassert are_dicts_close(quadruple(2), target)"
            ],
        },
    ],
}


def scicode(folder: Path, rows: Sequence[Mapping[str, Any]], *more: str) -> Benchmark:
    (folder / "scicode").mkdir(exist_ok=True)
    write(folder / "scicode" / "problems_dev.jsonl", rows)
    overrides = ["split=dev", f"count={len(rows)}", *more]
    with pytest.raises(MkError) as refused:
        benchmark("scicode", folder, *overrides)
    return benchmark("scicode", folder, *overrides, str(refused.value.hint).split("benchmark.")[1].split()[0])


def test_scicode_goes_step_by_step_on_the_models_own_code(tmp_path: Path, sandbox: Sandbox) -> None:
    bench = scicode(tmp_path, [SCICODE_ROW])
    (problem,) = bench.problems
    steps: Any = SCICODE_ROW["sub_steps"]
    truth = [code(f"import numpy as np\n{step['ground_truth_code']}") for step in steps]
    wrong = code("def double(x):\n    return 3 * x")
    asked = prompts(bench, problem, truth)
    assert "None, this is the first" in asked[0] and "def double(x):\n    return 2 * x" in asked[1]
    assert "import numpy" not in asked[1].split("# Rules")[0]

    def verdicts(*contents: str) -> list[bool]:
        return [score.correct for score in bench.grade(problem, contents, sandbox)]

    assert verdicts(*truth) == [True, True]
    assert verdicts("", "") == [False, False]
    assert verdicts(wrong, truth[1]) == [False, False]  # the second stands on the first
    assert verdicts(truth[0], code("def quadruple(x):\n    raise SystemExit")) == [True, False]
    scores = bench.grade(problem, [truth[0], wrong], sandbox)
    assert bench.figures(scores) == {"score": 0.5, "problems": 0.0}
    assert bench.grade(problem, ["", "```python\n```"], sandbox)[1].why == "no code block"


def test_scicode_drops_imports_alone() -> None:
    text = "import numpy as np\nfrom math import (\n    pi,\n)\n\ndef f():\n    import os\n    return pi"
    assert step_code(code(text), "def f():") == "def f():\n    import os\n    return pi"
    assert step_code("none", "") == "" and step_code(code("def f(:"), "") == "def f(:\n"


@pytest.mark.parametrize(
    ("header", "blocks", "chosen"),
    [
        ("def f(x):\n    '''Of x.'''", ["def f(x):\n    return x", "print(f(3))"], 0),
        ("def f(x):", ["def f(x):\n    return x", "def f(x):\n    return 2", "def g(x):\n    return f(x)"], 1),
        ("def f(x):", ["def f_old(x):\n    pass", "f(1)\n", "x = 'def f(x)'"], 2),
        ("class Rod:\n    def __init__(self):", ["class Rod:\n    n = 1", "def __init__(self):\n    pass"], 0),
        ("def f(x):", ["import math\n\n\ndef f(x):\n    return (", "assert f(1) == 1"], 0),
        ("def f(x):", ["async def f(x):\n    pass", "f = 3"], 0),
        ("", ["a = 1", "b = 2"], 1),
    ],
)
def test_scicode_takes_the_block_that_defines_the_step(header: str, blocks: Sequence[str], chosen: int) -> None:
    answer = "\n".join(code(block) for block in blocks)
    assert step_code(answer, header) == step_code(code(blocks[chosen]), header)
    assert blocks[chosen].strip() in step_code(answer, header)


@pytest.mark.parametrize("end", ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\r", "\r\n"])
def test_scicode_counts_lines_as_python_does(end: str) -> None:
    text = f"'''a{end}b'''\nimport math\ndef f():\n    return 1"
    found = step_code(code(text), "def f():")
    assert "import" not in found and found.startswith("'''a") and "def f():\n" in found and found.endswith("return 1")


def test_scicode_without_its_package_says_where_rows_may_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MkError, match=r"scicode/problems_dev\.jsonl does not exist, nor is nvidia-scicode") as missing:
        benchmark("scicode", tmp_path, "split=dev")
    assert missing.value.hint is not None and "required_dependencies" in missing.value.hint


LONG = {11, 13}  # together two minutes of arithmetic


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, marks=pytest.mark.skipif(index in LONG and "SOAK" not in os.environ, reason="SOAK=1"))
        for index in range(15)
    ],
)
def test_the_ground_truth_of_scicode_dev_scores_everything(index: int, tmp_path: Path, sandbox: Sandbox) -> None:
    bench = benchmark("scicode", tmp_path, "split=dev")
    problem = bench.problems[index]
    steps = problem.fields["sub_steps"]
    right = bench.grade(problem, [code(step["ground_truth_code"]) for step in steps], sandbox)
    assert [score.unit + score.why for score in right if not score.correct] == []
    empty = bench.grade(problem, [""] * len(steps), sandbox)
    assert len(right) == len(empty) == len(steps) and bench.figures(right) == {"score": 1.0, "problems": 1.0}
    assert bench.figures(empty) == {"score": 0.0, "problems": 0.0}
    assert bench.facts["hash_known"] and sum(len(p.fields["sub_steps"]) for p in bench.problems) == 50


def test_scicode_reads_hdf5_targets(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "test_data.h5", "w") as file:
        file["1.1/test1/var1"] = np.arange(3)
        file["1.1/test2/var1"], file["1.1/test2/var2"] = 1.5, "text"
        for name, value in {"1": 10, "b": 20}.items():
            file[f"1.1/test3/var1/{name}"] = value
        file["1.1/test4/var1/list/var1"], file["1.1/test4/var1/list/var2"] = np.ones(2), 4
        for name, value in {"data": [1, 2], "row": [0, 1], "col": [1, 0], "shape": [2, 2]}.items():
            file[f"1.1/test5/var1/sparse_matrix/{name}"] = value
    one, two, three, four, five = pickle.loads(read_targets(tmp_path / "test_data.h5", "1.1", 5))
    assert one.tolist() == [0, 1, 2] and two == (1.5, "text") and three == {1.0: 10, "b": 20}
    assert four[0].tolist() == [1, 1] and four[1] == 4 and five.toarray().tolist() == [[0, 1], [2, 0]]
    with pytest.raises(MkError, match=r"has no 1\.2/test1"):
        read_targets(tmp_path / "test_data.h5", "1.2", 1)


# whatever an answer holds

MANY = 200_000
CONTENTS = {
    "digits": rf"\boxed{{{'3' * MANY}}} Answer: {'3' * MANY}",
    "boxes": r"\boxed{" * (MANY // 7),
    "boxes in boxes": rf"{chr(92)}boxed{{" * (MANY // 8) + "x" + "}" * (MANY // 8),
    "decorations": r"\boxed{" + r"\text{ " * (MANY // 7) + "1}",
    "answers": "answer" + "*" * MANY + " answer is " + "$" * MANY + "answer:" + " \t" * MANY + "answer" * (MANY // 6),
    "fence without end": "```" + " " * MANY,
    "fence of one word": "```" + "a" * MANY,
    "fences": "```" * (MANY // 3) + "\n```" * (MANY // 4),
    "spaces": " " * MANY + "\n" + "\n" * MANY + "def " * MANY,
    "NUL": "\0Answer: \0 \\boxed{\0}\n```python\nx = '\0'\n```",
    "line ends": "\\boxed{\x0c\x85\u2028} Answer:\u2028\n```python\nx = '\x0c\x85\u2028'\n```",
    "lone surrogates": "Answer: \ud800 \\boxed{\udfff}\n```python\nx = '\udc80\ud800'\n```",
}
PROGRAMS = {
    "lists": "[" * MANY,
    "attributes": "a" + ".b" * MANY,
    "signs": "-" * MANY + "1",
    "line": "x" * (10 * MANY),
    "output of digits": f"print('3' * {MANY})",
    "output of an exponent": "print('1e999999999 1e99999999999999999999 sNaN -Infinity')",
    "output of no UTF-8": "import os; os.write(1, bytes(range(256)) * 99)",
    "output of lists": f"print('[' * {MANY} + ']' * {MANY})",
    "output of objects": f"print('{{\"a\":' * {MANY})",
    "output without end": "while True: print('x' * 65536)",
    "output closed": "import os; os.closerange(0, 99)",
    "its own end": "import os; os.kill(os.getpid(), 9)",
    "its parent's end": "import os; os.kill(os.getppid(), 9)",
    "everybody's end": "import os; os.kill(-1, 9)",
    "folders": "import os\nfor _ in range(1100): os.mkdir('d'); os.chdir('d')",
}
RESULTS = {
    "nested lists": "for _ in range(3000): x = [x]",
    "nested without end": "x.append(x)",
    "digits": "x = 10 ** 10000",
    "no JSON": "x = {(1, 2): {3}}",
    "lone surrogates": "x = '\ud800'.join('ab')",
}
METHOD = "class Solution:\n    def add(self, a, b):\n        x = []\n        {}\n        return x"
HELD = {
    **CONTENTS,
    **{f"program: {name}": code(program) for name, program in PROGRAMS.items()},
    **{f"result: {name}": code(METHOD.format(body)) for name, body in RESULTS.items()},
}


@pytest.fixture(scope="module")
def every_benchmark(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Benchmark]:
    folder = tmp_path_factory.mktemp("data")
    write(folder / "aime2025.jsonl", [{"id": "a", "problem": "2^4?", "answer": "16"}])
    row = {"Question": "Which?", "Correct Answer": "this", **{f"Incorrect Answer {n}": f"that {n}" for n in (1, 2, 3)}}
    write(folder / "gpqa.jsonl", [row])
    row = {"question_id": 1, "question": "q", "options": ["x", "y"], "answer": "B", "category": "computer science"}
    write(folder / "mmlu_pro_computer_science.jsonl", [row])
    write(folder / "livecodebench_v6.jsonl", [STDIN_ROW, CALL_ROW])
    counts = {"aime2025": 1, "gpqa": 1, "mmlu_pro_cs": 1, "livecodebench_v6": 2}
    found = {
        name: benchmark(name, folder, f"count={count}", "sha256=null", *(["code_s=1.0"] if "code" in name else []))
        for name, count in counts.items()
    }
    return {
        **found,
        "scicode": scicode(folder, [SCICODE_ROW], "code_s=3.0"),
        "nano_code": benchmark("nano_code", folder),
    }


@pytest.mark.parametrize("name", _OPEN)
@pytest.mark.parametrize("held", HELD)
def test_whatever_an_answer_holds_it_gets_a_verdict(
    name: str, held: str, every_benchmark: dict[str, Benchmark], sandbox: Sandbox, tmp_path: Path
) -> None:
    """In little time of this process; and it can be stored, resumed from, compared with, and asked further from."""
    bench = every_benchmark[name]
    content, started = HELD[held], time.process_time()
    for problem in bench.problems[:2]:
        contents = [content] * bench.asks(problem)
        scores = bench.grade(problem, contents, sandbox)
        assert scores and not any(score.correct for score in scores)
        write_scores(tmp_path, [scores])
        stored = json.loads((tmp_path / SCORES).read_text(encoding="utf-8").split("\n")[0])
        assert stored["answer"] == scores[0].answer
        (tmp_path / REPORT).write_text(json.dumps({"requests_hash": "h"}))
        assert Finished.read(tmp_path).of([scores], "h") == [[0] * len(scores)]
        conversation = bench.conversation(problem)
        next(conversation)
        for said in contents[1:]:
            assert len(Request(conversation.send(said), 1, SamplingParams()).digest) == 64
    store = SampleStore(tmp_path / FILE, "e", "m")
    store.add(0, "p", 0, 0, "r", Completion(content, content, "stop", 1, 1, 0.0))
    assert read_samples(tmp_path)[0].completion.content == content
    assert time.process_time() - started < 10


# nano_code


def test_nano_code_asks_for_what_stands_in_the_file(tmp_path: Path) -> None:
    bench = benchmark("nano_code", tmp_path)
    text = SAMPLE.read_text()
    kinds = [problem.fields["kind"] for problem in bench.problems]
    assert len(kinds) >= 60 and abs(kinds.count("next_line") - kinds.count("continuation")) <= 1
    for problem in bench.problems:
        fields = problem.fields
        assert fields["prompt"] in text and not fields["prompt"].endswith("\n") and fields["target"].strip()
        after = text[text.index(fields["prompt"]) + len(fields["prompt"]) :]
        (score,) = bench.grade(problem, [after[:200]], None)
        assert score.correct and score.group == fields["kind"], problem
        assert not bench.grade(problem, [f"x{after[:200]}"], None)[0].correct
        assert not bench.grade(problem, [""], None)[0].correct
    altered = dataclasses.replace(bench.config, sha256="0" * 64)
    with pytest.raises(MkError, match="has sha256"):
        open_benchmark(altered, tmp_path)


def test_the_next_line_is_the_first_that_is_not_blank() -> None:
    assert next_line("\n\n    return x  \nmore") == "    return x"
    assert next_line(" + y\nreturn") is None and next_line("") is None
