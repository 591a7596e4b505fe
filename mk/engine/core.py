"""The scheduler: which request is computed when, in which slot, and on which pages.

One `tick` is one chunk of a prompt, or a run of decode steps. The engine's loop owns a run: it launches steps by itself
and is parked only for what cannot be done while they follow one another, which is to admit, to retire and to change the
batch. Nothing here depends on time, and nothing that a request is told depends on its neighbours: the engine computes
rows independently of each other, of how a prompt is cut and of where pages lie; a preempted request's pages are copied
to host memory and back, never recomputed; and blocks that requests share hold the bits that each would have computed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mk.decode_loop import LoopStep, Parked, Run
from mk.decode_loop import finish as finish_run
from mk.engine.logits import logprobs_of, needs_logits, pick
from mk.engine.prefix_cache import Hit, PrefixCache, extend_hashes
from mk.engine.request import GREEDY, Delivery, Phase, Request, Sampled
from mk.engines import PagedEngine
from mk.errors import MkError
from mk.interpreter import Status, StepOutputs
from mk.kv import ABSENT, KINDS, OutOfPages, blocks_of, first_visible, kv_layers
from mk.model.geometry import PAGE
from mk.sampling import NO_TOKEN


@dataclass(frozen=True, slots=True)
class Policy:
    """How prompts and decode steps take turns, and what is shared.

    chunk: prompt tokens computed at a time. prefill: "pause" computes a prompt to its end, "interleave" runs
    `steps_between` decode steps after each chunk. cache, cache_generated: whether full blocks of prompts, and those
    with generated tokens, are kept for later requests. deliver: tokens that are delivered at a time. held: decode steps
    that a request has pages for beforehand.
    """

    chunk: int
    prefill: str
    steps_between: int
    cache: bool
    cache_generated: bool
    deliver: int
    held: int


@dataclass(slots=True)
class Totals:
    """What has happened so far."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of them, how many the prefix cache had
    generated_tokens: int = 0
    steps: Counter[int] = field(default_factory=Counter)  # of decode, by batch size
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by reason


