"""The engine behind an OpenAI endpoint, whoever's it is: as many requests at a time as it is told, each in a thread."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from evals.completion import Completion, Request
from mk.errors import MkError

API_KEY = "OPENAI_API_KEY"  # the environment's, where the endpoint wants one
ABOUT_S = 30.0  # that a server may take to say something about itself
_COUNT_S = 5.0  # that it may take to count an answer it has given
# How servers count the requests that they answered in full; the reason of each is a label.
_ANSWERED = re.compile(
    r'^(?:mk_requests_finished_total|vllm:request_success_total)\{.*reason="(?:stop|length)".*\} (\S+)$', re.MULTILINE
)
_COUNTS = re.compile(r"^# TYPE (?:mk_requests_finished|vllm:request_success)(?:_total)? counter$", re.MULTILINE)


Result = TypeVar("Result")


class Pool(Generic[Result]):
    """As a ThreadPoolExecutor, of threads that no ending process waits for: a server may never answer."""

    def __init__(self, threads: int) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Result], Callable[[], Result]] | None] = queue.SimpleQueue()
        self._threads = threads
        for _ in range(threads):
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Threads end when they are done with what they are at."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (given := self._jobs.get()) is not None:
            future, job = given
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)


class ServedEngine:
    """model: what the server calls it. context: tokens of prompt and answer, None where it does not say."""

    def __init__(self, base_url: str, model: str | None, parallel: int, timeout_s: float, name: str = "served") -> None:
        """`base_url` ends in /v1. model: None = the first that the server names. `timeout_s` is of a whole answer.

        Raises MkError where the server does not answer, or does not serve the model.
        """
        self.name = name
        self.parallel = parallel
        self.url, self._timeout_s = base_url.rstrip("/"), timeout_s
        self._pool = Pool[Completion](parallel)
        self._open: dict[Future[Completion], Hashable] = {}
        self.model, self.context = self._about(model)

    def submit(self, key: Hashable, request: Request) -> None:
        self._open[self._pool.submit(lambda: self._ask(request))] = key

    def collect(self) -> list[tuple[Hashable, Completion]]:
        done, _ = wait(self._open, return_when=FIRST_COMPLETED)
        good = [future for future in done if future.exception() is None]
        if not good:  # a failure ends the run, but what is being answered meanwhile is not lost with it
            self._open = {future: key for future, key in self._open.items() if not future.cancel()}
            done, _ = wait(self._open)
            good = [future for future in done if future.exception() is None]
        for future in done if not good else ():
            future.result()  # raises: only once every answer that did come has been handed out
        return [(self._open.pop(future), future.result()) for future in good]

    def close(self) -> None:
        for future in self._open:
            future.cancel()
        self._open.clear()
        self._pool.close()

    def count(self, expected: int | None = None) -> int | None:
        """Requests that the server has answered since it started, by its own /metrics; None where it has none.

        Waits a moment for `expected`: a server may count an answer just after it was sent.
        """
        url = self.url.removesuffix("/v1") + "/metrics"
        end = time.monotonic() + _COUNT_S
        while True:
            try:
                with urllib.request.urlopen(http_request(url), timeout=ABOUT_S) as reply:
                    text = reply.read().decode(errors="replace")
            except (OSError, http.client.HTTPException):
                return None
            if not _COUNTS.search(text):
                return None
            answered = sum(int(float(value)) for value in _ANSWERED.findall(text))
            if expected is None or answered >= expected or time.monotonic() > end:
                return answered
            time.sleep(0.02)

    def _about(self, model: str | None) -> tuple[str, int | None]:
        served = fetch(f"{self.url}/models", None, ABOUT_S).get("data")
        known = {str(each["id"]): each for each in served} if isinstance(served, list) else {}
        if model is None and not known:
            raise MkError(
                f"{self.url}/models names no model", hint="experiment.served_model=<what the server calls it>"
            )
        name = next(iter(known)) if model is None else model
        if known and name not in known:
            raise MkError(
                f"{self.url} does not serve {name}, but {', '.join(known)}",
                hint=f"experiment.served_model={min(known)}",
            )
        context = known.get(name, {}).get("max_model_len")
        return name, context if isinstance(context, int) else None

    def _ask(self, request: Request) -> Completion:
        path = "/completions" if request.prompt.messages == () else "/chat/completions"
        started = time.perf_counter()
        reply = fetch(self.url + path, {"model": self.model, **request.body()}, self._timeout_s)
        return parse_reply(reply, time.perf_counter() - started)


def fetch(url: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    """A POST of `body`, a GET without one. Raises MkError for anything but an object in reply, in time."""
    end = time.monotonic() + timeout_s
    with answering(url), urllib.request.urlopen(http_request(url, body), timeout=timeout_s) as reply:
        said = b""
        while part := reply.read1(1 << 20):  # the timeout is of one read alone
            said += part
            if time.monotonic() > end:
                raise TimeoutError(f"no whole answer in {timeout_s:g} s")
        return dict(json.loads(said))


@contextmanager
def answering(url: str) -> Iterator[None]:
    """What may go wrong while a server answers, as an MkError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        why = error.read(300).decode(errors="replace")
        refused = error.code == 400 and "return_token_ids" in why
        raise MkError(
            f"{url} answers {error.code}: {why}", hint="experiment.token_ids=false" if refused else None
        ) from error
    except (OSError, ValueError, TypeError, http.client.HTTPException) as error:
        raise MkError(f"{url} does not answer: {error}", hint="experiment.base_url=<http://.../v1>") from error


def http_request(url: str, body: dict[str, Any] | None = None) -> urllib.request.Request:
    """With the key of the environment, where there is one."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(API_KEY):
        headers["Authorization"] = f"Bearer {key}"
    return urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)


def parse_reply(reply: dict[str, Any], latency_s: float) -> Completion:
    """An OpenAI reply. What is graded is the content; reasoning has either of two names. Raises MkError for others."""
    try:
        choice, usage = reply["choices"][0], reply["usage"]
        message = choice.get("message", {"content": choice.get("text")})
        content = message["content"] or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        if not isinstance(content, str) or not isinstance(reasoning, str) or min(tokens) < 0:
            raise TypeError
        return Completion(
            content,
            reasoning,
            str(choice["finish_reason"]),
            *tokens,
            latency_s,
            str(reply.get("id", "")),
            # of a conversation the prompt is the reply's, of a text its choice's
            choice.get("prompt_token_ids", reply.get("prompt_token_ids")),
            choice.get("token_ids"),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise MkError(f"not a reply of an OpenAI server: {str(reply)[:200]}") from error
