"""The result row: one measured or checked fact in a versioned schema, one JSON object a line in rows.jsonl.

Tables, plots, W&B and the README read rows and nothing else. An experiment that reports a new figure adds an optional
field here, with its unit in the name; a change of meaning raises `SCHEMA`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mk.errors import MkError

SCHEMA = 3  # since 2 a row names its sources, its raw data and its own digest, since 3 all figures are in that data
READABLE = (1, 2, 3)
DISTANCE_BAR = 1.5  # most that attention_ratio, ffn_ratio and kv_ratio may be


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What ran, and what came out. Raises MkError naming the field on a wrong type or a figure that is not finite."""

    schema: int
    time: str  # UTC, ISO 8601
    experiment: str
    engine: str  # the one that ran, never "auto"
    model: str
    weights: str  # checkpoint | random
    gpu: str
    dtype: str  # of the arithmetic: float32 | bfloat16
    batch: int  # rows
    context: list[int]  # tokens in each row when decoding starts
    routing: str
    schedule: str
    wave_order: str
    placement: str
    commit: str  # with "-dirty" where the tree had changes
    config_hash: str
    build_hash: str | None  # of the compiled kernel; null where none ran
    checks: dict[str, bool]  # what was verified in this run; decode_throughput: of the program of schedule_hash
    env: dict[str, str]

    # optional figures; a field that does not apply is left out of the JSON
    source_hash: str | None = None  # mk/results/sources.py; of every row since schema 2
    command: str | None = None  # line; null where Python code called the experiment
    seeds: dict[str, int] | None = None  # by key of the configuration
    data: dict[str, str] | None = None  # sha256 of each file that the configuration names, by its key; of a
    # checkpoint's folder that of what tells it from others: mk/model/files.py
    raw_sha256: str | None = None  # of the row's line in the raw data beside it
    digest: str | None = None  # of all other fields: a row that was edited by hand has another
    sampling: str | None = None  # temperature 1, top_k 40, ..; left out where the likeliest token was taken
    new_tokens: int | None = None  # decoded in each row
    prefill_s: float | None = None
    decode_s: float | None = None
    tok_s: float | None = None  # decoded tokens a second, all rows together
    schedule_hash: str | None = None  # of descriptors, lists and targets as executed last, read back from the machine;
    # kernel_correctness: of the layer's part, partial_step: of all parts' hashes, a simulated row: as simulated
    routing_hash: str | None = None  # of the expert ids of all steps, as top-k published them
    logits_hash: str | None = None  # of the logits of the last step, of each block where there are some, bit by bit
    tasks: dict[str, int] | None = None  # descriptors by operation
    model_window: str | None = None  # vllm: of a sliding layer, one key more than transformers sees; else left out
    window_kb: int | None = None  # that an SM might have outstanding: of this batch size
    arm: str | None = None  # of a comparison: its overrides; served_step: own, of the engine alone, or served
    distinct_experts: float | None = None  # that a sparse layer touched in a step, mean over layers and steps
    p50_ms: float | None = None  # of a decode step, a prefill or a kernel, by device timestamps; so are p10 and p90
    p10_ms: float | None = None
    p90_ms: float | None = None
    wall_ms: float | None = None  # of the loop, by the host's clock, divided by its steps
    steps: int | None = None  # timed
    steps_of: dict[str, int] | None = None  # batch_switching: them by batch size
    tokens_per_s: float | None = None  # batch / p50
    bytes_per_step: float | None = None  # mk/roofline.py, from the distinct experts of this row
    pct_nominal: float | None = None  # of the card's nominal bandwidth, at p50
    fixed_us_per_layer: float | None = None  # p50 beyond bytes / measured bandwidth, by layers
    logits_error: float | None = None  # median relative distance from the float32 reference, replayed expert ids
    logits_error_bf16: float | None = None  # the same of the reference in bfloat16: the noise floor
    prompt_tokens: int | None = None  # prefilled in one call, all prompts together
    prefill_tok_s: float | None = None  # prompt_tokens / p50
    ttft_ms: float | None = None  # from the call to the first tokens on the host, or from a request to its first token
    # at the client: median
    ttft_p99_ms: float | None = None
    tflop_s: float | None = None  # of prefill, or of one kernel: mk/roofline.py's operations / p50
    matrix_tflop_s: float | None = None  # of a large bf16 product by torch, in the same run
    pct_matrix: float | None = None  # tflop_s of matrix_tflop_s
    kernel: str | None = None  # the one that p50_ms is of; op_bench: the operation of the step
    method: str | None = None  # op_bench: how torch does it
    layer_us: float | None = None  # wave_occupancy: from the end of the layer before `layer` to its own
    idle_pct: float | None = None  # of all SMs' time in it: mk/kernel/occupancy.py
    idle_us_by_wave: dict[str, float] | None = None  # of an SM, by the wave that was complete next
    kernel_bytes: float | None = None  # that one run of it must read: mk/roofline.py
    gb_s: float | None = None  # those by p50
    tile: str | None = None  # its tile sizes, warps and stages
    layer: int | None = None  # that the figures below are of; errors are relative distances from float32 of one layer's
    # contribution, the largest of the batch's rows; ratios the largest of a row's error to its own in bfloat16.
    # prefill_correctness: of a prompt, where of all layers the ratio is largest; `layer` has the largest of all ratios
    attention_error: float | None = None
    attention_error_bf16: float | None = None
    attention_ratio: float | None = None
    ffn_error: float | None = None
    ffn_error_bf16: float | None = None
    ffn_ratio: float | None = None
    kv_error: float | None = None  # of the pages, K or V
    kv_error_bf16: float | None = None
    kv_ratio: float | None = None
    router_flips: int | None = None  # layers and tokens with another set of experts than float32 on the same input
    router_flips_bf16: int | None = None
    router_margin: float | None = None  # most that a chosen expert's logit lies below float32's last one, relative
    free_flips: int | None = None  # as router_flips, but through all layers without a correction
    free_flips_bf16: int | None = None
    next_step_error: float | None = None  # as logits_error, of the decode step after a prefill
    next_step_error_bf16: float | None = None
    logit_std: float | None = None  # of attention's scores in float32, over rows, heads and keys in sight
    needles: int | None = None  # keys that a head must return, or must not
    experts_implementation: str | None = None  # of transformers, whose layer is the bfloat16 arm
    slow_ns_per_tile: int | None = None  # that one SM was made slower by
    slow_sm_tiles: float | None = None  # attention splits and expert tiles that SM took in a step
    mean_sm_tiles: float | None = None  # the same, mean over all SMs
    clock: str | None = None  # simulated: p50_ms is the simulator's; left out where a clock measured it
    dependencies_ms: float | None = None  # simulated bounds of this schedule: a memory that takes no time,
    zero_wait_ms: float | None = None  # no waits for other SMs,
    busiest_ms: float | None = None  # and the busiest role of an SM alone
    bytes_ms: float | None = None  # bytes_per_step / the card's measured bandwidth, which no schedule changes
    regret: float | None = None  # beyond the fastest schedule of the run for this routing, as a share of it
    schedules: int | None = None  # that the next two are over
    rank_correlation: float | None = None  # Spearman's, of simulated and measured p50 over the run's schedules
    mean_error: float | None = None  # of simulated p50, relative, over the same
    handoff_ns: float | None = None  # from one SM's signal to another's seeing it: mean over pairs,
    handoff_ns_least: float | None = None  # and of the SM with the least mean over its partners,
    handoff_ns_most: float | None = None  # and with the most
    handoff_repeats: float | None = None  # rank correlation of SMs' means of the first and the last launch
    bound: str | None = None  # not a decode, but what none can beat: zero_wait, with every wait for other SMs left out;
    # oracle, with expert ids known before the step
    waves: int | None = None  # parts of a step that were compared with the interpreter's
    worst_of_tolerance: float | None = None  # largest difference, in units of what mk/parts/compare.py allows there
    benchmark: str | None = None
    benchmark_sha256: str | None = None  # of its data
    score: float | None = None  # share that is right, 0..1, mean over runs; so are the next five
    score_sd: float | None = None  # sample standard deviation over runs
    scores: list[float] | None = None  # of each run
    score_difference: float | None = None  # from another engine's, with its 95 % bootstrap interval
    score_difference_low: float | None = None
    score_difference_high: float | None = None
    answers: int | None = None  # all runs together, as are the next three and wall_s
    truncated: int | None = None  # answers that ended at the cap on their tokens
    usage_prompt_tokens: int | None = None
    usage_completion_tokens: int | None = None
    hit_tokens: int | None = None  # of usage_prompt_tokens, that the server's prefix cache had; where it says so
    wall_s: float | None = None  # from the first request to the last answer, or its last token; of an agent's program,
    # from its start to its end
    requests_hash: str | None = None  # of all requests: equal where two engines were asked the same
    positions: int | None = None  # teacher-forced, that the next figures are means over, or medians; in nats
    kl: float | None = None  # of the float32 reference's distribution from the tested one
    kl_bf16: float | None = None  # from the reference's in bfloat16: the noise floor, as for the others
    kl_median: float | None = None
    kl_median_bf16: float | None = None
    top1_agreement: float | None = None  # share of positions with float32's likeliest token
    top1_agreement_bf16: float | None = None
    nll: float | None = None  # of the text's next token
    nll_float32: float | None = None
    nll_error: float | None = None  # |nll - float32's| of a position, median
    nll_error_bf16: float | None = None
    logprob_shift: float | None = None  # of a token behind a hit on generated blocks from that of a cold prompt, mean
    logprob_shift_most: float | None = None  # the same, of one token
    choice_us: float | None = None  # on the host, from logits of 262,144 tokens; left out where the engine chooses
    agent: str | None = None  # that a server was used by: a program, whose workload is a task, of which the next four
    # are; replay: a recorded conversation, the workload, turn by turn
    agent_version: str | None = None  # as it says itself
    success: bool | None = None  # whether the task's own test passes over what it left
    turns: int | None = None  # its requests to the model; `answers` of them came to their end
    ended: str | None = None  # how it did: status N, signal N, time limit
    workload: str | None = None  # that a server was loaded with, batch requests in flight; tok_s is by wall_s then
    active_batch: float | None = None  # requests between their first and last token, mean over the time with any
    event: str | None = None  # between two runs of served steps: park, retire, switch (of batch size), admit
    interruptions: int | None = None  # that the next two are medians of
    idle_us: float | None = None  # of the device, beyond the last step before it and prompts computed in between
    park_us: float | None = None  # from asking the decode loop to its rest
    prefill_policy: str | None = None  # under which a prompt entered; ttft_ms is of that prompt
    itl_p50_ms: float | None = None  # between tokens of requests that ran while it did, on the host; of a server with
    # a workload: of all requests, at the client
    itl_p99_ms: float | None = None
    itl_most_ms: float | None = None
    equal_tokens: int | None = None  # before the first difference from the oracle of `checks`, all rows together
    differs_at: list[int | None] | None = None  # each row's first such token, None where there is none
    widest_margin: float | None = (
        None  # that the oracle's token is above the row's own, in float32 logits, where they differ, at most; after the
    )
    # first difference the oracle goes on from the row's own tokens
    margin_noise: float | None = None  # what bfloat16 does to the margin of the two likeliest, over those rows' tokens
    version: str | None = None  # of a baseline
    attention_backend: str | None = None  # as a baseline's log says it was resolved; so are the next four
    moe_backend: str | None = None
    moe_table: str | None = None  # of tuned tile sizes
    graph_mode: str | None = None
    compile_mode: str | None = None
    kv: str | None = None  # prefilled: computed from a prompt; synthetic: made up
    same_weights: bool | None = None  # as the kernel's, value by value, or else only as distributed
    tpot_ms: float | None = (
        None  # by the difference of two lengths: a cross-check of p50; of a server: a request's time
    )
    # after its first token by its later tokens, median
    unstable: str | None = None  # why the row's figures are not to be relied on
    ratio: float | None = None  # of this row's time to that of the row with the digest ratio_to: of medians, mean
    # of blocks that ran in turn, or of wall_s at equal tokens of each request
    ratio_low: float | None = None  # its 95 % interval: of medians by a bootstrap over blocks of steps, of blocks that
    # ran in turn Student's of the mean logarithm; of wall_s there is none
    ratio_high: float | None = None
    ratio_to: str | None = None

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(Row)
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name), hints[field.name])
        if self.schema not in READABLE:
            raise MkError(f"row.schema={self.schema}, this code reads {' and '.join(map(str, READABLE))}")
        if self.schema >= 2 and self.source_hash is None:
            raise MkError(f"row.source_hash is missing, and a row of schema {self.schema} has one")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Row:
        """A row from its JSON object. Raises MkError naming a missing or unknown field."""
        fields = dataclasses.fields(cls)
        missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in values]
        unknown = sorted(set(values) - {f.name for f in fields})
        if missing or unknown:
            problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
            raise MkError(f"row {problem}", hint="the fields of a row stand in mk/results/rows.py")
        return cls(**values)

    def sealed(self) -> Row:
        """The row with its digest."""
        return dataclasses.replace(self, digest=self.computed_digest())

    def computed_digest(self) -> str:
        """The first 16 digits of the sha256 of all fields but `digest`."""
        values = {name: value for name, value in self.to_json().items() if name != "digest"}
        return hashlib.sha256(json.dumps(values, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]

    def line(self) -> str:
        """Of a rows.jsonl file."""
        return json.dumps(self.to_json(), allow_nan=False) + "\n"

    def to_json(self) -> dict[str, Any]:
        optional = {f.name for f in dataclasses.fields(self) if f.default is None}
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if value is not None or name not in optional}


