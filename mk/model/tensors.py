"""Names and shapes of a checkpoint's tensors, and what every source of weights offers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from mk.model.geometry import Geometry

EMBED = "model.embed_tokens.weight"  # also the LM head: the two are tied
FINAL_NORM = "model.norm.weight"


class WeightSource(Protocol):
    """A model's tensors by their Hugging Face names, each made or read when it is asked for."""

    geometry: Geometry
    label: str  # "checkpoint" | "random"

    def tensor(self, hf_name: str) -> torch.Tensor:
        """The bf16 tensor of that name, shaped as `tensor_shapes` says."""
        ...


Weights = Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor]


def lookup(weights: Weights) -> Callable[[str], torch.Tensor]:
    """Either form of weights as a function of the tensor's name."""
    return weights.__getitem__ if isinstance(weights, Mapping) else weights


def norm(layer: int) -> str:
    return f"model.layers.{layer}.input_layernorm.weight"


def attention(layer: int, projection: str) -> str:
    """`projection` is q, k, v or o."""
    return f"model.layers.{layer}.self_attn.{projection}_proj.weight"


def router(layer: int) -> str:
    return f"model.layers.{layer}.mlp.gate.weight"


def expert(layer: int, index: int, projection: str) -> str:
    """`projection` is gate, up or down."""
    return f"model.layers.{layer}.mlp.experts.{index}.{projection}_proj.weight"


def dense(layer: int, projection: str) -> str:
    """`projection` is gate, up or down."""
    return f"model.layers.{layer}.mlp.{projection}_proj.weight"


def matrix_sources(matrix: str, layer: int | None, expert_index: int = 0) -> tuple[str, ...]:
    """The tensors whose rows, one after the other, make up a packed matrix."""
    if matrix == "head":
        return (EMBED,)
    assert layer is not None, f"matrix {matrix} belongs to a layer"
    names = {
        "qkv": tuple(attention(layer, p) for p in "qkv"),
        "o": (attention(layer, "o"),),
        "router": (router(layer),),
        "up": tuple(expert(layer, expert_index, p) for p in ("gate", "up")),
        "down": (expert(layer, expert_index, "down"),),
        "dense_up": tuple(dense(layer, p) for p in ("gate", "up")),
        "dense_down": (dense(layer, "down"),),
    }
    return names[matrix]


def tensor_shapes(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of this geometry and its shape, in layer order. All are bf16; none is a bias."""
    g = geometry
    shapes: dict[str, tuple[int, ...]] = {EMBED: (g.vocab, g.hidden)}
    for layer in range(g.layers):
        shapes[norm(layer)] = (g.hidden,)
        shapes[attention(layer, "q")] = (g.q_width, g.hidden)
        shapes[attention(layer, "k")] = (g.kv_width, g.hidden)
        shapes[attention(layer, "v")] = (g.kv_width, g.hidden)
        shapes[attention(layer, "o")] = (g.hidden, g.q_width)
        if g.mlp_kinds[layer] == "dense":
            shapes |= {dense(layer, p): (g.dense_ffn, g.hidden) for p in ("gate", "up")}
            shapes[dense(layer, "down")] = (g.hidden, g.dense_ffn)
            continue
        shapes[router(layer)] = (g.experts, g.hidden)
        for index in range(g.experts):
            shapes |= {expert(layer, index, p): (g.expert_ffn, g.hidden) for p in ("gate", "up")}
            shapes[expert(layer, index, "down")] = (g.hidden, g.expert_ffn)
    shapes[FINAL_NORM] = (g.hidden,)
    return shapes


def parameter_count(geometry: Geometry) -> int:
    """Parameters of the model, the tied head counted once. Two bytes each."""
    return sum(math.prod(shape) for shape in tensor_shapes(geometry).values())
