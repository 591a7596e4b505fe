"""What experiments on the kernel share: the machine that is tested, its plan, its runtime, how tokens are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mk.config import Config
from mk.engines.choice import card_plan, cuda_obstacle
from mk.errors import MkError
from mk.kernel.build import Library
from mk.kernel.launches import RUNTIMES
from mk.kernel.runtime import Runtime
from mk.model.packing import PackedWeights
from mk.programs import Plan
from mk.sampling import SamplingParams


def machine_under_test(cfg: Config, rows: int) -> str:
    """cuda where `engine` asks for it or `auto` finds a card, else interpreter. Raises MkError for an engine that is
    not here, or executes no descriptors."""
    if cfg.engine.name == "reference":
        raise MkError(f"{cfg.experiment.name} tests descriptors, engine=reference has none", hint="engine=interpreter")
    obstacle = cuda_obstacle(cfg, rows)
    if cfg.engine.name == "cuda" and obstacle is not None:
        raise obstacle
    return "interpreter" if cfg.engine.name == "interpreter" or obstacle is not None else "cuda"


def plan_for(cfg: Config, engine: str) -> Plan:
    """The configured plan, the kernel's on the card that is here."""
    return card_plan(cfg) if engine == "cuda" else Plan.from_config(cfg)


def sampling_of(cfg: Config, row: int = 0) -> SamplingParams:
    """The configured parameters; each row has a seed of its own. Raises MkError for a seed that is none."""
    s = cfg.sampling
    first = SamplingParams(s.temperature, s.top_k, s.top_p, s.seed)
    return dataclasses.replace(first, seed=(first.seed + row) % 2**64)


def make_runtime(
    cfg: Config,
    library: Library,
    weights: PackedWeights,
    pages: Mapping[str, int],
    blocks: int,
    longest: int,
    trace_records: int = 0,
    launches: str = "step",
) -> Runtime:
    """A runtime for contexts of at most `longest` keys in `blocks` blocks. launches: a key of RUNTIMES.

    Raises MkError for a ring that is not the kernel's.
    """
    ring, slots = cfg.engine.ring, library.open().mk_ring_slots()
    if ring.slots != slots:
        raise MkError(f"engine.ring.slots={ring.slots}, the kernel has {slots}", hint=f"engine.ring.slots={slots}")
    return RUNTIMES[launches](library, weights, pages, blocks, longest, ring.windows, trace_records=trace_records)
