"""A real server on a free port over the scripted engine, and questions asked both ways, streamed and not."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mk.batching.core import Core
from mk.batching.policy import Policy
from mk.batching.worker import Worker
from mk.engines.protocol import PagedEngine
from mk.engines.scripted import Replies, Reply, ScriptedEngine
from mk.kv import KINDS
from mk.model.opening import NANO
from mk.model.tokenizer import Tokenizer, load_tokenizer
from mk.server.app import create_app
from mk.server.generation import Service
from mk.server.grammar import Grammars
from mk.server.launch import in_background
from mk.server.metrics import Metrics
from tests.engine_rig import POLICY, every_size
from tests.interpreter_rig import NANO_GEOMETRY

TOKENIZER: Tokenizer = load_tokenizer(NANO)
GRAMMARS = Grammars(TOKENIZER)
CONTEXT = 2048
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_keys = itertools.count()

Script = Callable[[Sequence[int]], Mapping[int, float]]


@dataclass(slots=True)
class Served:
    """A running server, and the replies that it knows."""

    url: str
    service: Service
    replies: Replies
    overrides: dict[str, Script] = field(default_factory=dict)  # by a text in the prompt

    def says(self, say: str | Sequence[int]) -> str:
        """Teach the model an answer; the question that it answers."""
        question = f"question {next(_keys)} please"
        self.replies.add(Reply(question, say))
        return question

    def runs(self, script: Script) -> str:
        """Have a function answer; the question that it answers."""
        question = f"question {next(_keys)} please"
        self.overrides[question] = script
        return question

    def __call__(self, history: Sequence[int]) -> Mapping[int, float]:
        if self.overrides:
            text = TOKENIZER.decode(history)
            for question, script in self.overrides.items():
                if question in text:
                    return script(history)
        return self.replies(history)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def gauge(self, name: str) -> float:
        """The value of a metric without labels, or the sum over them."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def wait_until(self, done: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "it did not come about in time"
            time.sleep(0.005)

    def assert_idle(self) -> None:
        """Nothing runs, waits, or holds a page."""
        self.wait_until(lambda: self.gauge("mk_requests_running") + self.gauge("mk_requests_waiting") == 0)
        core = self.service.worker.core
        for kind in KINDS:
            assert core.pages_in_use(kind) == 0 and (core.pages.table[kind] == -1).all()


@contextmanager
def serving(
    deliver: int = 1,
    api_key: str | None = None,
    pages: int = 96,
    rows: int = 4,
    context: int = CONTEXT,
    engine: PagedEngine | None = None,
    policy: Mapping[str, Any] | None = None,
    drain_s: float = 2,
    **service: Any,
) -> Iterator[Served]:
    """deliver: tokens that the engine hands over at a time. engine: in the place of the scripted one."""
    replies = Replies(TOKENIZER, [])
    if engine is None:
        counts = {"full": pages, "sliding": pages}
        engine = ScriptedEngine(
            NANO_GEOMETRY, lambda history: served(history), rows, context, counts, sizes=every_size(rows)
        )
    chosen = {**POLICY, "chunk": 256, "deliver": deliver, **(policy or {})}
    worker = Worker(Core(engine, TOKENIZER.eos, Policy(**chosen)))
    settings = {"context": engine.context, "max_waiting": 200, "defaults": {"temperature": 0.0}, **service}
    metrics = Metrics(worker)
    made = Service(worker, TOKENIZER, "nano", "fp_test", created=1, metrics=metrics, grammars=GRAMMARS, **settings)
    with in_background(create_app(made, "1.2.3", api_key), worker, drain_s) as url:
        served = Served(url, made, replies)
        yield served


@dataclass(slots=True)
class Said:
    """One choice, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None

    def same(self) -> tuple[Any, ...]:
        """Everything but the calls' random ids."""
        return self.content, self.reasoning, [call["function"] for call in self.calls], self.logprobs, self.finish


@dataclass(slots=True)
class Answered:
    """An answer that came the same both ways."""

    choices: list[Said]
    usage: dict[str, Any]
    chunks: list[dict[str, Any]]
    whole: dict[str, Any]

    @property
    def said(self) -> Said:
        assert len(self.choices) == 1
        return self.choices[0]


