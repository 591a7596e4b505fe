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

from mk.kv import PAGE
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


METHODS: dict[str, dict[str, bool]] = {
    "qkv": {"linear": False, "linear_rope": True},
    "routing": {"linear_topk": True},
    "attention_full": dict.fromkeys(SDPA, True),
    "attention_sliding": dict.fromkeys(SDPA, True),
    "moe_up": {"loop": False, "grouped": True},
    "moe_output": {"loop": False, "grouped": True},
    "rmsnorm": {"rms_norm": False},
    **{operation: {"linear": True} for operation in ("oproj", "dense_up", "dense_down", "lm_head")},
}
"""How torch can do an operation, and whether it then does all that the kernel's does, and no more: `linear` of qkv
neither rotates nor appends, `loop` knows the experts beforehand, and the kernel's rmsnorm leaves the division to the
products."""


def runs(operation: str, method: str, inputs: Inputs) -> list[Run]:
    """One for each layer that has the operation. Raises what torch does for a method that it lacks."""
    g = inputs.geometry
    if operation in ("attention_full", "attention_sliding"):
        return list(_attention(operation.removeprefix("attention_"), method, inputs))
    if operation in ("moe_up", "moe_output"):
        return list(_experts("up" if operation == "moe_up" else "down", method, inputs))
    if method == "linear_rope":
        return list(_qkv(inputs))
    if operation == "rmsnorm":
        x, a, f = (inputs.noise(inputs.rows, g.hidden) for _ in range(3))
        weights = inputs.layered(g.layers, g.hidden)
        return [lambda w=w: rms_norm(x + (a + f), (g.hidden,), w, g.rms_eps) for w in weights]  # type: ignore[misc]
    name = {"oproj": "o", "lm_head": "head", "routing": "router"}.get(operation, operation)
    layers = {"routing": len(g.sparse_layers), "lm_head": 1}.get(operation, g.layers)
    if operation.startswith("dense"):
        layers = len(g.dense_layers)
    tile = tile_rules(g).matrices[name]
    x = inputs.noise(inputs.rows, tile.k)

    def product(w: Tensor) -> Tensor:
        out = linear(x, w)
        if operation == "dense_up":
            gate, up = out.chunk(2, dim=-1)
            return silu(gate) * up
        if operation == "routing":
            return out.float().topk(g.top_k).values.sigmoid()
        return out.argmax(-1) if operation == "lm_head" else out

    return [lambda w=w: product(w) for w in inputs.layered(layers, tile.rows, tile.k)]  # type: ignore[misc]


def _qkv(inputs: Inputs) -> Iterator[Run]:
    """The projection, q and k rotated where the layer does so, and this token's k and v in a page of the layer's."""
    g, rows = inputs.geometry, inputs.rows
    tile, heads = tile_rules(g).matrices["qkv"], g.q_heads + g.kv_heads
    x = inputs.noise(rows, tile.k)
    angles = torch.rand(rows, 1, g.head_dim // 2, device=inputs.device)
    turn = torch.polar(torch.ones_like(angles), angles)  # of neighbouring dims

    def project(w: Tensor, page: Tensor, rotates: bool) -> Tensor:
        out = linear(x, w).view(rows, heads + g.kv_heads, g.head_dim)
        qk, v = out[:, :heads], out[:, heads:]
        if rotates:
            pairs = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2)))
            qk = torch.view_as_real(pairs * turn).flatten(-2).bfloat16()
        page[0, :, :, 0].copy_(qk[:, g.q_heads :])
        page[1, :, :, 0].copy_(v)
        return qk[:, : g.q_heads]

    weights = inputs.layered(g.layers, tile.rows, tile.k)
    pages = inputs.layered(g.layers, 2, rows, g.kv_heads, PAGE, g.head_dim)
    for w, page, rotates in zip(weights, pages, g.rope, strict=True):
        yield lambda w=w, page=page, rotates=rotates: project(w, page, rotates)  # type: ignore[misc]


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


@dataclass(frozen=True, slots=True)
class Routed:
    """What a product of experts needs of the router's choice. Pairs of a row and an expert stand by expert, then by
    row; ends [experts]: where each one's pairs end. rows, weights: of each pair."""

    ends: Tensor
    rows: Tensor
    weights: Tensor

    @classmethod
    def of(cls, logits: Tensor, top_k: int) -> Routed:
        """logits: float32 [rows, experts]. Nothing here asks the host."""
        best = logits.topk(top_k)
        ids = best.indices.flatten()
        order = ids.argsort(stable=True)
        experts = torch.arange(logits.shape[1], device=logits.device)
        ends = torch.searchsorted(ids[order], experts, right=True).int()
        return cls(ends, order // top_k, best.values.sigmoid().flatten()[order])


def _experts(name: str, method: str, inputs: Inputs) -> Iterator[Run]:
    """Products of the active experts with the rows that chose them; of down, also their weighted sum by row.

    grouped: from the router's logits, as the kernel's waves are. loop: over experts that the host knows.
    """
    g = inputs.geometry
    tile = tile_rules(g).matrices[name]
    x = inputs.noise(inputs.rows if name == "up" else inputs.rows * g.top_k, tile.k)
    weights = inputs.layered(len(g.sparse_layers), g.experts, tile.rows, tile.k)

    def product(w: Tensor, taken: Tensor, ends: Tensor, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        if method == "loop":
            return torch.cat([linear(taken[a:b], w[e]) for e, a, b in spans])
        return torch._grouped_mm(taken, w.transpose(-2, -1), offs=ends)

    def run(w: Tensor, logits: Tensor, known: Routed, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        routed = known if method == "loop" else Routed.of(logits, g.top_k)
        out = product(w, x[routed.rows] if name == "up" else x, routed.ends, spans)
        if name == "up":
            gate, up = out.chunk(2, dim=-1)
            return silu(gate) * up
        total = torch.zeros(inputs.rows, tile.rows, device=inputs.device)
        return total.index_add_(0, routed.rows, out * routed.weights[:, None])

    for layer, w in zip(g.sparse_layers, weights, strict=True):
        chosen = inputs.ids[layer, : inputs.rows].long().to(inputs.device)
        logits = inputs.noise(inputs.rows, g.experts).float()
        logits.scatter_add_(1, chosen, torch.full_like(chosen, 20, dtype=torch.float32))  # so that these are the top
        known = Routed.of(logits, g.top_k)
        cuts = [0, *known.ends.tolist()]
        spans = [(e, a, b) for e, (a, b) in enumerate(itertools.pairwise(cuts)) if b > a]
        yield lambda w=w, logits=logits, known=known, spans=spans: run(w, logits, known, spans)  # type: ignore[misc]
