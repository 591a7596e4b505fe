"""Every (schedule, wave order, placement) of the configs lowers and passes the verifier; no two give the same list."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import pytest

from mk.model.geometry import PRESETS
from mk.programs import Plan
from mk.schedule.placement import PLACEMENTS
from mk.verify import verify
from tests.interpreter_rig import NANO_GEOMETRY, WAVE_ORDERS

BATCHES = (1, 2, 4, 8)

Case = tuple[str, int, int, tuple[int, int], str, tuple[str, ...], str, bool]


def cases(model: str, rows: int, n_sm: int) -> Iterator[Case]:
    """static, everyone claims, few claim (fewer for attention than for MoE) x wave orders x placements.

    Sampling comes behind the layers, so it is enough to have it in one wave order.
    """
    schedules = {(0, 0), (n_sm, n_sm), (-(-n_sm // 8), -(-n_sm // 4))}
    for claimers, (name, order), placement in itertools.product(sorted(schedules), WAVE_ORDERS.items(), PLACEMENTS):
        for draws in (False, True) if name == "default" else (False,):
            yield model, rows, n_sm, claimers, name, order, placement, draws


def check(case: Case) -> tuple[str, float]:
    """Lower and verify one case: its schedule hash, and the verifier's seconds."""
    model, rows, n_sm, (attention, moe), name, order, placement, draws = case
    geometry, bucket = (NANO_GEOMETRY, 512) if model == "nano" else (PRESETS["north_mini_code"], 8192)
    program = Plan(n_sm, order, placement, attention, moe).lower(geometry, rows, bucket, draws)
    try:
        report = verify(program)
    except Exception as error:
        error.add_note(
            f"in {model}, {rows} rows, {n_sm} SMs, claimers {attention}/{moe}, {name}, {placement}, draws={draws}"
        )
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


@pytest.mark.parametrize("rows", BATCHES)
def test_full_size_schedules(rows: int, figure: Callable[[str], None]) -> None:
    """49 layers on 132 SMs, contexts up to 8192; of smaller batches every fifth unless SOAK is set."""
    chosen = list(cases("north_mini_code", rows, n_sm=132))
    assert len(chosen) == 9 * (len(WAVE_ORDERS) + 1)
    if rows < BATCHES[-1] and "SOAK" not in os.environ:
        chosen = chosen[::5]
        assert {case[6] for case in chosen} == set(PLACEMENTS) and {case[4] for case in chosen} == set(WAVE_ORDERS)
    found = {case: check(case) for case in chosen}
    assert len({schedule for schedule, _ in found.values()}) == len(found)
    slowest = max(found, key=lambda case: found[case][1])
    seconds = found[slowest][1]
    figure(f"full size, batch {rows}: {len(found)} schedules verified, the slowest in {seconds:.2f} s {slowest[3:5]}")
    assert seconds < 10
