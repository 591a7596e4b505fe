"""Who sits where, and on which pages: the slots, the pool and the prefix cache of one engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mk.batching.policy import Policy
from mk.batching.prefix_cache import Hit, PrefixCache, extend_hashes
from mk.batching.request import Phase, Request
from mk.engines.protocol import PagedEngine
from mk.errors import MkError
from mk.kv import ABSENT, KINDS, OutOfPages, blocks_of, first_visible, kv_layers
from mk.model.geometry import PAGE


class Seats:
    """Slots of an engine, `Request` or None each, the pages behind them, and the cache of blocks that they share."""

    def __init__(self, engine: PagedEngine, policy: Policy) -> None:
        """Raises MkError for pools in which the longest context does not fit alone."""
        self.pages = engine.pages
        self.cache = PrefixCache(self.pages) if policy.cache else None
        self.slots: list[Request | None] = [None] * engine.rows
        self._engine, self._policy = engine, policy
        self._kinds = [kind for kind in KINDS if kv_layers(engine.geometry, kind)]
        for kind in self._kinds:
            need = self._most_pages(kind, engine.context)
            if need > self.pages.pages[kind]:
                raise MkError(
                    f"a context of {engine.context} tokens needs {need} {kind} pages, the pool has "
                    f"{self.pages.pages[kind]}",
                    hint="a larger server.kv_tokens, or a smaller server.context",
                )

    @property
    def taken(self) -> list[Request]:
        """Requests in slots, by arrival."""
        return sorted((r for r in self.slots if r is not None), key=lambda request: request.arrival)

    def pages_in_use(self, kind: str) -> int:
        """Pages that requests hold; those that only the cache holds can be had at any time."""
        return self.pages.pages[kind] - self._free(kind)

    # ---- one request ----

    def lookup(self, request: Request) -> Hit:
        """Blocks of a prompt, of which nothing has been computed, that need not be; its last token always is, for its
        logits."""
        begun = request.phase is Phase.PREEMPTED or request.computed > request.cached
        if self.cache is None or begun or request.params.prompt_logprobs is not None:
            return Hit()
        blocks = (len(request.prompt) - 1) // PAGE
        extend_hashes(request.hashes, request.prompt, blocks)
        return self.cache.match(request.hashes[:blocks])

    def fits(self, request: Request, hit: Hit) -> bool:
        """Whether the request can be taken to the end of its prompt, and one token further, without preempting."""
        for kind in self._kinds:
            shared = sum(self.pages.holders[kind][page] > 1 for page in hit.pages.get(kind, {}).values())
            if self._most_pages(kind, request.context + 1) - shared > self._free(kind):
                return False
        return True

    def seat(self, request: Request, hit: Hit) -> bool:
        """Give a request a free slot and the pages it begins, or goes on, with; False where there are too few pages."""
        slot = self.slots.index(None)
        try:
            if request.phase is Phase.PREEMPTED:
                self._bring_back(request, slot)
            else:
                self._begin_behind(request, slot, hit)
        except OutOfPages:
            self.pages.free(slot)
            return False
        request.phase = Phase.PREFILL if request.computed < len(request.prompt) else Phase.DECODE
        request.slot, self.slots[slot] = slot, request
        return True

    def look_again(self, request: Request) -> int:
        """Tokens of a seated request's prompt that others have computed since it was; it begins behind them."""
        hit = self.lookup(request)
        more = hit.blocks * PAGE - request.computed
        if more <= 0:
            return 0
        self.pages.free(request.slot)
        self._begin_behind(request, request.slot, hit)
        return more

    def _begin_behind(self, request: Request, slot: int, hit: Hit) -> None:
        """Share a hit's pages with an empty slot, whose request has that much computed then."""
        if hit.blocks and self.cache:
            self.pages.adopt(slot, hit.blocks, hit.pages)
            self.cache.touch(request.hashes[: hit.blocks])
        request.computed = request.cached = hit.blocks * PAGE

    def save(self, request: Request) -> None:
        """Copy what a request has computed to host memory, and give its slot and pages back."""
        if request.computed:
            for kind in self._kinds:
                window = self._engine.geometry.window_keys if kind == "sliding" else None
                blocks = np.arange(first_visible(request.computed + 1, window) // PAGE, blocks_of(request.computed))
                pages = self.pages.table[kind][request.slot, blocks]
                assert (pages != ABSENT).all()
                request.saved[kind] = (blocks, self._engine.copy_out(kind, pages.tolist()))
            request.phase = Phase.PREEMPTED
        else:
            request.phase = Phase.WAITING
        self.vacate(request)

    def vacate(self, request: Request) -> None:
        """Give a request's slot and pages back."""
        slot, request.slot = request.slot, -1
        self.slots[slot] = None
        self._engine.free(slot)

    def publish(self, request: Request, tokens: int) -> list[tuple[str, bytes]]:
        """Share the blocks that become full as the request's computed tokens grow to `tokens`."""
        if self.cache is None:
            return []
        first, published = request.computed // PAGE, []
        for block, block_hash in enumerate(self.filled(request, tokens), first):
            published += self.cache.publish(request.slot, block, block_hash)
        return published

    def filled(self, request: Request, tokens: int) -> list[bytes]:
        """Hashes of the blocks that become full as the request's computed tokens grow to `tokens`, of those that are
        shared."""
        if self.cache is None:
            return []
        if not self._policy.cache_generated:
            tokens = min(tokens, len(request.prompt))
        first, end = request.computed // PAGE, tokens // PAGE
        if first < end:
            extend_hashes(request.hashes, request.history(), end)
        return request.hashes[first:end]

    # ---- a batch ----

    def gather(self, decoding: Sequence[Request]) -> int:
        """Move requests into the first slots, as many as the smallest built batch that holds them has; its size."""
        rows = next(size for size in self._engine.sizes if size >= len(decoding))
        taken = {request.slot for request in decoding}
        room = iter([slot for slot in range(rows) if slot not in taken])
        for request in decoding:
            if request.slot >= rows:
                self._swap(request.slot, next(room))
        return rows

    def held(self, rows: int) -> list[int]:
        """Keys of the longest contexts that the pages of the first slots cover."""
        return [self.pages.held(slot) for slot in range(rows)]

    def hold_more(self, batch: Sequence[Request]) -> bool:
        """Pages for requests that have less than half of their share beforehand; whether any were had."""
        more = False
        for request in batch:
            last = len(request.prompt) + request.params.max_tokens - 1  # the last token is never put in the cache
            if self.pages.held(request.slot) >= min(request.context + self._policy.held // 2, last):
                continue
            try:
                self.pages.release_window(request.slot, request.computed)
                self.pages.reserve(request.slot, min(request.context + self._policy.held - 1, last), request.computed)
            except OutOfPages:
                continue
            more = True
        return more

    def _swap(self, slot: int, other: int) -> None:
        """Exchange what two slots hold; one that is in prefill may have to make way."""
        self.pages.swap(slot, other)
        self.slots[slot], self.slots[other] = self.slots[other], self.slots[slot]
        for place in (slot, other):
            if (request := self.slots[place]) is not None:
                request.slot = place

    def _bring_back(self, request: Request, slot: int) -> None:
        self.pages.reserve(slot, request.computed, since=request.computed)
        for kind, (blocks, values) in request.saved.items():
            self._engine.copy_in(kind, self.pages.table[kind][slot, blocks].tolist(), values)
        request.saved = {}

    def _free(self, kind: str) -> int:
        """Pages that can be had: free ones, and those that only the cache holds."""
        return len(self.pages.free_pages[kind]) + (self.cache.evictable(kind) if self.cache else 0)

    def _most_pages(self, kind: str, tokens: int) -> int:
        """Pages that a request of `tokens` tokens holds at most, a chunk in flight included."""
        if kind == "full":
            return blocks_of(tokens)
        straddled = 2  # both the window and what is in flight may begin inside a block
        in_flight = max(self._policy.chunk, self._policy.held)
        window = blocks_of(self._engine.geometry.window_keys) + blocks_of(in_flight) + straddled
        return min(blocks_of(tokens), window)
