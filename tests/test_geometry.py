"""Geometry: every spelling of a config.json, transformers' own derivation, refusals by name, and the tile rules."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mk.errors import MkError
from mk.model.geometry import PRESETS, SLOT_BYTES, Geometry, layer_matrices, tile_rules
from mk.model.tensors import parameter_count, tensor_shapes
from tests.tiny_model import tiny_geometry

# The released config.json of North-Mini-Code-1.0, as far as it shapes the computation; layers in the older spelling.
RELEASED: dict[str, Any] = {
    "architectures": ["Cohere2MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 255001,
    "dtype": "bfloat16",
    "expert_selection_fn": "sigmoid",
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 768,
    "layer_norm_eps": 1e-5,
    "logit_scale": 1.0,
    "max_position_embeddings": 500000,
    "model_type": "cohere2_moe",
    "norm_topk_prob": False,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 49,
    "num_key_value_heads": 4,
    "num_shared_experts": 0,
    "prefix_dense_intermediate_size": 3072,
    "prefix_dense_sliding_window_pattern": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000,
    "sliding_window": 4096,
    "use_parallel_block": True,
    "use_qk_norm": False,
    "vocab_size": 262144,
}


def without(*fields: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (RELEASED | changes).items() if name not in fields}


def test_released_config_is_the_full_preset() -> None:
    assert Geometry.from_hf_config(RELEASED) == PRESETS["north_mini_code"]


def test_full_checkpoint_has_the_published_tensor_count_and_bytes() -> None:
    geometry = PRESETS["north_mini_code"]
    assert len(tensor_shapes(geometry)) == 18_730
    assert 2 * parameter_count(geometry) == 60_968_607_744


def test_both_spellings_of_dense_layers_agree() -> None:
    newer = without("first_k_dense_replace", mlp_layer_types=["dense"] + ["sparse"] * 48)
    newer["layer_types"] = ["full_attention" if i % 4 == 0 else "sliding_attention" for i in range(49)]
    assert Geometry.from_hf_config(newer) == Geometry.from_hf_config(RELEASED)


def test_rotated_layers_are_the_sliding_ones_and_a_dense_prefix_of_pattern_one() -> None:
    geometry = Geometry.from_hf_config(RELEASED)
    assert [i for i, rotated in enumerate(geometry.rope) if not rotated] == list(range(4, 49, 4))
    explicit = RELEASED | PRESETS["north_mini_code"].to_hf_config()
    plain = Geometry.from_hf_config(explicit | {"prefix_dense_sliding_window_pattern": 2})
    assert plain.layer_kinds == geometry.layer_kinds and not plain.rope[0] and plain.rope[1:] == geometry.rope[1:]


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("pattern", [1, 2, 3])
def test_layers_are_derived_as_transformers_derives_them(prefix: int, pattern: int) -> None:
    from transformers import Cohere2MoeConfig

    raw = without(first_k_dense_replace=prefix, prefix_dense_sliding_window_pattern=pattern, num_hidden_layers=9)
    theirs = Cohere2MoeConfig(**raw)
    ours = Geometry.from_hf_config(raw)
    assert [f"{kind}_attention" for kind in ours.layer_kinds] == theirs.layer_types
    assert list(ours.mlp_kinds) == theirs.mlp_layer_types
    forced = [m == "dense" and theirs.prefix_dense_sliding_window_pattern == 1 for m in theirs.mlp_layer_types]
    sliding = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert list(ours.rope) == [a or b for a, b in zip(forced, sliding, strict=True)]


@pytest.mark.parametrize("geometry", [PRESETS["north_mini_code"], PRESETS["slice"], tiny_geometry()])
def test_written_config_survives_transformers(geometry: Geometry) -> None:
    from transformers import Cohere2MoeConfig

    assert Geometry.from_hf_config(geometry.to_hf_config()) == geometry
    theirs = Cohere2MoeConfig(**geometry.to_hf_config())
    assert Geometry.from_hf_config(theirs.to_dict()) == geometry


def test_config_is_read_from_a_file_or_its_folder(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    assert Geometry.from_hf_config(tmp_path) == Geometry.from_hf_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[1, 2")
    with pytest.raises(MkError, match="config.json: not valid JSON"):
        Geometry.from_hf_config(tmp_path)
    with pytest.raises(MkError, match="nowhere"):
        Geometry.from_hf_config(tmp_path / "nowhere")


def test_window_counts_the_querys_own_key() -> None:
    assert Geometry.from_hf_config(RELEASED).window_keys == 4096
    assert Geometry.from_hf_config(RELEASED, window_includes_extra=True).window_keys == 4097


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "cohere2"}, "model_type='cohere2'"),
        ({"expert_selection_fn": "softmax"}, "expert_selection_fn='softmax'"),
        ({"norm_topk_prob": True}, "norm_topk_prob=True"),
        ({"num_shared_experts": 1}, "num_shared_experts=1"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_qk_norm": True}, "use_qk_norm=True"),
        ({"use_parallel_block": False}, "use_parallel_block=False"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling=.*yarn"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"hidden_size": "2048"}, "hidden_size='2048'"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"sliding_window": None}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["chunked_attention"] * 49}, "chunked_attention"),
        ({"layer_types": 5}, "layer_types=5 is not a list"),
        ({"layer_types": "full_attention"}, "layer_types='full_attention' is not a list"),
        ({"layer_types": [["a"]] * 49}, r"layer_types entry \['a'\]"),
        ({"layer_types": [{}] * 49}, r"layer_types entry \{\}"),
        ({"mlp_layer_types": 3}, "mlp_layer_types=3 is not a list"),
        ({"mlp_layer_types": [["dense"]] * 49}, r"mlp_layer_types entry \['dense'\]"),
        ({"rope_parameters": "x"}, "rope_parameters='x' is not an object"),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\] is not an object"),
        ({"rope_parameters": {"rope_type": ["default"]}}, "rope_parameters="),
        ({"logit_scale": math.inf}, "logit_scale=inf"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
        ({"rope_theta": 10**400}, "rope_theta=1000"),
        ({"mlp_layer_types": ["sparse"] * 49}, "first_k_dense_replace=1 contradicts mlp_layer_types"),
        ({"num_experts_per_tok": 129}, "top_k=129"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(MkError, match=named):
        Geometry.from_hf_config(RELEASED | changes)


@pytest.mark.parametrize("wrong", [None, True, -1, 0.5, math.nan, 10**400, "x", [], ["x"], [["x"]], {}, {"x": []}])
@pytest.mark.parametrize("field", [*RELEASED, "layer_types", "mlp_layer_types", "rope_parameters", "rope_scaling"])
def test_a_field_of_any_type_is_read_or_refused_by_name(field: str, wrong: Any) -> None:
    try:
        Geometry.from_hf_config(RELEASED | {field: wrong})
    except MkError as error:
        assert "config.json: " in str(error) or "geometry: " in str(error)


@pytest.mark.parametrize("field", ["expert_selection_fn", "norm_topk_prob", "rms_norm_eps", "vocab_size"])
def test_absent_fields_take_transformers_defaults_and_are_refused(field: str) -> None:
    with pytest.raises(MkError, match=field):
        Geometry.from_hf_config(without(field))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_dim": 64}, "head_dim=64"),
        ({"q_heads": 7}, "q_heads=7 must be a multiple of kv_heads=2"),
        ({"q_heads": 18}, "q_heads=18 is more than 8 query heads"),
        ({"hidden": 72}, "hidden=72"),
        ({"window": 100}, "window=100"),
        ({"window": 0}, "window=0"),
        ({"experts": 129}, "experts=129"),
        ({"experts": 16, "top_k": 9}, "top_k=9"),
        ({"expert_ffn": 44}, "expert_ffn=44"),
        ({"dense_ffn": 0}, "dense_ffn=0"),
    ],
)
def test_tile_rules_name_what_does_not_fit(changes: dict[str, int], named: str) -> None:
    with pytest.raises(MkError, match=f"geometry: {named}"):
        tile_rules(tiny_geometry(**changes))


def test_rules_of_absent_parts_do_not_apply() -> None:
    dense = tiny_geometry(mlp_kinds=("dense",) * 5, experts=0, top_k=0, expert_ffn=1)
    assert "up" not in tile_rules(dense).matrices
    full = tiny_geometry(layer_kinds=("full",) * 5, window=0)
    assert tile_rules(full).matrices["qkv"].rows == full.qkv_rows


def test_tiles_pad_rows_and_k() -> None:
    up = tile_rules(tiny_geometry()).matrices["up"]
    assert (up.rows, up.k, up.padded_rows, up.padded_k) == (80, 80, 80, 256)
    head = tile_rules(tiny_geometry()).matrices["head"]
    assert (head.rows, head.padded_rows, head.strips, head.k_slots) == (293, 304, 19, 1)


def test_full_geometry_packs_without_padding() -> None:
    geometry = PRESETS["north_mini_code"]
    tiles = tile_rules(geometry).matrices
    slots = tiles["head"].slots
    for layer in range(geometry.layers):
        for name in layer_matrices(geometry, layer):
            slots += tiles[name].slots * (geometry.experts if name in ("up", "down") else 1)
    norms = sum(math.prod(shape) for shape in tensor_shapes(geometry).values() if len(shape) == 1)
    assert slots * SLOT_BYTES == 2 * (parameter_count(geometry) - norms)
