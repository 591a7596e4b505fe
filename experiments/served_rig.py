"""The scheduler on its thread, watched: when requests got their tokens, and when steps began by the card's clock."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.opening import sampling_of
from mk.batching.core import Core
from mk.batching.request import Delivery, GenerationParams, Request
from mk.batching.worker import Worker
from mk.config import Config
from mk.decode_loop import DecodeLoop, LoopStep, Run
from mk.engines.cuda import CudaEngine
from mk.engines.protocol import PagedEngine
from mk.errors import MkError
from mk.model.opening import open_model
from mk.model.tokenizer import Tokenizer
from mk.results.rows import dtype_of
from mk.sampling import SamplingParams
from mk.server.launch import build_service
from prefill.chunks import Prompt

PATIENCE_S = 300.0  # of one request


@contextmanager
def opened(cfg: Config) -> Iterator[tuple[Core, Tokenizer]]:
    """The configured engine's scheduler without a cache, which computes prompts first; and the model's tokenizer."""
    with tempfile.TemporaryDirectory(prefix="mk-") as scratch:
        model = open_model(cfg.model, cfg.weights, Path(scratch), "cuda" if cfg.engine.name == "cuda" else "cpu")
        core = build_service(cfg, model).worker.core
        policy = dataclasses.replace(core.policy, prefill="pause", cache=False, cache_generated=False)
        yield Core(core.engine, model.tokenizer.eos, policy), model.tokenizer


def require_context(need: int, context: int) -> None:
    """Raises MkError for contexts of more tokens than `server.context`."""
    if need > context:
        raise MkError(f"contexts of {need} tokens exceed server.context={context}", hint=f"server.context={need}")


def engine_fields(cfg: Config, engine: PagedEngine) -> dict[str, Any]:
    """Of `Row`: what computes there."""
    return {
        "engine": engine.name,
        "dtype": dtype_of(engine.name, cfg.engine.numerics),
        "build_hash": engine.runtime.build_hash if isinstance(engine, CudaEngine) else None,
    }


class Asked:
    """A request that runs to `max_tokens`, its tokens, and when the host had each, in seconds."""

    def __init__(self, name: str, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.asked = time.perf_counter()
        self._news = threading.Condition()
        self._finished = False
        self._error: str | None = None
        self.request = Request(name, list(prompt), GenerationParams(max_tokens, sampling, ignore_eos=True), self._take)

    def _take(self, delivery: Delivery) -> None:
        now = time.perf_counter()
        with self._news:
            self.tokens += [sampled.token for sampled in delivery.tokens]
            self.times += [now] * len(delivery.tokens)
            self._error = self._error or delivery.error
            self._finished |= delivery.finish is not None
            self._news.notify_all()

    def has(self, tokens: int) -> None:
        """Waits until it has so many tokens, or has ended. Raises MkError for one that failed, or does neither."""
        with self._news:
            if not self._news.wait_for(lambda: self._finished or len(self.tokens) >= tokens, PATIENCE_S):
                raise MkError(f"{self.request.id} has {len(self.tokens)} tokens after {PATIENCE_S:.0f} s")
        if self._error is not None:
            raise MkError(f"{self.request.id}: {self._error}")

    def wait(self) -> Asked:
        """Until it has ended. Raises as `has` does."""
        self.has(self.request.params.max_tokens + 1)
        return self


@dataclass(slots=True)
class Ran:
    """A run: rows of its batch, how many of them were active, when each step began, and what came before it."""

    rows: int
    active: int
    prefill_us: float  # of prompts computed since the last run
    started_ns: list[int] = field(default_factory=list)
    park_us: float | None = None  # from the call of `park` to the loop's rest

    @property
    def step_ms(self) -> list[float]:
        """From start to start."""
        return [(b - a) / 1e6 for a, b in itertools.pairwise(self.started_ns)]


class Watched:
    """An engine's loop that keeps account."""

    def __init__(self, loop: DecodeLoop) -> None:
        self.runs: list[Ran] = []
        self.prefill_us = 0.0
        self._loop = loop
        self._asked: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def resume(self, run: Run) -> None:
        self.runs.append(Ran(len(run.keys), sum(length > 0 for length in run.keys), self.prefill_us))
        self.prefill_us, self._asked = 0.0, None
        self._loop.resume(run)

    def park(self) -> None:
        self._asked = self._asked or time.perf_counter()
        self._loop.park()

    def read(self) -> list[LoopStep]:
        steps = self._loop.read()
        self.runs[-1].started_ns += [step.started_ns for step in steps]
        if not steps and self._asked is not None:
            self.runs[-1].park_us = (time.perf_counter() - self._asked) * 1e6
        return steps


class Bench:
    """A core without a cache on its thread, and its engine watched."""

    def __init__(self, cfg: Config, core: Core) -> None:
        self.engine, self.core, self.cfg = core.engine, core, cfg
        self.loop = self.engine.loop = Watched(self.engine.loop)
        compute = self.engine.prefill_together

        def prefill(prompts: Sequence[Prompt]) -> Any:
            begun = time.perf_counter()
            try:
                return compute(prompts)
            finally:
                self.loop.prefill_us += (time.perf_counter() - begun) * 1e6

        self.engine.prefill_together = prefill
        self.worker = Worker(core)
        self._attend = core.attend

    def policy(self, **changes: Any) -> None:
        """From the next tick on."""
        self.core.policy = dataclasses.replace(self.core.policy, **changes)

    def ask(self, prompts: Sequence[Sequence[int]], tokens: Sequence[int], name: str = "row") -> list[Asked]:
        """Queues a request a prompt, in one go; the i-th one is sampled as row i is."""
        rows = enumerate(zip(prompts, tokens, strict=True))
        asked = [Asked(f"{name} {i}", *each, sampling_of(self.cfg, i)) for i, each in rows]
        self.worker.submit(*(one.request for one in asked))
        return asked

    def serve(self, prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> tuple[list[Asked], list[Ran]]:
        """Requests from their start to their end, and the runs that they took."""
        before = len(self.loop.runs)
        return [one.wait() for one in self.ask(prompts, tokens)], self.loop.runs[before:]

    @contextmanager
    def interrupted(self, wants_park: Callable[[], bool]) -> Iterator[None]:
        """Inside, a run is parked between steps where `wants_park` says so."""
        self.core.attend = lambda: self._attend() or wants_park()
        try:
            yield
        finally:
            self.core.attend = self._attend

    def __enter__(self) -> Bench:
        self.worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.stop()
