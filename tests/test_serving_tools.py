"""Tool calls and the turns around them: faults that other servers had."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from cohere_melody import PyFilter
from hypothesis import given, settings
from hypothesis import strategies as st

from mk.batching.request import Delivery, Sampled
from mk.server.choice import ChatChoice, Piece
from mk.server.parser import Section
from mk.server.prompts import render_chat
from mk.server.protocol import Message
from tests.server_rig import TOKENIZER, WEATHER, Served, action, chat, refused, serving, thought
from tests.serving_faults import fault

NONSENSE = {"type": "function", "function": {"name": "a", "parameters": {"type": "nonsense"}}}
OSLO, ROME = ("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})


@pytest.fixture(scope="module", params=[1, 5], ids=["token by token", "five at a time"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(deliver=request.param) as running:
        yield running
        running.assert_idle()


def render(*messages: dict[str, Any]) -> str:
    return TOKENIZER.decode(render_chat(TOKENIZER, [Message(**message) for message in messages]))


def call(call_id: str, arguments: str = '{"city": "Oslo"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


@fault(17)
def test_parallel_calls_are_numbered_by_their_order(served: Served) -> None:
    said = chat(served, served.says("both<|END_THINKING|>" + action(ROME, OSLO)), tools=[WEATHER]).said
    # `merge` checks the indexes of the stream
    assert [json.loads(c["function"]["arguments"]) for c in said.calls] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert len({c["id"] for c in said.calls}) == 2


def test_parallel_tool_calls_false_ends_with_the_first(served: Served) -> None:
    question = served.says("both<|END_THINKING|>" + action(ROME, OSLO))
    said = chat(served, question, tools=[WEATHER], parallel_tool_calls=False).said
    assert len(said.calls) == 1 and said.finish == "tool_calls"


@fault(18)
def test_ids_are_unique_over_turns_and_small_in_the_prompt(served: Served) -> None:
    question = served.says("one<|END_THINKING|>" + action(OSLO, ROME))
    ids = [c["id"] for _ in range(3) for c in chat(served, question, tools=[WEATHER]).said.calls]
    assert len(set(ids)) == 6 and all(i.startswith("call_") for i in ids)
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [call(ids[0]), call(ids[1])]},
        {"role": "tool", "tool_call_id": ids[1], "content": "second"},
        {"role": "tool", "tool_call_id": ids[0], "content": "first"},
        {"role": "assistant", "tool_calls": [call(ids[2])]},
        {"role": "tool", "tool_call_id": ids[2], "content": "third"},
    ]
    prompt = render(*turns)
    assert not any(i in prompt for i in ids)
    written = [line for line in prompt.splitlines() if '"tool_call_id"' in line]
    assert [json.loads(line.split("<|")[0].rstrip(","))["tool_call_id"] for line in written if "results" in line] == [
        "1", "0", "2",
    ]  # fmt: skip
    assert [line.split('"')[3] for line in written if "tool_name" in line] == ["0", "1", "2"]


@fault(19)
def test_an_assistant_turn_with_calls_alone_is_kept_however_its_content_is_left_out() -> None:
    def turns(**content: Any) -> str:
        return render(
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [call("call_a")], **content},
            {"role": "tool", "tool_call_id": "call_a", "content": ""},
        )

    prompts = {turns(content=None), turns(content=""), turns(), turns(content=[])}
    assert len(prompts) == 1
    assert '"tool_name": "weather"' in (prompt := prompts.pop()) and '{"content": ""}' in prompt


@fault(20)
@pytest.mark.parametrize("role", ["system", "developer", "user", "tool", "assistant"])
def test_parts_are_the_joined_string(role: str) -> None:
    parts = [{"type": "text", "text": "18 "}, {"type": "text", "text": "degrees"}]
    first = {"role": "user", "content": "q"}
    assert render(first, {"role": role, "content": parts}) == render(first, {"role": role, "content": "18 degrees"})


def test_reasoning_comes_back_into_the_prompt_whatever_it_is_called() -> None:
    first = {"role": "user", "content": "q"}
    prompts = {
        render(first, {"role": "assistant", "content": "a", **thinking})
        for thinking in (
            {"reasoning_content": "why"},
            {"reasoning": "why"},
            {"thinking": "why"},
            {"content": [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "a"}]},
        )
    }
    assert len(prompts) == 1
    assert "<|START_THINKING|>why<|END_THINKING|><|START_TEXT|>a<|END_TEXT|>" in prompts.pop()
    between = render(first, {"role": "assistant", "reasoning_content": "look", "tool_calls": [call("x")]})
    assert "<|START_THINKING|>look<|END_THINKING|><|START_ACTION|>" in between


def test_reasoning_effort_none_and_the_templates_argument_end_thinking_at_once(served: Served) -> None:
    question = served.says(thought("so so", "yes"))
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"reasoning": False}}):
        said = chat(served, question, **off).said
        assert (said.reasoning, said.content) == ("", "yes")
    assert chat(served, question, reasoning_effort="high").said.reasoning == "so so"


def test_a_thinking_budget_forces_the_end(served: Served) -> None:
    question = served.says(thought("a b c d e f g h i j", "yes"))
    answer = chat(served, question, thinking_token_budget=4)
    assert answer.said.reasoning and "a b c d e f g h i j".startswith(answer.said.reasoning)
    assert answer.said.content == "yes" and answer.usage["completion_tokens_details"]["reasoning_tokens"] == 5
    assert chat(served, question, thinking_token_budget=0).said.reasoning == ""
    assert chat(served, question, thinking_token_budget=100).said.reasoning == "a b c d e f g h i j"


def test_a_call_without_text_and_a_call_after_text(served: Served) -> None:
    straight = chat(served, served.says("t<|END_THINKING|>" + action(OSLO)), tools=[WEATHER])
    assert straight.whole["choices"][0]["message"]["content"] is None
    after = chat(served, served.says(thought("t", "I look.") + action(OSLO)), tools=[WEATHER]).said
    assert after.content == "I look." and len(after.calls) == 1 and after.finish == "tool_calls"
    unclosed = chat(served, served.says("t" + action(OSLO)), tools=[WEATHER]).said  # no end of thinking
    assert unclosed.reasoning == "t" and len(unclosed.calls) == 1


def test_calls_that_max_tokens_cut_off_end_with_length(served: Served) -> None:
    """Whatever has become whole until then: there may have been more to come."""
    said = "t<|END_THINKING|>" + action(OSLO, ROME)
    tokens = TOKENIZER.encode(said)
    first = next(i for i in range(len(tokens)) if TOKENIZER.decode(tokens[:i]).count("}") == 2)
    question = served.says(said)
    for most, calls in ((first + 1, 1), (len(tokens) - 1, 2)):
        cut = chat(served, question, tools=[WEATHER], max_tokens=most).said
        assert len(cut.calls) == calls and cut.finish == "length"
    whole = chat(served, question, tools=[WEATHER]).said
    assert len(whole.calls) == 2 and whole.finish == "tool_calls"


A, B = '{"tool_name": "a", "parameters": {}}', '{"tool_name": "b"}'
NO_OBJECT = '{"tool_name": "a", "parameters": "no object"}'
OPEN_QUOTE = '{"tool_name": "a", "parameters": {"x": "quote}}, '
MALFORMED = (
    # action text, names of the calls in it, what is left over
    (f"[{A}, {B[:-1]}", ["a"], B[:-1]),  # cut off
    ('{"tool_name": "a", "parameters": {"x": "}"}}', ["a"], ""),  # no array around it
    (f"[{NO_OBJECT}, {B}]", ["b"], NO_OBJECT),
    ('[{"name": "wrong key"}]', [], '{"name": "wrong key"}'),
    ("I call weather", [], "I call weather"),
    (f"[{OPEN_QUOTE}{B}]", ["b"], OPEN_QUOTE + "]"),
    ("", [], ""),
)


@pytest.mark.parametrize(("text", "names", "rest"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_actions_are_recovered_object_by_object(
    served: Served, text: str, names: list[str], rest: str
) -> None:
    said = chat(served, served.says(f"t<|END_THINKING|><|START_ACTION|>{text}<|END_ACTION|>"), tools=[WEATHER]).said
    assert [c["function"]["name"] for c in said.calls] == names and said.content == rest
    assert said.finish == ("tool_calls" if names else "stop")


def test_without_tools_an_action_is_content(served: Served) -> None:
    question = served.says("t<|END_THINKING|>" + action(OSLO))
    for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}):
        said = chat(served, question, **body).said
        assert not said.calls and '"tool_name": "weather"' in said.content and said.finish == "stop"


def test_a_forced_call_is_of_the_named_tool_and_fits_its_schema(served: Served) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    prefers_prose = served.says(thought("hm", "no"))
    named = {"type": "function", "function": {"name": "weather"}}
    said = chat(served, prefers_prose, tools=[other, WEATHER], tool_choice=named, max_tokens=150).said
    assert [c["function"]["name"] for c in said.calls][:1] == ["weather"] and said.reasoning == "hm"
    assert json.loads(said.calls[0]["function"]["arguments"])["city"] in ("Oslo", "Rome")
    agrees = served.says("hm<|END_THINKING|>" + action(ROME).replace("\n", ""))
    said = chat(served, agrees, tools=[WEATHER], tool_choice="required").said
    assert json.loads(said.calls[0]["function"]["arguments"]) == {"city": "Rome"}


FORMATS = (
    {"type": "json_object"},
    {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    },
)


@pytest.mark.parametrize("wanted", FORMATS, ids=["object", "schema"])
def test_an_answer_in_a_format_leaves_the_choice_of_calling(served: Served, wanted: dict[str, Any]) -> None:
    """The model decides: it calls, by the tools' schemas, or it answers in the format."""
    calling = served.says("t<|END_THINKING|>" + action(OSLO, ROME).replace("\n", ""))
    answering = served.says(thought("t", '{"n": 3}'))
    for effort in ({}, {"reasoning_effort": "none"}):
        both = {"tools": [WEATHER], "response_format": wanted, **effort}
        for choice in ({}, {"tool_choice": "auto"}):
            said = chat(served, calling, **both, **choice).said
            assert said.calls[0]["function"]["name"] == "weather" and said.finish == "tool_calls"
            assert said.content == ""
            said = chat(served, answering, **both, **choice).said
            assert json.loads(said.content) == {"n": 3} and not said.calls and said.finish == "stop"
        said = chat(served, calling, **both, tool_choice="none").said
        assert not said.calls and isinstance(json.loads(said.content), dict)


