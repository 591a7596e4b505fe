"""Triton's prefill on a CPU: it fills pools laid out as a GPU reads them, then the interpreter's pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from mk.errors import MkError
from mk.kernel.step_params import KV_BLOCK
from mk.kv import KINDS, KVCache, PageAllocator, kv_layers
from mk.model.packing import PackedWeights
from mk.page_layout import hand_over, pack_keys, pack_values
from prefill.chunks import Prompt
from prefill.kernels import interpreted
from prefill.triton_prefill import TritonPrefill


def require_interpreter() -> None:
    """Raises MkError where Triton's kernels are made for a GPU."""
    if not interpreted():
        raise MkError(
            "prefill=triton on a CPU needs Triton's interpreter, and Triton was imported without it",
            hint="set TRITON_INTERPRET=1 in the environment, or prefill=torch",
        )


class InterpretedPrefill:
    """Prefills sequences into one KV cache. Triton's interpreter is slow, so a prompt should be short."""

    def __init__(
        self, weights: PackedWeights, kv: KVCache, positions: int, numerics: str = "float32", chunk: int = 512
    ) -> None:
        """numerics: float32, or kernel for bf16 activations. positions: of the longest sequence.

        Raises MkError where Triton's kernels are made for a GPU.
        """
        require_interpreter()
        self.kv = kv
        dtype = torch.bfloat16 if numerics == "kernel" else torch.float32
        heads = kv.geometry.kv_heads
        pools = {
            kind: torch.full((kv.pages[kind], len(kv_layers(kv.geometry, kind)), heads, 2, KV_BLOCK), torch.nan).to(
                dtype
            )
            for kind in KINDS
        }
        self._prefill = TritonPrefill(weights, pools, positions, min(chunk, positions))

    def run(
        self, pages: PageAllocator, slot: int, tokens: Sequence[int], start: int = 0, every: bool = False
    ) -> npt.NDArray[np.float32]:
        """As `TritonPrefill.run`. Raises MkError."""
        if start:
            self._take_over(pages, slot)
        logits = self._prefill.run(pages, slot, tokens, start, every)
        hand_over(self._prefill.pools, self.kv, pages, slot)
        return logits

    def together(self, pages: PageAllocator, prompts: Sequence[Prompt]) -> list[npt.NDArray[np.float32]]:
        """As `TritonPrefill.together`. Raises MkError."""
        for prompt in prompts:
            if prompt.start:
                self._take_over(pages, prompt.slot)
        logits = self._prefill.together(pages, prompts)
        for prompt in prompts:
            hand_over(self._prefill.pools, self.kv, pages, prompt.slot)
        return logits

    def _take_over(self, pages: PageAllocator, slot: int) -> None:
        """The slot's pages as they stand: decode steps may have written to them since they were prefilled."""
        for kind, pool in self._prefill.pools.items():
            held = pages.table[kind][slot]
            held = held[held >= 0]
            values = torch.from_numpy(self.kv.pools[kind][held])
            packed = torch.stack([pack_keys(values[:, :, :, 0]), pack_values(values[:, :, :, 1])], dim=3)
            pool[torch.from_numpy(held).long()] = packed.to(pool.dtype)
