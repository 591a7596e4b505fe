"""What the README's lists of measurements say, as the kept rows give it: phrases that must stand in them word by word.

A bullet begins with an experiment's name in backticks; `PHRASES` has a function for each that writes its figures from
the newest rows. So a new run that changes a figure, and an edit of the text, are both told with the words that are
right. Where rows do not have what a phrase needs, that is told too, and where a bullet has gone. Figures that no phrase
has, beside these or elsewhere in the README, are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from mk.report.distances import in_words
from mk.report.kept_rows import Kept, newest, of_card, of_last_run
from mk.report.launches import labels
from mk.results.recompute import geometry_of_row
from mk.results.rows import Row
from mk.results.step_figures import Ratio

Phrases = Iterator[str]
HEADING = "## Measured: the kernel on an H200"  # of the part that has the lists
ZERO_WAIT = "With no wait for another SM"  # the paragraph that begins so, or has it


def bullet_problems(text: str, kept: Sequence[Kept]) -> list[str]:
    """A line for each phrase that the README's bullets of `PHRASES` lack, and for each such bullet that it lacks.

    Other bullets are not looked at. A text without the heading and without any of the bullets has no lists to check.
    """
    found = dict(re.findall(r"^\* `(\w+)`(.*?)(?=^\* |^#|\Z)", text, flags=re.M | re.S))
    if paragraph := re.search(rf"(?:^[^\n]+\n)*^[^\n]*{ZERO_WAIT}.*?(?=\n\n|\Z)", text, flags=re.M | re.S):
        found["decode_throughput"] = paragraph.group()
    if HEADING not in text and not found.keys() & PHRASES.keys():
        return []
    problems = []
    for name, phrases in PHRASES.items():
        if name not in found:
            problems.append(f"README, {name}: its bullet is missing")
            continue
        said = " ".join(found[name].split())
        try:
            problems += [f"README, {name}: rows give “{each}”" for each in phrases(kept) if not _says(said, each)]
        except (LookupError, ValueError, AttributeError, TypeError, ZeroDivisionError) as error:
            problems.append(f"README, {name}: the rows kept do not have what it says ({type(error).__name__}: {error})")
    return problems


def _says(text: str, phrase: str) -> bool:
    """Whether the phrase stands there, and not as the end or the beginning of another figure."""
    return re.search(rf"(?<![\d.+-]){re.escape(phrase)}(?!\d|[.,]\d)", text) is not None


def _rows(kept: Sequence[Kept], experiment: str) -> list[Kept]:
    return [of for of in kept if of.row.experiment == experiment and of_card(of.row)]


def _by(rows: Sequence[Kept], *fields: str) -> dict[tuple[object, ...], Row]:
    """The newest row of each combination of these fields."""

    def key(row: Row) -> tuple[object, ...]:
        return tuple(getattr(row, field) for field in fields)

    return {key(of.row): of.row for of in newest(rows, key)}


def _keys_and_batch(row: Row) -> tuple[int, int]:
    return row.context[0], row.batch


def _ms(row: Row) -> float:
    """Raises ValueError for a row without a time."""
    if row.p50_ms is None:
        raise ValueError(f"a row of {row.experiment} has no p50_ms")
    return row.p50_ms


def _span(low: float, high: float) -> str:
    return f"{low:.0f} to {high:.0f} %"


def _zero_wait(kept: Sequence[Kept]) -> Phrases:
    times = {
        row.batch: _ms(row) for row in _by(_rows(kept, "decode_throughput"), "bound", "batch").values() if row.bound
    }
    *first, last = [f"{times[batch]:.2f}" for batch in sorted(times)]
    yield f"{', '.join(first)} and {last} ms"


def _quickstart(kept: Sequence[Kept]) -> Phrases:
    rows = list(_by([of for of in _rows(kept, "quickstart") if of.row.engine == "cuda"], "batch").values())
    firsts = [place for row in rows for place in row.differs_at or []]
    apart = [row for row in rows if any(place is not None for place in row.differs_at or [])]
    yield f"{firsts.count(None)} of {len(firsts)} rows"
    yield f"from token {' and '.join(str(place) for place in firsts if place is not None)} on"
    yield f"{' and '.join(f'{row.widest_margin or 0.0:.4f}' for row in apart)} apart"
    yield f"by {' and '.join(f'{row.margin_noise or 0.0:.2f}' for row in apart)}"


def _context_sweep(kept: Sequence[Kept]) -> Phrases:
    """Of the kernel at batch 1, and of vLLM beside it at every batch."""
    alone = [of for of in _rows(kept, "context_sweep") if of.row.engine == "cuda" and of.row.batch == 1]
    by_keys = {of.row.context[0]: of.row for of in newest(alone, lambda row: row.context[0])}
    for number, keys in enumerate(sorted(by_keys)):
        yield f"{_ms(by_keys[keys]):.2f}{'' if number else ' ms a step'} at {round(keys / 1024)}K"
    shares = [row.pct_nominal or 0.0 for row in by_keys.values()]
    yield f"{_span(min(shares), max(shares))} of the floor's speed"
    beside = [of for of in _rows(kept, "context_sweep") if of.row.engine == "vllm"]
    ratios = {(of.row.context[0], of.row.batch): of.row.ratio for of in newest(beside, _keys_and_batch)}
    for keys in sorted({keys for keys, _ in ratios}):
        *first, last = [f"{ratios[at]:.2f}" for at in sorted(ratios) if at[0] == keys]
        yield f"{round(keys / 1024)}K {', '.join(first)} and {last}"


def _plan_ablation(kept: Sequence[Kept]) -> Phrases:
    rows = _by(_rows(kept, "plan_ablation"), "wave_order", "placement", "schedule", "batch")
    times = {key: _ms(row) for key, row in rows.items()}
    plain = {key: ms for key, ms in times.items() if key[1:3] == ("row_owner", "static")}
    for order in dict.fromkeys(key[0] for key in plain):
        both = [times[order, "row_owner", "static", batch] for batch in (1, 8)]
        yield f"`{order}` {both[0]:.2f} and {both[1]:.2f}"

    def more(other: bool, stealing: bool) -> str:
        found = [
            100 * ms / times[order, "row_owner", "static", batch] - 100
            for (order, placement, schedule, batch), ms in times.items()
            if (placement != "row_owner", schedule != "static") == (other, stealing)
        ]
        return _span(min(found), max(found))

    yield f"Work stealing takes {more(False, True)} more, the other placements {more(True, False)}"
    yield f"both {more(True, True)}"


def _change(row: Row) -> str:
    """Percent of an arm's ratio; "nothing" where there is no detectable difference."""
    if row.ratio is None or row.ratio_low is None or row.ratio_high is None:
        raise ValueError(f"arm {row.arm} has no ratio")
    of = Ratio(row.ratio, row.ratio_low, row.ratio_high)
    return f"{100 * of.ratio - 100:+.1f}" if of.detectable else "nothing"


