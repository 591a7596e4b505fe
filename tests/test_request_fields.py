"""Every request field: what it does when it alone is changed, and what a wrong value is told.

An effect is a predicate on the answers without and with the field. It must hold with the field, and fail for an answer
to the same request from which the field has been dropped: a server that lost it would not pass.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from transformers import PreTrainedTokenizerFast

from mk.engines.scripted import Reply
from mk.server.protocol import (
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    KnownFields,
    TokenizeRequest,
)
from tests.request_rows import (
    BY_FORM,
    CHAT,
    CHAT_ROWS,
    DETOKENIZE_ROWS,
    MENU,
    ROWS,
    SHARED,
    TEXT,
    TEXT_ROWS,
    TOKENIZE_ROWS,
    TURN,
    Answer,
    Menu,
    Row,
    base,
)
from tests.server_rig import TOKENIZER, WEATHER, Served, action, chat, events, refused, serving, thought


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        running.overrides["MENU"] = Menu()
        running.replies.add(Reply("THINK", thought("so so", "yes")))
        oslo = ("weather", {"city": "Oslo"})
        running.replies.add(Reply("CALL", "hm<|END_THINKING|>" + action(oslo, oslo)))
        yield running
        running.assert_idle()


@pytest.mark.parametrize(("path", "row"), ROWS, ids=[f"{path.removeprefix('/v1')}-{row.field}" for path, row in ROWS])
def test_a_field_has_its_effect_and_wrong_values_are_named(served: Served, path: str, row: Row) -> None:
    body = base(path, row)

    def ask(asked: dict[str, Any]) -> Answer:
        response = served.post(path, asked)
        assert response.status_code == 200, response.text
        answer: Answer = response.json()
        return answer

    without, with_it = ask(body), ask({**body, row.field: row.value})
    assert row.effect(without, with_it), (without, with_it)
    assert not row.effect(without, ask(body)), "the effect shows without the field"
    for wrong in row.wrong:
        code = "missing_required_parameter" if wrong is None and row.field not in ("messages", "prompt") else None
        refused(served.post(path, {**body, row.field: wrong}), 400, code, row.field if row.field != "n" else "n")


def test_the_table_names_every_field() -> None:
    shared = {row.field for row in SHARED} | BY_FORM
    assert shared == set(GenerationRequest.model_fields)
    assert shared | {row.field for row in CHAT_ROWS} == set(ChatRequest.model_fields)
    assert shared | {row.field for row in TEXT_ROWS} == set(CompletionRequest.model_fields)
    assert {"model"} | {row.field for row in TOKENIZE_ROWS} == set(TokenizeRequest.model_fields)
    assert {"model"} | {row.field for row in DETOKENIZE_ROWS} == set(DetokenizeRequest.model_fields)


def test_tokenizing_takes_fields_of_one_form(served: Served) -> None:
    for name, value, beside in (
        ("add_special_tokens", True, TURN),
        ("tools", [WEATHER], {"prompt": "word"}),
        ("chat_template_kwargs", {"reasoning": False}, {"prompt": "word"}),
    ):
        refused(served.post("/tokenize", {**beside, name: value}), 400, "unsupported_parameter", name)
    for path in ("/tokenize", "/detokenize"):
        refused(served.post(path, {**smallest(path), "model": "other"}), 404, "model_not_found", "model")
        assert served.post(path, {**smallest(path), "model": "nano"}).status_code == 200


RENDERER = inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
NO_VARIABLES = sorted({*RENDERER, "messages", "bos_token", "eos_token"} - {"kwargs"})


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("name", NO_VARIABLES)
def test_variables_of_the_template_reach_nothing_but_the_template(served: Served, path: str, name: str) -> None:
    """Of the renderer's own parameters one is a template, which would run here."""
    for value in ("{{ 6 * 7 }}", None, False, []):
        asked = {**TURN, "chat_template_kwargs": {"reasoning": False, name: value}}
        message = refused(served.post(path, asked), 400, "unsupported_parameter", "chat_template_kwargs")
        assert f" {name} " in message


def test_a_template_takes_any_other_variable(served: Served) -> None:
    others = {"reasoning": False, "reasoning_effort": "high", "enable_thinking": True, "kwargs": {}, "anything": [1]}
    plain, off = (
        served.post("/tokenize", {**TURN, "chat_template_kwargs": given}).json()["tokens"] for given in ({}, others)
    )
    assert off == [*plain, TOKENIZER.marker("end_thinking")]


def test_stream_and_its_options_change_the_form(served: Served) -> None:
    for path in (CHAT, TEXT):
        body = base(path, SHARED[0])
        whole, streamed = served.post(path, body), served.post(path, {**body, "stream": True})
        assert whole.headers["content-type"] == "application/json"
        assert streamed.headers["content-type"].startswith("text/event-stream")
        with_usage = {**body, "stream": True, "stream_options": {"include_usage": True}}
        assert "usage" in events(served.post(path, with_usage))[-1] and "usage" not in events(streamed)[-1]
        for wrong in ({"stream": "yes"}, {"stream": 1}, {"stream_options": {}}, {"stream": True, "stream_options": 3}):
            refused(served.post(path, {**body, **wrong}), 400, "invalid_value")
        ids = {**body, "stream": True, "return_token_ids": True}
        refused(served.post(path, ids), 400, "unsupported_parameter", "return_token_ids")
        refused(served.post(path, {**body, "model": 3}), 400, "invalid_value", "model")
        refused(served.post(path, {**body, "model": "other"}), 404, "model_not_found", "model")
        assert served.post(path, {**body, "model": "nano"}).json()["choices"] == whole.json()["choices"]


