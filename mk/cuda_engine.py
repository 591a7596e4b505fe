"""The decode kernel behind the engine interface.

Prompts are prefilled by Triton kernels into the kernel's own pages, or in PyTorch on the CPU and their pages copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from mk.build import Library
from mk.interpreter import StepOutputs
from mk.kv import KINDS, KVCache, PageAllocator, blocks_of, kv_layers, pages_for_contexts
from mk.model.packing import PackedWeights
from mk.programs import Plan, Programs, bucket_for
from mk.runtime import Runtime
from mk.sampling import NO_TOKEN, SamplingParams, sample_row
from mk.schedule.lower import Program
from prefill.torch_prefill import TorchPrefill
from prefill.triton_prefill import TritonPrefill

GREEDY = SamplingParams()


class HostPrefill:
    """PyTorch's prefill on the CPU, with bf16 where the kernel rounds; a prompt's pages are copied to the device."""

    def __init__(self, weights: PackedWeights, runtime: Runtime, pages: Mapping[str, int], chunk: int) -> None:
        self.kv = KVCache(weights.geometry, pages["full"], pages["sliding"])
        self._runtime = runtime
        self._prefill = TorchPrefill(weights, self.kv, "kernel", chunk)

    def run(self, pages: PageAllocator, slot: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits after the last token, float32 [vocab]. Raises MkError as `TorchPrefill.run` does."""
        logits = self._prefill.run(pages, slot, tokens)
        for kind, layers in ((kind, len(kv_layers(self.kv.geometry, kind))) for kind in KINDS):
            for page in pages.table[kind][slot]:
                for index in range(layers if page >= 0 else 0):
                    k, v = (torch.from_numpy(self.kv.pools[kind][page, index, :, which]) for which in (0, 1))
                    self._runtime.write_pages(kind, int(page), index, k, v)
        return logits


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
        products: str | None = None,
        device: str = "cuda",
    ) -> None:
        """weights: on the CPU, where PyTorch's prefill reads them; the device gets its own copy. seed: orders pages.

        products: packed or torch, of the prefill in Triton; None = the one in PyTorch. Raises MkError for a device, a
        library or a plan that does not fit.
        """
        self.geometry = g = weights.geometry
        self.rows, self.context = rows, context
        counts = pages_for_contexts(g, rows, context, chunk, paged_chunk=products is not None)
        self.pages = PageAllocator(g, counts, rows, blocks_of(context), seed)
        copy = PackedWeights(weights.slots.to(device), weights.norms.to(device), weights.layout, g)
        self.runtime = Runtime(library, copy, counts, blocks_of(context), context, window_slots)
        self.programs = Programs(g, rows, plan)
        self.programs.get(bucket_for(1))  # a plan that cannot run is refused here, not in the middle of a decode
        self.program: Program | None = None
        self._prefill: TritonPrefill | HostPrefill
        if products is None:
            self._prefill = HostPrefill(weights, self.runtime, counts, chunk)
        else:
            pools = {kind: self.runtime[f"pool_{kind}"] for kind in KINDS}
            self._prefill = TritonPrefill(copy, pools, context, min(chunk, context), products)
            self.runtime.stream.wait_stream(torch.cuda.current_stream())  # which clears its buffers
        self._sampled = [0] * rows

    def prefill(self, row: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        with torch.cuda.stream(self.runtime.stream):  # in turn with steps, which read the same pages
            return self._prefill.run(self.pages, row, tokens)

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
