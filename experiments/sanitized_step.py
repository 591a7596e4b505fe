"""A few decode steps of nano with few SMs, for a sanitizer to watch: `python -m experiments.sanitized_step [DEFINE]`.

Static lists and work stealing, two ragged rows and an idle one, contexts that cross a page and, on the sliding layers,
the window. The instrumented kernel is slower by orders of magnitude, so its waits may take minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from experiments.kernel_checks import fill
from mk.build import Library, build
from mk.graph import LAYER_WAVES
from mk.kv import KINDS, PageAllocator, blocks_of
from mk.model.checkpoint import load_checkpoint
from mk.model.geometry import Geometry
from mk.model.opening import NANO
from mk.model.packing import PackedWeights
from mk.programs import Plan, Programs
from mk.runtime import Runtime
from mk.splits import SplitPolicy

SMS = 6  # a residual strip's owner keeps four of nano's sixteen
SPLITS = SplitPolicy(128, 2)
KEYS = (320, 0, 64)
STEPS = 2
TIME_LIMIT_S = 120.0
DEVICE = torch.device("cuda")


def library(defines: Sequence[str] = ()) -> Library:
    """The kernel that is watched. The caller of a sanitizer builds it first, so that the time limit is the steps'."""
    return build(Geometry.from_hf_config(NANO), SPLITS, defines=tuple(defines))


def main(defines: Sequence[str] = ()) -> None:
    source = load_checkpoint(NANO)
    g, longest = source.geometry, max(KEYS) + STEPS
    weights = PackedWeights.from_state(source.tensor, g, DEVICE)
    counts = dict.fromkeys(KINDS, len(KEYS) * blocks_of(longest))
    runtime = Runtime(library(defines), weights, counts, blocks_of(longest), longest, time_limit_s=TIME_LIMIT_S)
    fill(runtime, 1.0)
    for claimers in (0, SMS):
        plan = Plan(SMS, LAYER_WAVES, "row_owner", claimers, claimers, splits=SPLITS)
        pages = PageAllocator(g, counts, len(KEYS), runtime.max_blocks, seed=1)
        for row, keys in enumerate(KEYS):
            if keys:
                pages.reserve(row, keys)
                pages.reserve(row, keys + STEPS - 1)
        torch.cuda.synchronize()
        runtime.load(Programs(g, len(KEYS), plan).get(512))
        runtime.set_tables(pages.table.table)
        runtime.set_sequences(KEYS, [5, 0, 6], steps=STEPS)
        for _ in range(STEPS):
            runtime.launch()
        runtime.finish()
        runtime.require_healthy("a watched step")
    print(f"decoded {STEPS} steps twice, last tokens {runtime['tokens'][: len(KEYS)].tolist()}")


if __name__ == "__main__":
    main(sys.argv[1:])
