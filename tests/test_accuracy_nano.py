"""Evaluations of nano, decoded by the interpreter behind the built-in server: the tokens are transformers'."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from evals.samples import FILE, read_samples
from mk.errors import MkError
from mk.model.opening import NANO
from mk.model.tokenizer import load_tokenizer
from tests.eval_rig import CHECKS, known, run, write
from tests.promotion import committed, no, repository, require_kept

__all__ = ["committed", "repository"]

NANO_CODE = ["benchmark=nano_code", "experiment.limit=6"]


def test_greedy_is_transformers_greedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = run(tmp_path, *NANO_CODE, "benchmark.max_tokens=16")
    out = capsys.readouterr().out
    assert "equal to transformers: yes" in out and "weights: checkpoint" in out
    assert ran.status == 0 and ran.row.checks == {**CHECKS, "equal_to_transformers": True}
    row = ran.row
    assert (row.engine, row.dtype, row.benchmark, row.answers) == ("interpreter", "float32", "nano_code", 6)
    assert row.usage_completion_tokens == sum(len(sample.completion.token_ids or []) for sample in ran.samples)
    assert ran.report["data"]["hash_known"] is True
    tokenizer = load_tokenizer(NANO)
    for sample in ran.samples:
        found = sample.completion
        assert tokenizer.decode(found.token_ids or [], skip_special=True) == found.content and found.reasoning == ""


def test_another_token_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that says something else than its model would."""
    from mk.server import completions

    feed = completions.TextChoice.feed

    def altered(self: completions.TextChoice, delivery: object) -> object:
        piece = feed(self, delivery)  # type: ignore[arg-type]
        self.token_ids[3:4] = [5] * len(self.token_ids[3:4])
        return piece

    monkeypatch.setattr(completions.TextChoice, "feed", altered)
    ran = run(tmp_path, "benchmark=nano_code", "experiment.limit=2", "benchmark.max_tokens=6")
    assert ran.status == 1 and ran.row.checks == {**CHECKS, "equal_to_transformers": False}


def test_sampled_runs_differ_and_go_on(committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampled = [*NANO_CODE, "sampling=top_p", "benchmark.max_tokens=12", "experiment.runs=3"]
    first = run(tmp_path, *sampled)
    samples = first.samples
    assert first.row.checks == CHECKS and len(samples) == 18 and {sample.seed for sample in samples} == {0, 1, 2}
    by_run = [sorted((s.problem, s.completion.token_ids) for s in samples if s.run == run) for run in range(3)]
    assert by_run[0] != by_run[1] != by_run[2] != by_run[0]
    assert first.row.score_sd == pytest.approx(statistics.stdev(first.row.scores or []))
    lines = (first.folder / FILE).read_text().splitlines(keepends=True)
    (first.folder / FILE).write_text("".join(lines[:10]))
    second = run(tmp_path, *sampled, f"experiment.resume={first.folder}", f"experiment.compare={first.folder}")
    ids = {sample.key: sample.completion.token_ids for sample in samples}
    assert {sample.key: sample.completion.token_ids for sample in read_samples(second.folder)} == ids
    out = capsys.readouterr().out
    assert "resumed: 10 samples" in out and "some answers from an earlier run" in out
    assert second.row.score_difference == 0 and second.row.tok_s is None and second.row.checks == CHECKS
    names = ("score_difference", "score_difference_low", "score_difference_high")
    require_kept(committed, second.folder, **dict.fromkeys(names, lambda value: value + 1), checks=no)


def test_a_comparison_that_cannot_be_made_costs_no_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [*NANO_CODE, "benchmark.max_tokens=2", "experiment.limit=1"]
    with pytest.raises(MkError, match="experiment.compare=/nowhere is no finished evaluation"):
        run(tmp_path, *small, "experiment.compare=/nowhere")
    assert not list(tmp_path.glob("*/rows.jsonl")) and "answers" not in capsys.readouterr().out
    first = run(tmp_path, *small)
    other = run(tmp_path, *small, "benchmark.max_tokens=3", f"experiment.compare={first.folder}")
    assert other.status == 1 and other.row.score is not None and other.row.score_difference is None
    assert f"not compared: {first.folder} was asked other requests" in capsys.readouterr().out


def test_a_toy_needs_a_limit_for_what_it_cannot_solve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "aime2025.jsonl", [{"problem": f"number {n}", "answer": str(n)} for n in range(4)])
    overrides = known(tmp_path, "aime2025", 4)[1]
    with pytest.raises(MkError, match="only proves the pipeline") as refused:
        run(tmp_path, *overrides)
    assert refused.value.hint and "experiment.limit=2" in refused.value.hint
    ran = run(tmp_path, *overrides, "experiment.limit=2", "benchmark.max_tokens=8")
    assert ran.status == 0 and ran.row.checks == CHECKS and ran.row.truncated == 2
    assert "this score only proves that the pipeline works" in capsys.readouterr().out
