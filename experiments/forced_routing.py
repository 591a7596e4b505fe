"""The expert ids of a routing mode as tables for the kernel, and how many experts they touch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mk.config import RoutingConfig
from mk.kernel.step_params import MAX_ROWS
from mk.model.geometry import Geometry
from mk.routing import Uniform, make_router

RECORDED = "recorded"  # routing.path of a variant: what routing=checkpoint chose before it in the same run


def forced_ids(routing: RoutingConfig, g: Geometry, rows: int, steps: int) -> Tensor | None:
    """Ids of `rows` rows, int32 [steps, layers, MAX_ROWS, top_k] on the CPU; None leaves them to the model's router.

    They are those of `mk/routing.py`; uniform ones are drawn for all layers at once, because one by one they take
    seconds. Rows beyond the batch and dense layers hold 0. Raises MkError where the mode does not fit.
    """
    router = make_router(routing, g, rows)
    if router is None:
        return None
    ids = torch.zeros(steps, g.layers, MAX_ROWS, g.top_k, dtype=torch.int32)
    layers = list(g.sparse_layers)
    logits = np.zeros((rows, g.experts), np.float32)
    for step in range(steps):
        if isinstance(router, Uniform):
            chosen = router.draw(layers, step, rows)
        else:
            chosen = np.stack([router(layer, step, logits) for layer in layers])
        ids[step, layers, :rows] = torch.from_numpy(chosen.astype(np.int32))
    return ids


def distinct_experts(ids: Tensor, g: Geometry) -> list[float]:
    """Experts that each sparse layer touches in a step, mean over steps; ids [steps, layers, rows, top_k]."""
    chosen = ids[:, list(g.sparse_layers)].flatten(2).long()
    touched = torch.zeros(*chosen.shape[:2], g.experts, dtype=torch.bool, device=ids.device)
    counts: list[float] = touched.scatter_(2, chosen, True).sum(-1).double().mean(0).tolist()
    return counts
