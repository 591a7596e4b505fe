"""The decode kernel behind the engine interface: prompts are prefilled on the CPU, their pages copied to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from mk.build import Library
from mk.interpreter import StepOutputs
from mk.kv import KINDS, KVCache, blocks_of, kv_layers
from mk.model.packing import PackedWeights
from mk.programs import Plan, Programs, bucket_for
from mk.runtime import Runtime
from mk.sampling import NO_TOKEN, SamplingParams, sample_row
from mk.schedule.lower import Program
from prefill.torch_prefill import TorchPrefill

GREEDY = SamplingParams()


class CudaEngine:
    """One launch a step, then the host reads tokens, logits and routing: a decode to look at, not the fastest one.

    The kernel draws greedily; other sampling is done by its twin on the logits (`mk/sampling.py`). Routing is the
    model's own.
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
        self.kv = KVCache.for_contexts(g, rows, context, chunk)
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
        self._fit(max(keys))
        self.pages.advance(keys)
        fed = self._sampled if tokens is None else tokens
        self.runtime.set_tables(self.pages.table.table)
        self.runtime.set_sequences(keys, [token if length else 0 for token, length in zip(fed, keys, strict=True)])
        self.runtime.launch()
        self.runtime.finish()
        return self._read(keys, sampling)

    def free(self, row: int) -> None:
        self.pages.free(row)

    def _fit(self, longest: int) -> None:
        """Change to a program with room for `longest` keys."""
        if self.program is None or longest > self.program.shape.bucket:
            self.program = self.programs.get(bucket_for(longest))
            self.runtime.load(self.program)

    def _read(self, keys: Sequence[int], sampling: Sequence[SamplingParams]) -> StepOutputs:
        """What the finished step left on the device, in the interpreter's terms."""
        rt, g, active = self.runtime, self.geometry, np.array(keys) > 0
        status = np.where(active, rt.status(), 0)
        logits = np.where(active[:, None], rt["logits"][: self.rows, : g.vocab].cpu().numpy(), np.float32(np.nan))
        drawn = rt["tokens"][: self.rows].cpu().numpy().astype(np.int64)
        for row in np.flatnonzero(active).tolist():
            if sampling[row] != GREEDY:
                drawn[row] = sample_row(logits[row], sampling[row], keys[row])
        drawn[~active | (status != 0)] = NO_TOKEN
        self._sampled = np.maximum(drawn, 0).tolist()
        ids = rt["route_ids"][:, : self.rows].cpu().numpy().astype(np.int64)
        routed = {layer: np.where(active[:, None], ids[layer], -1) for layer in g.sparse_layers}
        return StepOutputs(drawn, status, logits, routed)
