"""The model in plain PyTorch: the oracle that kernels, interpreter and other engines are measured against.

Arithmetic is float32 or float64 over the bf16 weights, upcast one matrix at a time where they are used. In float32 it
equals transformers' `Cohere2MoeForCausalLM` (float32, eager attention) but for the order of sums. The rotation table is
part of the model and is float32 in either case, as transformers builds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from mk.errors import MkError
from mk.model import tensors
from mk.model.geometry import Geometry

_QUERY_BLOCK = 256  # queries whose scores exist at a time
_HEAD_BLOCK = 16_384  # vocabulary rows upcast at a time


@dataclass(slots=True)
class ReferenceCache:
    """Keys (rotated) and values of every layer, [kv_heads, tokens, head_dim] each, and the tokens they stand for."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    length: int = 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new tokens of a layer and return all it holds."""
        if layer in self.keys:
            keys = torch.cat([self.keys[layer], keys], dim=1)
            values = torch.cat([self.values[layer], values], dim=1)
        self.keys[layer], self.values[layer] = keys, values
        return keys, values


@dataclass(slots=True)
class LayerOutput:
    """What one layer adds to the residual, [tokens, hidden] each, and how it routed (None for a dense layer)."""

    attention: Tensor  # after o_proj
    ffn: Tensor
    router_logits: Tensor | None  # [tokens, experts]
    expert_ids: Tensor | None  # int64 [tokens, top_k], by falling logit, ties by rising id


def rope_table(geometry: Geometry, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every pair's angle, float32 [tokens, head_dim / 2], made on the CPU.

    Angles are float32 products, as in transformers: at large positions their rounding is part of the model.
    """
    pairs = torch.arange(0, geometry.head_dim, 2, dtype=torch.float32)
    frequency = 1.0 / (geometry.rope_theta ** (pairs / geometry.head_dim))
    angle = positions.cpu().to(torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs (2i, 2i+1) of x [heads, tokens, head_dim] by tables [tokens, head_dim / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def top_k(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest of each row, int64 [tokens, k], by falling value; of equal ones the lower id comes first."""
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]


