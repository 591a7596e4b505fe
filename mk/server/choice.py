"""One answer as it grows: tokens in, pieces of a message out. Streamed or not, an answer goes through the same steps.

Stop strings are looked for in content alone, from its first character: reasoning and tool calls are not theirs.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mk.batching.request import Delivery, Sampled
from mk.model.tokenizer import Tokenizer
from mk.server.actions import Call
from mk.server.parser import OutputParser, Parsed, Section
from mk.server.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class SentCall:
    """A tool call as it is sent: `index` by its order in the answer, `id` unique in any conversation."""

    index: int
    id: str
    call: Call

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.call.name, "arguments": self.call.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Piece:
    """What an answer gains at a time. tokens: those whose text is in `content`, for logprobs."""

    reasoning: str = ""
    content: str = ""
    calls: list[SentCall] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls or self.tokens)


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token and the text that it completed; start: where in the content that text begins."""

    sampled: Sampled
    text: str
    start: int


class _Content:
    """Content under stop strings, and the tokens whose text has been let through."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = StopMatcher(stops)
        self._seen = self._sent = 0  # characters
        self._waiting: list[TokenText] = []

    @property
    def stopped(self) -> bool:
        return self._stops.matched is not None

    def add(self, piece: Piece, text: str, sampled: Sampled | None = None) -> None:
        if sampled is not None:
            self._waiting.append(TokenText(sampled, text, self._seen))
        self._seen += len(text)
        self._send(piece, self._stops.feed(text))

    def finish(self, piece: Piece) -> None:
        self._send(piece, self._stops.finish())
        if not self.stopped:
            piece.tokens += self._waiting
        self._waiting = []

    def _send(self, piece: Piece, text: str) -> None:
        piece.content += text
        self._sent += len(text)
        while self._waiting and (token := self._waiting[0]).start + len(token.text) <= self._sent:
            piece.tokens.append(self._waiting.pop(0))
        if self.stopped and self._waiting and self._waiting[0].start < self._sent:
            piece.tokens.append(self._waiting.pop(0))  # the stop string begins inside it


class ChatChoice:
    """An answer in sections. `finish_reason` is None while it goes on."""

    def __init__(
        self, tokenizer: Tokenizer, section: Section, tools: bool, stops: Sequence[str], parallel: bool = True
    ) -> None:
        """tools: whether actions are calls, otherwise they are content. parallel: whether there may be several."""
        self._special = tokenizer.special
        self._parser = OutputParser(tokenizer, section, tools)
        self._content = _Content(stops)
        self._parallel = parallel
        self.finish_reason: str | None = None
        self.completion_tokens = self.reasoning_tokens = 0
        self.token_ids: list[int] = []
        self._calls = 0

    def feed(self, delivery: Delivery) -> Piece:
        """What a delivery adds. After `finish_reason` is set nothing does."""
        piece = Piece()
        for sampled in delivery.tokens:
            if self.finish_reason is None:
                self._token(piece, sampled)
        if delivery.finish is not None and self.finish_reason is None:
            self._end(piece, delivery.finish)
        return piece

    def _token(self, piece: Piece, sampled: Sampled) -> None:
        self.completion_tokens += 1
        self.token_ids.append(sampled.token)
        self.reasoning_tokens += self._parser.section is Section.THINKING
        in_content = self._parser.section is Section.TEXT and sampled.token not in self._special
        self._add(piece, self._parser.step(sampled.token), sampled if in_content else None)
        if self._content.stopped or (self._calls and not self._parallel):
            self._end(piece, "stop")

    def _add(self, piece: Piece, parsed: Parsed, sampled: Sampled | None) -> None:
        piece.reasoning += parsed.reasoning
        if parsed.content or sampled is not None:
            self._content.add(piece, parsed.content, sampled)
        for call in parsed.calls:
            if self._parallel or not self._calls:
                piece.calls.append(SentCall(self._calls, f"call_{secrets.token_hex(12)}", call))
                self._calls += 1

    def _end(self, piece: Piece, why: str) -> None:
        if not self._content.stopped:
            self._add(piece, self._parser.finish(), None)
        self._content.finish(piece)
        self.finish_reason = "tool_calls" if why == "stop" and self._calls and not self._content.stopped else why


class TextChoice:
    """A plain continuation."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._text = tokenizer.stream(skip_special=True)
        self._content = _Content(stops)
        self.finish_reason: str | None = None
        self.completion_tokens = 0
        self.token_ids: list[int] = []

    def feed(self, delivery: Delivery) -> Piece:
        """What a delivery adds. After `finish_reason` is set nothing does."""
        piece = Piece()
        for sampled in delivery.tokens:
            if self.finish_reason is None:
                self.completion_tokens += 1
                self.token_ids.append(sampled.token)
                self._content.add(piece, self._text.step(sampled.token), sampled)
                if self._content.stopped:
                    self._end(piece, "stop")
        if delivery.finish is not None and self.finish_reason is None:
            self._end(piece, delivery.finish)
        return piece

    def _end(self, piece: Piece, why: str) -> None:
        if not self._content.stopped:
            self._content.add(piece, self._text.finish())
        self._content.finish(piece)
        self.finish_reason = why
