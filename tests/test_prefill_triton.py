"""Prefill in Triton's interpreter: the reference's numbers, however prompts are packed, cut and continued."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experiments.kernel_checks import NOISE_RATIO, consult, relative_error
from experiments.prefill_rig import Rig, make_pools
from mk.compose import load_config
from mk.engines.cuda import CudaEngine
from mk.engines.interpreted import MachineEngine
from mk.errors import MkError
from mk.graph import LAYER_WAVES
from mk.kv import pages_for_contexts
from mk.model.reference import LayerOutput, reference_forward
from mk.programs import Plan
from mk.sampling import SamplingParams
from mk.splits import SplitPolicy
from prefill import interpreted, triton_prefill
from prefill.chunks import Prompt
from prefill.triton_prefill import TritonPrefill
from tests.device_rig import FakeLibrary, fake_build, fake_device
from tests.interpreter_rig import GEOMETRY, random_tokens, reference_kv, reference_logits, source, tensors, weights
from tests.prefill_rig import needs_interpreter

__all__ = ["fake_device"]

pytestmark = needs_interpreter

G = GEOMETRY
PROMPT = random_tokens(203, seed=5)  # three windows and a bit
TOLERANCE = 1e-4


def expect(rig: Rig, slot: int, tokens: list[int], logits: torch.Tensor) -> None:
    """What prefill left of a sequence is the reference's, pages that the next token sees and logits."""
    exact = reference_logits(tuple(tokens), torch.float64)[-1]
    assert np.abs(logits.numpy() - exact).max() < TOLERANCE
    held = reference_kv(tuple(tokens))
    for layer, parts in enumerate(rig.visible(slot, len(tokens))):
        for found, kept in zip(parts, (held.keys[layer], held.values[layer]), strict=True):
            assert found.shape[1] and (found - kept[:, -found.shape[1] :]).abs().max() < TOLERANCE


@pytest.mark.parametrize("length", [1, 64, 65, 203])
def test_logits_and_pages_are_the_references(length: int) -> None:
    rig = Rig(weights(), 9, 256)
    expect(rig, 0, PROMPT[:length], rig.prefill.forward(rig.pages, [Prompt(0, PROMPT[:length])])[0])


def test_prompts_are_packed_cut_and_continued() -> None:
    """In as many pages as are counted for that, permuted and full of NaN."""
    prompts = {2: PROMPT[:90], 0: random_tokens(1, seed=6), 1: random_tokens(40, seed=7)}
    rig = Rig(weights(), pages_for_contexts(G, 3, 128, 75, paged_chunk=True), 128, slots=3, chunk=75, page_seed=3)
    logits = rig.prefill.forward(rig.pages, [Prompt(slot, tokens) for slot, tokens in prompts.items()])
    for row, (slot, tokens) in enumerate(prompts.items()):
        expect(rig, slot, tokens, logits[row])
    more = [Prompt(1, random_tokens(5, seed=8), 40), Prompt(2, PROMPT[90:126], 90)]
    logits = rig.prefill.forward(rig.pages, more)
    expect(rig, 1, [*prompts[1], *more[0].tokens], logits[0])
    expect(rig, 2, PROMPT[:126], logits[1])


def test_a_replayed_routing_is_taken_and_told() -> None:
    tokens, generator = PROMPT[:40], torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(G.experts, generator=generator)[: G.top_k] for _ in range(40 * G.layers)])
    ids = ids.view(G.layers, 40, G.top_k).int()
    rig, taken = Rig(weights(), 2, 64, chunk=25), torch.zeros_like(ids)
    logits = rig.prefill.forward(rig.pages, [Prompt(0, tokens)], ids, taken)[0]
    exact = reference_forward(G, tensors(G), torch.tensor(tokens), torch.float64, expert_ids=ids.long(), keep=1)[0]
    assert (logits - exact).abs().max() < TOLERANCE
    assert torch.equal(taken[list(G.sparse_layers)], ids[list(G.sparse_layers)])

    rig, trace = Rig(weights(), 2, 64), list[LayerOutput]()
    rig.prefill.forward(rig.pages, [Prompt(0, tokens)], taken=taken)
    reference_forward(G, tensors(G), torch.tensor(tokens), trace=trace)
    for layer in G.sparse_layers:
        assert torch.equal(taken[layer].long(), trace[layer].expert_ids)


