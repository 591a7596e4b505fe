"""A few decode steps of nano with few SMs, for a sanitizer to watch: `python -m experiments.sanitized_step [DEFINE]`.

They are those of `experiment=sanitize` as it stands in configs/, which refuses another choice. Static lists and work
stealing, two ragged rows and an idle one, contexts that cross a page and, on the sliding layers, the window. The
instrumented kernel is slower by orders of magnitude, so its waits may take minutes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import torch

from experiments.kernel_checks import fill
from mk.compose import load_config
from mk.kernel.build import Library, build_for
from mk.kernel.runtime import Runtime
from mk.kv import KINDS, PageAllocator, blocks_of
from mk.model.checkpoint import load_checkpoint
from mk.model.geometry import Geometry
from mk.model.opening import NANO
from mk.model.packing import PackedWeights
from mk.programs import Plan, Programs

SMS = 6  # a residual strip's owner keeps four of nano's sixteen
CLAIM_AHEAD = 2
STEPS = 2
TIME_LIMIT_S = 120.0
DEVICE = torch.device("cuda")


def library(defines: Sequence[str] = ()) -> Library:
    """The kernel that is watched. The caller of a sanitizer builds it first, so that the time limit is the steps'."""
    cfg = load_config(["experiment=sanitize"])
    return build_for(cfg, Geometry.from_hf_config(NANO), Plan.from_config(cfg).splits, *defines)


def main(defines: Sequence[str] = ()) -> None:
    cfg, source = load_config(["experiment=sanitize"]), load_checkpoint(NANO)
    g, contexts = source.geometry, list(cfg.batch.contexts or ())
    longest = max(contexts) + STEPS
    weights = PackedWeights.from_state(source.tensor, g, DEVICE)
    counts = dict.fromkeys(KINDS, len(contexts) * blocks_of(longest))
    windows = cfg.engine.ring.windows
    runtime = Runtime(
        library(defines), weights, counts, blocks_of(longest), longest, windows, time_limit_s=TIME_LIMIT_S
    )
    fill(runtime, 1.0)
    for claimers in (0, SMS):
        shares = {"n_sm": SMS, "attention_claimers": claimers, "moe_claimers": claimers, "claim_ahead": CLAIM_AHEAD}
        plan = dataclasses.replace(Plan.from_config(cfg), **shares)
        pages = PageAllocator(g, counts, len(contexts), runtime.max_blocks, seed=1)
        for row, keys in enumerate(contexts):
            if keys:
                pages.reserve(row, keys)
                pages.reserve(row, keys + STEPS - 1)
        torch.cuda.synchronize()
        runtime.load(Programs(g, len(contexts), plan).get(512))
        runtime.set_tables(pages.table.table)
        runtime.set_sequences(contexts, [5, 0, 6], steps=STEPS)
        for _ in range(STEPS):
            runtime.launch()
        runtime.finish()
        runtime.require_healthy("a watched step")
    print(f"decoded {STEPS} steps twice, last tokens {runtime['tokens'][: len(contexts)].tolist()}")


if __name__ == "__main__":
    main(sys.argv[1:])
