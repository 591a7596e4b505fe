"""A map of the card for `placement=sm_map`: how long a hand-off takes between any two SMs, measured by a probe.

A hand-off's way leads through the home of its counter in L2, so it is measured over several lines; both directions of a
pair count as one. The map holds the median of the launches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from experiments.schedule_figures import spearman
from experiments.unread import STEP, require_untouched
from mk.config import Config
from mk.device import DeviceFacts
from mk.errors import MkError
from mk.probes.handoff import launch, matrix, open_library
from mk.results.rows import Row
from mk.results.runs import RunFolder
from mk.schedule.sm_map import SmMap

DIGITS = 1  # of a nanosecond, that are kept


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 where blocks did not stay on their SMs: then the map says nothing of the next launch."""
    require_untouched(cfg, STEP)
    if not torch.cuda.is_available():
        raise MkError("sm_map measures a GPU, and torch sees none here", hint="placement=row_owner needs no map")
    facts = DeviceFacts.read()
    facts.require(cfg.gpu)
    settings, library = cfg.experiment, open_library()
    with RunFolder.create(cfg) as run:
        found = []
        for number in range(settings.launches):
            one = launch(library, facts.sms, facts.shared_bytes, settings.lines, settings.rounds, settings.time_limit_s)
            found.append(one)
            print(f"launch {number + 1} of {settings.launches}: {one.ns.mean():.0f} ns a hand-off", flush=True)
        raw = {
            "kind": "handoffs",
            "pair_ns": [one.ns.round(DIGITS).tolist() for one in found],
            "smid": [one.smid for one in found],
        }
        row = run.append_row(run.measured(raw, engine="cuda", dtype="bfloat16", context=[]), raw)
        sm_map = map_of(facts.name, raw)
        path = run.path / "sm_map.json"
        sm_map.save(path)
        print(f"\n{table(sm_map, raw['smid'][0])}")
        print(
            f"mean {row.handoff_ns:.0f} ns, of an SM {row.handoff_ns_least:.0f} to {row.handoff_ns_most:.0f}; "
            f"rank correlation of two launches {row.handoff_repeats:.2f}"
        )
        print(f"placement=sm_map placement.path={path}")
    return int(not all(row.checks.values()))


def map_of(card: str, raw: dict[str, Any]) -> SmMap:
    ns = np.median(np.array(raw["pair_ns"]), axis=0).round(DIGITS)
    return SmMap.of(card, matrix(ns, len(raw["smid"][0])))


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """pair_ns: of each launch, in the order of `np.triu_indices`; smid: of each launch, by block."""
    sm_map = map_of(row.env["device"], raw)
    means = sm_map.mean_ns()
    ends = [map_of(row.env["device"], {**raw, "pair_ns": [raw["pair_ns"][at]]}).mean_ns() for at in (0, -1)]
    smid = raw["smid"]
    return {
        "handoff_ns": float(means.mean()),
        "handoff_ns_least": float(means.min()),
        "handoff_ns_most": float(means.max()),
        "handoff_repeats": spearman(*ends),
        "checks": {
            "one_block_an_sm": all(len(set(of)) == len(of) for of in smid),
            "blocks_stay": all(of == smid[0] for of in smid),
        },
    }


def table(sm_map: SmMap, smid: list[int]) -> str:
    """The eight SMs of shortest and of longest hand-off."""
    ranked, means = sm_map.ranked().tolist(), sm_map.mean_ns()
    lines = [f"{'':10}{'SM of the schedule':>20}{'of the card':>13}{'ns':>8}"]
    for name, sms in (("shortest", ranked[:8]), ("longest", ranked[-8:])):
        lines += [f"{name:10}{sm:20}{smid[sm]:13}{means[sm]:8.0f}" for sm in sms]
    return "\n".join(lines)