def test_null_is_not_given(served: Served) -> None:
    for path, model in ((CHAT, ChatRequest), (TEXT, CompletionRequest)):
        body = base(path, SHARED[0])
        nothing = {name: None for name in model.model_fields if name not in body}
        assert served.post(path, {**body, **nothing}).json()["choices"] == served.post(path, body).json()["choices"]


ENDPOINTS: dict[str, type[KnownFields]] = {
    CHAT: ChatRequest,
    TEXT: CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def smallest(path: str) -> dict[str, Any]:
    bodies: dict[str, dict[str, Any]] = {"/tokenize": {"prompt": "MENU"}, "/detokenize": {"tokens": MENU}}
    return bodies.get(path) or base(path, SHARED[0])


@pytest.mark.parametrize("path", ENDPOINTS)
def test_known_fields_that_are_not_done_are_refused(
    served: Served, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    body, fields = smallest(path), ENDPOINTS[path]
    for name in set(fields.unsupported) - set(fields.model_fields):
        refused(served.post(path, {**body, name: "something"}), 400, "unsupported_parameter", name)
        for asks_for_nothing in (None, *fields.unsupported[name]):
            assert served.post(path, {**body, name: asks_for_nothing}).status_code == 200, name
    assert not caplog.records
    assert served.post(path, {**body, "something_new": 1}).status_code == 200
    assert "something_new" in caplog.text


VLLM = {
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "include_reasoning",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "priority",
    "prompt_embeds",
    "prompt_logprobs",
    "request_id",
    "return_tokens_as_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "structured_outputs",
    "truncate_prompt_tokens",
    "use_beam_search",
}


@pytest.mark.parametrize(
    ("fields", "openais"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsBase),
        (CompletionRequest, text_params.CompletionCreateParamsBase),
    ],
    ids=["chat", "text"],
)
def test_no_field_that_others_know_is_passed_over(fields: type[KnownFields], openais: type) -> None:
    """OpenAI's by its client's types, vLLM's by its protocol, and those of the other endpoint."""
    told = {*fields.model_fields, *fields.unsupported, *WITHOUT_EFFECT}
    assert told >= {*openais.__annotations__, *VLLM, *ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert not {*fields.model_fields} & {*fields.unsupported}


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_fields_without_effect_have_none(served: Served, name: str) -> None:
    body = base(CHAT, SHARED[0])
    with_it = served.post(CHAT, {**body, name: {"a": "b"}})
    assert with_it.json()["choices"] == served.post(CHAT, body).json()["choices"]


def test_json_by_a_schema(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}}
    for effort in ({}, {"reasoning_effort": "none"}):
        said = chat(served, served.says(thought("well", "I would say Oslo")), response_format=wanted, **effort).said
        trip = json.loads(said.content)
        assert trip["city"] in ("Oslo", "Rome") and 1 <= trip["days"] <= 9 and said.finish == "stop"
        assert said.reasoning == ("" if effort else "well")
    broken = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
    body = {"messages": [{"role": "user", "content": "MENU"}], "response_format": broken}
    refused(served.post(CHAT, body), 400, "invalid_value", "response_format")


def test_the_openai_client(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["nano"]
        question = served.says(thought("so", "hello") + action(("weather", {"city": "Rome"})))
        asked: Any = {"model": "nano", "messages": [{"role": "user", "content": question}], "tools": [WEATHER]}
        whole = client.chat.completions.create(**asked).choices[0]
        assert whole.message.content == "hello" and whole.finish_reason == "tool_calls"
        assert whole.message.tool_calls[0].function.arguments == '{"city": "Rome"}'
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.message.content == "hello" and final.message.tool_calls[0].function.name == "weather"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(**asked, temperature=9)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**asked, "model": "other"})
        assert (
            client.completions.create(model="nano", prompt="MENU", max_tokens=2, temperature=0).choices[0].text
            == " a a"
        )


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=8)
)
KEYS = st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(KEYS, v, max_size=3)))


@pytest.mark.parametrize(("path", "model"), [(CHAT, ChatRequest), (TEXT, CompletionRequest)], ids=["chat", "text"])
def test_any_object_is_answered_without_a_defect(served: Served, path: str, model: type[GenerationRequest]) -> None:
    """Random values in known fields: an answer or a refusal, never a 5xx."""

    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(st.dictionaries(st.sampled_from(sorted(model.model_fields)), VALUES, max_size=4))
    def check(fields: dict[str, Any]) -> None:
        body = {**base(path, SHARED[0]), **fields}
        if fields.get("max_tokens") is None:
            body["max_tokens"] = 5
        response = client.post(served.url + path, json=body)
        assert response.status_code < 500, (fields, response.text)
        if response.status_code >= 400:
            refused(response, response.status_code)

    with httpx.Client(timeout=30) as client:
        check()
