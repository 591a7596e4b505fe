"""Samples on disk: one JSON line an answer, written as it comes, so that a run that broke off can go on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.completion import Completion
from mk.errors import MkError

FILE = "samples.jsonl"


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer and what it is the answer to. step: which request of its problem."""

    engine: str
    model: str
    run: int
    problem: str
    step: int
    seed: int
    request: str  # hash of its body
    completion: Completion

    @property
    def key(self) -> tuple[int, str, int]:
        return self.run, self.problem, self.step

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Sample:
        return cls(**{**values, "completion": Completion(**values["completion"])})


class SampleStore:
    """The samples of an evaluation by (run, problem, step), in a file that only grows."""

    def __init__(self, path: Path, engine: str, model: str) -> None:
        self.path = path
        self._engine, self._model = engine, model
        self._samples: dict[tuple[int, str, int], Sample] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples.values())

    def resume(self, folder: Path) -> None:
        """Take over the samples of an earlier run folder. Raises MkError where they are another engine's or model's."""
        for sample in read_samples(folder):
            if (sample.engine, sample.model) != (self._engine, self._model):
                raise MkError(
                    f"{folder} has samples of {sample.engine} on {sample.model}, not {self._engine} on {self._model}",
                    hint="experiment.resume goes on with the same engine and model",
                )
            self._put(sample)

    def find(self, run: int, problem: str, step: int, request: str) -> Completion | None:
        """The stored answer, None if there is none to this very request."""
        sample = self._samples.get((run, problem, step))
        return sample.completion if sample is not None and sample.request == request else None

    def add(self, run: int, problem: str, step: int, seed: int, request: str, completion: Completion) -> None:
        self._put(Sample(self._engine, self._model, run, problem, step, seed, request, completion))

    def _put(self, sample: Sample) -> None:
        self._samples[sample.key] = sample
        # a lone surrogate, which a server may send, becomes its own escape
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(sample.to_json(), ensure_ascii=False) + "\n")


def read_samples(folder: Path) -> list[Sample]:
    """The samples of a run folder. A last line that was cut off in the writing is left out. Raises MkError."""
    path = folder / FILE
    if not path.exists():
        raise MkError(f"{path} does not exist", hint="experiment.resume=<run folder of experiment=accuracy>")
    try:
        lines = path.read_bytes().split(b"\n")  # the last one may end in the middle of a character
    except OSError as error:
        raise MkError(f"{path} cannot be read: {error.strerror}") from error
    samples = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            samples.append(Sample.from_json(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):  # every whole line ends in a line break, so the last one was cut
                break
            raise MkError(f"{path}:{number}: not a sample ({error})") from error
    return samples
