"""What a configuration may hold: one typed schema for each group, and the hash that names a resolved configuration.

Values live in `configs/` alone. A field without a default here must be spelled there; a default of None means "does not
apply to this option", never a value. Unknown keys and wrong types are refused while composing (`mk/compose.py`);
what a type cannot say (allowed words, ranges, keys that go together) is refused by `__post_init__`, as an MkError. The
engine's schema, with the kernel's ring and hand-offs, is `mk/engine_config.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mk.engine_config import EngineConfig
from mk.errors import MkError
from mk.ring import ENTRIES, FEWEST_SLOTS, RING_SLOTS
from mk.schedule.costs import Costs
from mk.validation import (
    check_contexts,
    check_optional,
    check_values,
    require_at_least,
    require_at_most,
    require_one_of,
)

MOST_SMS, MOST_ROWS = 1024, 1024  # beyond any card, and any step that is lowered here

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"


def group_options(group: str) -> list[str]:
    """The options of a config group: the YAML files of its folder, without the shared `_*.yaml` pieces."""
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml") if not path.stem.startswith("_"))


@dataclass(slots=True)
class ModelConfig:
    """Which model: a checkpoint, or the geometry that random weights fill."""

    name: str
    preset: str  # nano (bundled with its weights), slice or north_mini_code (geometries)
    path: str | None  # Hugging Face folder or hub id; takes the preset's place
    revision: str | None  # commit of a hub id; a folder has none
    window: str  # sliding window of W keys: hf counts the query's own among them, vllm adds it

    def __post_init__(self) -> None:
        require_one_of("model.preset", self.preset, ("nano", "slice", "north_mini_code"))
        require_one_of("model.window", self.window, ("hf", "vllm"))


@dataclass(slots=True)
class WeightsConfig:
    """Where the weights come from: the checkpoint, or a seed."""

    name: str
    seed: int | None = None
    qk_scale: float | None = None  # factor on the q and on the k projection

    def __post_init__(self) -> None:
        check_optional("weights", self, ("seed", "qk_scale") if self.name == "random" else ())


@dataclass(slots=True)
class ScheduleConfig:
    """Who runs a task: the SM its list says, or whichever SM claims it first."""

    name: str
    attention_claimers: int | None = None  # SMs that claim attention splits
    moe_claimers: int | None = None  # SMs that claim MoE tiles
    claim_ahead: int | None = None  # tickets an SM may hold before its consumers need them
    path: str | None = None  # search: the file that holds what was found

    def __post_init__(self) -> None:
        fields = ("attention_claimers", "moe_claimers", "claim_ahead")
        needed: dict[str, tuple[str, ...]] = {"work_stealing": fields}
        if self.name == "search":  # the file says whether there are claimers
            needed["search"] = ("path", *(field for field in fields if getattr(self, field) is not None))
        check_optional("schedule", self, needed.get(self.name, ()))
        for field in fields:
            require_at_least(f"schedule.{field}", getattr(self, field), 1)
        require_at_most("schedule.claim_ahead", self.claim_ahead, ENTRIES)


@dataclass(slots=True)
class WaveOrderConfig:
    """In which order a layer's waves are flattened into task lists."""

    name: str
    waves: list[str]  # a dense layer's dense_up and dense_down stand where moe_up and moe_down stand


@dataclass(slots=True)
class PlacementConfig:
    """Which SM gets which task."""

    name: str
    path: str | None = None  # sm_map: the file that holds it

    def __post_init__(self) -> None:
        check_optional("placement", self, ("path",) if self.name == "sm_map" else ())


@dataclass(slots=True)
class RoutingConfig:
    """Where expert ids come from: the router itself, or a mode that replaces its choice inside top-k."""

    name: str
    seed: int | None = None
    distinct: int | None = None  # correlated: distinct experts a layer touches in a step
    path: str | None = None  # replay: the recorded trace
    pattern: str | None = None  # adversarial: all_same | all_different

    def __post_init__(self) -> None:
        needed = {
            "uniform": ("seed",),
            "correlated": ("seed", "distinct"),
            "replay": ("path",),
            "adversarial": ("pattern",),
            "oracle": ("seed",),
        }
        check_optional("routing", self, needed.get(self.name, ()))
        require_at_least("routing.distinct", self.distinct, 1)
        if self.pattern is not None:
            require_one_of("routing.pattern", self.pattern, ("all_same", "all_different"))


@dataclass(slots=True)
class BatchConfig:
    """How many sequences decode together, and how long each is when decoding starts."""

    name: str
    size: int  # rows
    contexts: list[int] | None  # tokens already in each row, 0 = inactive row; null = as long as the prompt

    def __post_init__(self) -> None:
        require_at_least("batch.size", self.size, 1)
        require_at_most("batch.size", self.size, MOST_ROWS)
        if self.contexts is None:
            return
        if len(self.contexts) != self.size:
            raise MkError(
                f"batch.contexts has {len(self.contexts)} entries for batch.size={self.size}",
                hint="give one length a row, or batch.contexts=null for the prompt's own length",
            )
        check_contexts("batch.contexts", self.contexts)


