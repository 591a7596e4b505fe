"""From the endpoints to the engine's thread and back: parameters, submission, deliveries, cancellation."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from mk.batching.request import Constraint, Delivery, GenerationParams, Request
from mk.batching.worker import QueueFull, Worker
from mk.errors import MkError
from mk.model.tokenizer import Tokenizer
from mk.sampling import SamplingParams
from mk.server.errors import ApiError, engine_error, invalid, unavailable
from mk.server.grammar import Grammars
from mk.server.metrics import Metrics
from mk.server.protocol import GenerationRequest

T = TypeVar("T")
_numbers = itertools.count()


@dataclass(slots=True)
class Service:
    """What the endpoints share. context: tokens of prompt and answer together. max_waiting: requests in the queue."""

    worker: Worker
    tokenizer: Tokenizer
    model_id: str
    fingerprint: str
    context: int
    max_waiting: int
    created: int
    metrics: Metrics
    grammars: Grammars
    defaults: dict[str, Any] = field(default_factory=dict)  # of sampling, from the model's generation_config.json
    build_hash: str | None = None  # of the compiled kernel; None where none runs

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.model_id:
            raise ApiError(
                404, f"the model {model!r} is not served here, {self.model_id} is", "model_not_found", "model"
            )

    def room(self, prompt: Sequence[int], param: str) -> int:
        """Tokens that may follow a prompt. Raises ApiError for a prompt that leaves none, or is none."""
        if not prompt:
            raise invalid(f"{param} has no tokens", param)
        room = self.context - len(prompt)
        if room < 1:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.context} tokens. However, your prompt has "
                f"{len(prompt)} tokens. Please reduce the length of the {param}.",
                "context_length_exceeded",
                param,
            )
        return room

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises ApiError for an id outside the vocabulary."""
        vocab = self.tokenizer.vocab
        for token in tokens:
            if not 0 <= token < vocab:
                raise invalid(f"{param}: token {token} is outside 0..{vocab - 1}", param)


def generation_params(
    service: Service,
    asked: GenerationRequest,
    choice: int,
    seed: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    constraints: Sequence[Constraint] = (),
) -> GenerationParams:
    """A choice's parameters. Fields that are not given take the model's own defaults, then OpenAI's.

    Choice i draws with seed + i. Raises ApiError.
    """

    def given(name: str, otherwise: Any) -> Any:
        value = getattr(asked, name)
        return service.defaults.get(name, otherwise) if value is None else value

    bias = {_token_id(token): value for token, value in (asked.logit_bias or {}).items()}
    service.check_tokens(list(bias), "logit_bias")
    service.check_tokens(asked.stop_token_ids or [], "stop_token_ids")
    temperature = float(given("temperature", 1.0))
    sampled = temperature > 0
    try:
        sampling = SamplingParams(
            temperature,
            max(0, given("top_k", 0)) if sampled else 0,
            float(given("top_p", 1.0)) if sampled else 1.0,
            (seed + choice) % 2**64,
        )
    except MkError as error:
        raise invalid(str(error)) from error
    return GenerationParams(
        max_tokens=max_tokens,
        sampling=sampling,
        min_p=given("min_p", 0.0) if sampled else 0.0,
        repetition_penalty=given("repetition_penalty", 1.0),
        presence_penalty=given("presence_penalty", 0.0),
        frequency_penalty=given("frequency_penalty", 0.0),
        logit_bias=bias,
        min_tokens=min(asked.min_tokens or 0, max_tokens),
        stop_token_ids=frozenset(asked.stop_token_ids or ()),
        ignore_eos=bool(asked.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        constraints=constraints,
    )


def seed_of(asked: GenerationRequest) -> int:
    """The request's seed as an unsigned number of 64 bits (-1 is 2^64 - 1); without one, a random one."""
    return secrets.randbits(64) if asked.seed is None else asked.seed % 2**64


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise invalid(f"logit_bias: {text!r} is no token id", "logit_bias")
    return int(text)


class Generation:
    """The sequences of one HTTP request. Leaving it ends whatever of them still runs."""

    def __init__(self, service: Service, prompts: Sequence[Sequence[int]], params: Sequence[GenerationParams]) -> None:
        """params: of every sequence, as many for each prompt, those of the first one first.

        Raises ApiError when the queue is full or the engine out of order.
        """
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[tuple[int, Delivery]] = asyncio.Queue()
        self._each = len(params) // len(prompts)
        of = [prompt for prompt in prompts for _ in range(self._each)]
        name = f"{next(_numbers)}"
        self._requests = [
            Request(f"{name}-{index}", prompt, given, self._sink(index))
            for index, (prompt, given) in enumerate(zip(of, params, strict=True))
        ]
        self._cached = [0] * len(self._requests)
        self._open = set(range(len(self._requests)))
        self._clocks = [service.metrics.clock() for _ in self._requests]
        try:
            service.worker.submit(*self._requests, max_waiting=service.max_waiting)
        except QueueFull as error:
            raise ApiError(429, str(error), "queue_full") from error
        except MkError as error:
            raise unavailable(str(error)) from error

    def _sink(self, index: int) -> Callable[[Delivery], None]:
        def sink(delivery: Delivery) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._news.put_nowait, (index, delivery))

        return sink

    async def deliveries(self) -> AsyncIterator[tuple[int, Delivery]]:
        """(sequence, delivery) as they come, until all have finished. Raises ApiError for one that failed."""
        try:
            while self._open:
                index, delivery = await self._news.get()
                if index not in self._open:
                    continue
                self._cached[index] = delivery.cached_tokens
                if delivery.tokens:
                    self._clocks[index].tokens(len(delivery.tokens))
                if delivery.finish is not None:
                    self._end(index)
                    if delivery.finish in ("error", "cancelled"):
                        raise self._failure(delivery.error or "the request was cancelled")
                yield index, delivery
        finally:
            self.close()

    def cached_tokens(self, index: int | None = None) -> int:
        """Tokens of the prompts, each counted once, that one of its sequences at least did not have to compute.

        index: of the prompt of this sequence alone, what it did not.
        """
        if index is not None:
            return self._cached[index]
        return sum(max(self._cached[at : at + self._each]) for at in range(0, len(self._cached), self._each))

    def stop(self, index: int) -> None:
        """End one sequence: its answer is complete."""
        if index in self._open:
            self._end(index)
            self._service.worker.cancel(self._requests[index])

    def close(self) -> None:
        for index in list(self._open):
            self.stop(index)

    def _failure(self, message: str) -> ApiError:
        """A server that ends is unavailable, not at fault: clients may ask another."""
        return unavailable(message) if self._service.worker.stopping else engine_error(message)

    def _end(self, index: int) -> None:
        self._open.discard(index)
        self._clocks[index].end()


class Disconnected(Exception):
    """The client has gone."""


async def unless_disconnected(http: HttpRequest, work: Awaitable[T]) -> T:
    """The result of some work, which is given up when the client goes. Raises Disconnected then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(http))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Disconnected
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
