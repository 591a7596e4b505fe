"""From what the configuration says about a model to its geometry, weights and tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mk.config import ModelConfig, WeightsConfig
from mk.errors import MkError
from mk.model.checkpoint import load_checkpoint
from mk.model.geometry import PRESETS, Geometry
from mk.model.hub import resolve_folder
from mk.model.packing import PackedWeights
from mk.model.random_weights import RandomWeights
from mk.model.tensors import WeightSource
from mk.model.tokenizer import Tokenizer, load_tokenizer

NANO = Path(__file__).resolve().parent / "nano"


@dataclass(slots=True)
class Model:
    """An opened model. `folder` has its config.json and tokenizer; weights only where they are not random."""

    source: WeightSource
    folder: Path
    tokenizer: Tokenizer
    _packed: PackedWeights | None = field(default=None, init=False, repr=False)

    @property
    def geometry(self) -> Geometry:
        return self.source.geometry

    @property
    def weights_label(self) -> str:
        """What every output says about the weights: "checkpoint" or "random"."""
        return self.source.label

    def packed(
        self, progress: Callable[[int, int], None] | None = None, device: torch.device | str = "cpu"
    ) -> PackedWeights:
        """The weights as decode and prefill read them, packed on `device` at the first call.

        Raises MkError for lack of memory.
        """
        if self._packed is None:
            self._packed = PackedWeights.from_state(self.source.tensor, self.geometry, device, progress)
        return self._packed


def open_model(model: ModelConfig, weights: WeightsConfig, scratch: Path, device: torch.device | str = "cpu") -> Model:
    """Open the configured model. Weights are read, or made, when they are asked for; `device`: where random ones are.

    Random weights of a geometry that has no folder get a synthetic tokenizer, written under `scratch`.
    Raises MkError for a path that is not a model, and for anything in it that this code does not compute.
    """
    folder = _folder(model)
    if weights.name == "checkpoint":
        if folder is None:
            raise MkError(f"model={model.name} has no weights here", hint="weights=random, or model.path=<folder>")
        source: WeightSource = load_checkpoint(folder, window_includes_extra=model.window == "vllm")
        return Model(source, folder, load_tokenizer(folder))
    geometry = geometry_of(model)
    qk_scale = 1.0 if weights.qk_scale is None else weights.qk_scale
    random = RandomWeights(geometry, weights.seed or 0, device, qk_scale=qk_scale)
    if folder is None:
        folder = scratch / "model"
        random.write_folder(folder)
    return Model(random, folder, load_tokenizer(folder))


def geometry_of(model: ModelConfig) -> Geometry:
    """Of the configured model; no weights are opened."""
    extra, folder = model.window == "vllm", _folder(model)
    if folder is None:
        return dataclasses.replace(PRESETS[model.preset], window_includes_extra=extra)
    return Geometry.from_hf_config(folder, extra)


def _folder(model: ModelConfig) -> Path | None:
    """The folder that describes the model, None for a bare geometry."""
    if model.path is not None:
        return resolve_folder(model.path, model.revision)
    return NANO if model.preset == "nano" else None
