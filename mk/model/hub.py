"""From what `model.path=` says to a folder on this disk: a local folder, or a hub repository at a pinned commit."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mk.errors import MkError
from mk.model.memory import require_disk

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = ["*.json", "*.jinja", "*.safetensors"]


def resolve_folder(path_or_id: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint; a hub id is downloaded into the Hugging Face cache unless it is already there.

    A folder that exists wins over a hub id of the same spelling. `revision` is the commit of a hub id: 40 hex digits,
    because a branch or tag may move. Raises MkError for anything that cannot be had, network and disk included.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    repository = str(path_or_id)
    if not _HUB_ID.fullmatch(repository):
        raise MkError(f"model.path={repository}: no such folder", hint="give a Hugging Face folder or owner/name")
    if revision is None or not _COMMIT.fullmatch(revision):
        raise MkError(
            f"model.path={repository}: a hub model needs a pinned revision, not {revision!r}",
            hint="add model.revision=<the 40 hex digits of the commit>; for a folder, check that it exists",
        )
    return _cached(repository, revision) or _download(repository, revision)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, existing or not: those its index names, or the single one."""
    index = folder / INDEX
    if not index.exists():
        return [folder / SINGLE]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise MkError(f"{index}: not an index of safetensors files ({error!r})") from error
    return [folder / name for name in sorted(names)]


def _cached(repository: str, revision: str) -> Path | None:
    """The complete snapshot of an earlier download; a commit never changes, so the network is not asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    complete = (folder / "config.json").exists() and all(path.exists() for path in weight_files(folder))
    return folder if complete else None


def _download(repository: str, revision: str) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        files = snapshot_download(repository, revision=revision, allow_patterns=_FILES, dry_run=True)
        missing = sum(file.file_size or 0 for file in files if file.will_download)
        require_disk(missing, Path(constants.HF_HUB_CACHE), f"{repository}@{revision[:8]}")
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_FILES))
    except (OSError, ValueError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise MkError(
            f"{repository}@{revision[:8]}: could not be downloaded ({reason})",
            hint="check the network, the id and commit, and access (hf auth login); or give a local folder",
        ) from error
