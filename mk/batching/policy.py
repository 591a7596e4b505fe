"""How the scheduler deals with requests that compete."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """How prompts and decode steps take turns, and what is shared.

    chunk: prompt tokens computed at a time. prefill: "pause" computes a prompt to its end, "interleave" runs
    `steps_between` decode steps after each chunk. cache, cache_generated: whether full blocks of prompts, and those
    with generated tokens, are kept for later requests. deliver: tokens that are delivered at a time. held: decode steps
    that a request has pages for beforehand.
    """

    chunk: int
    prefill: str
    steps_between: int
    cache: bool
    cache_generated: bool
    deliver: int
    held: int
