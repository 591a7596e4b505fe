"""The engine behind an OpenAI endpoint, whoever's it is: as many requests at a time as it is told, each in a thread."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Hashable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from evals.completion import Completion, Request
from mk.errors import MkError


class ServedEngine:
    def __init__(self, base_url: str, model: str, parallel: int, timeout_s: float) -> None:
        """`base_url` ends in /v1; `timeout_s` is of a whole answer."""
        self.name = "served"
        self.parallel = parallel
        self.answered = 0
        self._url, self._model, self._timeout_s = base_url.rstrip("/"), model, timeout_s
        self._pool = ThreadPoolExecutor(parallel)
        self._open: dict[Future[Completion], Hashable] = {}

    def submit(self, key: Hashable, request: Request) -> None:
        self._open[self._pool.submit(self._ask, request)] = key

    def collect(self) -> list[tuple[Hashable, Completion]]:
        done, _ = wait(self._open, return_when=FIRST_COMPLETED)
        good = [future for future in done if future.exception() is None]
        if not good:  # a failure ends the run, but what is being answered meanwhile is not lost with it
            self._open = {future: key for future, key in self._open.items() if not future.cancel()}
            done, _ = wait(self._open)
            good = [future for future in done if future.exception() is None]
        for future in done if not good else ():
            future.result()  # raises: only once every answer that did come has been handed out
        answers = [(self._open.pop(future), future.result()) for future in good]
        self.answered += len(answers)
        return answers

    def close(self) -> None:
        for future in self._open:
            future.cancel()
        self._open.clear()

    def _ask(self, request: Request) -> Completion:
        path = "/completions" if request.prompt.messages == () else "/chat/completions"
        started = time.perf_counter()
        reply = self._post(path, {"model": self._model, **request.body()})
        return parse_reply(reply, time.perf_counter() - started)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url = self._url + path
        asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=self._timeout_s) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            raise MkError(f"{url} answers {error.code}: {error.read(300).decode(errors='replace')}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise MkError(f"{url} does not answer: {error}", hint="experiment.base_url=<http://.../v1>") from error


def parse_reply(reply: dict[str, Any], latency_s: float) -> Completion:
    """An OpenAI reply. What is graded is the content; reasoning has either of two names. Raises MkError for others."""
    try:
        choice, usage = reply["choices"][0], reply["usage"]
        message = choice.get("message", {"content": choice.get("text")})
        return Completion(
            message["content"] or "",
            message.get("reasoning_content") or message.get("reasoning") or "",
            str(choice["finish_reason"]),
            int(usage["prompt_tokens"]),
            int(usage["completion_tokens"]),
            latency_s,
            str(reply.get("id", "")),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise MkError(f"not a reply of an OpenAI server: {str(reply)[:200]}") from error