def _schedule_ablation(kept: Sequence[Kept]) -> Phrases:
    """Of the arms that a search proposed and of the measured map, each against the schedule of its run."""
    arms = _by(_rows(kept, "schedule_ablation"), "arm", "batch")
    batches = (1, 2, 4, 8)
    named = {
        "8 proposed": "schedule_batch8.yaml",
        "8 from there": "schedule_batch8_second.yaml",
        "1 proposed": "schedule_batch1.yaml",
        "4 proposed": "schedule_batch4.yaml",
        "a map of the card": "sm_map.json",
        "of 512 keys": "engine.attention.split_keys=512",
    }
    for lead, name in named.items():
        (arm,) = {arm for arm, _ in arms if str(arm).endswith(name)}
        *first, last = [_change(arms[arm, batch]) for batch in batches]
        yield f"{lead}: {', '.join(first)} and {last}"
    for claimers in (33, 66, 132):
        arm = f"schedule=work_stealing schedule.attention_claimers={claimers} schedule.moe_claimers={claimers}"
        yield f"{claimers} {_change(arms[arm, 1])} and {_change(arms[arm, 8])}"


def _wave_order_ablation(kept: Sequence[Kept]) -> Phrases:
    arms = _by(_rows(kept, "wave_order_ablation"), "arm", "batch")
    for order in ("interleaved", "attention_first", "oproj_before_down"):
        *first, last = [_change(arms[f"wave_order={order}", batch]) for batch in (1, 2, 4, 8)]
        yield f"`{order}` {', '.join(first)} and {last}"


def _placement_ablation(kept: Sequence[Kept]) -> Phrases:
    arms = _by(_rows(kept, "placement_ablation"), "arm", "batch")
    for name in ("dependency_affinity", "round_robin"):
        yield f"`{name}` {_change(arms[f'placement={name}', 1])} and {_change(arms[f'placement={name}', 8])}"


