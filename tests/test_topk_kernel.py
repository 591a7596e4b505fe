"""The kernel's top-k, compiled for the CPU lane by lane, against sorting."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from mk.interpreter import Status
from mk.isa import DESCRIPTOR_WORDS, ISA, Flag, Word
from mk.kernel.step_params import MAX_ROWS
from mk.model.geometry import PRESETS, SLOT_K, Geometry
from tests.emulated_kernel import Buffers, compile_emulated, pointer

FULL = PRESETS["slice"]
SMALL = dataclasses.replace(FULL, hidden=80, experts=7, top_k=3)
LAYER = FULL.sparse_layers[0]
NAN = np.float32(np.nan)


@pytest.fixture(scope="module", params=[FULL, SMALL], ids=["128 experts", "7 experts"])
def geometry(request: pytest.FixtureRequest) -> Geometry:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def library(geometry: Geometry, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_emulated("topk", geometry, tmp_path_factory.mktemp("topk"))


class TopK(Buffers):
    """One task on `logits` [rows, experts], cut over k slots as the router leaves them."""

    def __init__(self, library: ctypes.CDLL, g: Geometry, logits: npt.NDArray[np.float32]) -> None:
        rows = len(logits)
        super().__init__(g, rows, 1)
        assert library.params_bytes() == ctypes.sizeof(self.params)
        self.library, self.g = library, g
        self["keys"][:rows] = 5
        self["router_part"].fill(np.nan)
        parts = self["router_part"].reshape(-1, MAX_ROWS, 128)[: -(-g.hidden // SLOT_K)]
        parts[:, :rows, : g.experts] = 0
        parts[-1, :rows, : g.experts] = logits
        self["route_ids"].fill(-1)

    def run(self) -> tuple[list[int], npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Active experts; bits of the rows of each expert; weights [experts, rows]; published ids [rows, top_k]."""
        d = np.zeros(DESCRIPTOR_WORDS, np.int32)
        d[Word.OPCODE], d[Word.LAYER], d[Word.FLAGS] = ISA.named("topk").opcode, LAYER, Flag.PUBLISH
        rows, active, weights = np.zeros(128, np.uint8), np.zeros(128, np.uint8), np.zeros((128, MAX_ROWS), np.float32)
        n = self.library.topk(ctypes.byref(self.params), pointer(d), pointer(rows), pointer(active), pointer(weights))
        return active[:n].tolist(), rows, weights, self["route_ids"][LAYER]


def expected_ids(logits: npt.NDArray[np.float32], k: int) -> list[int]:
    clean = np.where(np.isnan(logits), -np.inf, logits)
    return sorted(range(len(logits)), key=lambda i: (-clean[i], i))[:k]


def hard_rows(g: Geometry) -> npt.NDArray[np.float32]:
    """Eight rows: random, equal, ties about the last place, zeros of both signs, infinities, NaN, falling, steps."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, (8, g.experts)).astype(np.float32)
    logits[1] = 0.25
    logits[2] = rng.integers(0, 3, g.experts)
    logits[3] = np.where(rng.random(g.experts) < 0.5, np.float32(-0.0), np.float32(0.0))
    logits[4, ::2], logits[4, 1] = -np.inf, np.inf
    logits[5, 1::2] = NAN
    logits[6] = -np.arange(g.experts)
    logits[7] = np.arange(g.experts) // 5
    return logits


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_largest_are_found_in_order(library: ctypes.CDLL, geometry: Geometry, rows: int) -> None:
    for first in range(0, 8 - rows + 1, rows):
        logits = hard_rows(geometry)[first : first + rows]
        task = TopK(library, geometry, logits)
        inactive = rows - 1 if rows > 1 else None
        if inactive is not None:
            task["keys"][inactive] = 0
        active, bits, weights, published = task.run()
        chosen = [[] if row == inactive else expected_ids(logits[row], geometry.top_k) for row in range(rows)]
        for row, ids in enumerate(chosen):
            assert [e for e in range(128) if bits[e] >> row & 1] == sorted(ids)
            assert published[row].tolist() == (ids or [-1] * geometry.top_k)
            logit = logits[row, ids].astype(np.float64)
            with np.errstate(over="ignore"):
                exact = np.where(np.isnan(logit), 0, 1 / (1 + np.exp(-logit)))
            assert np.allclose(weights[ids, row], exact, rtol=3e-7, atol=1e-37)
            nan = row != inactive and bool(np.isnan(logits[row]).any())
            assert task["status"][row] == (Status.ROUTER_NAN if nan else 0)
        assert active == sorted({e for ids in chosen for e in ids})


def test_named_ids_replace_the_choice_and_nothing_else(library: ctypes.CDLL, geometry: Geometry) -> None:
    """Row 0 is left to the router; rows 1 and 2 are named; row 3 names an expert that is none; row 4 is inactive."""
    g, logits = geometry, hard_rows(geometry)[[0, 6, 7, 0, 0]]
    rng = np.random.default_rng(5)
    ids = np.stack([rng.permutation(g.experts)[: g.top_k] for _ in range(5)]).astype(np.int32)
    ids[0], ids[3, 1] = -1, g.experts
    task = TopK(library, g, logits)
    forced = np.full(task["route_ids"].shape, -1, np.int32)
    forced[LAYER, :5] = ids
    task.own("forced_ids", forced)
    task["keys"][4] = 0
    active, bits, weights, published = task.run()
    chosen = [
        expected_ids(logits[0], g.top_k),
        ids[1].tolist(),
        ids[2].tolist(),
        [i for i in ids[3] if i < g.experts],
        [],
    ]
    for row, expected in enumerate(chosen):
        assert [e for e in range(128) if bits[e] >> row & 1] == sorted(expected)
        exact = 1 / (1 + np.exp(-logits[row, expected].astype(np.float64)))
        assert np.allclose(weights[expected, row], exact, rtol=3e-7, atol=1e-37)
    assert active == sorted({int(e) for row in chosen for e in row})
    assert published[0].tolist() == chosen[0] and np.array_equal(published[1:3], ids[1:3])
    assert [int(p) for p in published[3] if p >= 0] == chosen[3] and (published[4] == -1).all()
    assert task["status"][:5].tolist() == [0, 0, 0, Status.EXPERT_ID, 0]
