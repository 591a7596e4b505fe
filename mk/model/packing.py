"""The one copy of the weights that decode, prefill and the interpreter read: strips of 16 rows, slots of 16 x 256.

A matrix [rows, k] is zero-padded to whole strips and slots and stored as `[rows/16, k/32, 16, 32]` bf16: a strip is 16
rows over the whole of k, a slot is eight row-major 16 x 32 sub-tiles of it (8 KB), and a strip's slots are neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mk.errors import MkError
from mk.model import tensors
from mk.model.geometry import (
    HEAD_DIM,
    ROWS,
    SLOT_BYTES,
    SLOT_K,
    Geometry,
    MatrixTile,
    Tiles,
    layer_matrices,
    tile_rules,
)
from mk.model.memory import require_memory

SUB_K = 32  # k of one sub-tile
SLOT_ELEMENTS = ROWS * SLOT_K
HALF = ROWS // 2  # rows g and g+8 of a strip meet in one lane of the mma


def row_permutation(geometry: Geometry | None, order: str, rows: int) -> torch.Tensor:
    """Source row of every packed row, int64 [rows]. Only "qkv" looks at the geometry.

    "plain" keeps the order. "gate_up" (gate rows, then as many up rows) gives a strip 8 gate rows and their 8 up rows.
    "qkv" (query, key, value heads) gives a strip 8 even dims of a query or key head and their 8 odd ones, so that both
    numbers of a rotation meet in one lane; value heads keep their order.
    """
    index = torch.arange(rows)
    if order == "plain":
        return index
    if order == "gate_up":
        if rows % ROWS:
            raise MkError(f"packing: gate_up rows={rows} must be a multiple of {ROWS}")
        return index.view(2, rows // ROWS, HALF).transpose(0, 1).reshape(rows)
    if order == "qkv":
        if geometry is None or rows != geometry.qkv_rows or geometry.head_dim != HEAD_DIM:
            raise MkError(f"packing: qkv rows={rows} do not fit the geometry")
        rotated = geometry.q_width + geometry.kv_width
        pairs = index[:rotated].view(-1, HALF, 2).transpose(1, 2).reshape(rotated)
        return torch.cat([pairs, index[rotated:]])
    raise MkError(f"packing: unknown row order {order!r}")


def pack_matrix(w: torch.Tensor, order: str = "plain", geometry: Geometry | None = None) -> torch.Tensor:
    """Pack `w` [..., rows, k] into [..., strips, padded_k/32, 16, 32] on its own device, in its own dtype (bf16).

    Leading dimensions (experts) are packed alike.
    """
    rows, k = w.shape[-2:]
    tile = MatrixTile(rows, k, order)
    if order != "plain":
        w = w.index_select(-2, row_permutation(geometry, order, rows).to(w.device))
    if (tile.padded_rows, tile.padded_k) != (rows, k):
        w = torch.nn.functional.pad(w, (0, tile.padded_k - k, 0, tile.padded_rows - rows))
    blocks = w.reshape(*w.shape[:-2], tile.strips, ROWS, tile.padded_k // SUB_K, SUB_K)
    return blocks.transpose(-3, -2).contiguous()


def unpack_matrix(
    packed: torch.Tensor, rows: int, k: int, order: str = "plain", geometry: Geometry | None = None
) -> torch.Tensor:
    """The inverse of `pack_matrix`: [..., strips, padded_k/32, 16, 32] to [..., rows, k]."""
    flat = packed.transpose(-3, -2).flatten(-2).flatten(-3, -2)[..., :rows, :k]
    if order == "plain":
        return flat.contiguous()
    w = torch.empty_like(flat)
    w[..., row_permutation(geometry, order, rows).to(w.device), :] = flat
    return w


@dataclass(frozen=True, slots=True)
class MatrixSlots:
    """Where a matrix lies, in slots: expert e's strip s starts at `first_slot + e * expert_stride + s * k_slots`."""

    first_slot: int
    strips: int
    k_slots: int
    experts: int
    expert_stride: int

    @property
    def slots(self) -> int:
        """Slots of all experts together."""
        return self.experts * self.expert_stride