def _routing_ablation(kept: Sequence[Kept]) -> Phrases:
    """Of batch 8."""
    arms = _by(_rows(kept, "routing_ablation"), "arm", "batch")
    distinct = [_change(arms[f"routing=correlated routing.distinct={experts}", 8]) for experts in (26, 39, 52)]
    yield f"on 26, 39 and 52 experts {distinct[0]}, {distinct[1]} and {distinct[2]}"
    same, apart = (arms[f"routing=adversarial routing.pattern=all_{name}", 8] for name in ("same", "different"))
    yield f"all rows on the same {same.distinct_experts:.0f} {_change(same)}"
    yield f"on {apart.distinct_experts:.0f} different ones {_change(apart)}"
    yield f"the router's own choice {_change(arms['routing=checkpoint', 8])}"
    yield f"which is a bound, {_change(arms['routing=oracle', 8])}"


def _vllm_decode(kept: Sequence[Kept]) -> Phrases:
    """Of the router's own choice: the table has uniform routing."""
    mine = [of for of in _rows(kept, "decode_throughput") if of.row.routing == "checkpoint"]
    rows = _by(mine, "engine", "batch")
    batches = (1, 2, 4, 8)
    for engine, where in (("cuda", "ms here"), ("vllm", "from vLLM")):
        *first, last = [f"{_ms(rows[engine, batch]):.2f}" for batch in batches]
        yield f"{', '.join(first)} and {last} {where}"
    *first, last = [f"{rows['vllm', batch].ratio:.2f}" for batch in batches]
    yield f"{', '.join(first)} and {last} times"


def _serving(kept: Sequence[Kept]) -> Phrases:
    """Of both engines, each workload."""
    rows = _by(_rows(kept, "serving"), "workload", "engine")
    for workload in ("fixed", "aime"):
        own, other = rows[workload, "cuda"], rows[workload, "vllm"]
        yield f"{own.answers} requests"
        yield f"{own.tok_s:,.0f} tokens/s here, {other.tok_s:,.0f} from vLLM: {other.ratio:.2f} times"
        yield f"first token after {own.ttft_ms:.0f} and {other.ttft_ms:.0f} ms"
        yield f"between tokens {own.itl_p50_ms:.1f} and {other.itl_p50_ms:.1f}"


def _agent_trial(kept: Sequence[Kept]) -> Phrases:
    """Of a conversation sent again to both engines."""
    rows = _by([of for of in _rows(kept, "agent_trial") if of.row.agent == "replay"], "engine")
    own, other = rows[("cuda",)], rows[("vllm",)]
    yield f"{own.answers} turns, {own.usage_prompt_tokens:,} tokens in and {own.usage_completion_tokens:,} out"
    yield f"{own.tok_s:.0f} tokens/s here, {other.tok_s:.0f} from vLLM: {other.ratio:.2f} times"
    yield f"first token after {own.ttft_ms:.0f} and {other.ttft_ms:.0f} ms"
    yield f"between tokens {own.itl_p50_ms:.1f} and {other.itl_p50_ms:.1f}"
    yield f"{own.hit_tokens:,} and {other.hit_tokens:,} tokens were cached"


def _ladder(kept: Sequence[Kept]) -> Phrases:
    """Every arm by the name that the figure has for it, batch 1 and 8."""
    rows = of_last_run(_rows(kept, "ladder"), lambda row: row.batch)
    times = {(of.row.arm or "", of.row.batch): _ms(of.row) for of in rows}
    for arm, name in labels(rows).items():
        yield f"{name.removesuffix(': a bound')} {times[arm, 1]:.2f} and {times[arm, 8]:.2f}"


def _batch_switching(kept: Sequence[Kept]) -> Phrases:
    arms = {of.row.arm: of.row for of in of_last_run(_rows(kept, "batch_switching"), lambda row: row.batch)}
    every, largest = arms["every size"], arms["the largest alone"]
    yield f"{every.tok_s:,.0f} tokens/s, {largest.tok_s:,.0f} from steps of {largest.batch} rows alone"
    yield f"takes {_change(largest).lstrip('+')} % longer"


def _sm_map(kept: Sequence[Kept]) -> Phrases:
    row = newest(_rows(kept, "sm_map"), lambda row: row.gpu)[-1].row
    yield f"{row.handoff_ns:.0f} ns on average, of an SM {row.handoff_ns_least:.0f} to {row.handoff_ns_most:.0f}"


