"""From token ids to reasoning, content and tool calls.

Sections are told apart by the ids of the marker tokens, so a marker that is spelled out in ordinary tokens is text like
any other, and no marker, known or not, ever reaches a client. Cohere's own parser (cohere-melody, with which tests
compare this one) reads decoded text: it takes a spelled marker for one, and drops what of an action is no JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from mk.model.tokenizer import Tokenizer
from mk.server.actions import ActionScanner, Call


class Section(Enum):
    THINKING = "thinking"
    TEXT = "text"  # inside text markers, or between sections: a model may leave the markers out
    ACTION = "action"


@dataclass(slots=True)
class Parsed:
    """What some tokens add to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


_BEGINS = {
    "start_thinking": Section.THINKING,
    "end_thinking": Section.TEXT,
    "start_text": Section.TEXT,
    "end_text": Section.TEXT,
    "start_action": Section.ACTION,
    "end_action": Section.TEXT,
}


def opening_section(tokenizer: Tokenizer, prompt: Sequence[int]) -> Section:
    """Where an answer to this prompt begins: inside thinking, unless the template has closed it."""
    return Section.THINKING if prompt and prompt[-1] == tokenizer.markers.get("start_thinking") else Section.TEXT


class OutputParser:
    """One answer, token by token. Without `tools` an action is content."""

    def __init__(self, tokenizer: Tokenizer, section: Section, tools: bool) -> None:
        self._tokenizer = tokenizer
        self._begins = {tokenizer.markers[name]: s for name, s in _BEGINS.items() if name in tokenizer.markers}
        self._tools = tools
        self.section = section
        self._text = tokenizer.stream(skip_special=True)
        self._action = ActionScanner()

    def step(self, token: int) -> Parsed:
        """What one more token adds."""
        parsed = Parsed()
        if token in self._tokenizer.special:
            if token in self._begins:
                self._leave(parsed)
                self.section = self._begins[token]
            return parsed
        self._add(parsed, self._text.step(token))
        return parsed

    def finish(self) -> Parsed:
        """What is left when no token follows: half a character, half an action."""
        parsed = Parsed()
        self._leave(parsed)
        return parsed

    def _add(self, parsed: Parsed, text: str) -> None:
        if self.section is Section.THINKING:
            parsed.reasoning += text
        elif self.section is Section.ACTION and self._tools:
            parsed.calls += self._action.feed(text)
        else:
            parsed.content += text

    def _leave(self, parsed: Parsed) -> None:
        """End the section: nothing of it is lost."""
        self._add(parsed, self._text.finish())
        self._text = self._tokenizer.stream(skip_special=True)
        if self.section is Section.ACTION and self._tools:
            parsed.calls += self._action.finish()
            parsed.content += self._action.left_over
            self._action = ActionScanner()
