"""The critical path of a simulated step: from its last signal back, always to what was waited for last."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

from mk.schedule.simulator.engine import Engine

_SLACK = 1e-9  # microseconds within which two moments are one
_Where = tuple[str, int, int]  # role, track and entry that the path goes to


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the path. cause: handoff | controller | stream | work | store | aside."""

    us: float
    cause: str
    op: str
    layer: int
    sm: int


class CriticalPath:
    """Segments, the last first; together they are as long as the step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.segments: list[Segment] = []
        self.at = engine.end  # everything after this moment is explained
        n = engine.work.n_sm
        ends = [(s.signalled[-1], sm, len(s.signalled) - 1) for sm, s in enumerate(engine.sms) if s.signalled]
        ends += [(passed[-1][2], n + sm, len(passed) - 1) for sm, passed in enumerate(engine.aside) if passed]
        _, track, place = max(ends)
        role = "aside" if track >= n else "storer"
        while self.at > _SLACK and place >= 0:
            role, track, place = getattr(self, f"_{role}")(track, place)
        if self.at > _SLACK:
            self.segments.append(Segment(self.at, "controller", "", 0, track % n))

    def by_cause(self) -> dict[tuple[str, str], float]:
        """Microseconds by (cause, operation), the longest first."""
        total: dict[tuple[str, str], float] = defaultdict(float)
        for segment in self.segments:
            total[segment.cause, segment.op] += segment.us
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def _explain(self, since: float, cause: str, track: int, place: int) -> None:
        """The time from `since` to the earliest moment explained so far."""
        since = max(0.0, since)
        if since < self.at:
            n = self.engine.work.n_sm
            sm = track % n
            task = self.engine.work.tracks[track][place] if track >= n else self.engine.sms[sm].tasks[place]
            self.segments.append(Segment(self.at - since, cause, task.op, task.layer, sm))
            self.at = since

    def _counter(self, waits: tuple[int, ...], track: int, place: int) -> _Where:
        """To whoever gave the last signal of the counter that was reached last."""
        e = self.engine
        counter = max(waits, key=lambda c: e.seen_at(c, track))
        self._explain(e.given[counter], "handoff", track, place)
        by, at = e.given_by[counter]
        return ("aside" if by >= e.work.n_sm else "storer"), by, at

    def _storer(self, sm: int, place: int) -> _Where:
        s = self.engine.sms[sm]
        task = s.tasks[place]
        op = self.engine.op[task.op]
        closing = op.tile + op.close * task.closes + op.row * self.engine.work.rows
        if task.tiles and s.done[place] + closing >= s.signalled[place] - _SLACK:
            self._explain(s.done[place], "store", sm, place)
            return "consumer", sm, place
        self._explain(s.storing[place], "store", sm, place)
        if s.storing[place] <= s.go[place] + _SLACK:
            return self._opening(sm, place)
        return "storer", sm, place - 1

    def _opening(self, sm: int, place: int) -> _Where:
        """What opened an entry: a counter, the entry before it, or its publication."""
        s = self.engine.sms[sm]
        while place > 0 and s.go[place] <= s.go[place - 1] + _SLACK:
            place -= 1
        waits = s.tasks[place].waits
        if waits and max(self.engine.seen_at(c, sm) for c in waits) >= s.go[place] - _SLACK:
            return self._counter(waits, sm, place)
        return "controller", sm, place

    def _controller(self, sm: int, place: int) -> _Where:
        s = self.engine.sms[sm]
        since = s.published[place] - self.engine.costs.publish
        self._explain(since, "controller", sm, place)
        if s.tasks[place].routed:  # the SM's last top-k, if that was what it waited for
            topk = max((k for k in range(place) if s.tasks[k].routes), default=-1)
            if topk >= 0 and s.signalled[topk] >= since - _SLACK:
                return "storer", sm, topk
        if place and s.published[place - 1] >= since - _SLACK:
            return "controller", sm, place - 1
        # it waited for room in the task ring
        return "storer", sm, place - self.engine.ring.entries

    def _consumer(self, sm: int, place: int) -> _Where:
        s = self.engine.sms[sm]
        if s.opened[place] < s.starved_until[place] <= self.at + _SLACK:
            self._explain(s.starved_until[place], "work", sm, place)
            return "producer", sm, place
        self._explain(s.opened[place], "work", sm, place)
        if s.tasks[place].tiles and s.opened[place] <= s.go[place] + _SLACK:
            return self._opening(sm, place)
        before = s.taken[place] - self.engine.costs.next_entry
        self._explain(before, "controller", sm, place)
        if s.published[place] >= before - _SLACK:
            return "controller", sm, place
        return "consumer", sm, place - 1

    def _producer(self, sm: int, place: int) -> _Where:
        s = self.engine.sms[sm]
        full = s.full_until[place]
        if 0.0 < full < self.at - _SLACK:
            self._explain(full, "stream", sm, place)
            return "consumer", sm, bisect_left(s.done, full - _SLACK)
        self._explain(s.stream[place], "stream", sm, place)
        if s.published[place] >= s.stream[place] - _SLACK:
            return "controller", sm, place
        return "producer", sm, place - 1

    def _aside(self, track: int, place: int) -> _Where:
        since, begins, _ = self.engine.aside[track - self.engine.work.n_sm][place]
        self._explain(begins, "aside", track, place)
        waits = self.engine.work.tracks[track][place].waits
        if waits and begins > since + _SLACK:
            return self._counter(waits, track, place)
        return "aside", track, place - 1
