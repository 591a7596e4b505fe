"""Tool calls from the text between the action markers, object by object, as they become whole.

The model writes a JSON array of {"tool_call_id", "tool_name", "parameters"}. Not every model at every temperature
writes valid JSON, so nothing here trusts it: every object that can be read is a call, all that cannot is left over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call. arguments: JSON text of an object."""

    name: str
    arguments: str


class ActionScanner:
    """Fed with the action's text in any pieces; gives the calls that each completes."""

    def __init__(self) -> None:
        self._text = ""  # from the first character that is not settled
        self._at = 0  # how far it has been looked at
        self._depth = 0
        self._quoted = self._escaped = False
        self._between = ""  # since the last object
        self.left_over = ""  # what was no call

    def feed(self, text: str) -> list[Call]:
        self._text += text
        calls = []
        while self._at < len(self._text):
            character = self._text[self._at]
            self._at += 1
            if self._depth == 0:
                self._outside(character)
            elif self._ends_object(character):
                whole, self._text, self._at = self._text[: self._at], self._text[self._at :], 0
                call = _call_of(whole)
                if call is None:
                    calls += self._recover(whole)
                else:
                    calls.append(call)
        return calls

    def finish(self) -> list[Call]:
        """Calls inside what never became whole; the rest of it is left over."""
        self._settle()
        rest, self._text, self._at, self._depth = self._text, "", 0, 0
        return self._recover(rest)

    def _outside(self, character: str) -> None:
        if character == "{":
            self._settle()
            self._depth = 1
            self._quoted = self._escaped = False
            self._text, self._at = self._text[self._at - 1 :], 1
            return
        self._text, self._at = self._text[self._at :], 0
        self._between += character

    def _settle(self) -> None:
        """Between objects, brackets, commas and space are the array's; anything more is left over."""
        if self._between.strip(" \t\r\n[],"):
            self.left_over += self._between
        self._between = ""

    def _ends_object(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped = character == "\\"
            self._quoted = character != '"'
        elif character == '"':
            self._quoted = True
        else:
            self._depth += (character in "{[") - (character in "}]")
        return self._depth == 0

    def _recover(self, text: str) -> list[Call]:
        """Calls that begin anywhere in a text that is not one; what lies around them is left over."""
        calls, at = [], 0
        while (start := text.find("{", at)) >= 0:
            try:
                value, end = _DECODER.raw_decode(text, start)
                call = _as_call(value)
            except (ValueError, RecursionError):
                call = None
            if call is None:
                end = start + 1
                self.left_over += text[at:end]
            else:
                self.left_over += text[at:start]
                calls.append(call)
            at = end
        self.left_over += text[at:]
        return calls


def _call_of(text: str) -> Call | None:
    try:
        return _as_call(_DECODER.decode(text))
    except (ValueError, RecursionError):
        return None


def _as_call(value: Any) -> Call | None:
    """A call's JSON value as a call; None for anything else."""
    if not isinstance(value, dict):
        return None
    name, parameters = value.get("tool_name"), value.get("parameters", {})
    if not isinstance(name, str) or not name or not isinstance(parameters, dict):
        return None
    return Call(name, json.dumps(parameters, ensure_ascii=False))
