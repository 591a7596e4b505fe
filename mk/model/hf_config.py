"""Between a `cohere2_moe` config.json and a `Geometry`.

Layers are derived as transformers' `Cohere2MoeConfig` derives them. Sizes must be present; a flag that is absent takes
that class's default, which is often not what this code computes, and is then refused like any other unsupported value.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mk.errors import MkError
from mk.model.geometry import MLP_KINDS, Geometry, rope_layers

_ATTENTION = {"full_attention": "full", "sliding_attention": "sliding"}

# (field, what transformers assumes when it is absent, the only value served)
_FIXED_FIELDS: tuple[tuple[str, Any, Any], ...] = (
    ("model_type", None, "cohere2_moe"),
    ("expert_selection_fn", "softmax", "sigmoid"),
    ("norm_topk_prob", True, False),
    ("num_shared_experts", 0, 0),
    ("attention_bias", False, False),
    ("hidden_act", "silu", "silu"),
    ("tie_word_embeddings", True, True),
    ("use_gated_activation", True, True),
    ("use_parallel_block", True, True),
    ("use_qk_norm", False, False),
    ("quantization_config", None, None),
)


def load(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The parsed config: given as it is, or read from a file or from `config.json` of a folder."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise MkError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise MkError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise MkError(f"{path}: holds a JSON {type(config).__name__}, not an object")
    return config


def read(config: Mapping[str, Any], window_includes_extra: bool = False) -> Geometry:
    """Raises MkError naming the field and its value where it is missing, malformed or not supported."""
    for name, default, served in _FIXED_FIELDS:
        value = config.get(name, default)
        if value != served or isinstance(value, bool) != isinstance(served, bool):
            raise MkError(f"config.json: {name}={value!r} is not supported, only {served!r}")
    layers = _integer(config, "num_hidden_layers", minimum=1)
    q_heads = _integer(config, "num_attention_heads", minimum=1)
    expert_ffn = _integer(config, "intermediate_size", minimum=1)
    mlp_kinds, dense_prefix = _mlp_kinds(config, layers)
    layer_kinds = _layer_kinds(config, layers, dense_prefix)
    pattern = _integer(config, "prefix_dense_sliding_window_pattern", default=1, minimum=1)
    return Geometry(
        hidden=_integer(config, "hidden_size", minimum=1),
        layers=layers,
        q_heads=q_heads,
        kv_heads=_integer(config, "num_key_value_heads", default=q_heads, minimum=1),
        head_dim=_integer(config, "head_dim", default=128, minimum=1),
        experts=_integer(config, "num_experts", minimum=0),
        top_k=_integer(config, "num_experts_per_tok", minimum=0),
        expert_ffn=expert_ffn,
        dense_ffn=_integer(config, "prefix_dense_intermediate_size", default=expert_ffn, minimum=0),
        vocab=_integer(config, "vocab_size", minimum=1),
        layer_kinds=layer_kinds,
        mlp_kinds=mlp_kinds,
        rope=rope_layers(layer_kinds, mlp_kinds, pattern),
        window=_window(config, layer_kinds),
        rms_eps=_positive(config, "rms_norm_eps"),  # null would mean LayerNorm, which is not computed here
        rope_theta=_rope_theta(config),
        logit_scale=_positive(config, "logit_scale", default=0.0625),
        max_positions=_integer(config, "max_position_embeddings", minimum=1),
        window_includes_extra=window_includes_extra,
    )


def write(geometry: Geometry) -> dict[str, Any]:
    """A config.json; both spellings of the dense layers where both can express them. Token ids are the tokenizer's."""
    g = geometry
    config: dict[str, Any] = {
        "architectures": ["Cohere2MoeForCausalLM"],
        "model_type": "cohere2_moe",
        "dtype": "bfloat16",
        "hidden_size": g.hidden,
        "num_hidden_layers": g.layers,
        "num_attention_heads": g.q_heads,
        "num_key_value_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "num_experts": g.experts,
        "num_experts_per_tok": g.top_k,
        "num_shared_experts": 0,
        "intermediate_size": g.expert_ffn,
        "prefix_dense_intermediate_size": g.dense_ffn,
        "prefix_dense_sliding_window_pattern": _prefix_pattern(g),
        "layer_types": [f"{kind}_attention" for kind in g.layer_kinds],
        "mlp_layer_types": list(g.mlp_kinds),
        "sliding_window": g.window or None,
        "vocab_size": g.vocab,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "rms_norm_eps": g.rms_eps,
        "rope_theta": g.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": g.rope_theta},
        "max_position_embeddings": g.max_positions,
        "logit_scale": g.logit_scale,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    prefix = len(g.dense_layers)
    if g.dense_layers == tuple(range(prefix)):
        config["first_k_dense_replace"] = prefix  # the only spelling that transformers 5.9 reads
    return config


def _prefix_pattern(geometry: Geometry) -> int:
    """`prefix_dense_sliding_window_pattern` beside explicit layer_types: 1 rotates dense full layers, 2 does not."""
    for pattern in (1, 2):
        if geometry.rope == rope_layers(geometry.layer_kinds, geometry.mlp_kinds, pattern):
            return pattern
    raise MkError(f"geometry: rope={geometry.rope} is not a pattern that a cohere2_moe config can express")


def _mlp_kinds(config: Mapping[str, Any], layers: int) -> tuple[tuple[str, ...], int]:
    """MLP kind per layer and the `first_k_dense_replace` prefix (0 if absent) that layer_types derives from."""
    prefix = _integer(config, "first_k_dense_replace", default=0, minimum=0)
    counted = tuple("dense" if i < prefix else "sparse" for i in range(layers))
    listed = config.get("mlp_layer_types")
    if listed is None:
        return counted, prefix
    kinds = _words(config, "mlp_layer_types", MLP_KINDS)
    if config.get("first_k_dense_replace") is not None and kinds != counted:
        # Older transformers read one of the two fields, newer ones the other: refuse to pick.
        raise MkError(f"config.json: first_k_dense_replace={prefix} contradicts mlp_layer_types={list(kinds)!r}")
    if len(kinds) != layers:
        raise MkError(f"config.json: mlp_layer_types has {len(kinds)} entries for num_hidden_layers={layers}")
    return kinds, prefix


def _layer_kinds(config: Mapping[str, Any], layers: int, dense_prefix: int) -> tuple[str, ...]:
    listed = config.get("layer_types")
    if listed is None:
        first = _integer(config, "prefix_dense_sliding_window_pattern", default=1, minimum=1)
        rest = _integer(config, "sliding_window_pattern", default=4, minimum=1)
        steps = [(i + 1) % first for i in range(dense_prefix)]
        steps += [(i + 1) % rest for i in range(layers - dense_prefix)]
        return tuple("sliding" if step else "full" for step in steps)
    kinds = _words(config, "layer_types", _ATTENTION)
    if len(kinds) != layers:
        raise MkError(f"config.json: layer_types has {len(kinds)} entries for num_hidden_layers={layers}")
    return tuple(_ATTENTION[kind] for kind in kinds)


def _window(config: Mapping[str, Any], layer_kinds: tuple[str, ...]) -> int:
    """`sliding_window`; 0 only where no layer slides. transformers would drop the rotation of a windowless layer."""
    if "sliding_window" not in config:
        return 4096
    if config["sliding_window"] is None and "sliding" not in layer_kinds:
        return 0
    return _integer(config, "sliding_window", minimum=1)


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Base of the rotation; every other rope variant is refused."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(name) or {}
    if not isinstance(rope, Mapping):
        raise MkError(
            f"config.json: {name}={rope!r} is not an object", hint='{"rope_type": "default", "rope_theta": 10000.0}'
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if kind != "default" or partial != 1.0 or any(isinstance(value, Mapping) for value in rope.values()):
        raise MkError(f"config.json: {name}={dict(rope)!r} is not supported, only the default rope over the whole head")
    return _positive(rope if "rope_theta" in rope else config, "rope_theta", default=10000.0)


_MISSING = object()


def _words(config: Mapping[str, Any], name: str, allowed: Iterable[str]) -> tuple[str, ...]:
    """A list of words of `allowed`."""
    listed, words = config[name], tuple(allowed)
    if not isinstance(listed, (list, tuple)):
        raise MkError(f"config.json: {name}={listed!r} is not a list", hint="one word a layer")
    for word in listed:
        if word not in words:
            raise MkError(f"config.json: {name} entry {word!r} is not one of {words}", hint="one word a layer")
    return tuple(listed)


def _integer(config: Mapping[str, Any], name: str, default: Any = _MISSING, minimum: int = 0) -> int:
    """An integer field; null counts as absent, as it does in the released configs."""
    value = config.get(name)
    value = default if value is None else value
    if value is _MISSING:
        raise MkError(f"config.json: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < 2**31:
        raise MkError(f"config.json: {name}={value!r} is not a 32-bit integer of at least {minimum}")
    return value


def _positive(config: Mapping[str, Any], name: str, default: Any = _MISSING) -> float:
    value = config.get(name)
    value = default if value is None else value
    if value is _MISSING:
        raise MkError(f"config.json: {name} is missing")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise MkError(f"config.json: {name}={value!r} is not a finite positive number")
    return float(value)
