"""Of experiments whose rows are decode steps of the kernel: each has what it reads, and no more."""

from __future__ import annotations

from dataclasses import dataclass

from mk.errors import MkError
from mk.validation import require_at_least, require_once, require_one_of, require_some_of


def require_launches(launches: str) -> None:
    require_one_of("experiment.launches", launches, ("step", "waves", "graph", "dependent"))


@dataclass(slots=True)
class Steps:
    """Of every experiment that times decode steps, on the kernel or by the simulator."""

    name: str
    batches: list[int]  # one row of results each
    context: int  # mean keys of a row over the timed steps
    steps: int  # timed
    warmup: int  # steps before them

    def __post_init__(self) -> None:
        require_once("experiment.batches", self.batches)


@dataclass(slots=True)
class CheckedSteps(Steps):
    check_tokens: int  # decoded by the checks that go before the timing


ZeroWaitBound = CheckedSteps


@dataclass(slots=True)
class LaunchedSteps(CheckedSteps):
    launches: str  # of a step: step = one; waves = one a wave; graph = those as a CUDA graph; dependent = with
    # programmatic dependent launch in it

    def __post_init__(self) -> None:
        Steps.__post_init__(self)
        require_launches(self.launches)


@dataclass(slots=True)
class DecodeThroughput(LaunchedSteps):
    zero_wait: bool  # then also time a build that waits for no other SM: wrong numbers, and a bound for every schedule
    trace: bool  # then also run a trace build: where a step's time goes, and a timeline for Perfetto


@dataclass(slots=True)
class ScheduleSearch(CheckedSteps):
    candidates: int  # random schedules that are simulated
    local_steps: int  # changes of the best one that are tried after them
    seed: int
    rounds: int  # blocks that the steps are cut into, all schedules in turn on the card; 0 = only simulate

    def __post_init__(self) -> None:
        Steps.__post_init__(self)
        for key in ("candidates", "local_steps", "rounds"):
            require_at_least(f"experiment.{key}", getattr(self, key), 0)


@dataclass(slots=True)
class Variants(LaunchedSteps):
    """Of every experiment that is a comparison of configurations."""

    variants: list[str]  # each some overrides of the configuration, as on the command line; a,b sweeps a key
    axes: list[str]  # keys, or groups, in which the variants may differ; in no other
    rounds: int  # blocks that the steps are cut into, all variants in turn; 1 = one after the other, no ratios

    def __post_init__(self) -> None:
        LaunchedSteps.__post_init__(self)
        require_at_least("experiment.rounds", self.rounds, 1)
        if self.rounds > self.steps:
            raise MkError(f"experiment.rounds={self.rounds} are more than experiment.steps={self.steps}")


# The experiments that are nothing but a comparison, under the names that configs/experiment/ asks for.
WaveOrderAblation = PlacementAblation = ScheduleAblation = RoutingAblation = Variants
KernelAblation = RingAblation = SamplingAblation = TraceAblation = PlanAblation = Variants


@dataclass(slots=True)
class Ladder(Variants):
    zero_wait: bool  # then also the last arm in a build that waits for no other SM


@dataclass(slots=True)
class ContextSweep(Variants):
    baseline_contexts: list[int]  # of the variants' contexts, that the baseline is measured at too

    def __post_init__(self) -> None:
        Variants.__post_init__(self)
        require_once("experiment.baseline_contexts", self.baseline_contexts)


@dataclass(slots=True)
class OpBench(Steps):
    """steps: timed sweeps over the layers, of each operation and engine."""

    operations: list[str] | None  # null = all

    def __post_init__(self) -> None:
        Steps.__post_init__(self)
        if self.operations == []:
            raise MkError("experiment.operations is empty", hint="experiment.operations=null takes all")


@dataclass(slots=True)
class WaveOccupancy(Steps):
    """steps: until the one whose trace is read; nothing is compared, so that there are no rounds."""

    launches: str  # as of LaunchedSteps
    variants: list[str]  # as of Variants
    axes: list[str]
    layer: int  # with experts, and a layer before it

    def __post_init__(self) -> None:
        Steps.__post_init__(self)
        require_launches(self.launches)


@dataclass(slots=True)
class BesideBaseline(LaunchedSteps):
    """Of every experiment that times another engine's decode steps beside the kernel's."""

    routings: list[str]  # each measured by both engines

    def __post_init__(self) -> None:
        LaunchedSteps.__post_init__(self)
        require_some_of("experiment.routings", self.routings, ("uniform", "checkpoint"))


VllmDecode = BesideBaseline


@dataclass(slots=True)
class TransformersDecode(BesideBaseline):
    experts: list[str]  # implementations of transformers, each timed; the fastest one is the baseline

    def __post_init__(self) -> None:
        BesideBaseline.__post_init__(self)
        require_some_of("experiment.experts", self.experts, ("grouped_mm", "batched_mm"))