def events(response: httpx.Response) -> list[Any]:
    """The chunks of a finished stream, the last of which is [DONE] or an error."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    chunks = [json.loads(payload) for payload in payloads if payload != "[DONE]"]
    if "error" not in chunks[-1]:
        assert payloads[-1] == "[DONE]" and payloads.count("[DONE]") == 1
    return chunks


def chat(served: Served, question: str | list[dict[str, Any]], **body: Any) -> Answered:
    """Ask both ways; the answers agree, and OpenAI's types accept all of it."""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    body = {"model": "nano", "messages": messages, **body}
    response = served.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    whole = response.json()
    ChatCompletion.model_validate(whole, strict=False)
    streamed = served.post("/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert streamed.status_code == 200 and streamed.headers["content-type"].startswith("text/event-stream")
    chunks = events(streamed)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    choices = [_of_message(choice) for choice in whole["choices"]]
    merged = merge(chunks, len(choices))
    assert [choice.same() for choice in merged] == [choice.same() for choice in choices]
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(choices)))
    usage = chunks[-1]["usage"]
    for counted in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[counted] == whole["usage"][counted]
    return Answered(merged, whole["usage"], chunks[:-1], whole)


def _of_message(choice: dict[str, Any]) -> Said:
    message = choice["message"]
    logprobs = choice["logprobs"]["content"] if choice["logprobs"] else []
    return Said(
        message["content"] or "",
        message.get("reasoning_content", ""),
        message.get("tool_calls", []),
        logprobs,
        choice["finish_reason"],
    )


def merge(chunks: Sequence[dict[str, Any]], count: int) -> list[Said]:
    """What a client makes of chunks. Each choice begins with its role, and ends with its one finish_reason."""
    said = [Said() for _ in range(count)]
    begun: set[int] = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            into, delta = said[choice["index"]], choice["delta"]
            assert into.finish is None, "a choice went on after its finish_reason"
            assert ("role" in delta) == (choice["index"] not in begun)
            begun.add(choice["index"])
            into.content += delta.get("content") or ""
            assert delta.get("reasoning_content") == delta.get("reasoning")
            into.reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                assert call["index"] == len(into.calls) and call["id"] and call["function"]["name"]
                into.calls.append({key: call[key] for key in ("id", "type", "function")})
            if choice["logprobs"]:
                into.logprobs += choice["logprobs"]["content"]
            into.finish = choice["finish_reason"]
    assert all(choice.finish in ("stop", "length", "tool_calls", "content_filter") for choice in said)
    return said


def complete(served: Served, prompt: Any, **body: Any) -> dict[str, Any]:
    """A completion, the same both ways."""
    body = {"prompt": prompt, **body}
    response = served.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    whole = response.json()
    _check_completion(whole)
    chunks = events(served.post("/v1/completions", {**body, "stream": True}))
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
    for choice in whole["choices"]:
        own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        for part in own:
            _check_completion({**chunks[0], "choices": [part]})
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own if part["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"]:
            for key, values in choice["logprobs"].items():
                assert [value for part in own for value in part["logprobs"][key]] == values
    return whole


def _check_completion(completion: dict[str, Any]) -> None:
    """OpenAI's types accept it. They do not know a stream's null for finish_reason, nor an echo's null logprob."""
    copy = json.loads(json.dumps(completion))
    for choice in copy["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        logs = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
        logs["token_logprobs"] = [0.0 if value is None else value for value in logs["token_logprobs"]]
        logs["top_logprobs"] = [value or {} for value in logs["top_logprobs"]]
    Completion.model_validate(copy)


def refused(response: httpx.Response, status: int = 400, code: str | None = None, param: str | None = None) -> str:
    """The message of an error in OpenAI's shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code, error
    assert param is None or error["param"] == param, error
    return str(error["message"])


def action(*calls: tuple[str, Any]) -> str:
    """The model's own way to write calls."""
    written = [
        json.dumps({"tool_call_id": str(i), "tool_name": name, "parameters": parameters})
        for i, (name, parameters) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n" + ",\n".join(written) + "\n]<|END_ACTION|>"


def thought(thinking: str, text: str) -> str:
    return f"{thinking}<|END_THINKING|><|START_TEXT|>{text}<|END_TEXT|>"
