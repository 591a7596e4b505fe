"""The hash of the sources that a row came from: of the files themselves, or of a commit's, in the same form."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from mk.errors import MkError

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("mk", "prefill", "evals", "experiments", "configs")
FILES = ("run.py", "pyproject.toml", "constraints.txt")


def source_hash(root: Path = ROOT) -> str:
    """Of the files under `root`, where git knows but for ignored ones; the first 16 digits of a sha256 over paths and
    blobs. A file that is not tracked yet may be read as well as any other."""
    known = tracked(root)
    if known is not None:
        known |= set(_git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *FOLDERS, *FILES).split("\0"))
    found = {}
    for path in [*(root / name for name in FILES), *(p for name in FOLDERS for p in sorted((root / name).rglob("*")))]:
        name = path.relative_to(root).as_posix()
        if path.is_file() and "__pycache__" not in path.parts and (known is None or name in known):
            found[name] = _blob(path.read_bytes())
    return _digest(found)


def commit_source_hash(commit: str, root: Path = ROOT) -> str:
    """Of a commit's files. Raises MkError where this repository has no such commit."""
    try:
        listing = _git(root, "ls-tree", "-r", "-z", commit, "--", *FOLDERS, *FILES) if tracked(root) else None
    except (OSError, subprocess.SubprocessError) as error:
        raise MkError(f"this repository has no commit {commit}") from error
    if listing is None:
        raise MkError(f"these sources are in no repository, and so not of commit {commit}")
    entries = [line.split("\t", 1) for line in listing.split("\0") if line]
    return _digest({name: about.split()[2] for about, name in entries})


def tracked(root: Path) -> set[str] | None:
    """The tracked paths of those folders and files; None where `root` is no repository of its own.

    The sources may have been unpacked inside another one, which knows nothing of them, or has them in a folder.
    """
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel").rstrip("\n")).resolve() != root.resolve():
            return None
        return (set(_git(root, "ls-files", "-z", "--", *FOLDERS, *FILES).split("\0")) - {""}) or None
    except (OSError, subprocess.SubprocessError):
        return None


def recent_commits(most: int, root: Path = ROOT) -> list[str]:
    """The newest commits of this repository, HEAD first; none outside of one and before the first."""
    try:
        return _git(root, "rev-list", f"--max-count={most}", "HEAD").split() if tracked(root) else []
    except (OSError, subprocess.SubprocessError):
        return []


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True, timeout=20).stdout


def _blob(content: bytes) -> str:
    """git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _digest(blobs: dict[str, str]) -> str:
    text = "".join(f"{name} {blob}\n" for name, blob in sorted(blobs.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
