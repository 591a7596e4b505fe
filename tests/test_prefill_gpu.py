"""Prefill in Triton on a card: against the float32 reference, against itself, and under the decode kernel's step.

Expert ids are replayed from the reference, as in experiments/kernel_checks.py; "noise" is what its rounding to bfloat16
does to the reference. Pages are permuted and NaN before, so are the activations of rows that no token has.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import Tensor

from experiments.kernel_checks import NOISE_RATIO, SLACK, Bfloat16Reference, Oracle, consult, differing_sets, same_bits
from experiments.prefill_rig import Rig, poison, same_pages
from mk.graph import LAYER_WAVES
from mk.kernel.build import build
from mk.kernel.runtime import Runtime
from mk.kv import KINDS, PageAllocator, blocks_of, kv_layers, pages_for_contexts
from mk.model.checkpoint import load_checkpoint
from mk.model.geometry import PRESETS
from mk.model.opening import NANO
from mk.model.packing import PackedWeights
from mk.model.random_weights import RandomWeights, sharp_qk_scale
from mk.model.reference import Reference, ReferenceCache
from mk.model.tensors import WeightSource
from mk.programs import Plan, Programs
from mk.splits import SplitPolicy
from prefill.chunks import Piece, Prompt, token_tiles
from prefill.tiles import HOPPER
from tests.prefill_rig import needs_compiler

pytestmark = [pytest.mark.gpu, needs_compiler]

DEVICE = torch.device("cuda")


@dataclass
class Subject:
    """A model on the card, and what the reference makes of one long sequence."""

    source: WeightSource
    length: int  # of the sequence
    edges: tuple[int, ...]  # prompt lengths around pages, tiles and the window

    @cached_property
    def packed(self) -> PackedWeights:
        return PackedWeights.from_state(self.source.tensor, self.source.geometry, DEVICE)

    @cached_property
    def oracle(self) -> Oracle:
        generator = torch.Generator().manual_seed(3)
        return consult(
            self.source, torch.randint(self.source.geometry.vocab, (self.length,), generator=generator), DEVICE
        )

    @cached_property
    def tokens(self) -> list[int]:
        return self.oracle.tokens.tolist()

    def noise(self) -> Tensor:
        return (self.oracle.logits_bf16 - self.oracle.logits).norm(dim=-1) / self.oracle.logits.norm(dim=-1)

    def ids(self, length: int) -> Tensor:
        """Replayed expert ids, [layers, length, top_k]."""
        return self.oracle.ids[:length].transpose(0, 1).contiguous()

    def rig(self, slots: int = 1, positions: int | None = None, chunk: int = 8192, **options: object) -> Rig:
        made = Rig.for_prompts(self.packed, slots, positions or self.length, chunk, **options)
        poison(made.prefill.launch.acts, self.source.geometry)
        return made


@pytest.fixture(scope="module")
def nano() -> Subject:
    edges = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 255, 256, 257, 320, 449)
    return Subject(load_checkpoint(NANO), 450, edges)


@pytest.fixture(scope="module")
def wide() -> Subject:
    """Five layers of the full width, window and expert count; attention sharp enough to show when it is wrong."""
    geometry = PRESETS["slice"]
    source = RandomWeights(geometry, 5, DEVICE, qk_scale=sharp_qk_scale(geometry))
    return Subject(source, 8193, (1, 2, 63, 64, 65, 127, 1000, 4095, 4096, 4097, 8192))


@pytest.fixture(params=["nano", "wide"])
def subject(request: pytest.FixtureRequest) -> Subject:
    found: Subject = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("products", ["packed", "torch"])
def test_last_logits_lie_within_the_noise_of_bfloat16(subject: Subject, products: str) -> None:
    noise, errors = subject.noise(), []
    rig = subject.rig(products=products)
    for length in subject.edges:
        logits = rig.prefill.forward(rig.pages, [Prompt(0, subject.tokens[:length])], subject.ids(length))[0]
        rig.pages.free(0)
        exact = subject.oracle.logits[length - 1]
        errors.append((logits - exact).norm() / exact.norm())
        assert errors[-1] <= NOISE_RATIO * noise.max(), length
    assert torch.stack(errors).median() <= NOISE_RATIO * noise.median()


def test_pages_lie_within_the_noise_of_bfloat16(subject: Subject) -> None:
    """Each layer fed what came before in its own arithmetic; ids replayed."""
    g, length = subject.source.geometry, subject.edges[-2]
    held: dict[str, Tensor] = {}

    def get(name: str) -> Tensor:
        if name not in held:
            held[name] = subject.source.tensor(name).to(DEVICE)
        return held[name]

    rig = subject.rig()
    rig.prefill.forward(rig.pages, [Prompt(0, subject.tokens[:length])], subject.ids(length))
    arms = [(arm, ReferenceCache()) for arm in (Reference(g, get), Bfloat16Reference(g, get))]
    streams = [arm.embed(torch.tensor(subject.tokens[:length])) for arm, _ in arms]
    visible = rig.visible(0, length)
    with torch.no_grad():
        for layer in range(g.layers):
            ids = subject.ids(length)[layer].long() if g.mlp_kinds[layer] == "sparse" else None
            for i, (arm, cache) in enumerate(arms):
                out = arm.layer(layer, streams[i], 0, cache, ids)
                streams[i] = streams[i] + (out.attention + out.ffn)
            held.clear()
            for found, which in zip(visible[layer], ("keys", "values"), strict=True):
                exact, rounded = (getattr(cache, which)[layer][:, -found.shape[1] :].float() for _, cache in arms)
                error = (found.float() - exact).norm() / exact.norm()
                assert error <= NOISE_RATIO * (rounded - exact).norm() / exact.norm(), (layer, which)


def test_the_router_chooses_as_often_otherwise_as_bfloat16(subject: Subject) -> None:
    rig, length = subject.rig(), subject.length
    taken = torch.zeros_like(subject.ids(length))
    rig.prefill.forward(rig.pages, [Prompt(0, subject.tokens)], taken=taken)
    layer = subject.source.geometry.sparse_layers[0]
    exact = subject.oracle.ids[:, layer]
    flips, allowed = differing_sets(taken[layer], exact), differing_sets(subject.oracle.ids_bf16, exact)
    assert flips <= NOISE_RATIO * allowed + SLACK
    assert all(len(set(row)) == taken.shape[-1] for row in taken[layer].tolist())


@pytest.mark.parametrize("length", [130, 449])
@pytest.mark.parametrize("chunk", [61, 128, 300])
def test_packed_or_cut_the_bits_are_those_of_a_prompt_alone(nano: Subject, length: int, chunk: int) -> None:
    check_packed(nano, length, [nano.tokens[:17], nano.tokens[40:341]], chunk)


@pytest.mark.parametrize(("length", "chunk"), [(700, 8192), (4097, 3000), (1, 8192)])
def test_packed_or_cut_the_bits_are_those_of_a_prompt_alone_at_full_width(
    wide: Subject, length: int, chunk: int
) -> None:
    """Beside 4,128 tokens products have other tiles than for a short prompt alone."""
    check_packed(wide, length, [wide.tokens[:28], wide.tokens[40:4140]], chunk)


def check_packed(subject: Subject, length: int, neighbours: list[list[int]], chunk: int) -> None:
    alone = subject.rig(positions=length)
    tokens = subject.tokens[:length]
    expected = alone.prefill.forward(alone.pages, [Prompt(0, tokens)])[0]
    crowd = subject.rig(slots=3, positions=max(length, *map(len, neighbours)), chunk=chunk, page_seed=7)
    prompts = [Prompt(2, neighbours[0]), Prompt(1, tokens), Prompt(0, neighbours[1])]
    logits = crowd.prefill.forward(crowd.pages, prompts)
    assert logits.isfinite().all() and same_bits(logits[1], expected)
    assert same_pages(crowd.visible(1, length), alone.visible(0, length))


@pytest.mark.parametrize("cut", [1, 63, 64, 200, 257])
def test_continued_the_bits_are_those_of_one_call(nano: Subject, cut: int) -> None:
    check_continued(nano, 449, cut)


@pytest.mark.parametrize("cut", [4095, 4096, 4097])
def test_continued_at_the_window_the_bits_are_those_of_one_call(wide: Subject, cut: int) -> None:
    check_continued(wide, 8192, cut)


def check_continued(subject: Subject, length: int, cut: int) -> None:
    whole, parts = subject.rig(), subject.rig(page_seed=5)
    expected = whole.prefill.forward(whole.pages, [Prompt(0, subject.tokens[:length])])[0]
    parts.prefill.forward(parts.pages, [Prompt(0, subject.tokens[:cut])])
    logits = parts.prefill.forward(parts.pages, [Prompt(0, subject.tokens[cut:length], cut)])[0]
    assert same_bits(logits, expected)
    assert same_pages(parts.visible(0, length), whole.visible(0, length))


def test_twenty_repeats_give_the_same_bits(wide: Subject) -> None:
    rig, tokens = wide.rig(), wide.tokens[:1500]
    first = rig.prefill.forward(rig.pages, [Prompt(0, tokens)])
    for _ in range(20):
        rig.pages.free(0)
        assert same_bits(rig.prefill.forward(rig.pages, [Prompt(0, tokens)]), first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [64, 128])
def test_one_key_is_found_exactly_where_it_can_be_seen(wide: Subject, kind: str, keys: int) -> None:
    """All queries point at one key: those that see it return its value to the bit, and no other one does."""
    g, length = wide.source.geometry, 8192
    layer = g.full_layers[-1] if kind == "full" else g.sliding_layers[0]
    tile = dataclasses.replace(HOPPER.attention, keys=keys, stages=2)
    rig = wide.rig(tiles=dataclasses.replace(HOPPER, attention=tile))
    launch = rig.prefill.launch
    launch.tokens = length
    rig.pages.reserve(0, length, since=0)
    table = torch.from_numpy(rig.pages.table[kind]).short().to(DEVICE)
    tiles = torch.from_numpy(token_tiles([Piece(0, 0, 0, length, True)], tile.tokens)).to(DEVICE)
    rope = (torch.ones(length, 64, device=DEVICE).bfloat16(), torch.zeros(length, 64, device=DEVICE).bfloat16())
    position = torch.arange(length, device=DEVICE)
    values = torch.randn(length, g.kv_heads, g.head_dim, device=DEVICE).bfloat16()
    for needle in (0, 1, 63, 64, 127, 128, 4000, 4095, 4096, 8191):
        keys_, queries = torch.zeros(length, g.kv_heads, g.head_dim, device=DEVICE), torch.full((g.q_width,), 8.0)
        keys_[needle] = 8
        launch.acts.qkv[:length] = torch.cat(
            [queries.to(DEVICE).expand(length, -1).bfloat16(), keys_.bfloat16().flatten(1), values.flatten(1)], dim=1
        )
        launch.append(layer, rope, rig.pools[kind], table, tiles)
        launch.attention(layer, rope, rig.pools[kind], table, tiles)
        found = launch.acts.heads[:length].view(length, g.kv_heads, g.group, g.head_dim)
        hit = (found == values[needle][None, :, None]).flatten(1).all(1)
        seen = (needle <= position) & (position < needle + (g.window_keys if kind == "sliding" else length))
        assert torch.equal(hit, seen), needle


def test_the_decode_kernel_goes_on_where_prefill_stops(nano: Subject) -> None:
    """n tokens prefilled and one decoded, or n + 1 prefilled: both within the noise."""
    g, splits = nano.source.geometry, SplitPolicy(128, 2)
    counts = pages_for_contexts(g, 1, nano.length, nano.length, paged_chunk=True)
    runtime = Runtime(build(g, splits), nano.packed, counts, blocks_of(nano.length), 512, time_limit_s=1.0)
    rig = nano.rig()
    rig.prefill.pools = {kind: runtime[f"pool_{kind}"] for kind in KINDS if kv_layers(g, kind)}
    orders = Plan(runtime.facts.sms, LAYER_WAVES, "row_owner", splits=splits)
    program = Programs(g, 1, orders).get(512)
    torch.cuda.synchronize()
    for length in (1, 5, 63, 64, 255, 256, 300):
        pages = PageAllocator(g, counts, 1, blocks_of(nano.length), seed=length)
        with torch.cuda.stream(runtime.stream):
            rig.prefill.forward(pages, [Prompt(0, nano.tokens[:length])], nano.ids(length))
        runtime.load(program)
        pages.advance([length + 1])
        runtime.set_tables(pages.table.table)
        runtime.set_sequences([length + 1], [nano.tokens[length]])
        ids = torch.zeros_like(runtime["route_ids"])
        ids[:, 0] = nano.oracle.ids[length]
        torch.cuda.synchronize()
        runtime.force_routing(ids)
        runtime.launch()
        runtime.finish()
        runtime.force_routing(None)
        exact = nano.oracle.logits[length]
        assert (runtime.logits(0) - exact).norm() / exact.norm() <= NOISE_RATIO * nano.noise().max(), length
