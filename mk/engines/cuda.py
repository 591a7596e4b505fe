"""The decode kernel behind the engine interface.

Prompts are prefilled by Triton kernels into the kernel's own pages, or in PyTorch on the CPU and their pages copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from mk.decode_loop import LoopStep, Run, finish
from mk.interpreter import StepOutputs
from mk.kernel.build import Library
from mk.kernel.native_loop import NativeLoop
from mk.kernel.runtime import Runtime
from mk.kv import KINDS, KVCache, PageAllocator, blocks_of, kv_layers, pages_for_contexts
from mk.model.packing import PackedWeights
from mk.page_layout import hand_over
from mk.programs import Plan, programs_by_size
from mk.sampling import SamplingParams
from mk.schedule.lower import Program
from prefill.chunks import Prompt
from prefill.torch_prefill import TorchPrefill
from prefill.triton_prefill import TritonPrefill

NO_LOGITS = np.empty((0, 0), np.float32)


class HostPrefill:
    """PyTorch's prefill on the CPU, with bf16 where the kernel rounds; a prompt's pages are copied to the device."""

    def __init__(self, weights: PackedWeights, runtime: Runtime, pages: Mapping[str, int], chunk: int) -> None:
        self.kv = KVCache(weights.geometry, pages["full"], pages["sliding"])
        self._runtime = runtime
        self._prefill = TorchPrefill(weights, self.kv, "kernel", chunk)

    def run(
        self, pages: PageAllocator, slot: int, tokens: Sequence[int], start: int = 0, every: bool = False
    ) -> npt.NDArray[np.float32]:
        """As `TorchPrefill.run`."""
        if start:
            # as they stand on the device: decode steps may have written to them since
            hand_over({kind: self._runtime[f"pool_{kind}"] for kind in KINDS}, self.kv, pages, slot)
        logits = self._prefill.run(pages, slot, tokens, start, every)
        for kind, layers in ((kind, len(kv_layers(self.kv.geometry, kind))) for kind in KINDS):
            for page in pages.table[kind][slot]:
                for index in range(layers if page >= 0 else 0):
                    k, v = (torch.from_numpy(self.kv.pools[kind][page, index, :, which]) for which in (0, 1))
                    self._runtime.write_pages(kind, int(page), index, k, v)
        return logits

    def together(self, pages: PageAllocator, prompts: Sequence[Prompt]) -> list[npt.NDArray[np.float32]]:
        """One after the other."""
        return [self.run(pages, prompt.slot, prompt.tokens, prompt.start) for prompt in prompts]


class CudaEngine:
    """The kernel, its pages and prefill. `loop` launches all steps; `step` has it launch one, and reads what it left.

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
        windows: Sequence[int] = (8,),
        products: str | None = None,
        device: str = "cuda",
        pages: Mapping[str, int] | None = None,
        sizes: Sequence[int] | None = None,
        ahead: int = 3,
        time_limit_s: float = 2.0,
    ) -> None:
        """weights: on the device, or on the CPU, where PyTorch's prefill reads them. seed: orders pages. windows: of
        the ring, by a step's rows, as `Runtime` takes them.

        products: packed or torch, of the prefill in Triton; None = the one in PyTorch. pages: of each pool; None = as
        many as `rows` contexts need. sizes: batch sizes that a step may have; None = `rows` alone. ahead: steps in
        flight at most. time_limit_s: of a step. Raises MkError for a device, a library or a plan that does not fit.
        """
        self.geometry = g = weights.geometry
        self.rows, self.context = rows, context
        self.sizes = (rows,) if sizes is None else tuple(sizes)
        counts = pages or pages_for_contexts(g, rows, context, chunk, paged_chunk=products is not None)
        self.pages = PageAllocator(g, counts, rows, blocks_of(context), seed)
        copy = weights.to(device)
        self.runtime = Runtime(library, copy, counts, blocks_of(context), context, windows, time_limit_s)
        self.programs = programs_by_size(g, self.sizes, plan)
        self.loop = NativeLoop(self.runtime, self.pages.table, self._choose, ahead)
        self._prefill: TritonPrefill | HostPrefill
        if products is None:
            self._prefill = HostPrefill(weights, self.runtime, counts, chunk)
        else:
            pools = {kind: self.runtime[f"pool_{kind}"] for kind in KINDS}
            self._prefill = TritonPrefill(copy, pools, context, min(chunk, context), products)
            self.runtime.stream.wait_stream(torch.cuda.current_stream())  # which clears its buffers
        self._sampled = [0] * rows

    def executed_hash(self) -> str | None:
        return None if self.program is None else self.runtime.executed_hash()

    @property
    def program(self) -> Program | None:
        return self.runtime.program

    def prefill(self, row: int, tokens: Sequence[int], start: int = 0, every: bool = False) -> npt.NDArray[np.float32]:
        with torch.cuda.stream(self.runtime.stream):  # in turn with steps, which read the same pages
            return self._prefill.run(self.pages, row, tokens, start, every)

    @property
    def packs(self) -> bool:
        return isinstance(self._prefill, TritonPrefill) and self._prefill.bits_are_a_tokens_own

    def prefill_together(self, prompts: Sequence[Prompt]) -> Sequence[npt.NDArray[np.float32]]:
        with torch.cuda.stream(self.runtime.stream):
            return self._prefill.together(self.pages, prompts)

    def step(
        self,
        tokens: Sequence[int] | None,
        keys: Sequence[int],
        sampling: Sequence[SamplingParams],
        details: bool = True,
    ) -> StepOutputs:
        self.pages.advance(keys)
        fed = self._sampled if tokens is None else tokens
        fed = [token if length else 0 for token, length in zip(fed, keys, strict=True)]
        rows = len(keys)
        held = [self.pages.held(row) for row in range(rows)]
        self.loop.resume(Run(fed, keys, sampling, held, [1] * rows, [frozenset()] * rows))
        (found,) = finish(self.loop)
        self._sampled = np.maximum(found.tokens, 0).tolist()
        return self._outputs(keys, found) if details else StepOutputs(found.tokens, found.status, NO_LOGITS)

    def free(self, row: int) -> None:
        self.pages.free(row)

    def copy_out(self, kind: str, pages: Sequence[int]) -> torch.Tensor:
        with torch.cuda.stream(self.runtime.stream):
            return self.runtime[f"pool_{kind}"][list(pages)].cpu()

    def copy_in(self, kind: str, pages: Sequence[int], values: torch.Tensor) -> None:
        with torch.cuda.stream(self.runtime.stream):
            pool = self.runtime[f"pool_{kind}"]
            pool[list(pages)] = values.to(pool.device)

    def _choose(self, run: Run) -> Program:
        """The program with room for all that the rows hold pages for."""
        active = [held for held, keys in zip(run.held, run.keys, strict=True) if keys]
        longest = min(max(active, default=1), self.context)
        return self.programs[len(run.keys)].fit(self.program, longest, any(not p.greedy for p in run.sampling))

    def _outputs(self, keys: Sequence[int], found: LoopStep) -> StepOutputs:
        """What the step left on the device, in the interpreter's terms."""
        self.runtime.finish()
        rt, g, active = self.runtime, self.geometry, np.array(keys) > 0
        logits = np.where(active[:, None], rt["logits"][: len(keys), : g.vocab].cpu().numpy(), np.float32(np.nan))
        ids = rt["route_ids"][:, : len(keys)].cpu().numpy().astype(np.int64)
        routed = {layer: np.where(active[:, None], ids[layer], -1) for layer in g.sparse_layers}
        return StepOutputs(found.tokens, found.status, logits, routed)