class Reference:
    """A model's layers one at a time, so that a caller can feed each of them the input it chooses."""

    def __init__(self, geometry: Geometry, weights: tensors.Weights, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise MkError(f"reference: dtype={dtype} is neither float32 nor float64")
        if torch.get_float32_matmul_precision() != "highest":
            raise MkError("reference: float32 products are set to lose precision", hint="leave TF32 off")
        self.geometry = geometry
        self.dtype = dtype
        self._get = tensors.lookup(weights)

    def weight(self, name: str) -> Tensor:
        return self._get(name).to(self.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual before layer 0, [tokens, hidden]."""
        table = self._get(tensors.EMBED)
        return table[tokens.to(table.device)].to(self.dtype)

    def layer(
        self, layer: int, x: Tensor, start: int, cache: ReferenceCache, expert_ids: Tensor | None = None
    ) -> LayerOutput:
        """One layer over the residual x [tokens, hidden] at positions start.. ; the cache gains their K and V.

        Both halves read the same norm of x, so the next residual is `x + (attention + ffn)`. `expert_ids` [tokens, any]
        replaces the router's choice; the weights are then the sigmoids of the logits of those ids.
        """
        g = self.geometry
        h = self.normed(layer, x)
        attention = self._attention(layer, h, start, cache)
        if g.mlp_kinds[layer] == "dense":
            gate, up, down = (self.weight(tensors.dense(layer, p)) for p in ("gate", "up", "down"))
            return LayerOutput(attention, _swiglu(h, gate, up, down), None, None)
        logits = h @ self.weight(tensors.router(layer)).T
        ids = top_k(logits, g.top_k) if expert_ids is None else expert_ids.to(logits.device)
        return LayerOutput(attention, self._experts(layer, h, logits, ids), logits, ids)

    def normed(self, layer: int, x: Tensor) -> Tensor:
        """What both halves of a layer read, [tokens, hidden]."""
        return rms_norm(x, self.weight(tensors.norm(layer)), self.geometry.rms_eps)

    def project(self, layer: int, h: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [q_heads, tokens, d], k and v [kv_heads, tokens, d] of the normed input, rotated where the layer does."""
        g, tokens = self.geometry, len(h)
        q, k, v = (
            (h @ self.weight(tensors.attention(layer, p)).T).view(tokens, -1, g.head_dim).transpose(0, 1) for p in "qkv"
        )
        if g.rope[layer]:
            table = rope_table(g, torch.arange(start, start + tokens))
            cos, sin = (t.to(h.device, self.dtype) for t in table)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v

    def logits(self, x: Tensor) -> Tensor:
        """Logits [tokens, vocab] of the residual after the last layer."""
        h = rms_norm(x, self.weight(tensors.FINAL_NORM), self.geometry.rms_eps)
        head = self._get(tensors.EMBED)
        blocks = [h @ block.to(self.dtype).T for block in head.split(_HEAD_BLOCK)]
        return torch.cat(blocks, dim=-1) * self.geometry.logit_scale

    def _attention(self, layer: int, h: Tensor, start: int, cache: ReferenceCache) -> Tensor:
        g = self.geometry
        q, k, v = self.project(layer, h, start)
        keys, values = cache.append(layer, k, v)
        window = g.window_keys if g.layer_kinds[layer] == "sliding" else None
        heads = torch.cat(list(_attend(q, keys, values, start, window)))
        return heads @ self.weight(tensors.attention(layer, "o")).T

    def _experts(self, layer: int, h: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
        """Chosen experts, each weighted by the sigmoid of its logit (not renormalised), added in rising id."""
        weights = torch.sigmoid(logits.gather(1, ids))
        total = torch.zeros_like(h)
        for expert in ids.unique().tolist():
            rows, choice = torch.where(ids == expert)
            gate, up, down = (self.weight(tensors.expert(layer, expert, p)) for p in ("gate", "up", "down"))
            total.index_add_(0, rows, weights[rows, choice, None] * _swiglu(h[rows], gate, up, down))
        return total


def _swiglu(h: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(h @ gate.T) * (h @ up.T)) @ down.T


def _attend(q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Iterator[Tensor]:
    """Causal attention of q [q_heads, tokens, d] at start.. over keys 0.. , in blocks of tokens [block, q_width]."""
    q_heads, tokens, d = q.shape
    kv_heads = len(keys)
    for block in range(0, tokens, _QUERY_BLOCK):
        part = q[:, block : block + _QUERY_BLOCK]
        position = torch.arange(start + block, start + block + part.shape[1], device=q.device)[:, None]
        first = 0 if window is None else max(0, start + block - window + 1)
        last = start + block + part.shape[1]
        key = torch.arange(first, last, device=q.device)[None, :]
        visible = key <= position if window is None else (key <= position) & (key > position - window)
        grouped = part.reshape(kv_heads, q_heads // kv_heads, -1, d)
        scores = grouped @ keys[:, None, first:last].transpose(-1, -2) * d**-0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        heads = weights @ values[:, None, first:last]
        yield heads.reshape(q_heads, -1, d).transpose(0, 1).reshape(-1, q_heads * d)


@torch.no_grad()
def reference_forward(
    geometry: Geometry,
    weights: tensors.Weights,
    tokens: Tensor,
    dtype: torch.dtype = torch.float32,
    cache: ReferenceCache | None = None,
    trace: list[LayerOutput] | None = None,
    expert_ids: Sequence[Tensor | None] | None = None,
    keep: int | None = None,
) -> Tensor:
    """Logits [T, vocab] of int64 tokens [T], or of the last `keep` of them, in `dtype`, on the weights' device.

    A cache makes the tokens continue those it holds, and gains them. `trace` gains every layer's output; `expert_ids`,
    one [T, top_k] (or None) a layer, replays a routing. Raises MkError for tokens outside the model's range.
    """
    cache = ReferenceCache() if cache is None else cache
    _check_tokens(geometry, tokens, cache.length)
    model = Reference(geometry, weights, dtype)
    x = model.embed(tokens)
    for layer in range(geometry.layers):
        ids = None if expert_ids is None else expert_ids[layer]
        out = model.layer(layer, x, cache.length, cache, ids)
        x = x + (out.attention + out.ffn)
        if trace is not None:
            trace.append(out)
    cache.length += len(tokens)
    return model.logits(x if keep is None else x[-keep:])


def greedy_decode(
    geometry: Geometry,
    weights: tensors.Weights,
    prompt: Sequence[int],
    steps: int,
    dtype: torch.dtype = torch.float32,
    eos: Sequence[int] = (),
) -> list[int]:
    """Up to `steps` tokens after the prompt, each of highest logit (of equal ones the lowest id); an eos ends it."""
    cache = ReferenceCache()
    fresh = list(prompt)
    out: list[int] = []
    while len(out) < steps and not (out and out[-1] in eos):
        logits = reference_forward(geometry, weights, torch.tensor(fresh), dtype, cache, keep=1)[0]
        if not logits.isfinite().all():
            raise MkError(f"reference: logits after {cache.length} tokens are not finite")
        fresh = [int((logits == logits.max()).nonzero()[0])]
        out += fresh
    return out


def _check_tokens(geometry: Geometry, tokens: Tensor, start: int) -> None:
    if tokens.ndim != 1 or tokens.is_floating_point() or len(tokens) == 0:
        raise MkError(f"reference: tokens must be integers [T], T >= 1, not {tokens.dtype} {list(tokens.shape)}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= geometry.vocab:
        raise MkError(f"reference: a token is outside 0..{geometry.vocab - 1}")
    if start + len(tokens) > geometry.max_positions:
        raise MkError(f"reference: {start + len(tokens)} tokens exceed max_positions={geometry.max_positions}")
