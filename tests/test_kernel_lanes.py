"""The kernel's products lane by lane: packed memory -> fragments -> mma equals the matrix product, without conflicts.

Numbers are small integers in float64, so sums are exact and any misplaced element shows. The emulation follows
csrc/ line by line; `test_the_kernel_still_reads_so` holds the lines that it repeats.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mk.kernel.build import CSRC
from mk.model.geometry import PRESETS, ROWS, SLOT_K
from mk.model.packing import pack_matrix
from mk.page_layout import pack_keys, pack_values
from tests.csrc_constants import constants

Array = npt.NDArray[np.float64]

WARPS, SUBTILE = 8, 16 * 32
SLOT = ROWS * SLOT_K  # elements
PAGE, CHUNK, DIM, GROUP = 64, 128, 128, 8
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4  # a lane's row (or column) group and its place in it


def integers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float64)


def mma_16x8x16(c: Array, a: list[Array], b: list[Array]) -> None:
    """mma.m16n8k16 as the PTX manual defines its fragments. a: 4 and b: 2 registers, each a pair a lane [32, 2]."""
    left, right = np.full((16, 16), np.nan), np.full((16, 8), np.nan)
    for half in range(2):
        for register in range(4):
            left[G + register % 2 * 8, T * 2 + register // 2 * 8 + half] = a[register][:, half]
        for register in range(2):
            right[T * 2 + register * 8 + half, G] = b[register][:, half]
    product = left @ right
    for i in range(4):
        c[:, i] += product[G + i // 2 * 8, T * 2 + i % 2]


def mma_subtile(c: Array, memory: Array, offset: int, b: Array) -> None:
    """memory: elements of the ring slot; b: 8 elements a lane [32, 8]."""
    low = memory[offset + LANE[:, None] * 8 + np.arange(8)]
    high = memory[offset + (LANE[:, None] + 32) * 8 + np.arange(8)]
    for first in (0, 4):  # x and y, then z and w
        pairs = slice(first, first + 2), slice(first + 2, first + 4)
        mma_16x8x16(
            c, [low[:, pairs[0]], high[:, pairs[0]], low[:, pairs[1]], high[:, pairs[1]]], [b[:, p] for p in pairs]
        )


def fragment(x: Array, warp: int) -> list[Array]:
    """Pieces of x [8, slots * 256] of each lane of a warp: load_fragment."""
    slots = x.shape[1] // SLOT_K
    by_slot = slots >= WARPS
    pieces = -(-slots // WARPS) * 8 if by_slot else slots
    origin = (warp * 256 if by_slot else warp * 32) + T * 8
    out = []
    for i in range(pieces):
        delta = i // 8 * WARPS * 256 + i % 8 * 32 if by_slot else i * 256
        exists = not by_slot or warp + i // 8 * WARPS < slots
        column = (origin + delta)[:, None] + np.arange(8)
        out.append(x[G[:, None], column] if exists else np.zeros((32, 8)))
    return out


def mma_strip(strip: Array, x: Array) -> Array:
    """One strip's packed elements times x [8, k]: the tile [16, 8] that the storer adds up from the eight warps."""
    slots = len(strip) // SLOT
    total = np.zeros((32, 4))
    for warp in range(WARPS):
        c, b = np.zeros((32, 4)), fragment(x, warp)
        if slots >= WARPS:
            for slot in range(warp, slots, WARPS):
                for j in range(8):
                    mma_subtile(c, strip[slot * SLOT :], j * SUBTILE, b[slot // WARPS * 8 + j])
        else:
            for slot in range(slots):
                mma_subtile(c, strip[slot * SLOT :], warp * SUBTILE, b[slot])
        total += c
    return total


def packed(w: Array, order: str = "plain", geometry=None) -> Array:
    """[strips, slots * 4096]"""
    tiles = pack_matrix(torch.from_numpy(w), order, geometry)
    return tiles.flatten(1).numpy()


def activations(k: int, seed: int = 1) -> Array:
    """x [8, padded k] whose padding is zero, as the kernel keeps it."""
    x = integers(8, -(-k // SLOT_K) * SLOT_K, seed=seed)
    x[:, k:] = 0
    return x


@pytest.mark.parametrize("k", [2048, 3072, 4096, 2560, 256, 512, 768, 1792, 300, 2100])
def test_strips_times_activations(k: int) -> None:
    """Eight slots and more are dealt by slot (2100 pads to nine), fewer are cut by sub-tile."""
    w, x = integers(48, k), activations(k)
    expected = w @ x[:, :k].T
    for strip, memory in enumerate(packed(w)):
        tile = mma_strip(memory, x)
        for i in range(4):
            rows, columns = strip * 16 + G + i // 2 * 8, T * 2 + i % 2
            assert (tile[:, i] == expected[rows, columns]).all()


@pytest.mark.parametrize("k", [512, 2048])
def test_gate_and_up_of_a_column_meet_in_one_lane(k: int) -> None:
    ffn, x = 24, activations(k)
    gate, up = integers(ffn, k, seed=2), integers(ffn, k, seed=3)
    for strip, memory in enumerate(packed(np.concatenate([gate, up]), "gate_up")):
        tile = mma_strip(memory, x)
        for i in range(2):
            column, row = strip * 8 + G, T * 2 + i
            assert (tile[:, i] == (gate @ x[:, :k].T)[column, row]).all()
            assert (tile[:, 2 + i] == (up @ x[:, :k].T)[column, row]).all()


def test_both_dims_of_a_rotation_meet_in_one_lane() -> None:
    g = PRESETS["slice"]
    w, x = integers(g.qkv_rows, 256, seed=4), activations(256)
    expected = w @ x.T
    strips = packed(w, "qkv", g)
    rotated, q_strips = (g.q_width + g.kv_width) // 16, g.q_width // 16
    for strip in (0, 9, q_strips - 1, q_strips, rotated - 1, rotated, len(strips) - 1):
        tile = mma_strip(strips[strip], x)
        for i in range(2):
            row = T * 2 + i
            if strip < rotated:
                even = strip // 8 * 128 + (strip % 8 * 8 + G) * 2
                first, second = even, even + 1
            else:
                first = strip * 16 + G
                second = first + 8
            assert (tile[:, i] == expected[first, row]).all()
            assert (tile[:, 2 + i] == expected[second, row]).all()


# ---- attention: a chunk of 128 keys is two pages, four ring slots of K and four of V


def page_slots(pages: Array, pack) -> Array:
    """[2 pages, 64, 128] to the four ring slots they come in: [4, 4096]."""
    return pack(torch.from_numpy(pages)).reshape(4, SLOT).numpy()


def test_key_blocks_times_queries() -> None:
    keys, q = integers(2, PAGE, DIM, seed=5), integers(GROUP, DIM, seed=6)
    slots = page_slots(keys, pack_keys)
    expected = keys.reshape(CHUNK, DIM) @ q.T
    for warp in range(WARPS):
        c = np.zeros((32, 4))
        strip = slots[warp // 2][warp % 2 * 2048 :]
        for j in range(4):
            mma_subtile(c, strip, j * SUBTILE, q[G[:, None], (j * 32 + T * 8)[:, None] + np.arange(8)])
        for i in range(4):
            assert (c[:, i] == expected[warp * 16 + G + i // 2 * 8, T * 2 + i % 2]).all()


def test_value_blocks_times_probabilities() -> None:
    values, p = integers(2, PAGE, DIM, seed=7), integers(GROUP, CHUNK, seed=8)
    slots = page_slots(values, pack_values)
    expected = values.reshape(CHUNK, DIM).T @ p.T
    for warp in range(WARPS):
        o = np.zeros((32, 4))
        for slot in range(4):
            if warp // 4 == slot % 2:
                for j in range(2):
                    column = slot // 2 * PAGE + j * 32
                    b = p[G[:, None], (column + T * 8)[:, None] + np.arange(8)]
                    mma_subtile(o, slots[slot][warp % 4 * 1024 :], j * SUBTILE, b)
        for i in range(4):
            assert (o[:, i] == expected[warp * 16 + G + i // 2 * 8, T * 2 + i % 2]).all()


def test_appended_and_patched_tokens_lie_where_the_packing_puts_them() -> None:
    keys, values = integers(PAGE, DIM, seed=9), integers(PAGE, DIM, seed=10)
    appended = np.full((2, PAGE * DIM), np.nan)
    patched = appended.copy()
    dim = np.arange(DIM)
    for token in range(PAGE):
        # storer: byte offsets, halved to elements
        at = ((token // 16 * 4 + dim // 32) * 1024 + token % 16 * 64 + dim % 32 * 2) // 2
        appended[0, at] = keys[token]
        at = ((dim // 16 * 2 + token // 32) * 1024 + dim % 16 * 64 + token % 32 * 2) // 2
        appended[1, at] = values[token]
        # attention: the warp of the key writes four dims a lane, the warp of each dim strip one dim a lane
        strip = token // 16 * 2048
        for element in range(4):
            at = strip + (LANE // 8 * 1024 + token % 16 * 64 + LANE % 8 * 8) // 2 + element
            patched[0, at] = keys[token, LANE * 4 + element]
        for warp in range(WARPS):
            strip = warp // 4 * SLOT + warp % 4 * 1024
            at = strip + (token // 32 * 1024 + LANE[:16] * 64 + token % 32 * 2) // 2
            patched[1, at] = values[token, warp * 16 + LANE[:16]]
    expected = np.stack([pack_keys(torch.from_numpy(keys)).numpy(), pack_values(torch.from_numpy(values)).numpy()])
    assert (appended == expected).all()
    assert (patched == expected).all()


# ---- bank conflicts


def wavefronts(address: npt.NDArray[np.int64], width: int) -> int:
    """Passes that shared memory needs for a warp's access of `width` bytes a lane: 32 banks of 4 bytes, 128 B a pass.

    A warp goes in groups of 128 / width lanes (all 32 up to 4 bytes), each lane's words in distinct passes per bank.
    """
    group = min(32, 128 // width)
    total = 0
    for start in range(0, 32, group):
        words = {
            int(a + offset) // 4 for a in address[start : start + group] for offset in range(0, width, min(4, width))
        }
        total += max(np.bincount([word % 32 for word in words]))
    return total


def test_weight_and_kv_fragments_are_read_in_the_fewest_passes() -> None:
    for offset in (0, 512):  # rows g, rows g + 8
        for base in range(0, 8192, 1024):
            assert wavefronts(base + offset + LANE * 16, 16) == 4


def test_partial_tiles_are_stored_in_the_fewest_passes() -> None:
    assert wavefronts(LANE * 16, 16) == 4


def test_probabilities_are_read_in_the_fewest_passes() -> None:
    """The rows of P are padded for the 16-byte loads of the V product; the price is paid by the 2-byte stores."""
    stride = constants()["P_STRIDE"] * 2
    loads = [wavefronts(G * stride + (column + T * 8) * 2, 16) for column in range(0, CHUNK, 32)]
    stores = [wavefronts((2 * T + i) * stride + (warp * 16 + G) * 2, 2) for warp in range(WARPS) for i in range(2)]
    assert set(loads) == {4}
    assert max(stores) <= 4
    assert wavefronts(G * CHUNK * 2 + T * 16, 16) == 8  # without padding: the counter does count


def test_the_kernel_still_reads_so() -> None:
    """Lines that the emulation repeats. Whoever changes one of them changes the emulation."""
    text = " ".join(re.sub(r"\s+", " ", path.read_text()) for path in sorted(CSRC.rglob("*.cuh")))
    for line in (
        "hidden((BY_SLOT ? threadIdx.x / 32 * 256 : threadIdx.x / 32 * 32) + threadIdx.x % 4 * 8)",
        "BY_SLOT ? i / SUBTILES * CONSUMERS * 256 + i % SUBTILES * 32 : i * 256",
        "uint4 lo = a[lane], hi = a[lane + 32];",
        "mma_16x8x16(c, lo.x, hi.x, lo.y, hi.y, b.x, b.y);",
        "mma_16x8x16(c, lo.z, hi.z, lo.w, hi.w, b.z, b.w);",
        "reinterpret_cast<const uint4*>(streams.slot()) + streams.warp * 64, b.v[j]",
        "base + g * 128 + j * 32 + t * 8",
        "st.slot() + warp % 2 * 4096",
        "mine = warp / 2 - (present == 2 ? 2 : 0)",
        "lane / 8 * 1024 + patch * 64 + lane % 8 * 8",
        "st.skip_slots(warp / 4);",
        "st.slot() + warp % 4 * 2048",
        "patch / 32 * 1024 + lane * 64 + patch % 32 * 2",
        "&s.p[g][column + t * 8]",
        "mma_16x8x16(o, x.x, y.x, x.y, y.y, b.x, b.y);",
        "mma_16x8x16(o_odd, x.z, y.z, x.w, y.w, b.z, b.w);",
        "(key / 16 * 4 + dim / 32) * 1024 + key % 16 * 64 + dim % 32 * 2",
        "(dim % 128 / 16 * 2 + key / 32) * 1024 + dim % 16 * 64 + key % 32 * 2",
    ):
        assert line in text, line
