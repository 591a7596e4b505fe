"""A model small enough to compare tensor by tensor, with every structural feature of the real one."""

from __future__ import annotations

import dataclasses

from mk.model.geometry import PRESETS, Geometry


def tiny_geometry(**changes: object) -> Geometry:
    """Dense rotated full layer, two sliding layers, an unrotated full layer, one more sliding; nothing tile-aligned."""
    tiny = dataclasses.replace(
        PRESETS["slice"],
        hidden=80,
        q_heads=6,
        kv_heads=2,
        experts=7,
        top_k=3,
        expert_ffn=40,
        dense_ffn=72,
        vocab=293,
        layer_kinds=("full", "sliding", "sliding", "full", "sliding"),
        rope=(True, True, True, False, True),
        window=64,
        logit_scale=0.75,
        rms_eps=1e-5,
        max_positions=1024,
    )
    return dataclasses.replace(tiny, **changes)
