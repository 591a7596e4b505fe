"""The kernel wave by wave on a card: every region that a wave writes, against the interpreter's numerics=kernel.

Each wave starts on both sides from the same buffers. What is allowed, and why, is in mk/parts/compare.py. Weights are
random, with q and k scaled so that attention is sharp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from mk.device import DeviceFacts
from mk.interpreter import Machine
from mk.kernel.build import build
from mk.kernel.runtime import Runtime
from mk.kv import KINDS, KVCache, blocks_of
from mk.model.geometry import PRESETS, Geometry
from mk.model.opening import NANO
from mk.model.packing import PackedWeights
from mk.model.random_weights import RandomWeights, sharp_qk_scale
from mk.parts import InterpreterWorker, KernelWorker, StepInput, Tolerances, WaveResult, compare_waves, synthetic_pages
from mk.programs import Plan, Programs
from mk.schedule.cut import waves_of
from mk.splits import SplitPolicy
from tests.interpreter_rig import WAVE_ORDERS

pytestmark = pytest.mark.gpu

SPLITS = SplitPolicy(128, 4)
BUCKET = 1024
PAGES = {"pages_full": 64, "pages_sliding": 64}


@dataclass(frozen=True)
class Rig:
    """One geometry with its weights on both sides, and a runtime."""

    geometry: Geometry
    host: PackedWeights
    runtime: Runtime
    std: float  # of history's K and V: scores of a standard deviation of a few units

    def waves(self, plan: Plan, keys: list[int]) -> Iterator[WaveResult]:
        whole = Programs(self.geometry, len(keys), plan).get(BUCKET)
        caches = [KVCache(self.geometry, **PAGES) for _ in range(2)]
        pages = caches[0].allocator(len(keys), self.runtime.max_blocks, seed=3)
        synthetic_pages(caches[0], pages, keys, seed=4, std=self.std)
        tokens = torch.randint(self.geometry.vocab, (len(keys),), generator=torch.Generator().manual_seed(5)).tolist()
        expected = InterpreterWorker(Machine(self.host, caches[0], "kernel"), whole.shape)
        tested = KernelWorker(self.runtime, whole.shape, caches[1])
        inputs = StepInput(keys, tokens, pages.table)
        return compare_waves(waves_of(whole), expected, tested, inputs, Tolerances(self.geometry))


def rig(geometry: Geometry, std: float) -> Rig:
    scale = sharp_qk_scale(geometry, std=std)
    source = RandomWeights(geometry, 7, "cuda", std, scale)
    weights = PackedWeights.from_state(source.tensor, geometry, "cuda")
    host = weights.to("cpu")
    pages = {kind: PAGES[f"pages_{kind}"] for kind in KINDS}
    runtime = Runtime(build(geometry, SPLITS), weights, pages, blocks_of(BUCKET), BUCKET, time_limit_s=1.0)
    return Rig(geometry, host, runtime, std=1.9)


@pytest.fixture(scope="module")
def nano() -> Rig:
    return rig(Geometry.from_hf_config(NANO), std=0.1)


@pytest.fixture(scope="module")
def slice_() -> Rig:
    return rig(PRESETS["slice"], std=0.02)


def check(waves: Iterator[WaveResult], figure: Callable[[str], None], title: str) -> None:
    """All waves pass; prints the worst of each kind of field, in units of what is allowed."""
    worst: dict[str, tuple[float, str]] = {}
    count, failed = 0, []
    for wave in waves:
        count += 1
        for d in wave.differences:
            worst[d.field] = max(worst.get(d.field, (0.0, "")), (d.worst, wave.name))
            if not d.passed:
                failed.append(f"{wave.name} {d}")
    figure(f"{title}: {count} waves; " + ", ".join(f"{f} {w:.2f} ({n})" for f, (w, n) in sorted(worst.items())))
    assert not failed, "\n".join(failed[:5])


PLANS = [
    ("default", "row_owner", False),
    ("default", "round_robin", False),
    ("parted", "dependency_affinity", True),
    ("oproj_before_down", "row_owner", True),
]


@pytest.mark.parametrize(("order", "placement", "stealing"), PLANS)
def test_nano_wave_by_wave(
    nano: Rig, figure: Callable[[str], None], order: str, placement: str, stealing: bool
) -> None:
    """Contexts at page, split and window edges, past the window, and an inactive row."""
    n_sm = DeviceFacts.read().sms
    plan = Plan(n_sm, WAVE_ORDERS[order], placement, splits=SPLITS)
    if stealing:
        plan = replace(plan, attention_claimers=n_sm, moe_claimers=n_sm)
    keys = [300, 0, 129, 64, 1, 257, 65, 1000]
    check(nano.waves(plan, keys), figure, f"nano {order}, {placement}, {'stealing' if stealing else 'static'}")


@pytest.mark.parametrize(("order", "placement", "stealing"), PLANS[:2])
@pytest.mark.timeout(600)
def test_slice_wave_by_wave(
    slice_: Rig, figure: Callable[[str], None], order: str, placement: str, stealing: bool
) -> None:
    plan = Plan(DeviceFacts.read().sms, WAVE_ORDERS[order], placement, splits=SPLITS)
    check(slice_.waves(plan, [129, 0, 600]), figure, f"slice {order}, {placement}")