def test_calls_beside_a_format_follow_the_tools(served: Served) -> None:
    prefers_madrid = served.says("t<|END_THINKING|>" + action(("weather", {"city": "Madrid"}), OSLO).replace("\n", ""))
    body: dict[str, Any] = {"tools": [WEATHER], "response_format": FORMATS[0], "max_tokens": 150}
    said = chat(served, prefers_madrid, **body, parallel_tool_calls=False).said
    (only,) = said.calls
    assert json.loads(only["function"]["arguments"])["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "absent"}}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": "maybe", "tools": [WEATHER]}, "tool_choice"),
        ({"tools": 3}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [NONSENSE], "tool_choice": "required"}, "tools"),
        ({"tools": [NONSENSE], "response_format": FORMATS[0]}, "tools"),
        ({"tools": [WEATHER], "response_format": FORMATS[0], "tool_choice": "required"}, "response_format"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ],
)
def test_wrong_tools_and_turns_are_refused(served: Served, body: dict[str, Any], param: str) -> None:
    asked = {"messages": [{"role": "user", "content": "q"}], **body}
    refused(served.post("/v1/chat/completions", asked), 400, "invalid_value", param)


def parse(deliveries: Sequence[Sequence[int]], stops: Sequence[str] = ()) -> tuple[Any, ...]:
    choice, whole = ChatChoice(TOKENIZER, Section.THINKING, True, stops), Piece()
    pieces = [choice.feed(Delivery([Sampled(token) for token in tokens])) for tokens in deliveries]
    for piece in [*pieces, choice.feed(Delivery(finish="stop"))]:
        whole.reasoning += piece.reasoning
        whole.content += piece.content
        whole.calls += piece.calls
        whole.tokens += piece.tokens
    return whole.reasoning, whole.content, [c.call for c in whole.calls], whole.tokens, choice.finish_reason


