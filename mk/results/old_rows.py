"""Kept rows that are older than digests and raw data: results/SHA256SUMS says what their files were.

Nothing can compute such a row again, so an edit would not show. The list is in the form that `sha256sum -c` reads, and
nothing writes it: whoever means to change such a file, or drops one whose experiment ran again, changes its line too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

SUMS = "SHA256SUMS"


def sum_problems(results: Path, old: set[str]) -> Iterator[str]:
    """What differs between the list in `results` and the files of old rows, `old`: paths relative to `results`."""
    listed = read_sums(results / SUMS)
    for name in sorted(old | listed.keys()):
        if name not in listed:
            yield f"{name} holds rows of schema 1 and {SUMS} has no line for it"
        elif name not in old:
            yield f"{SUMS} names {name}, where no rows of schema 1 are"
        elif (found := hashlib.sha256((results / name).read_bytes()).hexdigest()) != listed[name]:
            yield f"{name} is not as it was kept: its sha256 is {found}, {SUMS} has {listed[name]}"


def read_sums(path: Path) -> dict[str, str]:
    """sha256 in hex by file name; empty without a list. `#` begins a comment."""
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#")]
    return {pair[-1].lstrip("*"): pair[0] for pair in pairs}
