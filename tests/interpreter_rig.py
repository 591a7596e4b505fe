"""A tiny model and nano, their reference results, and machines set up in the middle of a decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import yaml

from mk.config import CONFIG_DIR
from mk.interpreter import Machine, StepInputs, StepOutputs
from mk.kv import KVCache, PageAllocator
from mk.model.checkpoint import load_checkpoint
from mk.model.geometry import Geometry
from mk.model.opening import NANO
from mk.model.packing import PackedWeights
from mk.model.random_weights import RandomWeights, sharp_qk_scale
from mk.model.reference import ReferenceCache, reference_forward
from mk.programs import Plan
from mk.schedule.lower import Program
from tests.tiny_model import tiny_geometry

GEOMETRY = tiny_geometry()  # window 64, one page
NANO_GEOMETRY = Geometry.from_hf_config(NANO)  # window 256
STD = 0.1  # wide enough for the FFN of so narrow a model to matter
MAX_BLOCKS = 9


def _wave_orders() -> dict[str, tuple[str, ...]]:
    """The orders that `configs/wave_order` names; `custom` names none."""
    files = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CONFIG_DIR / "wave_order").glob("*.yaml"))}
    return {name: tuple(file["waves"]) for name, file in files.items() if isinstance(file["waves"], list)}


WAVE_ORDERS = _wave_orders()
Floats = npt.NDArray[np.float32]


def source(geometry: Geometry = GEOMETRY, seed: int = 3) -> RandomWeights:
    """Weights whose attention is sharp, so that a wrong attention shows."""
    return RandomWeights(geometry, seed=seed, std=STD, qk_scale=sharp_qk_scale(geometry, std=STD))


@cache
def tensors(geometry: Geometry) -> Callable[[str], torch.Tensor]:
    """The weights that the rig uses with a geometry: nano's checkpoint with nano's, `source` with any other."""
    return (load_checkpoint(NANO) if geometry == NANO_GEOMETRY else source(geometry)).tensor


@cache
def weights(geometry: Geometry = GEOMETRY) -> PackedWeights:
    return PackedWeights.from_state(tensors(geometry), geometry)


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, GEOMETRY.vocab, (count,), generator=generator).tolist()


@cache
def reference_logits(tokens: tuple[int, ...], dtype: torch.dtype, geometry: Geometry = GEOMETRY) -> Any:
    """Logits [T, vocab] after each token, as a numpy array of that precision."""
    return reference_forward(geometry, tensors(geometry), torch.tensor(tokens), dtype).numpy()


@cache
def reference_kv(tokens: tuple[int, ...], geometry: Geometry = GEOMETRY) -> ReferenceCache:
    held = ReferenceCache()
    if tokens:
        reference_forward(geometry, tensors(geometry), torch.tensor(tokens), cache=held, keep=1)
    return held


@cache
def program(
    rows: int,
    order: str = "default",
    placement: str = "row_owner",
    stealing: bool = False,
    bucket: int = 512,
    n_sm: int = 5,
    geometry: Geometry = GEOMETRY,
    draws: bool = False,
) -> Program:
    """Claimer counts differ from each other and from the SM count, so nothing may assume that they agree."""
    claimers = (min(3, n_sm), min(4, n_sm)) if stealing else (0, 0)
    return Plan(n_sm, WAVE_ORDERS[order], placement, *claimers).lower(geometry, rows, bucket, draws)


class Batch:
    """Sequences in the rows of a machine. A row whose sequence is empty is inactive.

    prompts: tokens of each row that are already in its pages (computed by the reference), and `next_tokens` to decode.
    """

    def __init__(
        self,
        machine: Machine,
        allocator: PageAllocator,
        prompts: Sequence[Sequence[int]],
        next_tokens: Sequence[int],
    ) -> None:
        self.machine = machine
        self.allocator = allocator
        self.keys = np.array([len(prompt) + 1 if prompt else 0 for prompt in prompts], np.int32)
        self.next_tokens: list[int] | None = list(next_tokens)
        geometry = machine.geometry
        for row, prompt in enumerate(prompts):
            if prompt:
                allocator.reserve(row, len(prompt))
                held = reference_kv(tuple(prompt), geometry)
                for layer in range(geometry.layers):
                    k, v = (part[layer].transpose(0, 1).numpy() for part in (held.keys, held.values))
                    if machine.numerics == "kernel":
                        k, v = machine.store(k), machine.store(v)
                    machine.kv.write(allocator.table, row, layer, 0, k, v)

    def inputs(self, steps: int = 1, **extra: Any) -> StepInputs:
        for row, keys in enumerate(self.keys.tolist()):
            if keys:
                if steps == 1:
                    self.allocator.release_window(row, keys - 1)
                self.allocator.reserve(row, keys + steps - 1)
        return StepInputs(self.next_tokens, self.keys, self.allocator.table, **extra)

    def step(self, **extra: Any) -> StepOutputs:
        out = self.machine.step(self.inputs(**extra))
        self.keys[self.keys > 0] += 1
        self.next_tokens = None
        return out

    def decode(self, steps: int, **extra: Any) -> Floats:
        """Logits [steps, rows, vocab], each step fed what the last one sampled."""
        return np.stack([self.step(**extra).logits for _ in range(steps)])


def batch(
    loaded: Program,
    prompts: Sequence[Sequence[int]],
    next_tokens: Sequence[int] | None = None,
    page_seed: int = 1,
    epoch: int = 0,
    **options: Any,
) -> Batch:
    """A machine with a program loaded and the prompts in permuted pages."""
    geometry = loaded.shape.geometry
    kv = KVCache(geometry, len(prompts) * MAX_BLOCKS, len(prompts) * MAX_BLOCKS)
    machine = Machine(weights(geometry), kv, **options)
    machine.load(loaded, epoch=epoch)
    allocator = kv.allocator(len(prompts), MAX_BLOCKS, seed=page_seed)
    return Batch(machine, allocator, prompts, next_tokens or [7] * len(prompts))
