"""Paged KV memory: pools of 64-token pages, the tables that map a sequence's blocks to them, and their allocation.

Full and sliding layers have their own pools and tables, because a sliding layer gives back the pages that fell out of
its window. A page holds 64 tokens of every layer and KV head of its kind, so one table serves all layers of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mk.errors import MkError
from mk.model.geometry import PAGE, Geometry

KINDS = ("full", "sliding")
ABSENT = -1  # a block that has no page: never reserved, or released

Blocks = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


def kv_layers(geometry: Geometry, kind: str) -> tuple[int, ...]:
    """Layers of one kind; a layer's index in this tuple is its index inside a page."""
    return geometry.full_layers if kind == "full" else geometry.sliding_layers


def blocks_of(tokens: int) -> int:
    """Pages that `tokens` tokens fill, the last one perhaps in part."""
    return -(-tokens // PAGE)


def first_visible(keys: int, window: int | None) -> int:
    """First key that the query of the last of `keys` tokens sees; `window` None = full attention."""
    return 0 if window is None else max(0, keys - window)


def pages_of(geometry: Geometry, contexts: Sequence[int]) -> dict[str, int]:
    """Pages of each kind for sequences of so many tokens: of a window that straddles blocks one more than it fills."""
    full = [blocks_of(keys) for keys in contexts]
    window = blocks_of(geometry.window_keys) + 1
    sliding = sum(min(blocks, window) for blocks in full) if geometry.sliding_layers else 0
    return {"full": sum(full), "sliding": sliding}


def pages_for_contexts(
    geometry: Geometry, slots: int, keys: int, chunk: int = 0, paged_chunk: bool = False
) -> dict[str, int]:
    """Pages of each kind for `slots` sequences of `keys` tokens, prompts coming in chunks of at most `chunk` tokens.

    While a chunk is computed, its own pages stand beside those of the window before it: of the chunk or of its last
    window, whichever is less, and for one slot at a time; or, `paged_chunk`, of all of a chunk that any number of slots
    may share.
    """
    one = pages_of(geometry, [keys])
    full, window = one["full"], one["sliding"]
    in_flight = min(window, blocks_of(chunk) + 1) if chunk else 0
    sliding = slots * window + in_flight
    if paged_chunk and window:
        straddled = slots  # the piece of every slot may begin and end inside a block
        sliding = min(slots * full, slots * window + blocks_of(chunk) + straddled)
    return {"full": slots * full, "sliding": sliding}


class PageTable:
    """Physical page of every block of every batch slot: `table[kind]` is int32 [slots, max_blocks].

    Block i holds tokens 64 i .. 64 i + 63 of the sequence, on either kind: a released block leaves a hole (`ABSENT`).
    """

    def __init__(self, slots: int, max_blocks: int) -> None:
        self.slots = slots
        self.max_blocks = max_blocks
        self.table: dict[str, Blocks] = {kind: np.full((slots, max_blocks), ABSENT, np.int32) for kind in KINDS}

    def __getitem__(self, kind: str) -> Blocks:
        return self.table[kind]

    def rows(self, slots: Sequence[int]) -> dict[str, Blocks]:
        """The table of a batch: row i of the result is a copy of slot `slots[i]`."""
        return {kind: blocks[list(slots)] for kind, blocks in self.table.items()}


class OutOfPages(MkError):
    """A reservation that the free pages do not cover."""


@dataclass
class PageAllocator:
    """Hands pages of both kinds to the slots of a `PageTable`. A page may have several holders: slots, and a cache.

    pages: pages of each pool, by kind. seed: free pages are handed out in a seeded random order, so that nothing may
    lean on neighbouring blocks having neighbouring pages; None = ascending. evict(kind, n): asked to let go of n pages
    before a reservation fails.
    """

    geometry: Geometry
    pages: Mapping[str, int]
    slots: int
    max_blocks: int
    seed: int | None = None
    evict: Callable[[str, int], None] | None = None
    table: PageTable = field(init=False)
    free_pages: dict[str, list[int]] = field(init=False)
    holders: dict[str, Blocks] = field(init=False)  # how many hold each page

    def __post_init__(self) -> None:
        self.table = PageTable(self.slots, self.max_blocks)
        self.free_pages = {}
        for kind in KINDS:
            order = np.arange(self.pages[kind])
            if self.seed is not None:
                np.random.default_rng((self.seed, KINDS.index(kind))).shuffle(order)
            self.free_pages[kind] = order[::-1].tolist()  # popped from the end
        self.holders = {kind: np.zeros(self.pages[kind], np.int32) for kind in KINDS}
        self._end = {kind: [0] * self.slots for kind in KINDS}  # blocks that were ever given to the slot

    def reserve(self, slot: int, keys: int, since: int | None = None) -> None:
        """Room for the first `keys` tokens of a slot's sequence.

        A sliding layer gets no page for blocks that no query at position `since` (by default the last token) or later
        can see. All or nothing: raises OutOfPages naming the slot, what it needs and what is free, with the table
        unchanged.
        """
        end = blocks_of(keys)
        if end > self.max_blocks:
            raise MkError(f"slot {slot}: {keys} keys need {end} blocks, its page table has {self.max_blocks}")
        wanted: dict[str, range] = {}
        for kind in KINDS:
            if not kv_layers(self.geometry, kind):
                continue
            window = self.geometry.window_keys if kind == "sliding" else None
            seen = first_visible(keys if since is None else since + 1, window) // PAGE
            wanted[kind] = range(max(self._end[kind][slot], seen), end)
            if len(wanted[kind]) > len(self.free_pages[kind]) and self.evict is not None:
                self.evict(kind, len(wanted[kind]) - len(self.free_pages[kind]))
            free = len(self.free_pages[kind])
            if len(wanted[kind]) > free:
                raise OutOfPages(
                    f"slot {slot}: {keys} keys need {len(wanted[kind])} more {kind} pages, {free} are free",
                    hint="finish or shorten a sequence, or give the KV cache more pages",
                )
        for kind, blocks in wanted.items():
            for block in blocks:
                page = self.free_pages[kind].pop()
                self.table[kind][slot, block] = page
                self.holders[kind][page] = 1
            self._end[kind][slot] = max(self._end[kind][slot], end)

    def release_window(self, slot: int, keys: int, window: int | None = None) -> int:
        """Give back the sliding pages of a slot of `keys` tokens that its next query no longer sees; returns how many.

        window: keys visible including the query's own, the geometry's by default.
        """
        visible = first_visible(keys + 1, self.geometry.window_keys if window is None else window)
        return self._release(slot, "sliding", visible // PAGE)

    def advance(self, keys: Sequence[int]) -> None:
        """Room for one decode step: slot i is about to hold keys[i] tokens, 0 = inactive.

        Window pages that the step no longer sees are given back first. Raises MkError as `reserve` does.
        """
        for slot, length in enumerate(keys):
            if length:
                self.release_window(slot, length - 1)
                self.reserve(slot, length)

    def held(self, slot: int) -> int:
        """Keys of the longest context that the slot's pages cover."""
        return PAGE * min(self._end[kind][slot] for kind in KINDS if kv_layers(self.geometry, kind))

    def adopt(self, slot: int, blocks: int, pages: Mapping[str, Mapping[int, int]]) -> None:
        """Begin an empty slot with `blocks` blocks that others hold too: kind -> block -> page.

        They are full, so the slot never writes to them. A sliding block that no later query sees may be left out.
        """
        for kind, shared in pages.items():
            for block, page in shared.items():
                self.hold(kind, page)
                self.table[kind][slot, block] = page
        for kind in KINDS:
            self._end[kind][slot] = blocks

    def hold(self, kind: str, page: int) -> None:
        """One holder more of a page that somebody holds."""
        self.holders[kind][page] += 1

    def drop(self, kind: str, page: int) -> bool:
        """One holder less; whether the page is free now."""
        self.holders[kind][page] -= 1
        if self.holders[kind][page]:
            return False
        self.free_pages[kind].append(page)
        return True

    def swap(self, slot: int, other: int) -> None:
        """Exchange the sequences of two slots, either of which may be empty. No page moves."""
        for kind in KINDS:
            table, end = self.table[kind], self._end[kind]
            table[[slot, other]] = table[[other, slot]]
            end[slot], end[other] = end[other], end[slot]

    def free(self, slot: int) -> None:
        """Give back every page of a slot; its next sequence starts empty."""
        for kind in KINDS:
            self._release(slot, kind, self.max_blocks)
            self._end[kind][slot] = 0

    def _release(self, slot: int, kind: str, blocks: int) -> int:
        held = self.table[kind][slot, :blocks]
        pages = held[held != ABSENT].tolist()
        for page in pages:
            self.drop(kind, page)
        held[:] = ABSENT
        return len(pages)


class KVCache:
    """The pages themselves: `pools[kind]` is float32 [pages, layers of the kind, kv_heads, 2 (K, V), 64, head_dim].

    Values of numerics=kernel are bf16 numbers in float32. Unused memory is NaN, so a key that is read without having
    been written shows.
    """

    def __init__(self, geometry: Geometry, pages_full: int, pages_sliding: int) -> None:
        self.geometry = geometry
        self.pages = {"full": pages_full, "sliding": pages_sliding}
        self.index = {layer: i for kind in KINDS for i, layer in enumerate(kv_layers(geometry, kind))}
        heads, dim = geometry.kv_heads, geometry.head_dim
        self.pools: dict[str, Floats] = {
            kind: np.full((self.pages[kind], len(kv_layers(geometry, kind)), heads, 2, PAGE, dim), np.nan, np.float32)
            for kind in KINDS
        }

    @classmethod
    def for_contexts(
        cls, geometry: Geometry, slots: int, keys: int, chunk: int = 0, paged_chunk: bool = False
    ) -> KVCache:
        """The pages that `pages_for_contexts` counts."""
        pages = pages_for_contexts(geometry, slots, keys, chunk, paged_chunk)
        return cls(geometry, pages["full"], pages["sliding"])

    def allocator(self, slots: int, max_blocks: int, seed: int | None = None) -> PageAllocator:
        """An allocator of all of these pages."""
        return PageAllocator(self.geometry, self.pages, slots, max_blocks, seed)

    def write(self, table: PageTable, slot: int, layer: int, start: int, k: npt.ArrayLike, v: npt.ArrayLike) -> None:
        """Store K and V [n, kv_heads, head_dim] of tokens start .. start + n - 1 of a slot.

        On a sliding layer tokens without a page are dropped: none is reserved for what no later query sees. On a full
        layer that is an MkError.
        """
        kind = self.geometry.layer_kinds[layer]
        blocks, pool, index = table[kind][slot], self.pools[kind], self.index[layer]
        values = np.stack([np.asarray(k, np.float32), np.asarray(v, np.float32)], axis=2)  # [n, heads, 2, dim]
        end = start + len(values)
        for block in range(start // PAGE, blocks_of(end)):
            page = int(blocks[block]) if block < len(blocks) else ABSENT
            if page == ABSENT:
                if kind == "sliding" and block < len(blocks):
                    continue
                raise MkError(f"slot {slot}: block {block} of full layer {layer} has no page", hint="reserve first")
            lo, hi = max(start, block * PAGE), min(end, (block + 1) * PAGE)
            part = values[lo - start : hi - start].transpose(1, 2, 0, 3)
            pool[page, index, :, :, lo - block * PAGE : hi - block * PAGE] = part

    def read(self, blocks: Blocks, layer: int, head: int, lo: int, hi: int) -> tuple[Floats, Floats]:
        """K and V of keys lo .. hi - 1 of one KV head, each [hi - lo, head_dim]; `blocks` is the row's table [blocks].

        Rows outside are left out, not masked: unused memory may hold anything.
        """
        pool = self.pools[self.geometry.layer_kinds[layer]]
        first = lo // PAGE
        pages = blocks[first : blocks_of(hi)]
        if (pages == ABSENT).any():
            block = first + int(np.argmax(pages == ABSENT))
            raise MkError(f"layer {layer}: block {block} of the context has no page", hint="reserve before the step")
        index, dim = self.index[layer], self.geometry.head_dim
        rows = slice(lo - first * PAGE, hi - first * PAGE)
        k = pool[pages, index, head, 0].reshape(-1, dim)[rows]
        v = pool[pages, index, head, 1].reshape(-1, dim)[rows]
        return k, v
