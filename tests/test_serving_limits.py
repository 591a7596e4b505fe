"""Limits, validation and errors: faults that other servers had. The engine is asked again after each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mk.server.bodies import BODY_BYTES
from tests.server_rig import CONTEXT, TOKENIZER, Served, chat, complete, refused, serving, thought
from tests.serving_faults import fault

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module", params=[1, 5], ids=["token by token", "five at a time"])
def running(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(deliver=request.param) as served:
        yield served
        served.assert_idle()


@pytest.fixture
def served(running: Served) -> Iterator[Served]:
    yield running
    assert chat(running, running.says(thought("", "alive"))).said.content == "alive"


def prompt_tokens(served: Served, messages: list[dict[str, Any]]) -> int:
    count: int = served.post("/tokenize", {"messages": messages}).json()["count"]
    return count


@fault(25)
def test_max_tokens_is_a_cap_not_a_demand(served: Served) -> None:
    question = served.says("on and on " * 2000)
    used = prompt_tokens(served, [{"role": "user", "content": question}])
    for field in ("max_tokens", "max_completion_tokens"):
        answer = chat(served, question, **{field: CONTEXT})
        assert answer.said.finish == "length" and answer.usage["completion_tokens"] == CONTEXT - used


@fault(25)
def test_a_prompt_that_leaves_no_room_is_refused(served: Served) -> None:
    filler = "word " * CONTEXT
    for body in ({"messages": [{"role": "user", "content": filler}]}, {"prompt": filler}, {"prompt": [5] * CONTEXT}):
        path = CHAT if "messages" in body else TEXT
        for stream in (False, True):
            message = refused(served.post(path, {**body, "stream": stream}), 400, "context_length_exceeded")
            assert str(CONTEXT) in message
    assert complete(served, [5] * (CONTEXT - 1), max_tokens=50)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize"])
def test_a_body_that_is_too_large_is_refused_unread(served: Served, path: str) -> None:
    """With its length in front, and without."""
    large = b'{"prompt": "' + b"x" * BODY_BYTES + b'"}'
    headers = {"Content-Type": "application/json"}
    for content in (large, iter([large[: BODY_BYTES // 2], large[BODY_BYTES // 2 :]])):
        answer = httpx.post(served.url + path, content=content, headers=headers, timeout=30)
        assert "more than 8,000,000 bytes" in refused(answer, 413)


def test_a_key_changes_nothing_of_that() -> None:
    large = b'{"prompt": "' + b"x" * BODY_BYTES + b'"}'
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    with serving(api_key="secret") as guarded:
        for content in (large, iter([large])):
            answer = httpx.post(guarded.url + TEXT, content=content, headers=headers, timeout=30)
            assert "more than 8,000,000 bytes" in refused(answer, 413)


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize"])
def test_a_long_prompt_holds_up_nobody_while_it_is_tokenized(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    encode = TOKENIZER.encode

    def slow(text: str, bos: bool = False) -> list[int]:
        if "y" * 9000 in text:
            begun.set()
            assert may_end.wait(30)
        return encode(text, bos)

    monkeypatch.setattr(served.service.tokenizer, "encode", slow)
    text = "y" * 9000
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.post, path, body)
        try:
            assert begun.wait(30)
            assert served.get("/health").status_code == 200
            assert chat(served, served.says(thought("", "meanwhile"))).said.content == "meanwhile"
        finally:
            may_end.set()
        assert asked.result().status_code == (200 if path == "/tokenize" else 400)  # longer than the context


@fault(26)
def test_without_max_tokens_a_chat_goes_on_to_the_end_of_the_context(served: Served) -> None:
    question = served.says("on and on " * 2000)
    answer = chat(served, question)
    assert answer.usage["total_tokens"] == CONTEXT and answer.said.finish == "length"


@fault(27)
def test_an_empty_prompt_is_the_bos_token_alone(served: Served) -> None:
    assert complete(served, "", max_tokens=2)["usage"]["prompt_tokens"] == 1
    for prompt in ([], [[]], [""] * 0):
        refused(served.post(TEXT, {"prompt": prompt}), 400, param="prompt")
    refused(served.post(CHAT, {"messages": []}), 400, param="messages")


@fault(28)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", [99999999]),
        ("prompt", [-1]),
        ("prompt", [[5, 1408]]),
        ("logit_bias", {"191222": -100}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"x": 5}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "1"}),
        ("stop_token_ids", [1408]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]),
    ],
)
def test_token_ids_outside_the_vocabulary_never_reach_the_engine(served: Served, field: str, value: Any) -> None:
    refused(served.post(TEXT, {"prompt": "a", field: value}), 400, "invalid_value", field)
    if field != "prompt":
        refused(served.post(CHAT, {"messages": HI, field: value}), 400, "invalid_value", field)


@fault(29)
def test_seeds_of_64_bits_signed_or_not(served: Served) -> None:
    def draw(seed: Any) -> str:
        return str(
            complete(served, "draw", seed=seed, temperature=2.0, max_tokens=8, logit_bias=bias)["choices"][0]["text"]
        )

    bias = {str(token): 40 for token in range(100, 140)}
    assert draw(-1) == draw(2**64 - 1) != draw(0)
    assert draw(-(2**63)) == draw(2**63)
    for seed in (2**64, -(2**63) - 1, "7", 1.5, True):
        refused(served.post(TEXT, {"prompt": "a", "seed": seed}), 400, "invalid_value", "seed")


@fault(30)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"[]", b"null", b"{bad", b"", b"3", b'"text"', b"\xff\xfe", b"[" * 100_000])
def test_bodies_that_are_no_object(served: Served, path: str, body: bytes) -> None:
    response = httpx.post(served.url + path, content=body, headers={"Content-Type": "application/json"}, timeout=30)
    refused(response, 400)
    if path == CHAT:
        refused(served.post(path, {"messages": HI, "tools": 3}), 400, "invalid_value", "tools")


def test_text_that_is_no_unicode(served: Served) -> None:
    half = '"\\ud800"'
    for path, body in (
        (TEXT, f'{{"prompt": {half}}}'),
        (CHAT, f'{{"messages": [{{"role": "user", "content": {half}}}]}}'),
        ("/tokenize", f'{{"prompt": {half}}}'),
    ):
        refused(httpx.post(served.url + path, content=body, headers={"Content-Type": "application/json"}), 400)
    wrong = httpx.post(
        served.url + TEXT, content=f'{{"prompt": "a", "model": {half}}}', headers={"Content-Type": "application/json"}
    )
    refused(wrong, 404, "model_not_found")
    stop = httpx.post(
        served.url + TEXT, content=f'{{"prompt": "a", "stop": {half}}}', headers={"Content-Type": "application/json"}
    )
    assert stop.status_code == 200


@fault(31)
def test_the_developer_is_the_system(served: Served) -> None:
    counts = {prompt_tokens(served, [{"role": role, "content": "be brief"}, *HI]) for role in ("developer", "system")}
    assert len(counts) == 1
    question = served.says(thought("", "yes"))
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": question}]
    assert chat(served, messages).said.content == "yes"
    refused(served.post(CHAT, {"messages": [{"role": "chef", "content": "x"}]}), 400, "invalid_value", "messages")


@fault(32)
def test_fields_that_agents_send_are_accepted_or_ignored(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    question = served.says(thought("", "yes"))
    extras = {
        "max_completion_tokens": 50,
        "parallel_tool_calls": True,
        "store": True,
        "metadata": {"a": "b"},
        "user": "me",
        "service_tier": "auto",
        "reasoning_effort": "medium",
        "prompt_cache_key": "k",
        "something_new": {"deep": 1},
    }
    with caplog.at_level(logging.WARNING, "mk.server"):
        assert chat(served, question, **extras).said.content == "yes"
    assert "something_new" in caplog.text and "metadata" not in caplog.text


@fault(32)
def test_what_is_not_done_here_is_refused_and_not_passed_over(served: Served) -> None:
    for field, value in (("functions", [{}]), ("guided_json", {}), ("use_beam_search", True), ("best_of", 3)):
        refused(served.post(CHAT, {"messages": HI, field: value}), 400, "unsupported_parameter", field)
        refused(served.post(TEXT, {"prompt": "a", field: value}), 400, "unsupported_parameter", field)
    assert served.post(TEXT, {"prompt": "a", "best_of": 1, "max_tokens": 1}).status_code == 200


def test_other_models_paths_and_methods(served: Served) -> None:
    refused(served.post(CHAT, {"messages": HI, "model": "gpt"}), 404, "model_not_found", "model")
    refused(served.get("/v1/models/gpt"), 404, "model_not_found")
    refused(served.get("/v1/nothing"), 404, "not_found")
    refused(served.get(CHAT), 405, "method_not_allowed")


def test_a_full_queue_turns_requests_away() -> None:
    with serving(max_waiting=2) as small:
        refused(small.post(TEXT, {"prompt": "a", "n": 3}), 400)
        refused(small.post(CHAT, {"messages": HI, "n": 3}), 400, param="n")  # which no later moment would take
        assert small.post(TEXT, {"prompt": "a", "n": 2, "max_tokens": 1}).status_code == 200


SEVERAL = {"of one": 1, "of three choices": 3, "of two prompts twice": 4}


@pytest.mark.parametrize("stuck", [{}, {"logprobs": True}, {"max_tokens": 1}], ids=["run", "picked step", "prompt"])
@pytest.mark.parametrize("size", SEVERAL.values(), ids=SEVERAL)
def test_a_burst_fills_the_queue_and_no_more(stuck: dict[str, Any], size: int) -> None:
    """While one step lasts, the engine hears of none of it; who is turned away leaves nothing behind."""
    entered, go_on = threading.Event(), threading.Event()
    with serving(max_waiting=5) as small, ThreadPoolExecutor(41) as pool:

        def held(history: Sequence[int]) -> Mapping[int, float]:
            if small.service.worker.core.totals.generated_tokens == (0 if stuck.get("max_tokens") else 2):
                entered.set()
                assert go_on.wait(30)
            return {300: 30.0}

        ask = {"messages": [{"role": "user", "content": small.runs(held)}], "max_tokens": 4, **stuck}
        path, body = (TEXT, {"prompt": ["a", "b"], "n": 2}) if size == 4 else (CHAT, {"messages": HI, "n": size})
        try:
            first = pool.submit(small.post, CHAT, ask)
            assert entered.wait(10)
            burst = [pool.submit(small.post, path, {**body, "max_tokens": 2}) for _ in range(40)]
            small.wait_until(lambda: sum(answer.done() for answer in burst) == 40 - 5 // size)
            for answer in burst:
                if answer.done():
                    refused(answer.result(), 429, "queue_full")
        finally:
            go_on.set()
        answers = [first.result(), *(answer.result() for answer in burst)]
        assert [answer.status_code for answer in answers].count(200) == 1 + 5 // size
        small.assert_idle()
        assert small.gauge("mk_requests_finished_total") == 1 + 5 // size * size


def test_what_the_server_says_about_itself(served: Served) -> None:
    model = served.get("/v1/models").json()["data"][0]
    assert model["id"] == "nano" and model["max_model_len"] == CONTEXT
    assert served.get("/v1/models/nano").json() == model
    about = {"version": "1.2.3", "system_fingerprint": "fp_test", "engine": "scripted", "build_hash": None}
    assert served.get("/version").json() == about
    info = served.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|END_OF_TURN_TOKEN|>" and info["bos_token"] == "<BOS_TOKEN>"
    assert "START_THINKING" in info["chat_template"]
    tokens = served.post("/tokenize", {"prompt": "def f():", "return_token_strs": True}).json()
    assert tokens["tokens"] == TOKENIZER.encode("def f():", bos=True) and tokens["count"] == len(tokens["tokens"])
    assert "".join(tokens["token_strs"]) == "<BOS_TOKEN>def f():"
    plain = served.post("/tokenize", {"prompt": "def f():", "add_special_tokens": False}).json()["tokens"]
    assert served.post("/detokenize", {"tokens": plain}).json() == {"prompt": "def f():"}
    refused(served.post("/detokenize", {"tokens": [99999]}), 400, "invalid_value", "tokens")
    refused(served.post("/tokenize", {"prompt": "a", "messages": HI}), 400)
    refused(served.post("/tokenize", {}), 400)
