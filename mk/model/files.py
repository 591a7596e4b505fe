"""What a checkpoint's files are, told by one digest that does not read all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

WHOLE, STRIDE = 1 << 28, 1 << 20  # bytes of a file: read whole up to here; from one sample to the next beyond


class Digest(Protocol):
    """Of hashlib."""

    def update(self, data: bytes, /) -> None: ...


def model_files(folder: Path) -> list[Path]:
    """What a folder says of its model: configuration, tokenizer, template and weights."""
    return sorted(path for suffix in ("json", "jinja", "safetensors") for path in folder.glob(f"*.{suffix}"))


def digest_files(folder: Path, digest: Digest) -> None:
    """The model is known by its files, not by its place. Of a file larger than `WHOLE` a sixteenth is read, so spread
    that it meets every matrix of 1 MiB: other weights are noticed, a change of fewer bytes may not be.
    """
    for path in model_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        block = STRIDE if size <= WHOLE else STRIDE // 16
        with path.open("rb") as file:
            for at in range(0, size, STRIDE):
                file.seek(at)
                digest.update(file.read(block))


def folder_digest(folder: Path) -> str:
    """sha256 of what `digest_files` reads."""
    digest = hashlib.sha256()
    digest_files(folder, digest)
    return digest.hexdigest()
