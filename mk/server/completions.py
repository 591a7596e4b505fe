"""POST /v1/completions: plain continuations, with the logprobs of a prompt where its echo is asked for."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import Response

from mk.batching.request import Logprobs
from mk.server.bodies import beside_the_loop
from mk.server.choice import Piece, TextChoice
from mk.server.errors import invalid, json_response
from mk.server.generation import Generation, Service, generation_params, seed_of, unless_disconnected
from mk.server.prompts import encode
from mk.server.protocol import MAX_CHOICES, CompletionRequest
from mk.server.sse import EventStream, usage

DEFAULT_TOKENS = 16  # as OpenAI's


async def completions(service: Service, asked: CompletionRequest, http: HttpRequest) -> Response:
    """Raises ApiError before anything is sent; what happens later is told in the stream."""
    asked.check_fields()
    service.check_model(asked.model)
    prompts = await beside_the_loop(http, lambda: prompts_of(service, asked))
    answer = CompletionAnswer(service, asked, prompts)
    if asked.stream:
        return EventStream(answer.chunks(), answer.close)
    return json_response(await unless_disconnected(http, answer.whole()))


def prompts_of(service: Service, asked: CompletionRequest) -> list[list[int]]:
    """The prompts as token ids; a text begins with the model's BOS."""
    given: Any = asked.prompt
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    prompts = given if several else [given]
    if (several and not given) or len(prompts) > 64 * MAX_CHOICES:
        raise invalid(f"{len(prompts)} prompts are too many", "prompt")
    tokens = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokens.append(encode(service.tokenizer, prompt, "prompt", bos=True))
        else:
            service.check_tokens(prompt, "prompt")
            tokens.append(list(prompt))
    return tokens


class CompletionAnswer:
    """The choices of one request, whose fields were checked: n of its first prompt, then n of the next."""

    def __init__(self, service: Service, asked: CompletionRequest, prompts: list[list[int]]) -> None:
        self._asked, self._service, self._prompts = asked, service, prompts
        count = asked.n or 1
        if len(prompts) * count > service.max_waiting:
            raise invalid(f"{len(prompts)} prompts x n={count} exceed {service.max_waiting}", "prompt")
        seed = seed_of(asked)
        wanted = DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
        if not wanted and not asked.echo:
            raise invalid("max_tokens=0 needs echo=true", "max_tokens")
        self._wanted = wanted
        of_prompt = asked.logprobs if asked.echo else None
        self._of: list[list[int]] = []
        params = []
        for prompt in prompts:
            most = min(service.room(prompt, "prompt"), max(1, wanted))
            for i in range(count):
                self._of.append(prompt)
                params.append(generation_params(service, asked, i, seed, most, asked.logprobs, of_prompt))
        self._generation = Generation(service, prompts, params)
        self._choices = [TextChoice(service.tokenizer, asked.stops()) for _ in params]
        self._logs = [_Log(service, asked.logprobs) for _ in params]
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_id,
            "system_fingerprint": service.fingerprint,
        }

    async def _pieces(self) -> AsyncIterator[tuple[int, str, dict[str, Any] | None]]:
        """(choice, text, its logprobs), an echoed prompt first."""
        begun: set[int] = set()
        async for index, delivery in self._generation.deliveries():
            choice, log = self._choices[index], self._logs[index]
            text = ""
            if index not in begun:
                begun.add(index)
                if self._asked.echo:
                    text = log.prompt(self._of[index], delivery.prompt_logprobs)
            piece = choice.feed(delivery)
            if not self._wanted:  # the one token that had to be drawn
                piece = Piece()
                choice.completion_tokens = 0
                choice.token_ids.clear()
                choice.finish_reason = choice.finish_reason and "length"
            text += log.answer(piece)
            if choice.finish_reason is not None:
                self._generation.stop(index)
            yield index, text, log.take()

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        texts = [""] * len(self._choices)
        logs: list[dict[str, Any] | None] = [None] * len(self._choices)
        async for index, text, log in self._pieces():
            texts[index] += text
            held = logs[index]
            if held is None or log is None:
                logs[index] = log
            else:
                for key, values in log.items():
                    held[key] += values
        choices: list[dict[str, Any]] = [
            {"index": i, "text": texts[i], "logprobs": logs[i], "finish_reason": choice.finish_reason}
            for i, choice in enumerate(self._choices)
        ]
        if self._asked.return_token_ids:
            for sent, choice, prompt in zip(choices, self._choices, self._of, strict=True):
                sent |= {"prompt_token_ids": prompt, "token_ids": choice.token_ids}
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer as chunks; the last one of a choice has its finish_reason."""
        counted = self._asked.usage_in_chunks
        async for index, text, log in self._pieces():
            why = self._choices[index].finish_reason
            if text or why or (log and log["tokens"]) or counted:
                choice = {"index": index, "text": text, "logprobs": log, "finish_reason": why}
                so_far = {"usage": self._usage_of(index)} if counted else {}
                yield {**self._head, "choices": [choice], **so_far}
        if self._asked.usage_at_end:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def close(self) -> None:
        """End whatever still runs."""
        self._generation.close()

    def _usage(self) -> dict[str, Any]:
        completion = sum(choice.completion_tokens for choice in self._choices)
        return usage(sum(map(len, self._prompts)), completion, self._generation.cached_tokens())

    def _usage_of(self, index: int) -> dict[str, Any]:
        """Of one choice."""
        completion = self._choices[index].completion_tokens
        return usage(len(self._of[index]), completion, self._generation.cached_tokens(index))


class _Log:
    """A choice's logprobs in the form of this endpoint: arrays beside each other, texts that add up to the text."""

    def __init__(self, service: Service, count: int | None) -> None:
        self._tokenizer, self._count = service.tokenizer, count
        self._offset = 0
        self._new = self._empty()

    @staticmethod
    def _empty() -> dict[str, Any]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def prompt(self, tokens: Sequence[int], logprobs: Sequence[Logprobs | None] | None) -> str:
        """Take in an echoed prompt; its text. The last token has what a half character leaves."""
        stream = self._tokenizer.stream(skip_special=True)
        texts = [stream.step(token) for token in tokens]
        texts[-1] += stream.finish()
        for token, text, found in zip(tokens, texts, logprobs or [None] * len(tokens), strict=True):
            self._add(token, text, found)
        return "".join(texts)

    def answer(self, piece: Piece) -> str:
        for token in piece.tokens:
            self._add(token.sampled.token, token.text, token.sampled.logprobs)
        return piece.content

    def take(self) -> dict[str, Any] | None:
        """What has come in since the last time; None where no logprobs were asked for."""
        new, self._new = self._new, self._empty()
        return new if self._count is not None else None

    def _add(self, token: int, text: str, found: Logprobs | None) -> None:
        self._new["tokens"].append(text)
        self._new["text_offset"].append(self._offset)
        self._offset += len(text)
        self._new["token_logprobs"].append(None if found is None else found.logprob)
        top = None
        if found is not None:
            top = {self._tokenizer.decode([other]): value for other, value in reversed(found.top)}
            top.setdefault(self._tokenizer.decode([token]), found.logprob)
        self._new["top_logprobs"].append(top)
