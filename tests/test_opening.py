"""Opening a configured model: every setting reaches what it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mk.compose import load_config
from mk.model.opening import geometry_of, open_model
from mk.model.random_weights import RandomWeights
from mk.results.recompute import geometry_of_row
from mk.results.rows import Row
from mk.results.runs import RunFolder

Q = "model.layers.1.self_attn.q_proj.weight"
O = "model.layers.1.self_attn.o_proj.weight"  # noqa: E741
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def test_random_weights_take_seed_and_qk_scale(tmp_path: Path) -> None:
    cfg = load_config(["weights=random", "weights.seed=7", "weights.qk_scale=4.0"])
    source = open_model(cfg.model, cfg.weights, tmp_path).source
    plain = RandomWeights(source.geometry, seed=7)
    assert source.label == "random"
    for name in (O, EXPERT):  # qk_scale touches q and k alone
        assert torch.equal(source.tensor(name), plain.tensor(name))
    # a power of two scales bf16 exactly
    assert torch.equal(source.tensor(Q), plain.tensor(Q) * 4)
    other = RandomWeights(source.geometry, seed=8)
    assert not torch.equal(source.tensor(EXPERT), other.tensor(EXPERT))


@pytest.mark.parametrize("reading", ["hf", "vllm"])
@pytest.mark.parametrize("model", ["nano", "slice"])
def test_a_row_has_the_geometry_of_its_configuration(model: str, reading: str, tmp_path: Path) -> None:
    cfg = load_config([f"model={model}", "weights=random", f"model.window={reading}", f"run_dir={tmp_path}"])
    with RunFolder.create(cfg) as run:
        row = run.row(engine="cuda", dtype="bfloat16", context=[300], checks={})
    geometry = geometry_of_row(Row.from_json(row.to_json()))
    assert geometry == geometry_of(cfg.model) and geometry.window_includes_extra == (reading == "vllm")


def test_the_window_reading_reaches_the_geometry(tmp_path: Path) -> None:
    windows = [
        open_model(cfg.model, cfg.weights, tmp_path).geometry.window_keys
        for cfg in (load_config([f"model.window={reading}"]) for reading in ("hf", "vllm"))
    ]
    assert windows[1] == windows[0] + 1
