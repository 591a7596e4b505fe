"""Figures of a loaded server from the client's own timeline: for the run, and for who verifies it.

Times between tokens are kept as how often each came about, in milliseconds of three digits: a workload has 100,000.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.load_client import Answer
from mk.results.rows import Row

S_DIGITS = 6
GAP_DIGITS = 3  # significant
COUNTS = ("tokens", "prompt_tokens")  # of each request, in which engines agree that are compared


def raw_load(answers: Sequence[Answer], asked: Sequence[int], parallel: int) -> dict[str, Any]:
    """asked: tokens of each answer."""
    return {"kind": "load", "parallel": parallel, "asked": list(asked), **timeline(answers)}


def timeline(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of at least one answer. A gap is between two chunks, shared evenly by the tokens that the later brought."""
    gaps: Counter[float] = Counter()
    for answer in answers:
        for (before, _), (now, tokens) in pairwise(answer.arrivals):
            gaps[float(f"{(now - before) * 1e3 / tokens:.{GAP_DIGITS}g}")] += tokens
    begun = min(answer.sent for answer in answers)

    def since(times: Sequence[float]) -> list[float]:
        return [round(time - begun, S_DIGITS) for time in times]

    return {
        "tokens": [answer.tokens for answer in answers],
        "prompt_tokens": [answer.prompt_tokens for answer in answers],
        "cached": [answer.cached for answer in answers],
        "sent_s": since([answer.sent for answer in answers]),
        "first_s": since([answer.arrivals[0][0] for answer in answers]),
        "last_s": since([answer.arrivals[-1][0] for answer in answers]),
        "first_tokens": [answer.arrivals[0][1] for answer in answers],
        "gap_ms": sorted(gaps),
        "gaps": [gaps[gap] for gap in sorted(gaps)],
    }


def base_of(raw: dict[str, Any]) -> dict[str, Any]:
    """What another engine's raw data holds of the one that it is compared with."""
    return {f"base_{name}": raw[name] for name in ("sent_s", "last_s", *COUNTS)}


def as_many(raw: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether each request took and generated as many tokens as the other engine's."""
    return all(raw[name] == other[name] for name in COUNTS)


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """sent_s, first_s, last_s: when each request was sent, and had its first and its last token. asked, tokens: how
    many it was to generate, and did, by the server's usage; first_tokens: in its first chunk. cached: prompt tokens of
    each that the server had already, null where it does not say. gap_ms: times between tokens, of which there were
    `gaps`. base_*: the same of the engine that this one is compared with.

    Raises ValueError for another engine whose requests did not take and generate as many tokens.
    """
    wall_s = wall_of(raw)
    found: dict[str, Any] = {
        "answers": len(raw["sent_s"]),
        "usage_prompt_tokens": sum(raw["prompt_tokens"]),
        "usage_completion_tokens": sum(raw["tokens"]),
        "wall_s": wall_s,
        "tok_s": sum(raw["tokens"]) / wall_s,
        "active_batch": float(
            np.subtract(raw["last_s"], raw["first_s"]).sum() / covered(raw["first_s"], raw["last_s"])
        ),
        "checks": {
            "tokens_as_asked": raw["tokens"] == raw["asked"],
            "in_flight_within_batch": most_at_once(raw["sent_s"], raw["last_s"]) <= raw["parallel"],
        },
        **latencies(raw),
    }
    if None not in raw["cached"]:
        found["hit_tokens"] = sum(raw["cached"])
    if "base_tokens" in raw:
        base = {name.removeprefix("base_"): raw[name] for name in raw if name.startswith("base_")}
        if not as_many(raw, base):
            raise ValueError("the engines did not take and generate as many tokens")
        found["ratio"] = wall_s / wall_of(base)
    return found


def latencies(raw: dict[str, Any]) -> dict[str, float]:
    """To the first token and between tokens, of a timeline."""
    sent, first, last = (np.array(raw[name]) for name in ("sent_s", "first_s", "last_s"))
    to_first = (first - sent) * 1e3
    found = {"ttft_ms": float(np.median(to_first)), "ttft_p99_ms": float(np.percentile(to_first, 99))}
    if raw["gaps"]:
        later = np.array(raw["tokens"]) - np.array(raw["first_tokens"])
        after = ((last - first) * 1e3)[later > 0] / later[later > 0]
        found |= {f"itl_p{p}_ms": percentile(raw["gap_ms"], raw["gaps"], p) for p in (50, 99)}
        found |= {"itl_most_ms": raw["gap_ms"][-1], "tpot_ms": float(np.median(after))}
    return found


def wall_of(raw: dict[str, Any]) -> float:
    """Seconds from the first request to the last token."""
    return float(max(raw["last_s"]) - min(raw["sent_s"]))


def covered(begun: Sequence[float], ended: Sequence[float]) -> float:
    """Seconds in which at least one of the spans lasts; never 0."""
    total, until = 0.0, -np.inf
    for begin, end in sorted(zip(begun, ended, strict=True)):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return max(total, 10.0**-S_DIGITS)


def most_at_once(begun: Sequence[float], ended: Sequence[float]) -> int:
    """Spans that overlap at any time; one that begins as another ends does not."""
    changes = sorted([*((end, -1) for end in ended), *((begin, 1) for begin in begun)])
    return int(np.cumsum([change for _, change in changes]).max())


def percentile(values: Sequence[float], counts: Sequence[int], percent: float) -> float:
    """The smallest of the ascending values that so many percent of all lie at or below."""
    reached = np.searchsorted(np.cumsum(counts), percent / 100 * sum(counts))
    return float(values[min(int(reached), len(values) - 1)])