class WeightLayout:
    """The slot of every matrix of a geometry: layer after layer, then the head."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.tiles: Tiles = tile_rules(geometry)
        self._entries: dict[tuple[str, int | None], MatrixSlots] = {}
        self.total_slots = 0
        for layer in range(geometry.layers):
            for name in layer_matrices(geometry, layer):
                self._append(name, layer)
        self._append("head", None)
        if self.total_slots >= 2**31:
            raise MkError(f"geometry: {self.total_slots} weight slots do not fit an int32 index")

    def _append(self, name: str, layer: int | None) -> None:
        tile = self.tiles.matrices[name]
        experts = self.geometry.experts if name in ("up", "down") else 1
        entry = MatrixSlots(self.total_slots, tile.strips, tile.k_slots, experts, tile.slots)
        self._entries[name, layer] = entry
        self.total_slots += entry.slots

    def entry(self, name: str, layer: int | None = None) -> MatrixSlots:
        """The slots of matrix `name` of `layer`; the head has no layer. KeyError if there is no such matrix."""
        return self._entries[name, layer]

    def entries(self) -> dict[tuple[str, int | None], MatrixSlots]:
        """All matrices by (name, layer), in the order of their slots."""
        return dict(self._entries)

    @property
    def nbytes(self) -> int:
        return self.total_slots * SLOT_BYTES


@dataclass(slots=True)
class PackedWeights:
    """Packed matrices and the norm weights of a model, on one device."""

    slots: torch.Tensor  # bf16 [total_slots, 4096]
    norms: torch.Tensor  # bf16 [layers + 1, hidden]; the last row is the final norm
    layout: WeightLayout
    geometry: Geometry

    @classmethod
    def from_state(
        cls,
        state: tensors.Weights,
        geometry: Geometry,
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> PackedWeights:
        """Pack a model from its Hugging Face tensors, holding one matrix (with all its experts) at a time.

        `state` maps a name to its bf16 tensor, or is a function that does; `progress` is told (matrices done, in all).
        Raises MkError when the device lacks the memory, and for a tensor of another shape or dtype.
        """
        device = torch.device(device)
        layout = WeightLayout(geometry)
        largest = max(entry.slots for entry in layout.entries().values()) * SLOT_BYTES
        require_memory(layout.nbytes + 3 * largest, device, "packing the weights")  # staged, permuted, packed
        read = _Reader(tensors.lookup(state), geometry, device)
        slots = torch.empty(layout.total_slots, SLOT_ELEMENTS, dtype=torch.bfloat16, device=device)
        entries = layout.entries()
        for done, ((name, layer), entry) in enumerate(entries.items()):
            matrix = read.matrix(name, layer, layout.tiles.matrices[name], entry.experts)
            packed = pack_matrix(matrix, layout.tiles.matrices[name].order, geometry)
            slots[entry.first_slot : entry.first_slot + entry.slots] = packed.view(entry.slots, SLOT_ELEMENTS)
            if progress is not None:
                progress(done + 1, len(entries))
        norm_names = [*(tensors.norm(layer) for layer in range(geometry.layers)), tensors.FINAL_NORM]
        norms = torch.stack([read.tensor(name) for name in norm_names])
        return cls(slots, norms, layout, geometry)

    def to(self, device: torch.device | str) -> PackedWeights:
        """These weights on `device`: themselves where they are there already, else a copy."""
        return PackedWeights(self.slots.to(device), self.norms.to(device), self.layout, self.geometry)

    def matrix(self, name: str, layer: int | None = None, expert: int = 0) -> torch.Tensor:
        """One matrix in its source's row order: bf16 [rows, k], e.g. gate rows then up rows."""
        tile, entry = self.layout.tiles.matrices[name], self.layout.entry(name, layer)
        first = entry.first_slot + expert * entry.expert_stride
        packed = self.slots[first : first + entry.expert_stride].view(entry.strips, -1, ROWS, SUB_K)
        return unpack_matrix(packed, tile.rows, tile.k, tile.order, self.geometry)

    def strip_rows(self, first_slot: int, strips: int, k_slots: int) -> np.ndarray:
        """The rows of consecutive strips in packed order: float32 [strips * 16, k_slots * 256], padding included."""
        packed = self.slots[first_slot : first_slot + strips * k_slots].view(strips, -1, ROWS, SUB_K)
        rows = torch.empty(strips, ROWS, k_slots * SLOT_K // SUB_K, SUB_K)
        rows.copy_(packed.transpose(1, 2))
        return rows.view(strips * ROWS, k_slots * SLOT_K).numpy()


class _Reader:
    """Checked tensors of a state, brought to the device."""

    def __init__(self, get: Callable[[str], torch.Tensor], geometry: Geometry, device: torch.device) -> None:
        self.get = get
        self.shapes = tensors.tensor_shapes(geometry)
        self.device = device

    def tensor(self, name: str) -> torch.Tensor:
        w, shape = self.get(name), self.shapes[name]
        if tuple(w.shape) != shape or w.dtype != torch.bfloat16:
            raise MkError(f"{name}: is {w.dtype} {list(w.shape)}, not bfloat16 {list(shape)}")
        return w.to(self.device)

    def matrix(self, name: str, layer: int | None, tile: MatrixTile, experts: int) -> torch.Tensor:
        """[experts, rows, k]: the source tensors of every expert stacked, rows of gate before rows of up."""
        staged = torch.empty(experts, tile.rows, tile.k, dtype=torch.bfloat16, device=self.device)
        for index in range(experts):
            start = 0
            for source in tensors.matrix_sources(name, layer, index):
                w = self.tensor(source)
                staged[index, start : start + len(w)] = w
                start += len(w)
        return staged
