"""Random delays at every claim, wait and signal, and an SM that is slower than the others: the same bits."""

from __future__ import annotations

import pytest
import torch

from experiments.kernel_checks import STARTS, Oracle, consult, decode, same_bits
from mk.kernel.build import build
from mk.kernel.runtime import DELAYS, Runtime
from mk.kv import PageAllocator, blocks_of
from mk.model.checkpoint import load_checkpoint
from mk.model.opening import NANO
from mk.model.packing import PackedWeights
from mk.programs import Plan, Programs
from mk.schedule.lower import Program
from mk.splits import SplitPolicy
from tests.interpreter_rig import WAVE_ORDERS

pytestmark = pytest.mark.gpu

SPLITS = SplitPolicy(128, 2)
PAGES = {"full": 64, "sliding": 64}
BUCKET = 512
LENGTH = 40
MOST_NS = 3000  # a whole hand-off takes about one microsecond


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    source = load_checkpoint(NANO)
    library = build(source.geometry, SPLITS, defines=(DELAYS,))
    packed = PackedWeights.from_state(source.tensor, source.geometry, "cuda")
    return Runtime(library, packed, PAGES, blocks_of(BUCKET), BUCKET, time_limit_s=5.0)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    source = load_checkpoint(NANO)
    tokens = torch.randint(source.geometry.vocab, (LENGTH,), generator=torch.Generator().manual_seed(3))
    return consult(source, tokens, torch.device("cuda"))


def program(runtime: Runtime, order: str, placement: str, stealing: bool, n_sm: int = 0) -> Program:
    n_sm = n_sm or runtime.facts.sms
    claimers = n_sm if stealing else 0
    plan = Plan(n_sm, WAVE_ORDERS[order], placement, claimers, claimers, splits=SPLITS)
    return Programs(runtime.geometry, len(STARTS), plan).get(BUCKET)


def logits(runtime: Runtime, loaded: Program, oracle: Oracle) -> dict[int, torch.Tensor]:
    pages = PageAllocator(runtime.geometry, PAGES, len(STARTS), runtime.max_blocks, seed=1)
    return decode(runtime, loaded, pages, oracle, STARTS)[0]


@pytest.fixture(scope="module")
def base(runtime: Runtime, oracle: Oracle) -> torch.Tensor:
    runtime.inject_delays()
    return logits(runtime, program(runtime, "default", "row_owner", False), oracle)[0]


@pytest.mark.parametrize(
    ("order", "placement", "stealing"),
    [
        ("default", "row_owner", False),
        ("parted", "row_owner", True),
        ("interleaved", "round_robin", False),
        ("router_first", "dependency_affinity", True),
    ],
)
def test_delays_change_no_bit(
    runtime: Runtime, oracle: Oracle, base: torch.Tensor, order: str, placement: str, stealing: bool
) -> None:
    loaded = program(runtime, order, placement, stealing)
    for seed in range(3):
        runtime.inject_delays(seed=seed, most_ns=MOST_NS)
        for row, found in logits(runtime, loaded, oracle).items():
            assert same_bits(found, base), f"seed {seed}, row {row}"
    runtime.inject_delays()


def test_a_slow_sm_takes_fewer_tiles_when_others_may_take_them(
    runtime: Runtime, oracle: Oracle, base: torch.Tensor
) -> None:
    """At the same bits; a static list gives it as many as before. On 8 SMs, so that each has several tiles a phase."""
    slow, taken = 3, {}
    for stealing in (False, True):
        loaded = program(runtime, "default", "row_owner", stealing, n_sm=8)
        for ns in (0, 20_000):
            runtime.inject_delays(slow_sm=slow, slow_ns=ns)
            runtime["tiles_taken"].zero_()
            torch.cuda.synchronize()
            assert all(same_bits(row, base) for row in logits(runtime, loaded, oracle).values())
            taken[stealing, ns] = int(runtime["tiles_taken"][slow])
            assert ns or int(runtime["tiles_taken"].sum()) > 0
    runtime.inject_delays()
    assert taken[False, 0] == taken[False, 20_000] > 0
    assert taken[True, 20_000] < taken[True, 0]
