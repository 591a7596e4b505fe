"""The engine that executes lowered descriptors on virtual SMs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mk.decode_loop import TwinLoop
from mk.engines.protocol import Logits
from mk.errors import MkError
from mk.interpreter import Machine, StepInputs, StepOutputs
from mk.kv import KINDS, KVCache, blocks_of, pages_for_contexts
from mk.model.packing import PackedWeights
from mk.programs import Plan, programs_by_size
from mk.routing import Router
from mk.sampling import SamplingParams
from mk.schedule.lower import Program
from prefill.chunks import Prompt
from prefill.interpreted import InterpretedPrefill
from prefill.torch_prefill import TorchPrefill


class MachineEngine:
    """The interpreter, its paged KV, and programs that change when the longest context outgrows its bucket."""

    name = "interpreter"

    def __init__(
        self,
        weights: PackedWeights,
        plan: Plan,
        rows: int,
        context: int,
        numerics: str = "float32",
        chunk: int = 512,
        seed: int = 0,
        router: Router | None = None,
        prefill: str = "torch",
        pages: Mapping[str, int] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """`seed` orders both the interleaving of the SMs and the pages handed out. prefill: torch, triton.

        pages: of each pool; None = as many as `rows` contexts need. sizes: as of `PagedEngine`; None = `rows` alone.
        """
        self.geometry = g = weights.geometry
        self.rows, self.context = rows, context
        self.sizes = (rows,) if sizes is None else tuple(sizes)
        pages = pages or pages_for_contexts(g, rows, context, chunk, paged_chunk=prefill == "triton")
        self.kv = KVCache(g, pages["full"], pages["sliding"])
        self.pages = self.kv.allocator(rows, blocks_of(context), seed)
        self.machine = Machine(weights, self.kv, numerics, seed, router)
        self.programs = programs_by_size(g, self.sizes, plan)
        self.program: Program | None = None
        self.loop = TwinLoop(self._compute)
        self._prefill: TorchPrefill | InterpretedPrefill
        if prefill == "triton":
            self._prefill = InterpretedPrefill(weights, self.kv, context, numerics, chunk)
        else:
            self._prefill = TorchPrefill(weights, self.kv, numerics, chunk)

    def executed_hash(self) -> str | None:
        return None if self.program is None else self.machine.executed_hash()

    def prefill(self, row: int, tokens: Sequence[int], start: int = 0, every: bool = False) -> Logits:
        return self._prefill.run(self.pages, row, tokens, start, every)

    @property
    def packs(self) -> bool:
        return isinstance(self._prefill, InterpretedPrefill)

    def prefill_together(self, prompts: Sequence[Prompt]) -> Sequence[Logits]:
        return self._prefill.together(self.pages, prompts)

    def step(
        self,
        tokens: Sequence[int] | None,
        keys: Sequence[int],
        sampling: Sequence[SamplingParams],
        details: bool = True,
    ) -> StepOutputs:
        self.pages.advance(keys)
        return self._compute(tokens, keys, sampling)

    def _compute(
        self, tokens: Sequence[int] | None, keys: Sequence[int], sampling: Sequence[SamplingParams]
    ) -> StepOutputs:
        self._fit(len(keys), max(keys), any(not params.greedy for params in sampling))
        table = {kind: self.pages.table[kind][: len(keys)] for kind in KINDS}
        try:
            return self.machine.step(StepInputs(tokens, keys, table, list(sampling)))
        except MkError:
            self.program = None  # its counters stand somewhere in the middle of a step
            raise

    def free(self, row: int) -> None:
        self.pages.free(row)

    def copy_out(self, kind: str, pages: Sequence[int]) -> npt.NDArray[np.float32]:
        return self.kv.pools[kind][list(pages)]

    def copy_in(self, kind: str, pages: Sequence[int], values: npt.NDArray[np.float32]) -> None:
        self.kv.pools[kind][list(pages)] = values

    def _fit(self, rows: int, longest: int, draws: bool) -> None:
        """Change to a program that fits. Loading clears counters; fed-back tokens stay while the batch size does."""
        program = self.programs[rows].fit(self.program, longest, draws)
        if program is not self.program:
            self.program = program
            self.machine.load(program)
