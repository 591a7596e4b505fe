"""JSON nested without end: whatever would descend into it is spared, and the client is told which field it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from mk.errors import MkError
from mk.model.opening import NANO
from mk.model.tokenizer import load_tokenizer
from mk.server.actions import ActionScanner
from mk.server.protocol import MAX_DEPTH
from tests.request_rows import CHAT, TEXT, TURN
from tests.server_rig import Served, refused, serving
from tests.test_request_fields import ENDPOINTS

Body = Callable[[int], dict[str, Any]]
BEYOND = (MAX_DEPTH + 1, 900)  # of Python's thousand frames some are the server's own
BASES: dict[str, dict[str, Any]] = {
    CHAT: {**TURN, "max_tokens": 1},
    TEXT: {"prompt": "a", "max_tokens": 1},
    "/tokenize": TURN,
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running
        running.assert_idle()


def nested(depth: int, key: str | None = None) -> Any:
    """Lists in lists, or objects in objects under a key."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if key is None else {key: value}
    return value


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_is_refused_by_its_name(served: Served, path: str) -> None:
    with httpx.Client(timeout=30) as client:
        for field in ENDPOINTS[path].model_fields:
            for depth in BEYOND:
                for value in (nested(depth), nested(depth, "properties")):
                    response = client.post(served.url + path, json={**BASES[path], field: value})
                    assert "nested deeper" in refused(response, 400, "invalid_value", field)


def tool(parameters: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


def called(arguments: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [*TURN["messages"], {"role": "assistant", "tool_calls": [call]}]}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
HI = {"type": "text", "text": "hi"}
PLACES = {
    "arguments": ("messages", lambda depth: called({"a": nested(depth)})),
    "arguments as text": (ARGUMENTS, lambda depth: called(json.dumps({"a": nested(depth)}))),
    "arguments of objects": (ARGUMENTS, lambda depth: called(json.dumps(nested(depth, "a")))),
    "a part": ("messages", lambda depth: {"messages": [{"role": "user", "content": [{**HI, "a": nested(depth)}]}]}),
    "a message": ("messages", lambda depth: {"messages": [{**TURN["messages"][0], "a": nested(depth)}]}),
    "a tool": ("tools", lambda depth: tool(nested(depth, "properties"))),
    "a required tool": ("tools", lambda depth: {**tool({"const": nested(depth)}), "tool_choice": "required"}),
    "a tool beside a format": ("tools", lambda depth: {**tool(nested(depth, "not")), **schema({"type": "object"})}),
    "a schema": ("response_format", lambda depth: schema(nested(depth, "items"))),
    "a schema's default": ("response_format", lambda depth: schema({"default": nested(depth)})),
    "a template's variable": ("chat_template_kwargs", lambda depth: {"chat_template_kwargs": {"a": nested(depth)}}),
}


def ask(served: Served, body: dict[str, Any]) -> httpx.Response:
    return served.post(CHAT, BASES[CHAT] | body)


@pytest.mark.parametrize(("param", "body"), PLACES.values(), ids=PLACES)
def test_what_lies_deep_inside_a_field_is_refused_too(served: Served, param: str, body: Body) -> None:
    for depth in BEYOND:
        assert f"{MAX_DEPTH} levels" in refused(ask(served, body(depth)), 400, "invalid_value", param)
    below = ask(served, body(MAX_DEPTH - 10))  # some schemas of it are none
    assert below.status_code in (200, 400) and "nested deeper" not in below.text


@pytest.mark.parametrize("body", [called(nested(90)), called(json.dumps(nested(MAX_DEPTH))), tool(nested(90, "items"))])
def test_what_is_not_too_deep_is_rendered(served: Served, body: dict[str, Any]) -> None:
    assert ask(served, body).status_code == 200


@pytest.mark.parametrize("piece", ["[", '{"a":'], ids=["lists", "objects"])
def test_text_that_cannot_even_be_parsed(served: Served, piece: str) -> None:
    refused(ask(served, called(piece * 20_000)), 400, "invalid_value", ARGUMENTS)
    json_type = {"Content-Type": "application/json"}
    refused(httpx.post(served.url + CHAT, content=piece * 20_000, headers=json_type), 400)


@pytest.mark.parametrize("value", ["[" * 20_000 + "]" * 20_000, "9" * 5_000])
@pytest.mark.parametrize("field", ["seed", "unheard_of"])
def test_a_body_that_cannot_be_read_says_why(served: Served, field: str, value: str) -> None:
    body = json.dumps({**BASES[CHAT]})[:-1] + f', "{field}": {value}}}'
    response = httpx.post(served.url + CHAT, content=body, headers={"Content-Type": "application/json"}, timeout=30)
    said = refused(response, 400, "invalid_json", None)
    assert said.startswith("the body cannot be read: ") and ("nested too deep" in said) == value.startswith("[")


def test_a_template_that_descends_further_than_python_refuses_the_messages() -> None:
    tokenizer = load_tokenizer(NANO)
    walk = "{% macro walk(x) %}{% for y in x if y is iterable %}{{ walk(y) }}{% endfor %}{% endmacro %}"
    tokenizer._renderer.chat_template = walk + "{{ walk(messages[0].content) }}"
    assert tokenizer.render([{"role": "user", "content": nested(9)}]) == ""
    with pytest.raises(MkError, match="the chat template refuses these messages: maximum recursion depth"):
        tokenizer.render([{"role": "user", "content": nested(400)}])


def test_a_models_calls_are_read_or_left_over_however_deep_they_are() -> None:
    """What can be parsed cannot always be written again: both descend, from different heights."""
    limit = sys.getrecursionlimit()
    for depth in range(limit - 200, limit + 10):
        whole = f'{{"tool_name": "a", "parameters": {{"x": {"[" * depth}{"]" * depth}}}}}'
        for text in (whole, f'{{"broken": {whole}'):
            scanner = ActionScanner()
            calls = [*scanner.feed(text), *scanner.finish()]
            assert [call.name for call in calls] == ["a"] or whole in scanner.left_over
