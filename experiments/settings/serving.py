"""Of experiments on the server, its scheduler, and what uses it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mk.errors import MkError
from mk.validation import require_at_least, require_once, require_some_of

TASKS = Path(__file__).resolve().parent.parent / "agents" / "tasks"


@dataclass(slots=True)
class Serve:
    name: str  # what it serves, and how, is in the groups model, engine, prefill and server


VllmServe = Serve  # and baseline


@dataclass(slots=True)
class ServingCosts:
    name: str
    conversations: int
    context: int  # tokens of a prompt
    answer: int  # tokens of each turn
    batches: list[int]
    steps: int  # timed
    rounds: int  # of which the fastest counts

    def __post_init__(self) -> None:
        for key in ("conversations", "context", "answer", "steps", "rounds"):
            require_at_least(f"experiment.{key}", getattr(self, key), 1)
        if not self.batches:
            raise MkError("experiment.batches is empty", hint="'experiment.batches=[1,8]'")
        for batch in self.batches:
            require_at_least("experiment.batches", batch, 1)


@dataclass(slots=True)
class BatchSwitching:
    name: str
    context: int  # tokens of each prompt
    stagger: int  # tokens that the first request generates, and each other one more than the one before
    rounds: int  # of each arm, after one more to warm up

    def __post_init__(self) -> None:
        for key, least in (("context", 1), ("stagger", 1), ("rounds", 2)):  # one round says nothing of an interval
            require_at_least(f"experiment.{key}", getattr(self, key), least)


@dataclass(slots=True)
class ServedStep:
    name: str
    batches: list[int]  # whose served steps are compared with the engine's own
    context: int  # mean keys of a row over those steps, and of the requests that run while a prompt enters
    steps: int  # timed, of either arm
    rounds: int  # that they are cut into, both arms in turn, after one more to warm up
    prompt: int  # tokens of the prompt that enters
    short: int  # tokens of prompts where interruptions are measured
    events: int  # of each kind, about as many

    def __post_init__(self) -> None:
        for key in ("context", "steps", "rounds", "prompt", "short", "events"):
            require_at_least(f"experiment.{key}", getattr(self, key), 1)
        if not self.batches:
            raise MkError("experiment.batches is empty", hint="'experiment.batches=[1,8]'")
        for batch in self.batches:
            require_at_least("experiment.batches", batch, 1)
        if self.rounds > self.steps:
            raise MkError(f"experiment.rounds={self.rounds} are more than experiment.steps={self.steps}")
        if self.context <= self.steps // self.rounds // 2:
            raise MkError(f"experiment.context={self.context} leaves no room for {self.steps} steps around it")


@dataclass(slots=True)
class Workload:
    """Requests for a server, sent as others end."""

    requests: int
    prompt: int  # tokens of each
    tokens: float  # that a request generates, mean
    spread: float  # standard deviation of their logarithm; 0: all generate as many
    scale: float  # share of `tokens` that is asked for

    def check(self, name: str) -> None:
        """name: of its key."""
        for key in ("requests", "prompt"):
            require_at_least(f"{name}.{key}", getattr(self, key), 1)
        require_at_least(f"{name}.spread", self.spread, 0)
        if self.tokens * self.scale < 1:
            raise MkError(f"{name}.tokens={self.tokens} x {name}.scale={self.scale}: a request generates at least 1")


@dataclass(slots=True)
class Servers:
    """Of every experiment that measures servers from a client's side."""

    name: str
    seed: int  # of what the client makes up
    base_url: str | None  # of a server, which is then measured in the place of ours and vLLM's
    start_s: float  # that our server may take to start
    timeout_s: float  # between two signs of life of an answer

    def __post_init__(self) -> None:
        for key in ("start_s", "timeout_s"):
            require_at_least(f"experiment.{key}", getattr(self, key), 1)


@dataclass(slots=True)
class Serving(Servers):
    workloads: list[str]  # of those below, in this order
    fixed: Workload
    aime: Workload

    def __post_init__(self) -> None:
        Servers.__post_init__(self)
        require_some_of("experiment.workloads", self.workloads, ("fixed", "aime"))
        require_once("experiment.workloads", self.workloads)
        self.fixed.check("experiment.fixed")
        self.aime.check("experiment.aime")


@dataclass(slots=True)
class AgentTrial(Servers):
    tasks: list[str]  # folders of experiments/agents/tasks, for an agent that is a program
    limit_s: float  # of such an agent, for each task
    warm: int  # tokens of the prompt that is sent before, by agent=replay turns as long as its own; 0: nothing is

    def __post_init__(self) -> None:
        Servers.__post_init__(self)
        require_some_of("experiment.tasks", self.tasks, sorted(path.name for path in TASKS.iterdir() if path.is_dir()))
        require_once("experiment.tasks", self.tasks)
        require_at_least("experiment.limit_s", self.limit_s, 1)
        require_at_least("experiment.warm", self.warm, 0)


@dataclass(slots=True)
class Accuracy:
    name: str
    runs: int
    limit: int | None  # problems
    data_dir: str
    base_url: str | None  # of a server, which then answers in the configured engine's place
    served_model: str | None
    token_ids: bool
    max_hours: float
    allow_missing: list[str]  # names of evals/sandbox/probes.py
    resume: str | None  # run folder whose samples are taken over
    compare: str | None  # run folder whose score is subtracted
    check: bool  # greedy samples with transformers' greedy decode

    def __post_init__(self) -> None:
        for key in ("runs", "limit"):
            require_at_least(f"experiment.{key}", getattr(self, key), 1)
        require_at_least("experiment.max_hours", self.max_hours, 0)
        if self.check and not self.token_ids:
            raise MkError("experiment.check=true compares tokens", hint="experiment.check=false")


AccuracyVllm = Accuracy
