"""What an evaluation found: files in its run folder, a row, and some lines to read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from evals.benchmarks.base import Benchmark, Score
from evals.completion import Completion
from evals.figures import bootstrap_difference, mean_and_sd, share
from mk.errors import MkError
from mk.results.rows import Row

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


def raw_answers(completions: Sequence[Completion], scores: Sequence[Sequence[Score]], wall_s: float) -> dict[str, Any]:
    """What a row is computed from. correct: 1 of each unit that is right, by run. answers: whether it ended at the cap
    on its tokens, tokens of its prompt and of itself, of all runs."""
    return {
        "kind": "answers",
        "correct": [[int(score.correct) for score in run] for run in scores],
        "answers": [[int(of.finish == "length"), of.prompt_tokens, of.completion_tokens] for of in completions],
        "wall_s": wall_s,
    }


def totals(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Row` that every evaluation has."""
    scores = [share(run) for run in raw["correct"]]
    mean, sd = mean_and_sd(scores)
    capped, prompts, completions = (sum(of[i] for of in raw["answers"]) for i in range(3))
    return {
        "score": mean,
        "score_sd": sd,
        "scores": scores,
        "answers": len(raw["answers"]),
        "truncated": capped,
        "usage_prompt_tokens": prompts,
        "usage_completion_tokens": completions,
        "wall_s": raw["wall_s"],
    }


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Row`, with verdicts. Besides `raw_answers`: counted, how many requests there were and were sent, how
    many the server counts itself (null where it does not), and runs and seeds; equal: verdicts on samples; theirs:
    another engine's `correct`."""
    found, counted = totals(raw), raw["counted"]
    checks = {
        "samples_are_requests": counted["requests"] == found["answers"],
        "seeds_differ": counted["seeds"] == counted["runs"],
    }
    if counted["answered"] is not None:
        checks["metrics_are_requests"] = counted["answered"] == counted["sent"]
    whole = counted["sent"] == found["answers"]  # no part of the answers is older than the clock
    found["tok_s"] = found["usage_completion_tokens"] / found["wall_s"] if whole and found["wall_s"] else None
    if "theirs" in raw:
        apart = bootstrap_difference(raw["correct"], raw["theirs"])
        found |= {"score_difference": apart.mean}
        found |= {"score_difference_low": apart.low, "score_difference_high": apart.high}
    return {**found, "checks": checks | raw["equal"]}


def summarise(
    benchmark: Benchmark, raw: Mapping[str, Any], scores: Sequence[Sequence[Score]], requests: Mapping[Any, str]
) -> Result:
    """raw: of `raw_answers`."""
    of = totals(raw)
    joined = "\n".join(digest for _, digest in sorted(requests.items()))
    return Result(
        [benchmark.figures(run) for run in scores],
        of["score"],
        of["score_sd"],
        of["answers"],
        of["truncated"],
        of["usage_prompt_tokens"],
        of["usage_completion_tokens"],
        of["wall_s"],
        hashlib.sha256(joined.encode()).hexdigest(),
    )


def write_scores(folder: Path, scores: Sequence[Sequence[Score]]) -> None:
    with (folder / SCORES).open("w", encoding="utf-8", errors="backslashreplace") as file:  # as samples are written
        for run, found in enumerate(scores):
            for score in found:
                file.write(json.dumps({"run": run, **dataclasses.asdict(score)}, ensure_ascii=False) + "\n")


def write_report(folder: Path, result: Result, **more: Any) -> None:
    values = {**dataclasses.asdict(result), **more}
    (folder / REPORT).write_text(json.dumps(values, indent=2) + "\n")


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """Another evaluation, as its run folder has it. correct: by run and unit."""

    folder: Path
    requests_hash: str
    correct: Mapping[int, Mapping[str, bool]]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises MkError naming a folder that has none, or a broken one."""
        try:
            requests_hash = json.loads((folder / REPORT).read_text())["requests_hash"]
            found: dict[int, dict[str, bool]] = {}
            text = (folder / SCORES).read_text(encoding="utf-8")
            for line in map(json.loads, filter(None, text.split("\n"))):
                found.setdefault(int(line["run"]), {})[line["unit"]] = bool(line["correct"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            hint = "experiment.compare=<run folder>"
            raise MkError(f"experiment.compare={folder} is no finished evaluation: {why}", hint=hint) from error
        if not found:
            raise MkError(f"experiment.compare={folder} has no scores")
        return cls(folder, requests_hash, found)

    def of(self, scores: Sequence[Sequence[Score]], requests_hash: str) -> list[list[int]]:
        """What it has right of these units, by run. Raises MkError unless both sent the same requests."""
        if self.requests_hash != requests_hash:
            raise MkError(f"{self.folder} was asked other requests than this evaluation")
        units = [score.unit for score in scores[0]]
        if missing := [unit for run in self.correct.values() for unit in units if unit not in run]:
            raise MkError(f"{self.folder} has no score of {missing[0]}")
        return [[int(run[unit]) for unit in units] for run in self.correct.values()]


def lines(result: Result, row: Row) -> list[str]:
    """The result to read: percentages, the difference to another engine where there is one, and what was verified."""
    spread = "" if result.sd is None else f", sd {100 * result.sd:.2f}"
    found = [f"score {100 * result.mean:.2f} %{spread}, runs {len(result.figures)}"]
    for run, figures in enumerate(result.figures):
        shares = ", ".join(f"{name} {100 * value:.2f} %" for name, value in figures.items())
        found.append(f"  run {run}: {shares}")
    found.append(
        f"answers {result.answers}, truncated {result.truncated}; tokens {result.prompt_tokens} in, "
        f"{result.completion_tokens} out; {result.wall_s:.1f} s, "
        + ("some answers from an earlier run" if row.tok_s is None else f"{row.tok_s:.0f} tokens/s")
    )
    if row.score_difference is not None:
        interval = f"95 % from {row.score_difference_low:+.4f} to {row.score_difference_high:+.4f}"
        found.append(f"difference {row.score_difference:+.4f}, {interval}")
    return found + [f"{name.replace('_', ' ')}: {'yes' if passed else 'NO'}" for name, passed in row.checks.items()]
