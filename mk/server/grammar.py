"""Constraints on an answer: JSON by a schema, tool calls that have to be, thinking that has to end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from mk.batching.request import Mask
from mk.model.tokenizer import Tokenizer
from mk.server.errors import invalid
from mk.server.protocol import NamedTool, ResponseFormat, Tool


@dataclass(frozen=True, slots=True)
class _Part:
    """JSON between two markers. param: the request's field that asks for it."""

    begin: str
    schema: Any
    end: str
    param: str


class Grammars:
    """Makes constraints over one tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(tokenizer)))

    def answer(self, wanted: ResponseFormat) -> str:
        """The grammar of an answer in that format. Raises ApiError for a schema that cannot be followed."""
        return self._checked(self._answer(wanted))

    def calls(self, tools: Sequence[Tool], choice: str | NamedTool, parallel: bool) -> str:
        """The grammar of an action with at least one call of these tools, or of the named one. Raises ApiError."""
        return self._checked(self._calls(tools, choice, parallel))

    def answer_or_calls(self, wanted: ResponseFormat, tools: Sequence[Tool], parallel: bool) -> str:
        """The grammar of either, of which the model's first marker decides. Raises ApiError."""
        return self._checked(self._answer(wanted), self._calls(tools, "auto", parallel))

    def _answer(self, wanted: ResponseFormat) -> _Part:
        schema: Any = {"type": "object"}
        if wanted.type == "json_schema":
            if wanted.json_schema is None:
                raise invalid("response_format of type json_schema needs json_schema", "response_format")
            schema = wanted.json_schema.json_schema
        return _Part("start_text", schema, "end_text", "response_format")

    def _calls(self, tools: Sequence[Tool], choice: str | NamedTool, parallel: bool) -> _Part:
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool.function.name == choice.function.name]
            if not tools:
                raise invalid(f"tool_choice: there is no tool {choice.function.name!r}", "tool_choice")
        if not tools:
            raise invalid(f"tool_choice={choice!r} needs tools", "tool_choice")
        array: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": [_call_schema(t) for t in tools]}}
        if not parallel:
            array["maxItems"] = 1
        return _Part("start_action", array, "end_action", "tools")

    def constraint(self, grammar: str, thinking: bool) -> GrammarConstraint:
        """thinking: the grammar is of what comes after thinking, which is free."""
        free_until = self._tokenizer.marker("end_thinking") if thinking else None
        return GrammarConstraint(self._tokens, grammar, free_until, self._tokenizer.vocab)

    def _checked(self, *parts: _Part) -> str:
        """One of the parts. The markers stand as token ids, so that text cannot imitate them."""
        marker = self._tokenizer.marker
        starts, rules = [], ""
        for number, part in enumerate(parts):
            start = f"<[{marker(part.begin)}]> json{number} <[{marker(part.end)}]>"
            rule = f"json{number}: %json {json.dumps(_compact(part.schema))}\n"
            problem = llguidance.LLMatcher.validate_grammar(f"start: {start}\n{rule}", self._tokens)
            if problem:
                raise invalid(f"{part.param}: {problem.splitlines()[0]}", part.param)
            starts.append(start)
            rules += rule
        return f"start: {' | '.join(starts)}\n{rules}"


class GrammarConstraint:
    """A grammar that holds from the start, or once thinking has ended."""

    def __init__(self, tokens: Any, grammar: str, free_until: int | None, vocab: int) -> None:
        self._matcher = llguidance.LLMatcher(tokens, grammar)
        self._free_until, self._vocab = free_until, vocab

    def allowed(self) -> Mask | None:
        if self._free_until is not None:
            return None
        return _unpacked(self._matcher.compute_bitmask(), self._vocab)

    def accept(self, token: int) -> None:
        if self._free_until is None:
            self._matcher.consume_token(token)
        elif token == self._free_until:
            self._free_until = None


class ThinkingBudget:
    """Ends thinking after a number of tokens."""

    def __init__(self, tokenizer: Tokenizer, tokens: int) -> None:
        self._left: int | None = tokens
        self._end = tokenizer.marker("end_thinking")
        self._only_end = np.arange(tokenizer.vocab) == self._end

    def allowed(self) -> Mask | None:
        return self._only_end if self._left == 0 else None

    def accept(self, token: int) -> None:
        if self._left is not None:
            self._left = None if token == self._end else self._left - 1


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id, self.bos_token_id = tokenizer.eos[0], tokenizer.bos
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab)]
        self.special_token_ids = sorted(tokenizer.special)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _compact(schema: Any) -> Any:
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**schema, "x-guidance": options} if isinstance(schema, dict) else schema


def _call_schema(tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters or {"type": "object"}
    if "$defs" in parameters or "definitions" in parameters:
        # a document of its own, within which its references stay, though it is nested in another
        parameters = {"$id": f"tool:{tool.function.name}", **parameters}
    properties = {
        "tool_call_id": {"type": "string", "pattern": "^[0-9]{1,3}$"},
        "tool_name": {"const": tool.function.name},
        "parameters": parameters,
    }
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _unpacked(bits: bytes, vocab: int) -> Mask:
    mask: npt.NDArray[np.uint8] = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return mask[:vocab].astype(bool)
