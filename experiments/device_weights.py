"""The configured weights for an experiment on a card: random ones are made there, and packed there."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field

import torch

from experiments.console import progress
from experiments.kernel_checks import Oracle, consult
from mk.config import Config
from mk.model.checkpoint import load_checkpoint
from mk.model.hub import resolve_folder
from mk.model.opening import NANO, geometry_of
from mk.model.packing import PackedWeights, WeightLayout
from mk.model.random_weights import RandomWeights
from mk.model.tensors import WeightSource


def open_weights(cfg: Config, device: torch.device) -> WeightSource:
    """The weights that the model and weights groups name. A tokenizer is not needed, so none is opened."""
    model = cfg.model
    if cfg.weights.name == "checkpoint":
        folder = NANO if model.path is None else resolve_folder(model.path, model.revision)  # Config refuses the rest
        return load_checkpoint(folder, window_includes_extra=model.window == "vllm")
    return RandomWeights(geometry_of(model), cfg.weights.seed or 0, device, qk_scale=cfg.weights.qk_scale or 1.0)


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


@dataclass
class HeldWeights:
    """Weights on a device, opened and packed once, with the float32 reference's word on token sequences."""

    source: WeightSource
    packed: PackedWeights
    device: torch.device
    _oracles: dict[int, Oracle] = field(default_factory=dict)

    def oracle(self, length: int) -> Oracle:
        """The reference over the same `length` random tokens, whenever it is asked."""
        if length not in self._oracles:
            started = time.perf_counter()
            tokens = torch.randint(self.source.geometry.vocab, (length,), generator=torch.Generator().manual_seed(1))
            self._oracles[length] = consult(self.source, tokens, self.device)
            print(f"reference of {length} tokens in {time.perf_counter() - started:.1f} s", flush=True)
        return self._oracles[length]


_held: tuple[object, HeldWeights] | None = None


def hold_weights(cfg: Config, device: torch.device) -> HeldWeights:
    """The configured weights, kept for the next call in this process that wants the same: one set at a time."""
    global _held
    wanted = (dataclasses.astuple(cfg.model), dataclasses.astuple(cfg.weights), device)
    if _held is None or _held[0] != wanted:
        _held = None  # before the next ones are made: there is room for one set
        source = open_weights(cfg, device)
        _held = (wanted, HeldWeights(source, pack(source, device), device))
    return _held[1]