def test_bf16_activations_round_and_no_more() -> None:
    """Within bfloat16's own noise, or a little more."""
    tokens = torch.tensor(PROMPT[:70])
    oracle = consult(source(), tokens, torch.device("cpu"))
    noise = relative_error(oracle.logits_bf16, oracle.logits)[1]
    rig = Rig(weights(), 2, 128, dtype=torch.bfloat16)
    logits = rig.prefill.forward(rig.pages, [Prompt(0, PROMPT[:70])], oracle.ids.transpose(0, 1).contiguous())
    assert 1e-3 < relative_error(logits, oracle.logits[-1:])[1] < NOISE_RATIO * noise < 0.15
    held = reference_kv(tuple(PROMPT[:70]))
    for layer, parts in enumerate(rig.visible(0, 70)):
        for found, kept in zip(parts, (held.keys[layer], held.values[layer]), strict=True):
            expected = kept[:, -found.shape[1] :]
            assert found.dtype == torch.bfloat16 and (found - expected).norm() / expected.norm() < NOISE_RATIO * noise


@pytest.mark.parametrize("numerics", ["float32", "kernel"])
def test_the_machine_goes_on_where_it_stops(numerics: str) -> None:
    plan, prompt = Plan(3, LAYER_WAVES, "row_owner", splits=SplitPolicy(128, 4)), PROMPT[:75]
    logits = []
    for prefill in ("torch", "triton"):
        engine = MachineEngine(weights(), plan, 1, 128, numerics, prefill=prefill)
        first = engine.prefill(0, prompt)
        step = engine.step([7], [76], [SamplingParams()])
        logits.append(np.stack([first, step.logits[0]]))
    tolerance = 5e-6 if numerics == "float32" else 0.15
    assert np.abs(logits[1] - logits[0]).max() < tolerance * np.abs(logits[0]).max()


def test_the_kernels_engine_has_its_pages_filled(fake_device: FakeLibrary) -> None:
    plan = Plan(6, LAYER_WAVES, "row_owner", splits=SplitPolicy(128, 4))
    library = fake_build(G, plan.splits)
    pools = []
    for products in (None, "packed"):
        engine = CudaEngine(weights(), library, plan, 2, 400, chunk=64, products=products, device="cpu")
        engine.prefill(1, PROMPT[:70])
        assert engine.packs == (products == "packed")
        held = {kind: engine.pages.table[kind][1, :2] for kind in ("full", "sliding")}
        pools.append([engine.runtime[f"pool_{kind}"][torch.from_numpy(pages).long()] for kind, pages in held.items()])
    other = CudaEngine(weights(), library, plan, 2, 400, chunk=64, products="torch", device="cpu")
    assert not other.packs  # there a token's bits depend on the chunk
    for torchs, tritons in zip(*pools, strict=True):
        torchs, tritons = torchs.float().nan_to_num(), tritons.float().nan_to_num()
        assert (torchs - tritons).norm() < 0.1 * torchs.norm()


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([Prompt(0, [])], "no tokens"),
        ([Prompt(0, [G.vocab])], "outside 0.."),
        ([Prompt(0, [-1])], "outside 0.."),
        ([Prompt(0, [1], 64)], "needs 65 positions, there is room for 64"),
        ([Prompt(0, [1]), Prompt(0, [2])], "two prompts are for the same slot"),
    ],
)
def test_what_can_not_be_prefilled_is_named(prompts: list[Prompt], message: str) -> None:
    rig = Rig(weights(), 1, 64)
    with pytest.raises(MkError, match=message):
        rig.prefill.forward(rig.pages, prompts)


def test_too_few_or_too_many_pages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(weights(), 2, 256)
    with pytest.raises(MkError, match="slot 0: 203 keys need 4 more full pages, 2 are free"):
        rig.prefill.forward(rig.pages, [Prompt(0, PROMPT)])
    monkeypatch.setattr(triton_prefill, "MAX_PAGES", 1)
    with pytest.raises(MkError, match="2 full pages, it can name 1"):
        TritonPrefill(weights(), make_pools(G, {"full": 2, "sliding": 2}, torch.float32), 64, 64)


def test_kernels_made_for_a_gpu_are_not_started_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreted, "interpreted", lambda: False)
    plan = Plan(3, LAYER_WAVES, "row_owner", splits=SplitPolicy(128, 4))
    with pytest.raises(MkError, match="needs Triton's interpreter"):
        MachineEngine(weights(), plan, 1, 128, prefill="triton")


def test_the_option_brings_its_key_along() -> None:
    config = load_config(["prefill=triton", "prefill.products=torch"])
    assert (config.prefill.chunk, config.prefill.products) == (8192, "torch")
    with pytest.raises(MkError, match="prefill.products=packed means nothing with prefill=torch"):
        load_config(["prefill.products=packed"])
    with pytest.raises(MkError, match="prefill.products=cublas is not one of packed, torch"):
        load_config(["prefill=triton", "prefill.products=cublas"])
