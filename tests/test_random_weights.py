"""Random weights: each value a function of name, index and seed; their distribution; and attention that matters."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mk.model import tensors
from mk.model.geometry import PRESETS
from mk.model.random_weights import MATRIX_STD, NORM_STD, RandomWeights, fill_random, sharp_qk_scale, stream_key
from mk.model.reference import Reference, ReferenceCache, rms_norm, top_k
from mk.model.tokenizer import load_tokenizer
from tests.tiny_model import tiny_geometry

GEOMETRY = tiny_geometry()
NAME = tensors.expert(2, 3, "up")
PINNED_MATRIX = [15163, 15501, 15511, -17111]  # bf16 bits as int16
PINNED_NORM = [16251, 16265, 16257, 16280]


def value(key: int, index: int) -> float:
    """One element in Python's own integers: splitmix64, its four lanes added and standardised."""
    mask = 2**64 - 1
    z = (index * 0x9E3779B97F4A7C15 + key) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    z ^= z >> 31
    lanes = sum(z >> shift & 0xFFFF for shift in (0, 16, 32, 48))
    return (lanes - 2 * 0xFFFF) / math.sqrt(4 * (2**32 - 1) / 12)


def test_values_are_defined_by_name_index_and_seed() -> None:
    w = RandomWeights(GEOMETRY, seed=9).tensor(NAME)
    key = stream_key(NAME, 9)
    expected = [MATRIX_STD * value(key, i) for i in range(w.numel())]
    # Rounding once to bf16 costs 2^-9 of a value; the float32 before it is exact to 2^-24.
    torch.testing.assert_close(w.flatten().double(), torch.tensor(expected).double(), rtol=2.0**-8, atol=0)


def test_bits_are_pinned() -> None:
    """A change of these bits silently changes every result made with random weights."""
    w = RandomWeights(GEOMETRY, seed=0).tensor(NAME)
    norm = RandomWeights(GEOMETRY, seed=0).tensor(tensors.FINAL_NORM)
    assert w.flatten()[:4].view(torch.int16).tolist() == PINNED_MATRIX
    assert norm[:4].view(torch.int16).tolist() == PINNED_NORM


@pytest.mark.parametrize("cut", [1, 999, 5000])
def test_bits_do_not_depend_on_chunks(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = torch.empty(2, 7001, dtype=torch.bfloat16)
    key = stream_key("a", 1)
    fill_random(whole, key, 0.0, 0.02)
    fill_random(parts[:cut], key, 0.0, 0.02)
    monkeypatch.setattr("mk.model.random_weights._CHUNK", 512)
    fill_random(parts[cut:], key, 0.0, 0.02, first=cut)
    assert torch.equal(whole, parts)


def test_bits_differ_between_names_seeds_and_layers() -> None:
    first = RandomWeights(GEOMETRY, seed=0).tensor(NAME)
    for other in (
        RandomWeights(GEOMETRY, seed=1).tensor(NAME),
        RandomWeights(GEOMETRY, seed=0).tensor(tensors.expert(2, 4, "up")),
        RandomWeights(GEOMETRY, seed=0).tensor(tensors.expert(1, 3, "up")),
    ):
        correlation = torch.corrcoef(torch.stack([first.flatten(), other.flatten()]).float())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(first.numel())


def test_distribution() -> None:
    n = 1 << 20
    x = torch.empty(n, dtype=torch.bfloat16)
    fill_random(x, stream_key("distribution", 0), 0.0, 1.0)
    x = x.double()
    # Five standard errors of a sample of n; kurtosis of four uniforms is 3 - 6/(5*4) = 2.7.
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.std() - 1) < 5 / math.sqrt(n)
    assert abs((x**4).mean() - 2.7) < 5 * 8 / math.sqrt(n)
    assert abs((x[1:] * x[:-1]).mean()) < 5 / math.sqrt(n)
    assert 3.2 < x.abs().max() < 3.48


def test_every_tensor_has_its_shape_dtype_and_spread() -> None:
    source = RandomWeights(GEOMETRY, seed=4, std=0.05, qk_scale=3.0)
    for name, shape in tensors.tensor_shapes(GEOMETRY).items():
        w = source.tensor(name)
        assert w.shape == shape and w.dtype == torch.bfloat16
        mean, std = (1.0, NORM_STD) if len(shape) == 1 else (0.0, 0.05)
        std *= 3.0 if "q_proj" in name or "k_proj" in name else 1.0
        n = w.numel()
        assert abs(w.double().mean() - mean) < 6 * std / math.sqrt(n) + 2.0**-9 * mean, name
        assert abs(w.double().std() / std - 1) < 6 / math.sqrt(n), name
    with pytest.raises(KeyError):
        source.tensor("model.layers.0.mlp.gate.weight")


@pytest.mark.parametrize("geometry", [GEOMETRY, PRESETS["slice"]])
def test_sharp_qk_scale_gives_attention_logits_of_its_standard_deviation(geometry) -> None:
    source = RandomWeights(geometry, seed=2, qk_scale=sharp_qk_scale(geometry))
    x = torch.randn(24, geometry.hidden, generator=torch.Generator().manual_seed(0))
    h = rms_norm(x, source.tensor(tensors.norm(4)).float(), geometry.rms_eps)
    q, k = (
        (h @ source.tensor(tensors.attention(4, p)).float().T).view(24, -1, 128).transpose(0, 1) for p in ("q", "k")
    )
    logits = q @ k.repeat_interleave(geometry.group, 0).transpose(1, 2) / math.sqrt(128)
    assert 3.0 < logits.std() < 4.0


def test_router_choices_of_random_weights_spread_over_the_experts() -> None:
    reference = Reference(GEOMETRY, RandomWeights(GEOMETRY, seed=6).tensor)
    tokens = torch.arange(GEOMETRY.vocab)
    out = reference.layer(1, reference.embed(tokens), 0, ReferenceCache())
    assert out.router_logits is not None
    counts = top_k(out.router_logits, GEOMETRY.top_k).flatten().bincount(minlength=GEOMETRY.experts)
    assert counts.min() > 0


def test_folder_beside_the_weights(tmp_path: Path) -> None:
    source = RandomWeights(GEOMETRY)
    assert source.label == "random"
    source.write_folder(tmp_path)
    assert load_tokenizer(tmp_path).backend.get_vocab_size() == GEOMETRY.vocab
    assert type(GEOMETRY).from_hf_config(tmp_path) == GEOMETRY


@pytest.mark.gpu
def test_bits_are_the_same_on_a_gpu() -> None:
    cpu, gpu = RandomWeights(GEOMETRY, seed=3), RandomWeights(GEOMETRY, seed=3, device="cuda")
    for name in tensors.tensor_shapes(GEOMETRY):
        assert torch.equal(cpu.tensor(name), gpu.tensor(name).cpu()), name
