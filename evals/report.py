"""What an evaluation found: files in its run folder, a row, and some lines to read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.benchmarks.base import Benchmark, Score
from evals.figures import Difference, bootstrap_difference, mean_and_sd
from evals.runner import Answers
from mk.errors import MkError

SCORES, REPORT = "scores.jsonl", "report.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """An evaluation's figures. Shares 0..1; tokens as the engine counted them."""

    figures: list[dict[str, float]]  # of each run
    mean: float
    sd: float | None
    answers: int
    truncated: int
    prompt_tokens: int
    completion_tokens: int
    wall_s: float
    requests_hash: str

    @property
    def tok_s(self) -> float:
        return self.completion_tokens / self.wall_s if self.wall_s else 0.0


def summarise(
    benchmark: Benchmark,
    answers: Sequence[Answers],
    scores: Sequence[Sequence[Score]],
    requests: Mapping[Any, str],
    wall_s: float,
) -> Result:
    figures = [benchmark.figures(run) for run in scores]
    mean, sd = mean_and_sd([run["score"] for run in figures])
    completions = [completion for each in answers for completion in each.completions]
    joined = "\n".join(digest for _, digest in sorted(requests.items()))
    return Result(
        figures,
        mean,
        sd,
        len(completions),
        sum(completion.finish == "length" for completion in completions),
        sum(completion.prompt_tokens for completion in completions),
        sum(completion.completion_tokens for completion in completions),
        wall_s,
        hashlib.sha256(joined.encode()).hexdigest(),
    )


def write_scores(folder: Path, scores: Sequence[Sequence[Score]]) -> None:
    with (folder / SCORES).open("w") as file:
        for run, found in enumerate(scores):
            for score in found:
                file.write(json.dumps({"run": run, **dataclasses.asdict(score)}, ensure_ascii=False) + "\n")


def write_report(folder: Path, result: Result, **more: Any) -> None:
    values = {**dataclasses.asdict(result), **more}
    (folder / REPORT).write_text(json.dumps(values, indent=2) + "\n")


def difference(folder: Path, scores: Sequence[Sequence[Score]], requests_hash: str) -> Difference:
    """This evaluation's score minus that of another run folder. Raises MkError unless both sent the same requests."""
    try:
        report = json.loads((folder / REPORT).read_text())
        lines = [json.loads(line) for line in (folder / SCORES).read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise MkError(f"{folder} is no finished evaluation: {error}", hint="experiment.compare=<run folder>") from error
    if report["requests_hash"] != requests_hash:
        raise MkError(f"{folder} was asked other requests than this evaluation, so their scores cannot be compared")
    theirs: dict[int, dict[str, bool]] = {}
    for line in lines:
        theirs.setdefault(line["run"], {})[line["unit"]] = line["correct"]
    units = [score.unit for score in scores[0]]
    return bootstrap_difference(
        [[score.correct for score in run] for run in scores], [[run[unit] for unit in units] for run in theirs.values()]
    )


def lines(result: Result) -> list[str]:
    """The result to read: percentages, per run and together."""
    spread = "" if result.sd is None else f", sd {100 * result.sd:.2f}"
    found = [f"score {100 * result.mean:.2f} %{spread}, runs {len(result.figures)}"]
    for run, figures in enumerate(result.figures):
        shares = ", ".join(f"{name} {100 * value:.2f} %" for name, value in figures.items())
        found.append(f"  run {run}: {shares}")
    found.append(
        f"answers {result.answers}, truncated {result.truncated}; tokens {result.prompt_tokens} in, "
        f"{result.completion_tokens} out; {result.wall_s:.1f} s, {result.tok_s:.0f} tokens/s"
    )
    return found
