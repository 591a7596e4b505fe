"""Conversations that can be sent again: read from a file, or found in what an agent asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.agents.exchange import Exchange
from experiments.load import asked_sampling
from mk.errors import MkError
from mk.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Turn:
    """given: messages that are new, of user and tools. said: the recorded answer. tokens: that are generated."""

    given: list[dict[str, Any]]
    said: dict[str, Any]
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    tools: list[dict[str, Any]]
    turns: list[Turn]

    @classmethod
    def load(cls, path: Path) -> Trace:
        """From {"tools": [...], "turns": [{"given": [...], "said": {...}, "tokens": n}, ...]}. Raises MkError."""
        try:
            found = json.loads(path.read_text())
            turns = [Turn(list(turn["given"]), dict(turn["said"]), int(turn["tokens"])) for turn in found["turns"]]
            trace = cls(path.stem, list(found["tools"]), turns)
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise MkError(f"agent.trace={path} is no trace: {error!r}"[:300]) from error
        if not turns or any(turn.tokens < 1 or not turn.given for turn in turns):
            raise MkError(f"agent.trace={path}: every turn is given something, and generates at least 1 token")
        return trace

    @classmethod
    def record(cls, name: str, exchanges: Sequence[Exchange]) -> Trace | None:
        """The longest conversation among an agent's requests, each of which holds the one before it and its answer;
        None without any. What an agent asks beside it (a title) and what it rewrites begins another."""
        chains: list[list[Exchange]] = []
        for exchange in exchanges:
            if not exchange.whole or not exchange.answer.tokens or not exchange.body.get("messages"):
                continue
            chain = next((chain for chain in reversed(chains) if _goes_on(chain[-1], exchange)), None)
            if chain is None:
                chains.append([exchange])
            else:
                chain.append(exchange)
        if not chains:
            return None
        chain = max(chains, key=len)
        turns, before = [], 0
        for exchange, after in zip(chain, [*chain[1:], None], strict=True):
            messages = exchange.body["messages"]
            said = exchange.message if after is None else after.body["messages"][len(messages)]
            turns.append(Turn(messages[before:], said, exchange.answer.tokens))
            before = len(messages) + 1
        return cls(name, chain[-1].body.get("tools") or [], turns)

    def text(self) -> str:
        """As `load` reads it."""
        turns = [{"given": turn.given, "said": turn.said, "tokens": turn.tokens} for turn in self.turns]
        return json.dumps({"tools": self.tools, "turns": turns}, indent=1) + "\n"

    def bodies(self, scale: float, sampling: SamplingParams) -> list[dict[str, Any]]:
        """The requests. scale: share of the recorded tokens that is generated. A seed goes with tokens that are drawn:
        one request runs at a time, so that it costs no engine its batch."""
        seed = {} if sampling.greedy else {"seed": sampling.seed}
        said: list[dict[str, Any]] = []
        asked = []
        for turn in self.turns:
            said = [*said, *turn.given]
            asked.append(
                {
                    "messages": said,
                    "tools": self.tools,
                    "tool_choice": "none",  # of the model's own answer: a server without a parser refuses others
                    "max_tokens": max(1, round(turn.tokens * scale)),
                    "ignore_eos": True,
                    **asked_sampling(sampling),
                    **seed,
                }
            )
            said = [*said, turn.said]
        return asked


def _goes_on(before: Exchange, exchange: Exchange) -> bool:
    """Whether a request is another's conversation with its answer and something after that."""
    old, new = before.body["messages"], exchange.body["messages"]
    return len(new) > len(old) + 1 and new[: len(old)] == old and new[len(old)].get("role") == "assistant"
