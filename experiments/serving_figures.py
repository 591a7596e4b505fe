"""What serving changes and costs, from single tokens, rounds and choices: for the run, and for who verifies it."""

from __future__ import annotations

from typing import Any

import numpy as np

from mk.results.rows import Row


def cached_answers(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """shifts: of each token's logprob, while the answers over hits and the cold ones say the same. hits: conversations
    that hit all that they could, of `conversations`. answer: tokens of a turn."""
    shifts = raw["shifts"]
    return {
        "checks": {"generated_blocks_hit": raw["hits"] == raw["conversations"]},
        "new_tokens": raw["answer"],
        "positions": len(shifts),
        "logprob_shift": float(np.mean(shifts)) if shifts else None,
        "logprob_shift_most": max(shifts, default=None),
    }


def options(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """round_s: seconds of each round's decode steps, of which there were round_steps. came: tokens that each row was
    given, by round, of `asked`. choice_us: of choices on the host; null where the engine chooses."""
    pairs = zip(raw["round_s"], raw["round_steps"], strict=True)
    return {
        "checks": {"all_tokens_came": all(came == raw["asked"] for rows in raw["came"] for came in rows)},
        "steps": raw["asked"] - 1,  # prefill gives the first
        "wall_ms": min(seconds / steps for seconds, steps in pairs) * 1e3,
        "choice_us": None if raw["choice_us"] is None else float(np.median(raw["choice_us"])),
    }
