"""Free memory and disk, asked before something large is allocated or fetched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from mk.errors import MkError

_GB = 1e9
_RESERVE = 0.05  # share of what is free that is left to everything else


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device; on a CPU what the kernel and the container's limit leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_host_available(), _cgroup_available())


def require_memory(nbytes: int, device: torch.device, what: str) -> None:
    """Raise MkError if `what`, needing `nbytes`, does not fit in the free memory of `device`."""
    free = free_memory(device)
    if nbytes > free * (1 - _RESERVE):
        raise MkError(
            f"{what} needs {nbytes / _GB:.1f} GB of memory on {device}, {free / _GB:.1f} GB is free",
            hint="choose a smaller model (model=slice or model=nano) or a larger device",
        )


def require_disk(nbytes: int, folder: Path, what: str) -> None:
    """Raise MkError if `what`, needing `nbytes`, does not fit on the disk that holds `folder`."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if nbytes > free * (1 - _RESERVE):
        raise MkError(
            f"{what} needs {nbytes / _GB:.1f} GB of disk under {folder}, {free / _GB:.1f} GB is free",
            hint="free some space, or point HF_HOME at a larger disk",
        )


def _host_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # not Linux: all there is


def _cgroup_available() -> int:
    """What a container's memory limit leaves; file cache counts as free, for the kernel drops it under pressure."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return 2**63
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return 2**63