def _kernel_ablation(kept: Sequence[Kept]) -> Phrases:
    arms = _by(_rows(kept, "kernel_ablation"), "arm", "batch")

    def both(arm: str, unit: str = "") -> str:
        return f"{_change(arms[arm, 1])} and {_change(arms[arm, 8])}{unit}"

    yield f"56 KB {both('engine.ring.window_kb=56', ' %')}"
    yield f"48 KB {both('engine.ring.window_kb=48')}"
    yield f"32 KB {both('engine.ring.window_kb=32')}"
    yield f"copies of 4 KB {both('engine.ring.copy_kb=4')}, of 2 KB {both('engine.ring.copy_kb=2')}"
    yield f"relaxed polls {both('engine.handoff.polls=relaxed')}"
    yield f"polling for itself {both('engine.handoff.pollers=warps engine.handoff.polls=acquire')}"
    yield f"which is a bound, {both('routing=oracle')}"


def _ring_ablation(kept: Sequence[Kept]) -> Phrases:
    arms = _by(_rows(kept, "ring_ablation"), "arm", "batch")
    small = [_change(arms["engine.ring.window_kb=32 engine.ring.slots=18", batch]).lstrip("+") for batch in (1, 8)]
    middle = {_change(arms["engine.ring.window_kb=32 engine.ring.slots=20", batch]) for batch in (1, 8)}
    yield f"a ring of 18 slots costs {small[0]} and {small[1]} % beside 22, one of 20 {' and '.join(sorted(middle))}"


def _slow_sm(kept: Sequence[Kept]) -> Phrases:
    rows = _by(_rows(kept, "slow_sm"), "schedule", "slow_ns_per_tile")
    slow = max(key[1] for key in rows)  # type: ignore[type-var]
    ends = {name: [rows[name, ns] for ns in (0, slow)] for name in ("static", "work_stealing")}
    (layers,) = {geometry_of_row(row).layers for pair in ends.values() for row in pair}
    grows = {name: 1e3 * (_ms(late) - _ms(early)) / layers for name, (early, late) in ends.items()}
    yield f"a step of {in_words(layers)} layers grows by {grows['static']:.0f} us a layer under static lists and " + (
        "not at all under work stealing" if grows["work_stealing"] <= 0 else f"{grows['work_stealing']:.0f} under work"
    )


def _prefill_throughput(kept: Sequence[Kept]) -> Phrases:
    mine = _rows(kept, "prefill_throughput")
    packed, torch = (
        _by([of for of in mine if of.leaf("prefill.products") == products], "batch", "prompt_tokens")
        for products in ("packed", "torch")
    )

    def time(row: Row) -> str:
        ms = _ms(row)
        return f"{ms:.0f} ms" if ms < 500 else f"{ms / 1e3:.2g} s" if ms >= 1000 else f"{ms / 1e3:.2f} s"

    alone = {row.prompt_tokens or 0: row for row in packed.values() if row.batch == 1}
    yield f"one prompt of 128 tokens takes {time(alone[128])}"
    for keys in (2, 8, 32, 128):
        yield f"{keys}K {time(alone[keys * 1024])}"
    long = [row for tokens, row in alone.items() if tokens >= 8192]
    rates, shares = [row.tflop_s or 0.0 for row in long], [row.pct_matrix or 0.0 for row in long]
    yield f"{min(rates):.0f} to {max(rates):.0f} TFLOP/s, {_span(min(shares), max(shares))}"
    yield f"Eight prompts of 1,024 packed take {time(packed[8, 8192])}"
    gains = [100 - 100 * _ms(torch[1, tokens]) / _ms(alone[tokens]) for tokens in (8192, 131072)]
    yield f"take {time(torch[1, 8192])} for 8K and {time(torch[1, 131072])} for 128K"
    yield f"{_span(min(gains), max(gains))} less"


def _kernel_correctness(kept: Sequence[Kept]) -> Phrases:
    rows = [of.row for of in newest(_rows(kept, "kernel_correctness"), lambda row: (tuple(row.context), row.layer))]
    yield f"all {len({row.layer for row in rows})} layers"
    yield f"contexts of 1 to {max(max(row.context) for row in rows):,} keys"
    worst = [max(getattr(row, f"{part}_ratio") for row in rows) for part in ("attention", "ffn")]
    yield f"at most {worst[0]:.2f} and {worst[1]:.2f} times"