SAID = frozenset({"seeds", "tasks", "window_kb", "layer", "slow_ns_per_tile", "prompt_tokens", "same_weights"})
"""Fields of numbers that say what ran, and are no figure of it."""


def _numbers(hint: Any) -> bool:
    """Whether values of this type hold a number or a verdict."""
    args = typing.get_args(hint)
    return any(map(_numbers, args)) if args else hint in (int, float, bool)


_HINTS = typing.get_type_hints(Row)
FIGURES = tuple(
    field.name
    for field in dataclasses.fields(Row)
    if field.default is None and field.name not in SAID and _numbers(_HINTS[field.name])
)
"""Fields that say what came out: the raw data of a row gives each of them, or the row is not kept."""


def dtype_of(engine: str, numerics: str) -> str:
    """A row's `dtype`: bfloat16 is the kernel's, and the interpreter's where it rounds as the kernel does."""
    return "bfloat16" if engine == "cuda" or numerics == "kernel" else "float32"


def read_rows(path: Path) -> list[Row]:
    """The rows of a rows.jsonl file, in order. Raises MkError naming the line that is not a row."""
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            rows.append(Row.from_json(_object(line)))
        except (MkError, ValueError) as error:
            raise MkError(f"{path}:{number}: {error}") from error
    return rows