class Core:
    """Continuous batching over one engine. Not thread-safe: `mk/engine/worker.py` owns it."""

    def __init__(self, engine: PagedEngine, eos: Sequence[int], policy: Policy) -> None:
        """eos: the model's end tokens. Raises MkError for pools in which the longest context does not fit alone."""
        self.engine, self.policy, self.eos = engine, policy, frozenset(eos)
        self.pages = engine.pages
        self.cache = PrefixCache(self.pages) if policy.cache else None
        self.slots: list[Request | None] = [None] * engine.rows
        self.totals = Totals()
        # called between the steps of a run: takes in what has come meanwhile, and says whether the run is to end
        self.attend: Callable[[], bool] = lambda: False
        self._batch: dict[int, Request] = {}  # of a run under way, by slot
        self._leaving: list[Request] = []  # cancelled ones of them
        self._arrived = False  # whether anybody has been queued since a run last looked
        self._queue: list[tuple[int, Request]] = []  # by arrival; new ones and preempted ones
        self._arrivals = 0
        self._steps_since_chunk = 0
        for kind in self._kinds():
            need = self._most_pages(kind, engine.context)
            if need > self.pages.pages[kind]:
                raise MkError(
                    f"a context of {engine.context} tokens needs {need} {kind} pages, the pool has "
                    f"{self.pages.pages[kind]}",
                    hint="a larger server.kv_tokens, or a smaller server.context",
                )

    # ---- what callers see ----

    @property
    def running(self) -> list[Request]:
        """Requests in slots, by arrival."""
        return sorted((r for r in self.slots if r is not None), key=lambda request: request.arrival)

    @property
    def waiting(self) -> list[Request]:
        return [request for _, request in sorted(self._queue, key=lambda entry: entry[0])]

    @property
    def busy(self) -> bool:
        return bool(self._queue) or any(request is not None for request in self.slots)

    def pages_in_use(self, kind: str) -> int:
        """Pages that requests hold; those that only the cache holds can be had at any time."""
        cached = self.cache.evictable(kind) if self.cache else 0
        return self.pages.pages[kind] - len(self.pages.free_pages[kind]) - cached

    def submit(self, request: Request) -> None:
        """Queue a request. Raises MkError for one that cannot be served, whatever else is running."""
        vocab, context = self.engine.geometry.vocab, self.engine.context
        if not len(request.prompt):
            raise MkError("the prompt has no tokens")
        if min(request.prompt) < 0 or max(request.prompt) >= vocab:
            raise MkError(f"a token of the prompt is outside 0..{vocab - 1}")
        # the last token is decoded, but never put in the cache
        need = len(request.prompt) + request.params.max_tokens - 1
        if request.params.max_tokens < 1 or need > context:
            raise MkError(f"{len(request.prompt)} tokens and {request.params.max_tokens} new ones exceed {context}")
        request.arrival = self._arrivals
        self._arrivals += 1
        self._arrived = True
        heapq.heappush(self._queue, (request.arrival, request))

    def refuse(self, request: Request, why: str) -> None:
        """Tell a request that was never queued that it will not be served."""
        self._finish(request, "error", why)

    def cancel(self, request: Request) -> None:
        """End a request, wherever it stands: one of a run under way when that is parked, any other now."""
        if self._batch.get(request.slot) is request:
            self._leaving.append(request)
        elif request.phase is not Phase.FINISHED:
            self._finish(request, "cancelled")

    def fail_all(self, message: str) -> None:
        """End everything with an error, and forget the cache: the engine's memory can no longer be trusted."""
        for request in [*self.running, *self.waiting]:
            self._finish(request, "error", message)
        if self.cache:
            self.cache.clear()

    def tick(self) -> bool:
        """One chunk or one run of steps; False if there is nothing to do."""
        self._admit()
        running = self.running
        prefilling = [r for r in running if r.phase is Phase.PREFILL]
        decoding = [r for r in running if r.phase is Phase.DECODE]
        pause = self.policy.prefill == "pause"
        if prefilling and (pause or not decoding or self._steps_since_chunk >= self.policy.steps_between):
            self._steps_since_chunk = 0
            self._prefill(prefilling[0])
        elif decoding:
            self._decode(decoding, self.policy.steps_between - self._steps_since_chunk if prefilling else None)
        return bool(running)

    # ---- admission and preemption ----

    def _kinds(self) -> list[str]:
        return [kind for kind in KINDS if kv_layers(self.engine.geometry, kind)]

    def _most_pages(self, kind: str, tokens: int) -> int:
        """Pages that a request of `tokens` tokens holds at most, a chunk in flight included."""
        if kind == "full":
            return blocks_of(tokens)
        straddled = 2  # both the window and what is in flight may begin inside a block
        in_flight = max(self.policy.chunk, self.policy.held)
        window = blocks_of(self.engine.geometry.window_keys) + blocks_of(in_flight) + straddled
        return min(blocks_of(tokens), window)

    def _admit(self) -> None:
        while self._queue and None in self.slots:
            request = self._queue[0][1]
            hit = self._lookup(request)
            alone = all(slot is None for slot in self.slots)
            if not alone and not self._fits(request, hit):
                return  # later ones do not overtake it
            request.slot = self.slots.index(None)
            try:
                self._seat(request, hit)
            except OutOfPages:
                self.pages.free(request.slot)
                request.slot = -1
                return
            heapq.heappop(self._queue)
            self.slots[request.slot] = request

    def _lookup(self, request: Request) -> Hit:
        """Blocks of a new request's prompt that need not be computed; its last token always is, for its logits."""
        if self.cache is None or request.phase is not Phase.WAITING or request.params.prompt_logprobs is not None:
            return Hit()
        blocks = (len(request.prompt) - 1) // PAGE
        extend_hashes(request.hashes, request.prompt, blocks)
        return self.cache.match(request.hashes[:blocks])

    def _fits(self, request: Request, hit: Hit) -> bool:
        """Whether the request can be taken to the end of its prompt, and one token further, without preempting."""
        for kind in self._kinds():
            shared = sum(self.pages.holders[kind][page] > 1 for page in hit.pages.get(kind, {}).values())
            evictable = self.cache.evictable(kind) if self.cache else 0
            room = len(self.pages.free_pages[kind]) + evictable
            if self._most_pages(kind, request.context + 1) - shared > room:
                return False
        return True

    def _seat(self, request: Request, hit: Hit) -> None:
        """Give a request that has a slot the pages it begins, or goes on, with."""
        slot = request.slot
        if request.phase is Phase.PREEMPTED:
            self.pages.reserve(slot, request.computed, since=request.computed)
            for kind, (blocks, values) in request.saved.items():
                self.engine.copy_in(kind, self.pages.table[kind][slot, blocks].tolist(), values)
            request.saved = {}
            request.phase = Phase.PREFILL if request.computed < len(request.prompt) else Phase.DECODE
            return
        if hit.blocks and self.cache:
            self.pages.adopt(slot, hit.blocks, hit.pages)
            self.cache.touch(request.hashes[: hit.blocks])
        request.phase = Phase.PREFILL
        request.computed = request.cached = hit.blocks * PAGE
        request.due.cached_tokens = request.cached
        self.totals.prompt_tokens += len(request.prompt)
        self.totals.cached_tokens += request.cached

    def _preempt(self, request: Request) -> None:
        """Copy a request's pages to host memory and put it back into the queue, where its arrival places it."""
        slot = request.slot
        if request.computed:
            for kind in self._kinds():
                window = self.engine.geometry.window_keys if kind == "sliding" else None
                blocks = np.arange(first_visible(request.computed + 1, window) // PAGE, blocks_of(request.computed))
                pages = self.pages.table[kind][slot, blocks]
                assert (pages != ABSENT).all()
                request.saved[kind] = (blocks, self.engine.copy_out(kind, pages.tolist()))
            request.phase = Phase.PREEMPTED
        else:
            request.phase = Phase.WAITING
        self._vacate(request)
        heapq.heappush(self._queue, (request.arrival, request))
        self.totals.preemptions += 1

    def _vacate(self, request: Request) -> None:
        self.engine.free(request.slot)
        self.slots[request.slot] = None
        request.slot = -1

    def _reserve(self, request: Request, keys: int, since: int | None = None) -> bool:
        """Room for a request's next tokens, at the expense of later ones; False if it had to give way itself."""
        while True:
            try:
                self.pages.release_window(request.slot, request.computed)
                self.pages.reserve(request.slot, keys, since)
                return True
            except OutOfPages:
                last = self.running[-1]
                if last is request and len(self.running) == 1:
                    raise
                self._preempt(last)
                if last is request:
                    return False

    # ---- prompts ----

    def _prefill(self, request: Request) -> None:
        """Compute the next chunk of a prompt, and the first token of the answer with the last one."""
        lo, hi = request.computed, min(request.computed + self.policy.chunk, len(request.prompt))
        if not self._reserve(request, hi, since=lo):
            return
        # before the engine gives back what leaves the window; nobody can match them before the chunk is computed
        published = self._publish(request, hi)
        every = request.params.prompt_logprobs is not None
        try:
            logits = self.engine.prefill(request.slot, request.prompt[lo:hi], lo, every)
        except MkError as error:
            if self.cache:
                self.cache.retract(published)
            self._finish(request, "error", str(error))
            return
        request.computed = hi
        if every:
            self._note_prompt(request, lo, logits)
            logits = logits[-1]
        if hi == len(request.prompt):
            request.phase = Phase.DECODE
            self._take(request, pick(logits, request, self._ends(request)), logits)

    def _note_prompt(self, request: Request, lo: int, logits: np.ndarray) -> None:
        """Logprobs of the prompt tokens after positions lo..; the first token of all has none."""
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)
        count = request.params.prompt_logprobs or 0
        following = request.prompt[lo + 1 : lo + 1 + len(logits)]
        request.prompt_logprobs += [
            logprobs_of(row, token, count) for row, token in zip(logits, following, strict=False)
        ]

    def _publish(self, request: Request, tokens: int) -> list[tuple[str, bytes]]:
        """Share the blocks that become full as the request's computed tokens grow to `tokens`."""
        if self.cache is None:
            return []
        if not self.policy.cache_generated:
            tokens = min(tokens, len(request.prompt))
        first, end = request.computed // PAGE, tokens // PAGE
        if first >= end:
            return []
        extend_hashes(request.hashes, request.history(), end)
        published = []
        for block in range(first, end):
            published += self.cache.publish(request.slot, block, request.hashes[block])
        return published

    # ---- steps ----

    def _decode(self, requests: Sequence[Request], steps: int | None) -> None:
        """A run of all requests that have the pages for it, of at most `steps`; of one where a token is picked here."""
        for request in requests:
            if request.phase is Phase.DECODE:  # not preempted for an earlier one
                self._reserve(request, request.context)
        decoding = [request for request in requests if request.phase is Phase.DECODE]
        if not decoding:
            return
        rows = self._gather(decoding)
        batch = {request.slot: request for request in decoding}
        tokens, keys, sampling = [0] * rows, [0] * rows, [GREEDY] * rows
        on_host = {slot for slot, request in batch.items() if needs_logits(request, self._ends(request))}
        for slot, request in batch.items():
            tokens[slot], keys[slot] = request.tokens[-1], request.context
            if slot not in on_host:
                sampling[slot] = request.params.sampling
        if on_host:
            self._account(batch, self.engine.step(tokens, keys, sampling), on_host)
            return
        self._hold_more(decoding)
        budgets, ends = [0] * rows, [frozenset[int]()] * rows
        for slot, request in batch.items():
            budgets[slot] = request.params.max_tokens - len(request.tokens)
            ends[slot] = self._ends(request)
        self._run(batch, Run(tokens, keys, sampling, self._held(rows), budgets, ends, steps))

    def _run(self, batch: dict[int, Request], run: Run) -> None:
        """A run from its start to its park.

        A request that ends gives its pages back at once; nobody gets any before the steps that write to them are over.
        """
        loop, parking = self.engine.loop, False
        loop.resume(run)
        self._batch, self._arrived = batch, False
        try:
            while steps := loop.read():
                for step in steps:
                    self._account(batch, step)
                parking = self.attend() or self._wants_park() or parking
                if parking:
                    loop.park()
                elif self._hold_more(list(batch.values())):
                    loop.grant(self._held(len(run.keys)))
        finally:
            self._batch = {}
            leaving, self._leaving = self._leaving, []
            if loop.parked is Parked.RUNNING:  # something else than the loop has failed
                loop.park()
                finish_run(loop)
        for request in leaving:
            self.cancel(request)

    def _wants_park(self) -> bool:
        """Whether there is something to do that the run under way is in the way of."""
        if self._leaving or any(request.phase is Phase.FINISHED for request in self._batch.values()):
            return True
        arrived, self._arrived = self._arrived, False
        if not (arrived and self._queue and None in self.slots):
            return False
        first = self._queue[0][1]
        return self._fits(first, self._lookup(first))

    def _held(self, rows: int) -> list[int]:
        return [self.pages.held(slot) for slot in range(rows)]

    def _hold_more(self, batch: Sequence[Request]) -> bool:
        """Pages for requests that have less than half of their share beforehand; whether any were had.

        Where there are none, the run ends when it must.
        """
        more = False
        for request in batch:
            last = len(request.prompt) + request.params.max_tokens - 1  # the last token is never put in the cache
            if self.pages.held(request.slot) >= min(request.context + self.policy.held // 2, last):
                continue
            try:
                self.pages.release_window(request.slot, request.computed)
                self.pages.reserve(request.slot, min(request.context + self.policy.held - 1, last), request.computed)
            except OutOfPages:
                continue
            more = True
        return more

    def _gather(self, decoding: Sequence[Request]) -> int:
        """Move requests into the first slots, as many as the smallest built batch that holds them has; its size."""
        rows = next(size for size in self.engine.sizes if size >= len(decoding))
        taken = {request.slot for request in decoding}
        room = iter([slot for slot in range(rows) if slot not in taken])
        for request in decoding:
            if request.slot >= rows:
                self._swap(request.slot, next(room))
        return rows

    def _swap(self, slot: int, other: int) -> None:
        """Exchange what two slots hold; one that is in prefill may have to make way."""
        self.pages.swap(slot, other)
        self.slots[slot], self.slots[other] = self.slots[other], self.slots[slot]
        for place in (slot, other):
            if (request := self.slots[place]) is not None:
                request.slot = place

    def _account(
        self, batch: Mapping[int, Request], out: StepOutputs | LoopStep, on_host: Collection[int] = ()
    ) -> None:
        """What a step means for its requests. on_host: slots whose token is picked here."""
        self.totals.steps[len(out.tokens)] += 1
        self._steps_since_chunk += 1
        for slot, request in sorted(batch.items()):
            if request.phase is Phase.FINISHED:
                continue
            if out.status[slot]:
                status = Status(int(out.status[slot])).name
                self._finish(request, "error", f"the model's numbers are not finite ({status})")
                continue
            self._publish(request, request.context)
            request.computed = request.context
            if slot in on_host:
                assert isinstance(out, StepOutputs)
                self._take(request, pick(out.logits[slot], request, self._ends(request)), out.logits[slot])
            else:
                self._take(request, int(out.tokens[slot]), None)

    # ---- results ----

    def _ends(self, request: Request) -> frozenset[int]:
        own = frozenset() if request.params.ignore_eos else self.eos
        return own | request.params.stop_token_ids

    def _take(self, request: Request, token: int, logits: np.ndarray | None) -> None:
        """A request's next token, and what it says about the end."""
        if token == NO_TOKEN:
            self._finish(request, "error", "no token may come next, or the model's numbers are not finite")
            return
        logprobs = None
        if request.params.logprobs is not None:
            assert logits is not None
            logprobs = logprobs_of(logits, token, request.params.logprobs)
        request.tokens.append(token)
        request.due.tokens.append(Sampled(token, logprobs))
        self.totals.generated_tokens += 1
        for constraint in request.params.constraints:
            constraint.accept(token)
        if token in self._ends(request):
            self._finish(request, "stop")
        elif len(request.tokens) >= request.params.max_tokens:
            self._finish(request, "length")
        elif len(request.due.tokens) >= self.policy.deliver:
            self._deliver(request)

    def _finish(self, request: Request, why: str, error: str | None = None) -> None:
        if request.slot >= 0:
            if self.cache:
                self.cache.touch(request.hashes)
            self._vacate(request)
        else:
            self._queue = [entry for entry in self._queue if entry[1] is not request]
            heapq.heapify(self._queue)
        request.phase, request.saved = Phase.FINISHED, {}
        request.due.finish, request.due.error = why, error
        self.totals.finished[why] += 1
        self._deliver(request)

    def _deliver(self, request: Request) -> None:
        if request.prompt_logprobs and request.computed >= len(request.prompt):
            request.due.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
        due, request.due = request.due, Delivery(cached_tokens=request.cached)
        request.sink(due)
