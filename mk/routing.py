"""Routing modes: what top-k answers when it is not the router that decides.

The router GEMM runs in every mode and its counter is waited for; a mode only replaces the ids inside top-k, fresh every
step, so nothing upstream of the logits can know them (`oracle` excepted: it exists to price that wait). The weight of a
replaced id is still the sigmoid of its own logit.

A mode is a pure function of (layer, step, row), drawn from counter-based noise: every SM runs top-k for itself, and
interpreter and kernel must come to the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mk.config import RoutingConfig
from mk.errors import MkError
from mk.model.geometry import Geometry
from mk.noise import philox4x32

Ids = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


class Router(Protocol):
    """Called inside top-k."""

    def __call__(self, layer: int, step: int, logits: Logits) -> Ids:
        """Expert ids int64 [rows, top_k], distinct in a row, for router logits float32 [rows, experts].

        `step` counts decode steps from 0. An inactive row's logits are all NaN, its ids are ignored.
        """
        ...


def make_router(config: RoutingConfig, geometry: Geometry, rows: int, steps: int = 0) -> Router | None:
    """The configured mode for a batch of `rows`; None leaves the choice to the model's own router.

    Raises MkError where the mode does not fit the geometry or the batch, or does not last `steps` steps, naming the
    value.
    """
    g = geometry
    if config.name == "checkpoint":
        return None
    if not g.sparse_layers:
        raise MkError(f"routing={config.name} needs a layer with experts, this model has none")
    most = min(rows * g.top_k, g.experts)
    if config.name in ("uniform", "oracle"):
        return Uniform(g, config.seed or 0)
    if config.name == "correlated":
        distinct = config.distinct or 0
        if not g.top_k <= distinct <= most:
            raise MkError(
                f"routing.distinct={distinct} must lie in {g.top_k}..{most}",
                hint=f"{rows} rows choose {g.top_k} of {g.experts} experts each",
            )
        return Pool(g, config.seed or 0, distinct)
    if config.name == "adversarial":
        return Pool(g, config.seed or 0, g.top_k if config.pattern == "all_same" else most)
    if config.name == "replay":
        replay = Replay(Trace.load(Path(str(config.path))), g, rows)
        replay.require_steps(steps)
        return replay
    raise MkError(f"unknown routing {config.name!r}")


def _words(
    geometry: Geometry, seed: int, layer: npt.ArrayLike, step: int, stream: npt.ArrayLike
) -> npt.NDArray[np.uint32]:
    """One random word an expert [..., experts]; `layer` and `stream` broadcast to [...], streams separate the rows."""
    draws = np.broadcast_shapes(np.shape(layer), np.shape(stream))
    counter = np.empty((*draws, -(-geometry.experts // 4), 4), np.uint64)
    counter[..., 0] = np.arange(counter.shape[-2])
    counter[..., 1] = step & 0xFFFFFFFF
    counter[..., 2] = np.asarray(layer)[..., None]
    counter[..., 3] = np.asarray(stream)[..., None]
    return philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(*draws, -1)[..., : geometry.experts]


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every row draws its experts by itself: a row's ids do not depend on the rows beside it.

    They are the ids of an oracle too, which merely tells them to the producer before the step: same bytes, no wait.
    """

    geometry: Geometry
    seed: int

    def __call__(self, layer: int, step: int, logits: Logits) -> Ids:
        return self.draw((layer,), step, len(logits))[0]

    def draw(self, layers: Sequence[int], step: int, rows: int) -> Ids:
        """The ids of several layers at once, int64 [layers, rows, top_k]."""
        words = _words(self.geometry, self.seed, np.array(layers)[:, None], step, np.arange(rows))
        return np.argsort(words, axis=-1, kind="stable")[..., : self.geometry.top_k]


