"""Every benchmark end to end: its data's own format, the built-in server over HTTP, a scripted model, a known score."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mk.errors import MkError
from tests.eval_rig import CHECKS, known, run, scripted, write
from tests.test_benchmarks import CALL_ROW, SCICODE_ROW, STDIN_ROW, code, packed

ROOT = Path(__file__).resolve().parent.parent
AIME = [{"id": f"a{n}", "problem": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(4)]
AIME_REPLIES = [
    ("What is 0 plus 0?", r"It is \boxed{000}."), ("What is 1 plus 1?", r"\boxed{1} no, \boxed{2}"),
    ("What is 2 plus 2?", r"\boxed{5}"), ("What is 3 plus 3?", "Six."),
]  # fmt: skip


def aime(root: Path) -> list[str]:
    write(root / "aime2025.jsonl", AIME)
    return known(root, "aime2025", 4)[1]


def test_aime(tmp_path: Path) -> None:
    ran = run(tmp_path, *aime(tmp_path), *scripted(tmp_path, AIME_REPLIES), "experiment.runs=2")
    row = ran.row
    assert (ran.status, row.engine, row.score, row.score_sd, row.scores) == (0, "scripted", 0.5, 0.0, [0.5, 0.5])
    assert row.checks == CHECKS and (row.answers, row.truncated) == (8, 0) and row.sampling is not None
    assert [score["correct"] for score in ran.scores] == [True, True, False, False] * 2
    sample = ran.samples[0]
    found = sample.completion
    assert found.response_id.startswith("chatcmpl-") and found.reasoning.startswith(r"\boxed{1}")
    assert len(found.token_ids or []) == found.completion_tokens and len(found.prompt_ids or []) == found.prompt_tokens
    assert found.latency_s > 0 and {sample.seed for sample in ran.samples} == {0, 1}
    assert sum(sample.completion.completion_tokens for sample in ran.samples) == row.usage_completion_tokens
    report = ran.report
    assert report["data"]["hash_known"] and report["harness"]["results"]["aime2025"]["score,none"] == 0.5


def test_a_truncated_answer_counts_and_is_wrong(tmp_path: Path) -> None:
    cap = "benchmark.max_tokens=20"
    ran = run(tmp_path, *aime(tmp_path), *scripted(tmp_path, [("What is", "so " * 40 + r"\boxed{0}")]), cap)
    assert ran.status == 0 and (ran.row.score, ran.row.truncated, ran.row.answers) == (0.0, 4, 4)


def test_gpqa(tmp_path: Path) -> None:
    rows = []
    for n in range(5):
        row = {"Record ID": f"rec{n}", "Question": f"Which colour has thing {n}?\n", "Correct Answer": f"right {n}"}
        rows.append(row | {f"Incorrect Answer {k}": f"wrong {n}.{k}" for k in (1, 2, 3)})
    write(tmp_path / "gpqa.jsonl", rows)
    bench, overrides = known(tmp_path, "gpqa", 5)
    right = [problem.fields["answer"] for problem in bench.problems]
    wrong = ["ABCD"["ABCD".index(letter) - 1] for letter in right]
    said = [
        f"Answer: {right[0]}",
        f"**Answer: {right[1]}**",
        f"Answer: {wrong[2]}",
        "I do not know.",
        f"Answer: {right[4]}",
    ]
    replies = [(f"has thing {n}?", text) for n, text in enumerate(said)]
    ran = run(tmp_path, *overrides, *scripted(tmp_path, replies))
    assert ran.status == 0 and ran.row.checks == CHECKS and ran.row.score == 0.6
    assert [score["answer"] for score in ran.scores] == [right[0], right[1], wrong[2], None, right[4]]
    assert "wrong 0.1" not in (ran.folder / "samples.jsonl").read_text()  # the questions are stored nowhere


def test_mmlu_pro_cs(tmp_path: Path) -> None:
    row = {"options": ["one", "two", "three"], "category": "computer science"}
    rows = [{**row, "question_id": n, "question": f"Pick number {n}.", "answer": "ABC"[n % 3]} for n in range(6)]
    write(tmp_path / "mmlu_pro_computer_science.jsonl", [*rows, {**rows[0], "question_id": 9, "category": "law"}])
    replies = [(f"Pick number {n}.", f"Let's see. The answer is ({'ABC'[min(n, 2)]}).") for n in range(6)]
    ran = run(tmp_path, *known(tmp_path, "mmlu_pro_cs", 6)[1], *scripted(tmp_path, replies))
    assert ran.status == 0 and ran.row.checks == CHECKS and ran.row.score == pytest.approx(4 / 6)
    assert ran.report["data"]["examples"] == "own" and ran.row.answers == 6


def test_livecodebench(tmp_path: Path) -> None:
    """Programs and functions, right, wrong, endless and absent; private tests pickled as the hub has them."""
    hidden = packed([{"input": "5 6\n", "output": "11", "testtype": "stdin"}])
    stdin = [
        {**STDIN_ROW, "question_id": f"s{n}", "question_content": f"Sum {n}.", "private_test_cases": hidden}
        for n in range(4)
    ]
    calls = [{**CALL_ROW, "question_id": f"c{n}", "question_content": f"Call {n}."} for n in range(2)]
    write(tmp_path / "livecodebench_v6.jsonl", [*stdin, *calls])
    method = "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        return a + "
    replies = [
        ("Sum 0.", code("print(sum(map(int, input().split())))")), ("Sum 1.", code("print(3)")),
        ("Sum 2.", code("while True: pass")), ("Sum 3.", "No code."),
        ("Call 0.", code(f"{method}sum(b)")), ("Call 1.", code(f"{method}len(b)")),
    ]  # fmt: skip
    overrides = known(tmp_path, "livecodebench_v6", 6, "benchmark.code_s=1.0")[1]
    ran = run(tmp_path, *overrides, *scripted(tmp_path, replies))
    assert ran.status == 0 and ran.row.checks == CHECKS and ran.row.score == pytest.approx(2 / 6)
    assert [(score["unit"], score["why"]) for score in ran.scores] == [
        ("s0", ""), ("s1", "test 1: wrong output"), ("s2", "test 0: timeout"), ("s3", "no code block"), ("c0", ""),
        ("c1", "test 0: wrong answer"),
    ]  # fmt: skip
    assert all(ran.report["sandbox"]["held"].values())


FIRST, SECOND = (step["ground_truth_code"] for step in SCICODE_ROW["sub_steps"])  # type: ignore[index]


def science(root: Path, file: str, rows: list[dict[str, Any]], split: str) -> list[str]:
    (root / "scicode").mkdir(exist_ok=True)
    write(root / "scicode" / file, rows)
    return known(root, "scicode", len(rows), f"benchmark.split={split}")[1]


def test_scicode_dev(tmp_path: Path) -> None:
    """Two steps, the second on top of the model's own first one: right, half right, and wrong from the start."""
    rows = []
    for name in ("900", "901", "902"):
        steps = [
            {**step, "step_description_prompt": f"Of {name}: {step['step_description_prompt']}"}
            for step in SCICODE_ROW["sub_steps"]  # type: ignore[attr-defined]
        ]
        rows.append({**SCICODE_ROW, "problem_id": name, "sub_steps": steps})
    twice = "# The next step\nOf {}: Double it twice."
    replies = [
        (twice.format(900), code(SECOND)), (twice.format(901), "no code"), (twice.format(902), code(SECOND)),
        ("Of 900: Double it.", code(FIRST)), ("Of 901: Double it.", code(FIRST)),
        ("Of 902: Double it.", code("def double(x):\n    return 3 * x")),
    ]  # fmt: skip
    overrides = science(tmp_path, "problems_dev.jsonl", rows, "dev")
    ran = run(tmp_path, *overrides, *scripted(tmp_path, replies))
    assert ran.status == 0 and ran.row.checks == CHECKS and ran.row.answers == 6
    assert [score["correct"] for score in ran.scores] == [True, True, True, False, False, False]
    assert ran.row.score == 0.5 and ran.report["figures"] == [{"score": 0.5, "problems": pytest.approx(1 / 3)}]


