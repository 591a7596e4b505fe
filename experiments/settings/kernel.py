"""Of experiments that look at the kernel itself: its distances and bits, single waves, a slow SM, the card."""

from __future__ import annotations

from dataclasses import dataclass

from mk.errors import MkError
from mk.validation import check_contexts, require_at_least


@dataclass(slots=True)
class KernelCorrectness:
    name: str
    layers: list[int] | None  # null = all
    batches: list[list[int]]  # contexts of each batch's rows, this step's token included, 0 = inactive row
    logit_std: float  # standard deviation of the scores of history
    seed: int

    def __post_init__(self) -> None:
        if not self.batches:
            raise MkError("experiment.batches is empty", hint="experiment.batches=[[1,64,300]]")
        for contexts in self.batches:
            check_contexts("experiment.batches", contexts)
        require_at_least("experiment.logit_std", self.logit_std, 3)


@dataclass(slots=True)
class KernelBits:
    name: str
    context: int  # keys of the sequence that is watched, this step's token included
    neighbours: list[int]  # keys of the others; with it they fill the batch
    repeats: int
    switches: int  # steps that each run another program than the one before
    delays: int  # steps with SMs held up at random, each otherwise
    delays_ns: int  # the longest of one hold-up
    seed: int

    def __post_init__(self) -> None:
        check_contexts("experiment.neighbours", self.neighbours)
        for key in ("context", "repeats", "switches", "delays", "delays_ns"):
            require_at_least(f"experiment.{key}", getattr(self, key), 1)
        if 0 in self.neighbours:
            raise MkError(f"experiment.neighbours={self.neighbours}: every neighbour has at least 1 key")


@dataclass(slots=True)
class Parity:
    name: str
    contexts: list[int]  # keys of each row at the first position that is compared
    steps: int  # positions compared in each row
    seed: int

    def __post_init__(self) -> None:
        check_contexts("experiment.contexts", self.contexts)
        if 0 in self.contexts:
            raise MkError(f"experiment.contexts={self.contexts}: every row has at least 1 key")
        require_at_least("experiment.steps", self.steps, 1)


@dataclass(slots=True)
class PartialStep:
    name: str
    start_at: str | None  # <layer>.<wave>, null = the step's first
    stop_after: str | None  # null = the step's last
    contexts: list[int]  # keys of each row, this step's token included, 0 = inactive row
    kv_std: float  # of the K and V behind each context
    seed: int
    dump: bool  # write every region that is written to the run folder

    def __post_init__(self) -> None:
        check_contexts("experiment.contexts", self.contexts)
        require_at_least("experiment.kv_std", self.kv_std, 0)


@dataclass(slots=True)
class SlowSm:
    name: str
    batch: int
    context: int  # mean keys of a row over the timed steps
    steps: int  # timed
    warmup: int  # steps before them
    sm: int  # the slow one
    slow_us: float  # that its static share of a layer takes longer

    def __post_init__(self) -> None:
        for field in ("batch", "context", "steps", "slow_us"):
            require_at_least(f"experiment.{field}", getattr(self, field), 1)
        for field in ("warmup", "sm"):
            require_at_least(f"experiment.{field}", getattr(self, field), 0)


@dataclass(slots=True)
class SmMap:
    name: str
    launches: int  # of the probe
    lines: int  # counters that a pair hands back and forth in a launch, one after the other
    rounds: int  # of each
    time_limit_s: float  # of a launch

    def __post_init__(self) -> None:
        for field in ("launches", "lines", "rounds", "time_limit_s"):
            require_at_least(f"experiment.{field}", getattr(self, field), 1)


@dataclass(slots=True)
class Sanitize:
    name: str
    timeout_s: int  # of each run of the sanitizer

    def __post_init__(self) -> None:
        require_at_least("experiment.timeout_s", self.timeout_s, 1)
