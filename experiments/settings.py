"""The typed fields of each experiment: `train_nano` has the dataclass `TrainNano`, and so on.

They stand here, apart from the code they steer, so that composing a configuration never waits for a heavy import. Like
every schema they hold types; the values stand in configs/experiment/<name>.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mk.errors import MkError
from mk.validation import check_contexts, require_at_least, require_once, require_one_of, require_some_of

TASKS = Path(__file__).resolve().parent / "agents" / "tasks"


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
class DecodeThroughput:
    name: str
    batches: list[int]  # one row of results each
    context: int  # mean keys of a row over the timed steps
    steps: int  # timed
    warmup: int  # steps before them
    check_tokens: int  # decoded by the checks that go before the timing
    launches: str  # of a step: step = one; waves = one a wave; graph = those as a CUDA graph; dependent = with
    # programmatic dependent launch in it
    zero_wait: bool  # then also time a build that waits for no other SM: wrong numbers, and a bound for every schedule
    trace: bool  # then also run a trace build: where a step's time goes, and a timeline for Perfetto

    def __post_init__(self) -> None:
        require_one_of("experiment.launches", self.launches, ("step", "waves", "graph", "dependent"))
        require_once("experiment.batches", self.batches)


@dataclass(slots=True)
class SimulatorAccuracy:
    name: str
    rows: list[str]  # folders of measured rows, or patterns of their names
    fitted: list[str]  # wave orders whose rows the constants were fitted to


@dataclass(slots=True)
class ScheduleSearch(DecodeThroughput):
    candidates: int  # random schedules that are simulated
    local_steps: int  # changes of the best one that are tried after them
    seed: int
    rounds: int  # blocks that the steps are cut into, all schedules in turn on the card; 0 = only simulate

    def __post_init__(self) -> None:
        DecodeThroughput.__post_init__(self)
        for key in ("candidates", "local_steps", "rounds"):
            require_at_least(f"experiment.{key}", getattr(self, key), 0)


@dataclass(slots=True)
class Variants(DecodeThroughput):
    """Of every experiment that is a comparison of configurations."""

    variants: list[str]  # each some overrides of the configuration, as on the command line; a,b sweeps a key
    axes: list[str]  # keys, or groups, in which the variants may differ; in no other
    rounds: int  # blocks that the steps are cut into, all variants in turn; 1 = one after the other, no ratios

    def __post_init__(self) -> None:
        DecodeThroughput.__post_init__(self)
        require_at_least("experiment.rounds", self.rounds, 1)
        if self.rounds > self.steps:
            raise MkError(f"experiment.rounds={self.rounds} are more than experiment.steps={self.steps}")


# The experiments that are nothing but a comparison, under the names that configs/experiment/ asks for.
WaveOrderAblation = PlacementAblation = ScheduleAblation = RoutingAblation = Variants
KernelAblation = RingAblation = SamplingAblation = TraceAblation = PlanAblation = Ladder = Variants


@dataclass(slots=True)
class ContextSweep(Variants):
    baseline_contexts: list[int]  # of the variants' contexts, that the baseline is measured at too

    def __post_init__(self) -> None:
        Variants.__post_init__(self)
        require_once("experiment.baseline_contexts", self.baseline_contexts)


@dataclass(slots=True)
class OpBench(DecodeThroughput):
    """steps: timed sweeps over the layers, of each operation and engine."""

    operations: list[str] | None  # null = all

    def __post_init__(self) -> None:
        DecodeThroughput.__post_init__(self)
        if self.operations == []:
            raise MkError("experiment.operations is empty", hint="experiment.operations=null takes all")


@dataclass(slots=True)
class WaveOccupancy(Variants):
    layer: int  # with experts, and a layer before it


@dataclass(slots=True)
class BesideBaseline(DecodeThroughput):
    """Of every experiment that times another engine's decode steps beside the kernel's."""

    routings: list[str]  # each measured by both engines

    def __post_init__(self) -> None:
        DecodeThroughput.__post_init__(self)
        require_some_of("experiment.routings", self.routings, ("uniform", "checkpoint"))


VllmDecode = BesideBaseline
ZeroWaitBound = DecodeThroughput


@dataclass(slots=True)
class TransformersDecode(BesideBaseline):
    experts: list[str]  # implementations of transformers, each timed; the fastest one is the baseline

    def __post_init__(self) -> None:
        BesideBaseline.__post_init__(self)
        require_some_of("experiment.experts", self.experts, ("grouped_mm", "batched_mm"))


@dataclass(slots=True)
class PrefillThroughput:
    name: str
    lengths: list[int]  # of a prompt alone, a row of results each
    packed: list[int]  # of `packed_rows` prompts in one call
    packed_rows: int
    repeats: int  # timed calls, fewer where they take longer than time_limit_s
    time_limit_s: float  # of the timed calls of one row
    check_tokens: int  # of the prompt that is checked before anything is timed

    def __post_init__(self) -> None:
        for key in ("lengths", "packed"):
            if any(length < 1 for length in getattr(self, key)):
                raise MkError(f"experiment.{key}={getattr(self, key)}: a prompt has at least 1 token")
        if not self.lengths and not self.packed:
            raise MkError("experiment.lengths and experiment.packed are empty", hint="experiment.lengths=[8192]")
        for key in ("packed_rows", "repeats"):
            require_at_least(f"experiment.{key}", getattr(self, key), 1)
        require_at_least("experiment.check_tokens", self.check_tokens, 2)


@dataclass(slots=True)
class PrefillTiles:
    name: str
    tokens: int  # of the chunk that the kernels are timed on
    repeats: int  # timed launches of each kernel with each tile
    time_limit_s: float  # no tile is begun after that
    kernels: list[str]  # qkv, o, up, down, attention_full, attention_sliding

    def __post_init__(self) -> None:
        for key in ("tokens", "repeats"):
            require_at_least(f"experiment.{key}", getattr(self, key), 1)


@dataclass(slots=True)
class PrefillCorrectness:
    name: str
    layers: list[int] | None  # measured one by one, null = all
    lengths: list[int]  # of the prompts
    cuts: list[int]  # tokens of a first call that the longest prompt is continued from
    small_chunk: int  # tokens a pass, of the call that cuts all prompts
    whole: bool  # also compare whole prompts, after the last layer
    seed: int

    def __post_init__(self) -> None:
        if not self.lengths or len(set(self.lengths)) < len(self.lengths) or min(self.lengths) < 1:
            raise MkError(f"experiment.lengths={self.lengths}: different lengths of at least 1 token are needed")
        for at in self.cuts:
            if not 0 < at < max(self.lengths):
                raise MkError(f"experiment.cuts={self.cuts}: {at} does not cut a prompt of {max(self.lengths)} tokens")
        if self.layers == []:
            raise MkError("experiment.layers is empty", hint="experiment.layers=null measures all")
        require_at_least("experiment.small_chunk", self.small_chunk, 1)


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
class Serve:
    name: str  # what it serves, and how, is in the groups model, engine, prefill and server


VllmServe = Serve  # and baseline


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
class Rerun:
    name: str
    run: str  # name of a folder in run_dir or results/<card>/, or its path


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
