"""A discrete-event model of one step: four roles an SM, one ring each, one memory that all SMs share.

An event is a moment at which something that SMs share changes hands: a producer issues copies (memory serves them in
the order of issue), a counter is complete, a claimer takes a ticket. What an SM does in between is computed ahead of
the clock, by `max` and `+`, as far as it does not depend on an event still to come.

Controller: publishes entries into a task ring, those of a routed phase once the SM's own top-k is stored, and opens
them in list order. Producer: streams ahead through a ring of slots with a bounded number outstanding. Consumers: take
slots in order once their entry is open. Storer: takes tiles in order, closes the entry and signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from mk.errors import MkError
from mk.model.geometry import SLOT_BYTES
from mk.schedule.costs import Costs
from mk.schedule.simulator.sm import SmState
from mk.schedule.simulator.work import Ring, Task, Work

_STREAM, _COUNTER, _CLAIM = 0, 1, 2
CLAIMABLE = ("attention", "moe_up", "moe_down")  # operations whose tiles are tickets under work stealing


class StandsStill(MkError):
    """A step in which everybody waits: some schedules do with one window and end with another."""


class Engine:
    """One step. After `run`, `sms` hold what every entry did when, `aside` the same of the tracks aside.

    beyond_us: what a hand-off from one SM to another takes beyond `costs.handoff`, None = all the same.
    """

    def __init__(
        self, work: Work, costs: Costs, ring: Ring, beyond_us: Sequence[Sequence[float]] | None = None
    ) -> None:
        n = work.n_sm
        self.work, self.costs, self.ring, self.beyond_us = work, costs, ring, beyond_us
        self.op = {name: costs.of(name) for name in {task.op for track in work.tracks for task in track}}
        self.op |= {queue.op: costs.of(queue.op) for queue in work.queues.values()}
        self.sms = [SmState(ring, track[::-1]) for track in work.tracks[:n]]
        self.aside: list[list[tuple[float, float, float]]] = [[] for _ in range(n)]  # (waits, begins, ends) by task
        self.slot_us = SLOT_BYTES / (costs.memory_at(ring.window * SLOT_BYTES / 1024) * 1e6)
        self.port_us = SLOT_BYTES / (costs.port_gb_s * 1e3)
        self.latency = costs.latency
        # lanes whose window looks back one batch further than the others'
        self.split = ring.window % ring.lanes
        self.memory_free = 0.0
        self.missing = list(work.signals)
        self.given = [0.0] * len(work.signals)  # when a counter's latest signal so far was stored,
        self.given_by = [(-1, -1)] * len(work.signals)  # and by which entry: (track, place)
        # when those who wait see it, a pair's own share of the hand-off apart
        self.reached: list[float | None] = [None] * len(work.signals)
        self.waiting: list[list[int]] = [[] for _ in work.signals]  # tracks
        self.events: list[tuple[float, int, int]] = []
        self.now = 0.0
        self.end = 0.0

    def run(self) -> float:
        """The time at which the last signal is stored. Raises MkError when a counter is never complete."""
        for sm in range(self.work.n_sm):
            self._advance(sm)
            self._advance_aside(sm)
        while self.events:
            self.now, kind, which = heappop(self.events)
            if kind == _STREAM:
                self._stream(self.sms[which])
                self._advance(which)
            elif kind == _COUNTER:
                self.reached[which] = self.now + self.costs.handoff + self._queued()
                for track in self.waiting[which]:
                    if track < self.work.n_sm:
                        self.sms[track].awaited = -1
                        self._advance(track)
                    else:
                        self._advance_aside(track - self.work.n_sm)
            else:
                self._claim(which)
        for sm, s in enumerate(self.sms):
            if not s.finished or len(self.aside[sm]) < len(self.work.tracks[self.work.n_sm + sm]):
                raise StandsStill(f"the simulated step stands still: SM {sm} waits for signals that never come")
        return self.end

    # ---- what SMs share ----
    def _queued(self) -> float:
        """What a small load or a poll waits behind the copies that stand before memory now."""
        return self.costs.queued * max(0.0, self.memory_free - self.now)

    def _signal(self, counter: int, at: float, track: int, place: int) -> None:
        self.end = max(self.end, at)
        if counter < 0:
            return
        if at >= self.given[counter]:
            self.given[counter], self.given_by[counter] = at, (track, place)
        self.missing[counter] -= 1
        if not self.missing[counter]:
            heappush(self.events, (self.given[counter], _COUNTER, counter))

    def _seen(self, waits: tuple[int, ...], track: int) -> float | None:
        """When a track sees all these counters reached; None while that is unknown: it will be woken."""
        unknown = [counter for counter in waits if self.reached[counter] is None]
        for counter in unknown:
            self.waiting[counter].append(track)
        if unknown:
            return None
        return max((self.seen_at(counter, track) for counter in waits), default=0.0)

    def seen_at(self, counter: int, track: int) -> float:
        """When a track sees a counter that was reached; 0 for one that was not."""
        reached = self.reached[counter]
        if reached is None or self.beyond_us is None:
            return reached or 0.0
        n = self.work.n_sm
        return max(self.given[counter], reached + self.beyond_us[self.given_by[counter][0] % n][track % n])

    # ---- an SM ----
    def _advance(self, sm: int) -> None:
        """All that SM `sm` can do until an event."""
        s = self.sms[sm]
        moved = True
        while moved:
            if s.todo:
                self._publish(s, sm)
            if s.awaited != len(s.go) < len(s.tasks):
                self._open(s, sm)
            moved = self._consume(s)
            if len(s.signalled) < len(s.go):
                moved |= self._store(s, sm)
        if not s.scheduled:
            self._wake_producer(s, sm)

    def _publish(self, s: SmState, sm: int) -> None:
        while s.todo:
            task, place = s.todo[-1], len(s.tasks)
            at = max(s.publisher_free, self._released(s, place - self.ring.entries))
            if task.routed:
                if s.routed_at is None:
                    return
                at = max(at, s.routed_at)
            if task.queue >= 0:
                if s.claimed_from < 0:
                    s.claimed_from = place
                if place - task.claim_ahead >= s.claimed_from:
                    at = max(at, self._released(s, place - task.claim_ahead))
                if at < float("inf") and not s.asked:
                    s.asked = True
                    heappush(self.events, (max(at, self.now), _CLAIM, sm))
                return
            if at == float("inf"):
                return
            self._put(s, s.todo.pop(), at)

    def _released(self, s: SmState, place: int) -> float:
        """When all roles are done with an entry; infinity while that is unknown."""
        if place < 0:
            return 0.0
        if place >= len(s.streamed) or place >= len(s.signalled):
            return float("inf")
        return max(s.streamed[place], s.done[place], s.signalled[place])

    def _put(self, s: SmState, task: Task, at: float) -> None:
        s.tasks.append(task)
        s.publisher_free = at + self.costs.publish
        s.published.append(s.publisher_free)
        if task.routes:
            s.routed_at = None

    def _claim(self, sm: int) -> None:
        """One ticket: an entry for its tile or, after the last one, the entry that signals for the whole phase."""
        s = self.sms[sm]
        claimer = s.todo[-1]
        queue = self.work.queues[claimer.queue]
        s.asked = False
        given = self.now + self.costs.claim
        waits = claimer.waits if len(s.tasks) == s.claimed_from else ()
        if queue.taken < len(queue.slots):
            slots = queue.slots[queue.taken]
            queue.taken += 1
            self._put(s, Task(queue.op, slots, 1, waits, -1, claimer.layer, claimer.ordinal, closes=False), given)
        else:
            s.todo.pop()
            s.claimed_from = -1
            self._put(s, Task(claimer.op, 0, 0, waits, claimer.signal, claimer.layer, claimer.ordinal), given)
        self._advance(sm)

    def _open(self, s: SmState, sm: int) -> None:
        while (place := len(s.go)) < len(s.tasks):
            waits, at = s.tasks[place].waits, 0.0
            if waits:
                seen = self._seen(waits, sm)
                if seen is None:
                    s.awaited = place
                    return
                at = seen
            s.go.append(max(at, s.published[place], s.go[-1] if place else 0.0))

    def _consume(self, s: SmState) -> bool:
        """The consumers, as far as slots were issued and the storer has room. Whether a tile or an entry was done."""
        moved, ring = False, self.ring
        while (place := len(s.done)) < len(s.tasks):
            task = s.tasks[place]
            op = self.op[task.op]
            if place == len(s.taken):
                taken = max(s.consumer_free, s.published[place]) + self.costs.next_entry
                opened = taken
                if task.tiles:
                    if place >= len(s.go):
                        return moved
                    opened = max(taken, s.go[place])
                s.taken.append(taken)
                s.opened.append(opened)
                s.ring_empty.append(0.0)
                s.starved_until.append(0.0)
                s.tile_full.append(0.0)
                s.consumer_free = opened + (op.open + self._queued() if op.open else 0.0)
                if s.slow_us and task.op in CLAIMABLE:
                    s.consumer_free += s.slow_us * task.tiles
                s.slots_done = s.tiles_done = 0
            at = s.consumer_free
            while s.tiles_done < task.tiles:
                until = task.slots * (s.tiles_done + 1) // task.tiles
                most = min(until - s.slots_done, s.issued - s.read)
                for read in range(s.read, s.read + most):
                    index = read % ring.slots
                    if s.landed[index] > at:
                        s.ring_empty[place] += s.landed[index] - at
                        s.starved_until[place] = at = s.landed[index]
                    at += op.slot
                    s.freed[index] = at
                s.read += most
                s.slots_done += most
                if s.slots_done < until or s.puts - ring.tiles >= s.takes:
                    s.consumer_free = at
                    return moved
                index = s.puts % ring.tiles
                if s.take_times[index] > at:
                    s.tile_full[place] += s.take_times[index] - at
                    at = s.take_times[index]
                s.put_times[index] = at
                s.puts += 1
                s.tiles_done += 1
                moved = True
            s.consumer_free = at
            s.done.append(at)
            moved = True
        return moved

    def _store(self, s: SmState, sm: int) -> bool:
        """The storer, as far as tiles were put. Whether it moved."""
        moved, ring, costs = False, self.ring, self.costs
        while (place := len(s.signalled)) < len(s.go):
            task = s.tasks[place]
            op = self.op[task.op]
            if place == len(s.storing):
                s.storer_free = max(s.storer_free + costs.next_store, s.go[place])
                s.storing.append(s.storer_free)
                s.tiles_stored = 0
            at = s.storer_free
            while s.tiles_stored < task.tiles and s.takes < s.puts:
                index = s.takes % ring.tiles
                at = max(at, s.put_times[index]) + op.tile
                s.take_times[index] = at
                s.takes += 1
                s.tiles_stored += 1
                moved = True
            s.storer_free = at
            if s.tiles_stored < task.tiles or place >= len(s.done):
                return moved
            s.storer_free = at = at + op.close * task.closes + op.row * self.work.rows
            if task.routes:
                s.routed_at = at
            s.signalled.append(at)
            self._signal(task.signal, at, sm, place)
            moved = True
        return moved

    def _advance_aside(self, sm: int) -> None:
        track, passed = self.work.n_sm + sm, self.aside[sm]
        tasks = self.work.tracks[track]
        while (place := len(passed)) < len(tasks):
            task = tasks[place]
            since = passed[-1][2] if passed else 0.0
            seen = self._seen(task.waits, track)
            if seen is None:
                return
            op = self.op[task.op]
            begins = max(since, seen)
            ends = begins + (op.open + self._queued() if op.open else 0.0) + task.parts * op.close
            passed.append((since, begins, ends))
            self._signal(task.signal, ends, track, place)

    # ---- the producer ----
    def _wake_producer(self, s: SmState, sm: int) -> None:
        """Schedules its next copies, unless they need an entry, or a slot, that nobody knows the time of."""
        at, ring = s.producer_free, self.ring
        if s.left < 0:
            if (place := len(s.streamed)) >= len(s.tasks if ring.run_ahead else s.go):
                return
            at = max(at, s.published[place] if ring.run_ahead else s.go[place], self.now)
            s.left, s.lane = s.tasks[place].slots, 0
            s.stream.append(at)
            s.ring_full.append(0.0)
            s.window.append(0.0)
            s.full_until.append(0.0)
        if s.left:
            s.group = group = min(s.left, (self.split if s.lane < self.split else ring.lanes) - s.lane)
            freed = landed = 0.0
            for issued in range(s.issued, s.issued + group):
                slot = s.freed[issued % ring.slots]
                if slot is None:
                    return
                freed = max(freed, slot)
            if s.issued + group > ring.window:
                landed = s.landed[(s.issued + group - 1 - ring.window) % ring.slots]
            if freed > at and freed > landed:
                s.ring_full[-1] += freed - at
                s.full_until[-1] = at = freed
            elif landed > at:
                s.window[-1] += landed - at
                at = landed
        s.scheduled = True
        heappush(self.events, (max(at, self.now), _STREAM, sm))

    def _stream(self, s: SmState) -> None:
        """Issues the copies that the event was for, or passes over an entry that streams nothing."""
        ring, now = self.ring, self.now
        s.scheduled = False
        if s.left:
            last, free, slots = s.last_landed, max(self.memory_free, now), ring.slots
            for issued in range(s.issued, s.issued + s.group):
                free += self.slot_us
                last = max(free + self.latency, last + self.port_us)
                s.landed[issued % slots], s.freed[issued % slots] = last, None
            self.memory_free, s.last_landed = free, last
            s.issued += s.group
            s.left -= s.group
            s.lane += s.group
            if s.lane == ring.lanes or not s.left:
                s.lane = 0
                s.producer_free = now + self.costs.issue
            else:
                s.producer_free = now
        else:
            s.producer_free = now
        if not s.left:
            s.left = -1
            s.streamed.append(s.producer_free)
            s.producer_free += self.costs.next_stream
