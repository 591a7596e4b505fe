"""What the machine chooses: experts, by the router or by a mode in its place, and tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mk.errors import MkError
from mk.interpreter.moe import choose
from mk.model.reference import ReferenceCache, reference_forward
from mk.sampling import SamplingParams, sample_row
from mk.verify import verify
from tests.interpreter_rig import GEOMETRY, batch, program, random_tokens, source

PROMPTS = [random_tokens(n, seed=n) for n in (90, 0, 33)]
TOKENS = [7, 7, 12]


def reference_step(row: int, expert_ids: dict[int, Any] | None = None) -> tuple[Any, dict[int, Any]]:
    """Logits [vocab] and ids by layer of one row's token after its prompt, in float64."""
    held: ReferenceCache = ReferenceCache()
    trace: list[Any] = []
    reference_forward(GEOMETRY, source().tensor, torch.tensor(PROMPTS[row]), torch.float64, held)
    forced = None
    if expert_ids is not None:
        forced = [
            torch.from_numpy(expert_ids[layer][row : row + 1]) if layer in expert_ids else None
            for layer in range(GEOMETRY.layers)
        ]
    token = torch.tensor([TOKENS[row]])
    logits = reference_forward(GEOMETRY, source().tensor, token, torch.float64, held, trace, forced)
    ids = {layer: out.expert_ids[0].numpy() for layer, out in enumerate(trace) if out.expert_ids is not None}
    return logits[0].numpy(), ids


@pytest.mark.parametrize("stealing", [False, True])
def test_published_experts_are_the_references(stealing: bool) -> None:
    out = batch(program(3, stealing=stealing), PROMPTS, TOKENS).step()
    assert tuple(out.expert_ids) == GEOMETRY.sparse_layers
    for row in (0, 2):
        _, ids = reference_step(row)
        for layer, chosen in out.expert_ids.items():
            assert chosen[row].tolist() == ids[layer].tolist()
            assert chosen[1].tolist() == [-1] * GEOMETRY.top_k
    distinct = [len({*ids[0].tolist(), *ids[2].tolist()}) for ids in out.expert_ids.values()]
    assert out.distinct_experts == np.mean(distinct)


def test_ties_nan_and_infinities_of_a_router() -> None:
    logits = np.array(
        [[1, 3, 3, 2, 3], [np.nan, -np.inf, 5, np.nan, 0], [np.nan] * 5, [np.inf, 0, np.inf, 1, np.inf]], np.float32
    )
    assert choose(logits, 2).tolist() == [[1, 2], [2, 4], [0, 1], [0, 2]]
    assert choose(logits, 5)[1].tolist() == [2, 4, 0, 1, 3]  # NaN ties with -inf


@pytest.mark.parametrize("placement", ["row_owner", "round_robin"])
def test_a_mode_replaces_the_ids_and_keeps_the_logits(placement: str) -> None:
    """The result is the reference's with the same ids: weights are the sigmoids of those experts' own logits."""
    asked: set[tuple[int, int]] = set()

    def mode(layer: int, step: int, logits: Any) -> Any:
        asked.add((layer, step))
        assert logits.shape == (3, GEOMETRY.experts)
        assert np.isnan(logits[1]).all() and np.isfinite(logits[[0, 2]]).all()
        return (np.arange(3)[:, None] * 3 + np.arange(GEOMETRY.top_k) * 2 + layer + step) % GEOMETRY.experts

    decoding = batch(program(3, placement=placement), PROMPTS, TOKENS, router=mode)
    out = decoding.step()
    for row in (0, 2):
        exact, _ = reference_step(row, out.expert_ids)
        own, _ = reference_step(row)
        assert np.abs(out.logits[row] - exact).max() < 1e-5 * np.abs(exact).max()
        assert np.abs(own - exact).max() > 1e-2 * np.abs(exact).max()
    second = decoding.step()
    assert asked == {(layer, step) for layer in GEOMETRY.sparse_layers for step in (0, 1)}
    for layer, ids in second.expert_ids.items():
        assert ids[2].tolist() == [(6 + 2 * j + layer + 1) % GEOMETRY.experts for j in range(GEOMETRY.top_k)]


