"""A request of an agent to a model and what came of it, put together from the lines of a stream as they pass by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from experiments.load_client import Answer
from mk.errors import MkError


@dataclass(slots=True)
class Exchange:
    """A request to the model, and what came of it. status: of HTTP, 0 where there was none. whole: whether the answer
    came to its end; else `error` may say why not. message: as an agent puts it into its next request."""

    path: str
    body: dict[str, Any]
    answer: Answer
    status: int = 0
    whole: bool = False
    finish: str | None = None
    error: str | None = None
    message: dict[str, Any] = field(default_factory=lambda: {"role": "assistant", "content": ""})

    @property
    def options(self) -> Mapping[str, Any] | None:
        """stream_options; None for what is none of them, which a server refuses."""
        options = self.body.get("stream_options")
        return {} if options is None else options if isinstance(options, dict) else None

    @property
    def timed(self) -> bool:
        """Whether its arrivals tell when tokens came."""
        return self.answer.counted and bool(self.answer.arrivals)

    def take_line(self, line: bytes, now: float) -> bytes:
        """A line of a stream, as the agent is to see it."""
        if not line.startswith(b"data:"):
            return line
        payload = line[5:].strip()
        if payload == b"[DONE]":
            self.whole = self.error is None
            return line
        try:
            chunk = json.loads(payload)
            self.answer.take(chunk, now)
            for choice in chunk.get("choices") or ():
                self._say(choice.get("delta") or choice)
                self.finish = choice.get("finish_reason") or self.finish
        except (MkError, ValueError, LookupError, TypeError, AttributeError) as error:
            self.error = self.error or str(error)
            return line
        shown = self._shown(chunk)
        return line if shown is chunk else b"data: " + json.dumps(shown).encode() if shown else b""

    def take_whole(self, reply: Mapping[str, Any], now: float) -> None:
        """An answer that was not streamed. Raises LookupError, TypeError or AttributeError for something else."""
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        self._say(choice.get("message") or choice)
        self.finish = choice.get("finish_reason")
        self.answer.take_usage(usage)
        self.answer.tokens = usage.get("completion_tokens", 0)
        self.answer.counted = False  # as they came
        self.answer.arrivals = [(now, self.answer.tokens)]
        self.whole = True

    def _say(self, said: Mapping[str, Any]) -> None:
        """Of a message, or a piece of one."""
        message = self.message
        message["content"] += said.get("content") or said.get("text") or ""
        if reasoning := said.get("reasoning_content") or said.get("reasoning"):
            message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
        for position, call in enumerate(said.get("tool_calls") or ()):
            calls, at = message.setdefault("tool_calls", []), call.get("index", position)
            calls += [
                {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                for _ in range(len(calls), at + 1)
            ]
            calls[at]["id"] = call.get("id") or calls[at]["id"]
            for key, value in (call.get("function") or {}).items():
                calls[at]["function"][key] = calls[at]["function"].get(key, "") + (value or "")

    def _shown(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """The chunk without a usage that was not asked for; None where nothing else is in it."""
        asked = self.options
        if asked is None or not chunk.get("usage") or asked.get("continuous_usage_stats"):
            return chunk
        if chunk.get("choices"):
            return {key: value for key, value in chunk.items() if key != "usage"}
        return chunk if asked.get("include_usage") else None
