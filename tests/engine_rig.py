"""Cores over engines small enough to run in tests, and requests whose deliveries are collected."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mk.batching.core import Core
from mk.batching.policy import Policy
from mk.batching.request import Delivery, GenerationParams, Request, Sampled
from mk.engines.interpreted import MachineEngine
from mk.engines.scripted import SURE, ScriptedEngine
from mk.graph import LAYER_WAVES
from mk.kv import KINDS
from mk.programs import Plan
from tests.interpreter_rig import GEOMETRY, weights

PLAN = Plan(4, LAYER_WAVES, "row_owner")
CONTEXT = 320
EOS = 3
ids = itertools.count()


def successor(history: Sequence[int]) -> Mapping[int, float]:
    """A script whose every token depends on all before it, and that never ends."""
    value = 17
    for token in history:
        value = (value * 31 + token) % 100_003
    return {10 + value % 200: SURE, 10 + value % 200 + 1: SURE - 2}


def every_size(rows: int) -> list[int]:
    """Batch sizes to change between: powers of two, and all rows."""
    return sorted({2**power for power in range(rows.bit_length()) if 2**power < rows} | {rows})


def interpreted(rows: int = 3, pages: Mapping[str, int] | None = None, seed: int = 0) -> MachineEngine:
    pages = pages or {"full": 24, "sliding": 24}
    return MachineEngine(weights(), PLAN, rows, CONTEXT, chunk=32, seed=seed, pages=pages, sizes=every_size(rows))


def scripted(
    script: Any = successor, rows: int = 3, pages: Mapping[str, int] | None = None, ahead: int = 4
) -> ScriptedEngine:
    pages = pages or {"full": 24, "sliding": 24}
    return ScriptedEngine(GEOMETRY, script, rows, CONTEXT, pages, seed=1, sizes=every_size(rows), ahead=ahead)


POLICY: dict[str, Any] = {
    "chunk": 32,
    "prefill": "interleave",
    "steps_between": 1,
    "cache": True,
    "cache_generated": True,
    "deliver": 1,
    "held": 64,
}


def core(engine: Any, **policy: Any) -> Core:
    return Core(engine, [EOS], Policy(**{**POLICY, **policy}))


class Answer:
    """A request and everything it was told."""

    def __init__(self, prompt: Sequence[int], max_tokens: int = 8, **params: Any) -> None:
        self.deliveries: list[Delivery] = []
        given = GenerationParams(max_tokens=max_tokens, **params)
        self.request = Request(f"r{next(ids)}", list(prompt), given, self.deliveries.append)

    @property
    def sampled(self) -> list[Sampled]:
        return [token for delivery in self.deliveries for token in delivery.tokens]

    @property
    def tokens(self) -> list[int]:
        return [sampled.token for sampled in self.sampled]

    @property
    def finish(self) -> str | None:
        return self.deliveries[-1].finish if self.deliveries else None

    @property
    def error(self) -> str | None:
        return self.deliveries[-1].error if self.deliveries else None


def run(core: Core, *answers: Answer) -> None:
    """Submit, and tick until nothing is left; then every page is free or only the cache's."""
    for answer in answers:
        core.submit(answer.request)
    finish(core)


def finish(core: Core) -> None:
    for _ in range(5000):
        if not core.busy:
            break
        core.tick()
    assert not core.busy
    assert_nothing_held(core)


def assert_nothing_held(core: Core) -> None:
    assert core.slots == [None] * core.engine.rows and not core.waiting
    for kind in KINDS:
        assert core.pages_in_use(kind) == 0
        cached = core.cache.evictable(kind) if core.cache else 0
        assert int((core.pages.holders[kind] > 0).sum()) == cached
        assert len(set(core.pages.free_pages[kind])) == len(core.pages.free_pages[kind])
        assert (core.pages.table[kind] == -1).all()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(10, GEOMETRY.vocab, length)]
