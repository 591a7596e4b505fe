"""bfloat16 under Triton's interpreter, which cuts off where the compiler rounds to nearest."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_cast = InterpreterBuilder.cast_impl


def round_to_nearest() -> None:
    """Make the interpreter convert between float32 and bfloat16 as a card does; ties go to even."""
    InterpreterBuilder.cast_impl = _rounding_cast


def _rounding_cast(self: InterpreterBuilder, source: TensorHandle, wanted: Any) -> TensorHandle:
    pair = (source.dtype.scalar, wanted.scalar)
    if pair == (tl.float32, tl.bfloat16):
        return TensorHandle(_narrow(source.data), tl.bfloat16)
    if pair == (tl.bfloat16, tl.float32):
        return TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
    return _cast(self, source, wanted)


def _narrow(values: np.ndarray) -> np.ndarray:
    """The upper halves, as uint16: the interpreter keeps bfloat16 so."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16  # a carry may go on into the exponent, up to infinity
    quiet = bits >> 16 | 0x40  # rounding could make a NaN infinite, or zero
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
