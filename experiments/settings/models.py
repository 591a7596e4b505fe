"""Of experiments on a model, and on rows that are there."""

from __future__ import annotations

from dataclasses import dataclass

from mk.validation import check_contexts, require_at_least


@dataclass(slots=True)
class Quickstart:
    name: str
    prompt: str
    prompts: list[str] | None  # one a row, in the place of `prompt`
    new_tokens: int  # decoded in each row
    ragged: list[int] | None  # contexts of a second batch, decoded after a first one of size 1
    check: bool  # compare with transformers' greedy decode

    def __post_init__(self) -> None:
        require_at_least("experiment.new_tokens", self.new_tokens, 1)
        if self.ragged is not None:
            check_contexts("experiment.ragged", self.ragged)


@dataclass(slots=True)
class TrainNano:
    name: str
    out_dir: str  # the Hugging Face folder is written here
    corpus_dir: str | None  # a CPython Lib folder; null: this interpreter's
    corpus_version: str | None
    seed: int
    steps: int  # upper bound when max_minutes is set
    max_minutes: float | None
    batch_tokens: int  # tokens a step
    lr: float
    warmup: int  # steps
    weight_decay: float
    dropout: float
    balance: float  # weight of the experts' load-balancing loss
    chat_share: float  # of the training tokens
    probe_tokens: int


@dataclass(slots=True)
class SimulatorAccuracy:
    name: str
    rows: list[str]  # folders of measured rows, or patterns of their names
    fitted: list[str]  # wave orders whose rows the constants were fitted to


@dataclass(slots=True)
class Rerun:
    name: str
    run: str  # name of a folder in run_dir or results/<card>/, or its path
