"""The table of request fields: for each, a value that is not the default, its effect, and values that are wrong.

An effect is a predicate on the answers without and with the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.server_rig import TOKENIZER, WEATHER

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