def test_steps_are_counted_across_programs() -> None:
    """A replayed trace goes on where it was when the bucket grows."""
    steps: list[int] = []

    def mode(layer: int, step: int, logits: Any) -> Any:
        steps.append(step)
        return np.tile(np.arange(GEOMETRY.top_k), (3, 1))

    decoding = batch(program(3, bucket=128), PROMPTS, TOKENS, router=mode)
    decoding.step()
    decoding.machine.load(program(3, bucket=512))
    decoding.step()
    assert sorted(set(steps)) == [0, 1]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 1]] * 3, r"ids \[3, 2\], not \[3, 3\]"),
        ([[0, 1, 1]] * 3, "3 different experts"),
        ([[0, 1, 7]] * 3, "3 different experts"),
        ([[0, 1, -1]] * 3, "3 different experts"),
    ],
)
def test_a_mode_that_gives_impossible_ids(ids: list[list[int]], message: str) -> None:
    decoding = batch(program(3), PROMPTS, TOKENS, router=lambda layer, step, logits: np.array(ids))
    with pytest.raises(MkError, match=message):
        decoding.step()


def test_tokens_are_drawn_by_the_rows_own_parameters_and_position() -> None:
    params = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.3, top_k=20, seed=4)]
    decoding = batch(program(3, draws=True), PROMPTS, TOKENS)
    positions = decoding.keys.copy()
    out = decoding.step(sampling=params)
    assert out.tokens[1] == -1
    for row in (0, 2):
        assert out.tokens[row] == sample_row(out.logits[row], params[row], int(positions[row]))
    assert out.tokens[2] != int(out.logits[2].argmax())
    moved = batch(program(3, draws=True), PROMPTS[::-1], TOKENS[::-1]).step(sampling=params[::-1])
    assert moved.tokens.tolist() == out.tokens[::-1].tolist()


@pytest.mark.parametrize(("placement", "stealing", "n_sm"), [("row_owner", False, 5), ("round_robin", True, 30)])
def test_rows_of_one_batch_may_be_cut_drawn_and_greedy(placement: str, stealing: bool, n_sm: int) -> None:
    """30 SMs for 19 strips of the head: some have no slice of the vocabulary."""
    params = [SamplingParams(1.0, 30, 0.8, seed=3), SamplingParams(0.7, top_p=0.6, seed=3), SamplingParams()]
    prompts = [random_tokens(n, seed=n) for n in (20, 70, 33)]
    loaded = program(3, placement=placement, stealing=stealing, n_sm=n_sm, draws=True)
    verify(loaded)
    decoding = batch(loaded, prompts, TOKENS, interleaving="eager")
    drawn = set()
    for _ in range(6):
        keys = decoding.keys.copy()
        out = decoding.step(sampling=params)
        decoding.machine.poison()
        for row in range(3):
            assert out.tokens[row] == sample_row(out.logits[row], params[row], int(keys[row]))
        drawn.add(bool(out.tokens[1] == out.logits[1].argmax()))
    assert False in drawn


def test_a_greedy_program_does_not_draw() -> None:
    with pytest.raises(MkError, match="row 2: the program only takes the likeliest token"):
        batch(program(3), PROMPTS, TOKENS).step(sampling=[SamplingParams()] * 2 + [SamplingParams(1.0)])


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    """293 tokens are padded to 304 rows of zeros, whose logit 0 would beat a row of negative ones."""
    decoding = batch(program(1, draws=True), [PROMPTS[0]])
    decoding.step()
    padding = decoding.machine.memory.logits[0, GEOMETRY.vocab :]
    assert len(padding) == 11 and not padding.any()
    params = SamplingParams(temperature=50.0)  # nearly uniform
    tokens = [decoding.step(sampling=[params]).tokens[0] for _ in range(60)]
    assert max(tokens) < GEOMETRY.vocab and len(set(tokens)) > 40
