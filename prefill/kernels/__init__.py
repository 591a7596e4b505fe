"""The prefill's Triton kernels."""

import triton
from triton.runtime.interpreter import InterpretedFunction


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter: as Triton was set when it was imported."""
    return isinstance(triton.language.sum, InterpretedFunction)
