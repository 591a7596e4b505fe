"""The engine of this process: requests in the rows of a batch decoder, without a server."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from evals.benchmarks.base import Prompt
from evals.completion import Completion, Request
from mk import decode
from mk.engines import Engine as DecodeEngine
from mk.errors import MkError
from mk.model.tokenizer import Tokenizer


@dataclass(slots=True)
class _Taken:
    key: Hashable
    request: decode.Request
    chat: bool
    started: float


class OfflineEngine:
    def __init__(self, engine: DecodeEngine, tokenizer: Tokenizer) -> None:
        self.name = engine.name
        self.parallel = engine.rows
        self.answered = 0
        self._tokenizer = tokenizer
        self._decoder = decode.Decoder(engine, tokenizer.eos)
        self._waiting: deque[tuple[Hashable, Request]] = deque()
        self._taken: list[_Taken] = []
        self._numbers = itertools.count(1)

    def submit(self, key: Hashable, request: Request) -> None:
        self._waiting.append((key, request))

    def collect(self) -> list[tuple[Hashable, Completion]]:
        if not self._waiting and not self._taken:
            raise MkError("no request is outstanding")
        while True:
            self._fill()
            done = [taken for taken in self._taken if taken.request.finish is not None]
            if done:
                self._taken = [taken for taken in self._taken if taken.request.finish is None]
                self.answered += len(done)
                return [(taken.key, self._completion(taken)) for taken in done]
            self._decoder.step()

    def close(self) -> None:
        self._waiting.clear()

    def _fill(self) -> None:
        while self._waiting and self._decoder.active < self.parallel:
            key, asked = self._waiting.popleft()
            started = time.perf_counter()
            request = decode.Request(prompt_ids(self._tokenizer, asked.prompt), asked.max_tokens, asked.sampling)
            self._decoder.add(request)
            self._taken.append(_Taken(key, request, asked.prompt.text is None, started))

    def _completion(self, taken: _Taken) -> Completion:
        request = taken.request
        tokens = request.tokens[:-1] if request.finish == "eos" else request.tokens
        if taken.chat:
            reasoning, content = split_reply(self._tokenizer, tokens)
        else:
            reasoning, content = "", self._tokenizer.decode(tokens, skip_special=True)
        return Completion(
            content,
            reasoning,
            "stop" if request.finish == "eos" else "length",
            len(request.prompt),
            len(request.tokens),
            time.perf_counter() - taken.started,
            f"offline-{next(self._numbers)}",
            list(request.prompt),
            list(request.tokens),
        )


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The tokens of a prompt: a conversation by the model's chat template, a text as it stands after BOS."""
    if prompt.text is not None:
        return tokenizer.encode(prompt.text, bos=True)
    return tokenizer.encode(tokenizer.render(prompt.messages))


def split_reply(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[str, str]:
    """(reasoning, content) of a reply that began inside its thoughts. A reply cut off there has no content."""
    markers = tokenizer.markers
    if "start_text" not in markers:
        return "", tokenizer.decode(tokens, skip_special=True)
    thought = list(itertools.takewhile(lambda token: token != markers.get("end_thinking"), tokens))
    text = list(itertools.dropwhile(lambda token: token != markers["start_text"], tokens))[1:]
    text = list(itertools.takewhile(lambda token: token != markers.get("end_text"), text))
    return tokenizer.decode(thought, skip_special=True), tokenizer.decode(text, skip_special=True)
