"""The interpreter's arithmetic: a result depends on its own operands, not on how many rows or tiles share a call.

That is what makes bits equal over batches, placements and interleavings, and it rests on three rules:

* Matrix products are one BLAS `gemv` a (weight slot, row), always 16 x 256 on contiguous memory; slots are added in k
  order. A `gemm` over the batch would be free to use another kernel for another number of columns. 4,096 products
  also lie far below the size from which BLAS libraries split work over threads.
* Sums whose order could depend on an array's shape are written as `np.add.accumulate`, which is sequential by
  definition; `np.sum` adds pairwise or not depending on the layout numpy sees.
* Elementwise functions are applied to whole arrays; `tests/test_interpreter_bits.py` checks that this machine's numpy
  gives an element the same bits wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mk.errors import MkError
from mk.model.geometry import SLOT_K

Floats = npt.NDArray[np.float32]
Round = Callable[[Floats], Floats]

NUMERICS = ("float32", "kernel")


def round_bf16(x: Floats) -> Floats:
    """The nearest bf16 numbers (ties to even) as float32; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32))


def keep(x: Floats) -> Floats:
    return x


def rounding(numerics: str) -> Round:
    """What happens to a value where the kernel stores bf16: rounded under "kernel", kept under "float32"."""
    if numerics not in NUMERICS:
        raise MkError(f"numerics={numerics} is not one of {', '.join(NUMERICS)}")
    return round_bf16 if numerics == "kernel" else keep


def ordered_sum(terms: Floats) -> Floats:
    """Sum over the first axis, term after term."""
    total: Floats = terms[0] if len(terms) == 1 else np.add.accumulate(terms, axis=0)[-1]
    return total


def strip_product(weights: Floats, activations: Floats) -> Floats:
    """Rows of 16-row strips times activations: weights [strips, k_slots, 16, 256], activations [n, k_slots * 256].

    Returns [strips, n, 16].
    """
    blocks = activations.reshape(len(activations), -1, SLOT_K, 1)
    partial = np.matmul(weights[:, None], blocks)[..., 0]  # [strips, n, k_slots, 16]
    total: Floats = partial[:, :, 0]
    for k_slot in range(1, partial.shape[2]):
        total = total + partial[:, :, k_slot]
    return total


def padded(x: Floats, width: int, k: int) -> Floats:
    """The first `width` columns of x [n, at least k] as a new [n, k], zeros behind them."""
    wide = np.zeros((len(x), k), np.float32)
    wide[:, :width] = x[:, :width]
    return wide


def rows_of(strips: Floats) -> Floats:
    """[strips, n, width] as rows [n, strips * width]."""
    return strips.transpose(1, 0, 2).reshape(strips.shape[1], -1)


def sigmoid(x: Floats) -> Floats:
    result: Floats = np.float32(1.0) / (np.float32(1.0) + np.exp(-x))
    return result


def gated(pairs: Floats) -> Floats:
    """silu(gate) * up of gate/up strips [strips, n, 16] (8 gate rows, then their 8 up rows): [strips, n, 8]."""
    gate, up = pairs[..., :8], pairs[..., 8:]
    return gate * sigmoid(gate) * up
