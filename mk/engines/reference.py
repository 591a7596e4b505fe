"""The engine that is the plain PyTorch forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from mk.engines.protocol import Logits
from mk.errors import MkError
from mk.interpreter import StepOutputs
from mk.model.reference import LayerOutput, ReferenceCache, reference_forward
from mk.model.tensors import WeightSource, parameter_count
from mk.routing import Router
from mk.sampling import SamplingParams, sample_row
from mk.schedule.lower import Program
from mk.threads import threads_for


class ReferenceEngine:
    """The PyTorch reference, one row after the other. It knows no pages, programs or SMs."""

    name = "reference"

    def __init__(self, source: WeightSource, rows: int, context: int, router: Router | None = None) -> None:
        self.geometry = source.geometry
        self.rows, self.context = rows, context
        self.program: Program | None = None
        self._source = source
        self._nbytes = 4 * parameter_count(source.geometry)  # as float32
        self._router = router
        self._caches = [ReferenceCache() for _ in range(rows)]
        self._sampled: list[int] = []
        self._steps = 0

    def executed_hash(self) -> None:
        return None

    def prefill(self, row: int, tokens: Sequence[int], start: int = 0, every: bool = False) -> Logits:
        if not tokens:
            raise MkError("prefill: the prompt has no tokens")
        if every:
            return np.stack([self._forward(row, [token]) for token in tokens])
        return self._forward(row, tokens)

    def step(
        self,
        tokens: Sequence[int] | None,
        keys: Sequence[int],
        sampling: Sequence[SamplingParams],
        details: bool = True,
    ) -> StepOutputs:
        g, tokens = self.geometry, self._sampled if tokens is None else tokens
        active = np.array(keys) > 0
        out = StepOutputs.blank(self.rows, g.vocab)
        out.expert_ids = {layer: np.full((self.rows, g.top_k), -1, np.int64) for layer in g.sparse_layers}
        forced = self._forced_ids(active)
        for row in np.flatnonzero(active).tolist():
            trace: list[LayerOutput] = []
            ids = [forced[layer][row, None] if layer in forced else None for layer in range(g.layers)]
            out.logits[row] = self._forward(row, [tokens[row]], trace, ids)
            out.tokens[row] = sample_row(out.logits[row], sampling[row], keys[row])
            for layer in g.sparse_layers:
                chosen = trace[layer].expert_ids
                assert chosen is not None
                out.expert_ids[layer][row] = chosen[0].numpy()
        self._sampled = out.tokens.tolist()
        self._steps += 1
        return out

    def free(self, row: int) -> None:
        self._caches[row] = ReferenceCache()

    def _forced_ids(self, active: npt.NDArray[np.bool_]) -> dict[int, torch.Tensor]:
        """A routing mode's ids [rows, top_k] by layer: they do not depend on logits, only on who is active."""
        if self._router is None:
            return {}
        g = self.geometry
        logits = np.where(active[:, None], np.zeros((self.rows, g.experts), np.float32), np.float32(np.nan))
        return {layer: torch.from_numpy(self._router(layer, self._steps, logits)) for layer in g.sparse_layers}

    def _forward(
        self,
        row: int,
        tokens: Sequence[int],
        trace: list[LayerOutput] | None = None,
        ids: Sequence[torch.Tensor | None] | None = None,
    ) -> Logits:
        fresh = torch.tensor(list(tokens))
        with threads_for(self._nbytes):
            logits = reference_forward(
                self.geometry, self._source.tensor, fresh, cache=self._caches[row], trace=trace, expert_ids=ids, keep=1
            )
        last: Logits = logits[0].numpy()
        return last