def test_scicode_test(tmp_path: Path) -> None:
    """The test split takes its targets from an HDF5 file, and asks for no step whose code is given."""
    row = {**SCICODE_ROW, "problem_id": "77"}
    given = {**SCICODE_ROW, "problem_id": "62"}  # whose first step is given
    (tmp_path / "scicode").mkdir()
    for name in ("13.6", "62.1", "76.3"):
        (tmp_path / "scicode" / f"{name}.txt").write_text(f"# code {name}\n{FIRST}\n")
    with h5py.File(tmp_path / "scicode" / "test_data.h5", "w") as file:
        file["900.1/test1/var1"], file["900.1/test2/var1"] = np.array([0, 2, 4]), True
        file["900.2/test1/var1/y"] = 8
        file["900.2/test1/var1/n/list/var1"], file["900.2/test1/var1/n/list/var2"] = 1, 2
    overrides = science(tmp_path, "problems_all.jsonl", [row, given], "test")
    replies = [
        ("# The next step\nDouble it twice.", code(SECOND)),
        ("Double it.", code("def double(x):\n    return -x")),
    ]
    ran = run(tmp_path, *overrides, *scripted(tmp_path, replies))
    assert ran.status == 0 and ran.row.checks == CHECKS and ran.row.answers == 3
    assert [(score["unit"], score["correct"]) for score in ran.scores] == [
        ("77.1", False),
        ("77.2", False),
        ("62.2", True),
    ]


