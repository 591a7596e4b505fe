"""From the distances of a prompt's layers to its row: for the run that measured, and for who verifies it.

Raw data has a list for each part of a layer (`PARTS`), an item a layer: the distance from float32 of all tokens
together, prefill's and bfloat16's, that of the worst token of each, and which token prefill's is. Beside them: router
flips, [prefill, bfloat16, margin], null of a dense layer; needles and lost ones; the standard deviation of scores, null
where too few keys are in sight. Of a whole prompt: distances of the last logits and of the next step's, bfloat16's at
every position that any length was compared at, free flips of the longest, and whether bits were equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.distances import LEAST_STD, figure, largest, number, read, worst_ratio
from experiments.kernel_checks import SLACK
from mk.results.rows import DISTANCE_BAR, Row

PARTS = ("attention", "ffn", "keys", "values")
GROUPS = {"attention": ("attention",), "ffn": ("ffn",), "kv": ("keys", "values")}  # of a row's fields
MARGIN = 2.0**-7  # of the last chosen logit, that a router may be mistaken by

Pair = tuple[float, float]  # (tested, transformers' in bfloat16)


@dataclass(frozen=True, slots=True)
class Distance:
    """Of one part of a prompt's layer from float32."""

    whole: Pair  # all tokens together
    worst: Pair  # the worst token of each
    token: int  # the tested one's

    @property
    def ratio(self) -> float:
        return worst_ratio([self.whole, self.worst])


@dataclass(frozen=True, slots=True)
class Flips:
    """Tokens whose set of experts is not float32's on the same input.

    margin: the furthest that a logit of a chosen expert lies below that of float32's last one, as a share of that.
    """

    tested: int
    rounded: int
    margin: float


@dataclass(frozen=True, slots=True)
class Worst:
    """Of one part of a prompt's layers: the largest ratio and where it was."""

    distance: Distance
    layer: int

    @property
    def rank(self) -> float:
        """A NaN is the worst of all."""
        return math.inf if math.isnan(self.distance.ratio) else self.distance.ratio


class PromptData:
    """What has been measured of prompts of one length so far: `raw`, as `figures` reads it."""

    def __init__(self, label: str, chosen: int, whole: bool) -> None:
        """label: of the weights. chosen: how many layers are to be measured. whole: and whole prompts after them."""
        self.raw: dict[str, Any] = {"kind": "prefill_layers", "label": label, "chosen": chosen, "whole": whole}
        self.raw |= {name: [] for name in ("layers", *PARTS, "flips", "needles", "lost", "logit_std")}

    def take(
        self,
        layer: int,
        distances: Mapping[str, Distance],
        flips: Flips | None,
        needles: int,
        lost: int,
        logit_std: float | None,
    ) -> None:
        """One layer more."""
        column = {name: [number(x) for x in (*of.whole, *of.worst)] + [of.token] for name, of in distances.items()}
        routed = None if flips is None else [flips.tested, flips.rounded, number(flips.margin)]
        std = None if logit_std is None else number(logit_std)
        column |= {"layers": layer, "flips": routed, "needles": needles, "lost": lost, "logit_std": std}
        for name, value in column.items():
            self.raw[name].append(value)

    def take_logits(self, logits: Pair, next_step: Pair, noise: Sequence[float]) -> None:
        """Distances of a whole prompt. noise: bfloat16's, at every position that any length is compared at."""
        self.raw["logits"], self.raw["next_step"] = ([number(x) for x in pair] for pair in (logits, next_step))
        self.raw["noise"] = [number(x) for x in noise]

    def take_bits(self, checks: Mapping[str, bool], free_flips: tuple[int, int] | None) -> None:
        """Verdicts on bits. free_flips: of the longest prompt."""
        self.raw |= {"bits": dict(checks), "free_flips": free_flips}


def worst(raw: Mapping[str, Any], *parts: str) -> Worst:
    """The layer, of those measured, where one of these parts has the largest ratio."""
    found = [
        Worst(Distance((read(a), read(b)), (read(c), read(d)), token), layer)
        for part in parts
        for layer, (a, b, c, d, token) in zip(raw["layers"], raw[part], strict=True)
    ]
    return max(found, key=lambda each: each.rank)


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Row`."""
    found: dict[str, Any] = {"layer": worst(raw, *PARTS).layer, "needles": sum(raw["needles"])}
    for name, parts in GROUPS.items():
        of = worst(raw, *parts).distance
        found |= {
            f"{name}_error": figure(of.whole[0]),
            f"{name}_error_bf16": figure(of.whole[1]),
            f"{name}_ratio": figure(of.ratio),
        }
    stds = [std for std in raw["logit_std"] if std is not None]
    found["logit_std"] = min(stds, default=None)
    flips = [of for of in raw["flips"] if of is not None]
    if flips:
        margin = largest([read(of[2]) for of in flips])
        found |= {"router_flips": sum(of[0] for of in flips), "router_flips_bf16": sum(of[1] for of in flips)}
        found["router_margin"] = figure(margin)
    if "logits" in raw:
        for name in ("logits", "next_step"):
            found |= {f"{name}_error": raw[name][0], f"{name}_error_bf16": raw[name][1]}
    if raw.get("free_flips") is not None:
        found["free_flips"], found["free_flips_bf16"] = raw["free_flips"]
    return {**found, "checks": verdicts(raw)}


def verdicts(raw: Mapping[str, Any]) -> dict[str, bool]:
    """On prompts of one length. `complete`: whether all that was to be measured is in `raw`."""
    passed = {f"{name}_within_bar": worst(raw, *parts).distance.ratio <= DISTANCE_BAR for name, parts in GROUPS.items()}
    passed["needles_returned"] = sum(raw["lost"]) == 0
    flips = [of for of in raw["flips"] if of is not None]
    if flips:
        passed["router_within_bfloat16"] = sum(of[0] for of in flips) <= sum(of[1] for of in flips) + SLACK
        passed["router_margin"] = all(read(of[2]) <= MARGIN for of in flips)
    stds = [std for std in raw["logit_std"] if std is not None]
    if stds and raw["label"] == "random":  # of a checkpoint they are as they are
        passed["scores_are_sharp"] = min(stds) >= LEAST_STD
    if "logits" in raw:
        most = max(raw["noise"])  # one position's noise is a matter of luck
        for name in ("logits", "next_step"):
            passed[f"{name}_within_bar"] = read(raw[name][0]) <= DISTANCE_BAR * most
    if raw.get("free_flips") is not None:
        passed["free_router_within_bfloat16"] = raw["free_flips"][0] <= raw["free_flips"][1] + SLACK
    passed |= raw.get("bits", {})
    passed["complete"] = len(raw["layers"]) == raw["chosen"] and (not raw["whole"] or "bits" in raw)
    return passed
