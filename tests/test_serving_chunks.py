"""finish_reason, usage, the shape and the end of streams: faults that other servers had."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from mk.errors import MkError
from tests.server_rig import TOKENIZER, WEATHER, Served, action, chat, complete, events, refused, serving, thought
from tests.serving_faults import fault

CALL = "hm<|END_THINKING|>" + action(("weather", {"city": "Oslo"}))
FINISHES = {None, "stop", "length", "tool_calls", "content_filter"}


@pytest.fixture(scope="module", params=[1, 4], ids=["token by token", "four at a time"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(deliver=request.param) as running:
        yield running
        running.assert_idle()


def stream(served: Served, question: str, **body: object) -> list[dict]:
    messages = [{"role": "user", "content": question}]
    return events(served.post("/v1/chat/completions", {"messages": messages, "stream": True, **body}))


@fault(9)
def test_a_call_cut_by_max_tokens_ends_with_length(served: Served) -> None:
    whole = len(TOKENIZER.encode(CALL))
    for tokens in (8, whole - 12, whole - 4):
        said = chat(served, served.says(CALL), tools=[WEATHER], max_tokens=tokens).said
        assert said.finish == "length" and said.calls == []
        assert said.content.lstrip("[\n") in CALL and said.content  # what there is of it is not lost


@fault(10)
def test_never_tool_calls_without_a_call(served: Served) -> None:
    prose = served.says(thought("no tools needed", "It is sunny."))
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        ask = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
        said = chat(served, prose, **ask, max_tokens=120).said
        assert said.finish == "tool_calls" and said.content == ""  # the output was constrained
        assert [c["function"]["name"] for c in said.calls] == ["weather"]
        cut = chat(served, prose, **ask, max_tokens=20).said
        assert cut.finish == "length" and cut.calls == []
    auto = chat(served, prose, tools=[WEATHER]).said
    assert auto.finish == "stop" and auto.content == "It is sunny."


@fault(11)
def test_a_call_ends_with_tool_calls(served: Served) -> None:
    assert chat(served, served.says(CALL), tools=[WEATHER]).said.finish == "tool_calls"


@fault(12)
def test_usage_comes_only_where_asked_for(served: Served) -> None:
    question = served.says(thought("a", "b"))
    for chunk in stream(served, question):
        assert chunk["choices"] and "usage" not in chunk
    assert all(chunk["choices"] for chunk in stream(served, question, stream_options={"include_usage": False}))
    *others, last = stream(served, question, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in others)


@pytest.mark.parametrize("deliver", [1, 3])
def test_with_usage_in_chunks_every_delivery_is_one(deliver: int) -> None:
    """Also of tokens without text, as half a character is; so a client sees when each token came."""
    halves = [token for token in range(TOKENIZER.vocab) if TOKENIZER.token_bytes(token) == b"\xc4"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    with serving(deliver=deliver) as served:
        thinking = served.says([*halves * 6, TOKENIZER.marker("end_thinking"), *TOKENIZER.encode("so")])
        chunks = stream(served, thinking, max_tokens=6, n=2, stream_options=options)
        body = {"prompt": thinking, "max_tokens": 6, "stream": True, "stream_options": options}
        plain = events(served.post("/v1/completions", body))
    for *others, last in (chunks, plain):
        for choice in {chunk["choices"][0]["index"] for chunk in others}:
            own = [chunk["usage"]["completion_tokens"] for chunk in others if chunk["choices"][0]["index"] == choice]
            assert sorted({0, *own}) == sorted({0, *range(deliver, 7, deliver), 6})
        assert all(chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for chunk in others)
    assert chunks[-1]["usage"]["completion_tokens"] == 12 and plain[-1]["usage"]["completion_tokens"] == 6
    with serving() as served:  # alone it asks for nothing, as at vLLM
        alone = stream(served, served.says(thought("a", "b")), stream_options={"continuous_usage_stats": True})
        assert all("usage" not in chunk for chunk in alone)


@fault(13)
def test_usage_counts_tokens_of_all_choices(served: Served) -> None:
    say = thought("think of it", "here are several tokens")
    answer = chat(served, served.says(say), n=3)  # `chat` compares the two ways
    tokens = len(TOKENIZER.encode(say)) + 1  # and the end of turn
    assert answer.usage["completion_tokens"] == 3 * tokens
    details = answer.usage["completion_tokens_details"]
    assert details["reasoning_tokens"] == 3 * (TOKENIZER.encode(say).index(TOKENIZER.marker("end_thinking")) + 1)
    assert answer.usage["total_tokens"] == answer.usage["prompt_tokens"] + 3 * tokens
    stopped = chat(served, served.says(thought("", "one two three four five six")), stop=["three"])
    assert stopped.usage["completion_tokens"] < 2 + len(TOKENIZER.encode("one two three four"))


@fault(14)
@pytest.mark.parametrize("deliver", [1, 4])
def test_a_prompt_of_8000_words_streams_to_its_end(deliver: int) -> None:
    with serving(deliver=deliver, pages=300, context=16384) as served:
        question = served.says("on and on and on " * 5)
        answer = chat(served, "word " * 8000 + question, max_tokens=10)  # which looks for one finish and [DONE]
        assert answer.usage["prompt_tokens"] > 8000 and answer.usage["completion_tokens"] == 10
        assert answer.said.finish == "length"
        served.assert_idle()


@fault(15)
@fault(16)
def test_every_chunk_is_a_chunk_and_its_finish_reason_one_of_four(served: Served) -> None:
    for question in (served.says(CALL), served.says(thought("a", "b"))):
        chunks = stream(served, question, tools=[WEATHER], n=2)
        assert len({chunk["id"] for chunk in chunks}) == 1
        for chunk in chunks:
            assert chunk["object"] == "chat.completion.chunk" and chunk["system_fingerprint"] == "fp_test"
            assert {choice["finish_reason"] for choice in chunk["choices"]} <= FINISHES
    whole = complete(served, "no reply", max_tokens=3)
    assert whole["object"] == "text_completion" and whole["choices"][0]["finish_reason"] == "stop"


@fault(38)
@pytest.mark.parametrize("error", ["the card caught fire", None], ids=["given up", "not finite"])
def test_an_error_amid_a_stream_is_told_and_the_next_request_served(served: Served, error: str | None) -> None:
    calls = 0

    def fails(history: Sequence[int]) -> dict[int, float]:
        nonlocal calls
        calls += 1
        if calls % 6 == 0:
            if error is None:
                return {9: float("nan")}
            raise MkError(error)  # a new one, since its traceback holds on to requests
        return {TOKENIZER.encode(" a")[0]: 30.0}

    question = served.runs(fails)
    *chunks, last = stream(served, question, logprobs=True)
    assert chunks and set(last) == {"error"} and last["error"]["type"] == "server_error"
    assert error is None or error in last["error"]["message"]
    calls = 0
    message = {"role": "user", "content": question}
    refused(served.post("/v1/chat/completions", {"messages": [message], "logprobs": True}), 500, "engine_error")
    assert served.get("/health").status_code == 200
    assert chat(served, served.says(thought("", "alive"))).said.content == "alive"


@fault(39)
def test_n_choices_or_an_error(served: Served) -> None:
    answer = chat(served, served.says(thought("", "same")), n=5)
    assert [choice.content for choice in answer.choices] == ["same"] * 5
    messages = [{"role": "user", "content": "hi"}]
    for n in (0, 17, -1, "2", True):
        refused(served.post("/v1/chat/completions", {"messages": messages, "n": n}), 400, "invalid_value", "n")


def test_choices_draw_each_their_own_and_the_first_as_if_alone(served: Served) -> None:
    def even(history: Sequence[int]) -> dict[int, float]:
        return dict.fromkeys(range(100, 164), 5.0)

    question = served.runs(even)
    ask = {"max_tokens": 12, "temperature": 1.0, "seed": 11, "reasoning_effort": "none"}
    several, one = chat(served, question, n=3, **ask), chat(served, question, **ask)
    contents = [choice.content for choice in several.choices]
    assert contents[0] == one.said.content and len(set(contents)) == 3
    assert chat(served, question, **{**ask, "seed": 12}).said.content == contents[1]


@pytest.mark.parametrize("n", [1, 4])
def test_usage_counts_cached_tokens_of_a_prompt_once(served: Served, n: int) -> None:
    """However many choices share it; of several prompts their sum. In chunks each choice has its own."""
    long, short = [7] * 410, [9] * 150

    def cached(prompts: Any, stream: bool) -> tuple[int, int, list[int]]:
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        body = {"prompt": prompts, "max_tokens": 3, "n": n, **(options if stream else {})}
        reply = served.post("/v1/completions", body)
        *others, last = events(reply) if stream else [reply.json()]
        of = [chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in (*others, last)]
        return last["usage"]["prompt_tokens"], of[-1], of[:-1]

    for prompts in (long, short, [long, short], [long, short, long]):
        cached(prompts, False)  # so that all of it is there
        asked = prompts if isinstance(prompts[0], list) else [prompts]
        full = [(len(prompt) - 1) // 64 * 64 for prompt in asked]
        for stream in (False, True):
            total, found, each = cached(prompts, stream)
            assert total == sum(map(len, asked)) and found == sum(full) <= total
            assert set(each) == (set(full) if stream else set())
    question = served.says(thought("a", "b")) + " and so on" * 100
    chat(served, question, n=n)
    usage = chat(served, question, n=n).usage
    expected = (usage["prompt_tokens"] - 1) // 64 * 64
    assert usage["prompt_tokens_details"]["cached_tokens"] == expected > 0
