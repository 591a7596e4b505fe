"""The configured weights for an experiment on a card: random ones are made there, and packed there."""

from __future__ import annotations

import dataclasses
import time

import torch

from experiments.console import progress
from mk.config import Config
from mk.model.checkpoint import load_checkpoint
from mk.model.geometry import PRESETS, Geometry
from mk.model.hub import resolve_folder
from mk.model.opening import NANO
from mk.model.packing import PackedWeights, WeightLayout
from mk.model.random_weights import RandomWeights
from mk.model.tensors import WeightSource


def open_weights(cfg: Config, device: torch.device) -> WeightSource:
    """The weights that the model and weights groups name. A tokenizer is not needed, so none is opened."""
    model, extra = cfg.model, cfg.model.window == "vllm"
    folder = NANO if model.preset == "nano" else None
    if model.path is not None:
        folder = resolve_folder(model.path, model.revision)
    if cfg.weights.name == "checkpoint":
        assert folder is not None  # Config refuses the rest
        return load_checkpoint(folder, window_includes_extra=extra)
    if folder is None:
        geometry = dataclasses.replace(PRESETS[model.preset], window_includes_extra=extra)
    else:
        geometry = Geometry.from_hf_config(folder, extra)
    return RandomWeights(geometry, cfg.weights.seed or 0, device, qk_scale=cfg.weights.qk_scale or 1.0)


def pack(source: WeightSource, device: torch.device) -> PackedWeights:
    """Packed on the device, with a progress line and the time it took."""
    started = time.perf_counter()
    with progress("pack weights", len(WeightLayout(source.geometry).entries())) as done:
        weights = PackedWeights.from_state(source.tensor, source.geometry, device, lambda packed, _: done(packed))
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    print(f"packed {weights.layout.nbytes / 1e9:.1f} GB in {time.perf_counter() - started:.1f} s", flush=True)
    return weights
