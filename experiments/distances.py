"""How far a layer is from float32, and how far it may be: the bars of the layer-by-layer experiments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mk.errors import MkError
from mk.model.geometry import Geometry

LEAST_STD = 3.0  # of attention's scores: nearer to zero, attention is an average and a wrong one hides


def distance(found: Tensor, exact: Tensor) -> float:
    """|y - y*| / |y*| over all elements."""
    exact = exact.flatten().double()
    return float((found.flatten().to(exact.device).double() - exact).norm() / exact.norm())


def worst_ratio(errors: Sequence[tuple[float, float]]) -> float:
    """The largest tested / bfloat16 of any pair; infinite where only bfloat16 is exact, NaN where a value was NaN."""
    ratios = [
        0.0 if tested == rounded == 0 else tested / rounded if rounded else torch.inf for tested, rounded in errors
    ]
    return largest(ratios)


def number(value: float, digits: int = 6) -> float | None:
    """For raw data: so many digits, and null for what is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def read(value: float | None) -> float:
    """A number of raw data; a NaN fails every verdict, as does an infinite one."""
    return math.nan if value is None else value


def largest(values: Sequence[float]) -> float:
    """NaN where one is."""
    return float(torch.tensor(values, dtype=torch.float64).max())


def figure(value: float) -> float | None:
    """For a row, which has finite figures alone; its verdict says the rest."""
    return value if math.isfinite(value) else None


def chosen_layers(layers: list[int] | None, g: Geometry) -> list[int]:
    """The layers that `experiment.layers` names, None = all. Raises MkError for one that the model has not."""
    chosen = list(range(g.layers)) if layers is None else layers
    for layer in chosen:
        if not 0 <= layer < g.layers:
            raise MkError(f"experiment.layers: layer {layer} must lie in 0..{g.layers - 1}")
    return chosen
