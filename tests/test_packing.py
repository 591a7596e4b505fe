"""Packing: the layout element by element, the row orders by what they are for, and every matrix back from the slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mk.errors import MkError
from mk.model import tensors
from mk.model.geometry import PRESETS, SLOT_BYTES, layer_matrices
from mk.model.packing import PackedWeights, WeightLayout, pack_matrix, row_permutation, unpack_matrix
from mk.model.random_weights import RandomWeights
from tests.tiny_model import tiny_geometry

GEOMETRY = tiny_geometry()


@pytest.fixture(scope="module")
def packed() -> PackedWeights:
    return PackedWeights.from_state(RandomWeights(GEOMETRY, seed=1).tensor, GEOMETRY)


def counting(rows: int, k: int) -> torch.Tensor:
    """Distinct values, exact in float32 (packing moves elements of any dtype)."""
    return torch.arange(1, rows * k + 1, dtype=torch.float32).view(rows, k)


def test_every_element_lies_where_the_layout_says() -> None:
    rows, k = 37, 300
    w = counting(rows, k)
    slots = pack_matrix(w).reshape(-1, 4096)  # [slots, elements of a slot]
    k_slots = 2
    assert slots.shape == (3 * k_slots, 4096)
    for row in range(48):
        for column in range(0, 512, 7):
            slot = row // 16 * k_slots + column // 256
            within = column % 256 // 32 * 512 + row % 16 * 32 + column % 32
            expected = w[row, column] if row < rows and column < k else 0
            assert slots[slot, within] == expected


@pytest.mark.parametrize(("order", "rows"), [("plain", 53), ("gate_up", 80), ("qkv", GEOMETRY.qkv_rows)])
def test_unpacking_inverts_packing(order: str, rows: int) -> None:
    w = torch.stack([counting(rows, 70), -counting(rows, 70)])
    p = pack_matrix(w, order, GEOMETRY)
    assert torch.equal(unpack_matrix(p, rows, 70, order, GEOMETRY), w)
    assert torch.equal(p[1], pack_matrix(w[1], order, GEOMETRY)), "leading dimensions are packed alike"
    assert int(p.count_nonzero()) == w.numel(), "padding is zero"


def test_gate_up_strip_pairs_gate_rows_with_their_up_rows() -> None:
    ffn = 40
    strips = row_permutation(GEOMETRY, "gate_up", 2 * ffn).view(-1, 16)
    for j, strip in enumerate(strips.tolist()):
        assert strip == [*range(8 * j, 8 * j + 8), *range(ffn + 8 * j, ffn + 8 * j + 8)]


def test_qkv_strip_pairs_even_dims_with_odd_ones_in_rotated_heads_only() -> None:
    order = row_permutation(GEOMETRY, "qkv", GEOMETRY.qkv_rows)
    rotated_heads = GEOMETRY.q_heads + GEOMETRY.kv_heads
    heads = order.view(-1, 8, 16)
    for head in range(rotated_heads):
        for j in range(8):
            even = [128 * head + 2 * (8 * j + i) for i in range(8)]
            assert heads[head, j].tolist() == even + [dim + 1 for dim in even]
    values = order[rotated_heads * 128 :]
    assert values.tolist() == list(range(rotated_heads * 128, GEOMETRY.qkv_rows))


@pytest.mark.parametrize(("order", "rows"), [("gate_up", 24), ("qkv", 256), ("shuffled", 16)])
def test_row_orders_refuse_what_they_do_not_fit(order: str, rows: int) -> None:
    with pytest.raises(MkError, match=order if order == "shuffled" else f"{order}.*rows={rows}"):
        row_permutation(GEOMETRY, order, rows)


@pytest.mark.parametrize("geometry", [GEOMETRY, PRESETS["slice"], PRESETS["north_mini_code"]])
def test_layout_covers_the_buffer_once(geometry) -> None:
    layout = WeightLayout(geometry)
    end = 0
    for entry in layout.entries().values():
        assert entry.first_slot == end and entry.expert_stride == entry.strips * entry.k_slots
        end += entry.experts * entry.expert_stride
    assert end == layout.total_slots and layout.nbytes == end * SLOT_BYTES
    names = {(name, layer) for layer in range(geometry.layers) for name in layer_matrices(geometry, layer)}
    assert set(layout.entries()) == names | {("head", None)}


def test_full_model_layout() -> None:
    layout = WeightLayout(PRESETS["north_mini_code"])
    assert layout.nbytes == 60_968_402_944  # the checkpoint's 60,968,607,744 less its 50 norms of 4 KB
    up, down = layout.entry("up", 1), layout.entry("down", 1)
    assert (up.strips, up.k_slots, up.experts) == (96, 8, 128)
    assert (down.strips, down.k_slots, down.experts) == (128, 3, 128)
    assert down.first_slot == up.first_slot + 128 * up.expert_stride
    with pytest.raises(KeyError):
        layout.entry("up", 0)


def test_every_matrix_comes_back_from_the_slots(packed: PackedWeights) -> None:
    source = RandomWeights(GEOMETRY, seed=1)
    for (name, layer), entry in packed.layout.entries().items():
        for expert in range(entry.experts):
            parts = [source.tensor(part) for part in tensors.matrix_sources(name, layer, expert)]
            assert torch.equal(packed.matrix(name, layer, expert), torch.cat(parts)), (name, layer, expert)
    assert packed.norms.shape == (GEOMETRY.layers + 1, GEOMETRY.hidden)
    assert torch.equal(packed.norms[2], source.tensor(tensors.norm(2)))
    assert torch.equal(packed.norms[-1], source.tensor(tensors.FINAL_NORM))


def test_strip_rows_are_the_packed_rows_in_float32(packed: PackedWeights) -> None:
    entry = packed.layout.entry("qkv", 3)
    first, strips = 5, 6
    rows = packed.strip_rows(entry.first_slot + first * entry.k_slots, strips, entry.k_slots)
    assert rows.dtype == np.float32 and rows.shape == (strips * 16, 256)
    order = row_permutation(GEOMETRY, "qkv", GEOMETRY.qkv_rows)[first * 16 : (first + strips) * 16]
    expected = packed.matrix("qkv", 3)[order].float().numpy()
    assert np.array_equal(rows[:, : GEOMETRY.hidden], expected)
    assert not rows[:, GEOMETRY.hidden :].any()


def test_product_through_strips_is_the_matrix_product(packed: PackedWeights) -> None:
    """What a task does: rows of a strip range times the zero-padded activation, over more than one slot of k."""
    entry = packed.layout.entry("o", 0)
    assert entry.k_slots == 3
    x = torch.randn(GEOMETRY.q_width, generator=torch.Generator().manual_seed(0))
    strips = packed.strip_rows(entry.first_slot, entry.strips, entry.k_slots)
    expected = packed.matrix("o", 0).double() @ x.double()
    np.testing.assert_allclose(strips @ x.numpy(), expected.numpy(), rtol=0, atol=1e-5)


def test_from_state_takes_a_mapping_and_reports_progress() -> None:
    source = RandomWeights(GEOMETRY, seed=2)
    state = {name: source.tensor(name) for name in tensors.tensor_shapes(GEOMETRY)}
    seen: list[tuple[int, int]] = []
    from_mapping = PackedWeights.from_state(state, GEOMETRY, progress=lambda done, total: seen.append((done, total)))
    assert torch.equal(from_mapping.slots, PackedWeights.from_state(source.tensor, GEOMETRY).slots)
    total = len(from_mapping.layout.entries())
    assert seen == [(i + 1, total) for i in range(total)]


@pytest.mark.parametrize("wrong", [torch.float16, None])
def test_a_tensor_of_another_kind_is_named(wrong: torch.dtype | None) -> None:
    source, name = RandomWeights(GEOMETRY), tensors.expert(2, 3, "up")

    def state(asked: str) -> torch.Tensor:
        w = source.tensor(asked)
        return w if asked != name else w[1:] if wrong is None else w.to(wrong)

    with pytest.raises(MkError, match=f"{name}: is .* not bfloat16"):
        PackedWeights.from_state(state, GEOMETRY)


def test_memory_is_asked_before_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mk.model.memory.free_memory", lambda device: 1_000_000)
    with pytest.raises(MkError, match="packing the weights needs .* GB"):
        PackedWeights.from_state(RandomWeights(GEOMETRY).tensor, GEOMETRY)