SAMPLE = TOKENIZER.encode(
    "Wait: ďé — 'quote'<|END_THINKING|><|START_TEXT|>text STOP? ßtop<|END_TEXT|>"
    + action(OSLO, ROME).replace("}}", "}}, junk", 1)
    + "<|START_TEXT|>after<|END_TEXT|>"
)


@fault(23)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, len(SAMPLE)), max_size=12), st.sampled_from([(), ("STOP!",), ("ßto",), ("fter",)]))
def test_any_split_of_the_tokens_gives_the_same(cuts: list[int], stops: tuple[str, ...]) -> None:
    at = [0, *sorted(cuts), len(SAMPLE)]
    split = [SAMPLE[lo:hi] for lo, hi in itertools.pairwise(at)]
    assert parse(split, stops) == parse([SAMPLE], stops) == parse([[token] for token in SAMPLE], stops)


@fault(23)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, TOKENIZER.vocab - 1), max_size=40))
def test_any_tokens_are_parsed_and_no_marker_leaks(tokens: list[int]) -> None:
    reasoning, content, *_ = parse([tokens])
    for marker in TOKENIZER.special:
        assert TOKENIZER.decode([marker]) not in reasoning + content


@pytest.mark.parametrize(
    "text",
    [
        thought("I think.", "I say."),
        "Straight.<|END_THINKING|>" + action(OSLO),
        thought("Both.", "Look:") + action(OSLO, ROME),
        "cut off in thoug",
    ],
)
def test_well_formed_answers_are_read_as_coheres_parser_reads_them(text: str) -> None:
    theirs = PyFilter.cmd4().process_full_text("<|START_THINKING|>" + text)
    reasoning, content, calls, *_ = parse([TOKENIZER.encode(text)])
    assert (reasoning, content) == (theirs.reasoning or "", theirs.content or "")
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [
        (c.name, json.loads(c.arguments)) for c in theirs.tool_calls
    ]


@pytest.mark.parametrize(
    ("pieces", "lost"),
    [
        (["<|END_", "THINKING|>", " on", "<|END_THINKING|>"], "<|END_THINKING|> on"),
        (["<|END_THINKING|>", "<|START_ACTION|>", "no call at all", "<|END_ACTION|>"], "no call at all"),
    ],
    ids=["a spelled marker", "an action that is none"],
)
def test_coheres_parser_loses_what_ours_keeps(pieces: list[str], lost: str) -> None:
    """Why it is not the server's: it is given the pieces, not the ids."""
    theirs = PyFilter.cmd4()
    parts = [theirs.write_decoded(piece) for piece in ("<|START_THINKING|>", *pieces)] + [theirs.flush_partials()]
    said = "".join(f"{part.reasoning or ''}{part.content or ''}" for part in parts if part is not None)
    assert lost not in said
    reasoning, content, calls, *_ = parse([[token for piece in pieces for token in TOKENIZER.encode(piece)]])
    assert lost in reasoning + content and not calls
