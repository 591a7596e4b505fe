"""Where Triton's kernels are interpreted, and where they are compiled."""

from __future__ import annotations

import pytest

from prefill.kernels import interpreted

needs_interpreter = pytest.mark.skipif(
    not interpreted(), reason="Triton is set to compile for the GPU here; TRITON_INTERPRET=1 runs its interpreter"
)
needs_compiler = pytest.mark.skipif(interpreted(), reason="Triton is set to interpret here")