def _prefill_correctness(kept: Sequence[Kept]) -> Phrases:
    rows = [of.row for of in newest(_rows(kept, "prefill_correctness"), lambda row: tuple(row.context))]
    lengths = [row.context[0] for row in rows]
    yield f"prompts of {min(lengths):,} to {max(lengths):,} tokens"
    attention, ffn, kv = (max(getattr(row, f"{part}_ratio") for row in rows) for part in ("attention", "ffn", "kv"))
    yield f"attention at most {attention:.2f}, FFN {ffn:.2f}, K and V {kv:.2f} times"


def _served_step(kept: Sequence[Kept]) -> Phrases:
    rows = _by(_rows(kept, "served_step"), "batch", "arm", "event", "prefill_policy").values()
    ratio = {row.batch: row.ratio for row in rows if row.arm == "served"}
    yield f"takes {ratio[1]:.3f} of the kernel's own at batch 1, {ratio[8]:.3f} at batch 8"
    yield f"{max(row.steps or 0 for row in rows):,} steps of each"
    events = {row.event: row for row in rows if row.event is not None}
    idle = {name: (row.idle_us or 0.0) / 1e3 for name, row in events.items()}
    yield f"idles {idle['park']:.1f} ms where the loop is parked, {idle['admit']:.1f} where a request is admitted"
    yield f"{idle['switch']:.1f} where the batch size changes"
    yield f"{(events['park'].park_us or 0.0) / 1e3:.1f} ms later"
    policies = {row.prefill_policy: row for row in rows if row.prefill_policy is not None}
    pause, interleave = policies["pause"], policies["interleave"]
    yield f"a prompt of {pause.prompt_tokens:,} tokens"
    yield f"at most {pause.itl_most_ms:.0f} ms under `pause`, {interleave.itl_most_ms:.0f} under `interleave`"
    yield f"its first token comes after {pause.ttft_ms:.0f} and {interleave.ttft_ms:.0f} ms"


def _accuracy(kept: Sequence[Kept]) -> Phrases:
    both = [*_rows(kept, "accuracy"), *_rows(kept, "accuracy_vllm")]
    rows = _by([of for of in both if (of.row.benchmark, of.row.model) == ("nano_code", "nano")], "engine")
    own, other = rows[("cuda",)], rows.get(("vllm",)) or rows[("served",)]  # as an earlier run called vLLM's server
    runs = len(own.scores or [])
    yield f"{runs} runs of {(own.answers or 0) // runs} problems"
    yield f"{100 * (own.score or 0):.2f} % (sd {100 * (own.score_sd or 0):.2f}) here"
    yield f"{100 * (other.score or 0):.2f} % ({100 * (other.score_sd or 0):.2f}) from"
    low, high = other.score_difference_low or 0.0, other.score_difference_high or 0.0
    yield f"difference {100 * (other.score_difference or 0):.1f}, 95 % from {100 * low:+.1f} to {100 * high:+.1f}"


def _parity(kept: Sequence[Kept]) -> Phrases:
    for model in ("nano", "north_mini_code"):
        mine = [of for of in _rows(kept, "parity") if of.row.model == model]
        rows = {of.row.context[0]: of.row for of in newest(mine, lambda row: tuple(row.context))}
        *first, last = sorted(rows)
        yield f"over {', '.join(f'{keys:,}' for keys in first)} and {last:,} tokens"
        shares = {f"{(row.kl_median or 0.0) / (row.kl_median_bf16 or 0.0):.2f}" for row in rows.values()}
        yield f"{' to '.join(sorted({min(shares), max(shares)}))} of bfloat16's"


PHRASES: dict[str, Callable[[Sequence[Kept]], Phrases]] = {
    "decode_throughput": _zero_wait,
    "quickstart": _quickstart,
    "context_sweep": _context_sweep,
    "plan_ablation": _plan_ablation,
    "schedule_ablation": _schedule_ablation,
    "wave_order_ablation": _wave_order_ablation,
    "placement_ablation": _placement_ablation,
    "routing_ablation": _routing_ablation,
    "vllm_decode": _vllm_decode,
    "serving": _serving,
    "agent_trial": _agent_trial,
    "ladder": _ladder,
    "batch_switching": _batch_switching,
    "sm_map": _sm_map,
    "kernel_ablation": _kernel_ablation,
    "ring_ablation": _ring_ablation,
    "slow_sm": _slow_sm,
    "prefill_throughput": _prefill_throughput,
    "kernel_correctness": _kernel_correctness,
    "prefill_correctness": _prefill_correctness,
    "served_step": _served_step,
    "accuracy": _accuracy,
    "parity": _parity,
}