@dataclass(frozen=True, slots=True)
class Pool:
    """The active rows take turns through a random pool of `distinct` experts, top_k at a time.

    They touch exactly `distinct` experts, or as many as they can when too few rows are left. A pool of top_k is all
    rows on one set; one of rows * top_k is no two rows sharing, or where the model has fewer experts, sharing least.
    """

    geometry: Geometry
    seed: int
    distinct: int

    def __call__(self, layer: int, step: int, logits: Logits) -> Ids:
        pool = np.argsort(_words(self.geometry, self.seed, layer, step, stream=0), kind="stable")[: self.distinct]
        turn = np.cumsum(~np.isnan(logits).all(axis=1)) - 1  # place of each row among the active ones
        places = np.maximum(turn, 0)[:, None] * self.geometry.top_k + np.arange(self.geometry.top_k)
        return pool[places % self.distinct]


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded expert ids, int16 [steps, sparse layers, rows, top_k]; -1 marks an inactive row."""

    layers: tuple[int, ...]
    ids: npt.NDArray[np.int16]

    @classmethod
    def record(cls, steps: Sequence[Mapping[int, Ids]]) -> Trace:
        """From each step's ids by layer, as the machine reports them."""
        layers = tuple(sorted(steps[0]))
        return cls(layers, np.array([[step[layer] for layer in layers] for step in steps], np.int16))

    def save(self, path: Path) -> None:
        np.savez_compressed(path, layers=np.array(self.layers, np.int16), ids=self.ids)

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Raises MkError for a file that is missing or is not a trace, and for ids that no router gives."""
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "no such file"
            raise MkError(f"routing.path={path}: {what}", hint="quickstart writes routing.npz in its run folder")
        try:
            with np.load(path) as arrays:
                layers, ids = arrays["layers"], arrays["ids"]
        except Exception as error:  # of broken bytes: zipfile, zlib and numpy's headers raise each its own
            raise MkError(f"routing.path={path}: is not a routing trace ({type(error).__name__})") from error
        for name, array in (("layers", layers), ("ids", ids)):
            if not np.issubdtype(array.dtype, np.integer):
                raise MkError(f"routing.path={path}: {name} are {array.dtype}, not whole numbers")
        if layers.ndim != 1 or ids.ndim != 4 or not ids.size or ids.shape[1] != len(layers):
            shapes = f"ids of shape {list(ids.shape)} for layers of shape {list(layers.shape)}"
            raise MkError(f"routing.path={path}: {shapes}")
        ascending = np.sort(ids, axis=-1)
        inactive = (ids == -1).all(axis=-1)
        twice = (ascending[..., 1:] == ascending[..., :-1]).any(axis=-1)
        for wrong, what in (((ids < 0).any(axis=-1) & ~inactive, "less than 0"), (twice & ~inactive, "twice the same")):
            if wrong.any():
                step, layer, row = np.argwhere(wrong)[0].tolist()
                place = f"step {step}, layer {layers[layer]}, row {row}"
                raise MkError(f"routing.path={path}: {place} has {what}: {ids[step, layer, row].tolist()}")
        return cls(tuple(int(layer) for layer in layers), ids)


@dataclass(frozen=True, slots=True)
class Replay:
    """The ids of a recorded run, step by step."""

    trace: Trace
    geometry: Geometry
    rows: int

    def __post_init__(self) -> None:
        g, ids = self.geometry, self.trace.ids
        if self.trace.layers != g.sparse_layers:
            raise MkError(
                f"routing=replay: the trace has layers {list(self.trace.layers)}, the model routes on layers "
                f"{list(g.sparse_layers)}",
                hint="record one with this model: quickstart writes routing.npz in its run folder",
            )
        if ids.shape[3] != g.top_k or ids.max() >= g.experts:
            raise MkError(
                f"routing=replay: the trace has {ids.shape[3]} ids a row up to {ids.max()}, the model chooses "
                f"{g.top_k} of {g.experts} experts",
                hint="record one with this model: quickstart writes routing.npz in its run folder",
            )
        if ids.shape[2] != self.rows:
            raise MkError(
                f"routing=replay: the trace has {ids.shape[2]} rows, the batch {self.rows}",
                hint=f"batch.size={ids.shape[2]}",
            )

    def require_steps(self, steps: int) -> None:
        """Raises MkError when the trace ends before `steps` steps."""
        has = len(self.trace.ids)
        if steps > has:
            raise MkError(
                f"routing=replay: the trace has {has} steps, this run may take {steps}",
                hint=f"experiment.new_tokens={has + 1} (prefill gives the first)",
            )

    def __call__(self, layer: int, step: int, logits: Logits) -> Ids:
        steps = len(self.trace.ids)
        if step >= steps:
            raise MkError(f"routing=replay: the trace ends after {steps} steps", hint="decode fewer tokens")
        ids = self.trace.ids[step, self.trace.layers.index(layer)].astype(np.int64)
        # a row that was inactive when the trace was made may be active now: any ids will do
        return np.where(ids < 0, np.arange(self.geometry.top_k), ids)
