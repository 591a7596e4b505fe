"""The decode kernel behind the engine interface: prompts are prefilled on the CPU, their pages copied to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from mk.build import Library
from mk.host_ring import StepTokens
from mk.interpreter import StepOutputs
from mk.kv import KINDS, KVCache, blocks_of, kv_layers
from mk.model.packing import PackedWeights
from mk.programs import Plan, Programs, bucket_for
from mk.runtime import Runtime
from mk.sampling import SamplingParams
from mk.schedule.lower import Program
from prefill.torch_prefill import TorchPrefill

AHEAD = 16  # steps that `CudaEngine.run` queues at a time


class CudaEngine:
    """The kernel in two gaits: `step` launches once and reads logits and routing; `run` keeps steps queued.

    The kernel draws the tokens of either. Routing is the model's own.
    """

    name = "cuda"

    def __init__(
        self,
        weights: PackedWeights,
        library: Library,
        plan: Plan,
        rows: int,
        context: int,
        chunk: int = 512,
        seed: int = 0,
        window_slots: int = 8,
        device: str = "cuda",
    ) -> None:
        """weights: on the CPU, where prefill reads them; the kernel gets its own copy. seed: orders the pages.

        Raises MkError for a device, a library or a plan that does not fit.
        """
        self.geometry = g = weights.geometry
        self.rows, self.context = rows, context
        self.kv = KVCache.for_contexts(g, rows, context, chunk, AHEAD)
        self.pages = self.kv.allocator(rows, blocks_of(context), seed)
        copy = PackedWeights(weights.slots.to(device), weights.norms.to(device), weights.layout, g)
        self.runtime = Runtime(library, copy, self.kv.pages, blocks_of(context), context, window_slots)
        self.programs = Programs(g, rows, plan)
        self.programs.get(bucket_for(1))  # a plan that cannot run is refused here, not in the middle of a decode
        self.program: Program | None = None
        self._prefill = TorchPrefill(weights, self.kv, "kernel", chunk)
        self._sampled = [0] * rows

    def prefill(self, row: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        logits = self._prefill.run(self.pages, row, tokens)
        for kind in KINDS:
            pool = self.kv.pools[kind]
            for page in self.pages.table[kind][row]:
                for index in range(len(kv_layers(self.geometry, kind)) if page >= 0 else 0):
                    k, v = (torch.from_numpy(pool[page, index, :, which]) for which in (0, 1))
                    self.runtime.write_pages(kind, int(page), index, k, v)
        return logits

    def step(
        self, tokens: Sequence[int] | None, keys: Sequence[int], sampling: Sequence[SamplingParams]
    ) -> StepOutputs:
        launch = self._queue(tokens, keys, sampling, 1)[0]
        out = self._outputs(keys, self.runtime.tokens_of(launch))
        self._sampled = np.maximum(out.tokens, 0).tolist()
        return out

    def run(
        self, tokens: Sequence[int] | None, keys: Sequence[int], sampling: Sequence[SamplingParams], steps: int
    ) -> Iterator[StepTokens]:
        """Decode `steps` tokens in every active row, arguments as `step`'s; each step's as soon as they are sampled.

        The device is always some steps ahead: a row that ends early has been decoded for nothing until the caller
        closes the iterator, which waits for what is queued. Raises MkError as `step` does.
        """
        waiting: deque[int] = deque()
        queued = 0
        try:
            for _ in range(steps):
                while queued < steps and len(waiting) <= AHEAD:
                    grown = [length + queued if length else 0 for length in keys]
                    burst = min(AHEAD, steps - queued)
                    waiting += self._queue(tokens, grown, sampling, burst, follows=queued > 0)
                    queued += burst
                found = self.runtime.tokens_of(waiting.popleft())
                self._sampled = np.maximum(found.tokens, 0).tolist()
                yield found
        finally:
            if waiting:
                self.runtime.finish()

    def free(self, row: int) -> None:
        self.pages.free(row)

    def _queue(
        self,
        tokens: Sequence[int] | None,
        keys: Sequence[int],
        sampling: Sequence[SamplingParams],
        steps: int,
        follows: bool = False,
    ) -> list[int]:
        """Launches `steps` steps, without waiting for any; their numbers. `follows`: the last one queued, not read."""
        last = [length + steps - 1 if length else 0 for length in keys]
        program = self.programs.fit(self.program, max(last), any(not params.greedy for params in sampling))
        if program is not self.program:
            self.program = program
            self.runtime.load(program)
        self.pages.advance(keys)
        for row, length in enumerate(last):
            if length:
                self.pages.reserve(row, length)
        self.runtime.set_tables(self.pages.table.table)
        fed = None
        if not follows:
            fed = self._sampled if tokens is None else tokens
            fed = [token if length else 0 for token, length in zip(fed, keys, strict=True)]
        self.runtime.set_sequences(keys, fed, steps, sampling)
        return [self.runtime.launch() for _ in range(steps)]

    def _outputs(self, keys: Sequence[int], found: StepTokens) -> StepOutputs:
        """What the step left on the device, in the interpreter's terms."""
        self.runtime.finish()
        rt, g, active = self.runtime, self.geometry, np.array(keys) > 0
        logits = np.where(active[:, None], rt["logits"][: self.rows, : g.vocab].cpu().numpy(), np.float32(np.nan))
        ids = rt["route_ids"][:, : self.rows].cpu().numpy().astype(np.int64)
        routed = {layer: np.where(active[:, None], ids[layer], -1) for layer in g.sparse_layers}
        return StepOutputs(found.tokens, found.status, logits, routed)
