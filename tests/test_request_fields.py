"""Every request field: what it does when it alone is changed, and what a wrong value is told.

An effect is a predicate on the answers without and with the field. It must hold with the field, and fail for an answer
to the same request from which the field has been dropped: a server that lost it would not pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from mk.engine.scripted import Reply
from mk.server.protocol import (
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    KnownFields,
    TokenizeRequest,
)
from tests.server_rig import TOKENIZER, WEATHER, Served, action, chat, events, refused, serving, thought

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MENU = [TOKENIZER.encode(word)[0] for word in (" a", " b", " c", " d", " e", " f")]
END_AFTER = 8  # tokens of the menu, after which the end of turn is likeliest
EOS = TOKENIZER.eos[0]


class Menu:
    """Six words of falling likelihood, the same at each place, until the answer is long enough to end."""

    def __call__(self, history: Sequence[int]) -> Mapping[int, float]:
        said = 0
        while history[len(history) - 1 - said] in MENU:
            said += 1
        likely = {token: 22.0 - 0.7 * place for place, token in enumerate(MENU)}
        return {**likely, EOS: 30.0} if said >= END_AFTER else likely


Answer = dict[str, Any]


def texts(answer: Answer) -> list[str]:
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in answer["choices"]]


def text(answer: Answer) -> str:
    return texts(answer)[0]


def finish(answer: Answer) -> str:
    return str(answer["choices"][0]["finish_reason"])


def tokens(answer: Answer) -> int:
    return int(answer["usage"]["completion_tokens"])


def message(answer: Answer) -> Answer:
    found: Answer = answer["choices"][0]["message"]
    return found


def gives_ids(base: Answer, changed: Answer) -> bool:
    """Every token of prompt and answer, the one that ended it among them."""
    (choice,) = changed["choices"]
    prompt, ids = choice.get("prompt_token_ids", changed.get("prompt_token_ids", [])), choice.get("token_ids", [])
    counts = [changed["usage"][name] for name in ("prompt_tokens", "completion_tokens")]
    return TOKENIZER.decode(ids, skip_special=True) == text(changed) != "" and [len(prompt), len(ids)] == counts


def only_the_likeliest(base: Answer, changed: Answer) -> bool:
    return text(base) != text(changed) == " a" * END_AFTER


@dataclass(frozen=True)
class Row:
    """value: what the field is changed to. beside: what else both requests hold. wrong: values that are refused."""

    field: str
    value: Any
    effect: Callable[[Answer, Answer], bool]
    wrong: Sequence[Any] = ()
    beside: Mapping[str, Any] = field(default_factory=dict)


def longer_prompt(base: Answer, changed: Answer) -> bool:
    return int(changed["usage"]["prompt_tokens"]) > int(base["usage"]["prompt_tokens"])


GREEDY = {"temperature": 0}
THINK = {"messages": [{"role": "user", "content": "THINK"}]}
CALL = {"messages": [{"role": "user", "content": "CALL"}]}
NUMBERS = ("1", True, [], {})
SHARED = (
    Row("max_tokens", 3, lambda a, b: tokens(a) > 3 == tokens(b) and finish(b) == "length", (-1, 1.5, "3", True)),
    Row("temperature", 0, only_the_likeliest, (-0.1, 2.1, *NUMBERS)),
    Row("top_p", 0.01, only_the_likeliest, (0, 1.1, -1, *NUMBERS)),
    Row("top_k", 1, only_the_likeliest, (-2, 2**31, 1.5, *NUMBERS)),
    Row("min_p", 1.0, only_the_likeliest, (-0.1, 1.1, *NUMBERS)),
    Row("seed", 4, lambda a, b: text(a) != text(b), (2**64, -(2**63) - 1, 0.5, *NUMBERS)),
    Row("n", 2, lambda a, b: len(texts(b)) == 2 and text(a) == text(b) != texts(b)[1], (0, 17, 1.5, *NUMBERS)),
    Row("stop", [" b"], lambda a, b: text(b) == text(a).split(" b")[0] != text(a), (3, [1], ["x"] * 17, {})),
    Row("presence_penalty", 2, lambda a, b: text(a) == " a" * 8 != text(b), (-2.1, 2.1, *NUMBERS), GREEDY),
    Row("frequency_penalty", 2, lambda a, b: text(b).count(" b") > 1 > text(a).count(" b"), (-3, 3, *NUMBERS), GREEDY),
    Row(
        "repetition_penalty",
        2,
        lambda a, b: len(set(text(b).split())) == 6 > len(set(text(a).split())),
        (0, -1, 1e-50, *NUMBERS),
        GREEDY,
    ),
    Row(
        "logit_bias",
        {str(MENU[4]): 8},
        lambda a, b: text(b) == " e" * 8 != text(a),
        ({"x": 1}, {"5": 200}, {"9999": 1}, [], 3),
        GREEDY,
    ),
    Row("min_tokens", 12, lambda a, b: tokens(a) == 9 and tokens(b) == 13, (-1, 1.5, *NUMBERS), GREEDY),
    Row(
        "stop_token_ids",
        [MENU[0]],
        lambda a, b: tokens(b) == 1 < tokens(a) and finish(b) == "stop",
        (3, [-1], ["a"], [9999]),
        GREEDY,
    ),
    Row(
        "ignore_eos",
        True,
        lambda a, b: finish(a) == "stop" and finish(b) == "length" and tokens(b) == 14,
        (1, "yes"),
        GREEDY,
    ),
    Row("return_token_ids", True, gives_ids, (1, "yes"), GREEDY),
)


def calls(answer: Answer) -> int:
    return len(message(answer).get("tool_calls", []))


def entries(answer: Answer) -> list[Answer]:
    return (answer["choices"][0]["logprobs"] or {}).get("content", [])


CHAT_ROWS = (
    Row(
        "messages",
        [{"role": "user", "content": "MENU of several words"}],
        longer_prompt,
        (None, [], "hi", [{}], [{"role": "x"}], [3]),
    ),
    Row("max_completion_tokens", 3, lambda a, b: tokens(a) > 3 == tokens(b), (0, -1, "3", True)),
    Row("logprobs", True, lambda a, b: not entries(a) and len(entries(b)) == 8, (1, "yes")),
    Row(
        "top_logprobs",
        2,
        lambda a, b: [len(e["top_logprobs"]) for e in entries(b)] == [2] * 8 and not entries(a)[0]["top_logprobs"],
        (-1, 21, "2"),
        {"logprobs": True},
    ),
    Row(
        "response_format",
        {"type": "json_object"},
        lambda a, b: "{" not in text(a) and text(b).startswith("{"),
        ("json", {"type": "x"}, {}, {"type": "json_schema"}),
    ),
    Row(
        "reasoning_effort",
        "none",
        lambda a, b: message(a).get("reasoning") == "so so" and "reasoning" not in message(b),
        ("none at all", 3),
        THINK,
    ),
    Row(
        "thinking_token_budget",
        1,
        lambda a, b: message(a).get("reasoning") == "so so" != message(b)["reasoning"],
        (-1, "1", 1.5),
        THINK,
    ),
    Row(
        "chat_template_kwargs",
        {"reasoning": False},
        lambda a, b: "reasoning" in message(a) and "reasoning" not in message(b),
        (3, [], {"tools": []}),
        THINK,
    ),
    Row("tools", [WEATHER], lambda a, b: calls(a) == 0 and calls(b) == 2, (3, [3], [{"type": "x"}]), CALL),
    Row(
        "tool_choice",
        "none",
        lambda a, b: calls(a) == 2 and calls(b) == 0,
        ("maybe", 3, {"type": "function"}),
        {**CALL, "tools": [WEATHER]},
    ),
    Row(
        "parallel_tool_calls",
        False,
        lambda a, b: calls(a) == 2 and calls(b) == 1,
        ("no", 0),
        {**CALL, "tools": [WEATHER]},
    ),
)


def top_entries(answer: Answer) -> int:
    logs = answer["choices"][0]["logprobs"]
    return len(logs["top_logprobs"][0]) if logs else 0


TEXT_ROWS = (
    Row("prompt", "MENU of words", longer_prompt, (None, 3, {}, [], [[]], [1.5], [True], ["a", 3])),
    Row("echo", True, lambda a, b: text(b) == "MENU" + text(a), (1, "yes")),
    Row("logprobs", 3, lambda a, b: top_entries(a) == 0 and top_entries(b) >= 3, (-1, 21, "3", True)),
)
TURN = {"messages": [{"role": "user", "content": "Hi"}]}
TOKENIZE_ROWS = (
    Row("prompt", "two words", lambda a, b: b["count"] > a["count"], (3, [], {}), {"prompt": "word"}),
    Row(
        "messages",
        [{"role": "user", "content": "Hi there"}],
        lambda a, b: b["count"] > a["count"],
        ("hi", [{}], [{"role": "x"}], [3]),
        TURN,
    ),
    Row("tools", [WEATHER], lambda a, b: b["count"] > a["count"], (3, [3], [{"type": "x"}]), TURN),
    Row(
        "add_special_tokens",
        False,
        lambda a, b: a["tokens"] == [TOKENIZER.bos, *b["tokens"]],
        ("no", 0),
        {"prompt": "word"},
    ),
    Row("add_generation_prompt", False, lambda a, b: b["count"] < a["count"], ("no", 0), TURN),
    Row(
        "return_token_strs",
        True,
        lambda a, b: a["token_strs"] is None and "".join(b["token_strs"] or []) == "<BOS_TOKEN>word",
        ("no", 0),
        {"prompt": "word"},
    ),
    Row(
        "chat_template_kwargs",
        {"reasoning": False},
        lambda a, b: a["tokens"] != b["tokens"],
        (3, [], {"tools": []}),
        TURN,
    ),
)
DETOKENIZE_ROWS = (
    Row(
        "tokens",
        MENU[:2],
        lambda a, b: b["prompt"] == " a b" != a["prompt"],
        (3, "a", [-1], [1.5], [9999]),
        {"tokens": MENU},
    ),
)
# what these do is told by the form of the answer; tests of their own look at it
BY_FORM = {"model", "stream", "stream_options"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        running.overrides["MENU"] = Menu()
        running.replies.add(Reply("THINK", thought("so so", "yes")))
        oslo = ("weather", {"city": "Oslo"})
        running.replies.add(Reply("CALL", "hm<|END_THINKING|>" + action(oslo, oslo)))
        yield running
        running.assert_idle()


def base(path: str, row: Row) -> dict[str, Any]:
    """The request that the row's field is added to. One for an answer is sampled, unless the row says otherwise."""
    if path not in (CHAT, TEXT):
        return dict(row.beside)
    body: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 14}
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": "MENU"}], "chat_template_kwargs": {"reasoning": False}}
        if row.field in ("reasoning_effort", "thinking_token_budget", "chat_template_kwargs", "tools"):
            del body["chat_template_kwargs"]
        if "messages" in row.beside:
            body |= {"temperature": 0, "max_tokens": 200}
    else:
        body |= {"prompt": "MENU"}
    body |= row.beside
    if row.field == "max_completion_tokens":
        del body["max_tokens"]
    return body


ROWS = [
    *((CHAT, row) for row in (*SHARED, *CHAT_ROWS)),
    *((TEXT, row) for row in (*SHARED, *TEXT_ROWS)),
    *(("/tokenize", row) for row in TOKENIZE_ROWS),
    *(("/detokenize", row) for row in DETOKENIZE_ROWS),
]


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
