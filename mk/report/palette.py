"""The colour of every series: one place, so that a series looks the same in every figure.

Within a group colours are apart for every common kind of colour blindness (tests/test_report.py simulates three): they
are Okabe and Ito's, https://jfly.uni-koeln.de/color/. The waves of a schedule's picture are too many for that; there a
branch has a hue, and its waves differ in lightness and stand in a fixed order.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

BLACK, GREY, PALE, WHITE = "#000000", "#5c5c5c", "#d5d9e0", "#ffffff"
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"

Group = Mapping[Hashable, str]
# served: by another engine's server
ENGINE: Group = {
    "cuda": BLUE,
    "vllm": VERMILLION,
    "served": VERMILLION,
    "transformers": GREEN,
    "torch": ORANGE,
    "interpreter": GREY,
}
BOUND: Group = {"zero_wait": SKY, "oracle": PURPLE, "nominal": BLACK, "measured": GREY}  # that no step beats
PLACEMENT: Group = {"row_owner": BLUE, "dependency_affinity": GREEN, "round_robin": ORANGE}
PRODUCTS: Group = {"packed": BLUE, "torch": ORANGE, "product": BLACK}  # product: a large one by torch
POLICY: Group = {"pause": BLUE, "interleave": ORANGE}
PART: Group = {"attention": BLUE, "ffn": ORANGE, "kv": GREEN, "bar": BLACK}  # of a layer, whose distance is measured
BATCH: Group = {1: BLUE, 2: SKY, 4: GREEN, 5: PURPLE, 8: ORANGE}
STEP: Group = {"launches": ORANGE, "kernel": BLUE, "zero_wait": SKY, "nominal": BLACK}  # of how many kernels; bounds
VERDICT: Group = {"differs": BLUE, "no difference": GREY}
SIMULATED: Group = {"bytes_ms": BLUE, "zero_wait_ms": SKY, "busiest_ms": ORANGE, "dependencies_ms": BLACK}
COST: Group = {  # of a layer's time
    "attention": BLUE,
    "kv": SKY,
    "router": GREEN,
    "dense": YELLOW,
    "experts": ORANGE,
    "head": PURPLE,
    "own": GREY,
    "waits": VERMILLION,
    "undivided": PALE,
}
GROUPS: tuple[Group, ...] = (ENGINE, BOUND, PLACEMENT, PRODUCTS, POLICY, PART, BATCH, STEP, VERDICT, SIMULATED, COST)


def colour(group: Group, name: Hashable) -> str:
    """Grey for a series that has none yet."""
    return group.get(name, GREY)


def ink(ground: str) -> str:
    """The colour of text on a bar: white where its light, with sRGB's weights of the channels, is under a quarter."""
    channels = (int(ground[at : at + 2], 16) / 255 for at in (1, 3, 5))
    light = sum(weight * channel**2.2 for weight, channel in zip((0.2126, 0.7152, 0.0722), channels, strict=True))
    return WHITE if light < 0.24 else BLACK


# one hue a branch: attention blue, router green, FFN orange to red, ends of the step purple, residual grey
WAVE = {
    "embed": "#c9b3e0",
    "qkv": "#1f4e9c",
    "attn": "#4f8fd6",
    "attn_combine": "#9cc6ee",
    "oproj": "#16a3b8",
    "router": "#2e8b57",
    "topk": "#8fce8f",
    "route_setup": "#cfe8b4",
    "moe_up": "#f2a33a",
    "moe_down": "#d9541e",
    "moe_combine": "#8f2d1a",
    "dense_up": "#e3c15b",
    "dense_down": "#b5792f",
    "rmsnorm": "#8a8f98",
    "lm_head": "#6a3d9a",
    "histogram": "#b39ddb",
    "shortlist": "#8e7cc3",
    "sample": "#2b1a45",
}
OTHER_WAVE = "#e377c2"  # of operations added later
