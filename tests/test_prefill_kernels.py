"""Each Triton kernel under the interpreter, in float32, against a few lines of torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from experiments.prefill_rig import make_pools, poison
from mk.kv import KINDS, kv_layers
from mk.model.packing import pack_matrix
from mk.model.reference import rms_norm, rope_table, rotate, top_k
from mk.page_layout import pack_keys, pack_values
from prefill.chunks import Piece, token_tiles
from prefill.launch import Launcher
from prefill.tiles import INTERPRETED, AttentionTile, ProductTile, Tiles
from tests.interpreter_rig import GEOMETRY, weights
from tests.prefill_rig import needs_interpreter

pytestmark = needs_interpreter

G = GEOMETRY
SPARSE = G.sparse_layers[0]
TOKENS = 70  # more than a block of every kernel
SMALL = Tiles(
    large=ProductTile(32, 64, 64, 1, 1, group=2),
    small=ProductTile(16, 32, 256, 1, 1),
    up=ProductTile(32, 64, 128, 1, 1, tail=16),
    up_small=ProductTile(16, 32, 256, 1, 1),
    down=ProductTile(32, 64, 128, 1, 1, tail=16),
    down_small=ProductTile(16, 64, 256, 1, 1),
    large_rows=20,
    attention=AttentionTile(16, 128, 1, 1),
    route=ProductTile(16, 128, 128, 1, 1),
    rows=16,
    sms=4,
)


@triton.jit
def _convert_kernel(x, narrow, wide, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at).to(tl.bfloat16)
    tl.store(narrow + at, value)
    tl.store(wide + at, value.to(tl.float32))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def launcher(tiles: Tiles = INTERPRETED, tokens: int = TOKENS, products: str = "packed") -> Launcher:
    """Kernels on random normed tokens; whatever lies behind them is NaN."""
    made = Launcher(weights(), tokens + 9, torch.float32, tiles, products)
    made.tokens = tokens
    poison(made.acts, G)
    made.acts.normed[:tokens, : G.hidden] = random(tokens, G.hidden)
    return made


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    """To nearest, ties to even, carries into the exponent, infinities, subnormal numbers, NaN."""
    odd = [torch.inf, -torch.inf, torch.nan, -torch.nan, 0.0, -0.0, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 2 - 2**-9, 1e-40]
    x = torch.cat([torch.tensor(odd), random(1000 - len(odd)), random(24, seed=1) * 1e-38])
    narrow, wide = torch.zeros(1024, dtype=torch.bfloat16), torch.zeros(1024)
    _convert_kernel[(1,)](x, narrow, wide, N=1024)
    assert torch.equal(narrow.isnan(), x.isnan()) and torch.equal(wide.isnan(), x.isnan())
    assert torch.equal(narrow[~x.isnan()].view(torch.int16), x.bfloat16()[~x.isnan()].view(torch.int16))
    assert torch.equal(wide.nan_to_num(7), x.bfloat16().float().nan_to_num(7))


def matrix(name: str, layer: int, expert: int = 0) -> Tensor:
    return weights().matrix(name, layer, expert).float()


def near(found: Tensor, expected: Tensor) -> None:
    assert found.isfinite().all()
    assert (found - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("tiles", [INTERPRETED, SMALL])
@pytest.mark.parametrize("products", ["packed", "torch"])
def test_the_fused_projection_comes_in_logical_order(tiles: Tiles, products: str) -> None:
    made = launcher(tiles, products=products)
    made.qkv(2)
    near(made.acts.qkv[:TOKENS], made.acts.normed[:TOKENS, : G.hidden] @ matrix("qkv", 2).T)
    assert made.acts.qkv[TOKENS:].isnan().all()


def test_a_few_rows_of_the_head_are_scaled() -> None:
    made = launcher()
    rows = torch.tensor([3, 69, 3])
    expected = made.acts.normed[rows, : G.hidden] @ weights().matrix("head").float().T * G.logit_scale
    near(made.head(rows), expected)


def test_embedding_and_its_norm() -> None:
    made, ids = launcher(), torch.randint(G.vocab, (TOKENS,), generator=torch.Generator().manual_seed(1)).int()
    made.embed(ids)
    expected = weights().matrix("head").float()[ids.long()]
    assert torch.equal(made.acts.x[:TOKENS, : G.hidden], expected)
    near(made.acts.normed[:TOKENS, : G.hidden], rms_norm(expected, weights().norms[0].float(), G.rms_eps))
    for buffer in (made.acts.x, made.acts.normed):
        assert (buffer[:TOKENS, G.hidden :] == 0).all() and buffer[TOKENS:, : G.hidden].isnan().all()


@pytest.mark.parametrize("layer", [0, SPARSE])
def test_the_end_of_a_layer(layer: int) -> None:
    made = launcher()
    x, attention = random(TOKENS, G.hidden, seed=1), random(TOKENS, G.hidden, seed=2)
    made.acts.x[:TOKENS, : G.hidden], made.acts.attention[:TOKENS] = x, attention
    if layer == 0:
        ffn = random(TOKENS, G.hidden, seed=3)
        made.acts.ffn[:TOKENS] = ffn
    else:
        made.acts.ffn[:] = random(*made.acts.ffn.shape, seed=3)
        made.acts.slot_of[:TOKENS] = torch.randint(
            len(made.acts.ffn), (TOKENS, G.top_k), generator=torch.Generator()
        ).int()
        made.acts.weight_of[:TOKENS] = random(TOKENS, G.top_k, seed=4)
        ffn = (made.acts.ffn[made.acts.slot_of[:TOKENS].long()] * made.acts.weight_of[:TOKENS, :, None]).sum(1)
    made.residual(layer)
    near(made.acts.x[:TOKENS, : G.hidden], x + (attention + ffn))
    expected = rms_norm(x + (attention + ffn), weights().norms[layer + 1].float(), G.rms_eps)
    near(made.acts.normed[:TOKENS, : G.hidden], expected)


def swiglu(x: Tensor, up: str, down: str, layer: int, expert: int = 0) -> Tensor:
    gate, value = (x @ matrix(up, layer, expert).T).chunk(2, dim=-1)
    return (F.silu(gate) * value) @ matrix(down, layer, expert).T


@pytest.mark.parametrize("tiles", [INTERPRETED, SMALL])
def test_the_dense_ffn(tiles: Tiles) -> None:
    made = launcher(tiles)
    made.dense(0)
    near(made.acts.ffn[:TOKENS], swiglu(made.acts.normed[:TOKENS, : G.hidden], "dense_up", "dense_down", 0))


def routed(made: Launcher, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Route, check everything that the sort leaves, and give the router's exact logits and the ids."""
    n, k = made.tokens, G.top_k
    logits = made.acts.normed[:n, : G.hidden] @ matrix("router", SPARSE).T
    ids = made.route(SPARSE, forced).long()
    near(made.acts.expert_weights[:n], logits.gather(1, ids).sigmoid())
    ascending, order = ids.sort(1)
    assert torch.equal(made.acts.weight_of[:n], made.acts.expert_weights[:n].gather(1, order))
    slots = made.acts.slot_of[:n].long()
    pairs = sorted((int(e), token) for token in range(n) for e in ids[token])
    assert made.acts.token_of[: n * k].tolist() == [token for _, token in pairs]
    for token in range(n):
        assert [pairs[slot] for slot in slots[token].tolist()] == [(e, token) for e in ascending[token].tolist()]
    tiles = made.acts.row_tiles[: int(made.acts.n_tiles)].tolist()
    size = made._expert_tiles()[0].m
    covered = []
    for expert, first, end, _ in tiles:
        assert 0 < end - first <= size and all(pairs[row][0] == expert for row in range(first, end))
        covered += range(first, end)
    assert covered == list(range(n * k)) and len(tiles) <= made._most_tiles()
    assert len(tiles) == sum(-(-int((ids == e).sum()) // size) for e in range(G.experts))
    return logits, ids


@pytest.mark.parametrize("tiles", [INTERPRETED, SMALL])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_experts_are_chosen_sorted_and_multiplied(tiles: Tiles, tokens: int) -> None:
    made = launcher(tiles, tokens)
    logits, ids = routed(made)
    assert torch.equal(ids, top_k(logits, G.top_k))
    made.up(SPARSE)
    made.down(SPARSE)
    for i, token in enumerate(made.acts.token_of[: tokens * G.top_k].tolist()):
        expert = int((made.acts.slot_of[token] == i).nonzero())
        chosen = int(ids[token].sort().values[expert])
        near(made.acts.ffn[i], swiglu(made.acts.normed[token, : G.hidden], "up", "down", SPARSE, chosen))


def test_a_forced_choice_is_taken_with_the_routers_weights() -> None:
    made = launcher()
    forced = torch.stack([torch.randperm(G.experts)[: G.top_k] for _ in range(TOKENS)]).int()
    forced[:, 0], forced[:, 1], forced[:, 2] = 6, 2, 5  # all tokens on three experts
    _, ids = routed(made, forced)
    assert torch.equal(ids, forced.long())


def test_ties_take_the_lower_id_and_nan_the_last_place() -> None:
    """A choice is always top_k distinct experts that exist."""
    made = launcher(tokens=4)
    router = made._matrices["router", SPARSE]
    row = matrix("router", SPARSE)[3]
    tied = torch.zeros(G.experts, G.hidden)
    tied[[1, 4, 6]] = row  # equal logits, whatever the token; the others are 0
    made._matrices["router", SPARSE] = pack_matrix(tied.bfloat16()).view(-1)
    assert len(made._matrices["router", SPARSE]) == len(router)
    positive = (made.acts.normed[:4, : G.hidden] @ row > 0).tolist()
    made.acts.normed[3, : G.hidden] = torch.nan
    ids = made.route(SPARSE, None).tolist()
    for token in range(3):
        assert ids[token] == ([1, 4, 6] if positive[token] else [0, 2, 3])
    assert ids[3] == [0, 1, 2]


class Sequence:
    """Keys, values and queries of one sequence on one layer, and what causal attention makes of them."""

    def __init__(self, length: int, seed: int) -> None:
        self.qkv = random(length, G.qkv_rows, seed=seed) * 2
        self.q, self.k, self.v = (
            part.view(length, -1, G.head_dim).transpose(0, 1)
            for part in self.qkv.split([G.q_width, G.kv_width, G.kv_width], dim=1)
        )

    def turned(self, layer: int) -> tuple[Tensor, Tensor]:
        if not G.rope[layer]:
            return self.q, self.k
        cos, sin = rope_table(G, torch.arange(len(self.qkv)))
        return rotate(self.q, cos, sin), rotate(self.k, cos, sin)

    def attend(self, layer: int) -> Tensor:
        q, k = self.turned(layer)
        n = len(self.qkv)
        i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
        seen = j <= i
        if G.layer_kinds[layer] == "sliding":
            seen &= j > i - G.window_keys
        k, v = (part.repeat_interleave(G.group, 0) for part in (k, self.v))
        scores = (q @ k.transpose(1, 2) * G.head_dim**-0.5).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("layer", [0, 1, 3])  # full with rope, sliding, full without
@pytest.mark.parametrize("tiles", [INTERPRETED, SMALL])
def test_attention_over_pages_some_of_them_released(layer: int, tiles: Tiles) -> None:
    """Two sequences: one begins, the other goes on after 150 cached tokens whose early pages are gone."""
    kind = G.layer_kinds[layer]
    index, cached = kv_layers(G, kind).index(layer), 150
    new, old = Sequence(37, seed=1), Sequence(cached + 33, seed=2)
    pieces = [Piece(0, 1, 0, 37, True), Piece(1, 0, cached, cached + 33, True)]
    made = launcher(tiles)
    made.acts.qkv[:TOKENS] = torch.cat([new.qkv, old.qkv[cached:]])
    pool = make_pools(G, dict.fromkeys(KINDS, 8), torch.float32)[kind]
    table = torch.tensor([[5, 2, 7, -1], [3, -1, -1, -1]]).short()
    k, v = old.turned(layer)[1], old.v
    for block in range(3):
        lo, hi = block * 64, min(cached, block * 64 + 64)
        page = torch.full((2, G.kv_heads, 64, G.head_dim), torch.nan)
        page[:, :, : hi - lo] = torch.stack([k[:, lo:hi], v[:, lo:hi]])
        pool[table[0, block], index, :, 0] = pack_keys(page[0])
        pool[table[0, block], index, :, 1] = pack_values(page[1])
    if kind == "sliding":  # the token at 150 sees keys 87 ..
        pool[table[0, 0]] = torch.nan
        table[0, 0] = -1
    rope = tuple(t.contiguous() for t in rope_table(G, torch.arange(256)))
    chunk = torch.from_numpy(token_tiles(pieces, tiles.attention.tokens))
    made.append(layer, rope, pool, table, chunk)
    made.attention(layer, rope, pool, table, chunk)
    near(made.acts.heads[:TOKENS, : G.q_width], torch.cat([new.attend(layer), old.attend(layer)[cached:]]))
    assert made.acts.heads[TOKENS:, : G.q_width].isnan().all()
    written = ~pool.isnan().flatten(3)
    assert not written[table[0, 2].item(), [i for i in range(pool.shape[1]) if i != index]].any()
    assert (written[3, index].sum(-1) == 37 * 2 * G.head_dim).all()  # nothing but the new keys and values


def test_a_token_without_a_page_is_dropped() -> None:
    made = launcher(tokens=5)
    made.acts.qkv[:5] = Sequence(5, seed=1).qkv
    pool = make_pools(G, dict.fromkeys(KINDS, 2), torch.float32)["sliding"]
    tiles = torch.from_numpy(token_tiles([Piece(0, 0, 64, 69, True)], 64))
    rope = tuple(t.contiguous() for t in rope_table(G, torch.arange(128)))
    made.append(1, rope, pool, torch.tensor([[1, -1]]).short(), tiles)
    assert pool.isnan().all()
