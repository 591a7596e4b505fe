"""Weights of a Hugging Face folder: every header checked when it is opened, every tensor read when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mk.errors import MkError
from mk.model import tensors
from mk.model.geometry import Geometry
from mk.model.hub import resolve_folder, weight_files

_BF16 = "BF16"  # safetensors' spelling

# A part of a stored tensor: None is all of it, (expert, rows) a matrix of a stack over experts.
_Part = tuple[int, slice] | None


@dataclass(frozen=True, slots=True)
class _Storable:
    """A tensor that a checkpoint may hold: its shape, and which of the model's tensors are which parts of it."""

    shape: tuple[int, ...]
    parts: dict[str, _Part]


class Checkpoint:
    """A validated checkpoint folder; a `WeightSource` whose tensors are bf16 on the CPU, mapped from the files."""

    label = "checkpoint"

    def __init__(self, folder: Path, geometry: Geometry) -> None:
        """Open and check all files. Raises MkError naming the tensor that is missing, unexpected or of a wrong kind."""
        self.folder = folder
        self.geometry = geometry
        self._stored = _locate(folder, geometry)

    def tensor(self, hf_name: str) -> torch.Tensor:
        """The bf16 tensor of that name. KeyError if this geometry has none."""
        file, stored_name, part = self._stored[hf_name]
        return file.get_tensor(stored_name) if part is None else file.get_slice(stored_name)[part]


def load_checkpoint(
    path_or_hub_id: str | Path, revision: str | None = None, window_includes_extra: bool = False
) -> Checkpoint:
    """Open a checkpoint folder, or a hub repository at a pinned commit (downloaded once, after a look at the disk).

    Only headers are read here; packing checks the memory it is about to fill. Raises MkError for anything unusable.
    """
    folder = resolve_folder(path_or_hub_id, revision)
    return Checkpoint(folder, Geometry.from_hf_config(folder, window_includes_extra))


def _locate(folder: Path, geometry: Geometry) -> dict[str, tuple[Any, str, _Part]]:
    """The open file, stored name and part of every tensor of the geometry, from the files' headers alone."""
    storable = _storable(geometry)
    found: dict[str, tuple[Any, str, _Part]] = {}
    for file, name in _stored_tensors(folder):
        if name not in storable:
            raise MkError(f"{name}: {_why_unexpected(name)}", hint=f"checkpoint folder {folder}")
        header = file.get_slice(name)
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        if shape != storable[name].shape:
            raise MkError(
                f"{name}: has shape {list(shape)}, config.json implies {list(storable[name].shape)}",
                hint=f"weights and config.json of {folder} belong to different models, or one was edited",
            )
        if dtype != _BF16:
            raise MkError(
                f"{name}: is {dtype}, only {_BF16} weights are supported",
                hint="use the bfloat16 release, or convert the folder to bfloat16",
            )
        for tensor, part in storable[name].parts.items():
            if tensor in found:
                raise MkError(f"{tensor}: stored twice, as {found[tensor][1]} and as {name}")
            found[tensor] = (file, name, part)
    missing = [name for name in tensors.tensor_shapes(geometry) if name not in found]
    if missing:
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise MkError(f"{missing[0]}: missing from the checkpoint{others}", hint=f"checkpoint folder {folder}")
    return found


def _storable(geometry: Geometry) -> dict[str, _Storable]:
    """Every tensor a checkpoint may hold by name: one a matrix, or the experts of a layer stacked.

    transformers stacks gate rows over up rows in memory and writes them so on request; by default it writes one tensor
    a matrix, as the released checkpoint has it.
    """
    g = geometry
    storable = {name: _Storable(shape, {name: None}) for name, shape in tensors.tensor_shapes(g).items()}
    gate, up, everything = slice(0, g.expert_ffn), slice(g.expert_ffn, 2 * g.expert_ffn), slice(None)
    for layer in g.sparse_layers:
        gate_up: dict[str, _Part] = {}
        down: dict[str, _Part] = {}
        for e in range(g.experts):
            gate_up[tensors.expert(layer, e, "gate")] = (e, gate)
            gate_up[tensors.expert(layer, e, "up")] = (e, up)
            down[tensors.expert(layer, e, "down")] = (e, everything)
        prefix = f"model.layers.{layer}.mlp.experts"
        storable[f"{prefix}.gate_up_proj"] = _Storable((g.experts, 2 * g.expert_ffn, g.hidden), gate_up)
        storable[f"{prefix}.down_proj"] = _Storable((g.experts, g.hidden, g.expert_ffn), down)
    return storable


def _stored_tensors(folder: Path) -> Iterator[tuple[Any, str]]:
    for path in weight_files(folder):
        if not path.exists():
            raise MkError(f"{path}: no such weight file", hint="weights are model.safetensors or the files of an index")
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise MkError(f"{path}: not a complete safetensors file ({error})") from error
        for name in file.offset_keys():
            yield file, name


def _why_unexpected(name: str) -> str:
    if name.endswith("bias"):
        return "a bias is not supported"
    if name == "lm_head.weight":
        return f"a separate head is not supported, it is tied to {tensors.EMBED}"
    return "unexpected tensor, config.json implies none of that name"