def test_scicode_test_without_its_targets_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MkError, match=r"needs .*test_data\.h5") as missing:
        science(tmp_path, "problems_all.jsonl", [SCICODE_ROW], "test")
    assert "benchmark.split=dev" in str(missing.value.hint)


def shared_data() -> Path | None:
    """A folder with the whole sets, where there is one: EVAL_DATA, data/ here, or one beside this checkout."""
    folders = [Path(os.environ.get("EVAL_DATA", "-")), ROOT / "data", ROOT.parent / "shared" / "data"]
    return next((folder for folder in folders if (folder / "aime2025.jsonl").exists()), None)


@pytest.mark.skipif(shared_data() is None, reason="EVAL_DATA=<folder with aime2025.jsonl>")
def test_all_of_aime(tmp_path: Path) -> None:
    data = shared_data()
    assert data is not None
    rows = [json.loads(line) for line in (data / "aime2025.jsonl").read_text().splitlines()]
    replies = [
        (row["problem"].strip(), rf"So it is \boxed{{{int(row['answer']) + (n % 3 == 0):03}}}.")
        for n, row in enumerate(rows)
    ]
    overrides = ["benchmark=aime2025", f"experiment.data_dir={data}", *scripted(tmp_path, replies)]
    ran = run(tmp_path, *overrides, "batch.size=8")
    assert ran.status == 0 and ran.row.checks == CHECKS and ran.row.answers == 30
    assert ran.row.score == pytest.approx(20 / 30) and ran.report["data"]["hash_known"]


@pytest.mark.skipif(shared_data() is None, reason="EVAL_DATA=<folder with mmlu_pro_computer_science.jsonl>")
def test_all_of_mmlu_pro_cs(tmp_path: Path) -> None:
    """Every other of 410 is answered rightly, by a whole question, because some begin alike."""
    data = shared_data()
    assert data is not None
    rows = [json.loads(line) for line in (data / "mmlu_pro_computer_science.jsonl").read_text().splitlines()]
    replies = []
    for n, row in enumerate(rows):
        options = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCDEFGHIJ", row["options"], strict=False))
        letter = row["answer"] if n % 2 == 0 else "AB"[row["answer"] == "A"]
        replies.append((f"Question:\n{row['question']}\nOptions:\n{options}".strip(), f"The answer is ({letter})."))
    overrides = ["benchmark=mmlu_pro_cs", f"experiment.data_dir={data}", *scripted(tmp_path, replies)]
    ran = run(tmp_path, *overrides, "batch.size=8", "experiment.max_hours=100")
    assert ran.status == 0 and ran.row.checks == CHECKS and ran.row.answers == 410
    assert ran.row.score == 0.5 and ran.report["data"]["hash_known"]