@dataclass(slots=True)
class GpuConfig:
    """Facts about a card, asserted against the live device; or the virtual SMs of a CPU."""

    name: str
    kind: str  # cpu | cuda
    sms: int
    interleaving_seed: int | None = None  # cpu: the order in which virtual SMs advance
    smem_per_block_kb: int | None = None
    l2_mb: int | None = None
    nominal_tb_s: float | None = None  # HBM bandwidth of the data sheet
    measured: bool | None = None  # whether a probe on this card has confirmed these figures
    measured_tb_s: float | None = None  # the HBM read bandwidth it reached
    costs: Costs | None = None  # of a card whose traces were fitted: what the simulator computes with

    def __post_init__(self) -> None:
        require_one_of("gpu.kind", self.kind, ("cpu", "cuda"))
        require_at_least("gpu.sms", self.sms, 1)
        require_at_most("gpu.sms", self.sms, MOST_SMS)
        needed = {"interleaving_seed"}
        if self.kind == "cuda":
            needed = {"smem_per_block_kb", "l2_mb", "nominal_tb_s", "measured"}
            needed |= ({"measured_tb_s"} if self.measured else set()) | ({"costs"} if self.costs else set())
        check_optional("gpu", self, needed)


@dataclass(slots=True)
class PrefillConfig:
    """What computes the prompt's KV pages."""

    name: str
    chunk: int  # prompt tokens a forward pass
    products: str | None = None  # triton: how qkv, o and dense down are multiplied: packed | torch

    def __post_init__(self) -> None:
        check_optional("prefill", self, ("products",) if self.name == "triton" else ())
        require_at_least("prefill.chunk", self.chunk, 1)
        if self.products is not None:
            require_one_of("prefill.products", self.products, ("packed", "torch"))


@dataclass(slots=True)
class KVTokensConfig:
    """Tokens that the pools of KV pages hold, all sequences and cached blocks together."""

    full: int
    sliding: int  # of the sliding layers, which keep a window of each sequence

    def __post_init__(self) -> None:
        for key in ("full", "sliding"):
            require_at_least(f"server.kv_tokens.{key}", getattr(self, key), 64)


