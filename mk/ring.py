"""The kernel's ring of 8 KB slots in shared memory, as csrc/shared.cuh and csrc/gemm.cuh have it."""

from __future__ import annotations

RING_SLOTS = 22  # what an SM has room for; an ablation may take fewer
MIN_WINDOW = 4  # slots that may be in flight, at least: those that a producer issues at once
UNSAFE_SLOTS = 14  # of a ring may never be in flight; why is in gemm.cuh
FEWEST_SLOTS = UNSAFE_SLOTS + MIN_WINDOW
