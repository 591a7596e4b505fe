"""From a request's messages to prompt tokens, by the checkpoint's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mk.errors import MkError
from mk.model.tokenizer import Tokenizer
from mk.server.errors import invalid
from mk.server.protocol import MAX_DEPTH, Message, Tool, too_deep


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    options: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Prompt tokens of a conversation. options: variables of the template.

    Raises ApiError for messages that cannot be rendered, and for options that are none.
    """
    for name in options or ():
        if name in tokenizer.reserved:
            what = f"chat_template_kwargs: {name} is not for a request to set"
            raise invalid(what, "chat_template_kwargs", "unsupported_parameter")
    ids = _SmallIds()
    turns = [_turn(message, f"messages[{i}]", ids) for i, message in enumerate(messages)]
    described = [tool.model_dump() for tool in tools or ()]
    try:
        text = tokenizer.render(turns, described, add_generation_prompt, **(options or {}))
    except MkError as error:
        raise invalid(str(error), "messages") from error
    except TypeError as error:  # a variable that the template or its renderer makes nothing of
        raise invalid(f"chat_template_kwargs: {error}", "chat_template_kwargs") from error
    return encode(tokenizer, text, "messages")


def encode(tokenizer: Tokenizer, text: str, param: str, bos: bool = False) -> list[int]:
    """Token ids of a text. Raises ApiError for one that is no Unicode (half of a surrogate pair)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(f"{param} is not valid Unicode: {error.reason} at {error.start}", param) from error
    return tokenizer.encode(text, bos)


class _SmallIds:
    """The ids that the model itself would have given to a conversation's calls: 0, 1, ... in their order."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._count = 0

    def give(self, call_id: str) -> str:
        self._known[call_id] = str(self._count)
        self._count += 1
        return self._known[call_id]

    def of(self, call_id: str | None) -> str:
        """The latest call of that id; a result whose call is not in the conversation keeps its own."""
        return self._known.get(call_id or "", call_id or "")


def _turn(message: Message, at: str, ids: _SmallIds) -> dict[str, Any]:
    """A message as templates read it: text content, reasoning as `thinking`, arguments as objects, small ids."""
    text, thoughts = _content(message, at)
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    if message.role == "assistant":
        thinking = message.thinking or message.reasoning_content or message.reasoning or thoughts
        if thinking:
            turn["thinking"] = thinking
        if message.tool_calls:
            turn["tool_calls"] = [
                _call(call, f"{at}.tool_calls[{i}]", ids) for i, call in enumerate(message.tool_calls)
            ]
    if message.role == "tool":
        turn["tool_call_id"] = ids.of(message.tool_call_id)
    return turn


def _content(message: Message, at: str) -> tuple[str, str]:
    """The joined text parts, and the joined thinking parts."""
    if not isinstance(message.content, list):
        return message.content or "", ""
    text, thoughts = "", ""
    for i, part in enumerate(message.content):
        kind = part.get("type")
        given = part.get("thinking" if kind == "thinking" else "text")
        if kind not in ("text", "thinking") or not isinstance(given, str):
            raise invalid(f"{at}.content[{i}] is no text part: only text is read here", f"{at}.content[{i}]")
        if kind == "thinking":
            thoughts += given
        else:
            text += given
    return text, thoughts


def _call(call: Mapping[str, Any], at: str, ids: _SmallIds) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid(f"{at} has no function name", at)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{at}.function.arguments")
    named = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    return {"id": ids.give(str(call.get("id", ""))), "type": "function", "function": named}


def _parsed(arguments: str, at: str) -> Any:
    try:
        value = json.loads(arguments or "{}")
        deep = too_deep(value)
    except ValueError:  # the model wrote that, or the client broke it: the template gets text
        return arguments
    except RecursionError:
        deep = True
    if deep:
        raise invalid(f"{at}: nested deeper than {MAX_DEPTH} levels", at)
    return value
