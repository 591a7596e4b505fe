"""The prefill's Triton kernels.

Numbers that change from call to call are not specialized: a kernel that is compiled for a new one takes seconds.
"""

import triton
from triton.runtime.interpreter import InterpretedFunction


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter: as Triton was set when it was imported."""
    return isinstance(triton.language.sum, InterpretedFunction)


if interpreted():
    from prefill.kernels.rounding import round_to_nearest

    round_to_nearest()
