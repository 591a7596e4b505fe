"""Sampling on a card: the kernel's tokens against the Python twin on the kernel's own logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from mk.graph import LAYER_WAVES
from mk.isa import ISA, NONE, Word
from mk.kernel.build import build
from mk.kernel.runtime import Runtime
from mk.kv import KINDS, PAGE, PageAllocator, blocks_of
from mk.model.checkpoint import load_checkpoint
from mk.model.geometry import SLOT_BYTES, Geometry
from mk.model.opening import NANO
from mk.model.packing import PackedWeights, WeightLayout
from mk.programs import Plan, Programs
from mk.sampling import NO_TOKEN, SamplingParams, sample_row
from mk.schedule.lower import Program
from mk.splits import SplitPolicy
from tests.test_shortlist import PARAMS, adversarial

pytestmark = pytest.mark.gpu

SPLITS = SplitPolicy(128, 2)
GREEDY = SamplingParams()
BUCKET = 512
MIX = [
    SamplingParams(1.0, seed=1),
    SamplingParams(0.7, top_k=40, seed=2**63 + 5),
    SamplingParams(1.0, top_p=0.95, seed=1),
    SamplingParams(1.3, top_k=200, top_p=0.8, seed=4),
    GREEDY,
    SamplingParams(0.3, top_p=0.5, seed=5),
    SamplingParams(2.5, top_k=3, seed=6),
    SamplingParams(1.0, top_k=1, seed=7),
]


@pytest.fixture(scope="module")
def nano() -> Runtime:
    source = load_checkpoint(NANO)
    packed = PackedWeights.from_state(source.tensor, source.geometry, "cuda")
    pages = {"full": 80, "sliding": 80}
    return Runtime(build(source.geometry, SPLITS), packed, pages, blocks_of(BUCKET), BUCKET, time_limit_s=1.0)


@pytest.fixture(scope="module")
def full_vocabulary() -> Runtime:
    """Nano's layers with 262,144 tokens. Its weights are zeros: only sampling runs on it."""
    geometry = dataclasses.replace(Geometry.from_hf_config(NANO), vocab=262_144)
    layout = WeightLayout(geometry)
    slots = torch.zeros(layout.total_slots, SLOT_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    norms = torch.ones(geometry.layers + 1, geometry.hidden, dtype=torch.bfloat16, device="cuda")
    packed = PackedWeights(slots, norms, layout, geometry)
    return Runtime(build(geometry, SPLITS), packed, {"full": 16, "sliding": 16}, 1, BUCKET, time_limit_s=1.0)


def program(runtime: Runtime, rows: int, draws: bool = True, placement: str = "row_owner", n_sm: int = 0) -> Program:
    plan = Plan(n_sm or runtime.facts.sms, LAYER_WAVES, placement, splits=SPLITS)
    return Programs(runtime.geometry, rows, plan).get(BUCKET, draws)


def set_up(
    runtime: Runtime, loaded: Program, sampling: Sequence[SamplingParams], keys: Sequence[int], steps: int
) -> None:
    """Rows from empty contexts (keys 1) or inactive (keys 0), with `steps` to go; row r continues token 5 + r."""
    rows = loaded.shape.rows
    table = PageAllocator(runtime.geometry, dict.fromkeys(KINDS, 80), rows, runtime.max_blocks, seed=3)
    for row in np.flatnonzero(keys).tolist():
        table.reserve(row, 1)
        table.reserve(row, steps)
    runtime.stream.wait_stream(torch.cuda.current_stream())
    runtime.load(loaded)
    runtime.set_tables(table.table.table)
    runtime.set_sequences(keys, list(range(5, 5 + rows)), steps, sampling)


def decode(
    runtime: Runtime, loaded: Program, sampling: Sequence[SamplingParams], steps: int
) -> tuple[torch.Tensor, np.ndarray]:
    """Steps queued at once: logits [steps, rows, vocab] and the ring's tokens [steps, rows]."""
    rows, vocab = loaded.shape.rows, runtime.geometry.vocab
    logits = torch.empty(steps, rows, vocab, device=runtime.device)
    set_up(runtime, loaded, sampling, [1] * rows, steps)
    launches = []
    with torch.cuda.stream(runtime.stream):
        for step in range(steps):
            launches.append(runtime.launch())
            logits[step].copy_(runtime["logits"][:rows, :vocab])
    tokens = np.array([runtime.tokens_of(launch).tokens for launch in launches])
    runtime.finish()
    assert runtime["tokens"][:rows].tolist() == tokens[-1].tolist()
    return logits.cpu(), tokens


def test_hundreds_of_steps_of_a_mixed_batch_draw_the_twins_tokens(nano: Runtime) -> None:
    steps = 250
    logits, tokens = decode(nano, program(nano, 8), MIX, steps)
    for step in range(steps):
        expected = [sample_row(logits[step, row].numpy(), MIX[row], step + 1) for row in range(8)]
        assert tokens[step].tolist() == expected, f"step {step}"
    assert len(set(tokens[:, 0].tolist())) > 20


@pytest.mark.parametrize(("placement", "n_sm"), [("round_robin", 0), ("dependency_affinity", 0), ("row_owner", 70)])
def test_every_schedule_draws_the_same_tokens(nano: Runtime, placement: str, n_sm: int) -> None:
    logits, tokens = decode(nano, program(nano, 8), MIX, 60)
    same, again = decode(nano, program(nano, 8, placement=placement, n_sm=n_sm), MIX, 60)
    assert np.array_equal(tokens, again) and torch.equal(logits, same)


def test_a_row_draws_the_same_beside_nobody(nano: Runtime) -> None:
    _, tokens = decode(nano, program(nano, 8), MIX, 60)
    for row in range(8):
        set_up(nano, program(nano, 8), MIX, [int(other == row) for other in range(8)], 60)
        launches = [nano.launch() for _ in range(60)]
        assert [int(nano.tokens_of(launch).tokens[row]) for launch in launches] == tokens[:, row].tolist()
        nano.finish()


def test_greedy_and_drawing_programs_take_the_same_likeliest_tokens(nano: Runtime) -> None:
    logits, tokens = decode(nano, program(nano, 4, draws=False), [GREEDY] * 4, 60)
    same, again = decode(nano, program(nano, 4), [GREEDY] * 4, 60)
    assert torch.equal(logits, same) and np.array_equal(tokens, again)
    assert np.array_equal(tokens, logits.argmax(-1).numpy())


# ---- given logits: programs of which only the waves that sample are left


def sampling_only(loaded: Program) -> Program:
    """Waits for the head are dropped: logits and the head's candidates are put there by the host.

    Every SM must have a slice, so that nobody else's signal is waited for.
    """
    assert loaded.shape.slices == loaded.shape.n_sm
    waves = [ISA.named(op).opcode for op in ("histogram", "shortlist", "draw", "sample")]
    kept = np.isin(loaded.words[:, Word.OPCODE], waves)
    words = loaded.words[kept].copy()
    first = np.isin(words[:, Word.OPCODE], [ISA.named("histogram").opcode, ISA.named("sample").opcode])
    words[first, Word.WAIT0 : Word.WAIT1 + 3] = [NONE, 0, 0] * 2
    offsets = np.concatenate([[0], np.cumsum(kept)])[loaded.offsets].astype(np.int32)
    return dataclasses.replace(loaded, words=words, offsets=offsets)


def put(runtime: Runtime, logits: np.ndarray) -> None:
    """Logits [rows, vocab] as lm_head leaves them, each SM the candidates of as many tokens."""
    (rows, vocab), sms = logits.shape, runtime.params.n_sm
    parts = np.array_split(np.arange(vocab), sms)
    best = np.stack([ids[logits[:, ids].argmax(axis=1)] for ids in parts])
    low = np.stack([logits[:, ids].min(axis=1) for ids in parts])
    with torch.cuda.stream(runtime.stream):
        runtime["logits"][:rows, :vocab] = torch.from_numpy(logits).to(runtime.device)
        for name, values in (
            ("candidate_value", logits[np.arange(rows), best]),
            ("candidate_low", low),
            ("candidate_id", best.astype(np.int32)),
        ):
            runtime[name][:sms, :rows] = torch.from_numpy(values).to(runtime.device)


def tables(runtime: Runtime, rows: int) -> None:
    held = np.zeros((rows, runtime.max_blocks), np.int32)
    runtime.set_tables(dict.fromkeys(KINDS, held))


def draw(runtime: Runtime, logits: np.ndarray, sampling: Sequence[SamplingParams], keys: Sequence[int]) -> list[int]:
    runtime.set_sequences(keys, [0] * len(keys), sampling=sampling)
    put(runtime, logits)
    found = runtime.tokens_of(runtime.launch())
    assert not found.status.any()
    return found.tokens.tolist()


@pytest.mark.parametrize("name", dict(adversarial(64)))
def test_hard_logits_draw_the_twins_tokens(nano: Runtime, name: str) -> None:
    logits = dict(adversarial(nano.geometry.vocab))[name]
    nano.load(sampling_only(program(nano, 8, n_sm=70)))
    tables(nano, 8)
    params = [*PARAMS, GREEDY]
    params += params[: -len(params) % 8]
    for first in range(0, len(params), 8):
        rows, keys = params[first : first + 8], [first % 50 + row + 1 for row in range(8)]
        expected = [sample_row(logits, row, at) for row, at in zip(rows, keys, strict=True)]
        assert draw(nano, np.tile(logits, (8, 1)), rows, keys) == expected, rows
    nano.finish()


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("spread", [0.0, 0.9, 3.0])
def test_a_full_vocabulary_draws_the_twins_tokens(full_vocabulary: Runtime, rows: int, spread: float) -> None:
    rt = full_vocabulary
    rt.load(sampling_only(program(rt, rows)))
    tables(rt, rows)
    random = np.random.default_rng(rows)
    for turn in range(6):
        logits = random.standard_normal((rows, rt.geometry.vocab)).astype(np.float32) * np.float32(spread)
        if turn == 5:
            logits.sort()  # one SM has all the likeliest: the floor of a small top-k is low, its shortlist long
        params = [MIX[(turn + row) % 8] for row in range(rows)]
        keys = [1 + (turn * 7 + row) % PAGE for row in range(rows)]
        expected = [sample_row(*row) for row in zip(logits, params, keys, strict=True)]
        assert draw(rt, logits, params, keys) == expected
    rt.finish()


def test_a_logit_that_is_not_finite_is_a_status(nano: Runtime) -> None:
    """Set in the head's weights, so that lm_head itself finds it."""
    _, tokens = decode(nano, program(nano, 4), MIX[:4], 3)
    token = next(token for token in range(5, nano.geometry.vocab) if token not in tokens and token > 8)
    head = nano.weights.layout.entry("head")
    at = (head.first_slot + token // 16 * head.k_slots) * SLOT_BYTES // 2 + token % 16 * 32
    value = nano["slots"].view(-1)[at].clone()
    nano["slots"].view(-1)[at] = float("nan")
    try:
        set_up(nano, program(nano, 4), MIX[:4], [1, 1, 0, 1], 1)
        found = nano.tokens_of(nano.launch())
        nano.finish()
    finally:
        nano["slots"].view(-1)[at] = value
    assert found.status.tolist() == [1, 1, 0, 1] and found.tokens.tolist() == [NO_TOKEN] * 4
    assert np.array_equal(decode(nano, program(nano, 4), MIX[:4], 3)[1], tokens)
