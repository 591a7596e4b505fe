"""The operations of a decode step by torch: cuBLAS, its attention, and experts in a loop or as one grouped product.

Each has weights of its own in every layer, as far as there is room; inputs and weights are noise of a model's size.
Functions take nothing and return what they compute, so that they can be captured as a CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from mk.model.geometry import Geometry, tile_rules

ROOM = 6e9  # bytes of an operation's weights; beyond that, layers share them. A card's L2 holds a hundredth of it
STD = 0.02
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Run = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of a step: contexts of the rows, and the experts of each row, int [layers, rows, top_k], on the CPU."""

    geometry: Geometry
    contexts: Sequence[int]
    ids: Tensor
    device: torch.device

    @property
    def rows(self) -> int:
        return len(self.contexts)

    def noise(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(0, std)

    def layered(self, layers: int, *shape: int) -> list[Tensor]:
        """Weights of each layer, as many different ones as there is room for."""
        size = 2.0 * torch.Size(shape).numel()
        made = [self.noise(*shape, std=STD) for _ in range(max(1, min(layers, int(ROOM / size))))]
        return [made[layer % len(made)] for layer in range(layers)]


def methods(operation: str) -> list[str]:
    """How torch can do an operation; none where it has nothing that compares."""
    if operation in ("qkv", "oproj", "router", "dense_up", "dense_down", "lm_head"):
        return ["linear"]
    if operation in ("attn_full", "attn_sliding"):
        return list(SDPA)
    if operation in ("moe_up", "moe_down"):
        return ["loop", "grouped"]
    return {"topk": ["topk"], "rmsnorm": ["rms_norm"]}.get(operation, [])


def runs(operation: str, method: str, inputs: Inputs) -> list[Run]:
    """One for each layer that has the operation. Raises what torch does for a method that it lacks."""
    g = inputs.geometry
    if operation in ("attn_full", "attn_sliding"):
        return list(_attention(operation.removeprefix("attn_"), method, inputs))
    if operation in ("moe_up", "moe_down"):
        return list(_experts(operation.removeprefix("moe_"), method, inputs))
    if operation == "topk":
        scores = [inputs.noise(inputs.rows, g.experts).float() for _ in g.sparse_layers]
        return [lambda s=s: torch.topk(s, g.top_k).values.sigmoid() for s in scores]  # type: ignore[misc]
    if operation == "rmsnorm":
        x, a, f = (inputs.noise(inputs.rows, g.hidden) for _ in range(3))
        weights = inputs.layered(g.layers, g.hidden)
        return [lambda w=w: rms_norm(x + (a + f), (g.hidden,), w, g.rms_eps) for w in weights]  # type: ignore[misc]
    name = {"oproj": "o", "lm_head": "head"}.get(operation, operation)
    layers = {"router": len(g.sparse_layers), "lm_head": 1}.get(operation, g.layers)
    if operation.startswith("dense"):
        layers = len(g.dense_layers)
    tile = tile_rules(g).matrices[name]
    x = inputs.noise(inputs.rows, tile.k)

    def product(w: Tensor) -> Tensor:
        out = linear(x, w)
        if operation == "dense_up":
            gate, up = out.chunk(2, dim=-1)
            return silu(gate) * up
        return out.argmax(-1) if operation == "lm_head" else out

    return [lambda w=w: product(w) for w in inputs.layered(layers, tile.rows, tile.k)]  # type: ignore[misc]


def _attention(kind: str, method: str, inputs: Inputs) -> Iterator[Run]:
    """One query a row over its keys, of equally long rows."""
    g, backend = inputs.geometry, SDPA[method]
    (keys,) = set(inputs.contexts)
    keys = min(keys, g.window_keys) if kind == "sliding" else keys
    layers = len(g.sliding_layers if kind == "sliding" else g.full_layers)
    q = inputs.noise(inputs.rows, g.q_heads, 1, g.head_dim)
    shape = inputs.rows, g.kv_heads, keys, g.head_dim

    def attention(k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    for k, v in zip(inputs.layered(layers, *shape), inputs.layered(layers, *shape), strict=True):
        yield lambda k=k, v=v: attention(k, v)  # type: ignore[misc]


def _experts(name: str, method: str, inputs: Inputs) -> Iterator[Run]:
    """Products of the active experts with the rows that chose them, without the weighted sum over a row's experts."""
    g = inputs.geometry
    tile = tile_rules(g).matrices[name]
    x = inputs.noise(inputs.rows if name == "up" else inputs.rows * g.top_k, tile.k)
    weights = inputs.layered(len(g.sparse_layers), g.experts, tile.rows, tile.k)

    def activated(out: Tensor) -> Tensor:
        gate, up = out.chunk(2, dim=-1)
        return silu(gate) * up if name == "up" else out

    for layer, w in zip(g.sparse_layers, weights, strict=True):
        chosen = inputs.ids[layer, : inputs.rows].flatten().long()
        order = chosen.argsort(stable=True)  # by expert, then by row
        counts = torch.bincount(chosen, minlength=g.experts)
        rows = (order // g.top_k if name == "up" else torch.arange(len(order))).to(inputs.device)
        if method == "loop":
            ends = counts.cumsum(0).tolist()
            spans = [(e, a, b) for e, (a, b) in enumerate(itertools.pairwise([0, *ends])) if b > a]
            yield (
                lambda w=w, rows=rows, spans=spans: torch.cat(  # type: ignore[misc]
                    [activated(linear(x[rows[a:b]], w[e])) for e, a, b in spans]
                )
            )
        else:
            ends_of = counts.cumsum(0).int().to(inputs.device)
            yield lambda w=w, rows=rows, ends_of=ends_of: activated(  # type: ignore[misc]
                torch._grouped_mm(x[rows], w.transpose(-2, -1), offs=ends_of)
            )
