"""Paged KV: allocation, windows, and that what is written is what is read."""

from __future__ import annotations

import numpy as np
import pytest

from mk.errors import MkError
from mk.kv import ABSENT, KINDS, KVCache, PageAllocator, first_visible
from mk.model.geometry import PAGE
from tests.tiny_model import tiny_geometry

GEOMETRY = tiny_geometry(window=128)
SLIDING, FULL = GEOMETRY.sliding_layers[0], GEOMETRY.full_layers[1]


def allocator(full: int = 20, sliding: int = 12, slots: int = 3, seed: int | None = 4) -> PageAllocator:
    return PageAllocator(GEOMETRY, {"full": full, "sliding": sliding}, slots, max_blocks=16, seed=seed)


def held(pages: PageAllocator, kind: str, slot: int) -> list[int]:
    """Blocks of a slot that have a page."""
    return np.flatnonzero(pages.table[kind][slot] != ABSENT).tolist()


def check(pages: PageAllocator) -> None:
    """Every page is free or stands in exactly one place."""
    for kind in KINDS:
        used = pages.table[kind][pages.table[kind] != ABSENT].tolist()
        assert sorted(used + pages.free_pages[kind]) == list(range(pages.pages[kind]))


@pytest.mark.parametrize(("keys", "blocks"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_reserve_rounds_up_to_pages(keys: int, blocks: int) -> None:
    pages = allocator()
    pages.reserve(1, keys)
    for kind in KINDS:
        assert held(pages, kind, 1) == list(range(blocks))
    assert held(pages, "full", 0) == []
    assert (pages.held(0), pages.held(1)) == (0, blocks * PAGE)
    check(pages)


def test_reserving_again_adds_only_what_is_new() -> None:
    pages = allocator()
    pages.reserve(0, 70)
    before = pages.table["full"][0, :2].copy()
    pages.reserve(0, 60)
    pages.reserve(0, 193)
    assert held(pages, "full", 0) == [0, 1, 2, 3]
    assert np.array_equal(pages.table["full"][0, :2], before)
    check(pages)


def test_pages_are_handed_out_in_a_seeded_order() -> None:
    orders = []
    for seed in (None, 1, 1, 2):
        pages = allocator(seed=seed)
        pages.reserve(0, 16 * PAGE)
        orders.append(pages.table["full"][0].tolist())
    assert orders[0] == list(range(16))
    assert orders[1] == orders[2] != orders[3] and orders[1] != orders[0]


@pytest.mark.parametrize("keys", [127, 128, 191, 192, 193, 255, 256])
def test_release_keeps_exactly_what_the_next_query_sees(keys: int) -> None:
    """The next query stands at position `keys` and sees 128 keys with its own: from keys - 127."""
    pages = allocator()
    pages.reserve(0, 1)
    for length in range(2, keys + 1):
        pages.reserve(0, length)
    released = pages.release_window(0, keys)
    first = max(0, keys - 127) // PAGE
    assert held(pages, "sliding", 0) == list(range(first, -(-keys // PAGE)))
    assert released == first
    assert len(held(pages, "full", 0)) == -(-keys // PAGE)
    assert pages.release_window(0, keys) == 0
    assert pages.held(0) == -(-keys // PAGE) * PAGE  # what has left the window does not count
    check(pages)


def test_a_long_prompt_reserves_only_the_window_of_a_sliding_layer() -> None:
    pages = allocator()
    pages.reserve(0, 600)
    assert held(pages, "sliding", 0) == list(range((600 - 128) // PAGE, 10))
    assert held(pages, "full", 0) == list(range(10))


def test_a_decode_never_holds_more_than_the_window_and_two_halves() -> None:
    pages = allocator(sliding=3, slots=1)
    for keys in range(1, 500):
        pages.release_window(0, keys - 1)
        pages.reserve(0, keys)
        visible = range(first_visible(keys, 128) // PAGE, -(-keys // PAGE))
        assert set(visible) <= set(held(pages, "sliding", 0))


def test_a_batch_advances_row_by_row() -> None:
    """Pages held after each step are those that its query sees, inactive slots hold none, none is lost."""
    pages = allocator()
    for step in range(300):
        keys = [step + 1, 0, max(0, step - 99)]  # the last slot joins later
        pages.advance(keys)
        for slot, length in enumerate(keys):
            blocks = list(range(-(-length // PAGE)))
            assert held(pages, "full", slot) == blocks
            assert held(pages, "sliding", slot) == blocks[first_visible(length, 128) // PAGE :]
        check(pages)


def test_freed_pages_are_used_again() -> None:
    pages = allocator(full=4)
    pages.reserve(0, 4 * PAGE)
    pages.free(0)
    check(pages)
    pages.reserve(2, 4 * PAGE)
    assert held(pages, "full", 2) == [0, 1, 2, 3]
    pages.free(2)
    pages.reserve(2, 10)
    assert held(pages, "full", 2) == [0] and held(pages, "sliding", 2) == [0]


@pytest.mark.parametrize("other", [1, 2], ids=["of another sequence", "an empty one"])
def test_slots_exchange_their_sequences(other: int) -> None:
    """Every page stays where it is, and either sequence goes on as if it had always been in its slot."""
    pages = allocator()
    pages.reserve(0, 200)
    pages.release_window(0, 200)
    pages.reserve(1, 65)
    before = {kind: pages.table[kind].copy() for kind in KINDS}
    pages.swap(0, other)
    for kind in KINDS:
        assert np.array_equal(pages.table[kind][[0, other]], before[kind][[other, 0]])
    check(pages)
    sliding = held(pages, "sliding", other)
    pages.reserve(other, 257)
    assert held(pages, "full", other) == list(range(5)) and held(pages, "sliding", other) == [*sliding, 4]
    pages.free(other)
    assert held(pages, "full", other) == [] and (held(pages, "full", 0) == [0, 1]) == (other == 1)
    check(pages)


def test_too_little_memory_is_named_and_changes_nothing() -> None:
    pages = allocator(full=5, sliding=3)
    pages.reserve(0, 100)
    before = {kind: pages.table[kind].copy() for kind in KINDS}
    with pytest.raises(MkError, match="slot 1: 300 keys need 5 more full pages, 3 are free") as error:
        pages.reserve(1, 300)
    assert error.value.hint
    with pytest.raises(MkError, match="slot 2: 128 keys need 2 more sliding pages, 1 are free"):
        pages.reserve(2, 128)
    with pytest.raises(MkError, match="slot 0: 1025 keys need 17 blocks, its page table has 16"):
        pages.reserve(0, 1025)
    assert all(np.array_equal(pages.table[kind], before[kind]) for kind in KINDS)
    check(pages)


def random_kv(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    shape = (n, GEOMETRY.kv_heads, GEOMETRY.head_dim)
    return generator.standard_normal(shape, dtype=np.float32), generator.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("layer", [SLIDING, FULL])
def test_what_is_written_is_read(layer: int) -> None:
    """In pieces that cross pages, for two slots whose pages interleave."""
    kv = KVCache(GEOMETRY, 20, 20)
    pages = kv.allocator(2, 16, seed=8)
    kind = GEOMETRY.layer_kinds[layer]
    data = {slot: random_kv(200, seed=slot) for slot in range(2)}
    for start, end in ((0, 1), (1, 64), (64, 150), (150, 200)):
        for slot, (k, v) in data.items():
            pages.reserve(slot, end)
            kv.write(pages.table, slot, layer, start, k[start:end], v[start:end])
    for slot, (k, v) in data.items():
        for lo, hi in ((80, 200), (130, 131), (128, 192), (72, 200)):
            for head in range(GEOMETRY.kv_heads):
                got_k, got_v = kv.read(pages.table[kind][slot], layer, head, lo, hi)
                assert np.array_equal(got_k, k[lo:hi, head]) and np.array_equal(got_v, v[lo:hi, head])


def test_memory_starts_as_nan_and_writes_stay_inside() -> None:
    kv = KVCache(GEOMETRY, 4, 4)
    pages = kv.allocator(1, 4)
    pages.reserve(0, 70)
    kv.write(pages.table, 0, FULL, 3, *random_kv(65, seed=1))
    written = np.isfinite(kv.pools["full"])
    assert written.sum() == 65 * 2 * GEOMETRY.kv_heads * GEOMETRY.head_dim
    assert written[:, kv.index[FULL]].sum() == written.sum()
    assert np.isnan(kv.pools["sliding"]).all()


def test_tokens_without_a_page() -> None:
    """Dropped on a sliding layer, where no later query could see them; an error on a full one."""
    kv = KVCache(GEOMETRY, 20, 20)
    pages = kv.allocator(1, 16)
    pages.reserve(0, 300)
    k, v = random_kv(300, seed=2)
    kv.write(pages.table, 0, SLIDING, 0, k, v)
    assert np.array_equal(kv.read(pages.table["sliding"][0], SLIDING, 1, 172, 300)[0], k[172:, 1])
    with pytest.raises(MkError, match="block 0 of the context has no page"):
        kv.read(pages.table["sliding"][0], SLIDING, 0, 0, 128)
    with pytest.raises(MkError, match=f"slot 0: block 5 of full layer {FULL} has no page"):
        kv.write(pages.table, 0, FULL, 300, *random_kv(30, seed=3))


def test_the_size_for_given_contexts_suffices() -> None:
    kv = KVCache.for_contexts(GEOMETRY, slots=3, keys=1000)
    assert kv.pages == {"full": 48, "sliding": 9}
    pages = kv.allocator(3, 16, seed=1)
    for keys in range(1, 1001):
        for slot in range(3):
            pages.release_window(slot, keys - 1)
            pages.reserve(slot, keys)


@pytest.mark.parametrize("chunk", [1, 64, 100, 128, 512])
def test_the_size_has_room_for_a_prefill_chunk(chunk: int) -> None:
    """The last slot's prompt comes while the others hold all that a decode of 1000 keys ever does."""
    kv = KVCache.for_contexts(GEOMETRY, slots=3, keys=1000, chunk=chunk)
    pages = kv.allocator(3, 16, seed=1)
    for slot in range(3):
        for done in range(0, 1000, chunk):
            pages.reserve(slot, min(1000, done + chunk))
            pages.release_window(slot, min(1000, done + chunk))
    assert not pages.free_pages["full"]


def test_rows_of_a_batch_are_copied_from_their_slots() -> None:
    pages = allocator()
    pages.reserve(2, 65)
    table = pages.table.rows([2, 0])
    assert np.array_equal(table["full"][0], pages.table["full"][2]) and (table["full"][1] == ABSENT).all()
    pages.free(2)
    assert (table["full"][0, :2] != ABSENT).all()
