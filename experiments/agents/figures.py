"""Figures of an agent's task from what was recorded of it: for the run, and for who verifies it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.agents.exchange import Exchange
from experiments.load_figures import latencies, timeline
from mk.results.rows import Row

S_DIGITS = 3


def raw_task(exchanges: Sequence[Exchange], ended: str, wall_s: float, test: dict[str, int] | None) -> dict[str, Any]:
    """ended: as `mk.processes.run_within` says it. test: of `scoring.py`, None where it did not come to its
    end."""
    said = [exchange.answer for exchange in exchanges if exchange.whole or exchange.answer.tokens]
    timed = [exchange.answer for exchange in exchanges if exchange.timed]
    return {
        "kind": "agent_task",
        "turns": len(exchanges),
        "refused": sum(exchange.status != 200 for exchange in exchanges),
        "answers": sum(exchange.whole for exchange in exchanges),
        "tokens": [answer.tokens for answer in said],
        "prompt_tokens": [answer.prompt_tokens for answer in said],
        "cached": [answer.cached for answer in said],
        "timeline": timeline(timed) if timed else None,
        "ended": ended,
        "wall_s": round(wall_s, S_DIGITS),
        "test": test,
    }


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """turns: requests to the model, of which `refused` had another status than 200, or none, and `answers` came to
    their end. tokens, prompt_tokens, cached: of these answers and of what others had brought when they were cut off;
    cached is null where the server does not say. timeline: of those among them that were streamed and counted. test:
    of `scoring.py`, null where it did not come to its end."""
    test, said = raw["test"], [cached for cached in raw["cached"] if cached is not None]
    found: dict[str, Any] = {
        "success": test is not None and test["ran"] > 0 and test["failed"] == 0,
        "ended": raw["ended"],
        "turns": raw["turns"],
        "answers": raw["answers"],
        "usage_prompt_tokens": sum(raw["prompt_tokens"]),
        "usage_completion_tokens": sum(raw["tokens"]),
        "wall_s": raw["wall_s"],
        "checks": {
            "was_asked": raw["turns"] > raw["refused"],
            "tokens_counted": min([*raw["tokens"], *raw["prompt_tokens"]], default=1) > 0,
        },
    }
    if said:  # vLLM says nothing of a prompt without hits
        found["hit_tokens"] = sum(said)
    if raw["timeline"] is not None:
        found |= latencies(raw["timeline"])
    return found
