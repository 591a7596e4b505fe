"""The reference forward against transformers' `Cohere2MoeForCausalLM` (float32, eager), and against itself.

Tolerance. Both sides round to float32 (2^-24) everywhere, so they differ by rounding alone. The largest amplifier is
the softmax: it turns an absolute error of an attention logit into a relative error of a weight, and with the sharp
weights used here logits stay under 20, whose rounding is 20 * 2^-24. Each layer adds one such error to the residual:
layers * 20 * 2^-24 of the largest logit, 6e-6 here; twice that bounds the difference of two such results (measured:
2e-6). Every test of a wrong variant shows that the variant is more than a hundred times further away.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mk.errors import MkError
from mk.model import tensors
from mk.model.checkpoint import Checkpoint, load_checkpoint
from mk.model.folder import write_weights
from mk.model.random_weights import RandomWeights, sharp_qk_scale
from mk.model.reference import (
    LayerOutput,
    Reference,
    ReferenceCache,
    greedy_decode,
    reference_forward,
    rope_table,
    top_k,
)
from tests.tiny_model import tiny_geometry

GEOMETRY = tiny_geometry()
STD = 0.1  # wide enough for the FFN of so narrow a model to matter
TOLERANCE = 2 * GEOMETRY.layers * 20 * 2.0**-24
TOKENS = torch.randint(0, GEOMETRY.vocab, (200,), generator=torch.Generator().manual_seed(0))  # three windows


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("model")
    source = RandomWeights(GEOMETRY, seed=3, std=STD, qk_scale=sharp_qk_scale(GEOMETRY, std=STD))
    source.write_folder(folder)
    write_weights(folder, source)
    return load_checkpoint(folder)


def transformers_model(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    from transformers import Cohere2MoeForCausalLM

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return Cohere2MoeForCausalLM.from_pretrained(checkpoint.folder, dtype=dtype, **eager).eval()


@pytest.fixture(scope="module")
def theirs(checkpoint: Checkpoint) -> Any:
    return transformers_model(checkpoint, torch.float32)


@pytest.fixture(scope="module")
def exact(checkpoint: Checkpoint) -> Tensor:
    return reference_forward(GEOMETRY, checkpoint.tensor, TOKENS, torch.float64)


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest logit."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


@torch.no_grad()
def test_prefill_equals_transformers_to_float32_rounding(checkpoint: Checkpoint, theirs: Any, exact: Tensor) -> None:
    expected = theirs(TOKENS[None]).logits[0]
    ours = reference_forward(GEOMETRY, checkpoint.tensor, TOKENS)
    assert ours.dtype == torch.float32
    assert distance(ours, expected) < TOLERANCE
    assert distance(ours, exact) < TOLERANCE and distance(expected, exact) < TOLERANCE


@torch.no_grad()
def test_float64_agrees_closer(checkpoint: Checkpoint, theirs: Any, exact: Tensor) -> None:
    """transformers keeps its norms, rotation and softmax in float32 whatever the dtype, so some distance is left."""
    doubled = transformers_model(checkpoint, torch.float64)(TOKENS[None]).logits[0]
    assert exact.dtype == torch.float64
    assert distance(doubled, exact) < distance(theirs(TOKENS[None]).logits[0], exact)


@torch.no_grad()
def test_cached_decode_past_the_window_equals_transformers(checkpoint: Checkpoint, theirs: Any) -> None:
    from transformers import DynamicCache

    parameter = "cache" if "cache" in inspect.signature(type(theirs).forward).parameters else "past_key_values"
    their_cache = DynamicCache(config=theirs.config)
    our_cache = ReferenceCache()
    for start, end in [(0, 50), (50, 60), *((i, i + 1) for i in range(60, 140))]:
        part = TOKENS[start:end]
        expected = theirs(part[None], use_cache=True, **{parameter: their_cache}).logits[0]
        ours = reference_forward(GEOMETRY, checkpoint.tensor, part, cache=our_cache)
        assert distance(ours, expected) < TOLERANCE, f"tokens {start}..{end}"
    assert our_cache.length == 140


@torch.no_grad()
def test_greedy_decode_equals_transformers_generate(checkpoint: Checkpoint, theirs: Any) -> None:
    prompt = TOKENS[:70].tolist()
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(torch.tensor([prompt]), **options)[0, 70:].tolist()
    ours = greedy_decode(GEOMETRY, checkpoint.tensor, prompt, 24)
    assert ours == expected and len(set(ours)) > 3
    assert greedy_decode(GEOMETRY, checkpoint.tensor, prompt, 24, eos=[ours[5]]) == ours[: ours.index(ours[5]) + 1]


def wrong_variants() -> Iterator[Any]:
    """Geometries, each of which misreads one structural feature."""
    yield pytest.param({"rope": (False, True, True, False, True)}, id="dense full layer unrotated")
    yield pytest.param({"rope": (True, True, True, True, True)}, id="other full layer rotated")
    yield pytest.param({"rope": (True, True, False, False, True)}, id="sliding layer unrotated")
    yield pytest.param({"window_includes_extra": True}, id="one key more in the window")
    yield pytest.param({"window": 63}, id="one key fewer in the window")
    yield pytest.param({"layer_kinds": ("full", "sliding", "sliding", "full", "full")}, id="full for sliding")
    yield pytest.param({"top_k": 2}, id="one expert fewer")
    yield pytest.param({"rms_eps": 1e-3}, id="other epsilon")
    yield pytest.param({"rope_theta": 10_000.0}, id="other rope base")
    yield pytest.param({"logit_scale": 0.8}, id="other logit scale")


@pytest.mark.parametrize("changes", list(wrong_variants()))
def test_a_misread_feature_shows(checkpoint: Checkpoint, exact: Tensor, changes: dict[str, Any]) -> None:
    wrong = dataclasses.replace(GEOMETRY, **changes)
    assert distance(reference_forward(wrong, checkpoint.tensor, TOKENS), exact) > 100 * TOLERANCE


def test_renormalised_expert_weights_would_show(checkpoint: Checkpoint, exact: Tensor) -> None:
    class Renormalised(Reference):
        def _experts(self, layer: int, h: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
            weights = torch.sigmoid(logits.gather(1, ids))
            return super()._experts(layer, h, logits, ids) / weights.sum(1, keepdim=True)

    model, cache = Renormalised(GEOMETRY, checkpoint.tensor), ReferenceCache()
    x = model.embed(TOKENS)
    for layer in range(GEOMETRY.layers):
        out = model.layer(layer, x, 0, cache)
        x = x + (out.attention + out.ffn)
    assert distance(model.logits(x), exact) > 100 * TOLERANCE


@pytest.mark.parametrize("extra", [False, True])
def test_window_reaches_exactly_its_keys(checkpoint: Checkpoint, extra: bool) -> None:
    """Changing the oldest visible key's token changes a sliding layer's output; changing the one before does not."""
    geometry = dataclasses.replace(GEOMETRY, window_includes_extra=extra)
    model, layer = Reference(geometry, checkpoint.tensor, torch.float64), 1
    position = 100
    x = model.embed(TOKENS[: position + 1])

    def last_row(changed: int) -> Tensor:
        y = x.clone()
        y[changed] = -y[changed]
        return model.layer(layer, y, 0, ReferenceCache()).attention[-1]

    plain = model.layer(layer, x, 0, ReferenceCache()).attention[-1]
    oldest = position - geometry.window_keys + 1
    assert oldest == (36 if extra else 37)
    assert not torch.equal(last_row(oldest), plain)
    assert torch.equal(last_row(oldest - 1), plain)


def test_a_window_of_one_more_key_differs_only_past_the_window(checkpoint: Checkpoint, exact: Tensor) -> None:
    longer = dataclasses.replace(GEOMETRY, window_includes_extra=True)
    logits = reference_forward(longer, checkpoint.tensor, TOKENS, torch.float64)
    inside = GEOMETRY.window  # positions 0..63 see no more than 64 keys either way
    assert distance(logits[:inside], exact[:inside]) < 1e-12
    assert distance(logits[inside], exact[inside]) > 100 * TOLERANCE


def test_trace_and_replayed_routing(checkpoint: Checkpoint, exact: Tensor) -> None:
    trace: list[LayerOutput] = []
    reference_forward(GEOMETRY, checkpoint.tensor, TOKENS, torch.float64, trace=trace)
    assert [out.expert_ids is None for out in trace] == [True, False, False, False, False]
    x = Reference(GEOMETRY, checkpoint.tensor, torch.float64).embed(TOKENS)
    x = x + sum(out.attention + out.ffn for out in trace)
    model = Reference(GEOMETRY, checkpoint.tensor, torch.float64)
    assert distance(model.logits(x), exact) < 1e-12, "the contributions add up to the output"

    routing = [out.expert_ids for out in trace]
    replayed = reference_forward(GEOMETRY, checkpoint.tensor, TOKENS, torch.float64, expert_ids=routing)
    assert torch.equal(replayed, exact)
    flipped = [None if ids is None else ids.flip(1) for ids in routing]
    reordered = reference_forward(GEOMETRY, checkpoint.tensor, TOKENS, torch.float64, expert_ids=flipped)
    assert distance(reordered, exact) < 1e-12, "the order of a token's experts is immaterial"
    other = [None if ids is None else (ids + 1) % GEOMETRY.experts for ids in routing]
    moved = reference_forward(GEOMETRY, checkpoint.tensor, TOKENS, torch.float64, expert_ids=other)
    assert distance(moved, exact) > 100 * TOLERANCE


def test_equal_router_logits_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 2.0], [5.0] * 6])
    assert top_k(logits, 3).tolist() == [[1, 2, 4], [0, 1, 2]]


@torch.no_grad()
def test_rope_table_is_transformers_own_at_large_positions(theirs: Any) -> None:
    positions = torch.tensor([0, 1, 4095, 65_535, 262_143])
    cos, sin = theirs.model.rotary_emb(torch.empty(1), positions[None])
    ours = rope_table(GEOMETRY, positions)
    assert torch.equal(ours[0].repeat_interleave(2, 1), cos[0])
    assert torch.equal(ours[1].repeat_interleave(2, 1), sin[0])


def test_keep_returns_the_last_logits(checkpoint: Checkpoint, exact: Tensor) -> None:
    kept = reference_forward(GEOMETRY, checkpoint.tensor, TOKENS, torch.float64, keep=3)
    assert kept.shape == (3, GEOMETRY.vocab) and distance(kept, exact[-3:]) < 1e-12


def test_query_blocks_do_not_change_the_result(
    checkpoint: Checkpoint, exact: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mk.model.reference._QUERY_BLOCK", 33)
    monkeypatch.setattr("mk.model.reference._HEAD_BLOCK", 100)
    assert distance(reference_forward(GEOMETRY, checkpoint.tensor, TOKENS, torch.float64), exact) < 1e-12


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([1, GEOMETRY.vocab]), "outside 0..292"),
        (torch.tensor([-1]), "outside 0..292"),
        (torch.tensor([[1]]), "integers"),
        (torch.tensor([1.0]), "integers"),
        (torch.zeros(GEOMETRY.max_positions + 1, dtype=torch.int64), "1025 tokens exceed max_positions=1024"),
    ],
)
def test_tokens_outside_the_model_are_refused(checkpoint: Checkpoint, tokens: Tensor, message: str) -> None:
    with pytest.raises(MkError, match=message):
        reference_forward(GEOMETRY, checkpoint.tensor, tokens)


def test_other_precisions_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(MkError, match="dtype=torch.bfloat16"):
        Reference(GEOMETRY, checkpoint.tensor, torch.bfloat16)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(MkError, match="lose precision"):
            Reference(GEOMETRY, checkpoint.tensor)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_logits_that_are_not_finite_stop_decoding(checkpoint: Checkpoint) -> None:
    def poisoned(name: str) -> Tensor:
        w = checkpoint.tensor(name)
        return w * torch.nan if name == tensors.FINAL_NORM else w

    with pytest.raises(MkError, match="logits after 2 tokens are not finite"):
        greedy_decode(GEOMETRY, poisoned, [1, 2], 1)
