"""Stop strings over a growing text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string, and holds back whatever may yet become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What may be sent of the text so far; nothing after a match."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, _, self.matched = min(found)
            sent, self._held = self._held[:at], ""
            return sent
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        sent, self._held = self._held[:cut], self._held[cut:]
        return sent

    def finish(self) -> str:
        """What was held back and never became a stop string."""
        sent, self._held = self._held, ""
        return sent

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0
