"""Full blocks that later requests may share, found by the hash of all tokens up to their end.

A block's hash chains its own 64 tokens to the hash of the block before it. Entries of the two kinds of pages live
apart: a hit on n blocks needs the full pages of all of them, but the sliding pages of the last window only. The cache
is one holder of a page among others, and lets go, least recently used first, of pages that nobody else holds.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mk.kv import ABSENT, KINDS, PageAllocator, first_visible, kv_layers
from mk.model.geometry import PAGE

_ROOT = b""


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], blocks: int) -> None:
    """Append the hashes of a sequence's blocks up to `blocks`; tokens: all of its tokens."""
    for block in range(len(hashes), blocks):
        own = np.asarray(tokens[block * PAGE : (block + 1) * PAGE], np.int64).tobytes()
        hashes.append(hashlib.sha256((hashes[-1] if hashes else _ROOT) + own).digest())


@dataclass(slots=True)
class Hit:
    """The first `blocks` blocks of a sequence, as pages that others hold: kind -> block -> page."""

    blocks: int = 0
    pages: dict[str, dict[int, int]] = field(default_factory=dict)


class PrefixCache:
    """Pages of one allocator by the hash of their block."""

    def __init__(self, pages: PageAllocator) -> None:
        """Becomes what the allocator evicts from."""
        self._pages = pages
        self._kinds = tuple(kind for kind in KINDS if kv_layers(pages.geometry, kind))
        self._entries: dict[str, OrderedDict[bytes, int]] = {kind: OrderedDict() for kind in self._kinds}
        pages.evict = self.evict

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def match(self, hashes: Sequence[bytes]) -> Hit:
        """The longest run of blocks from the start whose pages are all here, as far as later tokens see them."""
        found = 0
        while found < len(hashes) and all(
            hashes[found] in self._entries[kind] for kind in self._kinds if kind == "full"
        ):
            found += 1
        window = self._pages.geometry.window_keys
        for blocks in range(found, 0, -1):
            seen = {
                kind: 0 if kind == "full" else first_visible(blocks * PAGE + 1, window) // PAGE for kind in self._kinds
            }
            if all(hashes[b] in self._entries[kind] for kind in self._kinds for b in range(seen[kind], blocks)):
                pages = {kind: {b: self._entries[kind][hashes[b]] for b in range(seen[kind], blocks)} for kind in seen}
                return Hit(blocks, pages)
        return Hit()

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark a sequence's blocks as used, the last one first: a chain is evicted from its end."""
        for entries in self._entries.values():
            for block_hash in reversed(hashes):
                if block_hash in entries:
                    entries.move_to_end(block_hash)

    def publish(self, slot: int, block: int, block_hash: bytes) -> list[tuple[str, bytes]]:
        """Offer a slot's full block to others; what `retract` would take back.

        The page takes the place of one with the same tokens: what a conversation hits was written by its latest turns,
        whichever of its blocks, or of a block's kinds, were evicted in between.
        """
        new = []
        for kind in self._kinds:
            page = int(self._pages.table[kind][slot, block])
            if page == ABSENT:
                continue
            self._pages.hold(kind, page)
            if (former := self._entries[kind].pop(block_hash, None)) is not None:
                self._pages.drop(kind, former)
            self._entries[kind][block_hash] = page
            new.append((kind, block_hash))
        return new

    def retract(self, published: Sequence[tuple[str, bytes]]) -> None:
        """Take back blocks that turned out not to be what their hash says."""
        for kind, block_hash in published:
            if (page := self._entries[kind].pop(block_hash, None)) is not None:  # of two that offered it, once
                self._pages.drop(kind, page)

    def evictable(self, kind: str) -> int:
        """Pages of a kind that nobody but the cache holds."""
        if kind not in self._entries:
            return 0
        held = np.fromiter(self._entries[kind].values(), np.int64, len(self._entries[kind]))
        return int((self._pages.holders[kind][held] == 1).sum())

    def evict(self, kind: str, count: int) -> None:
        """Free up to `count` pages of a kind."""
        entries, holders = self._entries[kind], self._pages.holders[kind]
        for block_hash in [h for h, page in entries.items() if holders[page] == 1][:count]:
            self._pages.drop(kind, entries.pop(block_hash))

    def clear(self) -> None:
        """Let go of everything."""
        for kind, entries in self._entries.items():
            while entries:
                self._pages.drop(kind, entries.popitem()[1])
