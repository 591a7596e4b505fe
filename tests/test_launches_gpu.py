"""A step of many launches on a card, with the nano checkpoint: the bits of the step of one launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from experiments import ladder, op_bench, wave_occupancy
from experiments.kernel_checks import Oracle, consult, decode, poison, same_bits
from mk.compose import load_config
from mk.device import DeviceFacts
from mk.kernel.build import DEPENDENT_LAUNCH, NO_RUN_AHEAD, build
from mk.kernel.launches import RUNTIMES
from mk.kernel.runtime import Runtime
from mk.kv import PageAllocator, blocks_of
from mk.model.checkpoint import load_checkpoint
from mk.model.opening import NANO
from mk.model.packing import PackedWeights
from mk.programs import Plan, Programs
from mk.results.rows import Row, read_rows
from mk.splits import SplitPolicy
from tests.interpreter_rig import WAVE_ORDERS

pytestmark = pytest.mark.gpu

SPLITS = SplitPolicy(128, 2)
PAGES = {"full": 64, "sliding": 64}
BUCKET, ROWS, LENGTH = 1024, 3, 280  # past nano's window of 256
STARTS = (0, None, 7)
DEFINES = {"step": (), "waves": (NO_RUN_AHEAD,), "graph": (), "dependent": (DEPENDENT_LAUNCH,)}


@pytest.fixture(scope="module")
def packed() -> PackedWeights:
    source = load_checkpoint(NANO)
    return PackedWeights.from_state(source.tensor, source.geometry, "cuda")


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    source = load_checkpoint(NANO)
    tokens = torch.randint(source.geometry.vocab, (LENGTH,), generator=torch.Generator().manual_seed(3))
    return consult(source, tokens, torch.device("cuda"))


def logits(packed: PackedWeights, oracle: Oracle, launches: str, placement: str, barriers: bool) -> torch.Tensor:
    """float32 [LENGTH, vocab] of the last row."""
    library = build(packed.geometry, SPLITS, defines=DEFINES[launches])
    runtime: Runtime = RUNTIMES[launches](library, packed, PAGES, blocks_of(BUCKET), BUCKET, time_limit_s=1.0)
    plan = Plan(DeviceFacts.read().sms, WAVE_ORDERS["oproj_before_down"], placement, splits=SPLITS, barriers=barriers)
    program = Programs(packed.geometry, ROWS, plan).get(BUCKET)
    pages = PageAllocator(packed.geometry, PAGES, ROWS, runtime.max_blocks, 1)
    poison(runtime)
    found = decode(runtime, program, pages, oracle, STARTS)[0][2]
    runtime.executed_hash()
    return found


@pytest.mark.parametrize("placement", ["round_robin", "row_owner"])
@pytest.mark.timeout(300)
def test_launches_and_barriers_change_no_bit(packed: PackedWeights, oracle: Oracle, placement: str) -> None:
    """Owners keep sums in their SM: a launch makes them again, by the same additions."""
    expected = logits(packed, oracle, "step", placement, barriers=False)
    assert expected.isfinite().all()
    assert same_bits(expected, logits(packed, oracle, "step", placement, barriers=True))
    for launches in ("waves", "graph", "dependent"):
        assert same_bits(expected, logits(packed, oracle, launches, placement, barriers=False)), launches


@pytest.mark.parametrize("launches", ["waves", "graph", "dependent"])
def test_steps_are_queued_ahead(packed: PackedWeights, launches: str) -> None:
    """Contexts advance on the device, tokens are fed back, and every step takes its own ids."""
    g, steps = packed.geometry, 24
    ids = torch.stack([torch.randperm(g.experts)[: g.top_k] for _ in range(steps * g.layers * 8)]).int().cuda()
    ids = ids.reshape(steps, g.layers, 8, g.top_k)
    tokens = {}
    for kind in ("step", launches):
        library = build(g, SPLITS, defines=DEFINES[kind])
        runtime = RUNTIMES[kind](library, packed, PAGES, blocks_of(BUCKET), BUCKET, time_limit_s=1.0)
        plan = Plan(DeviceFacts.read().sms, WAVE_ORDERS["default"], "round_robin", splits=SPLITS)
        runtime.load(Programs(g, 2, plan).get(BUCKET))
        for name in ("pool_full", "pool_sliding"):
            runtime[name].fill_(0.01)
        torch.cuda.synchronize()
        pages = PageAllocator(g, PAGES, 2, runtime.max_blocks, 1)
        for row in range(2):
            pages.reserve(row, 60 + steps)
        runtime.set_tables(pages.table.table)
        runtime.set_sequences([60, 5], [1, 2], steps=steps)
        taken = torch.zeros_like(ids)

        def tell(step: int, runtime: Runtime = runtime, taken: torch.Tensor = taken) -> None:
            runtime.force_routing(ids[step])
            runtime.publish_routing(taken[step])

        launch = runtime.launcher(tell, steps)
        numbers = [launch(step) for step in range(steps)]
        runtime.finish()
        runtime.require_healthy(kind)
        sparse = list(g.sparse_layers)
        assert torch.equal(taken[:, sparse, :2], ids[:, sparse, :2])
        tokens[kind] = [runtime.tokens_of(number).tokens[:2].tolist() for number in numbers]
    assert tokens["step"] == tokens[launches]


NANO_RUN = ["model=nano", "weights=checkpoint", "experiment.batches=[2]", "experiment.context=300",
            "experiment.warmup=2"]  # fmt: skip


def rows_of(folder: Path) -> list[Row]:
    (path,) = folder.iterdir()
    return read_rows(path / "rows.jsonl")


@pytest.mark.timeout(600)
def test_all_arms_of_the_ladder_leave_the_same_bits(tmp_path: Path) -> None:
    """Whether an arm differs from itself is nothing that so short a run can tell: its status is not looked at."""
    more = ["experiment.check_tokens=70", "experiment.steps=20", "experiment.rounds=2", f"run_dir={tmp_path}"]
    ladder.main(load_config(["experiment=ladder", *NANO_RUN, *more]))
    *arms, bound = rows_of(tmp_path)
    assert len(arms) == 10 and bound.bound == "zero_wait"
    for placement in ("round_robin", "row_owner"):
        assert len({row.logits_hash for row in arms if row.placement == placement}) == 1


@pytest.mark.timeout(300)
def test_every_operation_is_timed_alone(tmp_path: Path, figure: Callable[[str], None]) -> None:
    more = ["experiment.steps=5", f"run_dir={tmp_path}"]
    assert op_bench.main(load_config(["experiment=op_bench", *NANO_RUN, *more])) == 0
    rows = rows_of(tmp_path)
    own = {row.kernel: row for row in rows if row.engine == "cuda"}
    assert {"embed", "qkv", "router", "topk", "attn_full", "moe_up", "moe_down", "rmsnorm", "lm_head"} <= set(own)
    peers = {("attention_full", "flash"), ("moe_up", "loop"), ("qkv", "linear")}
    assert peers <= {(row.kernel, row.method) for row in rows}
    figure(", ".join(f"{name} {(row.p50_ms or 0) * 1e3:.1f} us" for name, row in own.items()))
    assert all(0 < (row.p50_ms or 0) < 1 for row in rows)


@pytest.mark.timeout(300)
def test_a_layer_is_seen_in_launches_and_in_one(tmp_path: Path, figure: Callable[[str], None]) -> None:
    more = ["experiment.steps=8", "experiment.layer=2", f"run_dir={tmp_path}"]
    assert wave_occupancy.main(load_config(["experiment=wave_occupancy", *NANO_RUN, *more])) == 0
    rows = rows_of(tmp_path)
    figure("; ".join(f"{row.layer_us:.1f} us, {row.idle_pct:.0f} % idle" for row in rows))
    assert len(rows) == 4
    for row in rows:
        assert row.layer_us and row.p50_ms and row.idle_us_by_wave and 0 < (row.idle_pct or 0) < 100
        assert row.layer_us < row.p50_ms * 1e3  # one of five layers
        assert min(row.idle_us_by_wave.values()) >= 0
    assert (rows[1].layer_us or 0) > (rows[-1].layer_us or 0)  # a graph of launches, the megakernel
