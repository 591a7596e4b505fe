"""The kernel's rings in shared memory as csrc/ has them, of 8 KB slots and of tasks (shared.cuh, gemm.cuh)."""

from __future__ import annotations

from collections.abc import Sequence

SLOT_KB = 8
RING_SLOTS = 22  # what an SM has room for; an ablation may take fewer
MIN_WINDOW = 4  # slots that may be in flight, at least: those that a producer issues at once
UNSAFE_SLOTS = 14  # of a ring may never be in flight; why is in gemm.cuh
FEWEST_SLOTS = UNSAFE_SLOTS + MIN_WINDOW
ENTRIES = 16  # of the task ring; a claimer looks back no further, where a place may be in its next use


def windows_of(window_kb: int | Sequence[int]) -> tuple[int, ...]:
    """`engine.ring.window_kb` in slots: of a step of one row, of two, and so on, the last of all beyond."""
    sizes = [window_kb] if isinstance(window_kb, int) else window_kb
    return tuple(kb // SLOT_KB for kb in sizes)


def window_kb_for(window_kb: int | Sequence[int], rows: int) -> int:
    """What of `engine.ring.window_kb` a step of so many rows has."""
    return SLOT_KB * window_for(windows_of(window_kb), rows)


def window_for(windows: Sequence[int], rows: int) -> int:
    """Slots that an SM may have outstanding in a step of so many rows; windows: as of `windows_of`."""
    return windows[min(rows, len(windows)) - 1]
