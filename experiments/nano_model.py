"""The nano model in the form that it trains in: the `cohere2_moe` forward, batched.

It equals transformers' `Cohere2MoeForCausalLM` (tests/test_nano_checkpoint.py). Its form is made for training: all
experts are one wide matrix product in which the router's weight of an unselected expert is zero, and sliding attention
is computed in blocks of one window, so its cost is linear in the sequence length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROW = 4096  # the longest sequence in tokens


class Block(nn.Module):
    """One parallel block: x + attention(norm(x)) + ffn(norm(x)). `config` is the HF config as a dict."""

    def __init__(self, config: Mapping[str, Any], layer: int) -> None:
        super().__init__()
        hidden, self.head_dim = config["hidden_size"], config["head_dim"]
        self.q_heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.top_k, self.experts = config["num_experts_per_tok"], config["num_experts"]
        self.eps = config["rms_norm_eps"]
        self.window = config["sliding_window"] if config["layer_types"][layer] == "sliding_attention" else None
        self.dense = layer < config["first_k_dense_replace"]
        self.rope = self.window is not None or self.dense
        ffn = config["prefix_dense_intermediate_size"] if self.dense else config["intermediate_size"]
        groups = 1 if self.dense else self.experts
        std, out_std = 0.02, 0.02 / math.sqrt(2 * config["num_hidden_layers"])

        def weight(*shape: int, std: float = std) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * std)

        self.norm = nn.Parameter(torch.ones(hidden))
        self.q_proj = weight(self.q_heads * self.head_dim, hidden)
        self.k_proj = weight(self.kv_heads * self.head_dim, hidden)
        self.v_proj = weight(self.kv_heads * self.head_dim, hidden)
        self.o_proj = weight(hidden, self.q_heads * self.head_dim, std=out_std)
        self.gate_proj, self.up_proj = weight(groups, ffn, hidden), weight(groups, ffn, hidden)
        self.down_proj = weight(groups, hidden, ffn, std=out_std)
        self.router = None if self.dense else weight(self.experts, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, hidden] -> (attention + ffn contribution [B, T, hidden], tokens routed to each expert and the
        balance loss as [experts + 1] float32; zeros for the dense layer)."""
        h = rms_norm(x, self.norm, self.eps)
        ffn, routing = self._ffn(h)
        return self._attention(h, cos, sin) + ffn, routing

    def _attention(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = h.shape

        def heads(weight: Tensor, count: int) -> Tensor:
            return F.linear(h, weight).view(batch, length, count, self.head_dim).transpose(1, 2)

        q, k, v = heads(self.q_proj, self.q_heads), heads(self.k_proj, self.kv_heads), heads(self.v_proj, self.kv_heads)
        if self.rope:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.q_heads // self.kv_heads, dim=1) for t in (k, v))
        if self.window is None or length <= self.window:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = windowed_attention(q, k, v, self.window)
        return F.linear(out.transpose(1, 2).reshape(batch, length, -1), self.o_proj)

    def _ffn(self, h: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = F.linear(h, self.gate_proj.flatten(0, 1)), F.linear(h, self.up_proj.flatten(0, 1))
        inner = F.silu(gate) * up
        if self.router is None:
            return F.linear(inner, self.down_proj[0]), h.new_zeros(self.experts + 1, dtype=torch.float32)
        with torch.autocast(h.device.type, enabled=False):  # float32 logits: selection without bf16 ties
            logits = F.linear(h.float(), self.router.float())
            _, chosen = logits.topk(self.top_k, dim=-1)
            score = torch.sigmoid(logits)
            mask = torch.zeros_like(score).scatter(-1, chosen, 1.0)
            load = mask.flatten(0, -2).mean(0) / self.top_k
            share = (score / score.sum(-1, keepdim=True)).flatten(0, -2).mean(0)
            balance = self.experts * (load * share).sum()
        inner = inner.unflatten(-1, (self.experts, -1)) * (score * mask).unsqueeze(-1).to(inner.dtype)
        down = self.down_proj.transpose(0, 1).flatten(1)  # [hidden, experts * ffn]
        return F.linear(inner.flatten(-2), down), torch.cat([load, balance[None]])


class NanoModel(nn.Module):
    def __init__(self, config: Mapping[str, Any], dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.eps = dropout, config["rms_norm_eps"]
        self.embed = nn.Parameter(torch.randn(config["vocab_size"], config["hidden_size"]) * 0.02)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config["num_hidden_layers"]))
        self.norm = nn.Parameter(torch.ones(config["hidden_size"]))
        pairs = torch.arange(0, config["head_dim"], 2, dtype=torch.float32) / config["head_dim"]
        angles = torch.outer(torch.arange(ROW, dtype=torch.float32), config["rope_theta"] ** -pairs)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens int64 [B, T <= ROW] -> (logits [B, T, vocab], routing [layers, experts + 1] as in Block)."""
        x = F.embedding(tokens, self.embed)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        routing = []
        for block in self.blocks:
            update, layer_routing = block(x, cos, sin)
            x = x + F.dropout(update, self.dropout, self.training)
            routing.append(layer_routing)
        return F.linear(rms_norm(x, self.norm, self.eps), self.embed), torch.stack(routing)

    def hf_views(self) -> dict[str, Tensor]:
        """The parameters under the names of the published checkpoint: one view an expert, head tied."""
        views: dict[str, Tensor] = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            prefix = f"model.layers.{layer}."
            views[prefix + "input_layernorm.weight"] = block.norm
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                views[f"{prefix}self_attn.{name}.weight"] = getattr(block, name)
            if block.router is not None:
                views[prefix + "mlp.gate.weight"] = block.router
            for name in ("gate_proj", "up_proj", "down_proj"):
                for expert, weight in enumerate(getattr(block, name)):
                    owner = "mlp." if block.dense else f"mlp.experts.{expert}."
                    views[f"{prefix}{owner}{name}.weight"] = weight
        return {name: view.detach() for name, view in views.items()}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved RoPE: x [B, heads, T, head_dim] with pairs (2i, 2i + 1); cos, sin float32 [T, head_dim / 2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention over the last `window` keys (self included): q, k, v [B, heads, T, d], T a multiple of window.

    Block c of `window` queries sees keys of blocks c-1 and c only, under one mask; block 0 is plain causal.
    """
    first = F.scaled_dot_product_attention(q[:, :, :window], k[:, :, :window], v[:, :, :window], is_causal=True)
    query = torch.arange(window, device=q.device)[:, None]
    key = torch.arange(2 * window, device=q.device)[None]
    visible = (key > query) & (key <= query + window)
    # Finite, so that no kernel meets a row whose running maximum is -inf; every query sees itself, so it is as exact.
    bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill(~visible, -1e9)

    def blocks(t: Tensor) -> Tensor:  # [B, heads, n, w, d] -> [B * n, heads, w, d]
        return t.transpose(1, 2).flatten(0, 1)

    def pairs(t: Tensor) -> Tensor:
        t = t.unflatten(2, (-1, window))
        return blocks(torch.cat([t[:, :, :-1], t[:, :, 1:]], dim=3))

    later = blocks(q[:, :, window:].unflatten(2, (-1, window)))
    rest = F.scaled_dot_product_attention(later, pairs(k), pairs(v), attn_mask=bias[None, None])
    rest = rest.unflatten(0, (len(q), -1)).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, rest], dim=2)
