"""Make .venv ready: create it, install torch, install the rest as constraints.txt pins it. Standard library only.

A stamp in .venv holds the hash of what was installed from; while it matches, this returns at once. torch goes first
and alone, so that a user can choose its build; the packages that come with it are then pinned as they came.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup.json"
LOG = VENV / "setup.log"

# Packages that are wanted for the data in them, not for their code, nor for what that depends on.
DATA = ("nvidia-scicode",)

# Room on disk. A CPU build on Linux x86-64 measures 3.0 GB installed and 0.7 GB of wheels while installing; a CUDA
# build brings NVIDIA's libraries with it.
CPU_GB, CUDA_GB = 5, 11


def fail(message: str, hint: str) -> None:
    sys.exit(f"error: {message}\nhint: {hint}")


def fingerprint() -> str:
    """Hash of everything that decides what gets installed, the choice of torch apart."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt", ".ci/setup.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def check_machine(torch: str, pip_args: str) -> None:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        fail("this Python has no venv module", "install it (Debian, Ubuntu: apt-get install python3-venv)")
    need = CPU_GB if sys.platform != "linux" or "cpu" in torch + pip_args else CUDA_GB
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < need:
        fail(
            f"{free:.1f} GB free on the disk of {ROOT}, set-up needs {need} GB",
            "free some, or take a CPU-only torch (the README has the line for it)",
        )
    print(f"Setting up .venv once: up to {need} GB on disk ({free:.0f} GB free), details in {LOG.relative_to(ROOT)}")


def step(number: int, text: str) -> None:
    print(f"[{number}/4] {text}", flush=True)


def pip_install(*args: str) -> None:
    """Run pip with its output in the log; large downloads are named here, so that a slow line shows as progress."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", *args]
    with LOG.open("a") as log:
        log.write(f"$ {shlex.join(command)}\n")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        assert process.stdout is not None
        tail: list[str] = []
        for line in process.stdout:
            log.write(line)
            tail = [*tail[-14:], line]
            large = re.match(r"\s*Downloading (\S+) \((\d{2,}(?:\.\d+)? MB|[\d.]+ GB)\)", line)
            if large:
                print(f"      {large[1].split('/')[-1].split('#')[0]}, {large[2]}", flush=True)
            elif line.startswith("Installing collected packages"):
                print(f"      unpacking {line.count(',') + 1} packages", flush=True)
    if process.wait():
        sys.stderr.writelines(tail)
        fail("pip could not install this (its last lines are above)", f"see {LOG}; a second call goes on from here")


def installed(*packages: str) -> dict[str, str]:
    """Versions of those of `packages` that .venv has."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "names = {d.metadata['Name'].lower() for d in m.distributions()}\n"
        "print(json.dumps({p: m.version(p) for p in sys.argv[1:] if p in names}))"
    )
    return dict(json.loads(subprocess.check_output([PYTHON, "-c", code, *packages], text=True)))


def constraints() -> Path:
    """constraints.txt, except that torch and triton stay as the chosen torch brought them."""
    keep = installed("torch", "triton")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if line.split("==")[0] not in keep]
    path = VENV / "constraints.txt"
    path.write_text("\n".join(pinned + [f"{name}=={version}" for name, version in keep.items()]) + "\n")
    return path


def tree_gb(folder: Path) -> float:
    return sum(path.lstat().st_size for path in folder.rglob("*")) / 1e9


def set_up(torch: str, pip_args: str) -> None:
    begin = time.monotonic()
    check_machine(torch, pip_args)
    STAMP.unlink(missing_ok=True)  # from here to the end .venv may be half changed
    usable = PYTHON.exists() and subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0
    step(1, "keeping .venv" if usable else f"creating .venv with Python {sys.version.split()[0]}")
    if not usable:
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    step(2, f"installing {' '.join([torch, *shlex.split(pip_args)])} (0.2 GB to fetch without CUDA, 3 GB with it)")
    pip_install(torch, *shlex.split(pip_args))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    step(3, f"installing {len(needed)} packages and what they need, as pinned (about 0.5 GB to fetch)")
    pip_install("--constraint", str(constraints()), *needed)
    pip_install("--constraint", str(constraints()), "--no-deps", *DATA)
    STAMP.write_text(json.dumps({"fingerprint": fingerprint(), "torch": torch, "pip_args": pip_args}))
    step(4, f"ready: {tree_gb(VENV):.1f} GB in .venv, {time.monotonic() - begin:.0f} s")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", required=True)
    parser.add_argument("--pip-args", default="")
    parser.add_argument("--asked", action="store_true", help="torch or pip-args were chosen by hand")
    args = parser.parse_args(argv)
    try:
        make_ready(args)
    except PermissionError as error:
        fail(
            f"no permission for {error.filename or VENV}",
            f"make {VENV} yours (chown -R), or remove it and run make run",
        )


def make_ready(args: argparse.Namespace) -> None:
    """Set up unless the stamp says that the same has been installed."""
    stamp = json.loads(STAMP.read_text()) if STAMP.exists() else {}
    if not args.asked:  # a build chosen in an earlier call stays
        args.torch, args.pip_args = stamp.get("torch", args.torch), stamp.get("pip_args", args.pip_args)
    if not PYTHON.exists() or stamp != {"fingerprint": fingerprint(), "torch": args.torch, "pip_args": args.pip_args}:
        set_up(args.torch, args.pip_args)


if __name__ == "__main__":
    with (ROOT / "pyproject.toml").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second make waits for the first one's set-up
        main(sys.argv[1:])
