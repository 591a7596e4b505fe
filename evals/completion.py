"""What an evaluation asks of an engine, and what comes back: the same request, byte by byte, whichever engine it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from evals.benchmarks.base import Prompt
from mk.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One request. There are no stop strings: one that fired in the middle of a thought would end it."""

    prompt: Prompt
    max_tokens: int
    sampling: SamplingParams
    token_ids: bool = True  # asked for; vLLM and our server know the field, others may refuse it

    def body(self) -> dict[str, Any]:
        """The JSON of an OpenAI request, without the model's name."""
        sampling = self.sampling
        asked: dict[str, Any] = (
            {"messages": [dict(message) for message in self.prompt.messages]}
            if self.prompt.text is None
            else {"prompt": self.prompt.text}
        )
        asked |= {"max_tokens": self.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p}
        if sampling.top_k:
            asked["top_k"] = sampling.top_k
        if self.token_ids:
            asked["return_token_ids"] = True
        return asked | {"seed": sampling.seed}

    @property
    def digest(self) -> str:
        """sha256 (hex) of the body as canonical JSON, where a lone surrogate is escaped."""
        text = json.dumps(self.body(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `content` is what is graded; what the model thought before it is `reasoning`."""

    content: str
    reasoning: str
    finish: str  # stop, or length: truncated
    prompt_tokens: int
    completion_tokens: int
    latency_s: float  # from when the request was sent
    response_id: str = ""
    prompt_ids: list[int] | None = None  # where the server gives them
    token_ids: list[int] | None = None


class Engine(Protocol):
    """Answers requests, several at a time; answers come in any order. An answer that cannot be given is an MkError."""

    name: str
    parallel: int  # requests it works on at a time; more may be submitted

    def submit(self, key: Hashable, request: Request) -> None: ...

    def collect(self) -> list[tuple[Hashable, Completion]]:
        """Wait for at least one answer; all that are there. Only while requests are outstanding."""
        ...

    def close(self) -> None:
        """Give up what is outstanding."""
        ...
