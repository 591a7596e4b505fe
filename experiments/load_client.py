"""A client that measures: streamed requests to an OpenAI server, several in flight, and when the tokens of each came.

It asks for the usage in every chunk, by which it counts tokens: a chunk's text may hold none, or several.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from evals.served import ABOUT_S, Pool, answering, fetch, http_request
from mk.errors import MkError

COUNTED = {"include_usage": True, "continuous_usage_stats": True}


@dataclass(slots=True)
class Answer:
    """What came of a request, and when, by this process's clock in seconds. arrivals: (time, tokens) of each chunk that
    brought some. cached: prompt tokens that the server had already, None where it does not say. counted: whether the
    server counts tokens as they come; else arrivals tell nothing."""

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    cached: int | None = None
    text: str = ""
    counted: bool = True

    def take(self, chunk: Mapping[str, Any], now: float) -> None:
        """Raises MkError for a chunk that tells of an error."""
        if "error" in chunk:
            raise MkError(f"the answer broke off: {str(chunk['error'])[:300]}")
        usage, text = chunk.get("usage") or {}, ""
        for choice in chunk.get("choices", ()):
            said = choice.get("delta") or choice
            text += said.get("reasoning") or said.get("reasoning_content") or ""
            text += said.get("content") or said.get("text") or ""
        self.counted &= bool(usage or not text)
        self.text += text
        self.take_usage(usage)
        come = usage.get("completion_tokens", self.tokens) - self.tokens
        if come > 0:
            self.arrivals.append((now, come))
            self.tokens += come

    def take_usage(self, usage: Mapping[str, Any]) -> None:
        """Of the prompt."""
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", self.cached)


class Client:
    """Of one server. base_url: with /v1. timeout_s: between two signs of life of an answer."""

    def __init__(self, base_url: str, timeout_s: float) -> None:
        """Raises MkError where the server does not answer, or serves nothing."""
        self.url, self._timeout_s = base_url.rstrip("/"), timeout_s
        served = fetch(f"{self.url}/models", None, ABOUT_S).get("data")
        if not isinstance(served, list) or not served:
            raise MkError(f"{self.url}/models names no model")
        self.model = str(served[0]["id"])
        self.context: int | None = served[0].get("max_model_len")  # tokens, where the server says so

    def count(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of a conversation's prompt, by the server's /tokenize. Raises MkError for a server that has none."""
        asked = {"model": self.model, "messages": messages, "tools": tools}
        try:
            return int(fetch(f"{self.url.removesuffix('/v1')}/tokenize", asked, self._timeout_s)["count"])
        except MkError as error:
            raise MkError(f"the rehearsal counts tokens: {error}", hint="experiment.warm=0 leaves it out") from error

    def ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        """One answer to its end. Raises MkError for one that does not come, or breaks off."""
        url = self.url + path
        asked = {"model": self.model, **body, "stream": True, "stream_options": COUNTED}
        answer = Answer(time.perf_counter())
        with answering(url), urllib.request.urlopen(http_request(url, asked), timeout=self._timeout_s) as reply:
            for line in reply:
                now = time.perf_counter()
                if line.startswith(b"data: {"):
                    answer.take(json.loads(line[6:]), now)
                    if not answer.counted:
                        raise MkError(f"{url} does not count tokens as they come: it knows no continuous_usage_stats")
                elif line.startswith(b"data: [DONE]"):
                    break
            else:
                raise MkError(f"{url}: the answer ended before [DONE]")
        if not answer.arrivals:
            raise MkError(f"{url}: an answer without tokens")
        return answer

    def drive(
        self, path: str, bodies: Sequence[Mapping[str, Any]], parallel: int, done: Callable[[int], None]
    ) -> list[Answer]:
        """All answers, `parallel` requests in flight while there are as many: the next is sent when one has ended.

        done: told how many have. Raises MkError as `ask` does, for the first that fails.
        """
        pool = Pool[Answer](min(parallel, len(bodies)))
        futures = [pool.submit(partial(self.ask, path, body)) for body in bodies]
        try:
            for ended, future in enumerate(as_completed(futures), 1):
                future.result()  # raises
                done(ended)
        except Exception:  # nothing more is sent, and what is being answered comes to its end
            wait([future for future in futures if not future.cancel()])
            raise
        finally:  # an interrupt does not wait for that
            for future in futures:
                future.cancel()
            pool.close()
        return [future.result() for future in futures]
