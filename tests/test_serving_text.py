"""Stop strings, characters and markers in answers: faults that other servers had, streamed and not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mk.engines.scripted import Reply
from tests.server_rig import TOKENIZER, WEATHER, Served, action, chat, complete, serving, thought
from tests.serving_faults import fault

END = TOKENIZER.marker("end_thinking")
TEXT = TOKENIZER.marker("start_text")


@pytest.fixture(scope="module", params=[1, 3], ids=["token by token", "three at a time"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(deliver=request.param) as running:
        yield running
        running.assert_idle()


def byte(value: int) -> int:
    """The token that is this one byte."""
    return next(token for token in range(16, TOKENIZER.vocab) if TOKENIZER.token_bytes(token) == bytes([value]))


@fault(1)
def test_stop_strings_sleep_while_the_model_thinks(served: Served) -> None:
    question = served.says(thought("Question: what is asked?", "The answer. Question: another"))
    said = chat(served, question, stop=["Question:"]).said
    assert (said.reasoning, said.content, said.finish) == ("Question: what is asked?", "The answer. ", "stop")


@fault(2)
def test_a_stop_string_in_reasoning_leaks_nothing(served: Served) -> None:
    question = served.says(thought("9.11 or 9.8? compare", "The greater is 9.8, surely"))
    answer = chat(served, question, stop="9.8")
    assert answer.said.reasoning == "9.11 or 9.8? compare" and answer.said.content == "The greater is "
    only_thinking = chat(served, served.says("9.8 it is"), stop="9.8", max_tokens=2).said
    assert only_thinking.finish == "length" and only_thinking.content == ""


@fault(3)
def test_no_piece_of_a_stop_string_is_sent_before_it_is_whole(served: Served) -> None:
    question = served.says(thought("", "ABCDEFGHIJKL"))
    answer = chat(served, question, stop=["DEFGHIJ"])
    assert answer.said.content == "ABC" and answer.said.finish == "stop"
    part = chat(served, served.says(thought("", "ABCDEFGHX")), stop=["DEFGHIJ"]).said
    assert part.content == "ABCDEFGHX"  # held back, and let go
    cut = chat(served, served.says(thought("", "ABCDEF")), stop=["DEFGHIJ"]).said
    assert cut.content == "ABCDEF"  # the answer ends in what might have become one


@fault(4)
def test_text_before_a_stop_string_inside_one_token_is_sent(served: Served) -> None:
    (token,) = TOKENIZER.encode("():")
    question = served.says([END, TEXT, *TOKENIZER.encode("why"), token, *TOKENIZER.encode("more")])
    assert chat(served, question, stop=["):"]).said.content == "why("


@fault(5)
def test_a_stop_string_of_several_tokens(served: Served) -> None:
    question = served.says(thought("", "L M N O P Q R S"))
    assert chat(served, question, stop=["O P Q"]).said.content == "L M N "


@fault(5)
@pytest.mark.parametrize("stop", ["", [], None, [""]])
def test_stops_that_stop_nothing(served: Served, stop: object) -> None:
    assert chat(served, served.says(thought("", "a b c")), stop=stop).said.content == "a b c"


@fault(5)
def test_many_stop_strings_and_the_first_in_the_text_counts(served: Served) -> None:
    question = served.says(thought("", "one two three four"))
    assert chat(served, question, stop=["x", "four", "three", "ee", "tw"]).said.content == "one "
    assert chat(served, question, stop="END_TEXT").said.content == "one two three four"  # part of a marker


@fault(6)
def test_no_half_character_is_sent(served: Served) -> None:
    question = served.says([END, TEXT, byte(0xC4), byte(0x8F), byte(0xC4), byte(0x8F)])
    answer = chat(served, question)
    assert answer.said.content == "ďď"
    assert not any("\ufffd" in str(chunk) for chunk in answer.chunks)


@fault(7)
def test_a_half_character_at_the_end_is_the_same_both_ways(served: Served) -> None:
    for tail in ([], [TOKENIZER.marker("end_text")]):
        question = served.says([END, TEXT, *TOKENIZER.encode("ab"), byte(0xC4), *tail])
        assert chat(served, question).said.content == "ab\ufffd"
    cut = served.says([END, TEXT, byte(0xC4), byte(0x8F)])
    assert chat(served, cut, max_tokens=3).said.content == "\ufffd"
    thinking = served.says([*TOKENIZER.encode("ab"), byte(0xC4), END, TEXT, byte(0x8F)])
    said = chat(served, thinking).said
    assert (said.reasoning, said.content) == ("ab\ufffd", "\ufffd")  # no character across a marker


@fault(8)
def test_bytes_that_are_no_character_break_nothing(served: Served) -> None:
    question = served.says([END, TEXT, *TOKENIZER.encode("a"), byte(0xFF), byte(0xFE), *TOKENIZER.encode("b")])
    assert chat(served, question).said.content == "a\ufffd\ufffdb"


@fault(21)
@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["without tools", "with tools"])
def test_markers_never_leak(served: Served, tools: object) -> None:
    said = "thought<|START_THINKING|> more<|END_THINKING|><|END_THINKING|><|START_TEXT|>text<|END_TEXT|>"
    said += "<|START_TOOL_RESULT|>[]<|END_TOOL_RESULT|><|USER_TOKEN|>on<|START_TEXT|>!<|END_TEXT|>"
    answer = chat(served, served.says(said), **({"tools": tools} if tools else {}))
    assert answer.said.reasoning == "thought more" and answer.said.content == "text[]on!"
    assert "<|" not in str(answer.whole) + str(answer.chunks)


@fault(24)
def test_a_marker_spelled_in_ordinary_tokens_is_text(served: Served) -> None:
    spelled = TOKENIZER.encode("<|END_") + TOKENIZER.encode("THINKING|>")
    assert END not in spelled
    question = served.says([*spelled, *TOKENIZER.encode(" on"), END, TEXT, *spelled])
    said = chat(served, question).said
    assert (said.reasoning, said.content) == ("<|END_THINKING|> on", "<|END_THINKING|>")


@fault(22)
def test_the_end_of_thinking_and_a_call_in_one_step(served: Served) -> None:
    question = served.says("Write.<|END_THINKING|>" + action(("weather", {"city": "Oslo"})))
    said = chat(served, question, tools=[WEATHER]).said
    assert said.reasoning == "Write." and said.finish == "tool_calls"
    assert [call["function"]["name"] for call in said.calls] == ["weather"]


def test_plain_continuations_stop_too(served: Served) -> None:
    served.replies.add(Reply("def sort():", " return sorted(x)\nend here"))
    whole = complete(served, "def sort():", max_tokens=40, stop=["\nend"])
    assert whole["choices"][0]["text"] == " return sorted(x)" and whole["choices"][0]["finish_reason"] == "stop"
