"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import Response

from mk.batching.request import Constraint, GenerationParams
from mk.model.tokenizer import Tokenizer
from mk.server.bodies import beside_the_loop
from mk.server.choice import ChatChoice, Piece, SentCall, TokenText
from mk.server.errors import invalid, json_response
from mk.server.generation import Generation, Service, generation_params, seed_of, unless_disconnected
from mk.server.grammar import ThinkingBudget
from mk.server.parser import Section, opening_section
from mk.server.prompts import render_chat
from mk.server.protocol import ChatRequest, NamedTool
from mk.server.sse import EventStream, usage


async def chat_completions(service: Service, asked: ChatRequest, http: HttpRequest) -> Response:
    """Raises ApiError before anything is sent; what happens later is told in the stream."""
    asked.check_fields()
    service.check_model(asked.model)
    options = _template_options(asked)
    answer = ChatAnswer(
        service,
        asked,
        await beside_the_loop(http, lambda: render_chat(service.tokenizer, asked.messages, asked.tools, options)),
    )
    if asked.stream:
        return EventStream(answer.chunks(), answer.close)
    return json_response(await unless_disconnected(http, answer.whole()))


class ChatAnswer:
    """The choices of one request, whose fields were checked. prompt: its tokens."""

    def __init__(self, service: Service, asked: ChatRequest, prompt: list[int]) -> None:
        self._asked, self._service = asked, service
        self.prompt = prompt
        self._section = opening_section(service.tokenizer, self.prompt)
        count = asked.n or 1
        if count > service.max_waiting:
            raise invalid(f"n={count} exceeds {service.max_waiting}, the requests that may wait here", "n")
        params = self._params(service.room(self.prompt, "messages"), count)
        self._generation = Generation(service, [self.prompt], params)
        tools = bool(asked.tools) and asked.tool_choice != "none"
        parallel = asked.parallel_tool_calls is not False
        self._choices = [
            ChatChoice(service.tokenizer, self._section, tools, asked.stops(), parallel) for _ in range(count)
        ]
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": service.model_id}

    def _params(self, room: int, count: int) -> list[GenerationParams]:
        asked, service = self._asked, self._service
        if asked.max_tokens == 0:
            raise invalid("max_tokens must be at least 1", "max_tokens")
        most = min(room, asked.max_completion_tokens or asked.max_tokens or room)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        seed = seed_of(asked)
        grammar = self._grammar()
        return [
            generation_params(service, asked, i, seed, most, logprobs, None, self._constraints(grammar))
            for i in range(count)
        ]

    def _grammar(self) -> str | None:
        asked, grammars = self._asked, self._service.grammars
        wanted = asked.response_format if asked.response_format and asked.response_format.type != "text" else None
        forced = asked.tool_choice if asked.tool_choice not in (None, "auto", "none") else None
        if forced and wanted:
            raise invalid("response_format and a tool_choice that forces a call exclude each other", "response_format")
        parallel = asked.parallel_tool_calls is not False
        if forced:
            assert isinstance(forced, str | NamedTool)
            return grammars.calls(asked.tools or [], forced, parallel)
        if wanted and asked.tools and asked.tool_choice != "none":
            return grammars.answer_or_calls(wanted, asked.tools, parallel)
        return grammars.answer(wanted) if wanted else None

    def _constraints(self, grammar: str | None) -> list[Constraint]:
        """Constraints have a state, so every choice has its own."""
        thinking = self._section is Section.THINKING
        made: list[Constraint] = []
        if grammar is not None:
            made.append(self._service.grammars.constraint(grammar, thinking))
        if self._asked.thinking_token_budget is not None and thinking:
            made.append(ThinkingBudget(self._service.tokenizer, self._asked.thinking_token_budget))
        return made

    # ---- answers ----

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        async for index, delivery in self._generation.deliveries():
            choice = self._choices[index]
            piece = choice.feed(delivery)
            if choice.finish_reason is not None:
                self._generation.stop(index)
            yield index, piece

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        gathered = [Piece() for _ in self._choices]
        async for index, piece in self._pieces():
            into = gathered[index]
            into.reasoning += piece.reasoning
            into.content += piece.content
            into.calls += piece.calls
            into.tokens += piece.tokens
        choices = [
            {
                "index": index,
                "message": _message(piece),
                "logprobs": self._logprobs(piece.tokens),
                "finish_reason": choice.finish_reason,
                **({"token_ids": choice.token_ids} if self._asked.return_token_ids else {}),
            }
            for index, (choice, piece) in enumerate(zip(self._choices, gathered, strict=True))
        ]
        return {
            **self._head,
            "object": "chat.completion",
            **({"prompt_token_ids": self.prompt} if self._asked.return_token_ids else {}),
            "choices": choices,
            "usage": self._usage(),
            "system_fingerprint": self._service.fingerprint,
        }

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer as chunks: the role, pieces, a finish_reason for each choice, and usage where it was asked for."""
        for index in range(len(self._choices)):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for index, piece in self._pieces():
            deltas = _deltas(piece, bool(self._asked.logprobs))
            if self._asked.usage_in_chunks and self._choices[index].finish_reason is None:
                deltas = deltas or [{}]
            for delta in deltas:
                logprobs = self._logprobs(piece.tokens) if "content" in delta else None
                yield self._chunk(index, delta, logprobs)
            if (why := self._choices[index].finish_reason) is not None:
                yield self._chunk(index, {}, finish_reason=why)
        if self._asked.usage_at_end:
            yield {**self._frame(), "choices": [], "usage": self._usage()}

    def close(self) -> None:
        """End whatever still runs."""
        self._generation.close()

    def _frame(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "system_fingerprint": self._service.fingerprint}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        so_far = {"usage": self._usage(index)} if self._asked.usage_in_chunks else {}
        return {**self._frame(), "choices": [choice], **so_far}

    def _usage(self, index: int | None = None) -> dict[str, Any]:
        """Of one choice, or all."""
        choices = self._choices if index is None else [self._choices[index]]
        completion = sum(choice.completion_tokens for choice in choices)
        reasoning = sum(choice.reasoning_tokens for choice in choices)
        return usage(len(self.prompt), completion, self._generation.cached_tokens(index), reasoning)

    def _logprobs(self, tokens: list[TokenText]) -> dict[str, Any] | None:
        if not self._asked.logprobs:
            return None
        return {"content": [_entry(self._service.tokenizer, token) for token in tokens], "refusal": None}


def _template_options(asked: ChatRequest) -> dict[str, Any]:
    options = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort is not None:
        options.setdefault("reasoning_effort", asked.reasoning_effort)
    return options


def _message(piece: Piece) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": piece.content, "refusal": None}
    if piece.calls:
        message["content"] = piece.content or None
        message["tool_calls"] = [sent.as_json() for sent in piece.calls]
    if piece.reasoning:
        message["reasoning_content"] = message["reasoning"] = piece.reasoning
    return message


def _deltas(piece: Piece, logprobs: bool) -> list[dict[str, Any]]:
    """Reasoning, content and calls each in a delta of their own, in this order."""
    deltas: list[dict[str, Any]] = []
    if piece.reasoning:
        deltas.append({"reasoning_content": piece.reasoning, "reasoning": piece.reasoning})
    if piece.content or (logprobs and piece.tokens):
        deltas.append({"content": piece.content})
    deltas += [{"tool_calls": [_call_delta(sent)]} for sent in piece.calls]
    return deltas


def _call_delta(sent: SentCall) -> dict[str, Any]:
    return {"index": sent.index, **sent.as_json()}


def _entry(tokenizer: Tokenizer, token: TokenText) -> dict[str, Any]:
    logprobs = token.sampled.logprobs
    assert logprobs is not None
    top = [_token_entry(tokenizer, other, value) for other, value in logprobs.top]
    return {**_token_entry(tokenizer, token.sampled.token, logprobs.logprob), "top_logprobs": top}


def _token_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {"token": tokenizer.decode([token]), "bytes": list(tokenizer.token_bytes(token)), "logprob": logprob}
