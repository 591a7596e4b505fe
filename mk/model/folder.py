"""Writes a model's folder as Hugging Face code reads it: configs, tokenizer, template, and on request weights."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.torch import save_file

from mk.model import tensors
from mk.model.geometry import Geometry
from mk.model.hub import INDEX, SINGLE
from mk.model.memory import require_disk
from mk.model.tokenizer import MARKERS

PAD = "<PAD>"
BOS = MARKERS["bos"][0]
EOS = MARKERS["end_turn"][0]

TEMPLATE = Path(__file__).with_name("nano") / "chat_template.jinja"  # of every model that is made here

SHARD_BYTES = 5_000_000_000


def special_pieces() -> list[str]:
    """Spellings of the special tokens of a vocabulary made here: padding, then every marker."""
    return [PAD, *(spellings[0] for spellings in MARKERS.values())]


def write_model_folder(folder: Path, geometry: Geometry, tokenizer: tokenizers.Tokenizer) -> None:
    """Write config.json, generation_config.json, tokenizer files and chat template: all but the weights.

    `tokenizer` must hold the special pieces; the configs name their ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = {"bos": BOS, "eos": EOS, "pad": PAD}
    ids = {f"{role}_token_id": tokenizer.token_to_id(piece) for role, piece in pieces.items()}
    _write_json(folder / "config.json", geometry.to_hf_config() | ids)
    _write_json(folder / "generation_config.json", ids | {"do_sample": True, "temperature": 1.0, "top_p": 0.95})
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": geometry.max_positions,
    }
    _write_json(
        folder / "tokenizer_config.json",
        tokenizer_config | {f"{role}_token": piece for role, piece in pieces.items()},
    )
    shutil.copyfile(TEMPLATE, folder / TEMPLATE.name)


def write_weights(folder: Path, source: tensors.WeightSource, shard_bytes: int = SHARD_BYTES) -> None:
    """Write every tensor of a source: model.safetensors, or shards of at most `shard_bytes` and their index.

    Holds one shard in memory at a time. Raises MkError when the disk is too small.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = [[]]
    total = filled = 0
    for name, shape in tensors.tensor_shapes(source.geometry).items():
        nbytes = 2 * math.prod(shape)
        if shards[-1] and filled + nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
        total += nbytes
    require_disk(total, folder, "the checkpoint")
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: source.tensor(name).cpu().contiguous() for name in names}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