def read_raw(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of a raw.jsonl file by their sha256, which is what a row knows its own by; none without a file.

    Raises MkError naming the line that is no JSON object.
    """
    found = {}
    for number, line in enumerate(_lines(path) if path.exists() else [], start=1):
        try:
            found[hashlib.sha256(line.encode()).hexdigest()] = _object(line)
        except ValueError as error:
            raise MkError(f"{path}:{number}: {error}") from error
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MkError(f"{path} cannot be read: {error}") from error


def _object(line: str) -> dict[str, Any]:
    """Raises ValueError for other JSON too."""
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("no JSON object")
    return values


def _check(name: str, value: Any, hint: Any) -> None:
    """`value` has type `hint`, where an int may stand for a float, a bool for neither, and floats are finite."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        if value is not None:
            _check(name, value, args[0])
    elif origin is list and isinstance(value, list):
        for index, item in enumerate(value):
            _check(f"{name}[{index}]", item, args[0])
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            _check(f"{name} key", key, args[0])
            _check(f"{name}.{key}", item, args[1])
    else:
        wanted = origin or hint
        accepted = (int, float) if wanted is float else (wanted,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
            raise MkError(f"row.{name} is {value!r}, not {wanted.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise MkError(f"row.{name} is {value}, not a finite figure")
