"""Every (schedule, wave order, placement) of the configs lowers and passes the verifier; no two give the same list."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import yaml

from mk.graph import StepShape
from mk.model.geometry import PRESETS, Geometry, rope_layers
from mk.schedule.lower import lower
from mk.schedule.placement import PLACEMENTS
from mk.verify import verify

CONFIGS = Path(__file__).parent.parent / "configs"
BATCHES = (1, 2, 4, 8)

_KINDS = ("full", "sliding", "sliding", "full", "sliding")
_MLPS = ("dense", *("sparse",) * 4)
NANO_LIKE = Geometry(
    hidden=192,
    layers=5,
    q_heads=4,
    kv_heads=2,
    head_dim=128,
    experts=24,
    top_k=4,
    expert_ffn=96,
    dense_ffn=384,
    vocab=2048,
    layer_kinds=_KINDS,
    mlp_kinds=_MLPS,
    rope=rope_layers(_KINDS, _MLPS, 1),
    window=128,
    rms_eps=1e-6,
    rope_theta=50_000.0,
    logit_scale=1.0,
    max_positions=65_536,
)

Case = tuple[str, int, int, tuple[int, int], str, tuple[str, ...], str]


def wave_orders() -> dict[str, tuple[str, ...]]:
    """The orders that `configs/wave_order` names."""
    files = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CONFIGS / "wave_order").glob("*.yaml"))}
    return {name: tuple(file["waves"]) for name, file in files.items() if isinstance(file["waves"], list)}


def cases(model: str, rows: int, n_sm: int) -> Iterator[Case]:
    """static, everyone claims, few claim (fewer for attention than for MoE) x wave orders x placements."""
    schedules = {(0, 0), (n_sm, n_sm), (-(-n_sm // 8), -(-n_sm // 4))}
    orders = wave_orders()
    assert len(orders) >= 4
    for claimers, (name, order), placement in itertools.product(sorted(schedules), orders.items(), PLACEMENTS):
        yield model, rows, n_sm, claimers, name, order, placement


def check(case: Case) -> tuple[str, float]:
    """Lower and verify one case: its schedule hash, and the verifier's seconds."""
    model, rows, n_sm, (attention, moe), name, order, placement = case
    geometry, bucket = (NANO_LIKE, 512) if model == "nano" else (PRESETS["north_mini_code"], 8192)
    shape = StepShape(
        geometry,
        rows,
        bucket,
        n_sm,
        own_rows=placement == "row_owner",
        attention_claimers=attention,
        moe_claimers=moe,
    )
    program = lower(shape, order, placement)
    try:
        report = verify(program)
    except Exception as error:
        error.add_note(f"in {model}, {rows} rows, {n_sm} SMs, claimers {attention}/{moe}, {name}, {placement}")
        raise
    return program.schedule_hash, report.seconds


@pytest.mark.parametrize("n_sm", [1, 4, 132])
def test_nano_schedules(n_sm: int) -> None:
    hashes = {}
    for rows in BATCHES:
        for case in cases("nano", rows, n_sm):
            hashes[case] = check(case)[0]
    if n_sm > 1:  # a single SM leaves nothing to place
        assert len(set(hashes.values())) == len(hashes)


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1), mp_context=spawn) as pool:
        yield pool


@pytest.mark.parametrize("rows", BATCHES)
def test_full_size_schedules(rows: int, workers: ProcessPoolExecutor) -> None:
    every = list(cases("north_mini_code", rows, n_sm=132))
    found = dict(zip(every, workers.map(check, every), strict=True))
    assert len({schedule for schedule, _ in found.values()}) == len(every) == 9 * len(wave_orders())
    slowest = max(found, key=lambda case: found[case][1])
    print(
        f"batch {rows}: {len(every)} schedules, the slowest took the verifier {found[slowest][1]:.2f} s {slowest[3:5]}"
    )
