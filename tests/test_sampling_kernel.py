"""The kernel's sampler against its Python twin, bit by bit: the device code itself, run lane by lane on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest

from mk.graph import LAYER_WAVES
from mk.kernel.step_params import HOST_STEP, ROW_SAMPLING, StepParams, pack_sampling
from mk.noise import gumbel_noise, gumbel_of_words, power_rate, token_masses
from mk.programs import Plan
from mk.sampling import NO_TOKEN, SamplingParams, sample_row
from mk.schedule.lower import Program
from mk.shortlist import BINS, Row
from tests.emulated_kernel import Sampler, compile_emulated, pointer
from tests.test_shortlist import PARAMS, adversarial
from tests.tiny_model import tiny_geometry

VOCAB = 2060  # no multiple of a strip, and more than a warp stages at once
GEOMETRY = dataclasses.replace(tiny_geometry(), vocab=VOCAB, logit_scale=1.0)
LOGITS = dict(adversarial(VOCAB))
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_emulated("sampling", GEOMETRY, tmp_path_factory.mktemp("sampler"))


def program(rows: int, n_sm: int = 5, placement: str = "row_owner", draws: bool = True) -> Program:
    return Plan(n_sm, LAYER_WAVES, placement).lower(GEOMETRY, rows, 256, draws)


def test_both_sides_mean_the_same_records(library: ctypes.CDLL) -> None:
    assert library.params_bytes() == ctypes.sizeof(StepParams)
    assert library.sampling_bytes() == ROW_SAMPLING.itemsize
    assert library.host_step_bytes() == HOST_STEP.itemsize
    assert library.bins() == BINS


def test_noise_has_the_twins_bits(library: ctypes.CDLL) -> None:
    random = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32)
    edges = np.arange(-3, 4).astype(np.uint32)  # around every power of two and sqrt(1/2)
    powers = (np.uint32(1) << np.arange(32, dtype=np.uint32))[:, None] + edges
    halves = (np.uint32(0x4AFB0CCC) >> np.arange(32, dtype=np.uint32))[:, None] + edges
    words = np.concatenate(
        [random, np.arange(50_000, dtype=np.uint32), powers.ravel(), (~powers).ravel(), halves.ravel()]
    )
    found = np.empty(len(words), np.float32)
    library.noise(pointer(words), len(words), pointer(found))
    assert found.tobytes() == gumbel_of_words(words).tobytes()
    for seed, position in ((0, 0), (2**64 - 1, 262_143), (0x123456789ABCDEF0, 77)):
        found = np.empty(5000, np.float32)
        library.noise_of_ids(5000, position, ctypes.c_uint64(seed), pointer(found))
        assert found.tobytes() == gumbel_noise(range(5000), seed, position).tobytes()


def test_masses_have_the_twins_bits(library: ctypes.CDLL) -> None:
    below = np.concatenate([np.linspace(0, 40, 200_001), [1e-40, 1e-30, 1e10, 3e38, np.inf]]).astype(np.float32)
    for temperature in (1e-37, 0.3, 1.0, 7.0, 3e38):
        found = np.empty(len(below), np.uint32)
        library.masses(pointer(below), len(below), ctypes.c_float(power_rate(temperature)), pointer(found))
        assert np.array_equal(found, token_masses(-below, np.float32(0), temperature)), temperature


def test_bins_are_the_twins(library: ctypes.CDLL) -> None:
    for name, logits in LOGITS.items():
        for params in PARAMS:
            for floor in (logits.min(), np.sort(logits)[-40], np.float32(-np.inf)):
                row = Row(params, VOCAB, logits.max(), floor)
                found, packed = np.empty(VOCAB, np.int32), pack_sampling([params], VOCAB)
                ends = ctypes.c_float(row.top), ctypes.c_float(row.floor)
                library.row_bins(pointer(logits), VOCAB, *ends, pointer(packed), pointer(found))
                assert np.array_equal(found, row.bins(logits)), (name, params, floor)


@pytest.mark.parametrize("name", LOGITS)
def test_every_cut_of_hard_logits_draws_the_twins_token(library: ctypes.CDLL, name: str) -> None:
    """Eight rows of one batch, each with parameters and a position of its own, step after step."""
    logits = LOGITS[name]
    sampler, params = Sampler(library, program(8)), [*PARAMS, GREEDY]
    params += params[: -len(params) % 8]
    for first in range(0, len(params), 8):
        rows, keys = params[first : first + 8], [first * 8 + row + 1 for row in range(8)]
        sampler.set_rows(rows, keys)
        record = sampler.step(np.tile(logits, (8, 1)))
        assert record["step"] == sampler.params.launched and not record["status"].any()
        expected = [sample_row(logits, row, at) for row, at in zip(rows, keys, strict=True)]
        assert record["tokens"].tolist() == expected, rows
        assert sampler["tokens"].tolist() == expected


@pytest.mark.parametrize(
    ("rows", "n_sm", "placement"),
    [(1, 1, "row_owner"), (8, 1, "row_owner"), (2, 7, "round_robin"), (4, 45, "row_owner"), (3, 132, "row_owner")],
)
def test_any_batch_on_any_sms_draws_the_twins_token(library: ctypes.CDLL, rows: int, n_sm: int, placement: str) -> None:
    """132 SMs for 129 strips: some have no slice. Contexts advance on the device, row 1 is inactive."""
    sampler = Sampler(library, program(rows, n_sm, placement))
    params = [SamplingParams(1.0, 40, 0.9, seed=5), SamplingParams(1.5, seed=6), GREEDY, SamplingParams(0.8, 40)]
    params = (params + [SamplingParams(1.0, top_p=0.9, seed=3)] * 4)[:rows]
    keys = np.array([100, 0, 7, 33, 5, 6, 7, 8][:rows])
    sampler.set_rows(params, keys.tolist())
    random = np.random.default_rng(rows)
    for step in range(3):
        logits = random.standard_normal((rows, VOCAB)).astype(np.float32) * 2
        record = sampler.step(logits)
        at = np.where(keys > 0, keys + step, 0)
        expected = [sample_row(*row) if row[2] else NO_TOKEN for row in zip(logits, params, at.tolist(), strict=True)]
        assert record["tokens"][:rows].tolist() == expected
        assert sampler["keys"][:rows].tolist() == np.where(keys > 0, at + 1, 0).tolist()


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_gives_its_row_a_status(library: ctypes.CDLL, bad: float, draws: bool) -> None:
    sampler = Sampler(library, program(4, draws=draws))
    cut = SamplingParams(1.0, 9, 0.5, seed=1) if draws else GREEDY
    sampler.set_rows([cut, cut, GREEDY, GREEDY], [5, 6, 7, 8])
    logits = np.tile(LOGITS["normal"], (4, 1))
    logits[0, 77] = logits[2, 3] = bad
    logits[3] = np.nan
    record = sampler.step(logits)
    assert record["status"][:4].tolist() == [1, 0, 1, 1]
    assert record["tokens"][1] == sample_row(logits[1], cut, 6)
    assert record["tokens"][3] == NO_TOKEN and sampler["tokens"][3] == 0  # the row keeps its token


def test_a_greedy_program_takes_the_lowest_of_the_likeliest(library: ctypes.CDLL) -> None:
    sampler = Sampler(library, program(2, draws=False))
    for name, logits in LOGITS.items():
        sampler.set_rows([GREEDY] * 2, [3, 4])
        assert sampler.step(np.stack([logits, logits[::-1]]))["tokens"][:2].tolist() == [
            int(logits.argmax()),
            int(logits[::-1].argmax()),
        ], name
