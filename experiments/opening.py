"""The runtime of experiments on a card."""

from __future__ import annotations

from collections.abc import Mapping

from mk.build import Library
from mk.config import Config
from mk.errors import MkError
from mk.model.geometry import SLOT_BYTES
from mk.model.packing import PackedWeights
from mk.runtime import Runtime


def make_runtime(
    cfg: Config,
    library: Library,
    weights: PackedWeights,
    pages: Mapping[str, int],
    blocks: int,
    longest: int,
    trace_records: int = 0,
) -> Runtime:
    """A runtime for contexts of at most `longest` keys in `blocks` blocks. Raises MkError for a ring that is not the
    kernel's."""
    ring, slots = cfg.engine.ring, library.open().mk_ring_slots()
    if ring.slots != slots:
        raise MkError(f"engine.ring.slots={ring.slots}, the kernel has {slots}", hint=f"engine.ring.slots={slots}")
    window = ring.window_kb * 1024 // SLOT_BYTES
    return Runtime(library, weights, pages, blocks, longest, window, trace_records=trace_records)