@dataclass(slots=True)
class ServerConfig:
    """Where the server listens, and how much it takes on."""

    name: str
    host: str
    port: int
    model_id: str | None  # what clients call the model; null: the folder's or the preset's name
    slots: int  # requests that decode together at most
    batches: list[int]  # smaller batch sizes that steps are built for too; the smallest that suffices is taken
    context: int  # tokens of a request, prompt and answer
    kv_tokens: KVTokensConfig
    max_waiting: int  # requests in the queue, those among them that come between two steps; more are turned away
    deliver: int  # tokens that are sent at a time
    drain_s: float  # how long a stopping server waits for answers to end

    def __post_init__(self) -> None:
        for key in ("slots", "context", "max_waiting", "deliver"):
            require_at_least(f"server.{key}", getattr(self, key), 1)
        for size in self.batches:
            require_at_least("server.batches", size, 1)
        require_at_least("server.drain_s", self.drain_s, 0)
        if not 1 <= self.port <= 65535:
            raise MkError(f"server.port={self.port} must lie in 1..65535", hint="server.port=8000")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes, ascending, the last of them `slots`."""
        return tuple(sorted({size for size in self.batches if size < self.slots} | {self.slots}))


@dataclass(slots=True)
class SamplingConfig:
    """How the next token is chosen from the logits."""

    name: str
    temperature: float  # 0 = greedy
    top_k: int  # 0 = off
    top_p: float  # 1 = off
    seed: int

    def __post_init__(self) -> None:
        require_at_least("sampling.temperature", self.temperature, 0)
        require_at_least("sampling.top_k", self.top_k, 0)
        if not 0 < self.top_p <= 1:
            raise MkError(f"sampling.top_p={self.top_p} must lie in (0, 1]", hint="sampling.top_p=1 is off")
        for key, value, off in (("top_k", self.top_k, 0), ("top_p", self.top_p, 1)):
            if self.temperature == 0 and value != off:  # greedy takes the largest logit, which no cut removes
                raise MkError(
                    f"sampling.{key}={value} means nothing with sampling.temperature=0",
                    hint=f"sampling.temperature=1, or leave sampling.{key} out",
                )


@dataclass(slots=True)
class BenchmarkConfig:
    """Which quality benchmark is scored, and where its data comes from."""

    name: str
    file: str | None = None  # of data_dir, without .jsonl
    hub: str | None = None  # data set id, where data_dir has no such file
    subset: str | None = None  # of the hub's set
    files: list[str] | None = None  # of the hub's set, JSON lines, where it has only a loader that nobody runs any more
    split: str | None = None
    count: int | None = None  # rows that there must be; null: any number
    sha256: str | None = None  # that they must have; null: whatever is there
    max_tokens: int | None = None  # a request may decode, its reasoning included
    timeout_s: float | None = None  # that one answer may take
    code_s: float | None = None  # CPU seconds of a program's test

    def __post_init__(self) -> None:
        require_at_least("benchmark.max_tokens", self.max_tokens, 1)
        require_at_least("benchmark.timeout_s", self.timeout_s, 1)
        require_at_least("benchmark.count", self.count, 1)
        if self.name == "scicode":
            require_one_of("benchmark.split", self.split or "", ("test", "dev"))


@dataclass(slots=True)
class VllmConfig:
    """Where vLLM is, and how it is run."""

    python: str | None  # an interpreter that has it
    site: str | None  # or a folder of it and what it needs, torch apart, for the interpreter that runs this
    attention_backend: str
    moe_backends: list[str]  # each tried in a start of its own; the fastest one is the baseline
    kv: str  # prefilled: computed from prompts; synthetic: made up by its DecodeBenchConnector
    gpu_memory: float  # share of the card's
    reasoning_parser: str | None  # of its server: what parts thoughts from content; null leaves them in
    tool_parser: str | None  # of its server: what finds calls in an answer; null: a request may leave none to the model
    arguments: list[str]  # more of its server's command line
    timeout_s: int  # of a start with all that it measures

    def __post_init__(self) -> None:
        require_one_of("baseline.vllm.kv", self.kv, ("prefilled", "synthetic"))
        require_at_least("baseline.vllm.timeout_s", self.timeout_s, 1)
        if not self.moe_backends:
            raise MkError("baseline.vllm.moe_backends is empty", hint="baseline.vllm.moe_backends=[triton]")
        if not 0 < self.gpu_memory <= 1:
            raise MkError(f"baseline.vllm.gpu_memory={self.gpu_memory} must lie in (0, 1]")


@dataclass(slots=True)
class BaselineConfig:
    """Which other engine is measured beside this one."""

    name: str
    vllm: VllmConfig | None = None

    def __post_init__(self) -> None:
        check_optional("baseline", self, () if self.name == "none" else ("vllm",))


@dataclass(slots=True)
class AgentConfig:
    """Which coding agent uses a server: a program, run headless over tasks, or a recorded conversation."""

    name: str
    program: str | None = None  # its name, or its path
    trace: str | None = None  # replay: the conversation's file
    scale: float | None = None  # replay: share of the recorded tokens that each turn generates

    def __post_init__(self) -> None:
        needed: dict[str, tuple[str, ...]] = {"none": (), "replay": ("trace", "scale")}
        check_optional("agent", self, needed.get(self.name, ("program",)))
        require_at_least("agent.scale", self.scale, 0)


@dataclass(slots=True)
class LoggerConfig:
    """Where rows go besides the run folder."""

    name: str
    project: str | None = None
    mode: str | None = None  # offline needs no account and no network; online streams

    def __post_init__(self) -> None:
        check_optional("logger", self, ("project", "mode") if self.name == "wandb" else ())
        if self.mode is not None:
            require_one_of("logger.mode", self.mode, ("offline", "online"))


@dataclass(slots=True)
class Config:
    """A resolved configuration. `experiment` is the `Settings` dataclass of experiments/<name>.py."""

    model: ModelConfig
    weights: WeightsConfig
    schedule: ScheduleConfig
    wave_order: WaveOrderConfig
    placement: PlacementConfig
    routing: RoutingConfig
    batch: BatchConfig
    gpu: GpuConfig
    engine: EngineConfig
    prefill: PrefillConfig
    server: ServerConfig
    sampling: SamplingConfig
    benchmark: BenchmarkConfig
    baseline: BaselineConfig
    agent: AgentConfig
    logger: LoggerConfig
    experiment: Any
    run_dir: str
    debug: bool  # print tracebacks

    def __post_init__(self) -> None:
        check_values("", self)
        for group in GROUPS:
            require_one_of(f"{group}.name", getattr(self, group).name, group_options(group))
        if self.weights.name == "checkpoint" and self.model.path is None and self.model.preset != "nano":
            raise MkError(
                f"model={self.model.name} has no weights here",
                hint="weights=random, or model.path=<Hugging Face folder or hub id>",
            )
        kernel = self.gpu.kind == "cuda" or self.engine.name == "cuda"
        if kernel and not FEWEST_SLOTS <= self.engine.ring.slots <= RING_SLOTS:
            raise MkError(
                f"engine.ring.slots={self.engine.ring.slots}: the kernel takes {FEWEST_SLOTS}..{RING_SLOTS}",
                hint=f"engine.ring.slots={RING_SLOTS}",
            )
        if self.engine.trace != "none" and self.engine.name not in ("cuda", "auto"):
            raise MkError(
                f"engine.trace={self.engine.trace}: engine={self.engine.name} notes nothing, the kernel does",
                hint="engine=cuda",
            )


GROUPS = tuple(field.name for field in dataclasses.fields(Config) if field.name not in ("run_dir", "debug"))


def resolved(config: Config) -> dict[str, Any]:
    """The configuration as plain dicts, lists and scalars: what is printed, written and hashed."""
    return dataclasses.asdict(config)


def config_hash(config: Config) -> str:
    """sha256 (hex) of the resolved configuration."""
    return hash_of(resolved(config))


def hash_of(config: Mapping[str, Any]) -> str:
    """sha256 (hex) of a resolved configuration, made or read, as canonical JSON: sorted keys, no spaces."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
